"""Two data-parallel ranks against one: same loss, log-probs, gradient norm and updated weights (gloo, two processes).

Prompts are split 3 and 3, and the kept pairs 3 and 2, so that a mean of the ranks' means would differ; a second split leaves
one rank without a kept pair at all.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

TIMEOUT_MINUTES = 1.0
SPLITS = {"3 and 3": ([0, 1, 2], [3, 4, 5]), "all and none": ([0, 1, 2, 4, 5], [3])}


def rank_main(rank: int, world: int, port: int, folders: tuple[Path, Path], split: tuple[list[int], ...], out: Path) -> None:
    import problem

    from mindspeed_odpo.config import ParallelConfig
    from mindspeed_odpo.engine import forward, parallel
    from mindspeed_odpo.pairs import make_pairs
    from mindspeed_odpo.types import TrainBatch

    torch.set_num_threads(1)
    parallel.init_parallel(ParallelConfig(data=world), rank, "127.0.0.1", port, 0, TIMEOUT_MINUTES)
    policy, reference = problem.load(folders[0], True), problem.load(folders[1], False)
    rollout = problem.rollout()
    ref = forward.answer_logps(reference.model, rollout, 2, torch.device("cpu"))
    whole = TrainBatch(rollout, make_pairs(problem.scores(), rollout, problem.PAIRS_CONFIG), ref)
    mine = whole if world == 1 else whole.select(split[rank])
    stats = [problem.step(policy, mine, 2, global_pairs=int(whole.pairs.keep.sum())) for _ in range(3)]
    torch.save(
        {"sums": [dict(s.sums) for s in stats], "norms": [s.grad_norm for s in stats], "weights": policy.weights()},
        out / f"{world}-{rank}.pt",
    )
    parallel.destroy()


def launch(world: int, folders, split, out: Path) -> list[dict]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.spawn(rank_main, args=(world, port, folders, split, out), nprocs=world, join=False)
    try:
        deadline = time.monotonic() + TIMEOUT_MINUTES * 120
        while not context.join(timeout=1.0):  # True once all have ended; it also returns when one has
            if time.monotonic() < deadline:
                continue
            waiting = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
            pytest.fail(f"ranks {waiting} of {world} still run after {TIMEOUT_MINUTES * 2:g} minutes")
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(out / f"{world}-{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.fixture(scope="module")
def one(folders, tmp_path_factory):
    return launch(1, folders, None, tmp_path_factory.mktemp("one"))[0]


@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_equal_one(folders, one, tmp_path, split):
    two = launch(2, folders, SPLITS[split], tmp_path)
    assert two[0]["norms"] == pytest.approx(one["norms"], rel=1e-5)
    for step in range(3):
        for name, value in one["sums"][step].items():
            assert sum(rank["sums"][step][name] for rank in two) == pytest.approx(value, rel=1e-5), (step, name)
    for name, value in one["weights"].items():
        torch.testing.assert_close(two[0]["weights"][name], value, rtol=1e-5, atol=1e-5, msg=name)
        assert torch.equal(two[0]["weights"][name], two[1]["weights"][name]), name
