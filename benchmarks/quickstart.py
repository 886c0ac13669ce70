"""What the quick start learns and costs: its goals, measured on one run a seed.

    python benchmarks/quickstart.py --seeds 0 1 2              # three runs, about five minutes each on two quiet cores
    python benchmarks/quickstart.py --runs runs/a runs/b       # runs that are there

Score, EOS rate, length and KL are means over the first and the last six iterations; the topic is counted in the answers of the last
six. The exit code is 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "online_dpo_quickstart_smollm2"
WINDOW = 6

GOALS = {
    "gain": (">=", 0.15),
    "EOS at the end": (">=", 0.5),
    "topic named": (">=", 0.8),
    "length ratio": ("within", 0.25),
    "KL at the end": ("<=", 10.0),
    "not finite": ("<=", 0.0),
    "minutes": ("<=", 6.0),
    "peak GiB": ("<=", 12.0),
}
"""``within x``: between 1 - x and 1 + x."""


def mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def judge(metrics: Sequence[Mapping[str, Any]], completions: Sequence[Mapping[str, Any]], topics: Mapping[str, str]) -> dict[str, float]:
    """The numbers of one run. ``topics``: prompt -> topic."""
    from mindspeed_odpo.rewards.sentiment import names_topic

    first, last = metrics[:WINDOW], metrics[-WINDOW:]
    start, end = mean(first, "reward/score/mean"), mean(last, "reward/score/mean")
    late = [row for row in completions if row["step"] > metrics[-1]["step"] - WINDOW]
    named = [names_topic(answer, topics[row["prompt"]]) for row in late for answer in row["answers"]]
    numbers = [value for row in metrics for value in row.values() if not isinstance(value, str)]
    return {
        "score at the start": start,
        "score at the end": end,
        "gain": end - start,
        "EOS at the start": mean(first, "val/eos_rate"),
        "EOS at the end": mean(last, "val/eos_rate"),
        "topic named": sum(named) / len(named),
        "tokens at the start": mean(first, "response_length/mean"),
        "tokens at the end": mean(last, "response_length/mean"),
        "length ratio": mean(last, "response_length/mean") / mean(first, "response_length/mean"),
        "KL at the end": mean(last, "objective/kl"),
        "not finite": float(sum(value is None or not math.isfinite(value) for value in numbers)),
        "seconds an iteration": sum(row["timing/all"] for row in metrics[1:]) / (len(metrics) - 1),
    }


def met(name: str, value: float) -> bool:
    kind, bound = GOALS[name]
    return {">=": value >= bound, "<=": value <= bound, "within": abs(value - 1) <= bound}[kind]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_seed(seed: int, folder: Path, overrides: Sequence[str]) -> dict[str, float]:
    """One run by the real command: minutes from the command to its end, peak memory of all its processes."""
    from vs_trl import Watcher

    command = [
        sys.executable,
        str(ROOT / "ray_gpt.py"),
        "--config-name",
        CONFIG,
        f"training.run_dir={folder}",
        f"training.seed={seed}",
        *overrides,
    ]
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    folder.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    # Memory is read in the first iterations and from the 25th on, with checkpoint and export, so as not to slow what lies between.
    watcher = Watcher(command, environment, folder / "metrics.jsonl", folder.parent / f"{folder.name}.log", quiet=(4, 25))
    turn = watcher.run()
    return {"minutes": (time.perf_counter() - began) / 60, "peak GiB": turn.peak_bytes / 2**30}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, nargs="+", help="judge these run folders; run nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart_seeds"))
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides for the runs")
    options = parser.parse_args()

    from rich.console import Console
    from rich.table import Table

    prompts = rows_of(ROOT / "configs" / "data" / "quickstart_topics.jsonl")
    topics = {row["prompt"]: row["topic"] for row in prompts}
    results: dict[str, dict[str, float]] = {}
    curves: dict[str, list[float]] = {}
    for item in options.runs or options.seeds:
        folder = item if options.runs else options.out / f"seed{item}"
        costs = {} if options.runs else run_seed(item, folder, options.set)
        metrics = rows_of(folder / "metrics.jsonl")
        results[folder.name] = {**judge(metrics, rows_of(folder / "completions.jsonl"), topics), **costs}
        curves[folder.name] = [row["reward/score/mean"] for row in metrics]

    table = Table("", *results, "goal")
    names = dict.fromkeys(name for numbers in results.values() for name in numbers)
    missed = 0
    for name in names:
        cells = []
        for numbers in results.values():
            value = numbers[name]
            wrong = name in GOALS and not met(name, value)
            missed += wrong
            cells.append(f"{value:.3f}" + (" MISSED" if wrong else ""))
        table.add_row(name, *cells, " ".join(map(str, GOALS[name])) if name in GOALS else "")
    console = Console(width=120)
    console.print(table)
    for name, curve in curves.items():
        console.print(f"score of {name}: " + " ".join(f"{value:.2f}" for value in curve))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
