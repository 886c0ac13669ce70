"""One rank's place in its role's process group: torch.distributed, Megatron's groups and the random state."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from mindspeed_odpo import device
from mindspeed_odpo.config import ParallelConfig
from mindspeed_odpo.device import versions
from mindspeed_odpo.errors import ConfigError


def check_parallel(parallel: ParallelConfig) -> None:
    """ConfigError for sizes that do not go together, whatever the model."""
    sizes = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "data-parallel ranks": parallel.data,
    }
    for key, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{key}={value}: must be 1 or more")
    if parallel.virtual > 1 and parallel.pipeline == 1:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size={parallel.virtual}: model chunks are stages of a pipeline, and "
            "pipeline_model_parallel_size is 1: raise that or leave the chunks out"
        )
    if parallel.data * parallel.context % parallel.expert:
        raise ConfigError(
            f"expert_model_parallel_size={parallel.expert}: must divide the {parallel.data * parallel.context} data- and context-parallel "
            "ranks, out of which its ranks are taken"
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _keep_gloo_on_loopback() -> None:
    # gloo binds to whatever address the host's name resolves to: a public one, or one that does not answer. With all ranks
    # on this machine the loopback interface is the right one.
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def init_parallel(parallel: ParallelConfig, rank: int, master_addr: str, master_port: int, seed: int, timeout_minutes: float) -> None:
    """Join the role's group as ``rank`` of ``parallel.world_size``; rank 0 listens at ``master_addr:master_port``.

    Reads no environment variables (a Ray worker may have none). A group of one needs no port. ``timeout_minutes`` limits the
    rendezvous and every collective. All random states start from ``seed``, equal on the data-parallel ranks.
    ConfigError for sizes that do not go together.
    """
    check_parallel(parallel)
    name, world, timeout = device.setup(), parallel.world_size, timedelta(minutes=timeout_minutes)
    if name != "cpu":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    elif world > 1 and _is_loopback(master_addr):
        _keep_gloo_on_loopback()
    versions.apply()
    store = dist.HashStore() if world == 1 else dist.TCPStore(master_addr, master_port, world, is_master=rank == 0, timeout=timeout)
    dist.init_process_group(device.backend(), store=store, rank=rank, world_size=world, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual if parallel.virtual > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        distributed_timeout_minutes=timeout_minutes,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def init_single(seed: int = 0) -> None:
    """A group of one rank: tests, tools and notebooks."""
    init_parallel(ParallelConfig(), 0, "127.0.0.1", 0, seed, timeout_minutes=1.0)


def dp_rank() -> int:
    """This rank's place among the data-parallel ranks."""
    return int(parallel_state.get_data_parallel_rank())


def dp_size() -> int:
    """Number of data-parallel ranks."""
    return int(parallel_state.get_data_parallel_world_size())


def dp_group() -> dist.ProcessGroup:
    """The group to pass as ``group=`` when something is summed over data-parallel ranks."""
    return parallel_state.get_data_parallel_group()


def tp_size() -> int:
    """Number of tensor-parallel ranks."""
    return int(parallel_state.get_tensor_model_parallel_world_size())


def tp_group() -> dist.ProcessGroup | None:
    """The tensor-parallel ranks; None where this rank is the only one."""
    return parallel_state.get_tensor_model_parallel_group() if tp_size() > 1 else None


def pp_rank() -> int:
    """This rank's pipeline stage."""
    return int(parallel_state.get_pipeline_model_parallel_rank())


def pp_size() -> int:
    """Number of pipeline stages."""
    return int(parallel_state.get_pipeline_model_parallel_world_size())


def cp_rank() -> int:
    """This rank's place among the ranks that share sequences."""
    return int(parallel_state.get_context_parallel_rank())


def cp_size() -> int:
    """Number of ranks that share sequences."""
    return int(parallel_state.get_context_parallel_world_size())


def cp_group() -> dist.ProcessGroup:
    """The ranks that share sequences."""
    return parallel_state.get_context_parallel_group()


class _SumOverContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=cp_group())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        # Every rank goes on to the same loss, so each has the whole gradient already: summing it would count it once a rank.
        return grads[0]


def sum_over_context(part: Tensor) -> Tensor:
    """Sum over the context-parallel ranks, on each of them. Its gradient is the gradient of this rank's part."""
    return part if cp_size() == 1 else _SumOverContext.apply(part)


def from_last_stage(values: Tensor) -> Tensor:
    """The last pipeline stage's ``values`` on every stage; the others give a tensor of the same shape and dtype, which is written to."""
    if pp_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, last, group=parallel_state.get_pipeline_model_parallel_group())
    return values


def set_virtual_stage(stage: int) -> None:
    """Tell megatron-core 0.12 which chunk is being built or read; later versions are told by argument."""
    if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)


def largest(count: int, device: torch.device) -> int:
    """The largest ``count`` of all ranks. Every rank calls it."""
    found = torch.tensor(count, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether ``flag`` is True on any rank. Every rank calls it."""
    return bool(largest(int(flag), device))


def destroy() -> None:
    """Leave the group. Another ``init_parallel`` may follow in the same process."""
    parallel_state.destroy_model_parallel()
    # Megatron keeps who held embeddings (0.12 both, 0.16 the first): a rank that is no end of the next pipeline would take part.
    parallel_state._EMBEDDING_GLOBAL_RANKS = parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None
    dist.destroy_process_group()
