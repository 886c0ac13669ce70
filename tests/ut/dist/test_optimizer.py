"""The optimizer spread over data-parallel ranks against one process: ZeRO-1, overlapped reduction and gathering, the AdamW."""

from __future__ import annotations

import functools
from pathlib import Path

import policies
import pytest
import torch
from launcher import run

from mindspeed_odpo.config import ParallelConfig
from mindspeed_odpo.device.versions import GroupAdamW
from mindspeed_odpo.engine import optimizer, parallel

STEPS = 3
READ = "read in every iteration"
MUTANTS = ("no gather", "no no_sync")
ONE = ParallelConfig()
LAYOUTS = {
    "data 2, overlap": ParallelConfig(data=2, overlap=True),
    "data 2, zero1": ParallelConfig(data=2, zero1=True),
    "data 2, zero1, overlap": ParallelConfig(data=2, zero1=True, overlap=True),
}


def train(rank: int, port: int, start: Path, layout: ParallelConfig, mutant: str = "") -> dict:
    """Three steps from the weights in ``start``, with three, two and three micro-batches on the first rank."""
    policies.join(rank, port, layout)
    policy = policies.build(policies.architecture(start.parent), layout)
    policies.resume(policy, start)
    if mutant == "no no_sync":
        policy.chunks[0].config.no_sync_func = None
    stats = []
    for size in (1, 2, 1):
        stats.append(policies.step(policy, layout, rank, size))
        for _ in range(2 if mutant == READ else 0):  # as a run does: for the rollout, and where a checkpoint is due
            optimizer.sync_params(policy.ddps)
    if mutant != "no gather":
        optimizer.sync_params(policy.ddps)
    held = sum(piece.live["exp_avg"].numel() for piece in optimizer.pieces(policy.optimizer).values() if piece.live)
    weights = {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}
    buckets = len(policy.ddps[0].buffers[0].buckets)
    port = policies.leave()
    sums, norms = [dict(s.sums) for s in stats], [s.grad_norm for s in stats]
    return {"sums": sums, "norms": norms, "weights": weights, "held": held, "buckets": buckets, "port": port}


def train_all(rank: int, port: int, start: Path) -> dict[str, dict | str]:
    """Every layout one after the other in the same processes: most of a test's time is their start."""
    # The tiny model would be one bucket, which leaves nothing to overlap.
    optimizer.DistributedDataParallelConfig = functools.partial(optimizer.DistributedDataParallelConfig, bucket_size=3000)
    out: dict[str, dict | str] = {}
    jobs = [(name, layout, "") for name, layout in LAYOUTS.items()]
    jobs += [(name, LAYOUTS["data 2, zero1, overlap"], name) for name in (READ, *MUTANTS)]
    for name, layout, mutant in jobs:
        try:
            out[name] = train(rank, port, start, layout, mutant)
            port = out[name]["port"]
        except AssertionError as error:
            out[name] = f"{type(error).__name__}: {error}"
            if mutant not in MUTANTS:
                raise
    return out


@pytest.fixture(scope="module")
def one(folders, tmp_path_factory) -> dict:
    """One process; its start is in ``one["start"]`` for the others."""
    root = tmp_path_factory.mktemp("start")
    (root / "config.json").write_text((folders[0] / "config.json").read_text())
    policies.join(0, 0, ONE)
    policies.save(policies.fill(policies.build(policies.architecture(root), ONE)), root / "start", 0)
    parallel.destroy()
    return {"start": root / "start", **train(0, 0, root / "start", ONE)}


@pytest.fixture(scope="module")
def two(one) -> list[dict[str, dict]]:
    return run(2, train_all, one["start"])


def differences(one: dict, ranks: list[dict]) -> float:
    """Largest relative difference of losses and gradient norms, and absolute of weights."""
    worst = [abs(a / b - 1) for a, b in zip(ranks[0]["norms"], one["norms"], strict=True)]
    for step in range(STEPS):
        for name, value in one["sums"][step].items():
            worst.append(abs(sum(rank["sums"][step][name] for rank in ranks) / value - 1) if value else 0.0)
    for rank in ranks:
        worst += [float((rank["weights"][name] - value).abs().max()) for name, value in one["weights"].items()]
    return max(worst)


@pytest.mark.parametrize("name", LAYOUTS)
def test_three_steps_equal_one_process(one, two, name):
    """Losses, log-probs, gradient norms and weights; the second and third iteration would trip what is asked only once."""
    ranks = [rank[name] for rank in two]
    assert differences(one, ranks) < 1e-5
    if LAYOUTS[name].overlap:
        assert ranks[0]["buckets"] > 2
    if LAYOUTS[name].zero1:
        assert sum(rank["held"] for rank in ranks) == one["held"] and max(rank["held"] for rank in ranks) < 0.7 * one["held"]
    else:
        assert [rank["held"] for rank in ranks] == [one["held"]] * 2


def test_weights_may_be_read_in_every_iteration(one, two):
    assert differences(one, [rank[READ] for rank in two]) < 1e-5


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_of_the_overlap_is_caught(one, two, name):
    """Every micro-batch starts a reduction of its own; weights are read that are not gathered yet."""
    ranks = [rank[name] for rank in two]
    assert any(isinstance(rank, str) for rank in ranks) or differences(one, ranks) > 1e-4


def _updates(kind: str) -> list[torch.Tensor]:
    """Twenty updates of four weights by torch's unfused AdamW or by ours."""
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(n, generator=draw) for n in (7, 64, 1001, 4096)]
    parameters = [torch.nn.Parameter(weight) for weight in weights]
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    adam = GroupAdamW(parameters, **settings) if kind == "ours" else torch.optim.AdamW(parameters, foreach=False, **settings)
    for _ in range(20):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        adam.step()
    return [parameter.detach() for parameter in parameters]


def test_our_adamw_is_torchs():
    for ours, theirs in zip(_updates("ours"), _updates("torch"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_our_adamw_counts_groups_without_a_gradient():
    """All groups of all ranks have the same step, whatever part of the weights a rank holds."""
    weight, idle = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    adam = GroupAdamW([{"params": [weight]}, {"params": [idle]}, {"params": []}])
    weight.grad = torch.ones(3)
    adam.step()
    assert [group["step"] for group in adam.param_groups] == [1, 1, 1]
    assert torch.equal(idle, torch.ones(3))
