"""Log-probabilities of chosen tokens, at the positions asked for and nowhere else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Tokens whose logits exist at the same time. 1,024 tokens of a 150k vocabulary are 0.6 GB in fp32.
CHUNK = 1024


def _chunk_logps(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    # float() before the softmax: in bf16 a sum over 50k exponentials keeps about two digits.
    return -F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none")


def token_logps(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk: int = CHUNK) -> Tensor:
    """``log softmax(hidden @ weight[:vocab_size].T)[targets]`` at temperature 1 over the full true vocabulary.

    ``hidden`` ``[A,H]`` of A answer positions, ``weight`` ``[V_padded,H]`` in the same dtype, ``targets`` i64 ``[A]``.
    Returns f32 ``[A]``. The padded rows of the embedding stand outside the softmax: they are random or zero, and
    would take probability from real tokens. With more than ``chunk`` positions the logits are made in pieces and made
    again in the backward pass, so that memory does not grow with A.
    """
    if weight.shape[0] > vocab_size:  # a slice of everything would cost its backward pass a copy of the whole embedding
        weight = weight[:vocab_size]
    if hidden.shape[0] <= chunk:
        return _chunk_logps(hidden, weight, targets)
    pieces = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([_chunk_logps(h, weight, t) for h, t in pieces])
    return torch.cat([checkpoint(_chunk_logps, h, weight, t, use_reentrant=False) for h, t in pieces])
