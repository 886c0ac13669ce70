"""Which accelerator this process uses. Call :func:`setup` before anything imports ``megatron.core``."""

from __future__ import annotations

import importlib.util
import logging
from typing import Literal

import torch

DeviceName = Literal["npu", "cuda", "cpu"]

_log = logging.getLogger(__name__)
_BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
_name: DeviceName | None = None


def _npu_available() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    try:
        import torch_npu
    except (ImportError, OSError) as error:
        # The wheel installs on any machine, but imports only where the CANN libraries are.
        _log.warning("torch_npu is installed but does not import (%s); its devices are not used", error)
        return False
    return bool(torch_npu.npu.is_available())


def _detect() -> DeviceName:
    # The NPU first: transfer_to_npu makes torch.cuda.is_available() answer True on an Ascend machine.
    if _npu_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def setup() -> DeviceName:
    """Pick the device and prepare torch for ``megatron.core`` on it; later calls only return the name.

    On a CPU this installs the device layer of :mod:`mindspeed_odpo.device.cpu`, and says so in the log. Raises HostError when
    ``megatron.core`` was imported before on a machine without an accelerator.
    """
    global _name
    if _name is not None:
        return _name
    name = _detect()
    if name == "npu":
        # Megatron names CUDA throughout; Ascend's own layer turns those calls into NPU calls.
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
        _log.info("device: npu, through torch_npu's transfer_to_npu")
    elif name == "cuda":
        _log.info("device: cuda, megatron-core runs as it is")
    else:
        from mindspeed_odpo.device import cpu

        cpu.install()
        _log.info("device: cpu, no accelerator found; megatron-core's CUDA calls are answered on the CPU")
    _name = name
    return name


def device() -> torch.device:
    """The device of this process's tensors."""
    name = setup()
    return torch.device(name) if name == "cpu" else torch.device(name, torch.cuda.current_device())


def backend() -> str:
    """The collective backend that belongs to the device: hccl, nccl or gloo."""
    return _BACKENDS[setup()]
