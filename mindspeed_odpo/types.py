"""What travels between the roles.

Axis legend (used in every docstring of this package)::

    P  prompts            S  prompt tokens, left-padded
    K  answers a prompt   R  answer tokens, right-padded
    M  pairs a prompt
    N  rows = sequences   T  tokens of a packed row (prompt, answer, right padding)
    V  vocabulary         L  layers        H  hidden size

The answers of one prompt are an axis, never a row convention: splitting by rank, micro-batching, shuffling and
dropping happen on P, and only ``engine/forward.py`` flattens to rows and back. MindSpeed-LLM 2.0.0 kept pairs in row
order and lost them with more than one pair a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from mindspeed_odpo.errors import WorkerError


def _expect(owner: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int], axes: str, hint: str = "") -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        wanted = ", ".join(f"{a}={n}" for a, n in zip(axes, shape, strict=True))
        raise WorkerError(
            f"{owner}.{name}: expected {str(dtype)[6:]} [{wanted}], got {str(tensor.dtype)[6:]} {list(tensor.shape)}"
            + (f"; {hint}" if hint else "")
        )


def _pad_to(tensor: Tensor, width: int, value: int | bool, left: bool) -> Tensor:
    gap = width - tensor.shape[-1]
    if gap == 0:
        return tensor
    filler = tensor.new_full((*tensor.shape[:-1], gap), value)
    return torch.cat([filler, tensor] if left else [tensor, filler], dim=-1)


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of one iteration, as the data gives them.

    ``ids``, ``mask``: i64, bool ``[P, S]``, left-padded. ``index``: i64 ``[P]``, row of the data file.
    ``slot``: i64 ``[P]``, position in the iteration's global batch; sampling is seeded by (seed, step, slot, answer),
    so that the answers do not depend on how the batch is split. ``rows``: the data rows themselves (prompt text,
    messages and every extra column), for the reward.
    """

    step: int
    ids: Tensor
    mask: Tensor
    index: Tensor
    slot: Tensor
    rows: tuple[Mapping[str, Any], ...]

    def __len__(self) -> int:
        return self.ids.shape[0]

    def check(self) -> PromptBatch:
        p, s = self.ids.shape
        _expect("PromptBatch", "ids", self.ids, torch.int64, (p, s), "PS")
        _expect("PromptBatch", "mask", self.mask, torch.bool, (p, s), "PS")
        _expect("PromptBatch", "index", self.index, torch.int64, (p,), "P")
        _expect("PromptBatch", "slot", self.slot, torch.int64, (p,), "P")
        if len(self.rows) != p:
            raise WorkerError(f"PromptBatch.rows: expected {p} rows, one a prompt, got {len(self.rows)}")
        return self

    def select(self, rows: Sequence[int]) -> PromptBatch:
        i = torch.as_tensor(rows, dtype=torch.int64)
        return PromptBatch(self.step, self.ids[i], self.mask[i], self.index[i], self.slot[i], tuple(self.rows[j] for j in rows))


@dataclass(frozen=True)
class Rollout:
    """What the policy answered.

    =================  ====  ===========  ==========================================================
    ``prompt_ids``     i64   ``[P,S]``    left-padded
    ``prompt_mask``    bool  ``[P,S]``    True on prompt tokens
    ``response_ids``   i64   ``[P,K,R]``  right-padded
    ``response_mask``  bool  ``[P,K,R]``  True up to and with the first EOS
    ``finished``       bool  ``[P,K]``    ended by an EOS id, not by length
    ``prompt_index``   i64   ``[P]``      which row of the data
    ``policy_version`` int                which weights answered: 0 before the first sync, then the step
    ``loss_mask``      bool  ``[P,K,R]``  which answer tokens count; None: all of ``response_mask``
    =================  ====  ===========  ==========================================================

    Example, P=1, K=2, R=3, EOS 2: answers ``[5, 2]`` and ``[5, 6, 7]`` are ``response_ids [[[5,2,2],[5,6,7]]]``,
    ``response_mask [[[T,T,F],[T,T,T]]]``, ``finished [[T, F]]``. The mask never comes from ``!= pad``: pad may equal EOS.

    ``loss_mask`` is for recorded dialogues, where what follows the prompt holds turns of the user too: those are read by
    the model (``response_mask``) and do not count in any log-probability.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    finished: Tensor
    prompt_index: Tensor
    policy_version: int
    loss_mask: Tensor | None = None

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    @property
    def counted(self) -> Tensor:
        """bool ``[P,K,R]``: the answer tokens whose log-probabilities count."""
        return self.response_mask if self.loss_mask is None else self.loss_mask

    @property
    def num_answers(self) -> int:
        return self.response_ids.shape[1]

    def check(self) -> Rollout:
        p, s = self.prompt_ids.shape
        k, r = self.response_ids.shape[1:]
        _expect("Rollout", "prompt_ids", self.prompt_ids, torch.int64, (p, s), "PS")
        _expect("Rollout", "prompt_mask", self.prompt_mask, torch.bool, (p, s), "PS")
        _expect("Rollout", "response_ids", self.response_ids, torch.int64, (p, k, r), "PKR")
        _expect("Rollout", "response_mask", self.response_mask, torch.bool, (p, k, r), "PKR")
        _expect("Rollout", "finished", self.finished, torch.bool, (p, k), "PK")
        _expect("Rollout", "prompt_index", self.prompt_index, torch.int64, (p,), "P")
        if not self.prompt_mask.any(-1).all():
            raise WorkerError("Rollout.prompt_mask: a prompt has no token; the first answer token could not be predicted")
        for name, mask in (("prompt_mask", self.prompt_mask.flip(-1)), ("response_mask", self.response_mask)):
            if (mask[..., 1:] & ~mask[..., :-1]).any():
                side = "left" if name == "prompt_mask" else "right"
                raise WorkerError(f"Rollout.{name}: a padding token between real ones; padding stands on the {side} alone")
        if self.loss_mask is not None:
            _expect("Rollout", "loss_mask", self.loss_mask, torch.bool, (p, k, r), "PKR")
            if (self.loss_mask & ~self.response_mask).any():
                raise WorkerError("Rollout.loss_mask: counts tokens that response_mask calls padding; it must lie within it")
        return self

    def lengths(self) -> Tensor:
        """Answer tokens with the EOS, i64 ``[P,K]``."""
        return self.response_mask.sum(-1)

    def counted_lengths(self) -> Tensor:
        """Answer tokens that count, i64 ``[P,K]``; equal to ``lengths()`` without a ``loss_mask``."""
        return self.counted.sum(-1)

    def select(self, rows: Sequence[int]) -> Rollout:
        i = torch.as_tensor(rows, dtype=torch.int64)
        moved: dict[str, Any] = {name: value[i] for name, value in self._tensors().items()}
        return replace(self, **moved)

    def _tensors(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "policy_version"}
        return {name: value for name, value in values.items() if value is not None}

    @staticmethod
    def concat(parts: Sequence[Rollout]) -> Rollout:
        """Join on P; narrower parts are padded (prompts on the left, answers on the right)."""
        versions = {part.policy_version for part in parts}
        if len(versions) != 1:
            raise WorkerError(f"Rollout.concat: parts were answered by different weights, versions {sorted(versions)}")
        if len({part.loss_mask is None for part in parts}) != 1:
            raise WorkerError("Rollout.concat: some parts have a loss_mask and some have none")
        s = max(part.prompt_ids.shape[-1] for part in parts)
        r = max(part.response_ids.shape[-1] for part in parts)
        wide = [
            replace(
                part,
                prompt_ids=_pad_to(part.prompt_ids, s, 0, left=True),
                prompt_mask=_pad_to(part.prompt_mask, s, False, left=True),
                response_ids=_pad_to(part.response_ids, r, 0, left=False),
                response_mask=_pad_to(part.response_mask, r, False, left=False),
                loss_mask=None if part.loss_mask is None else _pad_to(part.loss_mask, r, False, left=False),
            )
            for part in parts
        ]
        joined = {name: torch.cat([w._tensors()[name] for w in wide]) for name in wide[0]._tensors()}
        return Rollout(**joined, policy_version=versions.pop())


REASONS = ("kept", "no_score", "empty", "tie", "identical", "margin")
"""What became of a pair; all but the first say why it trains nothing, in the order in which they are looked for."""


@dataclass(frozen=True)
class Pairs:
    """Which answer is preferred, in M pairs a prompt (1, or K (K - 1) / 2 where every two answers make one).

    ===========  ====  =========  ==================================================================
    ``chosen``   i64   ``[P,M]``  the preferred answer, index on K
    ``rejected`` i64   ``[P,M]``  the other one, index on K
    ``margin``   f32   ``[P,M]``  reward gap ``score[chosen] - score[rejected]`` after the missing-EOS
                                  penalty; 0 where not kept
    ``reason``   i64   ``[P,M]``  index on ``REASONS``: 0 kept, else why the pair is left out
    ===========  ====  =========  ==================================================================
    """

    chosen: Tensor
    rejected: Tensor
    margin: Tensor
    reason: Tensor

    @property
    def keep(self) -> Tensor:
        """bool ``[P,M]``: the pairs that train."""
        return self.reason == 0

    def check(self, p: int, k: int) -> Pairs:
        m = self.chosen.shape[1] if self.chosen.ndim == 2 else 1
        _expect("Pairs", "chosen", self.chosen, torch.int64, (p, m), "PM")
        _expect("Pairs", "rejected", self.rejected, torch.int64, (p, m), "PM")
        _expect("Pairs", "margin", self.margin, torch.float32, (p, m), "PM")
        _expect("Pairs", "reason", self.reason, torch.int64, (p, m), "PM")
        for name, values, limit in (("chosen", self.chosen, k), ("rejected", self.rejected, k), ("reason", self.reason, len(REASONS))):
            if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < limit:
                raise WorkerError(
                    f"Pairs.{name}: indexes lie in 0..{limit - 1} (K={k} answers), got {int(values.min())}..{int(values.max())}"
                )
        return self

    def select(self, rows: Sequence[int]) -> Pairs:
        i = torch.as_tensor(rows, dtype=torch.int64)
        return Pairs(self.chosen[i], self.rejected[i], self.margin[i], self.reason[i])


@dataclass(frozen=True)
class TrainBatch:
    """All the actor needs: ``rollout``, ``pairs``, ``ref_logps`` f32 ``[P,K]``, one sum an answer; NaN where the loss
    needs no reference."""

    rollout: Rollout
    pairs: Pairs
    ref_logps: Tensor

    def __len__(self) -> int:
        return len(self.rollout)

    def check(self) -> TrainBatch:
        self.rollout.check()
        p, k = len(self.rollout), self.rollout.num_answers
        self.pairs.check(p, k)
        hint = "the reference returns one sum per answer"
        _expect("TrainBatch", "ref_logps", self.ref_logps, torch.float32, (p, k), "PK", hint)
        return self

    def select(self, rows: Sequence[int]) -> TrainBatch:
        i = torch.as_tensor(rows, dtype=torch.int64)
        return TrainBatch(self.rollout.select(rows), self.pairs.select(rows), self.ref_logps[i])


@dataclass(frozen=True)
class StepStats:
    """What one update did, in sums and counts, never means: adding over micro-batches and ranks is then right.

    ``sums`` are f64 Python floats keyed by metric name; ``pairs`` is the number of kept pairs they are summed over.
    ``grad_norm``, ``lr``, ``skipped``, ``nonfinite`` belong to the whole step (equal on every rank, not added): ``skipped``,
    nothing was updated; ``nonfinite``, because a loss or gradient was NaN or infinite.
    """

    sums: Mapping[str, float]
    pairs: int
    grad_norm: float = 0.0
    lr: float = 0.0
    skipped: bool = False
    nonfinite: bool = False

    def mean(self, name: str) -> float:
        """Mean over kept pairs; NaN where no pair was kept."""
        return self.sums[name] / self.pairs if self.pairs else float("nan")
