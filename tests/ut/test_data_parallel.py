"""Two data-parallel ranks against one: same loss, log-probs, gradient norm and updated weights (gloo, two processes).

Prompts are split 3 and 3, and the kept pairs 3 and 2, so that a mean of the ranks' means would differ; a second split leaves
one rank without a kept pair at all.
"""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

TIMEOUT_MINUTES = 1.0
SPLITS = {"3 and 3": ([0, 1, 2], [3, 4, 5]), "all and none": ([0, 1, 2, 4, 5], [3])}


def rank_main(rank: int, world: int, port: int, folders: tuple[Path, Path], split: tuple[list[int], ...], out: Path, every: bool) -> None:
    import problem

    from mindspeed_odpo.config import PairsConfig, ParallelConfig
    from mindspeed_odpo.engine import forward, parallel
    from mindspeed_odpo.errors import WorkerError
    from mindspeed_odpo.pairs import make_pairs
    from mindspeed_odpo.types import TrainBatch

    torch.set_num_threads(1)
    parallel.init_parallel(ParallelConfig(data=world), rank, "127.0.0.1", port, 0, TIMEOUT_MINUTES)
    policy, reference = problem.load(folders[0], True), problem.load(folders[1], False)
    rollout, scores, config = problem.rollout(), problem.scores(), problem.PAIRS_CONFIG
    if every:  # three answers a prompt, three pairs each, some of them ties
        third = replace(rollout.select([5, 4, 3, 2, 1, 0]), prompt_ids=rollout.prompt_ids)
        joined = {n: torch.cat([getattr(rollout, n), getattr(third, n)[:, :1]], 1) for n in ("response_ids", "response_mask", "finished")}
        rollout, scores = replace(rollout, **joined), torch.cat([scores, scores.roll(2, 0)[:, :1]], 1)
        config = PairsConfig(select="all")
    ref = forward.answer_logps(reference.model, rollout, 2, torch.device("cpu"))
    whole = TrainBatch(rollout, make_pairs(scores, rollout, config), ref)
    mine = whole if world == 1 else whole.select(split[rank])
    pairs = int(whole.pairs.keep.sum())
    stats = [problem.step(policy, mine, 2, global_pairs=pairs) for _ in range(3)]
    weights = policy.weights()
    bad = replace(mine, ref_logps=mine.ref_logps.clone())
    if rank == world - 1:
        bad.ref_logps[:] = float("nan")  # on the last rank alone
    skipped = problem.step(policy, bad, 2, global_pairs=pairs, nonfinite="skip")
    try:
        problem.step(policy, bad, 2, global_pairs=pairs)
        told = ""
    except WorkerError as error:
        told = str(error)
    torch.save(
        {
            "sums": [dict(s.sums) for s in stats],
            "norms": [s.grad_norm for s in stats],
            "weights": weights,
            "skipped": skipped.nonfinite and all(torch.equal(value, weights[name]) for name, value in policy.weights().items()),
            "told": told,
        },
        out / f"{world}-{rank}.pt",
    )
    parallel.destroy()


def launch(world: int, folders, split, out: Path, every: bool = False) -> list[dict]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.spawn(rank_main, args=(world, port, folders, split, out, every), nprocs=world, join=False)
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


def same(two: list[dict], one: dict, atol: float = 1e-5) -> None:
    assert two[0]["norms"] == pytest.approx(one["norms"], rel=1e-5)
    for step in range(3):
        for name, value in one["sums"][step].items():
            assert sum(rank["sums"][step][name] for rank in two) == pytest.approx(value, rel=1e-5), (step, name)
    for name, value in one["weights"].items():
        torch.testing.assert_close(two[0]["weights"][name], value, rtol=1e-5, atol=atol, msg=name)
        assert torch.equal(two[0]["weights"][name], two[1]["weights"][name]), name


@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_equal_one(folders, one, tmp_path, split):
    two = launch(2, folders, SPLITS[split], tmp_path)
    same(two, one)
    if split == "3 and 3":  # a NaN on the second rank alone: both skip, both stop, both say why
        assert [rank["skipped"] for rank in two] == [True, True]
        assert two[1]["told"].startswith("loss nan") and two[0]["told"].startswith("loss 0.")
        assert all("nothing was updated" in rank["told"] for rank in two)


def test_two_ranks_equal_one_with_several_pairs_a_prompt(folders, tmp_path):
    """Three answers a prompt, every two a pair, ranks with different numbers of kept pairs. A gradient that is nearly zero is
    divided by its own size in AdamW: rounding moves such a weight by up to a tenth of lr."""
    (one,) = launch(1, folders, None, tmp_path, every=True)
    same(launch(2, folders, SPLITS["3 and 3"], tmp_path, every=True), one, atol=1e-3)
