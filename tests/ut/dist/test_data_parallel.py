"""Two data-parallel ranks: several pairs a prompt, and a NaN on one of them alone (gloo, two processes)."""

from __future__ import annotations

from dataclasses import replace

import launcher
import pytest
import torch

from mindspeed_odpo.config import PairsConfig, ParallelConfig

SPLIT = ([0, 1, 2], [3, 4, 5])


def train(rank: int, port: int, folders, world: int) -> dict:
    import problem

    from mindspeed_odpo.engine import forward, parallel
    from mindspeed_odpo.errors import WorkerError
    from mindspeed_odpo.pairs import make_pairs
    from mindspeed_odpo.types import TrainBatch

    parallel.init_parallel(ParallelConfig(data=world), rank, "127.0.0.1", port, 0, timeout_minutes=1.0)
    policy, reference = problem.load(folders[0], True), problem.load(folders[1], False)
    # three answers a prompt, three pairs each, some of them ties
    two = problem.rollout()
    third = two.select([5, 4, 3, 2, 1, 0])
    joined = {n: torch.cat([getattr(two, n), getattr(third, n)[:, :1]], 1) for n in ("response_ids", "response_mask", "finished")}
    rollout = replace(two, **joined)
    scores = torch.cat([problem.scores(), problem.scores().roll(2, 0)[:, :1]], 1)
    ref = forward.answer_logps(reference.chunks, rollout, 2, torch.device("cpu"))
    whole = TrainBatch(rollout, make_pairs(scores, rollout, PairsConfig(select="all")), ref)
    pairs = int(whole.pairs.keep.sum())
    mine = whole if world == 1 else whole.select(SPLIT[rank])
    stats = [problem.step(policy, mine, 2, global_pairs=pairs) for _ in range(3)]
    weights = policy.weights()
    bad = replace(mine, ref_logps=mine.ref_logps.clone())
    if rank == world - 1:
        bad.ref_logps[:] = float("nan")
    skipped = problem.step(policy, bad, 2, global_pairs=pairs, nonfinite="skip").nonfinite
    try:
        problem.step(policy, bad, 2, global_pairs=pairs)
        told = ""
    except WorkerError as error:
        told = str(error)
    return {
        "sums": [dict(s.sums) for s in stats],
        "norms": [s.grad_norm for s in stats],
        "weights": weights,
        "kept": int(mine.pairs.keep.sum()),
        "skipped": skipped and all(torch.equal(value, weights[name]) for name, value in policy.weights().items()),
        "told": told,
    }


@pytest.fixture(scope="module")
def ranks(folders):
    return launcher.run(1, train, folders, 1)[0], launcher.run(2, train, folders, 2)


def test_two_ranks_equal_one_with_several_pairs_a_prompt(ranks):
    """Every two of three answers are a pair; the ranks keep different numbers of them."""
    one, two = ranks
    assert two[0]["kept"] != two[1]["kept"] and two[0]["kept"] + two[1]["kept"] == one["kept"]
    assert two[0]["norms"] == pytest.approx(one["norms"], rel=1e-5)
    for step in range(3):
        for name, value in one["sums"][step].items():
            assert sum(rank["sums"][step][name] for rank in two) == pytest.approx(value, rel=1e-5), (step, name)
    for name, value in one["weights"].items():
        assert (two[0]["weights"][name] - value).norm() <= 1e-5 * value.norm(), name
        assert torch.equal(two[0]["weights"][name], two[1]["weights"][name]), name


def test_a_nan_on_one_rank_is_skipped_by_both_or_stops_both(ranks):
    """One alone would leave the other waiting in the optimizer, or train on."""
    _, two = ranks
    assert [rank["skipped"] for rank in two] == [True, True]
    assert two[1]["told"].startswith("loss nan") and two[0]["told"].startswith("loss 0.")
    assert all("nothing was updated" in rank["told"] for rank in two)
