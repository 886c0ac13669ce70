"""How ranks, devices and threads are counted before any of them is started, and which rank gets and gives what."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_odpo.config import ParallelConfig, RewardFunction
from mindspeed_odpo.errors import ConfigError, WorkerError
from mindspeed_odpo.ray import group, joins_cluster, placement
from mindspeed_odpo.types import PromptBatch


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


def test_ranks_count_every_parallel_size():
    parts = config(ref=2, reward=1)
    sizes = {"actor": ParallelConfig(tensor=2, pipeline=2, data=2), "rollout": ParallelConfig(tensor=2, data=3)}
    parts.parallel = lambda role: sizes.get(role, ParallelConfig(data=1))
    assert placement.ranks_needed(parts) == {"actor": 8, "rollout": 6, "reference": 1, "reward": 1}
    assert placement.ranks_at_once(parts) == 8


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
    placement.check_devices(config(ref=2, cpu_threads=1), 2, "cpu")  # to see a layout work, slowly
    placement.check_devices(config(), 4, "cuda")
    placement.check_devices(config(), 2, "cpu")


def test_a_local_address_joins_no_cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert not joins_cluster()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6344")
    assert joins_cluster()


class FakeRank:
    """Stands in for a Ray actor: notes what it is called with; its prompts' rows are its result."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, []
        self.call = SimpleNamespace(remote=self._call)

    def _call(self, role, method, reply, *args, **kwargs):
        self.calls.append((role, method, args, kwargs))
        result = args[0].index * 10 if args and isinstance(args[0], PromptBatch) else 7 + (method == "wrong") * self.number
        return result if reply else None


@pytest.fixture
def grouped(monkeypatch):
    """A colocated group of four ranks: policy TP 2 x DP 2, rollout DP 4, reward TP 1 x PP 2 x DP 2; no process is started."""
    made = object.__new__(group.RankGroup)
    made.layouts = {
        "actor": ParallelConfig(tensor=2, data=2),
        "rollout": ParallelConfig(data=4),
        "reward": ParallelConfig(pipeline=2, data=2),
    }
    made.roles, made.minutes = tuple(made.layouts), 1.0
    made.ranks = [FakeRank(number) for number in range(4)]
    monkeypatch.setattr(group.ray, "get", lambda references, timeout: references)
    return made


def prompts(count: int) -> PromptBatch:
    ids = torch.zeros(count, 1, dtype=torch.int64)
    return PromptBatch(1, ids, ids == 0, torch.arange(count), torch.arange(count), tuple({} for _ in range(count)))


@pytest.mark.parametrize(
    ("role", "shares"),
    [
        ("actor", [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]),
        ("rollout", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("reward", [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_every_rank_gets_its_data_index_s_share(grouped, role, shares):
    """Each role is cut by its own layout, tensor ranks side by side, pipeline stages apart. A rank never sees other prompts, and
    the results come back once, in the order of the prompts."""
    result = grouped.call(role, "ask", prompts(8), beta=0.1).result()
    assert [rank.calls[0][2][0].index.tolist() for rank in grouped.ranks] == shares
    assert all(rank.calls[0][3] == {"beta": 0.1} for rank in grouped.ranks)
    assert result.tolist() == [0, 10, 20, 30, 40, 50, 60, 70]


def test_results_come_from_one_rank_a_data_index(grouped):
    """The others of an index send nothing through the driver."""
    pending = grouped.call("actor", "ask", prompts(8))
    assert [answer is None for answer in pending.references] == [False, True, False, True]
    pending = grouped.call("reward", "ask", prompts(8))
    assert [answer is None for answer in pending.references] == [False, False, True, True]


def test_a_call_without_prompts_is_answered_by_all(grouped):
    """All ranks must agree, also those of one data-parallel index."""
    assert grouped.call("actor", "start").result() == 7
    with pytest.raises(WorkerError, match=r"actor.wrong: ranks disagree: \[7, 8, 9, 10\]"):
        grouped.call("actor", "wrong").result()


def test_the_first_ranks_work_together(grouped):
    """One prompt for one data-parallel index: its tensor-parallel ranks and no other."""
    assert grouped.call_first("actor", "ask", prompts(1)).result().tolist() == [0]
    assert [len(rank.calls) for rank in grouped.ranks] == [1, 1, 0, 0]
    assert grouped.call_first("rollout", "ask", prompts(1)).result().tolist() == [0]
    assert [len(rank.calls) for rank in grouped.ranks] == [2, 1, 0, 0]


def test_prompts_that_do_not_divide_are_told(grouped):
    with pytest.raises(WorkerError, match="PromptBatch of 6 prompts over 4 data-parallel ranks: not a whole number each"):
        grouped.call("rollout", "ask", prompts(6))


def test_mutant_a_share_by_rank_is_caught(grouped, monkeypatch):
    """Cut by rank where two tensor-parallel ranks need the same: the second one would work on other prompts."""
    monkeypatch.setattr(ParallelConfig, "data_index", lambda self, rank: rank % self.data)
    grouped.call("actor", "ask", prompts(8))
    first, second = (rank.calls[0][2][0].index.tolist() for rank in grouped.ranks[:2])
    assert first != second
