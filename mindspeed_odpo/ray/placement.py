"""Where the ranks run: the Ray cluster, its devices, and how many ranks fit."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from mindspeed_odpo import device
from mindspeed_odpo.config import Config
from mindspeed_odpo.errors import ConfigError
from mindspeed_odpo.ray import joins_cluster

# The one place that names the resource of a device: bundle, worker and check always agree.
RESOURCE = {"npu": "NPU", "cuda": "GPU", "cpu": "CPU"}


def ranks_needed(config: Config) -> dict[str, int]:
    """Ranks of each group of processes."""
    if config.placement == "colocate":
        return {"+".join(config.roles): config.actor.parallel.world_size}
    return {role: config.parallel(role).world_size for role in config.roles}


def ranks_at_once(config: Config) -> int:
    """Most ranks that work at the same time: reference and reward run side by side, the others take turns."""
    needed = ranks_needed(config)
    if config.placement == "colocate":
        return sum(needed.values())
    return max(needed["actor"], needed.get("rollout", 0), needed.get("reference", 0) + needed.get("reward", 0))


def cores() -> int:
    return len(os.sched_getaffinity(0))


OBJECT_STORE_BYTES = 512 * 2**20
"""Room for what travels through Ray: batches. Ray's own default is 30 % of the machine's memory."""


def threads(config: Config, role: str) -> int:
    """Torch threads of one rank of ``role``: the cores, shared among the ranks that compute at the same time.

    Reference and reward model run side by side; a reward function needs no torch threads. On an accelerator 0: torch's choice.
    """
    if config.cpu_threads or device.setup() != "cpu":
        return config.cpu_threads
    needed = ranks_needed(config)
    if config.placement == "colocate":
        busy = config.actor.parallel.world_size
    elif role in ("reference", "reward"):
        busy = needed.get("reference", 0) + (needed["reward"] if config.reward.load and "reward" in needed else 0)
    else:
        busy = needed[role]
    return max(1, cores() // max(1, busy))


def check_devices(config: Config, available: float, kind: str) -> None:
    """ConfigError when the ranks outnumber the devices; Ray would wait for ever without a word."""
    needed = ranks_needed(config)
    total = sum(needed.values())
    listed = ", ".join(f"{name} {count}" for name, count in needed.items())
    if kind == "cpu":
        busy = ranks_at_once(config)
        if busy > available and not config.cpu_threads:
            raise ConfigError(
                f"{busy} ranks would work at the same time ({listed}), the machine has {available:g} CPU cores: "
                "lower num_gpus_for_train, num_gpus_for_infer or resource_pool, or set training.cpu_threads=1 to share cores all the same"
            )
        return
    if total > available:
        name = RESOURCE[kind]
        raise ConfigError(
            f"the config asks for {total} {name} ({listed}), the Ray cluster has {available:g}: lower resource_pool, or start Ray with "
            f"--resources='{{\"{name}\": {total}}}'" + (" (or --num-gpus)" if kind == "cuda" else "")
        )


def worker_options(num_threads: int) -> dict[str, Any]:
    """Ray options of one rank: its device and its environment."""
    kind = device.setup()
    env = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if num_threads:
        env["OMP_NUM_THREADS"] = str(num_threads)
    options: dict[str, Any] = {"runtime_env": {"env_vars": env}, "max_restarts": 0}
    if kind == "npu":
        options["resources"] = {RESOURCE[kind]: 1}
    elif kind == "cuda":
        options["num_gpus"] = 1
    else:
        # Roles take turns on a CPU: four ranks on two cores are right, as long as no more than two work at once.
        options["num_cpus"] = 0
    return options


@contextmanager
def cluster(config: Config) -> Iterator[None]:
    """A Ray cluster for one run: the one that RAY_ADDRESS (or ``ray start``) names, else a local one that ends with us.

    A local one listens on loopback, has no dashboard, sends no usage statistics. ``RAY_ADDRESS=local`` forces it.
    """
    kind = device.setup()
    if kind == "cpu":
        check_devices(config, cores(), kind)  # before Ray starts: an error in a second, not in twenty
    common: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True, "configure_logging": True}
    if joins_cluster():
        ray.init(**common)
    else:
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=cores(),
            object_store_memory=OBJECT_STORE_BYTES,
            **common,
        )
    try:
        if kind != "cpu":
            check_devices(config, ray.cluster_resources().get(RESOURCE[kind], 0), kind)
        yield
    finally:
        ray.shutdown()
