"""Each repair of ``device/versions.py`` and ``device/cpu.py`` against the fault that it removes, on the installed megatron-core.

Every test first shows the fault with the unrepaired function, where this version and machine have it. Does not show the
repairs on an accelerator.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mindspeed_odpo import device

device.setup()

from mindspeed_odpo.device import versions  # noqa: E402

OLD = versions.core_version() == (0, 12)


def pristine(name: str) -> ModuleType:
    """A second, unrepaired copy of a megatron-core module; the first one stays what everybody has."""
    repaired = importlib.import_module(name)
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy
    try:
        spec.loader.exec_module(copy)
    finally:
        sys.modules[name] = repaired
    return copy


@pytest.fixture(autouse=True)
def applied():
    versions.apply()


def test_applying_twice_does_nothing_more():
    from megatron.core import optimizer
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    before = filesystem_async._write_item, optimizer.Adam
    versions.apply()
    assert (filesystem_async._write_item, optimizer.Adam) == before


@pytest.mark.skipif(not OLD, reason="megatron-core 0.12's fault")
def test_no_fp8_shard_is_nothing_to_quantise():
    name = "megatron.core.fp8_utils"
    with pytest.raises(RuntimeError, match="Invalid Transformer Engine"):
        pristine(name).quantize_param_shard([], [], [], None)
    repaired = importlib.import_module(name)
    repaired.quantize_param_shard([], [], [], None)
    with pytest.raises(RuntimeError, match="Invalid Transformer Engine"):  # where there is one, it is still an error
        repaired.quantize_param_shard([object()], [], [], None)


@pytest.mark.skipif(not OLD, reason="megatron-core 0.12's fault")
def test_numpys_old_name():
    import numpy

    assert numpy.product is numpy.prod


@pytest.mark.skipif(not OLD, reason="megatron-core 0.12's fault")
def test_the_checkpoint_writer_gets_its_format():
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    name = "megatron.core.dist_checkpointing.strategies.filesystem_async"
    assert "keywords" not in dir(pristine(name)._write_item)
    assert importlib.import_module(name)._write_item.keywords == {"serialization_format": SerializationFormat.TORCH_SAVE}


@pytest.mark.skipif(OLD, reason="0.12 has no such name")
def test_the_router_runs_without_transformer_engine():
    name = "megatron.core.transformer.moe.moe_utils"
    inputs = torch.randn(3, 4), torch.randn(2, 4)
    with pytest.raises(NameError, match="te_general_gemm"):
        pristine(name).router_gating_linear(*inputs, None, torch.float32)
    out = importlib.import_module(name).router_gating_linear(*inputs, None, torch.float32)
    torch.testing.assert_close(out, inputs[0] @ inputs[1].T)


def test_split_sizes_become_numpy():
    """gloo takes a list of numbers; a tensor would be refused there, far away."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    sizes = torch.tensor([2, 1])
    assert torch.is_tensor(pristine("megatron.core.transformer.moe.moe_utils").maybe_move_tensor_to_cpu(sizes, as_numpy=True))
    for module in (moe_utils, token_dispatcher):
        assert module.maybe_move_tensor_to_cpu(sizes, as_numpy=True).tolist() == [2, 1]
        assert not torch.is_tensor(module.maybe_move_tensor_to_cpu(sizes, as_numpy=True))
        assert module.maybe_move_tensor_to_cpu(sizes) is sizes and module.maybe_move_tensor_to_cpu(None) is None


def test_an_accelerator_keeps_its_own_split_sizes(monkeypatch):
    """What is a CPU's fault is repaired on a CPU alone."""
    done = []
    for repair in ("_fit_checkpoint_writer", "_give_numpy_its_old_name", "_quantize_no_shard", "_name_the_missing_gemm"):
        monkeypatch.setattr(versions, repair, lambda: None)
    monkeypatch.setattr(versions, "_put_group_adam", lambda: done.append("adam"))
    monkeypatch.setattr(versions, "_move_split_sizes", lambda: done.append("split sizes"))
    for name in ("cuda", "cpu"):
        monkeypatch.setattr(versions, "_applied", False)
        monkeypatch.setattr(versions.device, "setup", lambda name=name: name)
        versions.apply()
    assert done == ["adam", "adam", "split sizes"]


def test_megatron_takes_our_adam():
    """Without Transformer Engine and Apex; torch's keeps a step for every parameter, which the distributed optimizer cannot load."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    assert optimizer.Adam is distrib_optimizer.Adam is versions.GroupAdamW
    assert pristine("megatron.core.optimizer.distrib_optimizer").Adam in (torch.optim.Adam, torch.optim.AdamW)


def test_an_adam_that_is_there_is_left_alone(monkeypatch):
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    fused = SimpleNamespace()
    monkeypatch.setattr(optimizer, "Adam", fused)
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    versions._put_group_adam()
    assert optimizer.Adam is fused


def test_no_decoupled_decay_is_refused():
    with pytest.raises(ValueError, match="decoupled_weight_decay must be True"):
        versions.GroupAdamW([torch.nn.Parameter(torch.ones(1))], adam_w_mode=False)


def test_streams_on_a_cpu_are_one():
    """Experts' dispatcher makes a stream and asks whether it is on the side."""
    assert torch.cuda.Stream() == torch.cuda.current_stream()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().record_event().synchronize()
