"""How ranks, devices and threads are counted, before any of them is started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_odpo.config import ParallelConfig, RewardFunction
from mindspeed_odpo.errors import ConfigError
from mindspeed_odpo.ray import joins_cluster, placement


def config(placed="separate", train=1, infer=1, ref=1, reward=1, function=True, cpu_threads=0):
    sizes = {"actor": train, "rollout": infer, "reference": ref, "reward": reward}
    roles = {role: SimpleNamespace(parallel=ParallelConfig(data=size)) for role, size in sizes.items()}
    roles["reward"].functions = (RewardFunction("m:f"),) if function else ()
    roles["reward"].load = None if function else "rm"
    parallel = {role: part.parallel for role, part in roles.items()}
    return SimpleNamespace(placement=placed, cpu_threads=cpu_threads, roles=tuple(sizes), parallel=parallel.__getitem__, **roles)


def test_reference_and_reward_work_side_by_side_and_the_others_take_turns():
    assert placement.ranks_at_once(config(train=2, infer=2, ref=1, reward=2)) == 3
    assert placement.ranks_at_once(config(train=4, infer=2)) == 4
    assert placement.ranks_at_once(config("colocate", train=2)) == 2


def test_a_rank_gets_the_cores_that_nobody_else_uses_meanwhile(monkeypatch):
    """Four cores: two training ranks take two each; a rollout alone all four; a reference beside a reward model half."""
    monkeypatch.setattr(placement, "cores", lambda: 4)
    monkeypatch.setattr(placement.device, "setup", lambda: "cpu")
    function, model = config(train=2), config(train=2, function=False)
    assert [placement.threads(function, role) for role in ("actor", "rollout", "reference")] == [2, 4, 4]
    assert [placement.threads(model, role) for role in ("actor", "reference", "reward")] == [2, 2, 2]
    assert placement.threads(config("colocate", train=1), "actor") == 4
    assert placement.threads(config(cpu_threads=3), "actor") == 3


def test_more_ranks_than_devices_is_told_with_the_cure():
    """Ray would wait without a word."""
    with pytest.raises(ConfigError, match=r"asks for 4 NPU \(actor 1, .*\), the Ray cluster has 0: .*--resources='\{\"NPU\": 4\}'"):
        placement.check_devices(config(), 0, "npu")
    with pytest.raises(ConfigError, match="3 ranks would work at the same time .*2 CPU cores"):
        placement.check_devices(config(ref=2), 2, "cpu")
    placement.check_devices(config(), 4, "cuda")
    placement.check_devices(config(), 2, "cpu")


def test_a_local_address_joins_no_cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert not joins_cluster()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6344")
    assert joins_cluster()
