"""The plan of a run in words: what a config makes of ranks, batches, answers and memory, before anything is started."""

from __future__ import annotations

import math

from mindspeed_odpo.config import Config, LossConfig, ModelConfig, parameters
from mindspeed_odpo.keys import SMOOTHED


def describe(config: Config) -> str:
    """The plan of a run, as ``odpo check`` and the launcher print it."""
    a, r, f = config.actor, config.rollout, config.reference
    k = r.num_answers if config.stage == "ray_online_dpo" else 2
    pairs = config.global_batch_size * (k * (k - 1) // 2 if config.pairs.select == "all" else 1)
    sequences = config.global_batch_size * k
    o, loss = a.optimizer, a.loss
    share = config.global_batch_size // r.parallel.data
    call = min(r.prompts_per_call or share, share)
    limits = [f"top_p {r.top_p:g}"] * (r.top_p < 1) + [f"top_k {r.top_k}"] * (r.top_k > 0)
    ends = {"minimind": o.lr / 10}.get(o.lr_decay_style, o.min_lr)
    decay = "constant" if o.lr_decay_style == "constant" else f"{o.lr_decay_style} to {ends:g}"
    reference = [
        ("reference", f"{f.load}" + ("" if f.model == a.model else f"; {_architecture(f.model)}")),
        ("reference", _batches("micro_batch_size", f.micro_batch_size, "prompts", k, config.global_batch_size, f.parallel.data)),
    ] * loss.needs_reference
    rows = [
        ("model", f"{_architecture(a.model)}; {'bf16, fp32 masters and reductions' if config.bf16 else 'fp32'}"),
        ("policy from", f"{a.load}{' (weights only)' if a.finetune else ''}"),
        *reference[:1],
        ("placement", _placement(config)),
        *((label, line) for label, line in zip(("layout", "", "", ""), _layouts(config), strict=False)),
        ("iterations", f"{config.train_iters}, each {pairs} pairs; {k} answers a prompt = {sequences} sequences"),
        ("policy", _batches("micro_batch_size", a.micro_batch_size, "pairs", 2, pairs, a.parallel.data)),
        *reference[1:],
        *(_online_rows(config, call * k, limits) if config.stage == "ray_online_dpo" else _offline_rows(config)),
        ("loss", _loss_line(loss)),
        ("optimizer", f"AdamW, lr {o.lr:g} {decay}, warm-up {o.lr_warmup_iters} iterations, clip {o.clip_grad:g}"),
        ("memory", _memory(config)),
        ("threads", f"{config.cpu_threads} a rank" if config.cpu_threads else "on a CPU: cores / ranks that compute at the same time"),
        ("checkpoints", _checkpoints(config)),
        ("results", str(config.run_dir)),
    ]
    return "\n".join(f"{label:<12} {text}" for label, text in rows)


def _online_rows(config: Config, sequences: int, limits: list[str]) -> list[tuple[str, str]]:
    r, pairs = config.rollout, config.pairs
    ranks = _ranks(r.parallel.data, "each ")
    if r.engine == "replay":
        answers = [("rollout", f"recorded answers of {r.replay}")]
    else:
        answers = [
            ("rollout", f"{sequences // r.num_answers} prompts = {sequences} sequences at a time, " + ranks),
            ("sampling", ", ".join([f"temperature {r.temperature:g}", *limits, f"seed {config.seed}"])),
        ]
    rules = {
        "ties": (pairs.ties, "ties: the first wins", "first"),
        "identical": (pairs.identical, "identical answers count", "keep"),
        "unscored": (pairs.unscored, "an answer without score ends the run", "stop"),
        "empty": (pairs.empty, "an empty answer ends the run", "stop"),
    }
    other = [words for value, words, when in rules.values() if value == when]
    margin = [f"margin at least {pairs.min_margin:g}"] * (pairs.min_margin > 0)
    selects = {"best_worst": "best against worst answer", "best_random": "best against a random worse answer", "all": "every two answers"}
    return [
        *answers,
        ("tokens", f"seq_length {r.seq_length} = prompt {r.max_prompt_length} + answer {r.max_new_tokens}"),
        ("reward", _reward_line(config)),
        ("pairs", "; ".join([selects[pairs.select], *other, *margin])),
        ("prompts", f"{config.data.path} ['{config.data.prompt_key}'], {_order(config)}"),
    ]


def _offline_rows(config: Config) -> list[tuple[str, str]]:
    data = config.data
    masks = {"answer": "the last turn counts", "dialogue": "every assistant turn counts", "dialogue_shifted": "assistant turns, off by one"}
    return [
        ("tokens", f"seq_length {config.rollout.seq_length}; {masks[data.answer_mask]}"),
        ("preferences", f"{data.path} ['{data.chosen_key}' over '{data.rejected_key}'], {_order(config)}"),
    ]


def _order(config: Config) -> str:
    return "shuffled" if config.data.shuffle else "in file order"


def _loss_line(loss: LossConfig) -> str:
    words = [loss.loss_type, f"beta {', '.join(f'{value:g}' for value in loss.beta)}" + (" by epoch" if len(loss.beta) > 1 else "")]
    if loss.loss_type in SMOOTHED:
        words.append(f"label smoothing {loss.label_smoothing:g}")
    if loss.loss_type == "simpo":
        words.append(f"gamma/beta {loss.gamma_beta_ratio:g}, no reference")
    lengths = {"sum": "sums over tokens", "masked_mean": "means over tokens", "padded_mean": f"sums over {loss.padded_length}"}
    words.append(f"log-probs: {lengths[loss.reduction]}")
    if loss.sft_weight:
        words.append(f"+ {loss.sft_weight:g} x negative log-likelihood of the chosen answer")
    return ", ".join(words)


def _architecture(m: ModelConfig) -> str:
    millions = parameters(m) / 1e6
    return (
        f"{m.name}: {m.num_layers} layers, hidden {m.hidden_size}, {m.num_attention_heads} heads in {m.num_query_groups} groups, "
        f"vocabulary {m.vocab_size}, {millions:.{1 if millions >= 1 else 3}f} M parameters"
    )


def _ranks(count: int, each: str = "") -> str:
    return f"{each}of {count} data-parallel ranks" if count > 1 else "1 data-parallel rank"


def _batches(name: str, micro: int, unit: str, answers: int, batch: int, ranks: int) -> str:
    share = batch // ranks
    micro = min(micro, share)
    return f"{name}: {micro} {unit} = {micro * answers} sequences, {math.ceil(share / micro)} micro-batches, " + _ranks(ranks, "each ")


def _layouts(config: Config) -> list[str]:
    """One line a role: ``policy: TP 2 x PP 2 x DP 1 = 4 ranks, sequence parallel``."""
    lines = []
    for role in config.roles:
        p = config.parallel(role)
        switches = {
            f"{p.virtual} chunks a stage": p.virtual > 1,
            f"experts on {p.expert} ranks": p.expert > 1,
            "sequence parallel": p.sequence,
            "distributed optimizer": p.zero1,
            "overlapped": p.overlap,
        }
        lines.append(", ".join([f"{_NAMES.get(role, role)}: {p} = {_count(p.world_size)}", *(word for word, on in switches.items() if on)]))
    return lines


_NAMES = {"actor": "policy"}


def _placement(config: Config) -> str:
    sizes = {role: config.parallel(role).world_size for role in config.roles}
    if config.placement == "colocate":
        last = sizes["actor"] - 1
        *first, final = sizes
        who = f"{', '.join(first)} and {final} take turns" if first else f"{final} alone"
        return f"colocate: {who} on rank{f's 0-{last}' if last else ' 0'}"
    return f"separate: {', '.join(f'{role} {_count(n)}' for role, n in sizes.items())}; {sum(sizes.values())} ranks in all"


def _count(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def _reward_line(config: Config) -> str:
    penalty = f"; answers without EOS lose {config.pairs.missing_eos_penalty:g}" if config.pairs.missing_eos_penalty else ""
    if config.reward.load is not None:
        engine = {"hf": "transformers", "megatron": "megatron-core"}[config.reward.engine]
        return f"classifier {config.reward.load} on {engine}, {config.reward.micro_batch_size} sequences a micro-batch{penalty}"
    if config.reward.judge is not None:
        return f"judge {config.reward.judge}, every two answers in both orders{penalty}"
    return " + ".join(f"{fn.weight:g} x {fn.target}" for fn in config.reward.functions) + penalty


def _checkpoints(config: Config) -> str:
    save = config.save
    when = [f"every {save.interval} iterations"] * (save.interval > 0) + ["at the end"] * save.checkpoint_at_end
    return f"{' and '.join(when)}, {save.directory or config.run_dir / 'checkpoints'}" if when else "none"


def _memory(config: Config) -> str:
    """Bytes of one rank: weights, gradients (fp32), masters and moments; weights; weights. Activations come on top. Tensor and
    pipeline parallelism are counted as even, the distributed optimizer splits masters and moments."""
    width = 2 if config.bf16 else 4
    r, a, f = config.rollout, config.actor.parallel, config.reference.parallel
    n, m = parameters(config.actor.model), parameters(config.reference.model)
    states = (8 + (4 if config.bf16 else 0)) / (a.data * a.context if a.zero1 else 1)
    cache = 2 * r.model.num_layers * r.model.num_query_groups * r.model.kv_channels * width * r.seq_length
    share = config.global_batch_size // r.parallel.data
    rows = min(r.prompts_per_call or share, share) * r.num_answers
    sizes = {
        "actor": n * (width + 4 + states) / (a.tensor * a.pipeline),
        "rollout": (n * width + cache * rows) / r.parallel.tensor,
        "reference": m * width / (f.tensor * f.pipeline),
    }
    listed = ", ".join(f"{role} {size / 2**30:.2f} GiB" for role, size in sizes.items() if role in config.roles)
    return f"about {listed} a rank, without activations and the processes themselves"
