"""The weight sync over its own process group: two receivers and a sender, three processes (gloo).

What NCCL and HCCL do with the same calls is not shown here.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "dist"))
from launcher import free_port, run  # noqa: E402

WEIGHTS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4) / 7,
    "b": torch.arange(5, dtype=torch.bfloat16) * -0.5,  # 10 bytes: the next one does not start on a round address by itself
    "c": torch.full((2, 3), float("nan")),
    "d": torch.tensor([0.0, -0.0, 1e-40]),
}


class Receiver:
    """A rollout that keeps what it gets, or goes wrong in one way."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.kept: dict[str, torch.Tensor] = {}

    def load(self, items: Any) -> None:
        from mindspeed_odpo.errors import WorkerError

        for name, tensor in items:
            if self.fault == "bits flip on the way" and name == "b":
                tensor.view(torch.int16)[2] += 1
            if self.fault == "load raises" and name == "b":
                raise WorkerError("b does not fit")
            if self.fault == "load stops early" and name == "b":
                return
            self.kept[name] = tensor.clone()
            if self.fault == "another tensor is kept" and name == "c":
                self.kept[name][0, 0] = 1.0

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        kept = self.kept.get(name)
        return kept is not None and torch.equal(kept.view(torch.uint8), tensor.view(torch.uint8))


def sync(rank: int, port: int, cases: list[tuple[str, bool]]) -> list[tuple[str, int, dict[str, torch.Tensor]]]:
    """Each case in turn, in one group: (error or "", bytes, what this rank kept)."""
    from mindspeed_odpo.errors import WorkerError
    from mindspeed_odpo.ray import weight_sync

    weight_sync.BUCKET_BYTES = 40  # "a" alone, the rest in two
    group = weight_sync.SyncGroup(rank, 3, "127.0.0.1", port, 1.0)
    expected = {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}
    entries = [weight_sync.Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in WEIGHTS.items()]
    told = []
    for version, (fault, check) in enumerate(cases):
        receiver = Receiver(fault if rank == 2 else "")
        moved, error = 0, ""
        try:
            if rank == 0:
                names, items = list(entries), list(WEIGHTS.items())
                if fault == "missing":
                    names, items = names[:-1], items[:-1]
                elif fault == "extra":
                    names = [*names, weight_sync.Entry("e", torch.float32, (1,))]
                elif fault == "another shape":
                    names[1] = weight_sync.Entry("b", torch.bfloat16, (6,))
                elif fault == "twice":
                    names = [*names, names[0]]
                elif fault == "the actor stops early":
                    items = items[:2]
                elif fault == "the actor goes on":
                    items = [*items, ("f", torch.zeros(1))]
                elif fault == "the actor's tensor changed":
                    items[2] = ("c", torch.zeros(7))
                moved = group.send(version, names, items, check)
            else:
                asked = version + 1 if fault == "another version" and rank == 2 else version
                moved = group.receive(asked, expected, receiver.load, receiver.holds)
        except WorkerError as refusal:
            error = str(refusal)
        told.append((error, moved, receiver.kept))
    return told


CASES = {
    ("", True): None,
    ("", False): None,
    ("missing", False): "receiver 1 of 2: 1 of 4 tensors are not sent, the first is d",
    ("extra", False): "receiver 1 of 2: e [1] has no place in the rollout's model",
    ("another shape", False): "receiver 1 of 2: b: expected shape [5], sent is [6]: two different models",
    ("twice", False): "receiver 1 of 2: a is sent twice",
    ("another version", False): "receiver 2 of 2: asked for version 7, version 6 was sent",
    ("the actor stops early", True): "the sender: the manifest names c torch.float32 [2, 3], the actor gave nothing more",
    ("the actor goes on", True): "the sender: the actor gave f, which its manifest does not name",
    ("the actor's tensor changed", False): "the sender: the manifest names c torch.float32 [2, 3], the actor gave c torch.float32 [7]",
    ("load raises", True): "receiver 2 of 2: b does not fit",
    ("load stops early", True): "receiver 2 of 2: the rollout holds another b than it received (3 of 4)",
    ("bits flip on the way", True): "receiver 2 of 2: b changed on its way (1 of 4 tensors did): sent checksum ",
    ("another tensor is kept", True): "receiver 2 of 2: the rollout holds another c than it received (1 of 4)",
    ("bits flip on the way", False): None,
}
"""(what goes wrong, with checksums) -> how the error of all three goes on. The last one: without checksums nobody notices."""


@cache
def results() -> list[tuple[tuple[str, int, dict[str, torch.Tensor]], ...]]:
    return list(zip(*run(3, sync, list(CASES)), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0] or 'nothing'}-{'check' if case[1] else 'plain'}")
def test_all_ranks_end_alike_and_the_group_goes_on(case):
    """An error reaches sender and both receivers with the same words, and the next case runs in the same group."""
    number = list(CASES).index(case)
    for error, moved, _ in results()[number]:
        if CASES[case] is None:
            assert (error, moved) == ("", 12 * 4 + 10 + 6 * 4 + 3 * 4)
        else:
            assert error.partition(": ")[2].startswith(CASES[case])


def test_every_bit_arrives():
    """NaN, the sign of zero and subnormal numbers too."""
    for _, _, kept in results()[0][1:]:
        assert list(kept) == list(WEIGHTS)
        for name, tensor in WEIGHTS.items():
            assert kept[name].dtype == tensor.dtype
            assert torch.equal(kept[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_checksum_sees_every_bit_and_no_order():
    """1.0 is 0x3f800000, -0.0 is 0x80000000; two of them are one number of 8 bytes, the lower one first."""
    from mindspeed_odpo.ray.weight_sync import checksum

    assert int(checksum(torch.tensor([1.0, -0.0]))) == 0x3F800000 - 2**63
    assert int(checksum(torch.tensor([1.0, 1.0], dtype=torch.bfloat16))) == 0x3F803F80
    assert int(checksum(torch.tensor([1, 2, 250], dtype=torch.uint8))) == 253
    whole = torch.randn(7, 4)
    assert int(checksum(whole[1:])) == int(checksum(whole[1:].clone()))
    assert int(checksum(whole.view(-1)[1:3])) == int(checksum(whole.view(-1)[1:3].clone()))  # does not start on 8 bytes
    assert int(checksum(whole)) == int(checksum(whole.flip(0))) != int(checksum(-whole))


@pytest.mark.parametrize(
    ("bf16", "gap", "fine"), [(True, 2.0**-6, True), (True, 0.02, False), (False, 2.0**-12, True), (False, 0.001, False)]
)
def test_near_ties_are_no_difference(bf16, gap, fine):
    from mindspeed_odpo.errors import WorkerError
    from mindspeed_odpo.ray.weight_sync import check_greedy

    gaps = torch.tensor([[0.0], [gap], [0.0]])
    if fine:
        check_greedy(gaps, 7, bf16)
        return
    with pytest.raises(WorkerError, match=r"version 7: the rollout's greedy answer to prompt 1 of the first batch is not the actor's"):
        check_greedy(gaps, 7, bf16)
    with pytest.raises(WorkerError, match="prompt 0 of"):
        check_greedy(torch.tensor([[float("nan")]]), 7, bf16)


def join_alone(rank: int, _: int, port: int) -> str:
    from mindspeed_odpo.errors import WorkerError
    from mindspeed_odpo.ray.weight_sync import SyncGroup

    try:
        SyncGroup(1, 2, "127.0.0.1", port, 0.02)
    except WorkerError as error:
        return str(error)
    return "joined"


def test_a_sender_that_never_comes_is_an_error():
    port = free_port()
    assert run(1, join_alone, port)[0].startswith(f"weight sync: rank 1 of 2 could not join at 127.0.0.1:{port}: ")
