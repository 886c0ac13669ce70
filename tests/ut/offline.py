"""A small run on recorded preferences, shared by tests: a tiny model folder, twelve rows, their config."""

from __future__ import annotations

import json
from pathlib import Path

from tiny import make_tiny_hf

from mindspeed_odpo.config import Config, parse
from mindspeed_odpo.data.preferences import Preferences
from mindspeed_odpo.hosts.standalone import Host
from mindspeed_odpo.launch import compose

ROWS = [{"prompt": f"say {i}", "chosen": f"yes {'!' * (i % 5)}", "rejected": f"no {'?' * (i % 3)}"} for i in range(12)]
LONG = 7
"""A row that is left out: its rejected answer does not fit."""


def write_rows(path: Path, rows: list[dict[str, str]] = ROWS) -> Path:
    rows = [{**row, "rejected": "x" * 200} if i == LONG else row for i, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_config(folder: Path, **overrides: object) -> Config:
    """Model and data are made in ``folder`` where they are not there; ``overrides``: keys, ``__`` for a dot."""
    model, data = folder / "model", folder / "rows.jsonl"
    if not model.exists():
        make_tiny_hf(model)
    if not data.exists():
        write_rows(data)
    settings = {
        "training.stage": "ray_dpo",
        "training.seq_length": 64,
        "training.train_iters": 5,
        "training.run_dir": folder / "run",
        "training.tokenizer_name_or_path": model,
        "actor_rollout_ref.actor_rollout.load": model,
        "actor_rollout_ref.ref.load": model,
        "actor_rollout_ref.actor_rollout.data_path": data,
        **{name.replace("__", "."): value for name, value in overrides.items()},
    }
    return parse(compose("online_dpo_tiny", [f"{name}={value}" for name, value in settings.items()]), "offline")


def load(config: Config) -> Preferences:
    return Host(config).preflight_preferences()
