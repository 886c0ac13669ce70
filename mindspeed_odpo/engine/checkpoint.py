"""Megatron ``torch_dist`` checkpoints of the policy: weights, fp32 masters, Adam moments, iteration. Any layout loads any other's.

Layout, Megatron's own::

    DIR/latest_checkpointed_iteration.txt      "20"
    DIR/iter_0000020/                          torch_dist shards, common.pt, metadata.json

A checkpoint is written beside its place and renamed when it is whole; the tracker file follows, old ones go last. A run that
dies while saving leaves the previous checkpoint as the latest.

Tensors have Megatron's names: a weight's moments are ``optimizer.state.exp_avg.WEIGHT`` and ``.exp_avg_sq.``, a bf16 weight's
master is ``optimizer.state.fp32_param.WEIGHT``, as Megatron's optimizer without ZeRO-1 writes them. Its other forms know the
optimizer's groups and buffers, which another layout does not have. There is no random state to store: dropout is off, and
sampling and data order are functions of (seed, iteration).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from mindspeed_odpo.config import TRACKER, ModelConfig
from mindspeed_odpo.engine.optimizer import Piece, optimizer_step, pieces, set_optimizer_step, whole_state
from mindspeed_odpo.engine.parallel import set_virtual_stage
from mindspeed_odpo.errors import ConfigError, DataError

# What changes the numbers but no tensor's shape, so that a load with another value would go unseen.
_SHAPELESS = (
    "rotary_base",
    "rotary_interleaved",
    "rope_scaling_factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "norm_epsilon",
    "vocab_size",
    "moe_router_topk",
)


def latest_iteration(folder: Path) -> int:
    """The iteration that the tracker names; DataError where it names none or its folder is gone."""
    text = (folder / TRACKER).read_text().strip()
    if not text.isdigit():
        raise DataError(f"{folder / TRACKER}: expected an iteration number, found '{text[:40]}'; point load at another checkpoint")
    if not _folder(folder, int(text)).is_dir():
        raise DataError(
            f"{folder / TRACKER} names iteration {text}, but {_folder(folder, int(text))} is not there; restore it or edit the tracker"
        )
    return int(text)


def _folder(root: Path, step: int) -> Path:
    return root / f"iter_{step:07d}"


def _partial(root: Path, step: int) -> Path:
    return root / f".{_folder(root, step).name}.partial"


class Saver:
    """Writes the checkpoints of one run to ``root``. Every rank has one and calls its methods at the same time.

    ``keep_last``: so many of the newest stay, older iterations are removed once the tracker names the new one; 0: all stay.
    ``asynchronous``: ``save`` returns when the tensors are staged, a forked process of every rank writes them, and ``poll`` or
    ``finish`` gives the finished checkpoint its name.
    """

    def __init__(self, root: Path, keep_last: int = 0, asynchronous: bool = False) -> None:
        self.root = root
        self.keep_last = keep_last
        self._queue = AsyncCallsQueue() if asynchronous else None

    def save(
        self, step: int, chunks: Sequence[nn.Module], optimizer: MegatronOptimizer, architecture: ModelConfig, facts: Mapping[str, Any]
    ) -> Path:
        """Write iteration ``step``. ``chunks``: this rank's bare models of ``architecture``, with weights that are in step
        (``sync_params``); ``facts`` (seed, data, ...) are stored with them and checked on resume."""
        self.finish()
        partial = _partial(self.root, step)
        if dist.get_rank() == 0:
            for torn in (path for path in self.root.glob(".iter_*") if path.is_dir()):  # of a run that died
                shutil.rmtree(torn)
            partial.mkdir(parents=True)
        dist.barrier()
        state = {
            **_state(chunks, optimizer, loading=False),
            "iteration": step,
            "optimizer_step": optimizer_step(optimizer),
            "facts": dict(facts),
            "architecture": {name: getattr(architecture, name) for name in _SHAPELESS},
            "bf16": _bf16(chunks),
        }
        if self._queue is None:
            dist_checkpointing.save(state, str(partial))
            dist.barrier()
            self._publish(step)
        else:
            request = dist_checkpointing.save(state, str(partial), async_sharded_save=True)
            request.add_finalize_fn(lambda: self._publish(step))
            self._queue.schedule_async_request(request)
        return _folder(self.root, step)

    def poll(self) -> None:
        """Give a checkpoint its name if it has been written meanwhile."""
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=False)

    def finish(self) -> None:
        """Wait for the checkpoint under way, if any, and give it its name."""
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=True)

    def _publish(self, step: int) -> None:
        """Name the written checkpoint, then point the tracker to it, then remove what is too old. In this order."""
        if dist.get_rank() == 0:
            final = _folder(self.root, step)
            _remove(final)
            _partial(self.root, step).rename(final)
            tracker = self.root / f".{TRACKER}.partial"
            tracker.write_text(f"{step}\n")
            os.replace(tracker, self.root / TRACKER)
            found = [int(path.name[5:]) for path in self.root.iterdir() if re.fullmatch(r"iter_\d{7,}", path.name)]
            # A larger number comes from before somebody moved the tracker back: not for us to judge.
            older = sorted(n for n in found if n < step)
            for n in older[: max(len(older) + 1 - self.keep_last, 0)] if self.keep_last else ():
                _remove(_folder(self.root, n))
        dist.barrier()


def _remove(folder: Path) -> None:
    """Remove a checkpoint; a kill in the middle leaves none that looks whole."""
    if folder.is_dir():
        hidden = folder.with_name(f".{folder.name}.removed")
        folder.rename(hidden)
        shutil.rmtree(hidden)


def save_checkpoint(
    root: Path,
    step: int,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    architecture: ModelConfig,
    facts: Mapping[str, Any],
    *,
    keep_last: int = 0,
) -> Path:
    """One checkpoint, written when this returns; see :class:`Saver`."""
    return Saver(root, keep_last).save(step, chunks, optimizer, architecture, facts)


def load_checkpoint(
    root: Path, chunks: Sequence[nn.Module], optimizer: MegatronOptimizer | None, architecture: ModelConfig
) -> tuple[int, Mapping[str, Any]]:
    """Fill ``chunks`` (and ``optimizer``, unless None: weights only) from the latest checkpoint; its iteration and facts.

    ConfigError where the checkpoint's model had another rope, epsilon or vocabulary (the tensors would fit all the same), and
    where its optimizer had other masters (bf16). DataError for a checkpoint without this package's optimizer state.
    """
    step = latest_iteration(root)
    common = dist_checkpointing.load_common_state_dict(str(_folder(root, step)))
    for name, then in common.get("architecture", {}).items():
        if getattr(architecture, name) != then:
            raise ConfigError(
                f"model {architecture.name}: {name} is {getattr(architecture, name)}, the checkpoint in {root} was made with {then}: "
                "take the model yaml that it was trained with"
            )
    if optimizer is not None:
        if "optimizer_step" not in common:
            raise DataError(
                f"{_folder(root, step)} has no optimizer state that this version reads; take its weights with finetune=true, or "
                "resume with the version that wrote it"
            )
        if common["bf16"] != _bf16(chunks):
            raise ConfigError(
                f"training.bf16 is {_bf16(chunks)}, the checkpoint in {root} was made with {common['bf16']}: set it back to go on, or "
                "finetune=true to start a new run from these weights"
            )
    state = dist_checkpointing.load(_state(chunks, optimizer, loading=True), str(_folder(root, step)))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(state["model"][index])
    if optimizer is not None:
        _fill(chunks, optimizer, state["optimizer"])
        set_optimizer_step(optimizer, common["optimizer_step"])
    return step, common.get("facts", {})


def _bf16(chunks: Sequence[nn.Module]) -> bool:
    return any(parameter.dtype == torch.bfloat16 for chunk in chunks for parameter in chunk.parameters())


def _state(chunks: Sequence[nn.Module], optimizer: MegatronOptimizer | None, loading: bool) -> dict[str, Any]:
    """What is sharded: weights, and of each trained weight the optimizer's state, cut as the weight is."""
    weights = _weights(chunks)
    if optimizer is None:
        return {"model": weights}
    held = pieces(optimizer)
    trained = _trained(weights, held)
    mine = {id(weight.data) for weight in trained if is_main_replica(weight.replica_id)}
    whole = {} if loading else whole_state(optimizer, mine)
    state = {}
    for index, weight in enumerate(trained):
        key, shape = id(weight.data), weight.data.shape
        for name in held[key].names:
            if loading:
                data = torch.empty(shape, dtype=torch.float32)
            elif key in mine:
                data = whole[key][name].view(shape)
            else:
                data = torch.zeros((), dtype=torch.float32).expand(shape)  # another rank writes it: only the shape is looked at
            state[f"{index}.{name}"] = _like(weight, f"optimizer.state.{name}.{weight.key}", data)
    return {"model": weights, "optimizer": state}


def _weights(chunks: Sequence[nn.Module]) -> dict[int, Any]:
    weights = {}
    for index, chunk in enumerate(chunks):
        set_virtual_stage(index)
        weights[index] = chunk.sharded_state_dict()
    return weights


def _fill(chunks: Sequence[nn.Module], optimizer: MegatronOptimizer, loaded: Mapping[str, Tensor]) -> None:
    """Hand the loaded state to the optimizer, in the order of :func:`_state`."""
    held = pieces(optimizer)
    weights = _weights(chunks)
    for index, weight in enumerate(_trained(weights, held)):
        piece = held[id(weight.data)]
        piece.fill({name: loaded[f"{index}.{name}"] for name in piece.names})


def _trained(weights: Mapping[int, Any], held: Mapping[int, Piece]) -> list[ShardedTensor | ShardedTensorFactory]:
    cut = (value for value in nested_values(weights) if isinstance(value, (ShardedTensor, ShardedTensorFactory)))
    return [weight for weight in cut if id(weight.data) in held]


def _like(weight: ShardedTensor | ShardedTensorFactory, key: str, data: Tensor) -> ShardedTensor | ShardedTensorFactory:
    """``data`` under ``key``, cut as ``weight`` is."""
    if isinstance(weight, ShardedTensorFactory):
        return replace(weight, key=key, data=data)
    return replace(weight, key=key, data=data, dtype=data.dtype)
