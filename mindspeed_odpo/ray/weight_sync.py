"""Weights from the actor's first rank to every rollout rank, over a process group of their own.

One sync is: a manifest (version, names, shapes, dtypes), which every receiver checks and accepts; the tensors' bytes in buckets,
each one broadcast; with ``checksum`` one number a tensor; every receiver's word that it holds them. Whoever refuses says
why to all, so that sender and receivers end with the same error and nobody waits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_odpo import device
from mindspeed_odpo.errors import WorkerError, nearest

BUCKET_BYTES = 256 * 2**20
_ALIGN = 16  # bytes; a tensor of any dtype may start there
_WORDS = 1024  # bytes of a refusal
_SENDER = 0


@dataclass(frozen=True)
class Entry:
    """What a manifest says of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def checksum(tensor: Tensor) -> Tensor:
    """i64 scalar: the tensor's bytes read as whole numbers of 8 bytes (4, 2 or 1 where they do not divide), added modulo 2^64.

    Exact, hence the same in any order of adding and on any device; NaN and the sign of zero count. With the shape it tells
    whether bytes changed, not whether they changed places.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    word = next(kind for kind in (torch.int64, torch.int32, torch.int16, torch.uint8) if data.numel() % kind.itemsize == 0)
    if data.storage_offset() % word.itemsize:
        data = data.clone()
    return data.view(word).sum(dtype=torch.int64)


class SyncGroup:
    """The ranks of one weight sync: rank 0 sends, all others receive. Made once, kept for the run.

    torch.distributed allows a process one default group, and only its members can make further ones; the actor has its own,
    and a rollout its own or none. So this is a backend by itself, beside all groups and known to none of them.
    """

    def __init__(self, rank: int, size: int, address: str, port: int, timeout_minutes: float) -> None:
        """Rank 0 listens at ``address:port``. Returns when all ``size`` ranks are there; WorkerError after the timeout."""
        self.rank, self.size = rank, size
        self.device = device.device()
        timeout = timedelta(minutes=timeout_minutes)
        try:
            # Held: the store's server lives as long as the object, and a backend may ask it again.
            self._store = dist.TCPStore(address, port, size, is_master=rank == _SENDER, timeout=timeout)
            self._backend = _backend(dist.PrefixStore("weight_sync", self._store), rank, size, timeout)
            self._words("")  # connects every two of them
        except RuntimeError as error:
            raise WorkerError(f"weight sync: rank {rank} of {size} could not join at {address}:{port}: {_first_line(error)}") from error

    def send(self, version: int, entries: Sequence[Entry], items: Iterable[tuple[str, Tensor]], check: bool) -> int:
        """Send ``items``, which must be ``entries`` in this order. Returns the bytes of the tensors.

        WorkerError for an item that is missing, extra or not as its entry says, and with the receiver's words when one refuses.
        """
        manifest = {
            "version": version,
            "bucket_bytes": BUCKET_BYTES,
            "check": check,
            "weights": [[entry.name, str(entry.dtype).removeprefix("torch."), list(entry.shape)] for entry in entries],
        }
        text = torch.frombuffer(bytearray(json.dumps(manifest).encode()), dtype=torch.uint8).to(self.device)
        self._broadcast(torch.tensor([len(text)], device=self.device))
        self._broadcast(text)
        self._agree(version, "")
        waiting = iter(items)
        sums: list[Tensor] = []
        error = ""
        for bucket in _runs(entries, BUCKET_BYTES):
            spans, length = _spans(bucket)
            flat = torch.empty(length, dtype=torch.uint8, device=self.device)
            for entry, (start, stop) in zip(bucket, spans, strict=True):
                tensor = None if error else next(waiting, None)
                error = error or _unlike(entry, tensor)
                if tensor is not None and not error:
                    flat[start:stop].view(entry.dtype).view(entry.shape).copy_(tensor[1])
                if check:
                    sums.append(checksum(flat[start:stop]))
            self._broadcast(flat)  # after an error too: the receivers are told at the end
        extra = None if error else next(waiting, None)
        if extra is not None:
            error = f"the actor gave {extra[0]}, which its manifest does not name: its weights changed since the manifest was made"
        if check:
            self._broadcast(torch.stack(sums).to(self.device))
        self._agree(version, error)
        return sum(entry.nbytes for entry in entries)

    def receive(
        self,
        version: int,
        expected: Mapping[str, tuple[int, ...]] | None,
        load: Callable[[Iterator[tuple[str, Tensor]]], None],
        holds: Callable[[str, Tensor], bool] | None = None,
    ) -> int:
        """Take one sync and give its tensors to ``load``, which may keep none of them longer than the next one. Returns the bytes.

        ``expected``: name -> shape of the tensors that must come; None: whatever comes. ``holds(name, tensor)``: whether
        what ``load`` kept of a tensor is that tensor, asked of each when the sender checks. WorkerError for another version, a
        missing, extra or differently shaped tensor, a changed one (with ``check``), and for every error of another receiver.
        """
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._broadcast(length)
        text = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self._broadcast(text)
        manifest = json.loads(bytes(text.cpu().numpy()))
        entries = [Entry(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in manifest["weights"]]
        self._agree(version, _difference(version, manifest["version"], entries, expected))
        check = bool(manifest["check"])
        sums: list[Tensor] = []
        changed: list[str] = []
        items = self._items(entries, manifest["bucket_bytes"], sums if check else None, changed, holds)
        error = ""
        try:
            load(items)
        except WorkerError as refusal:
            error = str(refusal)
        for _ in items:  # what load left: the others are in the same broadcasts
            pass
        if check:
            sent = torch.zeros(len(entries), dtype=torch.int64, device=self.device)
            self._broadcast(sent)
            differs = (sent != torch.stack(sums)).nonzero()
            if len(differs):
                at = int(differs[0])
                error = error or (
                    f"{entries[at].name} changed on its way ({len(differs)} of {len(entries)} tensors did): sent checksum {int(sent[at])}, "
                    f"received {int(sums[at])}; look at the network between the ranks"
                )
            if changed:
                error = (
                    error or f"the rollout holds another {changed[0]} than it received ({len(changed)} of {len(entries)}): a bug, report it"
                )
        self._agree(version, error)
        return sum(entry.nbytes for entry in entries)

    def _items(
        self,
        entries: Sequence[Entry],
        bucket_bytes: int,
        sums: list[Tensor] | None,
        changed: list[str],
        holds: Callable[[str, Tensor], bool] | None,
    ) -> Iterator[tuple[str, Tensor]]:
        for bucket in _runs(entries, bucket_bytes):
            spans, length = _spans(bucket)
            flat = torch.empty(length, dtype=torch.uint8, device=self.device)
            self._broadcast(flat)
            for entry, (start, stop) in zip(bucket, spans, strict=True):
                tensor = flat[start:stop].view(entry.dtype).view(entry.shape)
                yield entry.name, tensor
                if sums is not None:
                    sums.append(checksum(tensor))
                    if holds is not None and not holds(entry.name, tensor):
                        changed.append(entry.name)

    def _broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = _SENDER
        self._wait(self._backend.broadcast([tensor], options))

    def _words(self, own: str) -> list[str]:
        """What every rank says."""
        mine = torch.zeros(_WORDS, dtype=torch.uint8)
        said = own.encode()[:_WORDS]
        mine[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
        mine = mine.to(self.device)
        all_ = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(self._backend.allgather([all_], [mine]))
        return [bytes(each.cpu().tolist()).rstrip(b"\0").decode(errors="ignore") for each in all_]

    def _agree(self, version: int, refusal: str) -> None:
        """WorkerError on every rank with the first words of a rank that refuses."""
        for rank, words in enumerate(self._words(refusal)):
            if words:
                who = "the sender" if rank == _SENDER else f"receiver {rank} of {self.size - 1}"
                raise WorkerError(f"weight sync, version {version}: {who}: {words}")

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise WorkerError(
                f"weight sync: rank {self.rank} of {self.size} lost the others ({_first_line(error)}): look at their logs"
            ) from error


def check_greedy(gaps: Tensor, version: int, bf16: bool) -> None:
    """WorkerError where a greedy answer of the rollout is not the actor's own. ``gaps`` f32 ``[P,1]`` as ``engine.greedy`` gives them.

    Two engines round differently, so a token may win by a hair in one of them: allowed are 2^-6 of the largest logit in bf16
    (two of its last places), 2^-12 in fp32. Another model's answer is off by far more within a few tokens.
    """
    allowed = 2.0**-6 if bf16 else 2.0**-12
    worst = int(gaps.flatten().argmax())
    gap = float(gaps.flatten()[worst])
    if not gap <= allowed:
        raise WorkerError(
            f"weight sync, version {version}: the rollout's greedy answer to prompt {worst} of the first batch is not the actor's: one of "
            f"its tokens lies {gap:.3g} of the largest logit below the actor's choice, allowed is {allowed:.3g}; rollout and actor differ "
            "in weights or in arithmetic: look at the model's yaml and the device's kernels (training.verify_sync=false goes on anyway)"
        )


def _backend(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The backend that belongs to the device (:func:`device.backend`), with ``broadcast`` and ``allgather``."""
    kind = device.backend()
    if kind == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    if kind == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL  # type: ignore[import-not-found]  # where torch_npu itself takes it from

    options = ProcessGroupHCCL.Options()
    options._timeout = timeout
    return ProcessGroupHCCL(store, rank, size, options)


def _runs(entries: Sequence[Entry], size: int) -> Iterator[list[Entry]]:
    """Entries in order, in lists of at most ``size`` bytes; a larger one alone."""
    run: list[Entry] = []
    filled = 0
    for entry in entries:
        if run and filled + entry.nbytes > size:
            yield run
            run, filled = [], 0
        run.append(entry)
        filled += entry.nbytes
    if run:
        yield run


def _spans(bucket: Sequence[Entry]) -> tuple[list[tuple[int, int]], int]:
    """First and last byte of each tensor in a bucket's buffer, and its length."""
    spans, end = [], 0
    for entry in bucket:
        spans.append((end, end + entry.nbytes))
        end += -(-entry.nbytes // _ALIGN) * _ALIGN
    return spans, end


def _unlike(entry: Entry, item: tuple[str, Tensor] | None) -> str:
    """How the actor's next item differs from the manifest's; empty: not at all."""
    if item is not None and (item[0], item[1].dtype, tuple(item[1].shape)) == (entry.name, entry.dtype, entry.shape):
        return ""
    found = "nothing more" if item is None else f"{item[0]} {item[1].dtype} {list(item[1].shape)}"
    return (
        f"the manifest names {entry.name} {entry.dtype} {list(entry.shape)}, the actor gave {found}: its weights changed since the "
        "manifest was made"
    )


def _difference(version: int, sent: int, entries: Sequence[Entry], expected: Mapping[str, tuple[int, ...]] | None) -> str:
    """Why a manifest is refused; empty: it is not."""
    if sent != version:
        return f"asked for version {version}, version {sent} was sent: the rollout would answer with other weights than it says"
    names = [entry.name for entry in entries]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        return f"{twice} is sent twice"
    if expected is None:
        return ""
    for entry in entries:
        if entry.name not in expected:
            return f"{entry.name} {list(entry.shape)} has no place in the rollout's model{nearest(entry.name, expected)}"
        if entry.shape != tuple(expected[entry.name]):
            return f"{entry.name}: expected shape {list(expected[entry.name])}, sent is {list(entry.shape)}: two different models"
    missing = [name for name in expected if name not in set(names)]
    return f"{len(missing)} of {len(expected)} tensors are not sent, the first is {missing[0]}" if missing else ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
