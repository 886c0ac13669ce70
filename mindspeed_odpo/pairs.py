"""Scores to pairs: which answers of a prompt meet, which of the two is preferred, which pairs say nothing. Pure torch."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from mindspeed_odpo.config import PairsConfig
from mindspeed_odpo.errors import WorkerError
from mindspeed_odpo.types import REASONS, Pairs, Rollout


def penalised(scores: Tensor, finished: Tensor, penalty: float) -> Tensor:
    """``scores`` less the penalty where the answer has no EOS; f32 ``[P,K]``, a new tensor.

    Subtracted, not replaced (TRL's PPO replaces): an unfinished answer keeps its order among unfinished ones.
    ``finished``: bool ``[P,K]``, of the answer alone; an EOS in the prompt ends no answer.
    """
    return torch.where(finished, scores, scores - penalty)


def make_pairs(scores: Tensor, rollout: Rollout, config: PairsConfig, seed: int = 0, step: int = 0) -> Pairs:
    """The pairs of every prompt, ``[P,M]``: M = K (K - 1) / 2 where ``config.select`` is ``all``, else 1.

    ``scores``: f32 ``[P,K]``, raw, NaN where an answer has none. ``seed``, ``step``: of ``best_random``'s draw. Each
    prompt is looked at by itself: the result of a part of the batch is that part of the result.

    * ``best_worst``: highest against lowest score; of equal scores the first answer is taken.
    * ``best_random``: highest against one drawn uniformly among the answers that score strictly lower; the draw
      depends on (seed, step, row of the data) and on the order of the scores, not of the answers.
    * ``all``: every two answers i < j in the order (0,1), (0,2), .., (1,2), ..; the better one is chosen.

    An answer without a score, or without a token that counts, is neither best nor worst. A pair is left out for the
    first of ``REASONS`` that holds: one of the two has no score; one is empty; both score the same (``ties: first``
    prefers the first one instead, as TRL does); both are the same tokens (no gradient, but a place in the mean); their
    gap is below ``min_margin``. ``chosen`` and ``rejected`` are two different answers in every pair, left out or not.

    Raises WorkerError for scores of another shape or dtype, K < 2, an infinite score, and, where ``unscored`` or
    ``empty`` is ``stop``, for the first such answer.

    Example: scores ``[[0, 1], [1, 0], [2, 2]]`` give chosen ``[[1], [0], [0]]``, rejected ``[[0], [1], [1]]``,
    reason ``[[kept], [kept], [tie]]``.
    """
    p, k = rollout.finished.shape
    if tuple(scores.shape) != (p, k) or scores.dtype != torch.float32:
        raise WorkerError(f"scores: expected float32 [P={p}, K={k}], one an answer, got {str(scores.dtype)[6:]} {list(scores.shape)}")
    if k < 2:
        raise WorkerError(f"K={k} answer a prompt makes no pair; set n_samples_per_prompt to 2 or more")
    scored, filled = ~scores.isnan(), rollout.counted_lengths() > 0
    _refuse(scores.isinf(), scores, rollout, "a score is a finite number, or None (NaN) for none")
    if config.unscored == "stop":
        _refuse(~scored, scores, rollout, "let the reward score every answer, or set pair_unscored: drop")
    if config.empty == "stop":
        _refuse(~filled, rollout.counted_lengths(), rollout, "not one token counts; give it one, or set pair_empty: drop", "length")

    final = penalised(scores, rollout.finished, config.missing_eos_penalty)
    _refuse(final.isinf(), scores, rollout, f"less missing_eos_penalty {config.missing_eos_penalty:g} it is beyond float32: lower it")
    rows = zip(final.tolist(), scored.tolist(), filled.tolist(), rollout.prompt_index.tolist(), strict=True)
    met = [_meet(config.select, values, s, f, (seed, step, index)) for values, s, f, index in rows]
    m = k * (k - 1) // 2 if config.select == "all" else 1
    first, second = torch.tensor(met, dtype=torch.int64).view(p, m, 2).unbind(-1)

    swap = final.gather(1, second) > final.gather(1, first)
    chosen, rejected = torch.where(swap, second, first), torch.where(swap, first, second)
    gap = final.gather(1, chosen) - final.gather(1, rejected)
    found = {
        "no_score": ~(scored.gather(1, chosen) & scored.gather(1, rejected)),
        "empty": ~(filled.gather(1, chosen) & filled.gather(1, rejected)),
        "tie": (gap == 0) & (config.ties == "drop"),
        "identical": _same_tokens(rollout, chosen, rejected) & (config.identical == "drop"),
        "margin": gap < config.min_margin,
    }
    reason = torch.zeros(p, m, dtype=torch.int64)
    for name in reversed(REASONS[1:]):  # the first one that holds is written last
        reason[found[name]] = REASONS.index(name)
    return Pairs(chosen, rejected, gap.masked_fill(reason != 0, 0.0), reason)


def _meet(
    select: str, values: Sequence[float], scored: Sequence[bool], filled: Sequence[bool], key: tuple[int, int, int]
) -> list[tuple[int, int]]:
    """The answers of one prompt that meet, the preferred one first where ``select`` looks for the best."""
    answers = range(len(values))
    if select == "all":
        return list(combinations(answers, 2))
    able = [a for a in answers if scored[a] and filled[a]]
    if len(able) < 2:  # nothing to compare: two answers that show why
        first, second, *_ = sorted(answers, key=lambda a: (a not in able, not scored[a]))
        return [(first, second)]
    best = max(able, key=values.__getitem__)  # max and min take the first of equals
    others = [a for a in able if a != best]
    if select == "best_worst":
        return [(best, min(others, key=values.__getitem__))]
    lower = [a for a in others if values[a] < values[best]] or others
    return [(best, sorted(lower, key=values.__getitem__)[_draw(key, len(lower))])]


def _draw(key: tuple[int, int, int], n: int) -> int:
    """A number in 0..n-1, the same for the same (seed, step, row of the data) wherever the prompt stands."""
    digest = hashlib.shake_128(struct.pack("<3q", *key)).digest(8)
    return int.from_bytes(digest, "little") * n >> 64


def _same_tokens(rollout: Rollout, a: Tensor, b: Tensor) -> Tensor:
    """bool ``[P,M]``: answers ``a`` and ``b``, i64 ``[P,M]``, are the same tokens; padding ids do not matter."""
    row = torch.arange(len(rollout))[:, None]
    mask_a, mask_b = rollout.response_mask[row, a], rollout.response_mask[row, b]
    same_ids = rollout.response_ids[row, a] == rollout.response_ids[row, b]
    return ((mask_a == mask_b) & (~mask_a | same_ids)).all(-1)


def _refuse(bad: Tensor, values: Tensor, rollout: Rollout, cure: str, what: str = "score") -> None:
    """Raise for the first answer where ``bad``, bool ``[P,K]``, holds."""
    if bad.any():
        prompt, answer = bad.nonzero()[0].tolist()
        raise WorkerError(
            f"prompt {int(rollout.prompt_index[prompt])} of the data, answer {answer} of 0..{bad.shape[1] - 1}: "
            f"{what} {values[prompt, answer].item()}; {cure} ({int(bad.sum())} such answers in this iteration)"
        )
