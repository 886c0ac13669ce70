"""Placement ``colocate`` against ``separate`` on this machine: the quick start's own config, alternating.

    python benchmarks/placement.py                    # two rounds of five iterations each, about five minutes on two cores

Seconds from the command to the first iteration's end, seconds of an iteration after it (median), peak memory of all processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from quickstart import CONFIG, ROOT
from vs_trl import Turn, Watcher

ACTOR = "actor_rollout_ref.actor_rollout"
SIDES = {
    "colocate": ["training.placement=colocate"],
    "separate": ["training.placement=separate", f"{ACTOR}.num_gpus_for_infer=1", "resource_pool.actor_rollout=[2]"],
}


def run(side: str, folder: Path, iterations: int) -> Turn:
    """One run of ``iterations`` iterations by the real command, without checkpoint and export."""
    settings = [f"training.run_dir={folder}", f"training.train_iters={iterations}", "training.export_hf=false", *SIDES[side]]
    command = [sys.executable, str(ROOT / "ray_gpt.py"), "--config-name", CONFIG, *settings]
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    return Watcher(command, environment, folder / "metrics.jsonl", folder.with_suffix(".log"), quiet=(2, iterations)).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=5)
    options = parser.parse_args()
    turns: dict[str, list[Turn]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as root:
        for number in range(options.rounds):
            for side in SIDES:
                turns[side].append(run(side, Path(root) / f"{side}-{number}", options.iterations))
    print(f"{'':12}{'first iteration ends':>22}{'an iteration':>14}{'peak memory':>14}")
    median = {}
    for side, runs in turns.items():
        each = [row["timing/all"] for turn in runs for row in turn.rows[1:]]
        median[side] = statistics.median(each)
        first, peak = statistics.median(turn.arrived[0] for turn in runs), max(turn.peak_bytes for turn in runs) / 2**30
        print(f"{side:12}{first:>20.1f} s{median[side]:>12.2f} s{peak:>10.2f} GiB")
    print(f"separate / colocate, an iteration: {median['separate'] / median['colocate']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
