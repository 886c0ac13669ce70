"""Config: the seed's YAML parses unchanged, every wrong setting is told in one line with its path, the plan counts pairs."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mindspeed_odpo import keys
from mindspeed_odpo.config import Config, ParallelConfig, RewardFunction, parameters, parse
from mindspeed_odpo.errors import ConfigError
from mindspeed_odpo.plan import describe

ACTOR = "actor_rollout_ref.actor_rollout"

# tests/st/configs/ray_online_dpo_full_llama32_1b_tp1pp1.yaml of the pull request that brought online DPO to MindSpeed-LLM
SEED_YAML = """
training:
  global_batch_size: 8
  seq_length: 309
  tokenizer_type: PretrainedFromHF
  tokenizer_name_or_path: /data/ppo/llama-3.2-1b-instruct/
  train_iters: 15
  distributed_backend: nccl
  no_shared_storage: true
  save_interval: 10000
  no_load_optim: true
  no_load_rng: true
  bf16: true
  is_instruction_dataset: true
  variable_seq_lengths: true
  stage: ray_online_dpo


actor_rollout_ref:
  actor_rollout:
    model: llama32-1b
    micro_batch_size: 4
    ppo_mini_batch_size: 8
    max_prompt_length: 256
    ppo_epochs: 1
    clip_ratio: 0.2
    entropy_coeff: 0.001
    do_sample: true
    shuffle: false
    use_kv_cache: true
    num_samples_per_step: 4
    tensor_model_parallel_size: 1
    pipeline_model_parallel_size: 1
    lr: 1e-7
    lr_decay_style: constant
    min_lr: 0.0
    weight_decay: 0.0
    lr_warmup_fraction: 0.0
    clip_grad: 10000.0
    adam_beta1: 0.9
    adam_beta2: 0.999
    initial_loss_scale: 4096
    finetune: true
    load: /data/ppo/llama-3.2-1b-instruct-tp1-pp1
    save: ./ckpt
    num_gpus_for_train: 1
    num_gpus_for_infer: 1
    pad_to_multiple_of: 1
    data_path: /data/ppo/llama32-ppo-trl/alpaca
    split: 100,0,0
    no_shuffle: true

  ref:
    model: llama32-1b
    tensor_model_parallel_size: 1
    pipeline_model_parallel_size: 1
    micro_batch_size: 4
    load: /data/ppo/llama-3.2-1b-instruct-tp1-pp1

reward:
  model: llama32-1b
  tensor_model_parallel_size: 1
  pipeline_model_parallel_size: 1
  micro_batch_size: 8
  sequence_parallel: False
  load: /data/ppo/llama-3.2-1b-rm-mcore-tp1-pp1

algorithm:
  gamma: 1.0
  lam: 0.95
  adv_estimator: gae
  kl_penalty: kl
  kl_ctrl:
    type: fixed
    kl_coef: 0.05
  missing_eos_penalty: 1.0

resource_pool:
  actor_rollout: [2]
  ref: [1]
  reward: [1]
"""

LLAMA32_1B = {
    "use_mcore_models": True,
    "sequence_parallel": True,
    "use_mc2": True,
    "use_flash_attn": True,
    "use_rotary_position_embeddings": True,
    "use_fused_rmsnorm": True,
    "use_fused_swiglu": True,
    "rope_scaling_type": "llama3",
    "rope_scaling_factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "max_position_embeddings": 8192,
    "num_layers": 16,
    "hidden_size": 2048,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "make_vocab_size_divisible_by": 1,
    "padded_vocab_size": 128256,
    "disable_bias_linear": True,
    "attention_dropout": 0.0,
    "init_method_std": 0.01,
    "hidden_dropout": 0.0,
    "position_embedding_type": "rope",
    "rotary_base": 500000,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "swiglu": True,
    "no_masked_softmax_fusion": True,
    "attention_softmax_in_fp32": True,
    "no_gradient_accumulation_fusion": True,
    "bf16": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``hf`` (looks like a Hugging Face folder), ``ckpt`` (looks like a checkpoint), ``prompts.jsonl``."""
    for name in ("hf", "ckpt"):
        (tmp_path / name).mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    return tmp_path


@pytest.fixture
def tree(folder: Path) -> dict[str, Any]:
    """The smallest config there is."""
    return {
        "training": {"train_iters": 10, "global_batch_size": 8, "seq_length": 96},
        "actor_rollout_ref": {
            "actor_rollout": {
                "model": "small",
                "load": str(folder / "hf"),
                "data_path": str(folder / "prompts.jsonl"),
                "max_prompt_length": 64,
                "temperature": 1.0,
            },
        },
        "reward": {"functions": "my.rewards:score"},
        "model": {
            "small": {
                "num_layers": 2,
                "hidden_size": 32,
                "ffn_hidden_size": 64,
                "num_attention_heads": 4,
                "num_query_groups": 2,
                "vocab_size": 100,
                "max_position_embeddings": 128,
            }
        },
    }


def with_keys(tree: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A copy of ``tree`` with keys set by path; ``__`` stands for the dot, ``A__`` for the actor's section."""
    tree = copy.deepcopy(tree)
    for path, value in settings.items():
        *parts, last = path.replace("A__", "actor_rollout_ref__actor_rollout__").replace("R__", "actor_rollout_ref__ref__").split("__")
        place = tree
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def error_of(tree: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(with_keys(tree, **settings), "test")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_seed_yaml_parses_unchanged(folder: Path) -> None:
    """Upstream's own system-test YAML, given weights and data, means what upstream's documentation says."""
    from omegaconf import OmegaConf

    seed = OmegaConf.to_container(OmegaConf.create(SEED_YAML))
    assert isinstance(seed, dict)
    given = {"A__load": str(folder / "hf"), "R__load": str(folder / "hf"), "reward__load": str(folder / "hf")}
    given |= {"A__data_path": str(folder / "prompts.jsonl"), "training__tokenizer_name_or_path": str(folder / "hf")}
    config = parse(with_keys(seed, model={"llama32-1b": LLAMA32_1B}, **given), "seed")

    assert (config.stage, config.train_iters, config.global_batch_size, config.bf16) == ("ray_online_dpo", 15, 8, True)
    assert (config.placement, config.actor.parallel, config.rollout.parallel) == ("separate", ParallelConfig(), ParallelConfig())
    assert (config.actor.micro_batch_size, config.reference.micro_batch_size, config.reward.micro_batch_size) == (4, 4, 8)
    assert (config.rollout.max_prompt_length, config.rollout.max_new_tokens, config.rollout.prompts_per_call) == (256, 53, 4)
    assert (config.rollout.num_answers, config.rollout.do_sample) == (2, True)
    optimizer = config.actor.optimizer
    assert (optimizer.lr, optimizer.lr_decay_style, optimizer.clip_grad, optimizer.lr_warmup_iters) == (1e-7, "constant", 10000.0, 0)
    assert config.pairs.missing_eos_penalty == 1.0
    assert not config.data.shuffle
    assert config.actor.finetune and config.save.interval == 10000 and config.save.directory == Path("ckpt").absolute()
    model = config.actor.model
    assert (model.num_query_groups, model.kv_channels, model.vocab_size, model.rope_scaling_factor) == (8, 64, 128256, 32.0)
    assert config.forwarded == {name: {"attention_softmax_in_fp32": True, "init_method_std": 0.01} for name in ("actor_rollout", "ref")}
    dpo, host = config.notices[-2:]
    for name in ("clip_ratio", "gamma", "lam", "adv_estimator", "entropy_coeff", "kl_penalty", "kl_ctrl"):
        assert name in dpo
    assert "use_mc2" in host and "distributed_backend" in host
    assert any("0.7" in line for line in config.notices)
    assert parameters(model) == 1_235_814_400  # as the model's publisher counts


def test_defaults(tree: dict[str, Any], folder: Path) -> None:
    """What the smallest config leaves open: reference, tokenizer, run folder and batch sizes follow from it."""
    config = parse(tree, "test")
    assert config.reference.load == config.tokenizer == config.actor.load == folder / "hf"
    assert config.reference.model == config.actor.model
    assert config.reference.micro_batch_size == config.actor.micro_batch_size == 4
    assert config.run_dir == Path("runs/test").absolute()
    assert config.reward.functions == (RewardFunction("my.rewards:score"),)
    assert (config.actor.model.kv_channels, config.actor.model.padded_vocab_size) == (8, 100)
    assert config.notices == ()
    assert parse(with_keys(tree, training__run_name="mine"), "test").run_dir == Path("runs/mine").absolute()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3  # type: ignore[misc]


def test_null_means_unset(tree: dict[str, Any]) -> None:
    assert parse(with_keys(tree, A__top_p=None, training__run_name=None), "test") == parse(tree, "test")


def test_merge_order_is_model_training_role(tree: dict[str, Any]) -> None:
    """model < training < role, for our own keys and for forwarded ones."""
    base = with_keys(tree, model__small__recompute_num_layers=1, model__small__micro_batch_size=1)
    assert parse(base, "test").forwarded["ref"] == {"recompute_num_layers": 1}
    assert parse(base, "test").actor.micro_batch_size == 1
    base = with_keys(base, training__recompute_num_layers=2, training__micro_batch_size=2)
    assert parse(base, "test").forwarded["ref"] == {"recompute_num_layers": 2}
    config = parse(with_keys(base, R__recompute_num_layers=3, R__micro_batch_size=3), "test")
    assert config.forwarded == {"actor_rollout": {"recompute_num_layers": 2}, "ref": {"recompute_num_layers": 3}}
    assert (config.actor.micro_batch_size, config.reference.micro_batch_size) == (2, 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"training__trainiters": 5}, "unknown key 'training.trainiters'; did you mean 'training.train_iters'?"),
        ({"A__dpo_betta": 0.2}, f"unknown key '{ACTOR}.dpo_betta'; did you mean '{ACTOR}.dpo_beta'?"),
        ({"R__lod": "x"}, "unknown key 'actor_rollout_ref.ref.lod'; did you mean 'actor_rollout_ref.ref.load'?"),
        ({"model__small__num_layer": 2}, "unknown key 'model.small.num_layer'; did you mean 'model.small.num_layers'?"),
        ({"A__global_batch_size": 4}, f"unknown key '{ACTOR}.global_batch_size'; it belongs under training"),
        ({"algorithm__dpo_beta": 0.2}, f"unknown key 'algorithm.dpo_beta'; it belongs under {ACTOR}"),
        ({"dpo__betta": 0.2}, f"unknown key 'dpo.betta'; did you mean '{ACTOR}.dpo_beta'?"),
        ({"trainng__seed": 1}, "unknown section 'trainng'; did you mean 'training'?"),
        ({"seed": 1}, "unknown section 'seed'; it belongs under training"),
        ({"actor_rollout_ref__reff__load": "x"}, "unknown key 'actor_rollout_ref.reff'; did you mean 'ref'?"),
        ({"reward__functions": [{"targt": "a:b"}]}, "unknown key 'reward.functions.targt'; did you mean 'target'?"),
    ],
)
def test_wrong_names(tree: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    """A name that is in no table ends the run, and the message has the right one with its path."""
    assert error_of(tree, **settings) == words


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"A__lr": "fast"}, f"{ACTOR}.lr: expected a number, got 'fast' (str)"),
        ({"A__lr": True}, f"{ACTOR}.lr: expected a number, got true (bool)"),
        ({"training__train_iters": 10.0}, "training.train_iters: expected a whole number, got 10.0 (float)"),
        ({"training__bf16": 1}, "training.bf16: expected true or false, got 1 (int)"),
        ({"training__run_name": 7}, "training.run_name: expected a text, got 7 (int)"),
        ({"A__load": ""}, f"{ACTOR}.load: expected a path, got '' (str)"),
        ({"resource_pool__ref": ["1"]}, "resource_pool.ref: expected a list of whole numbers"),
        ({"training": 3}, "training: expected a section with keys, got 3"),
        ({"A__dpo_loss_type": "sigmoids"}, "apo_down, simpo, got 'sigmoids'; did you mean 'sigmoid'?"),
        ({"A__lr": float("nan")}, f"{ACTOR}.lr: expected a finite number, got nan"),
        ({"reward__functions": "score"}, "reward.functions: expected 'package.module:name' or 'path/to/file.py:name', got 'score'"),
        ({"reward__functions": [{"target": "a:b", "weight": "x"}]}, "weight of a:b: expected a finite number, got 'x'"),
    ],
)
def test_wrong_types(tree: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    """Nothing is bent into shape: the message has the path, what was expected and what came."""
    assert words in error_of(tree, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"training__train_iters": 0}, "training.train_iters: must be >= 1, got 0"),
        ({"A__lr": -1e-6}, f"{ACTOR}.lr: must be >= 0, got -1e-06"),
        ({"A__n_samples_per_prompt": 1}, f"{ACTOR}.n_samples_per_prompt: must be >= 2, got 1"),
        ({"A__dpo_beta": 0}, f"{ACTOR}.dpo_beta: must be > 0, got 0"),
        ({"A__dpo_label_smoothing": 0.5}, f"{ACTOR}.dpo_label_smoothing: must be < 0.5, got 0.5"),
        ({"A__dpo_label_smoothing": 0.1, "A__dpo_loss_type": "ipo"}, "goes with dpo_loss_type sigmoid, robust, exo_pair, simpo, got ipo"),
        ({"A__missing_eos_penalty": -1}, f"{ACTOR}.missing_eos_penalty: must be >= 0, got -1"),
        (
            {"A__missing_eos_penalty": 1, "algorithm__missing_eos_penalty": 2},
            "missing_eos_penalty 1 and algorithm.missing_eos_penalty 2 disagree",
        ),
        ({"A__temperature": 0}, f"{ACTOR}.temperature: must be > 0, got 0"),
        ({"A__top_p": 1.5}, f"{ACTOR}.top_p: must be <= 1, got 1.5"),
        ({"A__top_k": -1}, f"{ACTOR}.top_k: must be >= 0, got -1"),
        ({"A__do_sample": False}, f"{ACTOR}.do_sample: false gives the same answer every time"),
        ({"A__max_prompt_length": 96}, "max_prompt_length 96 leaves no token for the answer in training.seq_length 96"),
        ({"training__seq_length": 129}, "training.seq_length 129 exceeds max_position_embeddings 128 of model.small"),
        ({"A__ppo_epochs": 2}, f"{ACTOR}.ppo_epochs: 2 is not supported, set it to 1"),
        ({"A__ppo_mini_batch_size": 4}, f"{ACTOR}.ppo_mini_batch_size: 4 is not supported, set it to 8"),
        ({"A__min_lr": 1.0}, "min_lr 1 is larger than lr 1e-06"),
        ({"A__lr_warmup_iters": 2, "A__lr_warmup_fraction": 0.1}, "lr_warmup_iters 2 and lr_warmup_fraction 0.1 say the same thing"),
        (
            {"A__lr_warmup_iters": 10, "A__lr_decay_style": "cosine"},
            "lr_warmup_iters 10 must be smaller than the 10 iterations of the decay",
        ),
        ({"A__shuffle": True, "A__no_shuffle": True}, "shuffle: true and no_shuffle: true contradict each other"),
        ({"training__stage": "ray_ppo"}, "training.stage: expected one of ray_online_dpo, ray_dpo, got 'ray_ppo'"),
        ({"training__run_name": "a/b"}, "training.run_name: a plain name without '/', got 'a/b'"),
        ({"A__hidden_dropout": 0.1}, f"{ACTOR}.hidden_dropout: only 0.0 is accepted, got 0.1; dropout is off"),
        ({"model__small__normalization": "LayerNorm"}, "model.small.normalization: only 'RMSNorm' is accepted, got 'LayerNorm'"),
        ({"model__small__num_experts": 8}, "rollout_engine: megatron answers with dense models only, model.small has 8 experts: set"),
        ({"model__small__num_experts": 8, "training__stage": "ray_dpo"}, "training.export_hf: model.small has 8 experts, which have no"),
        ({"model__small__num_experts": 2, "model__small__moe_router_topk": 4}, "moe_router_topk 4 is more than num_experts 2"),
        ({"training__keep_last": -1}, "training.keep_last: must be >= 0, got -1"),
        ({"model__small__num_query_groups": 3}, "model.small: num_attention_heads 4 is not a multiple of num_query_groups 3"),
        ({"model__small__group_query_attention": False}, "group_query_attention is false, but num_query_groups 2 differs from 4 heads"),
        ({"model__small__hidden_size": 30}, "model.small: hidden_size 30 is not a multiple of num_attention_heads 4; set kv_channels"),
        ({"model__small__padded_vocab_size": 99}, "model.small: padded_vocab_size 99 is smaller than vocab_size 100"),
        ({"model__small__vocab_size": None}, "model.small: neither vocab_size nor padded_vocab_size is set"),
        ({"model__small__rope_scaling_type": "llama3"}, "rope_scaling_type: llama3 and rope_scaling_factor go together"),
        ({"model__small__num_layers": None}, "model.small.num_layers is not set"),
        ({"training__train_iters": None}, "training.train_iters is not set"),
        ({"A__model": "smal"}, f"{ACTOR}.model: no model 'smal' (defaults has: small); did you mean 'small'?"),
        ({"reward__functions": None}, "no reward: set reward.functions"),
    ],
)
def test_wrong_settings(tree: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    """Each setting that cannot work is told before anything starts: number, name and what is allowed."""
    assert words in error_of(tree, **settings)


def test_both_spellings_of_the_eos_penalty(tree: dict[str, Any]) -> None:
    """Either place counts, the same number in both is fine, and the one that upstream never read is announced."""
    assert parse(with_keys(tree, A__missing_eos_penalty=0.5), "test").pairs.missing_eos_penalty == 0.5
    both = parse(with_keys(tree, A__missing_eos_penalty=0.5, algorithm__missing_eos_penalty=0.5), "test")
    assert both.pairs.missing_eos_penalty == 0.5 and both.notices == ()
    second = parse(with_keys(tree, algorithm__missing_eos_penalty=0.5), "test")
    assert second.pairs.missing_eos_penalty == 0.5 and "algorithm.missing_eos_penalty 0.5 counts" in second.notices[0]


def test_warmup_fraction_counts_iterations(tree: dict[str, Any]) -> None:
    assert parse(with_keys(tree, A__lr_warmup_fraction=0.3), "test").actor.optimizer.lr_warmup_iters == 3  # of 10
    config = parse(with_keys(tree, A__lr_warmup_fraction=0.3, A__lr_decay_iters=20), "test")
    assert config.actor.optimizer.lr_warmup_iters == 6


def ranks(config: Config) -> tuple[int, int, int, int]:
    return (config.actor.parallel.data, config.rollout.parallel.data, config.reference.parallel.data, config.reward.parallel.data)


def test_ranks_separate(tree: dict[str, Any]) -> None:
    """Upstream's split: train + infer = resource_pool.actor_rollout, whose numbers are one per node."""
    assert ranks(parse(tree, "test")) == (1, 1, 1, 1)
    pools = {"actor_rollout": [2, 4], "ref": [2], "reward": []}
    config = parse(with_keys(tree, A__num_gpus_for_train=4, A__num_gpus_for_infer=2, resource_pool=pools), "test")
    assert ranks(config) == (4, 2, 2, 1)
    words = error_of(tree, A__num_gpus_for_train=2, resource_pool={"actor_rollout": [2]})
    assert "resource_pool.actor_rollout: 2 ranks, but num_gpus_for_train 2 + num_gpus_for_infer 1 = 3" in words


def test_ranks_colocate(tree: dict[str, Any]) -> None:
    """All roles live on the training ranks; a number that says otherwise is an error."""
    tree = with_keys(tree, training__placement="colocate")
    assert ranks(parse(tree, "test")) == (1, 1, 1, 1)
    assert ranks(parse(with_keys(tree, A__num_gpus_for_train=2), "test")) == (2, 2, 2, 2)
    assert ranks(parse(with_keys(tree, resource_pool={"actor_rollout": [2]}), "test")) == (2, 2, 2, 2)
    assert "num_gpus_for_infer: 1 ranks, but with training.placement=colocate all roles live on the same 2" in error_of(
        tree, A__num_gpus_for_train=2, A__num_gpus_for_infer=1
    )
    assert "resource_pool.ref: 1 ranks" in error_of(tree, A__num_gpus_for_train=2, resource_pool={"ref": [1]})


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"A__num_gpus_for_train": 3}, "num_gpus_for_train"),
        ({"A__num_gpus_for_infer": 3}, "num_gpus_for_infer"),
        ({"resource_pool": {"ref": [3]}}, "resource_pool.ref"),
        ({"resource_pool": {"reward": [1, 2]}}, "resource_pool.reward"),
    ],
)
def test_batch_divides_by_every_role(tree: dict[str, Any], settings: dict[str, Any], name: str) -> None:
    words = error_of(tree, **settings)
    assert f"training.global_batch_size 8 does not divide by the 3 data-parallel ranks of {name}: use 6 or 9" in words


def test_data_parallel_ranks_are_what_the_other_sizes_leave(tree: dict[str, Any]) -> None:
    """4 x (2 x 2) training ranks, rollout of TP 2, reference of CP 2; one copy of each model where no number of ranks is given."""
    tree = with_keys(tree, A__tensor_model_parallel_size=2, A__pipeline_model_parallel_size=2, A__inference_tensor_model_parallel_size=2)
    tree = with_keys(tree, R__context_parallel_size=2)
    config = parse(tree, "test")
    sizes = {role: config.parallel(role) for role in config.roles}
    assert sizes == {
        "actor": ParallelConfig(tensor=2, pipeline=2),
        "rollout": ParallelConfig(tensor=2),
        "reference": ParallelConfig(context=2),
        "reward": ParallelConfig(),
    }
    config = parse(with_keys(tree, A__num_gpus_for_train=16, A__num_gpus_for_infer=4, resource_pool={"ref": [2, 2], "reward": [2]}), "test")
    assert ranks(config) == (4, 2, 2, 2)
    assert [config.parallel(role).world_size for role in config.roles] == [16, 4, 4, 2]
    plan = describe(config)
    for line in (
        "layout       policy: TP 2 x PP 2 x DP 4 = 16 ranks\n",
        "             rollout: TP 2 x DP 2 = 4 ranks\n",
        "             reference: TP 1 x CP 2 x DP 2 = 4 ranks\n",
        "             reward: TP 1 x DP 2 = 2 ranks\n",
    ):
        assert line in plan
    assert "2 pairs = 4 sequences, 1 micro-batches, each of 4 data-parallel ranks" in plan


def test_switches_of_the_training_layout(tree: dict[str, Any]) -> None:
    """The keys of Megatron's arguments; sizes in ``training`` are every Megatron model's, and say nothing about a reward function."""
    settings = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
    }
    tree = with_keys(tree, training__overlap_grad_reduce=True, model__small__num_layers=4, model__small__ffn_hidden_size=72)
    tree = with_keys(tree, A__num_layers_per_virtual_pipeline_stage=1, **{f"training__{name}": value for name, value in settings.items()})
    config = parse(tree, "test")
    assert config.actor.parallel == ParallelConfig(tensor=2, pipeline=2, virtual=2, sequence=True, zero1=True, overlap=True)
    assert config.reference.parallel == ParallelConfig(tensor=2, pipeline=2, sequence=True)
    assert (config.reward.parallel, config.rollout.parallel) == (ParallelConfig(), ParallelConfig())
    assert "policy: TP 2 x PP 2 x DP 1 = 4 ranks, 2 chunks a stage, sequence parallel, distributed optimizer, overlapped" in describe(
        config
    )
    assert config.notices == ()
    uneven = parse(with_keys(tree, model__small__num_layers=5, training__num_layers_in_first_pipeline_stage=2,
                             A__num_layers_per_virtual_pipeline_stage=None), "test")  # fmt: skip
    assert uneven.forwarded["actor_rollout"] == {"num_layers_in_first_pipeline_stage": 2}
    assert "not kept apart" in parse(with_keys(tree, A__overlap_param_gather=False), "test").notices[0]


def test_sequence_parallel_of_a_model_file_waits_for_tensor_parallelism(tree: dict[str, Any]) -> None:
    """MindSpeed-LLM's model files say true whatever the size: off with a notice for each role of size 1."""
    config = parse(with_keys(tree, model__small__sequence_parallel=True, R__tensor_model_parallel_size=2), "test")
    assert (config.actor.parallel.sequence, config.reference.parallel.sequence) == (False, True)
    assert [line for line in config.notices if "sequence" in line] == [
        "model.small.sequence_parallel: true is off for actor_rollout, whose tensor_model_parallel_size is 1"
    ]


def test_layouts_in_colocate(tree: dict[str, Any]) -> None:
    """All roles on the same ranks: the reference has the policy's sizes, the rollout its own tensor size."""
    tree = with_keys(tree, training__placement="colocate", A__tensor_model_parallel_size=2, A__num_gpus_for_train=4)
    config = parse(tree, "test")
    assert config.actor.parallel == config.reference.parallel == ParallelConfig(tensor=2, data=2)
    assert config.rollout.parallel == config.reward.parallel == ParallelConfig(data=4)
    own = parse(with_keys(tree, A__inference_tensor_model_parallel_size=2), "test")
    assert own.rollout.parallel == ParallelConfig(tensor=2, data=2)
    assert "ref.tensor_model_parallel_size: 1, but with training.placement=colocate the policy's 2 holds" in error_of(
        tree, R__tensor_model_parallel_size=1
    )
    assert "num_gpus_for_train 3 does not divide by the 2 ranks (TP 2) of one copy of the model: use 2 or 4" in error_of(
        tree, A__num_gpus_for_train=3
    )
    assert "global_batch_size 2 does not divide by the 4 data-parallel ranks" in error_of(tree, training__global_batch_size=2)
    offline = parse(with_keys(tree, training__stage="ray_dpo", training__global_batch_size=2), "test")
    assert offline.actor.parallel.data == 2  # nobody answers: what 4 rollout ranks would need does not matter


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"A__tensor_model_parallel_size": 2, "A__num_gpus_for_train": 5},
            "num_gpus_for_train 5 does not divide by the 2 ranks (TP 2) of one copy of the model: use 4 or 6",
        ),
        (
            {"R__pipeline_model_parallel_size": 2, "resource_pool": {"ref": [1]}},
            "resource_pool.ref 1 does not divide by the 2 ranks (TP 1 x PP 2) of one copy of the model: use 2",
        ),
        (
            {"A__inference_tensor_model_parallel_size": 2, "A__num_gpus_for_infer": 3},
            "num_gpus_for_infer 3 does not divide by the 2 ranks (TP 2) of one copy of the model: use 2 or 4",
        ),
        (
            {"A__tensor_model_parallel_size": 4},
            f"{ACTOR}.tensor_model_parallel_size: 4 does not divide num_query_groups 2 of model.small: use 1 or 2",
        ),
        (
            {"A__inference_tensor_model_parallel_size": 3},
            f"{ACTOR}.inference_tensor_model_parallel_size: 3 does not divide num_attention_heads 4 of model.small: use 1 or 2",
        ),
        (
            {"A__tensor_model_parallel_size": 2, "model__small__vocab_size": 101},
            "2 does not divide padded_vocab_size 101 of model.small: set model.small.make_vocab_size_divisible_by to 2 "
            "(padded_vocab_size, where it is set, to 102)",
        ),
        (
            {"A__pipeline_model_parallel_size": 2, "model__small__num_layers": 3},
            f"{ACTOR}.pipeline_model_parallel_size: 2 does not divide the 3 layers of model.small: use 1 or 3, or set num_layers_in",
        ),
        (
            {"A__pipeline_model_parallel_size": 2, "model__small__num_layers": 8, "A__num_layers_per_virtual_pipeline_stage": 3},
            "num_layers_per_virtual_pipeline_stage: 8 layers of model.small on 2 stages are no whole number of chunks of 3 layers: use 1",
        ),
        ({"A__num_layers_per_virtual_pipeline_stage": 1}, "num_layers_per_virtual_pipeline_stage: 1 cuts pipeline stages, but"),
        ({"A__sequence_parallel": True}, f"{ACTOR}.sequence_parallel: true, but there is one tensor-parallel rank"),
        ({"A__expert_model_parallel_size": 2}, f"{ACTOR}.expert_model_parallel_size: 2, but model.small has no experts: set it to 1"),
        (
            {"A__overlap_param_gather": True, "A__overlap_grad_reduce": True},
            "needs use_distributed_optimizer and overlap_grad_reduce, got false",
        ),
        ({"A__inference_pipeline_model_parallel_size": 2}, "only 1 is accepted, got 2; the rollout is split by tensor and data"),
        ({"A__virtual_pipeline_model_parallel_size": 2}, "only null is accepted, got 2; the number of chunks follows from"),
        ({"reward__tensor_model_parallel_size": 2}, "reward.tensor_model_parallel_size: 2 goes with reward.engine: megatron"),
        (
            {"training__global_batch_size": 6, "A__tensor_model_parallel_size": 2, "A__num_gpus_for_train": 8},
            "global_batch_size 6 does not divide by the 4 data-parallel ranks of num_gpus_for_train: use 4 or 8",
        ),
    ],
)
def test_layouts_that_cannot_be(tree: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    """Told before anything starts, with the numbers and the next ones that are right."""
    assert words in error_of(tree, **settings)


def test_experts_are_shared_by_data_parallel_ranks() -> None:
    from mindspeed_odpo.config import ModelConfig, check_split

    sizes = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 2, "kv_channels": 4}
    moe = ModelConfig("moe", vocab_size=8, padded_vocab_size=8, max_position_embeddings=8, num_experts=4, **sizes)
    check_split(moe, ParallelConfig(expert=2, data=2), "actor.tensor_model_parallel_size")
    with pytest.raises(ConfigError, match="expert_model_parallel_size: 3, but model.moe has 4 experts: use a divisor of them"):
        check_split(moe, ParallelConfig(expert=3, data=3), "actor.tensor_model_parallel_size")


def test_missing_folders_and_files(tree: dict[str, Any], folder: Path) -> None:
    """A missing model, tokenizer or data path is told with the path as it was understood."""
    gone = folder / "gone"
    assert error_of(tree, A__load=str(gone)) == (
        f"{ACTOR}.load: no model folder at {gone}: give a Hugging Face folder (config.json, safetensors, tokenizer)"
    )
    assert "run 'make model'" in error_of(tree, A__load=str(folder / "smollm2-135m"))
    assert "actor_rollout_ref.ref.load: no model folder" in error_of(tree, R__load=str(gone))
    assert "training.tokenizer_name_or_path: no tokenizer folder" in error_of(tree, training__tokenizer_name_or_path=str(gone))
    assert f"{ACTOR}.data_path: no file '{gone}'" in error_of(tree, A__data_path=str(gone))
    reward = with_keys(tree, reward={"load": str(gone)})
    assert "reward.load: no model folder" in error_of(reward)
    assert "reward.functions and reward.load are set: a run has one kind of reward" in error_of(tree, reward__load=str(folder / "hf"))


def test_data_path_may_name_a_packaged_file(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As given first, then by its name among the packaged files; a path with folders is never looked up there."""
    (folder / "data").mkdir()
    (folder / "data" / "packaged.jsonl").write_text("{}\n")
    monkeypatch.setattr("mindspeed_odpo.config.config_root", lambda: folder)
    assert parse(with_keys(tree, A__data_path="packaged.jsonl"), "test").data.path == folder / "data" / "packaged.jsonl"
    assert "no file 'other/packaged.jsonl'" in error_of(tree, A__data_path="other/packaged.jsonl")
    monkeypatch.chdir(folder)
    assert parse(with_keys(tree, A__data_path="prompts.jsonl"), "test").data.path == folder / "prompts.jsonl"


def test_resume_keeps_the_reference(tree: dict[str, Any], folder: Path) -> None:
    """The actor resumes from a checkpoint: the reference must not follow it there, nor the tokenizer."""
    tree = with_keys(tree, A__load=str(folder / "ckpt"))
    assert "the reference must not move on a resume" in error_of(tree)
    assert "holds no tokenizer" in error_of(tree, R__load=str(folder / "hf"))
    whole = with_keys(tree, R__load=str(folder / "hf"), training__tokenizer_name_or_path=str(folder / "hf"))
    assert parse(whole, "test").reference.load == folder / "hf"
    assert "training.no_load_optim: true would resume half a checkpoint" in error_of(whole, training__no_load_optim=True)
    assert parse(with_keys(whole, training__no_load_optim=True, A__finetune=True), "test").actor.finetune
    assert "is neither a Hugging Face folder (no config.json) nor a checkpoint" in error_of(whole, R__load=str(folder / "ckpt"))


def test_a_new_run_from_a_checkpoint_is_held_near_that_checkpoint(tree: dict[str, Any], folder: Path) -> None:
    """The weights that training starts from are the reference, or the first loss would not be ln 2; another one is said."""
    (folder / "ckpt" / "latest_checkpointed_iteration.txt").write_text("3")
    tree = with_keys(tree, A__load=str(folder / "ckpt"), A__finetune=True, training__tokenizer_name_or_path=str(folder / "hf"))
    config = parse(tree, "test")
    assert (config.actor.load, config.reference.load, config.hf_folder) == (folder / "ckpt", folder / "ckpt", folder / "hf")
    assert not any("ln 2" in line for line in config.notices)
    other = parse(with_keys(tree, R__load=str(folder / "hf")), "test")
    assert other.reference.load == folder / "hf"
    assert f"the policy starts from {folder / 'ckpt'}, the reference is {folder / 'hf'}: the first loss is not ln 2" in other.notices
    (folder / "bare").mkdir()
    assert "none is a Hugging Face folder" in error_of(tree, training__tokenizer_name_or_path=str(folder / "bare"))


def test_reference_scores_the_same_ids(tree: dict[str, Any]) -> None:
    other = {**tree["model"]["small"], "vocab_size": 101}
    words = error_of(tree, model__other=other, R__model="other")
    assert "'other' has 101 tokens (101 rows), the policy's 'small' 100 (100)" in words


def test_describe_counts_pairs_and_sequences(tree: dict[str, Any]) -> None:
    """The plan names its unit: 3 pairs are 6 sequences, and with K = 4 the rollout has 4 answers a prompt."""
    config = parse(with_keys(tree, A__micro_batch_size=3, A__n_samples_per_prompt=4, A__num_samples_per_step=2), "test")
    plan = describe(config)
    assert "micro_batch_size: 3 pairs = 6 sequences, 3 micro-batches" in plan
    assert "micro_batch_size: 3 prompts = 12 sequences, 3 micro-batches" in plan
    assert "2 prompts = 8 sequences at a time" in plan
    assert "seq_length 96 = prompt 64 + answer 32" in plan
    assert "10, each 8 pairs; 4 answers a prompt = 32 sequences" in plan
    assert "separate: actor 1 rank, rollout 1 rank, reference 1 rank, reward 1 rank; 4 ranks in all" in plan


def test_parameters_by_hand(tree: dict[str, Any]) -> None:
    """Two layers of 32: q, o 32x32 each; k, v 32x16 each; MLP 3 x 32x64; two norms; embedding 100x32; last norm 32."""
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    assert parameters(parse(tree, "test").actor.model) == 2 * layer + 32 + 100 * 32


def test_no_name_is_in_two_kinds() -> None:
    """Own, forwarded, fixed and ignored names do not overlap, so that each has one meaning."""
    own = {key.name for section in keys.OWN.values() for key in section}
    kinds = [own, set(keys.FORWARDED), set(keys.FIXED), set(keys.WITHOUT_MEANING), set(keys.HOST_ONLY)]
    assert sum(map(len, kinds)) == len(set().union(*kinds))


def test_table_agrees_with_the_dataclasses() -> None:
    """A default stands in two places, the table (docs) and the dataclass (code that builds configs by hand): the same number."""
    from mindspeed_odpo import config as c

    actor = {key.name: key.default for key in keys.OWN[keys.ACTOR]}
    for name, field in ((f.name, f) for f in dataclasses.fields(c.OptimizerConfig)):
        if name != "lr_decay_iters":
            assert actor[name] == field.default, name
    assert (actor["temperature"], actor["top_p"], actor["top_k"], actor["n_samples_per_prompt"]) == (1.0, 1.0, 0, 2)
    loss = c.LossConfig()
    assert (actor["dpo_beta"], actor["dpo_loss_type"], actor["pref_ftx"]) == (loss.beta, loss.loss_type, loss.sft_weight)
    assert (actor["gamma_beta_ratio"], actor["on_nonfinite"]) == (loss.gamma_beta_ratio, c.ActorConfig.nonfinite)
    algorithm = {key.name.removeprefix("pair_"): key.default for key in keys.OWN[keys.ALGORITHM]}
    assert algorithm == dataclasses.asdict(c.PairsConfig())
    data = c.DataConfig(Path())
    assert all(actor[name] == getattr(data, name) for name in ("prompt_key", "shuffle", "chosen_key", "rejected_key", "answer_mask"))


def test_beta_is_a_number_or_one_value_an_epoch(tree: dict[str, Any]) -> None:
    """The last value holds for all later epochs."""
    assert parse(with_keys(tree, A__dpo_beta=0.2), "test").actor.loss.beta == (0.2,)
    loss = parse(with_keys(tree, A__dpo_beta=[0.1, 0.05]), "test").actor.loss
    assert [loss.beta_at(epoch) for epoch in range(4)] == [0.1, 0.05, 0.05, 0.05]
    for beta in (0, -0.1, [0.1, 0], []):
        assert f"{ACTOR}.dpo_beta: " in error_of(tree, A__dpo_beta=beta)


def test_each_loss_has_its_defaults_and_refuses_what_it_does_not_read(tree: dict[str, Any]) -> None:
    """A setting that a loss would ignore is an error, not silence."""

    def loss(**settings: Any) -> Any:
        return parse(with_keys(tree, **{f"A__{key}": value for key, value in settings.items()}), "test").actor.loss

    assert (loss().reduction, loss().padded_length, loss().label_smoothing) == ("sum", 95, 0.0)
    assert (loss(dpo_loss_type="simpo").reduction, loss(dpo_loss_type="simpo").gamma_beta_ratio) == ("masked_mean", 1.4)
    assert loss(dpo_loss_type="exo_pair").label_smoothing == 1e-3
    assert loss(dpo_logps_reduction="padded_mean", pref_ftx=0.5).sft_weight == 0.5
    assert "needs more than 0" in error_of(tree, A__dpo_loss_type="exo_pair", A__dpo_label_smoothing=0)
    assert "gamma_beta_ratio goes with dpo_loss_type simpo only" in error_of(tree, A__gamma_beta_ratio=1.0)
    for kind in set(keys.LOSS_TYPES) - set(keys.SMOOTHED):
        assert "dpo_label_smoothing 0.1 goes with" in error_of(tree, A__dpo_loss_type=kind, A__dpo_label_smoothing=0.1)


def test_only_the_roles_that_are_needed_run(tree: dict[str, Any]) -> None:
    """SimPO has no reference; offline DPO has no rollout and no reward, and asks for none."""
    assert parse(tree, "test").roles == ("actor", "rollout", "reference", "reward")
    assert parse(with_keys(tree, A__dpo_loss_type="simpo"), "test").roles == ("actor", "rollout", "reward")
    offline = {key: value for key, value in with_keys(tree, training__stage="ray_dpo").items() if key != "reward"}
    assert parse(offline, "test").roles == ("actor", "reference")
    plan = describe(parse(offline, "test"))
    assert "preferences" in plan and "reward" not in plan and "sampling" not in plan


def test_the_minimind_schedule_takes_no_warm_up_and_no_floor(tree: dict[str, Any]) -> None:
    """Its end is a tenth of lr, and the plan says so."""
    assert "neither warm-up nor min_lr" in error_of(tree, A__lr_decay_style="minimind", A__min_lr=1e-8)
    assert "neither warm-up nor min_lr" in error_of(tree, A__lr_decay_style="minimind", A__lr_warmup_iters=2)
    assert "lr 0.001 minimind to 0.0001" in describe(parse(with_keys(tree, A__lr_decay_style="minimind", A__lr=1e-3), "test"))


def test_offline_dpo_sets_no_rank_aside_for_a_rollout(tree: dict[str, Any]) -> None:
    settings = {"training__stage": "ray_dpo", "A__num_gpus_for_train": 2, "resource_pool__actor_rollout": [2]}
    offline = {key: value for key, value in with_keys(tree, **settings).items() if key != "reward"}
    assert "separate: actor 2 ranks, reference 1 rank; 3 ranks in all" in describe(parse(offline, "test"))


def test_keys_that_nothing_reads_are_named(tree: dict[str, Any], folder: Path) -> None:
    """Not silent, and still checked: a wrong value of an unused key is an error."""

    def ignored(**settings: Any) -> str:
        lines = [line for line in parse(with_keys(tree, **settings), "test").notices if line.startswith("ignored, nothing reads it")]
        return "".join(lines)

    assert ignored() == ""
    assert ignored(A__answer_mask="dialogue", R__logps_cache=str(folder / "x")).endswith(
        f"{ACTOR}.answer_mask, actor_rollout_ref.ref.logps_cache"
    )
    assert "actor_rollout_ref.ref.micro_batch_size" in ignored(A__dpo_loss_type="simpo", R__micro_batch_size=2)
    offline = {**with_keys(tree, training__stage="ray_dpo", algorithm__pair_ties="first"), "reward": None}
    assert any("algorithm.pair_ties" in line and f"{ACTOR}.temperature" in line for line in parse(offline, "test").notices)
    assert "pair_min_margin: must be >= 0" in error_of(offline, algorithm__pair_min_margin=-1)


def test_one_kind_of_reward(tree: dict[str, Any], folder: Path) -> None:
    def reward(**settings: Any) -> dict[str, Any]:
        return {**tree, "reward": settings}

    judge = parse(reward(judge="my.judges:shorter"), "test")
    assert judge.reward.judge == "my.judges:shorter" and "judge my.judges:shorter, every two answers" in describe(judge)
    classifier = parse(reward(load=str(folder / "hf"), engine="megatron"), "test")
    assert classifier.reward.engine == "megatron" and "on megatron-core" in describe(classifier)
    assert "reward.judge and reward.load are set" in error_of(reward(judge="a:b", load=str(folder / "hf")))
    assert "reward.engine: megatron runs the classifier in reward.load" in error_of(reward(judge="a:b", engine="megatron"))
    assert "reward.judge: expected 'package.module:name'" in error_of(reward(judge="nonsense"))
    assert "no reward: set reward.functions" in error_of(reward())


def test_recorded_answers_need_their_file(tree: dict[str, Any], folder: Path) -> None:
    (folder / "completions.jsonl").write_text("")
    config = parse(with_keys(tree, A__rollout_engine="replay", A__replay_path=str(folder / "completions.jsonl")), "test")
    assert config.rollout.replay == folder / "completions.jsonl"
    assert "recorded answers of" in describe(config) and "sampling" not in describe(config)
    assert "set both or neither" in error_of(tree, A__rollout_engine="replay")
    assert "set both or neither" in error_of(tree, A__replay_path=str(folder / "completions.jsonl"))
    assert "replay_path: no file" in error_of(tree, A__rollout_engine="replay", A__replay_path=str(folder / "gone.jsonl"))


def test_the_plan_counts_every_pair_of_a_prompt(tree: dict[str, Any]) -> None:
    """Four answers make six pairs where every two meet, and the other rules are said."""
    settings = {"A__n_samples_per_prompt": 4, "algorithm__pair_select": "all", "algorithm__pair_ties": "first"}
    plan = describe(parse(with_keys(tree, **settings), "test"))
    assert "each 48 pairs; 4 answers a prompt = 32 sequences" in plan
    assert "every two answers; ties: the first wins" in plan


def test_documentation_is_fresh() -> None:
    """docs/configuration.md is the table's own text: ``odpo check --keys > docs/configuration.md``."""
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == keys.markdown()


def test_an_empty_system_prompt_is_a_value(tree):
    """An empty system turn keeps the chat template from adding its own; unset leaves it to the template."""
    assert parse(tree, "c").data.system_prompt is None
    tree["actor_rollout_ref"]["actor_rollout"]["system_prompt"] = ""
    assert parse(tree, "c").data.system_prompt == ""
    tree["actor_rollout_ref"]["actor_rollout"]["prompt_key"] = ""
    with pytest.raises(ConfigError, match="prompt_key: expected a text, got ''"):
        parse(tree, "c")


def test_a_reward_file_is_found_from_every_directory(tree):
    """Ranks need not run where the command was typed."""
    tree["reward"]["functions"] = "my/rewards.py:score"
    assert parse(tree, "c").reward.functions[0].target == f"{Path.cwd()}/my/rewards.py:score"


def test_a_run_may_end_inside_its_warm_up(tree):
    """The first iterations of a long config, tried out: nothing decays at a constant rate."""
    assert parse(with_keys(tree, A__lr_warmup_iters=10), "c").actor.optimizer.lr_warmup_iters == 10
