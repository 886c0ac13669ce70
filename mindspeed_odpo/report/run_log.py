"""What a person and a parser see of a run, and what stays of it in the run folder.

=====================  ==================================================================================
``metrics.jsonl``      one object an iteration: ``step``, ``time`` and every name of ``metrics.py``; a number that is
                       not finite is null
``completions.jsonl``  one object a prompt: ``step``, ``policy_version``, ``prompt`` (as in the data), ``prompt_index``,
                       ``answers``, ``answer_ids`` (with the EOS), ``finished``, ``scores`` (raw, null: none), ``chosen``,
                       ``rejected``, ``kept``, ``reason`` (why not kept, or null; lists where a prompt makes several
                       pairs): ``rollout_engine: replay`` takes the file as it is
``tensorboard/``       the metrics as scalars
``train.log``          the log lines and the summary; resumed runs append
=====================  ==================================================================================
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from mindspeed_odpo.config import Config
from mindspeed_odpo.data.preferences import Preferences
from mindspeed_odpo.data.prompts import Prompts, decode_answers
from mindspeed_odpo.errors import ConfigError, DataError, WorkerError
from mindspeed_odpo.metrics import log_line, step_metrics
from mindspeed_odpo.types import REASONS, Pairs, Rollout, StepStats

METRICS, COMPLETIONS, LOG, TENSORBOARD = "metrics.jsonl", "completions.jsonl", "train.log", "tensorboard"
WINDOW = 6
"""Iterations over which the summary averages the score at the start and at the end."""


def free_run_dir(run_dir: Path) -> Path:
    """``run_dir`` itself where nothing lies there; else the first free of ``-2``, ``-3``, ..., printed. Nothing is created, so
    that a start refused later leaves no trace. Called once, before roles get the config."""
    if not _occupied(run_dir):
        return run_dir
    number = 2
    while _occupied(run_dir.with_name(f"{run_dir.name}-{number}")):
        number += 1
    free = run_dir.with_name(f"{run_dir.name}-{number}")
    print(f"run folder: {free} ({run_dir} holds a former run)", flush=True)
    return free


def resumed_run_dir(config: Config) -> Path:
    """The folder of a run that goes on: its own, or a new one. ConfigError where it holds another run than the checkpoint's:
    that run's log would be cut and its latest checkpoint be another one."""
    load, own = config.actor.load.resolve(), config.checkpoint_dir.resolve()
    if _occupied(config.run_dir) and load != own:
        raise ConfigError(
            f"training.run_dir {config.run_dir} holds a run whose checkpoints are in {own}, the one to resume is in {load}: "
            f"set training.run_dir={load.parent}, or a new folder"
        )
    return config.run_dir


def _occupied(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


class RunLog:
    """Context manager of the training loop::

        with RunLog(config, first, prompts) as log:
            for step in range(first + 1, config.train_iters + 1):
                with log.step(step) as timed:
                    batch = prompts.batch(step)
                    with timed("rollout"):
                        ...
                log.record(rollout, scores, pairs, stats, beta)
            log.summary(...)

    ``first_step`` is the number of iterations that are done already. On resume, lines of later iterations, which a
    former run wrote after its last checkpoint, are cut off. On a terminal there is a progress bar; otherwise the log
    line goes to stdout. ``train.log`` gets it in both cases. With ``Preferences`` for prompts the answers lie in the data
    already: completions.jsonl is not written, and what is shown are numbers of pairs, not of scores.
    """

    def __init__(self, config: Config, first_step: int, prompts: Prompts | Preferences) -> None:
        self._config, self._first, self._prompts = config, first_step, prompts
        self._online = isinstance(prompts, Prompts)
        self.run_dir = config.run_dir
        self._step = first_step
        self._timings: dict[str, float] = {}
        self._history: list[dict[str, Any]] = []
        self._files: dict[str, TextIO] = {}

    def __enter__(self) -> RunLog:
        if self._first == 0:
            for name in (METRICS, COMPLETIONS):
                if (self.run_dir / name).exists():
                    raise DataError(
                        f"run folder {self.run_dir} holds a former run ({name}); give another run_dir, or resume from its checkpoint"
                    )
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._history = _cut_after(self.run_dir / METRICS, self._first)
        _cut_after(self.run_dir / COMPLETIONS, self._first)
        names = (METRICS, COMPLETIONS, LOG) if self._online else (METRICS, LOG)
        self._files = {name: (self.run_dir / name).open("a", encoding="utf-8", newline="\n") for name in names}
        self._board = SummaryWriter(str(self.run_dir / TENSORBOARD), purge_step=self._first + 1)
        self._progress, self._task = None, None
        if sys.stdout.isatty() and sys.stderr.isatty():
            console = Console(stderr=True)
            wide = console.width >= 110
            phase = [TextColumn("[dim]{task.fields[phase]:<7}[/dim]")] if wide else []
            self._progress = Progress(
                MofNCompleteColumn(),
                BarColumn(bar_width=20 if wide else 6),
                TextColumn("{task.fields[numbers]}"),
                *phase,
                TimeRemainingColumn(compact=True),
                console=console,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=self._config.train_iters, completed=self._first, numbers="", phase="")
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
        for file in self._files.values():
            file.close()
        self._board.close()

    @contextmanager
    def step(self, step: int) -> Iterator[Callable[[str], AbstractContextManager[None]]]:
        """Times one iteration; yields ``timed(phase)``, a context manager that adds its seconds to that phase."""
        self._step, self._timings = step, {}

        @contextmanager
        def timed(phase: str) -> Iterator[None]:
            self._show(phase=phase)
            start = time.perf_counter()
            try:
                yield
            finally:
                self._timings[phase] = self._timings.get(phase, 0.0) + time.perf_counter() - start

        start = time.perf_counter()
        yield timed
        self._timings["all"] = time.perf_counter() - start

    def record(
        self, rollout: Rollout, scores: Tensor, pairs: Pairs, stats: StepStats, beta: float, sync_bytes: int | None = None
    ) -> dict[str, float]:
        """Write and show the iteration that ``step`` has timed; ``scores`` f32 ``[P,K]``, raw; ``sync_bytes``: of its weight sync.
        Returns its metrics."""
        step, now = self._step, datetime.now()
        wanted, answered = self._prompts.order.rows(step), rollout.prompt_index.tolist()
        if wanted != answered:
            raise WorkerError(f"iteration {step}: the rollout answered the prompts {answered[:8]} of the data, its batch has {wanted[:8]}")
        metrics = step_metrics(
            stats, rollout, pairs, scores, self._timings, beta=beta, epoch=self._prompts.epoch(step), sync_bytes=sync_bytes
        )
        if isinstance(self._prompts, Prompts):
            self._write_completions(step, self._prompts, rollout, scores, pairs)
        row = {"step": step, "time": now.isoformat(timespec="seconds"), **metrics}
        self._history.append(row)
        self._write(METRICS, _json(row))
        for name, value in metrics.items():
            if math.isfinite(value):
                self._board.add_scalar(name, value, step)
        self._board.flush()
        line = log_line(step, self._config.train_iters, metrics, now)
        self._write(LOG, line)
        if self._progress is None:
            print(line, flush=True)
        numbers = f"loss {metrics['actor/pg_loss']:.4f} "
        if self._online:
            score, margin = metrics["reward/score/mean"], metrics["reward/margin"]
            numbers += f"reward {score:.3f} margin {margin:.3f} EOS {metrics['val/eos_rate']:.0%}"
        else:
            numbers += f"accuracy {metrics['rewards/accuracies']:.0%} margin {metrics['rewards/margins']:.3f}"
        self._show(completed=step, phase="", numbers=f"{numbers} {metrics['timing/all']:.1f} s/step")
        return metrics

    def _show(self, completed: int | None = None, **columns: Any) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=completed, **columns)

    def _write(self, name: str, line: str) -> None:
        self._files[name].write(line + "\n")
        self._files[name].flush()

    def _write_completions(self, step: int, prompts: Prompts, rollout: Rollout, scores: Tensor, pairs: Pairs) -> None:
        texts, ids = decode_answers(prompts.tokenizer, rollout)
        lines = []
        for p, index in enumerate(rollout.prompt_index.tolist()):
            row = {
                "step": step,
                "policy_version": rollout.policy_version,
                "prompt": prompts.rows[index][self._config.data.prompt_key],
                "prompt_index": index,
                "answers": texts[p],
                "answer_ids": ids[p],
                "finished": rollout.finished[p].tolist(),
                "scores": scores[p].tolist(),
                "chosen": _one(pairs.chosen[p].tolist()),
                "rejected": _one(pairs.rejected[p].tolist()),
                "kept": _one(pairs.keep[p].tolist()),
                "reason": _one([REASONS[i] if i else None for i in pairs.reason[p].tolist()]),
            }
            lines.append(_json(row))
        self._write(COMPLETIONS, "\n".join(lines))

    def summary(
        self, row: Mapping[str, Any] | None, before: str | None, after: str | None, checkpoint: Path | None, export: Path | None
    ) -> None:
        """The end of a run, to stdout and ``train.log``: score, EOS rate, KL at start and end, one prompt answered by the
        start and by the trained policy, seconds, where things lie. ``row``: the prompt's row of the data; ``before``,
        ``after``: answers of the two policies to it; None where no policy answered."""
        prompt = "" if row is None else row[self._config.data.prompt_key]
        if self._progress is not None:
            self._progress.stop()
        seconds = time.perf_counter() - self._began
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        table = summary_table(self._history, text, before, after, ONLINE if self._online else OFFLINE)
        done = [row["timing/all"] for row in self._history if row["step"] > self._first]
        each = f", {len(done)} iterations of {sum(done) / len(done):.1f} s" if done else ""
        places = {"run folder": self.run_dir, "checkpoint": checkpoint, "Hugging Face folder": export}
        lines = [f"{seconds:.0f} s{each}", *(f"{name}: {place}" for name, place in places.items() if place is not None)]
        terminal = Console(file=sys.stdout)
        for console in (
            terminal if terminal.is_terminal else Console(file=sys.stdout, width=120),
            Console(file=self._files[LOG], width=120),
        ):
            console.print(table)
            console.print(Text("\n".join(lines)), soft_wrap=True)  # whole paths, to copy
        self._files[LOG].flush()


ONLINE = {
    "score": "reward/score/mean",
    "EOS rate": "val/eos_rate",
    "KL, nats an answer": "objective/kl",
    "answer tokens": "response_length/mean",
}
OFFLINE = {
    "loss": "actor/pg_loss",
    "share of pairs ranked right": "rewards/accuracies",
    "margin of implicit rewards": "rewards/margins",
    "log-prob of chosen, nats": "logps/chosen",
    "log-prob of rejected, nats": "logps/rejected",
}


def summary_table(
    history: list[dict[str, Any]], prompt: str, before: str | None, after: str | None, names: Mapping[str, str] = ONLINE
) -> Table:
    """Start against end, each the mean of ``WINDOW`` iterations, fewer where the run has less than two windows."""
    window = min(WINDOW, max(1, len(history) // 2))
    stage = "online" if names is ONLINE else "offline"
    table = Table(title=f"{stage} DPO: what changed", show_lines=False, title_justify="left")
    table.add_column("")
    table.add_column(f"start (first {window} iterations)", overflow="fold")
    table.add_column(f"end (last {window} iterations)", overflow="fold")
    for label, key in names.items():
        table.add_row(label, *(_mean([row[key] for row in part]) for part in (history[:window], history[-window:])))
    if before is not None and after is not None:
        table.add_section()
        # Text of a model is data, not markup: rich would read "[bold]" in it as a style.
        table.add_row(Text("answer to: " + prompt), Text(before), Text(after))
    return table


def _mean(values: list[float | None]) -> str:
    numbers = [v for v in values if v is not None and math.isfinite(v)]
    return f"{sum(numbers) / len(numbers):.3f}" if numbers else "-"


def _one(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _json(row: Mapping[str, Any]) -> str:
    def finite(value: Any) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, dict):
            return {k: finite(v) for k, v in value.items()}
        return [finite(v) for v in value] if isinstance(value, list) else value

    return json.dumps(finite(dict(row)), ensure_ascii=False, allow_nan=False)


def _cut_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Cut a file of a former run behind its last line of ``step``; a last line that a crash left half is cut too.
    Returns the rows that stay."""
    if not path.exists():
        return []
    rows, end = [], 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{path}:{number}: not JSON, so the run cannot be resumed here; repair the line or give another run_dir"
                ) from error
            if row["step"] > step:
                break
            rows.append(row)
            end += len(line)
    with path.open("r+b") as file:
        file.truncate(end)
    return rows
