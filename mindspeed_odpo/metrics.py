"""Names and reductions of what a run reports, and the one log line that system tests read.

====================================  =======================================================================
``timing/gen``, ``ref``,              seconds of the phases rollout, judge (reference and reward together), pairs,
``adv``, ``update_actor``, ``sync``   update, sync; ``timing/all`` is the whole iteration
``actor/pg_loss``                     loss, mean over kept pairs
``logps/chosen``, ``rejected``        log-probability of an answer, nats, policy before this update
``rewards/chosen``, ``rejected``      DPO's implicit reward, beta * (policy - reference); ``rewards/margins`` their
                                      difference, ``rewards/accuracies`` the share of pairs where it is positive
``reward/score/*``                    what the reward gave, before the EOS penalty, over answers that have a score;
                                      ``reward/unscored`` counts the others
``reward/margin``                     best less worst score after the penalty, mean over kept pairs
``objective/kl``                      nats an answer, policy before this update against reference: log-ratio, mean
                                      over the chosen and rejected answers of kept pairs
``val/eos_rate``                      share of answers that ended by themselves
``pairs/kept``, ``pairs/dropped_*``   prompts that trained, and why the others did not
====================================  =======================================================================

Where no pair was kept, means over pairs are NaN: ``null`` in metrics.jsonl, ``nan`` in the log line.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from torch import Tensor

from mindspeed_odpo.pairs import REASONS
from mindspeed_odpo.types import Pairs, Rollout, StepStats

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
) -> dict[str, float]:
    """All numbers of one iteration, in the order of the log line.

    ``scores``: f32 ``[P,K]``, raw, NaN where an answer has none. ``timings``: seconds by phase, with ``all``.
    """
    policy = {side: stats.mean(f"logps_{side}") for side in ("chosen", "rejected")}
    ratio = {side: policy[side] - stats.mean(f"ref_logps_{side}") for side in ("chosen", "rejected")}
    lengths = rollout.lengths().double()
    kept = int(pairs.keep.sum())
    scored = scores[~scores.isnan()].double()
    tokens = float(lengths.sum())
    return {
        **{f"timing/{PHASES.get(name, name)}": seconds for name, seconds in timings.items() if name != "all"},
        "actor/pg_loss": stats.mean("loss"),
        "beta": beta,
        "logps/chosen": policy["chosen"],
        "logps/rejected": policy["rejected"],
        "rewards/chosen": beta * ratio["chosen"],
        "rewards/rejected": beta * ratio["rejected"],
        **_spread("reward/score", scored),
        **_spread("response_length", lengths),
        **_spread("prompt_length", rollout.prompt_mask.sum(-1).double()),
        "timing/all": timings["all"],
        "rewards/margins": beta * (ratio["chosen"] - ratio["rejected"]),
        "rewards/accuracies": stats.mean("accuracy"),
        "reward/margin": float(pairs.margin[pairs.keep].double().mean()),
        "reward/unscored": float(scores.numel() - scored.numel()),
        "objective/kl": (ratio["chosen"] + ratio["rejected"]) / 2,
        "val/eos_rate": float(rollout.finished.double().mean()),
        "pairs/kept": float(kept),
        **{f"pairs/dropped_{reason}": float(pairs.reason.count(reason)) for reason in REASONS},
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "update_skipped": float(stats.skipped),
        "policy_version": float(rollout.policy_version),
        "throughput/tokens_per_second": tokens / timings["all"],
        "throughput/rollout_tokens_per_second": tokens / timings["rollout"],
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
