"""One rank: one Ray actor, one process. It hosts one role (placement ``separate``) or all of them (``colocate``)."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
import torch

from mindspeed_odpo import device
from mindspeed_odpo.config import Config, ParallelConfig
from mindspeed_odpo.errors import OdpoError, WorkerError
from mindspeed_odpo.ray.weight_sync import Entry, SyncGroup


def needs_group(config: Config, role: str) -> bool:
    """Whether the role's ranks need process groups; the other ones are single-process models that split by prompts alone."""
    return (
        role in ("actor", "reference")
        or (role == "reward" and config.reward.engine == "megatron")
        or (role == "rollout" and config.rollout.engine == "megatron" and config.rollout.parallel.tensor > 1)
    )


class RankWorker:
    """Built by ``ray/group.py`` with ``ray.remote``. Every method runs in the rank's own process."""

    def __init__(self, config: Config, roles: Sequence[str], rank: int, threads: int) -> None:
        self.config = config
        self.names = tuple(roles)
        self.rank = rank
        self.roles: dict[str, Any] = {}
        self.in_group = False
        self.sync: SyncGroup | None = None
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

    def call(self, role: str, method: str, reply: bool, *args: Any, **kwargs: Any) -> Any:
        """``method`` of ``role``; its result, or None where another rank replies with the same."""
        result = getattr(self.roles[role], method)(*args, **kwargs)
        return result if reply else None

    def join_sync(self, address: str, port: int, rank: int, size: int) -> None:
        """Join the weight sync's group: rank 0 is the actor's first rank, the others are the rollout's."""
        self.sync = SyncGroup(rank, size, address, port, self.config.timeout_minutes)

    def send_weights(self, version: int, check: bool) -> tuple[int, int]:
        """Placement separate, every rank of the actor: its weights, gathered by all, go out from the first one. (version, bytes)"""
        layout = self.roles["actor"].weight_layout()
        entries = [Entry(weight.name, weight.dtype, weight.shape) for weight in layout.weights]
        if self.sync is not None:
            return version, self.sync.send(version, entries, layout.gather(), check)
        for _ in layout.gather():  # a collective: the first rank needs this one's part
            pass
        return version, sum(entry.nbytes for entry in entries)

    def receive_weights(self, version: int) -> tuple[int, int]:
        """The same sync on every rank of the rollout. (version, bytes)"""
        assert self.sync is not None, "join_sync comes first"
        rollout = self.roles["rollout"]
        load = partial(rollout.load_weights, version)
        return version, self.sync.receive(version, rollout.weight_shapes(), load, rollout.holds)

    def hand_over_weights(self, version: int, check: bool) -> tuple[int, int]:
        """Placement colocate: the actor's tensors go to the rollout in this process; where the actor is one rank, without a copy
        in between. (version, bytes)"""
        layout, rollout = self.roles["actor"].weight_layout(), self.roles["rollout"]
        rollout.load_weights(version, layout.gather())
        if check:
            for name, tensor in layout.gather():
                if not rollout.holds(name, tensor):
                    raise WorkerError(
                        f"weight sync, version {version}: the rollout holds another {name} than the actor gave: a bug, report it"
                    )
        return version, sum(weight.nbytes for weight in layout.weights)

    def close(self) -> None:
        """End what the roles still have under way, then leave the process group."""
        if "actor" in self.roles:
            self.roles["actor"].close()
        if self.in_group:
            from mindspeed_odpo.engine.parallel import destroy

            destroy()


def _role_class(config: Config, name: str) -> type:
    from mindspeed_odpo.roles import actor, reference, replay, reward, rollout

    engine = {"megatron": rollout.RolloutEngine, "replay": replay.ReplayEngine}[config.rollout.engine]
    return {"actor": actor.Actor, "reference": reference.Reference, "rollout": engine, "reward": reward.Reward}[name]


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
