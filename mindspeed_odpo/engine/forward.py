"""Forward and backward of policy and reference: the one place where ``[P, K, ...]`` becomes rows and comes back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from mindspeed_odpo.config import LossConfig
from mindspeed_odpo.engine.parallel import any_rank, dp_size
from mindspeed_odpo.errors import WorkerError
from mindspeed_odpo.loss import preference_loss, reduced, sft_loss
from mindspeed_odpo.types import Rollout, StepStats, TrainBatch

STATS = (
    "loss",
    "sft",
    "logps_chosen",
    "logps_rejected",
    "ref_logps_chosen",
    "ref_logps_rejected",
    "reward_chosen",
    "reward_rejected",
    "accuracy",
)


@dataclass(frozen=True)
class Rows:
    """N packed sequences ``[prompt, answer, right padding]`` and the positions that predict their answers' counted tokens.

    ``ids`` i64 ``[N,T]``; the longest row's last answer token is not fed, nothing follows it. ``row``, ``column``, ``target``: i64
    ``[A]``, for every answer token that counts of every row: it is ``target`` and is predicted at ``ids[row, column]``.
    Padding stands on the right alone, so a causal mask is all the attention needs and positions count from 0: the
    numbers cannot depend on how wide a batch was padded.

    Example, prompt [7, 8], answer [5, 2]: ids [7, 8, 5], columns [1, 2], targets [5, 2].
    """

    ids: Tensor
    row: Tensor
    column: Tensor
    target: Tensor

    @property
    def num_rows(self) -> int:
        return self.ids.shape[0]

    def sums(self, token_logps: Tensor) -> Tensor:
        """Log-probability of each row's whole answer: f32 ``[A]`` to f32 ``[N]``; 0 for an empty answer."""
        return token_logps.new_zeros(self.num_rows).index_add(0, self.row, token_logps)


def pack_rows(rollout: Rollout, prompt: Tensor, answer: Tensor) -> Rows:
    """Rows for answer ``answer[i]`` of prompt ``prompt[i]``; both i64 ``[N]``."""
    p_mask, r_mask = rollout.prompt_mask[prompt], rollout.response_mask[prompt, answer]
    # Left-padded prompt beside right-padded answer is one contiguous run of real tokens, pad_left columns in.
    ids = torch.cat([rollout.prompt_ids[prompt], rollout.response_ids[prompt, answer]], dim=1)
    prompt_len, answer_len = p_mask.sum(1), r_mask.sum(1)
    pad_left = p_mask.shape[1] - prompt_len
    width = max(int((prompt_len + answer_len).max()) - 1, 1)
    source = torch.arange(width)[None] + pad_left[:, None]
    packed = ids.gather(1, source.clamp(max=ids.shape[1] - 1))
    real = torch.arange(width)[None] < (prompt_len + answer_len)[:, None]
    row, offset = rollout.counted[prompt, answer].nonzero(as_tuple=True)
    return Rows(
        ids=packed.masked_fill(~real, 0),
        row=row,
        column=prompt_len[row] - 1 + offset,
        target=rollout.response_ids[prompt[row], answer[row], offset],
    )


def answer_token_logps(model: nn.Module, rows: Rows, device: torch.device) -> Tensor:
    """f32 ``[A]``: log-probability of every answer token under the model, at temperature 1 over the true vocabulary."""
    ids = rows.ids.to(device)
    positions = torch.arange(ids.shape[1], device=device)[None].expand_as(ids)
    where = (rows.row.to(device), rows.column.to(device))
    return model(ids, positions, None, select=where, targets=rows.target.to(device))


@torch.no_grad()
def answer_logps(model: nn.Module, rollout: Rollout, micro_batch_size: int, device: torch.device) -> Tensor:
    """Log-probability of every answer: f32 ``[P,K]``. ``micro_batch_size`` counts prompts (K sequences each)."""
    p, k = rollout.finished.shape
    out = torch.empty(p, k)
    for some in torch.arange(p).split(micro_batch_size):
        rows = pack_rows(rollout, some.repeat_interleave(k), torch.arange(k).repeat(len(some)))
        out[some] = rows.sums(answer_token_logps(model, rows, device).cpu()).view(-1, k)
    return out


def _micro_batches(batch: TrainBatch, micro_batch_size: int) -> list[Tensor]:
    """The kept pairs as (prompt, pair), i64 ``[n,2]``, in pieces of ``micro_batch_size`` pairs. A rank without a kept pair
    still takes part in the gradient reduction: it runs its first pair with weight 0."""
    kept = batch.pairs.keep.nonzero()
    if len(kept) == 0:
        return [torch.zeros(1, 2, dtype=torch.int64)]
    # Prompts of like length together: less padding. The order of a sum over pairs does not matter. Pairs of one prompt stay
    # side by side, and an answer that stands in several of them is run once.
    total = batch.rollout.prompt_mask.sum(1) + batch.rollout.lengths().amax(1)
    kept = kept[torch.argsort(total[kept[:, 0]], stable=True)]
    return list(kept.split(micro_batch_size))


def train_step(
    model: Any,
    optimizer: MegatronOptimizer,
    batch: TrainBatch,
    *,
    global_pairs: int,
    micro_batch_size: int,
    loss: LossConfig,
    beta: float,
    lr: float,
    device: torch.device,
    nonfinite: str = "stop",
) -> StepStats:
    """One optimizer step on this rank's share of an iteration.

    ``global_pairs``: kept pairs of the whole iteration, over all data-parallel ranks; the loss is their mean, so that the
    result is the same for every split. ``micro_batch_size`` counts pairs (two sequences each). ``beta``: of this iteration.
    With no kept pair at all nothing is updated (momentum and weight decay would move the weights without evidence) and
    ``skipped`` is True. A loss or gradient that is not finite on any rank never reaches the weights: WorkerError on every
    rank, or with ``nonfinite`` "skip" an update left out, ``skipped`` and ``nonfinite`` True.
    """
    batch.check()
    rollout = batch.rollout
    num_answers, lengths = rollout.num_answers, rollout.counted_lengths()
    if global_pairs == 0:
        return StepStats(sums=dict.fromkeys(STATS, 0.0), pairs=0, lr=lr, skipped=True)
    pieces = _micro_batches(batch, micro_batch_size)
    # Megatron divides what we return by the number of micro-batches and DDP averages over data-parallel ranks: both
    # undone here, in the only place that knows the sum is over kept pairs of the whole iteration.
    scale = len(pieces) * dp_size() / global_pairs

    def forward(pending: Iterator[Tensor], gpt: nn.Module) -> tuple[Tensor, Any]:
        prompt, which = next(pending).unbind(1)
        answers = torch.stack([batch.pairs.chosen[prompt, which], batch.pairs.rejected[prompt, which]])  # [2,n]
        used, back = torch.unique(prompt * num_answers + answers, return_inverse=True)
        rows = pack_rows(rollout, used // num_answers, used % num_answers)
        keep = batch.pairs.keep[prompt, which]
        # A pair with weight 0 may have any reference log-prob; 0 for it, since a NaN times 0 is a NaN.
        ref = batch.ref_logps[prompt, answers].masked_fill(~keep, 0.0).to(device)
        tokens, weight, back = lengths[prompt, answers].to(device), keep.to(device, torch.float32), back.to(device)

        def loss_func(token_logps: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            rows_on_device = Rows(rows.ids, rows.row.to(device), rows.column, rows.target)
            policy = rows_on_device.sums(token_logps)[back]
            logps, ref_logps = (reduced(sums, tokens, loss.reduction, loss.padded_length) for sums in (policy, ref))
            sft = sft_loss(policy[0], tokens[0])
            each = preference_loss(
                *logps,
                *ref_logps,
                loss_type=loss.loss_type,
                beta=beta,
                label_smoothing=loss.label_smoothing,
                gamma_beta_ratio=loss.gamma_beta_ratio,
            )
            if loss.sft_weight:
                each = each + loss.sft_weight * sft
            reward = beta * (logps - ref_logps if loss.needs_reference else logps)
            columns = (each, sft, *policy, *ref, *reward, (reward[0] > reward[1]).float())
            sums = {name: (value.detach() * weight).sum() for name, value in zip(STATS, columns, strict=True)}
            return (each * weight).sum() * scale, sums

        return answer_token_logps(gpt, rows, device), loss_func

    model.zero_grad_buffer()
    optimizer.zero_grad()
    parts: Sequence[dict[str, Tensor]] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(pieces),
        model=[model],
        num_microbatches=len(pieces),
        seq_length=1,  # unused without pipeline parallelism: rows are as long as they are
        micro_batch_size=2 * micro_batch_size,
        forward_only=False,
    )
    sums = {name: sum(float(part[name]) for part in parts) for name in STATS}
    stats = StepStats(sums=sums, pairs=int(batch.pairs.keep.sum()), lr=lr)
    # Before the step: with bf16 Megatron has no loss scaler that would look, and a NaN would enter the weights.
    grads = sum(float(buffer.grad_data.sum()) for buffer in model.buffers)
    bad = not (math.isfinite(sums["loss"]) and math.isfinite(grads))
    if any_rank(bad, device):  # all ranks stop, or all skip: one alone would leave the others waiting in the optimizer
        if nonfinite == "skip":
            return replace(stats, skipped=True, nonfinite=True)
        found = f"loss {sums['loss']}, sum of all gradients {grads} over {stats.pairs} pairs (sums {sums})"
        raise WorkerError(
            f"{found if bad else 'a loss or gradient on another rank is not finite'}; nothing was updated: resume from the last "
            "checkpoint with a smaller lr or dpo_beta, or set on_nonfinite: skip"
        )
    _, grad_norm, _ = optimizer.step()
    return replace(stats, grad_norm=float(grad_norm))
