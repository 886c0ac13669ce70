"""What a supported megatron-core version needs: on a newer torch or numpy, without Transformer Engine, or on a CPU.

One function a fault. Each decides by version or device, never by trying, and leaves alone what has no fault.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mindspeed_odpo import device

_log = logging.getLogger(__name__)
_applied = False


def core_version() -> tuple[int, int]:
    """Major and minor version of the installed megatron-core, (0, 16)."""
    from megatron.core import __version__

    major, minor = __version__.split(".")[:2]
    return int(major), int(minor)


def apply() -> None:
    """Make every repair that this version and device need. A second call does nothing more."""
    global _applied
    if _applied:
        return
    _applied = True
    version = core_version()
    # Faults of megatron-core itself, on every device.
    if version == (0, 12):
        _fit_checkpoint_writer()
        _give_numpy_its_old_name()
        _quantize_no_shard()
    if version >= (0, 16):
        _name_the_missing_gemm()
    _put_group_adam()
    if device.setup() == "cpu":
        _move_split_sizes()


def _fit_checkpoint_writer() -> None:
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writer

    write_item: Any = writer._write_item
    if "serialization_format" in inspect.signature(write_item).parameters:
        # torch 2.8 made the format an argument of this function; 0.12 calls it without and means torch.save's.
        from torch.distributed.checkpoint.filesystem import SerializationFormat

        writer._write_item = functools.partial(write_item, serialization_format=SerializationFormat.TORCH_SAVE)
        _log.info("megatron-core 0.12: checkpoint writer fitted to this torch")


def _give_numpy_its_old_name() -> None:
    import numpy

    if int(numpy.__version__.split(".")[0]) >= 2:
        # numpy 2 took the alias away; 0.12's dist_checkpointing.mapping still calls it.
        numpy.product = numpy.prod


def _quantize_no_shard() -> None:
    """0.12's distributed optimizer asks for its fp8 parameters to be quantised, also when there is none; without Transformer
    Engine the answer is an error. 0.16 has the same test in its own code."""
    from megatron.core import fp8_utils

    if fp8_utils.HAVE_TE:
        return
    quantize: Callable[..., None] = fp8_utils._quantize_param_shard_impl

    def only_if_any(model_params: list[Any], *args: Any, **kwargs: Any) -> None:
        if model_params:
            quantize(model_params, *args, **kwargs)

    fp8_utils._quantize_param_shard_impl = only_if_any


def _name_the_missing_gemm() -> None:
    """0.16's router asks whether ``te_general_gemm`` is None, a name that only Transformer Engine brings."""
    from megatron.core.transformer.moe import moe_utils

    if not moe_utils.HAVE_TE:
        moe_utils.te_general_gemm = None


def _move_split_sizes() -> None:
    """Experts' split sizes become numpy arrays where they are moved off the GPU, which never happens on a CPU."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = move


class GroupAdamW(torch.optim.Optimizer):
    """torch's fused AdamW with one ``step`` a parameter group, as Transformer Engine's and Apex's FusedAdam have it.

    torch keeps a step for every parameter. Megatron's distributed optimizer then hands one shared tensor to all of them, which
    counts once a parameter, and finds none where a rank owns no part of a group. State of a parameter: ``exp_avg`` and
    ``exp_avg_sq``, fp32, made at its first step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("GroupAdamW decays weights as AdamW does: decoupled_weight_decay must be True")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "step": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            done, group["step"] = group["step"], group["step"] + 1
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            if not params:
                continue
            state = [moments(self, p) for p in params]
            steps: list[Tensor] = [torch.full((), float(done), device=p.device) for p in params]
            adamw(
                params,
                [p.grad for p in params],
                [s["exp_avg"] for s in state],
                [s["exp_avg_sq"] for s in state],
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def moments(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    """``exp_avg`` and ``exp_avg_sq`` of one parameter of an Adam; zeros before its first step."""
    state: dict[str, Tensor] = optimizer.state[param]
    if not state:
        state |= {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
    return state


def _put_group_adam() -> None:
    """Megatron's fallback without Transformer Engine and Apex is torch's AdamW, with which its distributed optimizer can neither
    save nor load its state: take one that keeps its steps as theirs do."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    optimizer.Adam = distrib_optimizer.Adam = GroupAdamW
    distrib_optimizer.HAVE_APEX_OR_TE = True
    if core_version() >= (0, 16):
        optimizer.USING_PYTORCH_OPTIMIZER = False
