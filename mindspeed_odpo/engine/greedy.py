"""Is an answer what the model itself would say? One forward over prompt and answer tells, without generating."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed_odpo.engine.forward import LossFunc, Rows, filled, local_rows, pack_rows, run_pipeline
from mindspeed_odpo.engine.parallel import cp_group, cp_size, from_last_stage
from mindspeed_odpo.engine.weights import unwrap
from mindspeed_odpo.types import Rollout


@torch.no_grad()
def greedy_gaps(chunks: Sequence[nn.Module], rollout: Rollout, device: torch.device) -> Tensor:
    """How far the model is from having given these answers greedily: f32 ``[P,K]``, equal on all ranks that share a sequence.

    At each answer token the largest logit minus the token's, over the largest absolute logit; of an answer the largest of
    these. 0: every token is the model's own first choice. Answers run one prompt at a time, with their logits whole.
    """
    p, k = rollout.finished.shape
    config: Any = chunks[0].config
    rows = [local_rows(pack_rows(rollout, torch.full((k,), prompt), torch.arange(k)), config, device) for prompt in range(p)]

    def step(piece: Rows, chunk: nn.Module) -> tuple[Tensor, LossFunc]:
        def worst(hidden: Tensor) -> tuple[Tensor, Tensor]:
            head: Any = unwrap(chunk)
            logits = head.head(hidden)
            gap = logits.amax(-1) - logits.gather(1, piece.target[:, None]).squeeze(1)
            gap = gap / logits.abs().amax(-1)
            largest = gap.new_zeros(piece.num_rows).scatter_reduce(0, piece.row, gap, "amax")
            if cp_size() > 1:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=cp_group())
            return hidden.new_zeros(()), largest

        positions = piece.positions[None].expand_as(piece.ids)
        return chunk(piece.ids, positions, None, select=(piece.row, piece.column)), worst

    told = run_pipeline(chunks, filled(rows, rows[0], config, device), step, forward_only=True)
    gaps = torch.stack(told)[:p] if told else torch.empty(p, k, device=device)
    return from_last_stage(gaps).cpu()
