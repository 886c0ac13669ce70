"""Log-probabilities of chosen tokens, at the positions asked for and nowhere else; the vocabulary may be spread over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# Tokens whose logits exist at the same time. 1,024 tokens of a 150k vocabulary are 0.6 GB in fp32.
CHUNK = 1024


def _reduce(logits: Tensor, at: Tensor, out: Tensor) -> None:
    """``out`` f32 ``[2,A]``: log sum exp of each row of logits ``[A,V]``, and the logit at ``at``."""
    # float() before the softmax: in bf16 a sum over 50k exponentials keeps about two digits.
    wide = logits.float()
    out[0] = wide.logsumexp(-1)
    out[1] = wide.gather(1, at[:, None]).squeeze(1)


class _TokenLogps(torch.autograd.Function):
    """``picked logit - log sum exp``; backward: ``(one-hot - softmax) * grad``, with the logits of a chunk made again when there
    are several. One collective forward for all chunks, none backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk: int, group: Any) -> Tensor:
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        first = rank * weight.shape[0]
        # The padded rows of the embedding stand outside the softmax. A rank may hold nothing else.
        rows = min(max(vocab_size - first, 0), weight.shape[0])
        local = targets - first
        mine = (local >= 0) & (local < rows)
        local = local.where(mine, torch.zeros_like(local))
        # [2, A]: log sum exp over this rank's part of the vocabulary, and the target's logit, 0 where another rank has it.
        part = torch.zeros(2, targets.shape[0], dtype=torch.float32, device=hidden.device)
        kept = None
        if rows == 0:
            part[0] = -torch.inf
        elif hidden.shape[0] <= chunk and any(ctx.needs_input_grad):
            kept = F.linear(hidden, weight[:rows])
            _reduce(kept, local, part)
        else:
            for h, at, out in zip(hidden.split(chunk), local.split(chunk), part.split(chunk, 1), strict=True):
                _reduce(F.linear(h, weight[:rows]), at, out)
        part[1] *= mine
        parts = part[None]
        if size > 1:
            parts = part.new_empty(size, *part.shape)
            dist.all_gather_into_tensor(parts.view(-1), part.view(-1), group=group)
        total = parts[:, 0].logsumexp(0) if size > 1 else part[0]
        ctx.save_for_backward(hidden, weight, local, mine, total, kept)
        ctx.rows, ctx.chunk = rows, chunk
        return parts[:, 1].sum(0) - total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        hidden, weight, local, mine, total, kept = ctx.saved_tensors
        rows = ctx.rows
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        if rows > 0:
            used = weight[:rows]
            pieces = (tensor.split(ctx.chunk) for tensor in (hidden, local, mine, total, grad, grad_hidden))
            for h, at, ours, lse, g, out in zip(*pieces, strict=True):
                # What was kept stays as it is: the graph may be run again.
                slope = F.linear(h, used).float().sub_(lse[:, None]) if kept is None else kept - lse[:, None]
                slope.exp_().mul_(-g[:, None]).scatter_add_(1, at[:, None], (g * ours)[:, None])
                narrow = slope.to(h.dtype)
                del slope  # before the next piece is made
                out.copy_(narrow @ used)
                if grad_weight is not None:
                    grad_weight[:rows].addmm_(narrow.t(), h)
                del narrow
        return grad_hidden, grad_weight, None, None, None, None


def token_logps(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk: int = CHUNK, group: dist.ProcessGroup | None = None
) -> Tensor:
    """``log softmax(hidden @ weight[:vocab_size].T)[targets]`` at temperature 1 over the full true vocabulary.

    ``hidden`` ``[A,H]`` of A answer positions, ``weight`` ``[V_padded,H]`` in the same dtype, ``targets`` i64 ``[A]``.
    Returns f32 ``[A]``. The padded rows of the embedding stand outside the softmax: they are random or zero, and
    would take probability from real tokens. With more than ``chunk`` positions the logits are made in pieces and made
    again in the backward pass, so that memory does not grow with A.

    ``group``: the tensor-parallel ranks over which the vocabulary is spread; ``weight`` then holds this rank's ``V_padded / ranks``
    rows, and hidden and targets are equal on all ranks. The result is too; the gradient of ``hidden`` is this rank's part
    of a sum over the group, which the caller takes (Megatron's ``copy_to_tensor_model_parallel_region``).
    """
    return _TokenLogps.apply(hidden, weight, targets, vocab_size, chunk, group)
