"""One rank's place in its role's process group: torch.distributed, Megatron's groups and the random state."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from mindspeed_odpo import device
from mindspeed_odpo.config import ParallelConfig
from mindspeed_odpo.device import versions
from mindspeed_odpo.errors import ConfigError


def check_parallel(parallel: ParallelConfig) -> None:
    """ConfigError for a size that this version cannot run."""
    sizes = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
    }
    for key, value in sizes.items():
        if value != 1:
            raise ConfigError(f"{key}={value}: not supported yet by this version: set it to 1")


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
    ConfigError for a parallel size above 1 other than ``data``.
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


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether ``flag`` is True on any data-parallel rank. Every rank calls it."""
    found = torch.tensor(float(flag), device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=dp_group())
    return bool(found)


def destroy() -> None:
    """Leave the group. Another ``init_parallel`` may follow in the same process."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
