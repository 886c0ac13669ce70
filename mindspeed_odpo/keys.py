"""The table of keys: every name a YAML may hold, where it goes and what it means. ``docs/configuration.md`` is made from it.

Pure data, apart from ``config.py`` so that the parser fits beside it on few screens. Four kinds of names:

* **own** (``Key``): typed and read by us;
* **forwarded**: handed to Megatron's ``TransformerConfig`` as they are;
* **fixed**: accepted with the one value that this package trains with, an error with any other;
* **ignored**: without meaning here; one notice line at start names those that were set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TRAINING = "training"
ACTOR = "actor_rollout_ref.actor_rollout"
REF = "actor_rollout_ref.ref"
REWARD = "reward"
ALGORITHM = "algorithm"
POOL = "resource_pool"
MODEL = "model.NAME"

LOSS_TYPES = ("sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "sppo_hard", "apo_zero", "apo_down", "simpo")
"""Losses of ``loss.py``."""
REDUCTIONS = ("sum", "masked_mean", "padded_mean")
"""How an answer's token log-probs become one number."""
SMOOTHED = ("sigmoid", "robust", "exo_pair", "simpo")
"""Those that know a label smoothing."""

REQUIRED = object()
"""Default of a key without which a run cannot start."""


@dataclass(frozen=True)
class Key:
    name: str
    type: str
    """int, float, bool, str, path, ints and floats (a list of numbers, or one) or functions."""
    default: Any
    """The value when unset; a string in ``<...>`` says how it follows from others; ``REQUIRED``: none."""
    doc: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    """Smallest value allowed."""
    high: float | None = None
    """Largest value allowed."""
    open_low: bool = False
    """True: ``low`` itself is not allowed."""
    open_high: bool = False
    may_be_empty: bool = False
    """True: the empty text is a value, not a mistake."""


def _sizes(role: str, default: str = "1") -> tuple[Key, ...]:
    size = 1 if default == "1" else f"<{default}>"
    return (
        Key("tensor_model_parallel_size", "int", size, f"tensor-parallel ranks of {role}", "ranks", low=1),
        Key("pipeline_model_parallel_size", "int", size, f"pipeline stages of {role}", "ranks", low=1),
        Key("context_parallel_size", "int", size, f"context-parallel ranks of {role}", "ranks", low=1),
        Key(
            "expert_model_parallel_size",
            "int",
            size,
            f"ranks that share the experts of {role}, out of its data- and context-parallel ones",
            "ranks",
            low=1,
        ),
        Key(
            "sequence_parallel",
            "bool",
            False,
            "activations between tensor-parallel parts are split over the sequence; off where tensor_model_parallel_size is 1",
        ),
    )


def _chunks(default: str | None = None) -> Key:
    return Key(
        "num_layers_per_virtual_pipeline_stage",
        "int",
        default,
        "layers of one model chunk of the interleaved pipeline schedule; unset: one chunk a stage",
        "layers",
        low=1,
    )


_LIKE_ACTOR = "1; colocate: actor's"


OWN: Mapping[str, tuple[Key, ...]] = {
    TRAINING: (
        Key(
            "stage",
            "str",
            "ray_online_dpo",
            "training method: online DPO, or offline DPO on files of preferences",
            choices=("ray_online_dpo", "ray_dpo"),
        ),
        Key("train_iters", "int", REQUIRED, "updates of the policy", "iterations", low=1),
        Key("global_batch_size", "int", REQUIRED, "prompts of one iteration, over all ranks; one pair comes from each", "pairs", low=1),
        Key("seq_length", "int", REQUIRED, "longest prompt + answer; answers get `seq_length - max_prompt_length`", "tokens", low=2),
        Key("tokenizer_name_or_path", "path", "<actor's load>", "folder with the tokenizer and its chat template"),
        Key("seed", "int", 1234, "seeds sampling, data order and reward models' heads", low=0, high=2**31 - 1),
        Key("bf16", "bool", False, "true: bf16 weights and activations, fp32 masters and reductions; false: fp32"),
        Key(
            "placement",
            "str",
            "separate",
            "roles on ranks of their own, or in turn on the same ones",
            choices=("separate", "colocate"),
        ),
        Key("run_name", "str", "<config name>", "name of the run"),
        Key("run_dir", "path", "<runs/run_name>", "where logs, answers, checkpoints and the exported policy go"),
        Key("save_interval", "int", 0, "distance of checkpoints; 0: no checkpoint on the way", "iterations", low=0),
        Key("keep_last", "int", 0, "so many of the newest checkpoints stay, older ones are removed; 0: all stay", "checkpoints", low=0),
        Key(
            "async_save",
            "bool",
            False,
            "checkpoints are written beside the training; a run that dies meanwhile resumes from the one before",
        ),
        Key("checkpoint_at_end", "bool", True, "write a checkpoint after the last iteration"),
        Key("export_hf", "bool", True, "write the trained policy as a Hugging Face folder, RUN/policy_hf"),
        Key("no_load_optim", "bool", False, "resume without the optimizer: only together with `finetune: true`"),
        Key("no_load_rng", "bool", False, "resume without the random state: only together with `finetune: true`"),
        Key(
            "cpu_threads", "int", 0, "torch threads of one rank on a CPU; 0: cores / ranks that compute at the same time", "threads", low=0
        ),
        Key("timeout_minutes", "float", 30.0, "longest wait of one collective or one role's call", "minutes", low=0, open_low=True),
        Key(
            "sync_checksum",
            "str",
            "first",
            "weight syncs that compare what the rollout holds with what the actor sent",
            choices=("first", "always", "never"),
        ),
        Key("verify_sync", "bool", True, "check at the start that the rollout's greedy answers are the actor's own, too"),
    ),
    ACTOR: (
        Key("model", "str", REQUIRED, "name of the policy's model, one of `defaults: - model: [...]`"),
        Key("load", "path", REQUIRED, "Hugging Face folder (start), or a checkpoint folder of ours (resume)"),
        Key("finetune", "bool", False, "true: from a checkpoint take the weights only and start at iteration 0"),
        Key("save", "path", "<run_dir/checkpoints>", "where checkpoints go"),
        Key("data_path", "path", REQUIRED, "JSONL with the prompts: a path, or the name of a file in `configs/data`"),
        Key("prompt_key", "str", "prompt", "column with the prompt: a string, or a list of {role, content} messages"),
        Key(
            "system_prompt",
            "str",
            None,
            "system turn put in front of prompts that have none; empty: an empty turn; unset: what the chat template does",
            may_be_empty=True,
        ),
        Key("shuffle", "bool", True, "a new seeded order every epoch; false: file order"),
        Key("no_shuffle", "bool", "<not shuffle>", "MindSpeed-LLM's second spelling of `shuffle: false`"),
        Key("max_prompt_length", "int", 512, "longest prompt; longer ones are dropped", "tokens", low=1),
        Key("n_samples_per_prompt", "int", 2, "answers a prompt, K; the best and the worst make the pair", "answers", low=2),
        Key("num_samples_per_step", "int", 0, "prompts that one rank answers together; 0: all of its share", "prompts", low=0),
        Key("do_sample", "bool", True, "must be true: greedy answers of one prompt are all the same"),
        Key("temperature", "float", 1.0, "divides the logits before sampling; log-probs are always taken at 1", low=0, open_low=True),
        Key("top_p", "float", 1.0, "sample from the smallest set of tokens with this probability; 1: all", low=0, high=1, open_low=True),
        Key("top_k", "int", 0, "sample from the k likeliest tokens; 0: all", "tokens", low=0),
        Key("micro_batch_size", "int", 4, "pairs in one forward pass; the last one may be smaller", "pairs", low=1),
        Key("ppo_mini_batch_size", "int", "<global_batch_size>", "pairs of one optimizer step; only global_batch_size", "pairs", low=1),
        Key("ppo_epochs", "int", 1, "passes over one iteration's pairs; only 1 in this version", low=1),
        Key(
            "dpo_beta",
            "floats",
            (0.1,),
            "strength of the pull to the reference; a list: one value an epoch, the last one holds",
            low=0,
            open_low=True,
        ),
        Key("dpo_loss_type", "str", "sigmoid", "the loss, see docs/algorithm.md", choices=LOSS_TYPES),
        Key(
            "dpo_label_smoothing",
            "float",
            "<0; exo_pair: 0.001>",
            f"probability that a preference is wrong; for {', '.join(SMOOTHED)}",
            low=0,
            high=0.5,
            open_high=True,
        ),
        Key(
            "dpo_logps_reduction",
            "str",
            "<sum; simpo: masked_mean>",
            "log-probability of an answer: sum over its tokens, their mean, or the sum over seq_length - 1",
            choices=REDUCTIONS,
        ),
        Key("gamma_beta_ratio", "float", 1.4, "simpo: target margin over beta", "nats a token", low=0),
        Key("pref_ftx", "float", 0.0, "weight of the chosen answer's negative log-likelihood a token, added to the loss", low=0),
        Key(
            "on_nonfinite",
            "str",
            "stop",
            "a NaN or infinite loss or gradient ends the run, or skips the update (counted; the fifth in a row ends the run)",
            choices=("stop", "skip"),
        ),
        Key(
            "rollout_engine",
            "str",
            "megatron",
            "who answers: the policy, or the recorded answers of `replay_path`",
            choices=("megatron", "replay"),
        ),
        Key("replay_path", "path", None, "completions.jsonl of a former run, for `rollout_engine: replay`"),
        Key("chosen_key", "str", "chosen", "ray_dpo: column with the preferred answer (text), or its whole dialogue (messages)"),
        Key("rejected_key", "str", "rejected", "ray_dpo: column with the other answer, or its whole dialogue"),
        Key(
            "answer_mask",
            "str",
            "answer",
            "ray_dpo: the last assistant turn counts, every assistant turn, or those off by one as in MiniMind's notebook of 2025",
            choices=("answer", "dialogue", "dialogue_shifted"),
        ),
        Key("missing_eos_penalty", "float", 0.0, "taken off the score of an answer without EOS before the comparison", "score", low=0),
        Key("lr", "float", 1e-6, "learning rate at its peak", low=0),
        Key("min_lr", "float", 0.0, "learning rate at the end of the decay", low=0),
        Key("lr_decay_style", "str", "constant", "shape of the decay", choices=("constant", "linear", "cosine", "minimind")),
        Key("lr_warmup_iters", "int", 0, "linear warm-up from 0; not together with the fraction", "iterations", low=0),
        Key("lr_warmup_fraction", "float", 0.0, "the warm-up as a part of the decay's iterations", low=0, high=1, open_high=True),
        Key("lr_decay_iters", "int", "<train_iters>", "iterations until min_lr is reached", "iterations", low=1),
        Key("weight_decay", "float", 0.0, "AdamW's decoupled weight decay (Megatron's own default: 0.01)", low=0),
        Key("clip_grad", "float", 1.0, "largest gradient norm; 0: no clipping", low=0),
        Key("adam_beta1", "float", 0.9, "decay of AdamW's first moment", low=0, high=1, open_high=True),
        Key("adam_beta2", "float", 0.999, "decay of AdamW's second moment", low=0, high=1, open_high=True),
        Key("adam_eps", "float", 1e-8, "AdamW's epsilon", low=0, open_low=True),
        Key(
            "num_gpus_for_train",
            "int",
            "<tensor x pipeline x context>",
            "ranks (GPUs, NPUs or CPU processes) that train; a multiple of tensor x pipeline x context, the rest is data-parallel",
            "ranks",
            low=1,
        ),
        Key(
            "num_gpus_for_infer",
            "int",
            "<inference_tensor_model_parallel_size; colocate: num_gpus_for_train>",
            "ranks that answer prompts; a multiple of inference_tensor_model_parallel_size, the rest is data-parallel",
            "ranks",
            low=1,
        ),
        Key("inference_tensor_model_parallel_size", "int", 1, "tensor-parallel ranks of the rollout, for itself", "ranks", low=1),
        *_sizes("the policy"),
        _chunks(),
        Key("use_distributed_optimizer", "bool", False, "optimizer state split over the data- and context-parallel ranks (ZeRO-1)"),
        Key("overlap_grad_reduce", "bool", False, "gradients are reduced beside the backward pass"),
        Key(
            "overlap_param_gather",
            "bool",
            "<use_distributed_optimizer and overlap_grad_reduce>",
            "weights are gathered beside the next forward pass; needs both",
        ),
    ),
    REF: (
        Key("logps_cache", "path", "<a file in runs/ref_logps>", "ray_dpo: where the reference's log-probs are kept between runs"),
        Key("model", "str", "<actor's model>", "name of the reference's model"),
        Key("load", "path", "<actor's load>", "folder with the frozen reference, Hugging Face or a checkpoint; required to resume"),
        Key("micro_batch_size", "int", "<actor's micro_batch_size>", "prompts (all their answers) in one forward pass", "prompts", low=1),
        *_sizes("the reference", _LIKE_ACTOR),
        _chunks("<unset; colocate: actor's>"),
    ),
    REWARD: (
        Key(
            "functions",
            "functions",
            (),
            "`package.module:name` or `file.py:name`, or a list of {target, weight}, added up",
        ),
        Key("judge", "str", None, "`package.module:name` or `file.py:name`: says which of two answers is better"),
        Key("load", "path", None, "Hugging Face folder with a sequence classifier; one of functions, judge and load"),
        Key("engine", "str", "hf", "what runs the classifier: transformers, or megatron-core and a value head", choices=("hf", "megatron")),
        Key("model", "str", None, "MindSpeed-LLM's name of the reward model; the folder in `load` has its own architecture"),
        Key("micro_batch_size", "int", 8, "answers in one forward pass of a reward model", "sequences", low=1),
        *_sizes("the reward model (engine megatron)", _LIKE_ACTOR),
    ),
    ALGORITHM: (
        Key("missing_eos_penalty", "float", 0.0, f"second spelling of {ACTOR}.missing_eos_penalty", "score", low=0),
        Key(
            "pair_select",
            "str",
            "best_worst",
            "which answers of a prompt meet: best and worst, best and a random worse one, every two",
            choices=("best_worst", "best_random", "all"),
        ),
        Key("pair_ties", "str", "drop", "equal scores: no pair, or the first answer wins", choices=("drop", "first")),
        Key("pair_identical", "str", "drop", "answers of the same tokens: no pair, or one without gradient", choices=("drop", "keep")),
        Key("pair_unscored", "str", "drop", "an answer without score: in no pair, or the run ends", choices=("drop", "stop")),
        Key("pair_empty", "str", "drop", "an answer without a token: in no pair, or the run ends", choices=("drop", "stop")),
        Key("pair_min_margin", "float", 0.0, "pairs with a smaller reward gap are left out", "score", low=0),
    ),
    POOL: (
        Key(
            "actor_rollout",
            "ints",
            "<num_gpus_for_train + num_gpus_for_infer>",
            "ranks that train and answer, a number a node",
            "ranks",
        ),
        Key(
            "ref",
            "ints",
            "<its tensor x pipeline x context; colocate: num_gpus_for_train>",
            "ranks of the reference, a number a node",
            "ranks",
        ),
        Key(
            "reward",
            "ints",
            "<its tensor x pipeline x context; colocate: num_gpus_for_train>",
            "ranks of the reward, a number a node",
            "ranks",
        ),
    ),
    MODEL: (
        Key("num_layers", "int", REQUIRED, "transformer layers", low=1),
        Key("hidden_size", "int", REQUIRED, "width of the residual stream", low=1),
        Key("ffn_hidden_size", "int", REQUIRED, "width of the gated MLP", low=1),
        Key("num_attention_heads", "int", REQUIRED, "query heads", low=1),
        Key("group_query_attention", "bool", "<num_query_groups given>", "false: one key/value head a query head"),
        Key("num_query_groups", "int", "<num_attention_heads>", "key/value heads", low=1),
        Key("kv_channels", "int", "<hidden_size / num_attention_heads>", "width of one head", low=1),
        Key("vocab_size", "int", "<padded_vocab_size>", "true vocabulary: ids that may be sampled", "tokens", low=1),
        Key("padded_vocab_size", "int", "<vocab_size rounded up>", "rows of the embedding", "tokens", low=1),
        Key(
            "make_vocab_size_divisible_by",
            "int",
            1,
            "rounds vocab_size up to padded_vocab_size",
            "tokens",
            low=1,
        ),
        Key("max_position_embeddings", "int", REQUIRED, "longest sequence the model was made for", "tokens", low=1),
        Key("rotary_base", "float", 10000.0, "rope's theta", low=0, open_low=True),
        Key("rope_scaling_type", "str", None, "unset: plain rope", choices=("llama3",)),
        Key("rope_scaling_factor", "float", None, "Llama 3 rope scaling: factor", low=1),
        Key("low_freq_factor", "float", 1.0, "Llama 3 rope scaling: low frequency factor", low=0, open_low=True),
        Key("high_freq_factor", "float", 4.0, "Llama 3 rope scaling: high frequency factor", low=0, open_low=True),
        Key("original_max_position_embeddings", "int", 8192, "Llama 3 rope scaling: length before scaling", "tokens", low=1),
        Key("rotary_interleaved", "bool", False, "true: rope turns neighbouring channels; false: halves"),
        Key("norm_epsilon", "float", 1e-5, "RMSNorm's epsilon", low=0, open_low=True),
        Key("add_qkv_bias", "bool", False, "bias on query, key and value, as in Qwen2"),
        Key("untie_embeddings_and_output_weights", "bool", False, "true: an output head of its own"),
        Key("num_experts", "int", None, "experts of every MLP; unset: a dense model", "experts", low=2),
        Key("moe_router_topk", "int", 2, "experts that a token visits", "experts", low=1),
        Key("moe_ffn_hidden_size", "int", "<ffn_hidden_size>", "width of one expert", low=1),
        Key("moe_aux_loss_coeff", "float", 0.0, "weight of the router's load-balancing loss in the gradient; in no logged loss", low=0),
    ),
}

UNEVEN = (
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)
"""Megatron's settings of how layers lie on stages; with one of them it does the counting itself."""

PREFERENCE_KEYS = ("chosen_key", "rejected_key", "answer_mask")
"""Keys of the actor that only recorded preferences have."""
SAMPLING_KEYS = ("num_samples_per_step", "temperature", "top_p", "top_k")
ROLLOUT_KEYS = (*SAMPLING_KEYS, "max_prompt_length", "n_samples_per_prompt", "missing_eos_penalty", "rollout_engine", "replay_path")
"""Keys of the actor that only a rollout reads."""

FORWARDED = (
    *UNEVEN,
    "attention_softmax_in_fp32",
    "deterministic_mode",
    "distribute_saved_activations",
    "fp32_residual_connection",
    "init_method_std",
    "recompute_granularity",
    "recompute_method",
    "recompute_modules",
    "recompute_num_layers",
)
"""Fields of Megatron's TransformerConfig that a role, ``training`` or a model may set: model < training < role."""

FIXED: Mapping[str, tuple[Any, str]] = {
    "add_bias_linear": (False, "linear layers have no bias here"),
    "attention_dropout": (0.0, "dropout is off in policy and reference, or their log-probs could not be compared"),
    "disable_bias_linear": (True, "linear layers have no bias here"),
    "fp16": (False, "fp16 is not supported: use bf16"),
    "hidden_dropout": (0.0, "dropout is off in policy and reference, or their log-probs could not be compared"),
    "inference_pipeline_model_parallel_size": (1, "the rollout is split by tensor and data parallelism, it has no pipeline"),
    "normalization": ("RMSNorm", "models of this version use RMSNorm"),
    "position_embedding_type": ("rope", "models of this version use rope"),
    "qk_layernorm": (False, "models with normed queries and keys are not supported by this version"),
    "swiglu": (True, "models of this version use SwiGLU"),
    "use_mcore_models": (True, "only megatron-core models are supported"),
    "virtual_pipeline_model_parallel_size": (None, "the number of chunks follows from num_layers_per_virtual_pipeline_stage"),
}
"""name -> (the only value accepted, why)."""

WITHOUT_MEANING = ("adv_estimator", "clip_ratio", "entropy_coeff", "gamma", "kl_ctrl", "kl_penalty", "lam")
"""PPO's names, without meaning in DPO."""

HOST_ONLY = (
    "accumulate_allreduce_grads_in_fp32",
    "distributed_backend",
    "distributed_timeout_minutes",
    "eval_interval",
    "eval_iters",
    "initial_loss_scale",
    "is_instruction_dataset",
    "is_pairwise_dataset",
    "log_interval",
    "log_throughput",
    "loss_scale",
    "max_tokens_to_oom",
    "md5_validate",
    "micro_batch_size_for_infer",
    "no_gradient_accumulation_fusion",
    "no_masked_softmax_fusion",
    "no_shared_storage",
    "num_workers",
    "pad_to_multiple_of",
    "reset_position_ids",
    "shuffle_minibatch",
    "split",
    "tokenizer_not_use_fast",
    "tokenizer_type",
    "transformer_impl",
    "use_cpu_initialization",
    "use_flash_attn",
    "use_fused_ring_attention_update",
    "use_fused_rmsnorm",
    "use_fused_rotary_pos_emb",
    "use_fused_swiglu",
    "use_kv_cache",
    "use_mc2",
    "use_rotary_position_embeddings",
    "variable_seq_lengths",
)
"""Names of MindSpeed-LLM and Megatron that choose a kernel, a backend or a file layout there; nothing to choose here."""


def names(section: str) -> tuple[str, ...]:
    return tuple(key.name for key in OWN[section])


def markdown() -> str:
    """The text of ``docs/configuration.md``."""
    out = [
        "# Configuration",
        "",
        "Made from `mindspeed_odpo/keys.py` by `odpo check --keys`; a test keeps it fresh.",
        "",
        "A config is one YAML file in `configs/rlxf` (or in the folder named by `--config-dir`), composed by Hydra. Any key can be set",
        "on the command line by its full path, also one that the file does not hold:",
        "`python ray_gpt.py --config-name NAME training.train_iters=5`. `odpo check --config-name NAME` prints the whole plan and",
        "starts nothing.",
        "",
        "A name that is in none of these tables is an error; so is a value of the wrong type. `null` means unset. `training` may hold",
        "the keys of any role as a default for all roles, and a model file may hold them too: model < training < role. Sizes count",
        "prompts or pairs, not sequences. Relative paths start at the current directory. With `placement: colocate` all roles live on",
        "the same `num_gpus_for_train` ranks, and the other rank counts are equal to it or unset; reference and megatron reward model",
        "then have the policy's tensor, pipeline, context and expert sizes, while the rollout keeps its own tensor size.",
        "",
        "Parallel sizes are Megatron's, for each role its own. Data-parallel ranks are what is left of a role's ranks:",
        "`num_gpus_for_train / (tensor x pipeline x context)` for the policy, `resource_pool.ref / (...)` for the reference,",
        "`num_gpus_for_infer / inference_tensor_model_parallel_size` for the rollout. `global_batch_size` divides by each of them.",
        "",
    ]
    listed = {"ints": "list of int", "floats": "float or list"}
    for section, keys in OWN.items():
        out += [f"## `{section}`", "", "| key | type | default | unit | meaning |", "| --- | --- | --- | --- | --- |"]
        for key in keys:
            kind = " \\| ".join(f"`{choice}`" for choice in key.choices) or listed.get(key.type, key.type)
            out.append(f"| `{key.name}` | {kind} | {_default(key.default)} | {key.unit} | {key.doc}{_range(key)} |")
        out.append("")
    out += ["## Handed on to Megatron's TransformerConfig", "", ", ".join(f"`{name}`" for name in FORWARDED) + ".", ""]
    out += ["## Accepted with one value only", "", "| key | value | why |", "| --- | --- | --- |"]
    out += [f"| `{name}` | `{_yaml(value)}` | {why} |" for name, (value, why) in FIXED.items()]
    out += ["", "## Ignored, with a notice at start", ""]
    out += ["PPO's, without meaning in DPO: " + ", ".join(f"`{name}`" for name in WITHOUT_MEANING) + ".", ""]
    out += ["MindSpeed-LLM's and Megatron's, nothing to choose here: " + ", ".join(f"`{name}`" for name in HOST_ONLY) + ".", ""]
    return "\n".join(out)


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _default(value: Any) -> str:
    if value is REQUIRED:
        return "**required**"
    if isinstance(value, str) and value.startswith("<"):
        return value[1:-1]
    return "unset" if value is None or value == () else f"`{_yaml(value)}`"


def _range(key: Key) -> str:
    bounds = []
    if key.low is not None:
        bounds.append(f"{'>' if key.open_low else '≥'} {key.low:g}")
    if key.high is not None:
        bounds.append(f"{'<' if key.open_high else '≤'} {key.high:.10g}")
    return f" ({' and '.join(bounds)})" if bounds else ""
