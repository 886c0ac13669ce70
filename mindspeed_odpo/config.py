"""One frozen, typed config. YAML is parsed once, here; later nobody sees a DictConfig and nobody assigns to a config.

The dataclasses are what the rest of the package reads; ``parse`` makes them from a composed tree by the table in
``keys.py``; ``plan.py`` prints what will be done. No torch here: a misspelt key is told within a second or two.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mindspeed_odpo.errors import ConfigError, nearest
from mindspeed_odpo.keys import (
    ACTOR,
    ALGORITHM,
    FIXED,
    FORWARDED,
    HOST_ONLY,
    MODEL,
    OWN,
    POOL,
    PREFERENCE_KEYS,
    REF,
    REQUIRED,
    REWARD,
    ROLLOUT_KEYS,
    SAMPLING_KEYS,
    SMOOTHED,
    TRAINING,
    UNEVEN,
    WITHOUT_MEANING,
    Key,
    names,
)


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of one model, in Megatron's names (``configs/rlxf/model/*.yaml``)."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    """True vocabulary: ids that may be sampled."""
    padded_vocab_size: int
    """Rows of the embedding, >= vocab_size; the rows above are never sampled and stand outside every softmax."""
    max_position_embeddings: int
    rotary_base: float = 10000.0
    rope_scaling_factor: float | None = None
    """Llama 3 rope scaling; None: plain rope."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    rotary_interleaved: bool = False
    """True: rope turns neighbouring channels (2i, 2i+1); False: it turns halves (i, i + d/2), as Hugging Face does."""
    norm_epsilon: float = 1e-5
    add_qkv_bias: bool = False
    untie_embeddings_and_output_weights: bool = False
    num_experts: int | None = None
    """Experts of every MLP; None: a dense model."""
    moe_router_topk: int = 2
    """Experts that a token visits; their weights are a softmax over these."""
    moe_ffn_hidden_size: int | None = None
    """Width of one expert; None: ffn_hidden_size."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the router's load-balancing loss in the gradient; it is in no logged loss."""


@dataclass(frozen=True)
class ParallelConfig:
    """Megatron's parallel sizes of one role, and how its gradients and optimizer are spread."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    """Ranks that share the experts; taken out of data and context, as Megatron does."""
    data: int = 1
    virtual: int = 1
    """Model chunks a pipeline stage (interleaved schedule); 1: one."""
    sequence: bool = False
    """Sequence parallelism: activations between tensor-parallel parts are split over the sequence."""
    zero1: bool = False
    """Optimizer state split over data-parallel ranks (Megatron's distributed optimizer)."""
    overlap: bool = False
    """Gradient reduction (with ``zero1`` the weights' gathering too) runs beside the computation."""

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    def data_index(self, rank: int) -> int:
        """The data-parallel index of a rank, in Megatron's order tensor, context, data, pipeline (fastest first)."""
        return rank // (self.tensor * self.context) % self.data

    @property
    def copy_size(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        """``TP 2 x PP 2 x DP 1``: the factors of the world size, those of 1 left out but for tensor and data."""
        sizes = [("TP", self.tensor), ("PP", self.pipeline), ("CP", self.context), ("DP", self.data)]
        words = [f"{name} {size}" for name, size in sizes if size > 1 or name in ("TP", "DP")]
        return " x ".join(words)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule; ``lr_warmup_iters`` and ``lr_decay_iters`` count iterations."""

    lr: float = 1e-6
    min_lr: float = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine", "minimind"] = "constant"
    lr_warmup_iters: int = 0
    lr_decay_iters: int | None = None
    """None: train_iters."""
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8


@dataclass(frozen=True)
class LossConfig:
    loss_type: str = "sigmoid"
    """One of ``loss.LOSS_TYPES``."""
    beta: tuple[float, ...] = (0.1,)
    """One value an epoch; the last one holds for all that follow."""
    label_smoothing: float = 0.0
    reduction: Literal["sum", "masked_mean", "padded_mean"] = "sum"
    """Log-probability of an answer: sum over its tokens, their mean, or their sum over ``padded_length``."""
    padded_length: int = 1
    """The constant divisor of ``padded_mean``: seq_length - 1, positions of a fully padded row."""
    gamma_beta_ratio: float = 1.4
    """SimPO's target margin over beta, nats a token."""
    sft_weight: float = 0.0
    """Weight of the chosen answer's negative log-likelihood a token (``pref_ftx``)."""

    def beta_at(self, epoch: int) -> float:
        """Beta of an epoch, counted from 0."""
        return self.beta[min(epoch, len(self.beta) - 1)]

    @property
    def needs_reference(self) -> bool:
        return self.loss_type != "simpo"


@dataclass(frozen=True)
class PairsConfig:
    missing_eos_penalty: float = 0.0
    """Subtracted from the score of an answer without EOS, before answers are compared; >= 0."""
    select: Literal["best_worst", "best_random", "all"] = "best_worst"
    """Which answers of a prompt meet: best and worst; best and a random one below it; every two."""
    ties: Literal["drop", "first"] = "drop"
    """Equal scores: no pair, or the first answer is preferred (TRL)."""
    identical: Literal["drop", "keep"] = "drop"
    """Two answers of the same tokens: no pair, or one whose gradient is zero and which counts in the mean."""
    unscored: Literal["drop", "stop"] = "drop"
    """An answer without score (None, NaN): in no pair, or the run ends."""
    empty: Literal["drop", "stop"] = "drop"
    """An answer without a token: in no pair, or the run ends."""
    min_margin: float = 0.0
    """Pairs with a smaller reward gap are left out."""


@dataclass(frozen=True)
class ActorConfig:
    model: ModelConfig
    parallel: ParallelConfig
    micro_batch_size: int
    """Pairs (not sequences) in one forward pass."""
    optimizer: OptimizerConfig
    loss: LossConfig
    load: Path
    """A Hugging Face folder (start weights) or a checkpoint folder of ours (resume, unless ``finetune``)."""
    finetune: bool = False
    """True with a checkpoint folder: take its weights only, start at iteration 0."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is NaN or infinite: the run ends, or the update is left out and counted."""


@dataclass(frozen=True)
class RolloutConfig:
    model: ModelConfig
    parallel: ParallelConfig
    num_answers: int = 2
    """K, answers a prompt."""
    max_prompt_length: int = 512
    max_new_tokens: int = 512
    """R = seq_length - max_prompt_length."""
    prompts_per_call: int = 0
    """Prompts decoded together on one rank (upstream's num_samples_per_step); 0: all of the rank's share."""
    do_sample: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    engine: Literal["megatron", "replay"] = "megatron"
    replay: Path | None = None
    """``completions.jsonl`` of a run, for the engine ``replay``."""

    @property
    def seq_length(self) -> int:
        """Longest prompt + answer, tokens."""
        return self.max_prompt_length + self.max_new_tokens


@dataclass(frozen=True)
class ReferenceConfig:
    model: ModelConfig
    parallel: ParallelConfig
    micro_batch_size: int
    """Prompts (K sequences each) in one forward pass."""
    load: Path = Path()
    """A Hugging Face folder or a checkpoint folder of ours."""
    cache: Path | None = None
    """Stage ray_dpo: file of the reference's log-probs; None: named after what it was made from, in runs/ref_logps."""


@dataclass(frozen=True)
class RewardFunction:
    target: str
    """``package.module:name`` or ``path/to/file.py:name``."""
    weight: float = 1.0


@dataclass(frozen=True)
class RewardConfig:
    """One of three kinds: Python functions (their weighted sum), a pairwise judge, or a sequence classifier in ``load``."""

    functions: tuple[RewardFunction, ...] = ()
    judge: str | None = None
    """``package.module:name`` or ``path/to/file.py:name``; asked about every two answers of a prompt, in both orders."""
    load: Path | None = None
    """A Hugging Face sequence classifier with one label."""
    engine: Literal["hf", "megatron"] = "hf"
    """What runs the classifier: transformers, or a megatron-core model with a value head (Llama and Qwen2 only)."""
    micro_batch_size: int = 8
    """Sequences in one forward pass of a reward model."""
    parallel: ParallelConfig = ParallelConfig()


@dataclass(frozen=True)
class DataConfig:
    path: Path
    """A JSONL file."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of {role, content} messages."""
    system_prompt: str | None = None
    """A system turn put in front of every prompt that has none; None: what the chat template does by itself."""
    shuffle: bool = True
    """A new seeded order every epoch; False: file order."""
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    """Stage ray_dpo: columns with the two answers (text beside a prompt column), or the two whole dialogues (messages)."""
    answer_mask: Literal["answer", "dialogue", "dialogue_shifted"] = "answer"
    """Stage ray_dpo: which tokens count. ``answer``: the last assistant turn, all turns before it must be equal.
    ``dialogue``: every assistant turn. ``dialogue_shifted``: the same, off by one, as MiniMind's notebook of 2025."""


@dataclass(frozen=True)
class SaveConfig:
    directory: Path | None = None
    """Checkpoints; None: RUN/checkpoints."""
    interval: int = 0
    """Iterations between checkpoints; 0: only at the end."""
    keep_last: int = 0
    """So many of the newest checkpoints stay; 0: all."""
    asynchronous: bool = False
    """Checkpoints are written beside the training, by forked processes."""
    export_hf: bool = True
    """Write the trained policy as a Hugging Face folder, RUN/policy_hf, at the end."""
    checkpoint_at_end: bool = True

    def due(self, step: int) -> bool:
        return self.interval > 0 and step % self.interval == 0


@dataclass(frozen=True)
class Config:
    stage: str
    train_iters: int
    global_batch_size: int
    """Prompts = pairs an iteration, over all ranks."""
    seed: int
    bf16: bool
    """True: bf16 weights and activations, fp32 masters and reductions. False: fp32."""
    placement: Literal["separate", "colocate"]
    tokenizer: Path
    hf_folder: Path
    """The Hugging Face folder behind policy and reference: end-of-answer ids, files of the exported policy."""
    run_dir: Path
    actor: ActorConfig
    rollout: RolloutConfig
    reference: ReferenceConfig
    reward: RewardConfig
    data: DataConfig
    pairs: PairsConfig
    save: SaveConfig
    cpu_threads: int = 0
    """Torch threads of one rank on a CPU; 0: the cores, shared among the ranks that compute at the same time."""
    timeout_minutes: float = 30.0
    """Longest wait of one collective or one role's call."""
    sync_checksum: Literal["first", "always", "never"] = "first"
    """Weight syncs that compare what the rollout holds with what the actor sent."""
    verify_sync: bool = True
    """After the first sync the rollout's greedy answers to a few prompts must be the actor's own, or the run ends."""
    forwarded: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """``actor_rollout``, ``ref`` -> keys that are not ours and go to Megatron's TransformerConfig (standalone) or the host's parser."""
    notices: tuple[str, ...] = ()
    """Lines printed once at start: ignored keys, defaults that differ from upstream's."""

    def parallel(self, role: str) -> ParallelConfig:
        """Parallel sizes of actor, rollout, reference or reward."""
        return {
            "actor": self.actor.parallel,
            "rollout": self.rollout.parallel,
            "reference": self.reference.parallel,
            "reward": self.reward.parallel,
        }[role]

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that this stage and loss run."""
        if self.stage == "ray_dpo":
            return ("actor", "reference") if self.actor.loss.needs_reference else ("actor",)
        return ("actor", "rollout", *(("reference",) if self.actor.loss.needs_reference else ()), "reward")

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints go."""
        return self.save.directory or self.run_dir / "checkpoints"


# ---------------------------------------------------------------------------------------------------------------------
# parse

_ROLES = (ACTOR, REF, REWARD)
_MISSING = object()


def parse(tree: Mapping[str, Any], name: str) -> Config:
    """The config of a composed tree (``OmegaConf.to_container``), called ``name``.

    Raises ConfigError, one line with the key's full path, for an unknown or misplaced name, a wrong type, a value out
    of range, settings that contradict each other, and paths that are not there.
    """
    return _Parser(tree).config(name)


def parse_model(name: str, content: Mapping[str, Any]) -> ModelConfig:
    """The architecture that one model file alone describes: ``content`` stands under ``name`` in ``model/NAME.yaml``.
    Raises ConfigError as :func:`parse` does."""
    parser = _Parser({"model": {name: content}})
    parser.model_of[ACTOR] = name
    return parser._model(ACTOR, seq_length=1)


class _Parser:
    """One composed tree, checked name by name; ``get`` reads a key with its precedence model < training < role."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        sections = {section.partition(".")[0]: section for section in (TRAINING, REWARD, ALGORITHM, POOL)}
        known = [*sections, "actor_rollout_ref", "model"]
        for top in tree:
            if top not in known:
                raise ConfigError(_unknown_section(str(top), tree[top], known))
        both = _mapping(tree, "actor_rollout_ref")
        for role in both:
            if role not in ("actor_rollout", "ref"):
                raise ConfigError(f"unknown key 'actor_rollout_ref.{role}'{nearest(str(role), ['actor_rollout', 'ref'])}")
        self.trees: dict[str, Mapping[str, Any]] = {section: _mapping(tree, section) for section in (TRAINING, REWARD, ALGORITHM, POOL)}
        self.trees[ACTOR] = _mapping(both, "actor_rollout", "actor_rollout_ref.")
        self.trees[REF] = _mapping(both, "ref", "actor_rollout_ref.")
        models = _mapping(tree, "model")
        self.models = {str(model): _mapping(models, model, "model.") for model in models}
        self.model_of: dict[str, str] = {}
        self.without_meaning: list[str] = []
        self.host_only: list[str] = []
        self.notices: list[str] = []
        for section, content in self.trees.items():
            self._check_names(section, section, content)
        for model, content in self.models.items():
            self._check_names(MODEL, f"model.{model}", content)

    # -- names ---------------------------------------------------------------------------------------------------------

    def _check_names(self, section: str, path: str, content: Mapping[str, Any]) -> None:
        allowed = set(names(section))
        if section in (TRAINING, MODEL, *_ROLES):
            allowed |= {*FORWARDED, *FIXED, *names(MODEL)}
        if section in (TRAINING, MODEL):
            allowed |= {*names(TRAINING), *(key for role in _ROLES for key in names(role))}
        for key, value in content.items():
            if key in WITHOUT_MEANING:
                self.without_meaning.append(f"{path}.{key}")
            elif key in HOST_ONLY:
                self.host_only.append(str(key))
            elif key not in allowed:
                near = nearest(str(key), sorted(allowed)).replace("'", f"'{path}.", 1)
                raise ConfigError(f"unknown key '{path}.{key}'{_elsewhere(str(key), section) or near}")
            elif key in FIXED and value is not None:
                only, why = FIXED[key]
                if value != only or isinstance(value, bool) != isinstance(only, bool):
                    raise ConfigError(f"{path}.{key}: only {_show(only)} is accepted, got {_show(value)}; {why}")

    # -- values --------------------------------------------------------------------------------------------------------

    def _places(self, section: str) -> list[tuple[str, Mapping[str, Any]]]:
        """Where a key of ``section`` may stand, first hit wins."""
        places = [(section, self.trees[section])]
        if section in _ROLES:
            places.append((TRAINING, self.trees[TRAINING]))
        if section in (TRAINING, *_ROLES):
            model = self.model_of.get(ACTOR if section == TRAINING else section)
            if model is not None:
                places.append((f"model.{model}", self.models[model]))
        return places

    def find(self, section: str, name: str) -> tuple[str, Any]:
        """(full path, raw value) of a key; the value is ``_MISSING`` where nobody set it."""
        for place, content in self._places(section):
            if content.get(name) is not None:
                return f"{place}.{name}", content[name]
        return f"{section}.{name}", _MISSING

    def get(self, section: str, name: str, default: Any = _MISSING) -> Any:
        """Typed value of a key of ``section``; ``default`` stands in for the ``<...>`` defaults of the table."""
        key = _key(section, name)
        path, value = self.find(section, name)
        if value is not _MISSING:
            return _typed(path, key, value)
        if key.default is REQUIRED:
            raise ConfigError(f"{path} is not set: {key.doc}")
        return key.default if default is _MISSING else default

    def was_set(self, section: str, name: str) -> bool:
        return self.find(section, name)[1] is not _MISSING

    # -- parts ---------------------------------------------------------------------------------------------------------

    def config(self, name: str) -> Config:
        actor_model = self._pick_model(ACTOR, None)
        self._pick_model(REF, actor_model)
        get = self.get
        iters, batch, length = get(TRAINING, "train_iters"), get(TRAINING, "global_batch_size"), get(TRAINING, "seq_length")
        model, reference_model = self._model(ACTOR, length), self._model(REF, length)
        if (model.vocab_size, model.padded_vocab_size) != (reference_model.vocab_size, reference_model.padded_vocab_size):
            raise ConfigError(
                f"{REF}.model: '{reference_model.name}' has {reference_model.vocab_size} tokens ({reference_model.padded_vocab_size} rows),"
                f" the policy's '{model.name}' {model.vocab_size} ({model.padded_vocab_size}): both must score the same ids"
            )
        parallel = self._parallel(batch, model, reference_model)
        load, reference_load = self._loads()
        tokenizer = self._tokenizer(load)
        run_name = get(TRAINING, "run_name", name)
        if "/" in run_name or run_name in ("", ".", ".."):
            raise ConfigError(f"training.run_name: a plain name without '/', got '{run_name}'; for another folder set training.run_dir")
        run_dir = get(TRAINING, "run_dir", Path("runs", run_name).absolute())
        for option in ("no_load_optim", "no_load_rng"):
            if get(TRAINING, option) and not get(ACTOR, "finetune") and not _is_hf(load):
                raise ConfigError(f"training.{option}: true would resume half a checkpoint; set {ACTOR}.finetune=true to take weights only")
        for option, only, why in (
            ("ppo_epochs", 1, "this version makes one pass over the pairs of an iteration"),
            ("ppo_mini_batch_size", batch, "this version makes one optimizer step an iteration, over training.global_batch_size pairs"),
        ):
            if get(ACTOR, option, only) != only:
                raise ConfigError(f"{self.find(ACTOR, option)[0]}: {get(ACTOR, option)} is not supported, set it to {only}; {why}")
        micro = get(ACTOR, "micro_batch_size")
        config = Config(
            stage=get(TRAINING, "stage"),
            train_iters=iters,
            global_batch_size=batch,
            seed=get(TRAINING, "seed"),
            bf16=get(TRAINING, "bf16"),
            placement=get(TRAINING, "placement"),
            tokenizer=tokenizer,
            hf_folder=self._hf_folder(reference_load, load, tokenizer),
            run_dir=run_dir,
            actor=ActorConfig(
                model,
                parallel[ACTOR],
                micro,
                self._optimizer(iters),
                self._loss(length),
                load=load,
                finetune=get(ACTOR, "finetune"),
                nonfinite=get(ACTOR, "on_nonfinite"),
            ),
            rollout=self._rollout(model, parallel["rollout"], length),
            reference=ReferenceConfig(
                reference_model, parallel[REF], get(REF, "micro_batch_size", micro), reference_load, get(REF, "logps_cache", None)
            ),
            reward=self._reward(parallel[REWARD], get(TRAINING, "stage")),
            data=self._data(),
            pairs=self._pairs(),
            save=SaveConfig(
                get(ACTOR, "save", None),
                get(TRAINING, "save_interval"),
                get(TRAINING, "keep_last"),
                get(TRAINING, "async_save"),
                get(TRAINING, "export_hf"),
                get(TRAINING, "checkpoint_at_end"),
            ),
            cpu_threads=get(TRAINING, "cpu_threads"),
            timeout_minutes=get(TRAINING, "timeout_minutes"),
            sync_checksum=get(TRAINING, "sync_checksum"),
            verify_sync=get(TRAINING, "verify_sync"),
            forwarded={"actor_rollout": self._forwarded(ACTOR), "ref": self._forwarded(REF)},
        )
        return replace(config, notices=self._notices())

    def _pick_model(self, role: str, default: str | None) -> str:
        model = self.get(role, "model") if default is None else self.get(role, "model", default)
        if model not in self.models:
            listed = ", ".join(sorted(self.models)) or "none"
            raise ConfigError(
                f"{self.find(role, 'model')[0]}: no model '{model}' (defaults has: {listed}){nearest(model, self.models)}; "
                f"add it to 'defaults: - model: [...]'"
            )
        self.model_of[role] = model
        return str(model)

    def _model(self, role: str, seq_length: int) -> ModelConfig:
        name = self.model_of[role]

        def get(key: str, default: Any = _MISSING) -> Any:
            # a model's own key may be overridden in training and in the role
            spec = _key(MODEL, key)
            path, value = self.find(role, key)
            if value is not _MISSING:
                return _typed(path, spec, value)
            if spec.default is REQUIRED:
                raise ConfigError(f"model.{name}.{key} is not set: {spec.doc}")
            return spec.default if default is _MISSING else default

        hidden, heads = get("hidden_size"), get("num_attention_heads")
        groups = get("num_query_groups", heads)
        grouped = get("group_query_attention", None)
        if grouped is False and groups != heads:
            raise ConfigError(f"model.{name}: group_query_attention is false, but num_query_groups {groups} differs from {heads} heads")
        if grouped and get("num_query_groups", None) is None:
            raise ConfigError(f"model.{name}: group_query_attention is true, but num_query_groups is not set")
        if heads % groups:
            raise ConfigError(f"model.{name}: num_attention_heads {heads} is not a multiple of num_query_groups {groups}")
        if get("kv_channels", None) is None and hidden % heads:
            raise ConfigError(f"model.{name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; set kv_channels")
        if get("kv_channels", hidden // heads) % 2:
            raise ConfigError(f"model.{name}: kv_channels {get('kv_channels', hidden // heads)} is odd, rope turns channels in pairs")
        vocab, padded, multiple = get("vocab_size", None), get("padded_vocab_size", None), get("make_vocab_size_divisible_by")
        if vocab is None and padded is None:
            raise ConfigError(f"model.{name}: neither vocab_size nor padded_vocab_size is set")
        padded = math.ceil(vocab / multiple) * multiple if padded is None else padded
        vocab = padded if vocab is None else vocab
        if padded < vocab:
            raise ConfigError(f"model.{name}: padded_vocab_size {padded} is smaller than vocab_size {vocab}")
        positions = get("max_position_embeddings")
        if positions < seq_length:
            raise ConfigError(
                f"training.seq_length {seq_length} exceeds max_position_embeddings {positions} of model.{name}: "
                f"set seq_length to {positions} or less"
            )
        scaled = get("rope_scaling_type") is not None
        if scaled != (get("rope_scaling_factor") is not None):
            raise ConfigError(f"model.{name}: rope_scaling_type: llama3 and rope_scaling_factor go together, only one of them is set")
        experts, visited = get("num_experts", None), get("moe_router_topk")
        if experts is not None and visited > experts:
            raise ConfigError(f"model.{name}: moe_router_topk {visited} is more than num_experts {experts}: set it to {experts} or less")
        return ModelConfig(
            name=name,
            num_layers=get("num_layers"),
            hidden_size=hidden,
            ffn_hidden_size=get("ffn_hidden_size"),
            num_attention_heads=heads,
            num_query_groups=groups,
            kv_channels=get("kv_channels", hidden // heads),
            vocab_size=vocab,
            padded_vocab_size=padded,
            max_position_embeddings=positions,
            rotary_base=get("rotary_base"),
            rotary_interleaved=get("rotary_interleaved"),
            rope_scaling_factor=get("rope_scaling_factor"),
            low_freq_factor=get("low_freq_factor"),
            high_freq_factor=get("high_freq_factor"),
            original_max_position_embeddings=get("original_max_position_embeddings"),
            norm_epsilon=get("norm_epsilon"),
            add_qkv_bias=get("add_qkv_bias"),
            untie_embeddings_and_output_weights=get("untie_embeddings_and_output_weights"),
            num_experts=experts,
            moe_router_topk=visited,
            moe_ffn_hidden_size=get("moe_ffn_hidden_size", None) if experts else None,
            moe_aux_loss_coeff=get("moe_aux_loss_coeff"),
        )

    def _parallel(self, batch: int, model: ModelConfig, reference: ModelConfig) -> dict[str, ParallelConfig]:
        """Parallel sizes of every role, ``rollout`` included."""
        colocate = self.get(TRAINING, "placement") == "colocate"
        actor = self._layout(ACTOR, model)
        layouts = {
            ACTOR: actor,
            "rollout": ParallelConfig(tensor=self.get(ACTOR, "inference_tensor_model_parallel_size")),
            REF: self._layout(REF, reference, actor if colocate else None),
            REWARD: self._reward_layout(actor if colocate else None),
        }
        check_split(model, layouts["rollout"], f"{ACTOR}.inference_tensor_model_parallel_size")
        ranks = self._ranks(layouts, colocate)
        sources = {ACTOR: "num_gpus_for_train", "rollout": "num_gpus_for_infer", REF: "resource_pool.ref", REWARD: "resource_pool.reward"}
        if colocate:
            sources = dict.fromkeys(sources, "num_gpus_for_train")
        online = self.get(TRAINING, "stage") == "ray_online_dpo"
        return {
            role: self._with_data(sources[role], ranks[role], layout, batch)
            for role, layout in layouts.items()
            if online or role in (ACTOR, REF)
        } | ({} if online else {"rollout": ParallelConfig(), REWARD: ParallelConfig()})

    def _with_data(self, source: str, ranks: int, layout: ParallelConfig, batch: int) -> ParallelConfig:
        """``layout`` with the data-parallel size that ``ranks`` leave."""
        copy = layout.copy_size
        if ranks % copy:
            low, words = ranks - ranks % copy, str(layout).removesuffix(f" x DP {layout.data}")
            raise ConfigError(
                f"{source} {ranks} does not divide by the {copy} ranks ({words}) of one copy of the model: use {_or(low, low + copy)}"
            )
        data = ranks // copy
        if data * layout.context % layout.expert:
            raise ConfigError(
                f"{source} {ranks} gives {data * layout.context} data- and context-parallel ranks, which do not divide by "
                f"expert_model_parallel_size {layout.expert}: use {copy * layout.expert} ranks or a multiple"
            )
        if batch % data:
            low = batch - batch % data
            raise ConfigError(
                f"training.global_batch_size {batch} does not divide by the {data} data-parallel ranks of {source}: "
                f"use {_or(low, low + data)}, or other ranks"
            )
        return replace(layout, data=data)

    def _ranks(self, layouts: Mapping[str, ParallelConfig], colocate: bool) -> dict[str, int]:
        """Ranks of every role: what the config asks for, else one copy of each model."""
        pools = {name: sum(self.get(POOL, name)) if self.was_set(POOL, name) else None for name in names(POOL)}
        train = self.get(ACTOR, "num_gpus_for_train", layouts[ACTOR].copy_size)
        if colocate:
            if not self.was_set(ACTOR, "num_gpus_for_train"):
                train = pools["actor_rollout"] or train
            for path, count in (
                (f"{ACTOR}.num_gpus_for_infer", self.get(ACTOR, "num_gpus_for_infer", train)),
                *((f"{POOL}.{name}", count or train) for name, count in pools.items()),
            ):
                if count != train:
                    raise ConfigError(
                        f"{path}: {count} ranks, but with training.placement=colocate all roles live on the same {train} "
                        f"(num_gpus_for_train): set it to {train} or leave it out"
                    )
            return dict.fromkeys(layouts, train)
        infer = self.get(ACTOR, "num_gpus_for_infer", layouts["rollout"].copy_size)
        both = pools["actor_rollout"]
        if self.get(TRAINING, "stage") == "ray_dpo" and both == train:
            both = None  # nobody answers, and no rank has to be set aside for it
        if both is not None and train + infer != both:
            raise ConfigError(
                f"{POOL}.actor_rollout: {both} ranks, but num_gpus_for_train {train} + num_gpus_for_infer {infer} = {train + infer}: "
                "make them equal, or set training.placement=colocate"
            )
        return {
            ACTOR: train,
            "rollout": infer,
            REF: pools["ref"] or layouts[REF].copy_size,
            REWARD: pools["reward"] or layouts[REWARD].copy_size,
        }

    def _layout(self, role: str, model: ModelConfig | None, like: ParallelConfig | None = None) -> ParallelConfig:
        """Sizes of one copy of a role's model. ``model`` None: read later, from the folder in ``load``. ``like``: the actor's
        sizes, where the role shares its ranks: one process has one set of Megatron's groups."""
        sizes = {part: self.get(role, name, getattr(like or ParallelConfig(), part)) for part, name in _SIZES.items()}
        for part, name in _SIZES.items():
            if like is not None and sizes[part] != getattr(like, part):
                raise ConfigError(
                    f"{self.find(role, name)[0]}: {sizes[part]}, but with training.placement=colocate the policy's "
                    f"{getattr(like, part)} holds for all roles but the rollout: set it to {getattr(like, part)} or leave it out"
                )
        layout = ParallelConfig(**sizes, sequence=self._sequence(role, sizes["tensor"]))
        if model is None:
            return layout
        layout = replace(layout, virtual=self._virtual(role, model, layout, like))
        if role == ACTOR:
            zero1, overlap = self.get(role, "use_distributed_optimizer"), self.get(role, "overlap_grad_reduce")
            gather = self.get(role, "overlap_param_gather", zero1 and overlap)
            if gather and not (zero1 and overlap):
                raise ConfigError(
                    f"{self.find(role, 'overlap_param_gather')[0]}: true needs use_distributed_optimizer and overlap_grad_reduce, got "
                    f"{_show(zero1)} and {_show(overlap)}: set both to true, or it to false"
                )
            if not gather and zero1 and overlap:
                self.notices.append("overlap_param_gather: false is not kept apart: overlap_grad_reduce stands for the weights too")
            layout = replace(layout, zero1=zero1, overlap=overlap)
        check_split(model, layout, f"{role}.tensor_model_parallel_size", uneven=any(self.was_set(role, name) for name in UNEVEN))
        return layout

    def _reward_layout(self, like: ParallelConfig | None) -> ParallelConfig:
        if self.get(REWARD, "engine") == "megatron":
            if like is not None and like.virtual > 1:
                raise ConfigError(
                    "reward.engine: megatron cannot share its ranks with a policy in model chunks (num_layers_per_virtual_pipeline_stage): "
                    "set training.placement=separate, or leave the chunks out"
                )
            return self._layout(REWARD, None, like)
        for name in _SIZES.values():
            size = self.trees[REWARD].get(name)  # training's are the models' and say nothing about a function
            if size not in (None, 1):
                raise ConfigError(
                    f"reward.{name}: {_show(size)} goes with reward.engine: megatron; other rewards are data-parallel: set it to 1"
                )
        return ParallelConfig()

    def _sequence(self, role: str, tensor: int) -> bool:
        path, _ = self.find(role, "sequence_parallel")
        sequence = bool(self.get(role, "sequence_parallel"))
        if sequence and tensor == 1:
            if path.startswith(role):
                raise ConfigError(f"{path}: true, but there is one tensor-parallel rank: raise tensor_model_parallel_size, or set false")
            self.notices.append(f"{path}: true is off for {role.rpartition('.')[2]}, whose tensor_model_parallel_size is 1")
            return False
        return sequence

    def _virtual(self, role: str, model: ModelConfig, layout: ParallelConfig, like: ParallelConfig | None) -> int:
        """Model chunks a pipeline stage."""
        name = "num_layers_per_virtual_pipeline_stage"
        path, layers = self.find(role, name)[0], self.get(role, name, None)
        if layers is None:
            chunks = 1 if like is None else like.virtual
        elif layout.pipeline == 1:
            raise ConfigError(f"{path}: {layers} cuts pipeline stages, but pipeline_model_parallel_size is 1: raise that, or remove this")
        elif model.num_layers % (layout.pipeline * layers):
            fits = [n for n in range(1, model.num_layers + 1) if model.num_layers % (layout.pipeline * n) == 0]
            raise ConfigError(
                f"{path}: {model.num_layers} layers of model.{model.name} on {layout.pipeline} stages are no whole number of chunks of "
                f"{layers} layers" + (f": use {_or(*fits)}" if fits else ": use another pipeline_model_parallel_size")
            )
        else:
            chunks = model.num_layers // (layout.pipeline * layers)
        if like is not None and chunks != like.virtual:
            raise ConfigError(
                f"{path}: {chunks} chunks a stage, but with training.placement=colocate the policy's {like.virtual} hold for all roles: "
                "leave it out"
            )
        return chunks

    def _loads(self) -> tuple[Path, Path]:
        load, starts = self._folder(ACTOR, "load"), self.get(ACTOR, "finetune")
        if not self.was_set(REF, "load"):
            if not _is_hf(load) and not starts:
                raise ConfigError(
                    f"{REF}.load is not set, and {ACTOR}.load {load} is a checkpoint: name the folder that training started from, "
                    "the reference must not move on a resume"
                )
            return load, load
        reference = self._folder(REF, "load")
        if not _is_hf(reference) and not is_checkpoint(reference):
            raise ConfigError(
                f"{self.find(REF, 'load')[0]}: {reference} is neither a Hugging Face folder (no config.json) nor a checkpoint "
                f"(no {TRACKER})"
            )
        if reference != load and (starts or _is_hf(load)):
            self.notices.append(f"the policy starts from {load}, the reference is {reference}: the first loss is not ln 2")
        return load, reference

    def _hf_folder(self, *folders: Path) -> Path:
        """The folder whose config.json names the ids that end an answer and whose files the exported policy takes over."""
        for folder in folders:
            if _is_hf(folder):
                return folder
        raise ConfigError(
            f"{', '.join(str(folder) for folder in dict.fromkeys(folders))}: none is a Hugging Face folder with config.json; "
            "point training.tokenizer_name_or_path at the one that the checkpoint started from"
        )

    def _folder(self, section: str, name: str) -> Path:
        path: Path = self.get(section, name)
        if not path.is_dir():
            cure = "run 'make model'" if path.name == "smollm2-135m" else "give a Hugging Face folder (config.json, safetensors, tokenizer)"
            raise ConfigError(f"{self.find(section, name)[0]}: no model folder at {path}: {cure}")
        return path

    def _tokenizer(self, load: Path) -> Path:
        if not self.was_set(TRAINING, "tokenizer_name_or_path"):
            if not _is_hf(load):
                raise ConfigError(
                    f"training.tokenizer_name_or_path is not set, and {ACTOR}.load {load} holds no tokenizer: name its folder"
                )
            return load
        path: Path = self.get(TRAINING, "tokenizer_name_or_path")
        if not path.is_dir():
            cure = "run 'make model'" if path.name == "smollm2-135m" else "give a local folder with tokenizer.json"
            raise ConfigError(f"training.tokenizer_name_or_path: no tokenizer folder at {path}: {cure}")
        return path

    def _optimizer(self, iters: int) -> OptimizerConfig:
        get = self.get
        lr, min_lr, decay = get(ACTOR, "lr"), get(ACTOR, "min_lr"), get(ACTOR, "lr_decay_iters", None)
        warmup, fraction = get(ACTOR, "lr_warmup_iters"), get(ACTOR, "lr_warmup_fraction")
        if min_lr > lr:
            raise ConfigError(f"{ACTOR}.min_lr {min_lr:g} is larger than lr {lr:g}")
        if warmup and fraction:
            raise ConfigError(f"{ACTOR}.lr_warmup_iters {warmup} and lr_warmup_fraction {fraction:g} say the same thing: set one of them")
        warmup = warmup or int(fraction * (decay or iters))
        if get(ACTOR, "lr_decay_style") == "minimind" and (warmup or min_lr):
            raise ConfigError(
                f"{ACTOR}.lr_decay_style: minimind has neither warm-up nor min_lr, got a warm-up of {warmup} iterations and min_lr "
                f"{min_lr:g}: set both to 0, or take lr_decay_style: cosine"
            )
        # A constant rate has nothing to decay: a short trial run inside the warm-up is fine there.
        if get(ACTOR, "lr_decay_style") != "constant" and warmup and warmup >= (decay or iters):
            raise ConfigError(f"{ACTOR}.lr_warmup_iters {warmup} must be smaller than the {decay or iters} iterations of the decay")
        return OptimizerConfig(
            lr=lr,
            min_lr=min_lr,
            lr_decay_style=get(ACTOR, "lr_decay_style"),
            lr_warmup_iters=warmup,
            lr_decay_iters=decay,
            weight_decay=get(ACTOR, "weight_decay"),
            clip_grad=get(ACTOR, "clip_grad"),
            adam_beta1=get(ACTOR, "adam_beta1"),
            adam_beta2=get(ACTOR, "adam_beta2"),
            adam_eps=get(ACTOR, "adam_eps"),
        )

    def _loss(self, seq_length: int) -> LossConfig:
        get = self.get
        kind = get(ACTOR, "dpo_loss_type")
        smoothing = get(ACTOR, "dpo_label_smoothing", 1e-3 if kind == "exo_pair" else 0.0)
        if smoothing and kind not in SMOOTHED:
            raise ConfigError(
                f"{ACTOR}.dpo_label_smoothing {smoothing:g} goes with dpo_loss_type {', '.join(SMOOTHED)}, got {kind}: set it to 0"
            )
        if kind == "exo_pair" and not smoothing:
            raise ConfigError(f"{ACTOR}.dpo_label_smoothing 0: exo_pair takes its logarithm and needs more than 0; leave it out for 0.001")
        if kind != "simpo" and self.was_set(ACTOR, "gamma_beta_ratio"):
            raise ConfigError(f"{self.find(ACTOR, 'gamma_beta_ratio')[0]} goes with dpo_loss_type simpo only, got {kind}: remove it")
        return LossConfig(
            loss_type=kind,
            beta=get(ACTOR, "dpo_beta"),
            label_smoothing=smoothing,
            reduction=get(ACTOR, "dpo_logps_reduction", "masked_mean" if kind == "simpo" else "sum"),
            padded_length=seq_length - 1,
            gamma_beta_ratio=get(ACTOR, "gamma_beta_ratio"),
            sft_weight=get(ACTOR, "pref_ftx"),
        )

    def _rollout(self, model: ModelConfig, parallel: ParallelConfig, seq_length: int) -> RolloutConfig:
        get = self.get
        # Recorded answers have no share of their own: a row of prompt and answer must fit seq_length.
        prompt = seq_length - 1 if get(TRAINING, "stage") == "ray_dpo" else get(ACTOR, "max_prompt_length")
        if prompt >= seq_length:
            raise ConfigError(
                f"{ACTOR}.max_prompt_length {prompt} leaves no token for the answer in training.seq_length {seq_length}: "
                f"set seq_length to {prompt} + the longest answer"
            )
        if not get(ACTOR, "do_sample"):
            raise ConfigError(f"{ACTOR}.do_sample: false gives the same answer every time, and equal answers make no pair: set it to true")
        engine, recorded = get(ACTOR, "rollout_engine"), get(ACTOR, "replay_path")
        if (engine == "replay") != (recorded is not None):
            raise ConfigError(
                f"{ACTOR}.rollout_engine: {engine} and replay_path {_show(recorded and str(recorded))}: replay_path names the recorded "
                "answers of rollout_engine: replay; set both or neither"
            )
        if recorded is not None and not recorded.is_file():
            raise ConfigError(f"{ACTOR}.replay_path: no file {recorded}; give the completions.jsonl of a run")
        sampled = engine == "megatron" and get(TRAINING, "stage") == "ray_online_dpo"
        if sampled and model.num_experts:
            raise ConfigError(
                f"{ACTOR}.rollout_engine: megatron answers with dense models only, model.{model.name} has {model.num_experts} experts: "
                "set rollout_engine: replay with recorded answers, or train offline with training.stage: ray_dpo"
            )
        if model.num_experts and get(TRAINING, "export_hf"):
            raise ConfigError(
                f"training.export_hf: model.{model.name} has {model.num_experts} experts, which have no Hugging Face folder here: set it "
                "to false, the checkpoint holds the weights"
            )
        if sampled and not self.was_set(ACTOR, "temperature"):
            self.notices.append(f"{ACTOR}.temperature is not set: sampling at 1.0 (MindSpeed-LLM 2.0.0 sampled at 0.7)")
        return RolloutConfig(
            model=model,
            parallel=parallel,
            num_answers=get(ACTOR, "n_samples_per_prompt"),
            max_prompt_length=prompt,
            max_new_tokens=seq_length - prompt,
            prompts_per_call=get(ACTOR, "num_samples_per_step"),
            do_sample=True,
            temperature=get(ACTOR, "temperature"),
            top_p=get(ACTOR, "top_p"),
            top_k=get(ACTOR, "top_k"),
            engine=engine,
            replay=recorded,
        )

    def _reward(self, parallel: ParallelConfig, stage: str) -> RewardConfig:
        functions, judge = self.get(REWARD, "functions"), self.get(REWARD, "judge")
        # 'load' in training is the models' default and must not turn functions into a reward model
        load = self.trees[REWARD].get("load")
        given = [name for name, value in (("functions", functions), ("judge", judge), ("load", load)) if value]
        if len(given) > 1:
            listed = " and ".join(f"reward.{name}" for name in given)
            raise ConfigError(f"{listed} are set: a run has one kind of reward, keep one of them")
        if stage == "ray_dpo":
            if given:
                self.notices.append(f"ignored, stage ray_dpo has no reward: reward.{given[0]}")
            return RewardConfig(parallel=parallel)
        if not given:
            raise ConfigError(
                "no reward: set reward.functions=package.module:name, reward.judge=package.module:name, or reward.load to the folder "
                "of a classifier"
            )
        engine = self.get(REWARD, "engine")
        if engine == "megatron" and load is None:
            raise ConfigError(f"reward.engine: megatron runs the classifier in reward.load, but reward.{given[0]} is set: remove one")
        return RewardConfig(
            functions=functions,
            judge=None if judge is None else _functions("reward.judge", judge)[0].target,
            load=None if load is None else self._folder(REWARD, "load"),
            engine=engine,
            micro_batch_size=self.get(REWARD, "micro_batch_size"),
            parallel=parallel,
        )

    def _pairs(self) -> PairsConfig:
        get = self.get
        return PairsConfig(
            missing_eos_penalty=self._missing_eos_penalty(),
            select=get(ALGORITHM, "pair_select"),
            ties=get(ALGORITHM, "pair_ties"),
            identical=get(ALGORITHM, "pair_identical"),
            unscored=get(ALGORITHM, "pair_unscored"),
            empty=get(ALGORITHM, "pair_empty"),
            min_margin=get(ALGORITHM, "pair_min_margin"),
        )

    def _data(self) -> DataConfig:
        path: Path = self.get(ACTOR, "data_path")
        origin, raw = self.find(ACTOR, "data_path")
        packaged = config_root() / "data"
        if not path.is_file() and Path(raw).name == str(raw):
            path = packaged / path.name
        if not path.is_file():
            raise ConfigError(f"{origin}: no file '{raw}'; give a JSONL file, or the name of one in {packaged}")
        shuffle = self.get(ACTOR, "shuffle")
        if self.was_set(ACTOR, "no_shuffle"):
            no_shuffle = self.get(ACTOR, "no_shuffle")
            if self.was_set(ACTOR, "shuffle") and shuffle == no_shuffle:
                both = f"shuffle: {_show(shuffle)} and no_shuffle: {_show(no_shuffle)}"
                raise ConfigError(f"{ACTOR}: {both} contradict each other: set one of them")
            shuffle = not no_shuffle
        return DataConfig(
            path=path,
            prompt_key=self.get(ACTOR, "prompt_key"),
            system_prompt=self.get(ACTOR, "system_prompt"),
            shuffle=shuffle,
            chosen_key=self.get(ACTOR, "chosen_key"),
            rejected_key=self.get(ACTOR, "rejected_key"),
            answer_mask=self.get(ACTOR, "answer_mask"),
        )

    def _missing_eos_penalty(self) -> float:
        name = "missing_eos_penalty"
        first, second = self.was_set(ACTOR, name), self.was_set(ALGORITHM, name)
        here, there = self.get(ACTOR, name), self.get(ALGORITHM, name)
        if first and second and here != there:
            raise ConfigError(f"{self.find(ACTOR, name)[0]} {here:g} and {ALGORITHM}.{name} {there:g} disagree: set one of them")
        if second and not first and there:
            self.notices.append(f"{ALGORITHM}.{name} {there:g} counts (MindSpeed-LLM 2.0.0 read only {ACTOR}'s)")
        return float(here if first else there)

    def _forwarded(self, role: str) -> dict[str, Any]:
        found = {name: self.find(role, name)[1] for name in FORWARDED}
        return {name: value for name, value in found.items() if value is not _MISSING}

    def _unused(self) -> list[str]:
        """Keys that were set and that this stage, loss or engine does not read."""
        offline = self.get(TRAINING, "stage") == "ray_dpo"
        idle = [(ACTOR, name) for name in (PREFERENCE_KEYS if not offline else ROLLOUT_KEYS)]
        if offline:
            idle += [(ALGORITHM, key.name) for key in OWN[ALGORITHM]]
        else:
            idle += [(REF, "logps_cache")]
            if self.get(ACTOR, "rollout_engine") == "replay":
                idle += [(ACTOR, name) for name in SAMPLING_KEYS]
        if self.get(ACTOR, "dpo_loss_type") == "simpo":
            idle += [(REF, key.name) for key in OWN[REF]]
        return [f"{section}.{name}" for section, name in dict.fromkeys(idle) if self.trees[section].get(name) is not None]

    def _notices(self) -> tuple[str, ...]:
        lines = list(self.notices)
        if unused := self._unused():
            lines.append(f"ignored, nothing reads it in this run: {', '.join(unused)}")
        if self.without_meaning:
            lines.append("ignored, no meaning in DPO: " + ", ".join(self.without_meaning))
        if self.host_only:
            lines.append("ignored, nothing to choose on plain megatron-core: " + ", ".join(sorted(set(self.host_only))))
        return tuple(lines)


_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
}
"""Fields of ParallelConfig -> keys."""


def check_split(model: ModelConfig, layout: ParallelConfig, path: str, uneven: bool = False) -> None:
    """ConfigError where a size of ``model`` is no whole number a rank. ``path``: the tensor-parallel key, for the message;
    ``uneven``: how layers lie on stages is said by other keys (``keys.UNEVEN``)."""
    tensor = layout.tensor
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        size = getattr(model, name)
        if size % tensor:
            raise ConfigError(f"{path}: {tensor} does not divide {name} {size} of model.{model.name}: use {_or(*_divisors(model))}")
    padded = model.padded_vocab_size
    if padded % tensor:
        up = padded + tensor - padded % tensor
        raise ConfigError(
            f"{path}: {tensor} does not divide padded_vocab_size {padded} of model.{model.name}: set "
            f"model.{model.name}.make_vocab_size_divisible_by to {tensor} (padded_vocab_size, where it is set, to {up})"
        )
    stages = layout.pipeline * layout.virtual
    if model.num_layers % stages and not uneven:
        fits = [n for n in range(1, model.num_layers + 1) if model.num_layers % n == 0]
        raise ConfigError(
            f"{path.rpartition('.')[0]}.pipeline_model_parallel_size: {layout.pipeline} does not divide the {model.num_layers} layers of "
            f"model.{model.name}: use {_or(*fits)}, or set num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
        )
    if layout.expert > 1 and (not model.num_experts or model.num_experts % layout.expert):
        has = f"{model.num_experts} experts" if model.num_experts else "no experts"
        raise ConfigError(
            f"{path.rpartition('.')[0]}.expert_model_parallel_size: {layout.expert}, but model.{model.name} has {has}: "
            + ("use a divisor of them" if model.num_experts else "set it to 1")
        )


def _divisors(model: ModelConfig) -> list[int]:
    common = math.gcd(model.num_attention_heads, model.num_query_groups, model.ffn_hidden_size)
    return [n for n in range(1, common + 1) if common % n == 0]


def _or(*numbers: int) -> str:
    """``2``, ``2 or 4``, ``1, 2 or 4``; numbers below 1 are no use and left out."""
    words = [str(number) for number in numbers if number > 0]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _key(section: str, name: str) -> Key:
    return next(key for key in OWN[section] if key.name == name)


def _mapping(tree: Mapping[Any, Any], name: Any, prefix: str = "") -> Mapping[str, Any]:
    value = tree.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{prefix}{name}: expected a section with keys, got {_show(value)}")
    return value


def _elsewhere(name: str, section: str) -> str:
    """Where a right name stands that was put in the wrong section; empty for a name that is in no table."""
    homes = [home for home in OWN if home != section and name in names(home)]
    return f"; it belongs under {' or '.join(homes)}" if homes else ""


def _unknown_section(top: str, value: Any, known: list[str]) -> str:
    """The message for a top-level name that is no section: ``lr=1``, ``trainng.lr=1``, ``dpo.betta=0.2``."""
    if _elsewhere(top, ""):
        return f"unknown section '{top}'{_elsewhere(top, '')}"
    homes = {name: f"{section}.{name}" for section in reversed(list(OWN)) for name in names(section)}
    tries = [(top, f"section '{top}'", {name: name for name in known}), (top, f"section '{top}'", homes)]
    for key in value if isinstance(value, Mapping) else ():
        tries += [(f"{top}_{key}", f"key '{top}.{key}'", homes), (str(key), f"key '{top}.{key}'", homes)]
    for text, what, paths in tries:
        near = nearest(text, paths)
        if near:
            return f"unknown {what}; did you mean '{paths[near.split(chr(39))[1]]}'?"
    return f"unknown section '{top}'; sections are {', '.join(known)}"


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"'{value}'" if isinstance(value, str) else str(value)


def _typed(path: str, key: Key, value: Any) -> Any:
    """``value`` as ``key`` wants it. Never bends a type: ``"8"`` is no number, ``1`` no boolean; only an int may be a float."""
    if key.type == "ints":
        items = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in items):
            raise ConfigError(f"{path}: expected a list of whole numbers, one per node, got {_show(value)}")
        return tuple(items)
    if key.type == "floats":
        items = value if isinstance(value, (list, tuple)) else [value]
        if not items:
            raise ConfigError(f"{path}: expected a number or a list of numbers, got an empty list")
        return tuple(_typed(path, replace(key, type="float"), item) for item in items)
    if key.type == "functions":
        return _functions(path, value)
    accepted, words = _KINDS[key.type]
    if not isinstance(value, accepted) or (isinstance(value, bool) and key.type != "bool") or (value == "" and not key.may_be_empty):
        raise ConfigError(f"{path}: expected {words}, got {_show(value)} ({type(value).__name__})")
    if key.type == "path":
        return Path(str(value)).expanduser().absolute()
    if key.choices and value not in key.choices:
        raise ConfigError(f"{path}: expected one of {', '.join(key.choices)}, got {_show(value)}{nearest(str(value), key.choices)}")
    if isinstance(value, (int, float)):
        _in_range(path, key, value)
        return float(value) if key.type == "float" else value
    return value


_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "a text"),
    "path": ((str, Path), "a path"),
}


def _in_range(path: str, key: Key, value: float) -> None:
    low, high = key.low, key.high
    if not math.isfinite(value):
        raise ConfigError(f"{path}: expected a finite number, got {value}")
    if low is not None and (value < low or (key.open_low and value == low)):
        raise ConfigError(f"{path}: must be {'>' if key.open_low else '>='} {low:g}, got {value:g}; {key.doc}")
    if high is not None and (value > high or (key.open_high and value == high)):
        raise ConfigError(f"{path}: must be {'<' if key.open_high else '<='} {high:g}, got {value:g}; {key.doc}")


def _functions(path: str, value: Any) -> tuple[RewardFunction, ...]:
    found = []
    for item in value if isinstance(value, (list, tuple)) else [value]:
        entry = {"target": item} if isinstance(item, str) else item
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{path}: expected 'package.module:name' or {{target, weight}}, got {_show(item)}")
        for name in entry:
            if name not in ("target", "weight"):
                raise ConfigError(f"unknown key '{path}.{name}'{nearest(str(name), ['target', 'weight'])}")
        target, weight = str(entry.get("target", "")), entry.get("weight", 1.0)
        module, _, name = target.rpartition(":")
        if not module or not name.isidentifier():
            raise ConfigError(f"{path}: expected 'package.module:name' or 'path/to/file.py:name', got {_show(target)}")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ConfigError(f"{path}: weight of {target}: expected a finite number, got {_show(weight)}")
        if module.endswith(".py"):  # absolute: a rank may run in another directory
            target = f"{Path(module).expanduser().absolute()}:{name}"
        found.append(RewardFunction(target, float(weight)))
    return tuple(found)


TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's name of the file that names a checkpoint folder's latest iteration."""


def is_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` is a checkpoint folder of ours."""
    return (folder / TRACKER).is_file()


def _is_hf(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def config_root() -> Path:
    """The folder of the packaged YAML and data: ``mindspeed_odpo.configs`` when installed, ``configs/`` of a bare checkout."""
    spec = importlib.util.find_spec("mindspeed_odpo.configs")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(__file__).parent.parent / "configs"


def parameters(m: ModelConfig) -> int:
    """Number of parameters of a model, embedding (and head, when untied) included."""
    queries, keys = m.num_attention_heads * m.kv_channels, m.num_query_groups * m.kv_channels
    experts = m.num_experts
    mlp = experts * (3 * (m.moe_ffn_hidden_size or m.ffn_hidden_size) + 1) if experts else 3 * m.ffn_hidden_size
    layer = m.hidden_size * (2 * queries + 2 * keys + mlp + 2) + (queries + 2 * keys) * m.add_qkv_bias
    return m.num_layers * layer + m.hidden_size + m.padded_vocab_size * m.hidden_size * (1 + m.untie_embeddings_and_output_weights)
