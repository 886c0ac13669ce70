"""The policy as a megatron-core GPTModel: Llama and Qwen2 architectures, log-probs only where they are asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mindspeed_odpo import device
from mindspeed_odpo.config import ModelConfig, ParallelConfig
from mindspeed_odpo.device.versions import core_version
from mindspeed_odpo.engine.logprobs import token_logps
from mindspeed_odpo.engine.parallel import check_parallel, cp_group, cp_rank, pp_rank, set_virtual_stage, tp_group
from mindspeed_odpo.errors import ConfigError, nearest


def _not_loaded(weight: Tensor) -> Tensor:
    # Weights always come from a folder, a checkpoint or another rank. A forgotten load shows as NaN, not as bad learning.
    return nn.init.constant_(weight, math.nan)


_UNEVEN = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Megatron's settings of how layers lie on stages; with one of them it does the counting itself."""


def _check_fit(model: ModelConfig, parallel: ParallelConfig, forwarded: Mapping[str, Any]) -> None:
    """ConfigError where a size of the model is not a whole number a rank."""
    width = "ffn_hidden_size" if model.moe_ffn_hidden_size is None else "moe_ffn_hidden_size"
    cut = ("num_attention_heads", "num_query_groups", width, "padded_vocab_size")
    for name in cut:
        if getattr(model, name) % parallel.tensor:
            raise ConfigError(
                f"tensor_model_parallel_size={parallel.tensor}: {name} is {getattr(model, name)} in model {model.name}, not a whole number "
                "a rank: take a size that divides it" + (", or pad the vocabulary further" if name == "padded_vocab_size" else "")
            )
    stages = parallel.pipeline * parallel.virtual
    if model.num_layers % stages and not any(forwarded.get(key) for key in _UNEVEN):
        chunks = f" with {parallel.virtual} chunks each" if parallel.virtual > 1 else ""
        raise ConfigError(
            f"pipeline_model_parallel_size={parallel.pipeline}{chunks}: {model.num_layers} layers of model {model.name} do not divide into "
            f"{stages} equal parts: take another size, or set num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
        )


def transformer_config(
    model: ModelConfig, parallel: ParallelConfig, bf16: bool, forwarded: Mapping[str, Any] | None = None
) -> TransformerConfig:
    """Megatron's config of ``model``. ``forwarded``: further TransformerConfig fields by name, such as ``recompute_granularity``.

    ConfigError for a forwarded key that TransformerConfig does not have, or one that contradicts what the model, the
    parallel sizes or online DPO (no dropout: policy and reference must be comparable) fix; or where the model does not divide
    into the parallel sizes.
    """
    check_parallel(parallel)
    _check_fit(model, parallel, forwarded or {})
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
        # One rank has nothing to split; upstream's configs say sequence_parallel all the same.
        "sequence_parallel": parallel.sequence and parallel.tensor > 1,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual if parallel.virtual > 1 else None,
        # Micro-batches differ in rows (an answer of two pairs is run once) and length: stages tell each other the shape, which
        # is less than the padding that equal shapes would cost.
        "variable_seq_lengths": parallel.pipeline > 1,
        # With chunks an output is dropped while it is still being sent. An accelerator's streams keep its memory until then;
        # on a CPU it would be written over.
        "deallocate_pipeline_outputs": parallel.virtual == 1 or device.setup() != "cpu",
        # With chunks a stage sends forward and backward at once. Of two stages both go to one rank, where a batch of sends and
        # receives is matched by order alone and mixes them up; one by one they have a process group each.
        "overlap_p2p_comm": parallel.virtual > 1,
        "batch_p2p_comm": parallel.virtual == 1,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "init_method": _not_loaded,
        "output_layer_init_method": _not_loaded,
        **_mixture(model),
    }
    # Its default cannot work with shapes that vary, also in a dense model.
    defaults = {"moe_token_dispatcher_type": "alltoall"}
    known = [field.name for field in fields(TransformerConfig)]
    for key, value in (forwarded or {}).items():
        if key not in known:
            raise ConfigError(f"{key}={value}: not a field of megatron-core's TransformerConfig{nearest(key, known)}")
        if key in fixed and value != fixed[key]:
            raise ConfigError(f"{key}={value}: fixed to {fixed[key]} by the model, the parallel sizes or online DPO: remove the key")
    return TransformerConfig(**{**defaults, **(forwarded or {}), **fixed})


def _mixture(model: ModelConfig) -> dict[str, Any]:
    """The fields of a mixture of experts: top-k of a softmax router, with Megatron's load-balancing loss in the gradient alone."""
    if model.num_experts is None:
        return {}
    return {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.moe_router_topk,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_router_load_balancing_type": "aux_loss" if model.moe_aux_loss_coeff else "none",
        # The softmax over one expert alone would be 1, and the router would never learn.
        "moe_router_pre_softmax": model.moe_router_topk == 1,
        "moe_router_dtype": "fp32",
    }


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


class _GatherContext(torch.autograd.Function):
    """``[T / ranks, ...]`` of every context-parallel rank to ``[T, ...]`` in the sequence's order; backward: each part's gradient,
    summed over the ranks.

    The sequence is cut into 2 * ranks runs, of which rank r holds runs r and 2 * ranks - 1 - r: under a causal mask an early
    run is little work and a late one much, so that every rank has the same.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        ranks = dist.get_world_size(cp_group())
        parts = part.new_empty(ranks, *part.shape)
        dist.all_gather_into_tensor(parts.view(-1), part.contiguous().view(-1), group=cp_group())
        runs = parts.unflatten(1, (2, -1))
        return torch.cat([runs[:, 0], runs[:, 1].flip(0)]).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        ranks = dist.get_world_size(cp_group())
        runs = grads[0].unflatten(0, (2 * ranks, -1))
        parts = torch.stack([runs[:ranks], runs[ranks:].flip(0)], 1)
        total = parts.new_empty(parts[0].shape)
        dist.reduce_scatter_tensor(total.view(-1), parts.view(-1), group=cp_group())
        return total.flatten(0, 1)


class CoreAttention(MegatronModule):
    """Attention through ``scaled_dot_product_attention``, with Megatron's calling convention.

    ``query`` ``[T,N,heads,d]``, ``key``, ``value`` ``[T,N,groups,d]``; ``attention_mask`` bool, True where a query must **not**
    look, broadcastable to ``[N,1,T,T]``; None: causal. Returns ``[T,N,heads * d]``.

    With context parallelism T is this rank's part of the sequence (see ``_GatherContext``), keys and values of the others
    are gathered, and the mask is causal.
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
        ranks = self.config.context_parallel_size
        if ranks > 1:
            if attention_mask is not None:
                raise NotImplementedError("CoreAttention: an attention_mask with context parallelism is not supported")
            key, value = _GatherContext.apply(torch.cat([key, value], -1)).chunk(2, -1)
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if q.is_cpu and q.dtype == torch.bfloat16:
            # bf16 attention on a CPU has a backward 3 to 4 times slower than fp32's, more than the casts cost. Cast without
            # a gradient too: policy and reference must round alike.
            q, k, v = q.float(), k.float(), v.float()
        if ranks > 1:
            run, rank = length // 2, cp_rank()
            ends = (rank + 1) * run, (2 * ranks - rank) * run
            out = torch.cat([self._attend(x, k[:, :, :end], v[:, :, :end], None) for x, end in zip(q.chunk(2, 2), ends, strict=True)], 2)
        else:
            out = self._attend(q, k, v, None if attention_mask is None else ~attention_mask)
        return out.permute(2, 0, 1, 3).reshape(length, rows, -1).to(query.dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, may_look: Tensor | None) -> Tensor:
        """``q`` ``[N,heads,Q,d]``, ``k``, ``v`` ``[N,groups,T,d]``. None: causal, the queries being the last Q of T positions."""
        causal = may_look is None and q.shape[2] == k.shape[2]
        if may_look is None and not causal:
            # torch's own causal mask would take the queries for the first ones.
            may_look = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=may_look, is_causal=causal, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def _block_spec(num_layers: int, num_experts: int | None) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(num_experts, normalization="RMSNorm")
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
    """A GPTModel, or the chunk of one on this pipeline stage, whose ``forward`` answers for chosen positions, so that ``[N,T,V]``
    logits never exist in training. ``virtual``: which of the stage's chunks."""

    def __init__(self, config: TransformerConfig, model: ModelConfig, virtual: int = 0) -> None:
        chunks = config.virtual_pipeline_model_parallel_size
        set_virtual_stage(virtual)
        # megatron-core 0.12 asks parallel_state which chunk this is.
        told = {"vp_stage": virtual if chunks else None} if core_version() > (0, 12) else {}
        super().__init__(
            config=config,
            transformer_layer_spec=_block_spec(get_num_layers_to_build(config, **told), model.num_experts),
            vocab_size=model.padded_vocab_size,
            max_sequence_length=model.max_position_embeddings,
            pre_process=pp_rank() == 0 and virtual == 0,
            post_process=pp_rank() == config.pipeline_model_parallel_size - 1 and virtual == (chunks or 1) - 1,
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type="rope",
            rotary_base=model.rotary_base,
            **told,
        )
        self.rotary_pos_emb.inv_freq = rope_inv_freq(model).to(torch.cuda.current_device())
        self.true_vocab_size = model.vocab_size

    @property
    def head_weight(self) -> Tensor:
        """``[padded_vocab_size / tensor, H]``, on the last stage: this rank's part of the output head, which is the embedding
        when tied."""
        return self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight

    def head(self, hidden: Tensor) -> Tensor:
        """f32 logits over the true vocabulary, ``[..., V]``, of final hidden states ``[..., H]``."""
        if tp_group() is None:
            weight = self.head_weight[: self.true_vocab_size]
            return F.linear(hidden.to(weight.dtype), weight).float()
        hidden = copy_to_tensor_model_parallel_region(hidden.to(self.head_weight.dtype))
        return gather_from_tensor_model_parallel_region(F.linear(hidden, self.head_weight))[..., : self.true_vocab_size].float()

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

        A chunk that is not the pipeline's last returns its hidden states ``[T,N,H]`` (``[T / tensor,N,H]`` with sequence
        parallelism); one that is not the first reads those that ``set_input_tensor`` gave, and of ``input_ids`` the shape alone.
        With context parallelism T and all columns are this rank's part of the sequence, and ``position_ids`` are needed.

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
            hidden_states=self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None,
            attention_mask=attention_mask,
            rotary_pos_emb=self._rope(position_ids),
        )
        if not self.post_process:
            return hidden
        summed = False
        if self.config.sequence_parallel:
            # Each rank's gradient is of its part of the vocabulary: the gathering's backward sums them. Logits and values are
            # equal on all ranks instead.
            summed = targets is not None
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=summed)
        if select is None:
            return self.head(hidden.transpose(0, 1))
        row, column = select
        chosen = hidden[column, row]
        if targets is None:
            return self.read_out(chosen)
        if tp_group() is not None and not summed:
            chosen = copy_to_tensor_model_parallel_region(chosen)
        return token_logps(chosen, self.head_weight, targets, self.true_vocab_size, group=tp_group())

    def read_out(self, chosen: Tensor) -> Tensor:
        """What ``select`` alone gives for final hidden states ``[A,H]``."""
        return chosen.float()


def build_model(
    model: ModelConfig,
    parallel: ParallelConfig,
    bf16: bool,
    *,
    trainable: bool,
    forwarded: Mapping[str, Any] | None = None,
) -> list[PolicyModel]:
    """Policy (``trainable``) or frozen reference: this rank's part of it, one chunk for each virtual stage.

    Weights are NaN until ``load_named`` or a checkpoint fills them. Every rank of the group calls it, after ``init_parallel``.
    """
    config = transformer_config(model, parallel, bf16, forwarded)
    chunks = [PolicyModel(config, model, virtual) for virtual in range(parallel.virtual)]
    return [chunk.train() if trainable else chunk.eval().requires_grad_(False) for chunk in chunks]
