"""The reference's log-probabilities of recorded preferences: computed once, kept in a file, refused when stale.

The file is safetensors: ``row`` i64 ``[N]`` (rows of the data file) and ``ref_logps`` f32 ``[N,2]`` (sums over the tokens that
count, of chosen and rejected). Its metadata says what they were made from, in five parts::

    model      sha256 of the reference's config and weight files, its architecture and Megatron settings
    template   sha256 of the tokenizer's files (the chat template is one of them) and the system prompt
    data       sha256 of the file of preferences
    settings   column names, answer_mask, seq_length, precision, in words
    tokens     sha256 of the token ids and masks: what the four above came to with the libraries installed
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mindspeed_odpo.config import Config, is_checkpoint
from mindspeed_odpo.data.preferences import Preferences
from mindspeed_odpo.errors import ConfigError, DataError, WorkerError
from mindspeed_odpo.types import Rollout

_MODEL = ("config.json", "*.safetensors", "*.safetensors.index.json")
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*chat_template*")
CALL = 8
"""Micro-batches of one call to the reference: few calls, and a sign of life in between."""


class ReferenceCache:
    """The cache file of one config and its data. ``data`` has tokenised the rows; nothing is read or hashed before it is asked."""

    def __init__(self, config: Config, data: Preferences) -> None:
        self.config, self.data = config, data

    @cached_property
    def parts(self) -> Mapping[str, str]:
        """What the log-probs depend on, by name."""
        config, data = self.config, self.config.data
        settings = {
            "answer_mask": data.answer_mask,
            "seq_length": config.rollout.seq_length,
            "precision": "bf16" if config.bf16 else "fp32",
            "columns": f"{data.prompt_key}/{data.chosen_key}/{data.rejected_key}",
        }
        return {
            "model": _sha256(_model_files(config.reference.load), config.reference.model, sorted(config.forwarded.get("ref", {}).items())),
            "template": _sha256(_matching(config.tokenizer, _TOKENIZER), data.system_prompt),
            "data": _sha256([data.path]),
            "settings": ", ".join(f"{name} {value}" for name, value in settings.items()),
            "tokens": self.data.digest(),
        }

    @property
    def path(self) -> Path:
        """``ref.logps_cache``; unset: ``runs/ref_logps/DATA-KEY.safetensors``, where KEY follows from all parts."""
        if self.config.reference.cache is not None:
            return self.config.reference.cache
        key = hashlib.sha256(json.dumps(self.parts).encode()).hexdigest()[:12]
        return Path("runs", "ref_logps", f"{self.config.data.path.stem}-{key}.safetensors").absolute()

    def read(self) -> Tensor | None:
        """f32 ``[rows of the file, 2]``, NaN for rows that were left out; None where there is no file yet.

        ConfigError where the file was made from something else, and says from what; DataError where it cannot be read.
        """
        path = self.path
        if not path.exists():
            return None
        if path.is_dir():
            raise ConfigError(f"ref.logps_cache: {path} is a folder; name a file in it")
        try:
            with safe_open(path, framework="pt") as file:
                found = dict(file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path}: no readable safetensors file ({error}); delete it, it will be made anew") from error
        if not set(self.parts) <= set(found) or set(tensors) != {"row", "ref_logps"}:
            raise ConfigError(f"{path}: not a file of reference log-probs; name another one in ref.logps_cache, or leave it unset")
        differ = [self._difference(name, found[name]) for name, now in self.parts.items() if found[name] != now]
        if differ:
            raise ConfigError(
                f"{path}: the reference log-probs in it were made from {'; '.join(differ)}. Delete the file to have them computed anew, "
                "or name another one in ref.logps_cache"
            )
        rows, logps = tensors["row"], tensors["ref_logps"]
        if rows.tolist() != list(self.data.usable) or logps.shape != (len(rows), 2) or logps.dtype != torch.float32:
            raise DataError(f"{path}: {len(rows)} rows where {len(self.data.usable)} are used; delete it, it will be made anew")
        if not logps.isfinite().all():
            raise DataError(f"{path}: {int((~logps.isfinite()).sum())} log-probs are not finite; delete it, it will be made anew")
        return self._by_row(tensors["ref_logps"])

    def check_place(self) -> None:
        """ConfigError where the file could not be written: better before the reference has run than after."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(f"ref.logps_cache: {self.path} cannot be written ({error.strerror}); name another file") from error

    def _difference(self, part: str, then: str) -> str:
        config = self.config
        return {
            "model": f"another model than {config.reference.load} is now",
            "template": f"another tokenizer, chat template or system prompt than {config.tokenizer} has now",
            "data": f"another data file than {config.data.path} is now",
            "settings": f"other settings ({then}; now {self.parts['settings']})",
            "tokens": "other tokens (the chat template or the tokenizer library gives others than then)",
        }[part]

    def fill(self, logps: Callable[[Rollout], Tensor]) -> Tensor:
        """Compute what ``read`` gives and write the file, whole or not at all. ``logps``: the reference's, f32 ``[P,K]``; it is
        given a multiple of the reference's data-parallel ranks of rows."""
        rows, began = list(self.data.usable), time.monotonic()
        ranks = self.config.parallel("reference").data
        print(f"reference: log-probs of {len(rows)} rows", flush=True)
        by_row = self._by_row(torch.full((len(rows), 2), float("nan")))
        told = began
        # Like lengths together: less padding. The longest first: what does not fit in memory shows at once.
        ordered = sorted(rows, key=self.data.length, reverse=True)
        size = self.config.reference.micro_batch_size * ranks * CALL
        for start in range(0, len(ordered), size):
            some = ordered[start : start + size]
            full = some + some[-1:] * (-len(some) % ranks)  # every rank gets as many
            by_row[some] = logps(self.data.rollout(full))[: len(some)]
            if time.monotonic() - told > 10:
                told = time.monotonic()
                print(f"reference: {start + len(some)} of {len(rows)} rows, {told - began:.0f} s", flush=True)
        bad = [row for row in rows if not by_row[row].isfinite().all()]
        if bad:
            raise WorkerError(
                f"reference: log-probs {by_row[bad[0]].tolist()} of row {bad[0]} (from 0) are not finite, nor are those of {len(bad) - 1} "
                f"more rows; nothing was cached: look at the weights in {self.config.reference.load}"
            )
        self._write({"row": torch.tensor(rows), "ref_logps": by_row[rows].contiguous()})
        print(f"reference: {time.monotonic() - began:.0f} s, kept in {self.path}", flush=True)
        return by_row

    def _by_row(self, logps: Tensor) -> Tensor:
        out = torch.full((self.data.num_rows, 2), float("nan"))
        out[list(self.data.usable)] = logps
        return out

    def _write(self, tensors: dict[str, Tensor]) -> None:
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.write_bytes(save(tensors, metadata={**self.parts, "count": str(len(tensors["row"]))}))
        os.replace(partial, path)


def _model_files(folder: Path) -> list[Path]:
    if not is_checkpoint(folder):
        return _matching(folder, _MODEL)
    from mindspeed_odpo.engine.checkpoint import latest_iteration  # imports Megatron: only where it is needed

    return sorted(path for path in (folder / f"iter_{latest_iteration(folder):07d}").rglob("*") if path.is_file())


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _sha256(files: Iterable[Path], *settings: Any) -> str:
    """Of names and contents of files, and of settings by their repr."""
    total = hashlib.sha256(repr(settings).encode())
    for path in files:
        total.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                total.update(block)
    return total.hexdigest()
