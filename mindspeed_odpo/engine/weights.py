"""A model's weights as named whole tensors, whatever its parallel layout: what is loaded, exported and sent to the rollout.

Names, shapes and order are those of the model on one rank: layers are counted over the whole model, gate rows stand before
up rows, a head tied to the embedding comes once, as the embedding. Each stage of a pipeline, each tensor-parallel part and
each expert-parallel rank holds its share of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from mindspeed_odpo.errors import DataError, nearest

BUCKET_BYTES = 256 * 2**20
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"

_ALIGN = 16  # bytes; a tensor of any dtype may start there
_T = TypeVar("_T")


def unwrap(model: nn.Module) -> nn.Module:
    """The bare GPTModel inside Megatron's DDP and Float16Module."""
    while isinstance(model, (DistributedDataParallel, Float16Module)):
        model = model.module
    return model


@dataclass(frozen=True)
class Weight:
    """One tensor of the whole model, and who holds it."""

    name: str
    shape: tuple[int, ...]
    """Whole."""
    dtype: torch.dtype
    stage: int
    """Pipeline stage."""
    expert_rank: int | None
    """Expert-parallel rank; None: every one."""
    dim: int | None
    """The axis that tensor parallelism cuts; None: every rank has it whole."""
    blocks: int
    """Equal runs along ``dim`` of which each rank has a part: 2 for gate and up rows in one matrix."""
    parts: int
    """Tensor-parallel size."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def part_shape(self) -> tuple[int, ...]:
        return tuple(size // self.parts if axis == self.dim else size for axis, size in enumerate(self.shape))

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """Rank ``rank``'s part."""
        if self.dim is None:
            return whole
        return whole.unflatten(self.dim, (self.blocks, self.parts, -1)).select(self.dim + 1, rank).flatten(self.dim, self.dim + 1)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse: whole from every rank's part, in the order of ranks."""
        if self.dim is None or len(parts) == 1:
            return parts[0]
        return torch.cat([part.unflatten(self.dim, (self.blocks, -1)) for part in parts], self.dim + 1).flatten(self.dim, self.dim + 1)


class WeightLayout:
    """The whole model's weights in order, and the share of them on this rank. Making one is a collective with pipeline parallelism."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.held: dict[str, list[Tensor]] = {}
        """Name -> this rank's part. Two for a tied model whose one rank has the first and the last of several stages' chunks."""
        mine = [self._chunk(unwrap(chunk)) for chunk in chunks]
        stages = [mine]
        if _size(_pipeline()) > 1:
            stages = [[]] * _size(_pipeline())
            dist.all_gather_object(stages, mine, group=_pipeline())
        # Chunk 0 of every stage, then chunk 1 of every stage: the order of layers in Megatron's interleaved schedule.
        self.weights: list[Weight] = [weight for chunk in zip(*stages, strict=True) for stage in chunk for weight in stage]

    def _chunk(self, model: Any) -> list[Weight]:
        stage, rank = _rank(_pipeline()), _rank(_experts())
        offsets = {i: layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
        found: list[tuple[str, nn.Parameter]] = []
        for local, parameter in model.named_parameters():
            name = re.sub(r"^decoder\.layers\.(\d+)", lambda match: f"decoder.layers.{offsets[int(match[1])]}", local)
            if name == HEAD and model.share_embeddings_and_output_weights:
                self.held.setdefault(EMBEDDING, []).append(parameter.detach())  # the last stage's copy of a tied embedding
                continue
            found.append((name, parameter))
        weights = []
        # The experts of a layer stand side by side. Rank r has the r-th run of them.
        for layer, run in groupby(found, key=lambda item: item[0].partition(".local_experts.")[0] if ".local_experts." in item[0] else ""):
            items = list(run)
            count = 1 + max((_expert(name) for name, _ in items), default=0) if layer else 0
            for expert_rank in range(_size(_experts())) if layer else (None,):
                for name, parameter in items:
                    if expert_rank is not None:
                        number = expert_rank * count + _expert(name)
                        name = re.sub(r"\.local_experts\.\d+\.", f".local_experts.{number}.", name)
                    if expert_rank in (None, rank):
                        self.held.setdefault(name, []).append(parameter.detach())
                    weights.append(_describe(name, parameter, stage, expert_rank, bool(model.config.gated_linear_unit)))
        return weights

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, whole, on every rank. A collective: each rank reads it to its end. With one rank no copy is made."""
        if all(_size(group) == 1 for group in (_pipeline(), _experts(), _tensor(None), _tensor(0))):
            for weight in self.weights:
                yield weight.name, self.held[weight.name][0]
            return
        for (stage, expert_rank), run in groupby(self.weights, key=lambda weight: (weight.stage, weight.expert_rank)):
            for bucket in _runs(run, lambda weight: weight.nbytes, BUCKET_BYTES):
                yield from self._gather(bucket, stage, expert_rank)

    def _gather(self, bucket: Sequence[Weight], stage: int, expert_rank: int | None) -> Iterator[tuple[str, Tensor]]:
        """One bucket: its holder's bytes go to the other stages (and expert-parallel ranks), then the tensor-parallel parts meet."""
        spans, end = [], 0
        for weight in bucket:
            size = math.prod(weight.part_shape) * weight.dtype.itemsize
            spans.append((end, end + size))
            end += -(-size // _ALIGN) * _ALIGN
        flat = torch.empty(end, dtype=torch.uint8, device=next(iter(self.held.values()))[0].device)
        right_expert = expert_rank in (None, _rank(_experts()))
        if right_expert and stage == _rank(_pipeline()):
            for weight, (start, stop) in zip(bucket, spans, strict=True):
                flat[start:stop].view(weight.dtype).view(weight.part_shape).copy_(self.held[weight.name][0])
        if right_expert and _size(_pipeline()) > 1:
            dist.broadcast(flat, dist.get_global_rank(_pipeline(), stage), group=_pipeline())
        if expert_rank is not None and _size(_experts()) > 1:
            dist.broadcast(flat, dist.get_global_rank(_experts(), expert_rank), group=_experts())
        group = _tensor(expert_rank)
        ranks = flat[None]
        if _size(group) > 1:
            ranks = flat.new_empty(_size(group), end)
            dist.all_gather_into_tensor(ranks.view(-1), flat, group=group)
        for weight, (start, stop) in zip(bucket, spans, strict=True):
            yield weight.name, weight.join([part[start:stop].view(weight.dtype).view(weight.part_shape) for part in ranks.unbind(0)])

    @torch.no_grad()
    def load(self, items: Iterable[tuple[str, Tensor]]) -> None:
        """See :func:`load_named`."""
        targets = {weight.name: weight for weight in self.weights}
        missing = set(targets)
        for name, tensor in items:
            if name not in targets:
                raise DataError(f"weight {name} {list(tensor.shape)} has no place in the model{nearest(name, targets)}")
            if name not in missing:
                raise DataError(f"weight {name} came twice: each weight must come once")
            weight = targets[name]
            if tuple(tensor.shape) != weight.shape:
                raise DataError(f"weight {name}: expected shape {list(weight.shape)}, got {list(tensor.shape)}: is it another model's?")
            for held in self.held.get(name, ()):
                held.copy_(weight.part(tensor, _rank(_tensor(weight.expert_rank))))
            missing.remove(name)
        if missing:
            raise DataError(
                f"{len(missing)} of the model's {len(targets)} weights did not come, the first is {min(missing)}: the source is incomplete"
            )


def named_weights(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the model once, whole and detached, in the one-rank model's order; equal on every rank.

    ``chunks``: this rank's part of the model, one module a virtual stage. A collective of all ranks of the model: each of
    them reads to the end. On one rank the tensors share memory with the model.
    """
    return WeightLayout(chunks).gather()


def load_named(chunks: Sequence[nn.Module], items: Iterable[tuple[str, Tensor]]) -> None:
    """Copy this rank's part of every whole tensor of ``items`` into the model, cast to its dtype; any order.

    Every rank calls it, with the same items. Strict over the whole model: a missing, extra, repeated or wrongly shaped tensor
    raises DataError with its name on every rank, also on those that hold no part of it. After an error the model is partly loaded.
    """
    WeightLayout(chunks).load(items)


def buckets(items: Iterable[tuple[str, Tensor]], size: int = BUCKET_BYTES) -> Iterator[list[tuple[str, Tensor]]]:
    """Group ``items`` in order into lists of at most ``size`` bytes; a larger tensor travels alone."""
    return _runs(items, lambda item: item[1].nbytes, size)


def _runs(items: Iterable[_T], nbytes: Callable[[_T], int], size: int) -> Iterator[list[_T]]:
    run: list[_T] = []
    filled = 0
    for item in items:
        if run and filled + nbytes(item) > size:
            yield run
            run, filled = [], 0
        run.append(item)
        filled += nbytes(item)
    if run:
        yield run


def _describe(name: str, parameter: Tensor, stage: int, expert_rank: int | None, gated: bool) -> Weight:
    # Megatron marks what it cuts. Of a gated fc1 it does not say that gate and up rows are cut apart: its stride is 1 there.
    cut = bool(getattr(parameter, "tensor_model_parallel", False))
    dim = int(parameter.partition_dim) if cut else None  # type: ignore[attr-defined]
    parts = _size(_tensor(expert_rank))
    blocks = 2 if gated and ".linear_fc1." in name else int(parameter.partition_stride) if cut else 1  # type: ignore[attr-defined]
    shape = tuple(size * parts if axis == dim else size for axis, size in enumerate(parameter.shape))
    return Weight(name, shape, parameter.dtype, stage, expert_rank, dim, blocks, parts)


def _expert(name: str) -> int:
    match = re.search(r"\.local_experts\.(\d+)\.", name)
    assert match is not None
    return int(match[1])


def _pipeline() -> dist.ProcessGroup:
    return parallel_state.get_pipeline_model_parallel_group()


def _experts() -> dist.ProcessGroup:
    return parallel_state.get_expert_model_parallel_group()


def _tensor(expert_rank: int | None) -> dist.ProcessGroup:
    """The tensor-parallel group of an ordinary weight (None), or of an expert's."""
    if expert_rank is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def _size(group: dist.ProcessGroup) -> int:
    return dist.get_world_size(group)


def _rank(group: dist.ProcessGroup) -> int:
    return dist.get_rank(group)
