"""A transformer that says one number about a sequence: the reward model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mindspeed_odpo.config import ModelConfig, ParallelConfig
from mindspeed_odpo.engine.model import PolicyModel, transformer_config


class _ValueHead(nn.Module):
    """``weight`` f32 ``[1,H]``, without bias, as in transformers' ``...ForSequenceClassification``."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, hidden_size), math.nan, dtype=torch.float32, device=device))


class ValueModel(PolicyModel):
    """The policy's transformer with a value head in fp32 in place of the language head."""

    def __init__(self, config: TransformerConfig, model: ModelConfig) -> None:
        # A tied head is the embedding, which is there anyway: no language head is made.
        super().__init__(config, replace(model, untie_embeddings_and_output_weights=False))
        self.value_head = _ValueHead(model.hidden_size, self.embedding.word_embeddings.weight.device)

    def values(self, ids: Tensor, column: Tensor) -> Tensor:
        """f32 ``[N]``: the value at ``ids[n, column[n]]``, which sees nothing to its right. ``ids`` i64 ``[N,T]``, padded on
        the right with any id; ``column`` i64 ``[N]``."""
        hidden = self(ids, select=(torch.arange(len(ids), device=ids.device), column))
        return F.linear(hidden, self.value_head.weight).squeeze(-1)


def build_value_model(model: ModelConfig, parallel: ParallelConfig, bf16: bool, forwarded: Mapping[str, Any] | None = None) -> ValueModel:
    """A frozen value model, NaN until ``load_named`` fills it. Needs ``init_parallel`` to have run."""
    return ValueModel(transformer_config(model, parallel, bf16, forwarded), model).eval().requires_grad_(False)
