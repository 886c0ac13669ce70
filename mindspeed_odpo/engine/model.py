"""The policy as a megatron-core GPTModel: Llama and Qwen2 architectures, log-probs only where they are asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mindspeed_odpo.config import ModelConfig, ParallelConfig
from mindspeed_odpo.engine.logprobs import token_logps
from mindspeed_odpo.engine.parallel import check_parallel
from mindspeed_odpo.errors import ConfigError, nearest


def _not_loaded(weight: Tensor) -> Tensor:
    # Weights always come from a folder, a checkpoint or another rank. A forgotten load shows as NaN, not as bad learning.
    return nn.init.constant_(weight, math.nan)


def transformer_config(
    model: ModelConfig, parallel: ParallelConfig, bf16: bool, forwarded: Mapping[str, Any] | None = None
) -> TransformerConfig:
    """Megatron's config of ``model``. ``forwarded``: further TransformerConfig fields by name, such as ``recompute_granularity``.

    ConfigError for a forwarded key that TransformerConfig does not have, or one that contradicts what the model, the
    parallel sizes or online DPO (no dropout: policy and reference must be comparable) fix.
    """
    check_parallel(parallel)
    dtype = torch.bfloat16 if bf16 else torch.float32
    fixed: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "rotary_interleaved": model.rotary_interleaved,
        "layernorm_epsilon": model.norm_epsilon,
        "add_qkv_bias": model.add_qkv_bias,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "init_method": _not_loaded,
        "output_layer_init_method": _not_loaded,
    }
    known = [field.name for field in fields(TransformerConfig)]
    for key, value in (forwarded or {}).items():
        if key not in known:
            raise ConfigError(f"{key}={value}: not a field of megatron-core's TransformerConfig{nearest(key, known)}")
        if key in fixed and value != fixed[key]:
            raise ConfigError(f"{key}={value}: fixed to {fixed[key]} by the model, the parallel sizes or online DPO: remove the key")
    return TransformerConfig(**{**(forwarded or {}), **fixed})


class _RMSNormOnCPU(torch.autograd.Function):
    """RMSNorm in fp32 with one rounding at the end. torch composes it on a CPU from a chain of small operations; with the
    gradient written out, forward and backward together take about half the time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        inverse = torch.linalg.vecdot(x32, x32).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, inverse)
        return torch.mul(x32, inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        x, weight, inverse = ctx.saved_tensors
        size = x.shape[-1]
        normed = x * inverse  # inverse is fp32, hence so is this
        grad_normed = (grad * normed).flatten(0, -2)
        grad_weight = grad_normed.sum(0).to(weight.dtype)
        mean = torch.mv(grad_normed, weight.float()).div_(size).view(inverse.shape)
        grad_x = torch.mul(grad, weight.float()).addcmul_(normed, mean, value=-1).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight, None


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, computed in fp32.

    Ours, because megatron-core's wrapper without Transformer Engine refuses sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron reduces by this mark
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cpu:
            return _RMSNormOnCPU.apply(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class CoreAttention(MegatronModule):
    """Attention through ``scaled_dot_product_attention``, with Megatron's calling convention.

    ``query`` ``[T,N,heads,d]``, ``key``, ``value`` ``[T,N,groups,d]``; ``attention_mask`` bool, True where a query must **not**
    look, broadcastable to ``[N,1,T,T]``; None: causal. Returns ``[T,N,heads * d]``.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale  # None: 1 / sqrt(d)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        if attention_bias is not None or packed_seq_params is not None:
            raise NotImplementedError("CoreAttention: attention_bias and packed_seq_params are not supported")
        length, rows = query.shape[:2]
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if q.is_cpu and q.dtype == torch.bfloat16:
            # bf16 attention on a CPU has a backward 3 to 4 times slower than fp32's, more than the casts cost. Cast without
            # a gradient too: policy and reference must round alike.
            q, k, v = q.float(), k.float(), v.float()
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if attention_mask is None else ~attention_mask,
            is_causal=attention_mask is None,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).reshape(length, rows, -1).to(query.dtype)


def _block_spec(num_layers: int) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attention.submodules.core_attention = CoreAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


def rope_inv_freq(model: ModelConfig) -> Tensor:
    """Rotation speed of each pair of channels, radians a token: f32 ``[kv_channels / 2]``, with Llama 3's scaling.

    That scaling divides slow rotations (wavelength above ``original / low_freq_factor``) by the factor, keeps fast ones
    (below ``original / high_freq_factor``) and blends between. Megatron knows it with the factors 1, 4 and 8192 alone.
    """
    channels = torch.arange(0, model.kv_channels, 2, dtype=torch.float32)
    speed = 1.0 / model.rotary_base ** (channels / model.kv_channels)
    if model.rope_scaling_factor is None:
        return speed
    turns = model.original_max_position_embeddings / (2 * math.pi / speed)  # in the original context length
    keep = ((turns - model.low_freq_factor) / (model.high_freq_factor - model.low_freq_factor)).clamp(0, 1)
    # This order of operations rounds as transformers does: one last bit of speed is 5e-4 radians at token 8,000.
    return (1 - keep) * speed / model.rope_scaling_factor + keep * speed


class PolicyModel(GPTModel):
    """A GPTModel whose ``forward`` answers for chosen positions, so that ``[N,T,V]`` logits never exist in training."""

    def __init__(self, config: TransformerConfig, model: ModelConfig) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=_block_spec(model.num_layers),
            vocab_size=model.padded_vocab_size,
            max_sequence_length=model.max_position_embeddings,
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type="rope",
            rotary_base=model.rotary_base,
        )
        self.rotary_pos_emb.inv_freq = rope_inv_freq(model).to(torch.cuda.current_device())
        self.true_vocab_size = model.vocab_size

    @property
    def head_weight(self) -> Tensor:
        """``[padded_vocab_size, H]``: the output head, which is the embedding when tied."""
        return self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight

    def head(self, hidden: Tensor) -> Tensor:
        """f32 logits over the true vocabulary, ``[..., V]``, of final hidden states ``[..., H]``."""
        weight = self.head_weight[: self.true_vocab_size]
        return F.linear(hidden.to(weight.dtype), weight).float()

    def _rope(self, position_ids: Tensor) -> Tensor:
        """Angles ``[T,N or 1,1,kv_channels]`` for positions ``[N,T]``; both channels of a pair hold the same angle."""
        if position_ids.stride(0) == 0:
            position_ids = position_ids[:1]  # one row expanded: one table for all rows
        angles = position_ids.t().unsqueeze(-1).float() * self.rotary_pos_emb.inv_freq
        both = angles.repeat_interleave(2, -1) if self.config.rotary_interleaved else torch.cat([angles, angles], -1)
        return both.unsqueeze(2)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        select: tuple[Tensor, Tensor] | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Run N rows of T tokens; what comes back depends on what is asked for:

        * ``select`` = (row, column), two i64 ``[A]``, and ``targets`` i64 ``[A]``: f32 ``[A]``, log-probability of each
          target, as predicted by the hidden state at ``input_ids[row, column]``;
        * ``select`` alone: the final hidden states there, f32 ``[A,H]``;
        * neither: f32 logits ``[N,T,V]`` over the true vocabulary, for tests and parity.

        ``input_ids``, ``position_ids``: i64 ``[N,T]``; positions None: 0, 1, 2, ... in every row. ``attention_mask``: bool, True
        where a query must **not** look (Megatron's sense), broadcastable to ``[N,1,T,T]``; None: causal, which is all that
        rows padded on the right need. A query must see at least one token.
        """
        if targets is not None and select is None:
            raise ValueError("targets without select: give the positions that predict them")
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        # decoder works on [T,N,H]
        hidden = self.decoder(
            hidden_states=self.embedding(input_ids=input_ids, position_ids=position_ids),
            attention_mask=attention_mask,
            rotary_pos_emb=self._rope(position_ids),
        )
        if select is None:
            return self.head(hidden.transpose(0, 1))
        row, column = select
        chosen = hidden[column, row]
        if targets is None:
            return chosen.float()
        return token_logps(chosen, self.head_weight, targets, self.true_vocab_size)


def build_model(
    model: ModelConfig,
    parallel: ParallelConfig,
    bf16: bool,
    *,
    trainable: bool,
    forwarded: Mapping[str, Any] | None = None,
) -> PolicyModel:
    """Policy (``trainable``) or frozen reference. Its weights are NaN until ``load_named`` or a checkpoint fills them.

    Needs ``init_parallel`` to have run.
    """
    built = PolicyModel(transformer_config(model, parallel, bf16, forwarded), model)
    return built.train() if trainable else built.eval().requires_grad_(False)
