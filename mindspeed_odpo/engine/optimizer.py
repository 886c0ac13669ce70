"""DDP, AdamW and the learning-rate schedule around a trainable model: Megatron's own, with bf16 over fp32 masters."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from mindspeed_odpo.config import OptimizerConfig, ParallelConfig
from mindspeed_odpo.device.versions import moments


def wrap_for_training(chunks: Sequence[nn.Module], bf16: bool, parallel: ParallelConfig) -> list[DistributedDataParallel]:
    """Every model chunk behind Megatron's DDP: gradients accumulated and reduced in fp32, averaged over data-parallel ranks.

    With ``parallel.zero1`` each rank keeps the reduced gradient of its share only; with ``parallel.overlap`` the reduction of
    a bucket starts during the last micro-batch's backward, and (zero1) the weights are gathered during the next forward.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.zero1,
        overlap_grad_reduce=parallel.overlap,
        overlap_param_gather=parallel.overlap and parallel.zero1,
        check_for_nan_in_grad=False,
    )
    ddps = []
    for index, chunk in enumerate(chunks):
        config: Any = chunk.config
        inner = Float16Module(config, chunk) if bf16 else chunk
        # Only the first chunk's backward is at the end, with nothing behind it to hide its reduction: smaller buckets there.
        ddps.append(DistributedDataParallel(config, settings, inner, disable_bucketing=index > 0))
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        if parallel.overlap:
            # Without it every micro-batch would start the reduction of its own partial gradient.
            chunk.config.no_sync_func = ddps[0].no_sync if len(ddps) == 1 else [ddp.no_sync for ddp in ddps]
    return ddps


def make_optimizer(
    ddps: Sequence[DistributedDataParallel], config: OptimizerConfig, bf16: bool, parallel: ParallelConfig
) -> MegatronOptimizer:
    """AdamW over the chunks' fp32 masters. The masters are copied from the weights now: load those first."""
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=parallel.zero1,
    )
    return get_megatron_optimizer(settings, list(ddps), use_gloo_process_groups=False)


def sync_params(ddps: Sequence[DistributedDataParallel]) -> None:
    """Make every rank's weights those of the last step. A collective of all ranks, to be called before weights are read outside
    of a forward: saved, exported, sent to the rollout. Needed where weights are gathered during the next forward: until then a
    rank has new values in its own share alone."""
    for ddp in ddps:
        if ddp.ddp_config.overlap_param_gather:
            ddp.start_param_sync(force_sync=True)


@dataclass(frozen=True)
class Piece:
    """What this rank's optimizer holds of one weight, in the flattened weight from element ``start`` on: live fp32 tensors
    ``exp_avg``, ``exp_avg_sq`` and, of a bf16 weight, the master ``fp32_param``. With ZeRO-1 a part of the weight, or nothing."""

    weight: Tensor
    start: int = 0
    live: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return _names(self.weight)

    def fill(self, whole: Mapping[str, Tensor]) -> None:
        """Take this rank's part out of the whole weight's state."""
        for name, tensor in self.live.items():
            part = whole[name].reshape(-1)[self.start : self.start + tensor.numel()]
            tensor.copy_(part.view(tensor.shape))


def _names(weight: Tensor) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq") if weight.dtype == torch.float32 else ("exp_avg", "exp_avg_sq", "fp32_param")


def pieces(optimizer: MegatronOptimizer) -> dict[int, Piece]:
    """By ``id`` of the weight: what this rank holds of every weight of its model chunks."""
    found: dict[int, Piece] = {}
    for one in _single_optimizers(optimizer):
        if isinstance(one, DistributedOptimizer):
            for buffer in one.buffers:
                found |= {id(weight): Piece(weight) for weight in buffer.param_index_map}
            for weight, (group, order) in one.model_param_group_index_map.items():
                start = one._get_model_param_range_map(weight)["param"].start
                found[id(weight)] = _piece(one, weight, one.optimizer.param_groups[group]["params"][order], start)
        elif isinstance(one, FP32Optimizer):
            found |= {id(weight): _piece(one, weight, weight) for weight in one.get_parameters()}
        else:
            halves = zip(one.float16_groups, one.fp32_from_float16_groups, strict=True)
            pairs = [pair for half, full in halves for pair in zip(half, full, strict=True)]
            pairs += [(weight, weight) for group in one.fp32_from_fp32_groups for weight in group]
            found |= {id(weight): _piece(one, weight, master) for weight, master in pairs}
    return found


def _piece(optimizer: Any, weight: Tensor, master: Tensor, start: int = 0) -> Piece:
    live = {**moments(optimizer.optimizer, master), "fp32_param": master}
    return Piece(weight, start, {name: live[name] for name in _names(weight)})


def whole_state(optimizer: MegatronOptimizer, wanted: Container[int]) -> dict[int, dict[str, Tensor]]:
    """By ``id`` of the weight: its whole optimizer state, flat or in the weight's shape. With ZeRO-1 a collective of all ranks, a
    bucket at a time; only the weights in ``wanted`` are kept, on the CPU. Without, the live tensors."""
    held = pieces(optimizer)
    whole: dict[int, dict[str, Tensor]] = {}
    for one in _single_optimizers(optimizer):
        if not isinstance(one, DistributedOptimizer):
            continue
        group = one.data_parallel_group
        for buffer, maps in zip(one.buffers, one.gbuf_ranges, strict=True):
            ((_, ranges),) = maps.items()
            for bucket, here in zip(buffer.buckets, ranges, strict=True):
                weights = [weight for weight, place in buffer.param_index_map.items() if place[2] == bucket.bucket_id]
                for name in _names(weights[0]):  # one dtype a buffer
                    part = bucket.grad_data.new_zeros(bucket.grad_data.numel() // group.size(), dtype=torch.float32)
                    for weight, place in here["param_map"].items():
                        part[place["gbuf_local"].start : place["gbuf_local"].end] = held[id(weight)].live[name].view(-1)
                    every = part.new_empty(part.numel() * group.size())
                    dist.all_gather_into_tensor(every, part, group=group)
                    for weight in weights:
                        if id(weight) in wanted:
                            start, end = (position - bucket.offset for position in buffer.param_index_map[weight][:2])
                            # a copy: a view would keep the whole bucket in memory
                            whole.setdefault(id(weight), {})[name] = every[start:end].to("cpu", copy=True)
    return {key: whole.get(key) or dict(held[key].live) for key in held if key in wanted}


def optimizer_step(optimizer: MegatronOptimizer) -> int:
    """Updates done: iterations without those that were skipped."""
    return max(int(group.get("step", 0)) for group in optimizer.param_groups)


def set_optimizer_step(optimizer: MegatronOptimizer, step: int) -> None:
    for one in _single_optimizers(optimizer):
        for group in one.optimizer.param_groups:
            group["step"] = step


def _single_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    # Weights that all data-parallel ranks share, and experts, have an optimizer each.
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


class _MiniMindScheduler(OptimizerParamScheduler):
    """``lr / 10 + lr / 2 * (1 + cos(pi * step / total))``, step counted from 0: 1.1 lr at the first update, 0.1 lr from ``total``
    on (``get_lr`` of MiniMind's notebooks and training scripts). Without warm-up and without a smallest rate of its own."""

    def get_lr(self, param_group: dict[str, Any]) -> float:
        part = min(max(self.num_steps - 1, 0) / self.lr_decay_steps, 1.0)
        return float(param_group.get("max_lr", self.max_lr)) * (0.1 + 0.5 * (1 + math.cos(math.pi * part)))


class Schedule:
    """Learning rate of iteration n (1-based), by Megatron's scheduler counted in iterations; styles ``constant``, ``linear``
    and ``cosine`` are its own, ``minimind`` is a subclass.

    Megatron sets the rate after the update, so that its first update of a warm-up runs at 0; here the rate is set
    before the update: iteration n of a warm-up of W runs at ``lr * n / W``.
    """

    def __init__(self, optimizer: MegatronOptimizer, config: OptimizerConfig, train_iters: int) -> None:
        kind = _MiniMindScheduler if config.lr_decay_style == "minimind" else OptimizerParamScheduler
        self._scheduler = kind(
            optimizer,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=config.lr_warmup_iters,
            lr_decay_steps=max(config.lr_decay_iters or train_iters, config.lr_warmup_iters + 1),
            lr_decay_style=config.lr_decay_style,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def set(self, step: int) -> float:
        """Set the rate of iteration ``step`` on the optimizer and return it. No state: resume needs nothing."""
        self._scheduler.num_steps = 0
        self._scheduler.step(increment=step)
        return float(self._scheduler.optimizer.param_groups[0]["lr"])
