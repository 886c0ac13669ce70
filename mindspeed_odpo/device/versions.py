"""What a supported megatron-core version needs on a newer torch or numpy, on every device. Decided by version, never by trying."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

_log = logging.getLogger(__name__)


def core_version() -> tuple[int, int]:
    """Major and minor version of the installed megatron-core, (0, 16)."""
    from megatron.core import __version__

    major, minor = __version__.split(".")[:2]
    return int(major), int(minor)


def apply() -> None:
    """Repair ``dist_checkpointing`` of megatron-core 0.12; on other versions nothing. A second call does nothing more."""
    if core_version() != (0, 12):
        return
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writer
    import numpy

    write_item: Any = writer._write_item
    if "serialization_format" in inspect.signature(write_item).parameters and not isinstance(write_item, functools.partial):
        # torch 2.8 made the format an argument of this function; 0.12 calls it without and means torch.save's.
        from torch.distributed.checkpoint.filesystem import SerializationFormat

        writer._write_item = functools.partial(write_item, serialization_format=SerializationFormat.TORCH_SAVE)
        _log.info("megatron-core 0.12: checkpoint writer fitted to this torch")
    if int(numpy.__version__.split(".")[0]) >= 2:
        # numpy 2 took the alias away; 0.12's dist_checkpointing.mapping still calls it.
        numpy.product = numpy.prod
