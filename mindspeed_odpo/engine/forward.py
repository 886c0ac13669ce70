"""Forward and backward of policy and reference: the one place where ``[P, K, ...]`` becomes rows and comes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from mindspeed_odpo.config import LossConfig
from mindspeed_odpo.engine.parallel import any_rank, cp_rank, cp_size, dp_size, from_last_stage, largest, sum_over_context
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
    numbers cannot depend on how wide a batch was padded. ``positions`` i64 ``[T]``: of the columns, in the sequence.

    Example, prompt [7, 8], answer [5, 2]: ids [7, 8, 5], columns [1, 2], targets [5, 2], positions [0, 1, 2].
    """

    ids: Tensor
    row: Tensor
    column: Tensor
    target: Tensor
    positions: Tensor

    @property
    def num_rows(self) -> int:
        return self.ids.shape[0]

    def sums(self, token_logps: Tensor) -> Tensor:
        """Log-probability of each row's whole answer: f32 ``[A]`` to f32 ``[N]``; 0 for an empty answer."""
        return token_logps.new_zeros(self.num_rows).index_add(0, self.row, token_logps)

    def to(self, device: torch.device) -> Rows:
        return Rows(*(tensor.to(device) for tensor in (self.ids, self.row, self.column, self.target, self.positions)))

    def part(self, rank: int, ranks: int, multiple: int) -> Rows:
        """What context-parallel rank ``rank`` of ``ranks`` has of these rows: runs ``rank`` and ``2 * ranks - 1 - rank`` of the
        2 * ranks into which the columns are cut, after padding their number to a multiple of ``multiple``.

        Every token kept its target and position from the whole row; a rank may have no token that counts.
        Example, 2 ranks, columns 0 to 7: rank 0 has 0, 1, 6, 7, rank 1 has 2, 3, 4, 5.
        """
        width = -(-self.ids.shape[1] // multiple) * multiple
        ids = F.pad(self.ids, (0, width - self.ids.shape[1]))
        if ranks == 1:
            return replace(self, ids=ids, positions=torch.arange(width))
        runs = torch.arange(width).view(2 * ranks, -1)
        positions = torch.cat([runs[rank], runs[2 * ranks - 1 - rank]])
        where = torch.full((width,), -1).index_put((positions,), torch.arange(len(positions)))
        column = where[self.column]
        mine = column >= 0
        return Rows(ids[:, positions], self.row[mine], column[mine], self.target[mine], positions)


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
        positions=torch.arange(width),
    )


def row_multiple(config: Any) -> int:
    """What the number of columns is padded to: two runs a context-parallel rank, whole runs a sequence-parallel one."""
    ranks = config.context_parallel_size
    runs = 2 if ranks > 1 else 1
    return int(ranks * (math.lcm(runs, config.tensor_model_parallel_size) if config.sequence_parallel else runs))


def local_rows(rows: Rows, config: Any, device: torch.device) -> Rows:
    """This rank's part of ``rows``, on its device."""
    return rows.part(cp_rank(), cp_size(), row_multiple(config)).to(device)


def answer_token_logps(chunk: nn.Module, rows: Rows) -> Tensor:
    """f32 ``[A]``: log-probability of every answer token under the model, at temperature 1 over the true vocabulary; from a
    chunk that is not the pipeline's last its hidden states. ``rows``: this rank's part."""
    positions = rows.positions[None].expand_as(rows.ids)
    return chunk(rows.ids, positions, None, select=(rows.row, rows.column), targets=rows.target)


_Piece = TypeVar("_Piece")
LossFunc = Callable[[Tensor], tuple[Tensor, Any]]


def run_pipeline(
    chunks: Sequence[nn.Module],
    pieces: Sequence[_Piece],
    step: Callable[[_Piece, nn.Module], tuple[Tensor, LossFunc]],
    *,
    forward_only: bool,
) -> list[Any]:
    """Megatron's schedule (none, 1F1B or interleaved) over micro-batches ``pieces``: what the loss functions told, one an item
    on the last stage, none on the others. All ranks that share a sequence give equal pieces."""

    def forward(pending: Iterator[_Piece], chunk: nn.Module) -> tuple[Tensor, LossFunc]:
        return step(next(pending), chunk)

    iterators = [iter(pieces) for _ in chunks]
    told: list[Any] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(pieces),
        seq_length=1,  # both unused: rows are as long as they are, and pipeline stages tell each other the shape
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return told


def filled(pieces: Sequence[_Piece], filler: _Piece, config: Any, device: torch.device) -> list[_Piece]:
    """``pieces`` and as many ``filler`` as the layout needs: the interleaved schedule takes a whole number of rounds over its
    stages, and ranks that share experts meet in every micro-batch."""
    count = len(pieces)
    if config.expert_model_parallel_size > 1:
        count = largest(count, device)
    if config.virtual_pipeline_model_parallel_size is not None:
        round_ = config.microbatch_group_size_per_vp_stage
        count = -(-count // round_) * round_
    return [*pieces, *[filler] * (count - len(pieces))]


@torch.no_grad()
def row_sums(chunks: Sequence[nn.Module], pieces: Sequence[Rows], device: torch.device) -> Tensor:
    """Sum over each row's chosen positions of what the model says there (log-probability of the target, or value): f32, the rows
    of all ``pieces`` in order, equal on all ranks that share them. A piece is a micro-batch of whole rows."""
    config: Any = chunks[0].config
    local = [local_rows(rows, config, device) for rows in pieces]
    local = filled(local, min(local, key=lambda rows: rows.ids.numel()), config, device)

    def step(rows: Rows, chunk: nn.Module) -> tuple[Tensor, LossFunc]:
        return answer_token_logps(chunk, rows), lambda said: (said.new_zeros(()), sum_over_context(rows.sums(said)))

    sums = run_pipeline(chunks, local, step, forward_only=True)
    total = sum(rows.num_rows for rows in pieces)
    return from_last_stage(torch.cat(sums)[:total] if sums else torch.empty(total, device=device)).cpu()


def answer_logps(chunks: Sequence[nn.Module], rollout: Rollout, micro_batch_size: int, device: torch.device) -> Tensor:
    """Log-probability of every answer: f32 ``[P,K]``, equal on the ranks of one data-parallel index. ``micro_batch_size`` counts
    prompts (K sequences each)."""
    p, k = rollout.finished.shape
    pieces = [
        pack_rows(rollout, some.repeat_interleave(k), torch.arange(k).repeat(len(some))) for some in torch.arange(p).split(micro_batch_size)
    ]
    return row_sums(chunks, pieces, device).view(p, k)


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
    ddps: Sequence[Any],
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
    """One optimizer step on this rank's share of an iteration. All ranks of one data-parallel index give the same ``batch`` and
    get the same statistics.

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
    config: Any = ddps[0].config
    kept = _micro_batches(batch, micro_batch_size)
    # The first micro-batch holds the shortest prompts: its first pair, with weight 0, costs least.
    pieces = filled([(pairs, 1.0) for pairs in kept], (kept[0][:1], 0.0), config, device)
    # Megatron divides what we return by the number of micro-batches and multiplies it by the context-parallel ranks; DDP
    # averages gradients over data- and context-parallel ranks, of which the latter each have a part of one sequence's. What
    # remains is undone here, in the only place that knows the sum is over kept pairs of the whole iteration.
    scale = len(pieces) * dp_size() / global_pairs

    def step(piece: tuple[Tensor, float], chunk: nn.Module) -> tuple[Tensor, LossFunc]:
        prompt, which = piece[0].unbind(1)
        answers = torch.stack([batch.pairs.chosen[prompt, which], batch.pairs.rejected[prompt, which]])  # [2,n]
        used, back = torch.unique(prompt * num_answers + answers, return_inverse=True)
        rows = local_rows(pack_rows(rollout, used // num_answers, used % num_answers), config, device)
        keep = batch.pairs.keep[prompt, which]
        # A pair with weight 0 may have any reference log-prob; 0 for it, since a NaN times 0 is a NaN.
        ref = batch.ref_logps[prompt, answers].masked_fill(~keep, 0.0).to(device)
        tokens, weight, back = lengths[prompt, answers].to(device), piece[1] * keep.to(device, torch.float32), back.to(device)

        def loss_func(token_logps: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            policy = sum_over_context(rows.sums(token_logps))[back]
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
            sums = torch.stack([(value.detach() * weight).sum() for value in columns])
            return (each * weight).sum() * scale, sums

        return answer_token_logps(chunk, rows), loss_func

    for ddp in ddps:
        ddp.zero_grad_buffer()
    optimizer.zero_grad()
    told = run_pipeline(ddps, pieces, step, forward_only=False)
    totals = torch.stack(told).double().sum(0) if told else torch.empty(len(STATS), dtype=torch.float64, device=device)
    sums = dict(zip(STATS, from_last_stage(totals).tolist(), strict=True))
    stats = StepStats(sums=sums, pairs=int(batch.pairs.keep.sum()), lr=lr)
    # Before the step: with bf16 Megatron has no loss scaler that would look, and a NaN would enter the weights.
    grads = sum(float(buffer.grad_data.sum()) for ddp in ddps for buffer in ddp.buffers + ddp.expert_parallel_buffers)
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
