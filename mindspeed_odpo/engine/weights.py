"""A model's weights as named tensors, in Megatron's names: what is loaded, exported and sent to the rollout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from mindspeed_odpo.errors import DataError, nearest

BUCKET_BYTES = 256 * 2**20


def unwrap(model: nn.Module) -> nn.Module:
    """The bare GPTModel inside Megatron's DDP and Float16Module."""
    while isinstance(model, (DistributedDataParallel, Float16Module)):
        model = model.module
    return model


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight once, detached, sharing memory with the model. A tied head comes as ``embedding.word_embeddings.weight``."""
    for name, parameter in unwrap(model).named_parameters():
        yield name, parameter.detach()


@torch.no_grad()
def load_named(model: nn.Module, items: Iterable[tuple[str, Tensor]]) -> None:
    """Copy ``items`` into the model, cast to its dtype. Strict: a missing, extra, repeated or wrongly shaped tensor raises
    DataError with its name. After an error the model is partly loaded."""
    targets = dict(named_weights(model))
    missing = set(targets)
    for name, tensor in items:
        if name not in targets:
            raise DataError(f"weight {name} {list(tensor.shape)} has no place in the model{nearest(name, targets)}")
        if name not in missing:
            raise DataError(f"weight {name} came twice: each weight must come once")
        if tensor.shape != targets[name].shape:
            raise DataError(f"weight {name}: expected shape {list(targets[name].shape)}, got {list(tensor.shape)}: is it another model's?")
        targets[name].copy_(tensor)
        missing.remove(name)
    if missing:
        raise DataError(
            f"{len(missing)} of the model's {len(targets)} weights did not come, the first is {min(missing)}: the source is incomplete"
        )


def buckets(items: Iterable[tuple[str, Tensor]], size: int = BUCKET_BYTES) -> Iterator[list[tuple[str, Tensor]]]:
    """Group ``items`` in order into lists of at most ``size`` bytes; a larger tensor travels alone."""
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in items:
        if bucket and filled + tensor.nbytes > size:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += tensor.nbytes
    if bucket:
        yield bucket
