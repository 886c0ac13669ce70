"""The weight sync on this machine: whole tensors in buckets against one broadcast a tensor, alternating in one run.

    python benchmarks/weight_sync.py                 # SmolLM2-135M's shapes in bf16, one receiver; seconds

Two processes, sender and receiver, over the backend of the device (gloo on a CPU). Seconds from the first byte of the manifest
to the receiver's word that it holds everything; medians. Checksums are timed too: the first sync of a run makes them.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

SIDES = {"bucketed": (256 * 2**20, False), "per tensor": (1, False), "bucketed, checksums": (256 * 2**20, True)}
"""Name -> (bytes of a bucket, checksums). A bucket smaller than any tensor holds one."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a file of configs/rlxf/model")
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue: Any = mp.get_context("spawn").SimpleQueue()
    mp.spawn(rank_main, args=(port, options, queue), nprocs=1 + options.receivers)
    seconds, moved, tensors = queue.get()
    print(f"{options.model}, bf16: {tensors} tensors, {moved:,} bytes, to {options.receivers} receiver(s), median of {options.rounds}")
    for side, each in seconds.items():
        print(f"{side:22}{statistics.median(each):8.3f} s   ({min(each):.3f} to {max(each):.3f})")
    ratio = statistics.median(seconds["per tensor"]) / statistics.median(seconds["bucketed"])
    print(f"per tensor / bucketed: {ratio:.2f}")
    return 0


def rank_main(rank: int, port: int, options: argparse.Namespace, queue: Any) -> None:
    from omegaconf import OmegaConf

    from mindspeed_odpo import device
    from mindspeed_odpo.config import config_root, parse_model
    from mindspeed_odpo.engine.generate import Decoder, weight_shapes
    from mindspeed_odpo.ray import weight_sync
    from mindspeed_odpo.ray.weight_sync import Entry, SyncGroup

    torch.set_num_threads(1)
    content: Any = OmegaConf.to_container(OmegaConf.load(config_root() / "rlxf" / "model" / f"{options.model}.yaml"))
    model = parse_model(options.model, content[options.model])
    group = SyncGroup(rank, 1 + options.receivers, "127.0.0.1", port, 5.0)
    entries = [Entry(name, torch.bfloat16, shape) for name, shape in weight_shapes(model).items()]
    where = device.device()
    weights = {entry.name: torch.randn(entry.shape, device=where).to(torch.bfloat16) for entry in entries} if rank == 0 else {}
    decoder = Decoder(model, True, where) if rank else None
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    moved = 0
    for number in range(options.rounds + 1):  # the first round warms up
        for side, (size, check) in SIDES.items():
            weight_sync.BUCKET_BYTES = size
            start = time.perf_counter()
            if decoder is None:
                moved = group.send(number, entries, weights.items(), check)
            else:
                load = decoder.load_weights
                group.receive(number, decoder.shapes, lambda items, load=load, number=number: load(number, items), decoder.holds)
            if number:
                seconds[side].append(time.perf_counter() - start)
    if rank == 0:
        queue.put((seconds, moved, len(entries)))


if __name__ == "__main__":
    sys.exit(main())
