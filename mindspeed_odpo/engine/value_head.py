"""A transformer that says one number about a sequence: the reward model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mindspeed_odpo.config import ModelConfig, ParallelConfig
from mindspeed_odpo.engine.forward import Rows, row_sums
from mindspeed_odpo.engine.model import PolicyModel, transformer_config


class _ValueHead(nn.Module):
    """``weight`` f32 ``[1,H]``, without bias, as in transformers' ``...ForSequenceClassification``."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, hidden_size), math.nan, dtype=torch.float32, device=torch.cuda.current_device()))


class ValueModel(PolicyModel):
    """The policy's transformer with a value head in fp32 in place of the language head, on the pipeline's last chunk."""

    def __init__(self, config: TransformerConfig, model: ModelConfig, virtual: int = 0) -> None:
        # A tied head is the embedding, which is there anyway: no language head is made.
        super().__init__(config, replace(model, untie_embeddings_and_output_weights=False), virtual)
        if self.post_process:
            self.value_head = _ValueHead(model.hidden_size)
            if not self.pre_process:
                # The last stage's copy of the embedding, made for a tied head.
                self.output_layer = None
                self.share_embeddings_and_output_weights = False

    def forward(self, *args: Any, targets: Tensor | None = None, **kwargs: Any) -> Tensor:
        """As the policy's, with values for log-probabilities: nothing is predicted, targets are not read."""
        return super().forward(*args, **kwargs)

    def read_out(self, chosen: Tensor) -> Tensor:
        """f32 ``[A]``: the values of final hidden states ``[A,H]``."""
        return F.linear(chosen.float(), self.value_head.weight).squeeze(-1)


def values(chunks: Sequence[ValueModel], ids: Tensor, column: Tensor, device: torch.device) -> Tensor:
    """f32 ``[N]``: the value at ``ids[n, column[n]]``, which sees nothing to its right; on every rank. ``ids`` i64 ``[N,T]``, padded on
    the right with any id; ``column`` i64 ``[N]``."""
    rows = Rows(ids, torch.arange(len(ids)), column, torch.zeros_like(column), torch.arange(ids.shape[1]))
    return row_sums(chunks, [rows], device)


def build_value_model(
    model: ModelConfig, parallel: ParallelConfig, bf16: bool, forwarded: Mapping[str, Any] | None = None
) -> list[ValueModel]:
    """A frozen value model, one chunk for each virtual stage, NaN until ``load_named`` fills it. Needs ``init_parallel`` to have run."""
    config = transformer_config(model, parallel, bf16, forwarded)
    return [ValueModel(config, model, virtual).eval().requires_grad_(False) for virtual in range(parallel.virtual)]
