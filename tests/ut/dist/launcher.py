"""Runs a function in several processes, one a rank, and says which rank waits where when they do not end."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

# Importing megatron-core takes a process many seconds. On a CPU ranks are forked from one that has done so (an accelerator
# must not be met before a fork).
START = "spawn" if torch.cuda.is_available() or find_spec("torch_npu") else "forkserver"
multiprocessing.set_forkserver_preload(["mindspeed_odpo.engine.checkpoint", "mindspeed_odpo.engine.forward", "mindspeed_odpo.hf.weights"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """What ``function(rank, port, *args)`` returned in each of ``world`` processes; ``port`` is free, the same for all of them.

    ``function`` is a module's own; arguments and results must pickle. A rank that raises ends all, with its traceback.
    After ``timeout`` seconds the test fails and shows the stack of every rank that still runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(_main, (function, free_port(), Path(folder), args), world, join=False, start_method=START)
        try:
            deadline = time.monotonic() + timeout
            while not context.join(timeout=0.2):  # True once all have ended; it also returns when one has
                if time.monotonic() > deadline:
                    pytest.fail(_waiting(context.processes, Path(folder), timeout))
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world)]


def _main(rank: int, function: Callable[..., Any], port: int, folder: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    with open(folder / f"{rank}.stack", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        torch.save(function(rank, port, *args), folder / f"{rank}.pt")
        faulthandler.unregister(signal.SIGUSR1)


def _waiting(processes: list[Any], folder: Path, timeout: float) -> str:
    alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in alive:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.5)
    stacks = [f"rank {rank}:\n{(folder / f'{rank}.stack').read_text()}" for rank in alive]
    return f"ranks {alive} of {len(processes)} still run after {timeout:g} s\n" + "\n".join(stacks)
