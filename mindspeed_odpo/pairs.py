"""Scores to pairs: which answer of a prompt is preferred, and which prompts say nothing. Pure torch."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_odpo.errors import WorkerError
from mindspeed_odpo.types import Pairs, Rollout

REASONS = ("no_score", "tie", "identical")
"""Why a prompt trains nothing, in the order in which they are looked for."""


def penalised(scores: Tensor, finished: Tensor, missing_eos_penalty: float) -> Tensor:
    """``scores`` less the penalty where the answer has no EOS; f32 ``[P,K]``, a new tensor.

    Subtracted, not replaced (TRL's PPO replaces): an unfinished answer keeps its order among unfinished ones.
    """
    return scores - missing_eos_penalty * (~finished).to(scores.dtype)


def make_pairs(scores: Tensor, rollout: Rollout, missing_eos_penalty: float = 0.0) -> Pairs:
    """The best and the worst answer of every prompt.

    ``scores``: f32 ``[P,K]``, NaN where an answer has no score; an unscored or empty answer is never chosen nor
    rejected. A prompt is not kept, for one reason, when fewer than two of its answers can be compared
    (``no_score``), when best and worst score the same (``tie``; TRL trains on "the first wins", which is noise), or
    when both are the same tokens (``identical``: the gradient would be exactly zero, the count would not).

    Example: scores ``[[0, 1], [1, 0], [2, 2]]`` give chosen ``[1, 0, 0]``, rejected ``[0, 1, 0]``, keep ``[T, T, F]``.
    """
    p, k = rollout.finished.shape
    if tuple(scores.shape) != (p, k) or scores.dtype != torch.float32:
        raise WorkerError(f"scores: expected float32 [P={p}, K={k}], one an answer, got {str(scores.dtype)[6:]} {list(scores.shape)}")
    final = penalised(scores, rollout.finished, missing_eos_penalty)
    usable = ~final.isnan() & (rollout.lengths() > 0)
    best, chosen = final.masked_fill(~usable, -torch.inf).max(dim=1)
    worst, rejected = final.masked_fill(~usable, torch.inf).min(dim=1)

    comparable = usable.sum(1) >= 2
    tie = comparable & (best == worst)
    row = torch.arange(p)
    mask_c, mask_r = rollout.response_mask[row, chosen], rollout.response_mask[row, rejected]
    ids_c, ids_r = rollout.response_ids[row, chosen], rollout.response_ids[row, rejected]
    identical = comparable & ~tie & ((mask_c == mask_r) & (~mask_c | (ids_c == ids_r))).all(1)
    keep = comparable & ~tie & ~identical
    margin = torch.where(keep, best - worst, torch.zeros_like(best))
    which = torch.stack([~comparable, tie, identical, keep]).int().argmax(0).tolist()
    reason = tuple((*REASONS, None)[i] for i in which)
    return Pairs(chosen=chosen, rejected=rejected, keep=keep, margin=margin, reason=reason)
