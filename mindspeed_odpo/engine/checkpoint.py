"""Megatron ``torch_dist`` checkpoints of the policy: weights, fp32 masters, Adam moments, iteration.

Layout, Megatron's own::

    DIR/latest_checkpointed_iteration.txt      "20"
    DIR/iter_0000020/                          torch_dist shards, common.pt, metadata.json

A checkpoint is written beside its place and renamed when it is whole; the tracker file follows last. A run that dies while
saving leaves the previous checkpoint as the latest.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer
from torch import nn

from mindspeed_odpo.config import TRACKER, ModelConfig
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


def _state(model: nn.Module, optimizer: MegatronOptimizer | None, step: int, loading: bool) -> dict[str, Any]:
    weights = model.sharded_state_dict()
    state: dict[str, Any] = {"model": weights, "iteration": step}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(weights, is_loading=loading)
    return state


def save_checkpoint(
    root: Path, step: int, model: nn.Module, optimizer: MegatronOptimizer, architecture: ModelConfig, facts: Mapping[str, Any]
) -> Path:
    """Write iteration ``step``. ``model`` is the bare GPTModel of ``architecture``; ``facts`` (seed, data, ...) are stored with
    it and checked on resume. Every rank calls it."""
    final = _folder(root, step)
    partial = root / f".{final.name}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    told = {"facts": dict(facts), "architecture": {name: getattr(architecture, name) for name in _SHAPELESS}}
    dist_checkpointing.save({**_state(model, optimizer, step, loading=False), **told}, str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        tracker = root / f".{TRACKER}.partial"
        tracker.write_text(f"{step}\n")
        os.replace(tracker, root / TRACKER)
    dist.barrier()
    return final


def load_checkpoint(
    root: Path, model: nn.Module, optimizer: MegatronOptimizer | None, architecture: ModelConfig
) -> tuple[int, Mapping[str, Any]]:
    """Fill ``model`` (and ``optimizer``, unless None: weights only) from the latest checkpoint; its iteration and facts.

    ConfigError where the checkpoint's model had another rope, epsilon or vocabulary: the tensors would fit all the same.
    """
    step = latest_iteration(root)
    common = dist_checkpointing.load_common_state_dict(str(_folder(root, step)))
    for name, then in common.get("architecture", {}).items():
        if getattr(architecture, name) != then:
            raise ConfigError(
                f"model {architecture.name}: {name} is {getattr(architecture, name)}, the checkpoint in {root} was made with {then}: "
                "take the model yaml that it was trained with"
            )
    state = dist_checkpointing.load(_state(model, optimizer, step, loading=True), str(_folder(root, step)))
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    return step, common.get("facts", {})
