"""DDP, AdamW and the learning-rate schedule around a trainable model: Megatron's own, with bf16 over fp32 masters."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from torch import nn

from mindspeed_odpo.config import OptimizerConfig


def wrap_for_training(model: nn.Module, bf16: bool) -> DistributedDataParallel:
    """The model behind Megatron's DDP: gradients accumulated and reduced in fp32, averaged over data-parallel ranks."""
    config: Any = model.config
    config.finalize_model_grads_func = finalize_model_grads
    inner = Float16Module(config, model) if bf16 else model
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False, check_for_nan_in_grad=False)
    return DistributedDataParallel(config, ddp_config, inner)


def make_optimizer(model: DistributedDataParallel, config: OptimizerConfig, bf16: bool) -> MegatronOptimizer:
    dtype = torch.bfloat16 if bf16 else torch.float32
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
        params_dtype=dtype,
        use_distributed_optimizer=False,
    )
    return get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)


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
