"""Fixtures that several files need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def single_rank() -> Iterator[None]:
    """Megatron's process group of one rank, for the tests of one file; imported here so that files without Megatron stay quick."""
    from mindspeed_odpo.engine import parallel

    torch.set_num_threads(1)
    parallel.init_single()
    yield
    parallel.destroy()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tiny Hugging Face folders of one architecture: a policy and another model as its reference."""
    from tiny import make_tiny_hf

    root = tmp_path_factory.mktemp("hf")
    return make_tiny_hf(root / "policy", seed=1), make_tiny_hf(root / "reference", seed=2)
