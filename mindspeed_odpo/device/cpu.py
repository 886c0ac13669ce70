"""megatron-core on a CPU: the calls it makes to ``torch.cuda`` are answered with CPU tensors.

megatron-core hard-codes ``device="cuda"``, ``torch.cuda.current_device()`` and the CUDA random state. This is the one place
of the package that changes ``torch`` itself, only without an accelerator. Replaced is what training, recomputation and
checkpointing of megatron-core 0.12.1 and 0.16.1 call, no more: any other CUDA call still fails loudly.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_odpo.errors import HostError

_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty")
_installed = False


def _names_cuda(value: Any) -> bool:
    return str(value).startswith("cuda") if isinstance(value, (str, torch.device)) else False


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``factory`` with ``device="cuda"`` read as ``device="cpu"``."""

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return wrapped


def _get_rng_state(*_: Any, **__: Any) -> Tensor:
    return torch.default_generator.get_state()


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


class _Generators:
    """``torch.cuda.default_generators`` with the CPU's generator under every index."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


class _Stream:
    """Stands for the only stream there is, and for its events: what was called is done. Experts' dispatcher asks for one of its
    own and then whether that is the current one: it is."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def synchronize(self) -> None:
        pass

    def record_event(self) -> _Stream:
        return self


def install() -> None:
    """Install the layer; a second call does nothing. HostError when ``megatron.core`` is imported already."""
    global _installed
    if _installed:
        return
    if "megatron.core" in sys.modules:
        raise HostError(
            "megatron.core was imported before mindspeed_odpo.device.setup(): call setup() first, it prepares torch for the CPU"
        )
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda device=None: None
    cuda.Stream = cuda.current_stream = _Stream
    cuda.stream = contextlib.nullcontext
    # One generator serves both: "the CUDA random state" is the CPU's, so that seeding and recomputation stay exact.
    cuda.get_rng_state = cuda.random.get_rng_state = _get_rng_state
    cuda.manual_seed = _manual_seed
    cuda.default_generators = _Generators()
    # "Later, when CUDA is up" never comes. Megatron takes this function by name, hence before its import.
    cuda._lazy_call = lambda callable, **_: callable()
    # torch lists its factories by identity at the first use of `with torch.device(...)`. That has to happen before they are
    # wrapped: otherwise the context (transformers loads models under "meta") would no longer reach them.
    with torch.device("cpu"):
        torch.empty(0)
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    tensor: Any = Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    type_of = tensor.type

    @functools.wraps(type_of)
    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(self, *args, **kwargs)
        # Megatron's optimizer sorts parameters by comparing this string with "torch.cuda.FloatTensor" and the like.
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) and "cuda" not in answer else answer

    tensor.type = type_
    _installed = True
