"""Draw one token a row by inverting the cumulative distribution at a given uniform number.

The randomness comes in from outside (:func:`uniforms_for`), one number a token that depends only on (seed, step, slot,
answer, token): an answer is then the same whichever rank decodes it and whatever else is in its batch.
``softmax`` + ``multinomial`` over a large vocabulary costs a third of a decode step on a CPU, this a few percent.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from mindspeed_odpo.errors import ConfigError, WorkerError

_BLOCK = 256
_BELOW_ONE = 1 - 2.0**-53


def check_sampling(temperature: float, top_p: float, top_k: int) -> None:
    """Raises ConfigError unless temperature >= 0 (0: greedy), 0 < top_p <= 1 and top_k >= 0 (0: no limit)."""
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ConfigError(f"temperature: expected a finite number >= 0 (0 is greedy), got {temperature}")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p: expected 0 < top_p <= 1 (1 keeps every token), got {top_p}")
    if top_k < 0:
        raise ConfigError(f"top_k: expected >= 0 (0 is no limit), got {top_k}")


def uniforms_for(seed: int, step: int, slots: Tensor, num_answers: int, max_new_tokens: int) -> Tensor:
    """The uniform numbers of one rollout, f64 ``[P, K, R]`` in [0, 1), on the CPU.

    ``slots``: i64 ``[P]``, position of each prompt in the global batch. Every (seed, step, slot, answer) has its own
    stream, so a rank asks for its own slots only. A longer ``max_new_tokens`` continues the same streams.
    """
    # A hash with long output, not a torch.Generator for each stream: the CPU generator keeps 32 bits of its seed, and
    # two of 65,000 streams would then often be the same one.
    streams = [
        hashlib.shake_128(struct.pack("<4q", seed, step, slot, k)).digest(8 * max_new_tokens)
        for slot in slots.tolist()
        for k in range(num_answers)
    ]
    bits = torch.frombuffer(bytearray(b"".join(streams)), dtype=torch.int64)
    return ((bits >> 11) & (2**53 - 1)).double().mul_(2.0**-53).view(len(slots), num_answers, max_new_tokens)


def sample(
    logits: Tensor,
    uniforms: Tensor,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    *,
    label: Callable[[int], str] = "row {}".format,
) -> Tensor:
    """One token a row: logits ``[B, V]`` (any float type), uniforms f64 ``[B]`` in [0, 1) -> i64 ``[B]``.

    First the temperature, then top-k (the k likeliest tokens and all that tie with the last of them), then top-p (the
    smallest set of the rest whose share reaches top_p, at least one token), as transformers does.
    Temperature 0 takes the likeliest token and ignores ``uniforms``. Tokens with probability 0 are never drawn.

    Raises ConfigError for a setting out of range; WorkerError naming ``label(row)`` where logits are NaN or +inf.
    """
    check_sampling(temperature, top_p, top_k)
    logits = logits.float()  # reductions over bf16 are several times slower on a CPU
    top = logits.amax(-1, keepdim=True)
    if not bool(torch.isfinite(top).all()):  # amax hands NaN on, and +inf is its own maximum: no second scan is needed
        bad = int((~torch.isfinite(top[:, 0])).nonzero()[0, 0])
        raise WorkerError(f"{label(bad)}: logits are not finite (largest is {float(top[bad, 0])}); the weights are not finite")
    if temperature == 0:
        return logits.max(-1).indices
    weights = logits.sub(top).div_(temperature).exp_()
    if 0 < top_k < weights.shape[1]:
        weights.masked_fill_(logits < logits.topk(top_k).values[:, -1:], 0)
    if top_p < 1:
        weights = _nucleus(weights, top_p)
    return _draw(weights, uniforms)


def _nucleus(weights: Tensor, top_p: float, count: int = 512) -> Tensor:
    """``weights [B, V]`` with 0 outside the smallest set whose share of the row's sum reaches ``top_p``; at least one stays.

    Looks at the ``count`` largest first, and at more only in rows where these are not enough: a full sort of every row
    costs more than the rest of the decode step.
    """
    count = min(count, weights.shape[1])
    goal = weights.sum(-1, keepdim=True, dtype=torch.float64) * top_p
    largest, ids = weights.topk(count)
    upto = largest.cumsum(-1, dtype=torch.float64)
    kept = torch.zeros_like(weights).scatter_(1, ids, largest * (upto - largest < goal))
    short = upto[:, -1] < goal[:, 0]
    if count < weights.shape[1] and bool(short.any()):
        kept[short] = _nucleus(weights[short], top_p, 8 * count)
    return kept


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Index with probability weights / weights.sum(): weights f32 ``[B, V]`` >= 0, uniforms f64 ``[B]`` -> i64 ``[B]``.

    Finds the block of 256 entries first, then the entry in it, so that only V / 256 + 256 sums are kept a row. Sums are
    float64: float32 would lose rare tokens behind 50,000 others.
    """
    rows, vocab = weights.shape
    blocks = torch.nn.functional.pad(weights, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK)
    upto = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    goal = uniforms[:, None] * upto[:, -1:]  # below the sum, because uniforms are below 1
    block = torch.searchsorted(upto, goal, right=True)
    inside = blocks[torch.arange(rows, device=weights.device), block[:, 0]].cumsum(-1, dtype=torch.float64)
    goal = goal - torch.where(block > 0, upto.gather(1, (block - 1).clamp_(min=0)), 0.0)
    # The two sums of a block differ in the last bit; without the limit the goal could fall behind the last token of the block.
    goal = torch.minimum(goal, inside[:, -1:] * _BELOW_ONE)
    return (block * _BLOCK + torch.searchsorted(inside, goal, right=True))[:, 0]
