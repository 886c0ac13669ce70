"""One rank: one Ray actor, one process. It hosts one role (placement ``separate``) or all of them (``colocate``)."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from mindspeed_odpo import device
from mindspeed_odpo.config import Config, ParallelConfig
from mindspeed_odpo.errors import OdpoError


def needs_group(config: Config, role: str) -> bool:
    """Whether the role's model needs Megatron's process groups; the other ones are single-process models that split by
    prompts alone."""
    return role in ("actor", "reference") or (role == "reward" and config.reward.engine == "megatron")


class RankWorker:
    """Built by ``ray/group.py`` with ``ray.remote``. Every method runs in the rank's own process."""

    def __init__(self, config: Config, roles: Sequence[str], rank: int, threads: int) -> None:
        self.config = config
        self.names = tuple(roles)
        self.rank = rank
        self.roles: dict[str, Any] = {}
        self.in_group = False
        _quiet_imports()
        device.setup()
        if threads:
            torch.set_num_threads(threads)
        torch.manual_seed(config.seed)

    def address(self) -> tuple[str, int]:
        """Where rank 0 of this group can be met: its node's address and a port that is free now."""
        with socket.socket() as probe:
            ip = ray.util.get_node_ip_address()
            probe.bind((ip, 0))
            return ip, probe.getsockname()[1]

    def setup(self, parallel: ParallelConfig, address: str, port: int) -> None:
        """Join the group, then build this rank's roles and load their weights."""
        from mindspeed_odpo.hosts.standalone import Host

        host = Host(self.config)
        self.in_group = any(needs_group(self.config, name) for name in self.names)
        if self.in_group:
            host.init(parallel, self.rank, address, port)
        for name in self.names:
            self.roles[name] = _role_class(self.config, name)(self.config, host)

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.roles[role], method)(*args, **kwargs)

    def push_weights(self) -> list[ray.ObjectRef]:
        """This rank's policy weights as buckets in Ray's object store; the first rank's are whole (no tensor parallel)."""
        from mindspeed_odpo.engine.weights import buckets

        return [ray.put(_flatten(bucket)) for bucket in buckets(self.roles["actor"].weights())]

    def pull_weights(self, version: int, stored: Sequence[ray.ObjectRef]) -> int:
        """Load the buckets that the actor pushed; the version loaded."""
        self.roles["rollout"].load_weights(version, _unflatten(stored))
        return version

    def hand_over_weights(self, version: int) -> int:
        """Colocated sync: the actor's tensors go to the rollout in this process, without a copy in between."""
        self.roles["rollout"].load_weights(version, self.roles["actor"].weights())
        return version

    def close(self) -> None:
        """Leave the process group."""
        if self.in_group:
            from mindspeed_odpo.engine.parallel import destroy

            destroy()


def _role_class(config: Config, name: str) -> type:
    from mindspeed_odpo.roles import actor, reference, replay, reward, rollout

    engine = {"megatron": rollout.RolloutEngine, "replay": replay.ReplayEngine}[config.rollout.engine]
    return {"actor": actor.Actor, "reference": reference.Reference, "rollout": engine, "reward": reward.Reward}[name]


def _flatten(bucket: Sequence[tuple[str, Tensor]]) -> tuple[list[tuple[str, str, tuple[int, ...]]], np.ndarray]:
    # One byte array a bucket: Ray hands numpy arrays to readers on the same node without a copy, tensors it pickles.
    manifest = [(name, str(tensor.dtype)[6:], tuple(tensor.shape)) for name, tensor in bucket]
    flat = torch.cat([tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for _, tensor in bucket])
    return manifest, flat.numpy()


def _unflatten(stored: Sequence[ray.ObjectRef]) -> Iterator[tuple[str, Tensor]]:
    for reference in stored:
        manifest, flat = ray.get(reference)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the array is read-only; so are we
            data = torch.from_numpy(flat)
        start = 0
        for name, dtype, shape in manifest:
            kind = getattr(torch, dtype)
            stop = start + kind.itemsize * int(np.prod(shape))
            yield name, data[start:stop].view(kind).view(shape)
            start = stop


def _quiet_imports() -> None:
    """megatron-core warns of every optional kernel that is absent; on a CPU none is missed."""
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", module=r"torch\..*", category=FutureWarning)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def check_error(error: BaseException) -> OdpoError | None:
    """The OdpoError behind a failed remote call, or None when it was something else."""
    # Ray raises an object that is both its own error and an instance of ours, whose text is the worker's traceback; the
    # plain one, with its own text, is its cause.
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, OdpoError) else None
