"""Names and reductions of what a run reports, and the one log line that system tests read.

docs/metrics.md has the table: name, formula, unit, which way is good. Where no pair was kept, means over pairs are NaN, and
so is what needs a reference where the loss has none: ``null`` in metrics.jsonl, ``nan`` in the log line.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from torch import Tensor

from mindspeed_odpo.types import REASONS, Pairs, Rollout, StepStats

PHASES = {"rollout": "gen", "judge": "ref", "pairs": "adv", "update": "update_actor"}
"""Phase of the loop -> MindSpeed-LLM's name of its timing; other phases keep their own."""


def step_metrics(
    stats: StepStats,
    rollout: Rollout,
    pairs: Pairs,
    scores: Tensor,
    timings: Mapping[str, float],
    *,
    beta: float,
    epoch: float,
    sync_bytes: int | None = None,
) -> dict[str, float]:
    """All numbers of one iteration, in the order of the log line.

    ``scores``: f32 ``[P,K]``, raw, NaN where an answer has none. ``timings``: seconds by phase, with ``all``; without the
    phase ``rollout`` (recorded preferences) nothing is said of its speed. ``beta``: of this iteration. ``sync_bytes``: of its
    weight sync, None where there is none.
    """
    policy = {side: stats.mean(f"logps_{side}") for side in ("chosen", "rejected")}
    ratio = {side: policy[side] - stats.mean(f"ref_logps_{side}") for side in ("chosen", "rejected")}
    lengths = rollout.lengths().double()
    reward = {side: stats.mean(f"reward_{side}") for side in ("chosen", "rejected")}
    dropped = {name: float((pairs.reason == code).sum()) for code, name in enumerate(REASONS) if name != "kept"}
    # Recorded preferences train without scores: their margin of 0 says nothing.
    compared = pairs.keep & ~scores.gather(1, pairs.chosen).isnan()
    # A tie drops its pair, or (pair_ties: first) trains with a margin of 0.
    tied = (pairs.reason == REASONS.index("tie")) | (compared & (pairs.margin == 0))
    scored = scores[~scores.isnan()].double()
    tokens = float(lengths.sum())
    return {
        **{f"timing/{PHASES.get(name, name)}": seconds for name, seconds in timings.items() if name != "all"},
        "actor/pg_loss": stats.mean("loss"),
        "beta": beta,
        "logps/chosen": policy["chosen"],
        "logps/rejected": policy["rejected"],
        "rewards/chosen": reward["chosen"],
        "rewards/rejected": reward["rejected"],
        **_spread("reward/score", scored),
        **_spread("response_length", lengths),
        **_spread("prompt_length", rollout.prompt_mask.sum(-1).double()),
        "timing/all": timings["all"],
        "rewards/margins": reward["chosen"] - reward["rejected"],
        "rewards/accuracies": stats.mean("accuracy"),
        "reward/margin": float(pairs.margin[compared].double().mean()),
        "reward/unscored": float(scores.numel() - scored.numel()),
        "sft_loss": stats.mean("sft"),
        "objective/kl": (ratio["chosen"] + ratio["rejected"]) / 2,
        "objective/entropy": -(policy["chosen"] + policy["rejected"]) / 2,
        "val/eos_rate": float(rollout.finished.double().mean()),
        "pairs/kept": float(pairs.keep.sum()),
        **{f"pairs/dropped_{name}": count for name, count in dropped.items()},
        "pairs/tie_fraction": float(tied.double().mean()),
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "update_skipped": float(stats.skipped),
        "update_nonfinite": float(stats.nonfinite),
        "policy_version": float(rollout.policy_version),
        **({} if sync_bytes is None else {"sync/bytes": float(sync_bytes)}),
        "throughput/tokens_per_second": tokens / timings["all"],
        **({"throughput/rollout_tokens_per_second": tokens / timings["rollout"]} if "rollout" in timings else {}),
        "epoch": epoch,
    }


def _spread(name: str, values: Tensor) -> dict[str, float]:
    nan = float("nan")
    few = values.numel() == 0
    return {
        f"{name}/mean": nan if few else float(values.mean()),
        f"{name}/max": nan if few else float(values.max()),
        f"{name}/min": nan if few else float(values.min()),
    }


def log_line(step: int, total: int, metrics: Mapping[str, float], now: datetime) -> str:
    """MindSpeed-LLM's line for one iteration, with its trailing space: ``actor/pg_loss : ([0-9.]+)`` finds the loss.

    Four decimals; the learning rate, which they would show as 0, has an exponent.
    """
    shown = " | ".join(f"{name} : {value:.4e}" if name == "lr" else f"{name} : {value:.4f}" for name, value in metrics.items())
    return f"INFO:root:[{now:%Y-%m-%d %H:%M:%S}] iteration: {step} / {total} | {shown} "
