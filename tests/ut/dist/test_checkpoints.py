"""Checkpoints of spread models and optimizers: the same layout goes on bit for bit, another one to 1e-5."""

from __future__ import annotations

from pathlib import Path

import policies
import pytest
import torch
from launcher import run

from mindspeed_odpo.config import ParallelConfig
from mindspeed_odpo.engine import parallel

ONE = ParallelConfig()
ZERO1 = ParallelConfig(data=2, zero1=True, overlap=True)
LAYOUTS = {
    "data 2": ParallelConfig(data=2),
    "data 2, zero1, overlap": ZERO1,
    "tensor 2": ParallelConfig(tensor=2),
    "pipeline 2": ParallelConfig(pipeline=2),
    "pipeline 2, virtual 2": ParallelConfig(pipeline=2, virtual=2),
}
MOE = {
    "expert 2": ParallelConfig(data=2, expert=2),
    "expert 2, zero1": ParallelConfig(data=2, expert=2, zero1=True),
    "experts, pipeline 2": ParallelConfig(pipeline=2),
}
HALF, MORE = 2, 1
"""Updates before the checkpoint and after it."""

Job = tuple[ParallelConfig, Path, Path, int]
"""Resume in this layout from that folder, save in that one, after so many updates."""


def go_on(rank: int, port: int, setting: tuple[Path, int | None, bool], job: Job) -> dict:
    """The job's losses and gradient norms, and the port of the next job."""
    (hf, experts, bf16), (layout, start, out, steps) = setting, job
    policies.join(rank, port, layout)
    policy = policies.build(policies.architecture(hf, experts), layout, bf16)
    first = policies.resume(policy, start)[0]
    stats = [policies.step(policy, layout, rank) for _ in range(steps)]
    policies.save(policy, out, first + steps)
    return {"losses": [s.sums["loss"] for s in stats], "norms": [s.grad_norm for s in stats], "port": policies.leave()}


def all_jobs(rank: int, port: int, setting: tuple, jobs: list[Job]) -> list[dict]:
    """One after the other in the same processes: most of a test's time is their start."""
    told: list[dict] = []
    for job in jobs:
        told.append(go_on(rank, told[-1]["port"] if told else port, setting, job))
    return told


def folder(root: Path, *words: str) -> Path:
    return root / "-".join(words).replace(" ", "").replace(",", "-")


def jobs_of(root: Path, name: str, layout: ParallelConfig) -> list[Job]:
    """From one rank's checkpoint; by itself from the beginning, straight and with a stop."""
    return [
        (layout, folder(root, "one", "half"), folder(root, name, "from one"), MORE),
        (layout, root / "start", folder(root, name, "half"), HALF),
        (layout, folder(root, name, "half"), folder(root, name, "resumed"), MORE),
        (layout, root / "start", folder(root, name, "straight"), HALF + MORE),
    ]


class World:
    """What two ranks did in every layout of a model, and one rank before and after it."""

    def __init__(self, root: Path, hf: Path, layouts: dict[str, ParallelConfig], experts: int | None = None, bf16: bool = False) -> None:
        self.root, self.model, self.bf16 = root, policies.architecture(hf, experts), bf16
        setting = (hf, experts, bf16)
        policies.join(0, 0, ONE)
        policies.save(policies.fill(policies.build(self.model, ONE, bf16)), root / "start", 0)
        parallel.destroy()
        self.one = [go_on(0, 0, setting, job) for job in jobs_of(root, "one", ONE)[1:]][-1]
        jobs = [job for name, layout in layouts.items() for job in jobs_of(root, name, layout)]
        told = run(2, all_jobs, setting, jobs, timeout=300)
        self.told = {name: [rank[4 * i + 3] for rank in told] for i, name in enumerate(layouts)}
        for name in layouts:
            go_on(0, 0, setting, (ONE, folder(root, name, "half"), folder(root, name, "to one"), MORE))

    def read(self, *words: str) -> dict[str, torch.Tensor]:
        policies.join(0, 0, ONE)
        try:
            return policies.everything(folder(self.root, *words), self.model, self.bf16)
        finally:
            parallel.destroy()

    def check(self, name: str) -> None:
        one = self.read("one", "straight")
        for words in ((name, "from one"), (name, "to one"), (name, "straight")):
            found = self.read(*words)
            assert found.keys() == one.keys()
            for key, value in one.items():
                torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5, msg=lambda text, w=words, k=key: f"{w} {k}: {text}")
        straight, resumed = self.read(name, "straight"), self.read(name, "resumed")
        for key, value in straight.items():
            assert torch.equal(resumed[key], value), key
        losses = [
            sum(rank["losses"][i] for rank in {self.index(name, r): x for r, x in enumerate(self.told[name])}.values()) for i in range(3)
        ]
        assert losses == pytest.approx(self.one["losses"], rel=1e-5)
        for rank in self.told[name]:
            assert rank["norms"] == pytest.approx(self.one["norms"], rel=1e-5)

    @staticmethod
    def index(name: str, rank: int) -> int:
        return {**LAYOUTS, **MOE}[name].data_index(rank)


@pytest.fixture(scope="module")
def dense(folders, tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("dense"), folders[0], LAYOUTS)


@pytest.fixture(scope="module")
def moe(folders, tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("moe"), folders[0], MOE, experts=4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_goes_on_from_another(dense, name):
    """Three updates in one go; two, a checkpoint, and the third: on one rank and in this layout, in any order, weights, moments,
    losses and gradient norms are one rank's to 1e-5. The same layout with a stop: bit for bit."""
    dense.check(name)


@pytest.mark.parametrize("name", MOE)
def test_experts_go_on_in_another_layout(moe, name):
    """The same for a mixture of four experts, with the load-balancing loss in the gradient."""
    moe.check(name)


def test_masters_go_on_too(folders, tmp_path):
    """bf16 with ZeRO-1: the masters are what comes back, not the rounded weights."""
    world = World(tmp_path, folders[0], {"data 2, zero1, overlap": ZERO1}, bf16=True)
    straight, resumed = world.read("data 2, zero1, overlap", "straight"), world.read("data 2, zero1, overlap", "resumed")
    assert any(name.startswith("fp32_param.") for name in straight)
    for key, value in straight.items():
        assert torch.equal(resumed[key], value), key
