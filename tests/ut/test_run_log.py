"""The files and lines of a run."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from byte_tokenizer import EOS, byte_tokenizer, ids
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mindspeed_odpo.config import DataConfig, PairsConfig
from mindspeed_odpo.data.prompts import Prompts
from mindspeed_odpo.engine.forward import STATS
from mindspeed_odpo.errors import ConfigError, DataError, WorkerError
from mindspeed_odpo.pairs import make_pairs
from mindspeed_odpo.report.run_log import RunLog, free_run_dir, resumed_run_dir
from mindspeed_odpo.types import Pairs, Rollout, StepStats

NAN = float("nan")
SCORES = [[1.0, 0.0], [NAN, 0.5], [0.5, 0.5], [0.1, 0.2]]
PROMPTS = ["one \U0001f600", [{"role": "user", "content": "two"}], "three", "four"]


@pytest.fixture
def prompts(tmp_path) -> Prompts:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"ask": p}) + "\n" for p in PROMPTS))
    config = DataConfig(path=path, prompt_key="ask", shuffle=False)
    return Prompts(config, byte_tokenizer(), max_prompt_length=64, batch_size=4, seed=0)


def config(run_dir: Path, iterations: int = 3) -> SimpleNamespace:
    return SimpleNamespace(
        run_dir=run_dir,
        train_iters=iterations,
        pairs=PairsConfig(),
        data=SimpleNamespace(prompt_key="ask"),
    )


def answers(prompts: Prompts, step: int) -> Rollout:
    """The first answer 'hi' ends with an EOS, the second 'abc' does not; the fourth prompt's two answers are the same."""
    batch = prompts.batch(step)
    first, second = [*ids("hi"), EOS], ids("abc")
    response = torch.tensor([[first, second], [first, second], [first, second], [first, first]])
    mask = torch.ones(4, 2, 3).bool()
    finished = torch.tensor([[True, False], [True, False], [True, False], [True, True]])
    return Rollout(batch.ids, batch.mask, response, mask, finished, batch.index, policy_version=step - 1).check()


def iteration(log: RunLog, prompts: Prompts, step: int, loss: float = 0.7, scores: list[list[float]] = SCORES) -> dict[str, float]:
    with log.step(step) as timed:
        with timed("rollout"):
            rollout = answers(prompts, step)
        with timed("update"):
            pass
    tensor = torch.tensor(scores)
    pairs: Pairs = make_pairs(tensor, rollout, PairsConfig())
    stats = StepStats({**dict.fromkeys(STATS, 0.0), "loss": loss}, pairs=int(pairs.keep.sum()))
    return log.record(rollout, tensor, pairs, stats, beta=0.1)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_metrics_file_and_log_lines(tmp_path, prompts, capsys):
    """Each iteration is on disk before the next begins, so that a killed run keeps what it has done."""
    run = tmp_path / "run"
    with RunLog(config(run), 0, prompts) as log:
        for step in (1, 2, 3):
            returned = iteration(log, prompts, step, loss=0.7 / step)
            assert [row["step"] for row in rows(run / "metrics.jsonl")] == list(range(1, step + 1))
    row = rows(run / "metrics.jsonl")[-1]
    assert {k: v for k, v in row.items() if k not in ("step", "time")} == returned
    out = capsys.readouterr().out
    assert re.findall(r"iteration: (\d) / 3 \|.* actor/pg_loss : ([0-9.]+)", out) == [("1", "0.7000"), ("2", "0.3500"), ("3", "0.2333")]
    assert (run / "train.log").read_text() == out
    assert all(line.endswith(" ") for line in out.splitlines())


def test_completions_can_be_replayed(tmp_path, prompts):
    """Token ids, raw scores with null for none, which was chosen, and why a prompt was not kept."""
    with RunLog(config(tmp_path / "run"), 0, prompts) as log:
        iteration(log, prompts, 1)
    first, second, third, fourth = rows(tmp_path / "run" / "completions.jsonl")
    assert first == {
        "step": 1,
        "policy_version": 0,
        "prompt": PROMPTS[0],
        "prompt_index": 0,
        "answers": ["hi", "abc"],
        "answer_ids": [[*ids("hi"), EOS], ids("abc")],
        "finished": [True, False],
        "scores": [1.0, 0.0],
        "chosen": 0,
        "rejected": 1,
        "kept": True,
        "reason": None,
    }
    assert second["prompt"] == PROMPTS[1] and second["scores"] == [None, 0.5]
    assert [r["reason"] for r in (second, third, fourth)] == ["no_score", "tie", "identical"]
    assert [r["kept"] for r in (second, third, fourth)] == [False] * 3


def test_no_kept_pair_is_null_in_the_file_and_nan_in_the_line(tmp_path, prompts, capsys):
    with RunLog(config(tmp_path / "run"), 0, prompts) as log:
        iteration(log, prompts, 1, scores=[[NAN, NAN]] * 4)
    row = rows(tmp_path / "run" / "metrics.jsonl")[0]
    assert row["actor/pg_loss"] is None and row["reward/score/mean"] is None and row["pairs/kept"] == 0
    assert "actor/pg_loss : nan |" in capsys.readouterr().out


def test_phases_are_timed(tmp_path, prompts):
    with RunLog(config(tmp_path / "run"), 0, prompts) as log:
        with log.step(1) as timed:
            for _ in range(2):
                with timed("rollout"):
                    time.sleep(0.02)
            with timed("judge"):
                pass
            time.sleep(0.02)
        rollout = answers(prompts, 1)
        scores = torch.tensor(SCORES)
        m = log.record(rollout, scores, make_pairs(scores, rollout, PairsConfig()), StepStats(dict.fromkeys(STATS, 0.0), pairs=1), 0.1)
    assert m["timing/gen"] >= 0.04 and m["timing/ref"] < 0.02 and m["timing/all"] >= 0.06


def test_resume_cuts_what_a_checkpoint_does_not_know(tmp_path, prompts):
    """Iterations 1 to 3 ran, the checkpoint is of 1."""
    run = tmp_path / "run"
    with RunLog(config(run), 0, prompts) as log:
        for step in (1, 2, 3):
            iteration(log, prompts, step)
    time.sleep(1.1)  # TensorBoard reads event files in the order of their names, which hold whole seconds
    with RunLog(config(run), 1, prompts) as log:
        iteration(log, prompts, 2, loss=0.1)
    assert [(row["step"], row["actor/pg_loss"]) for row in rows(run / "metrics.jsonl")] == [(1, 0.7), (2, 0.1)]
    assert [row["step"] for row in rows(run / "completions.jsonl")] == [1] * 4 + [2] * 4
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert [(e.step, pytest.approx(e.value)) for e in board.Scalars("actor/pg_loss")] == [(1, 0.7), (2, 0.1)]


def test_resume_cuts_half_a_line(tmp_path, prompts):
    """What a killed process leaves at the end of a file."""
    run = tmp_path / "run"
    with RunLog(config(run), 0, prompts) as log:
        iteration(log, prompts, 1)
    for name in ("metrics.jsonl", "completions.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 2, "actor/')
    with RunLog(config(run), 1, prompts) as log:
        iteration(log, prompts, 2)
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == [1, 2]
    assert [row["step"] for row in rows(run / "completions.jsonl")] == [1] * 4 + [2] * 4


def test_resume_in_a_new_folder(tmp_path, prompts):
    with RunLog(config(tmp_path / "other"), 2, prompts) as log:
        iteration(log, prompts, 3)
    assert [row["step"] for row in rows(tmp_path / "other" / "metrics.jsonl")] == [3]


def test_a_damaged_line_is_named_and_kept(tmp_path, prompts):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\noops\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl:2: not JSON"), RunLog(config(run), 2, prompts):
        pass
    assert (run / "metrics.jsonl").read_text() == '{"step": 1}\noops\n{"step": 2}\n'


def test_a_start_never_writes_over_a_former_run(tmp_path, prompts):
    run = tmp_path / "run"
    with RunLog(config(run), 0, prompts) as log:
        iteration(log, prompts, 1)
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(DataError, match="holds a former run"), RunLog(config(run), 0, prompts):
        pass
    assert (run / "metrics.jsonl").read_bytes() == before


def test_making_a_log_touches_nothing(tmp_path, prompts):
    RunLog(config(tmp_path / "run"), 0, prompts)
    assert not (tmp_path / "run").exists()


def test_free_run_dir(tmp_path, capsys):
    run = tmp_path / "v1.5"
    assert free_run_dir(run) == run
    run.mkdir()
    assert free_run_dir(run) == run  # empty: nothing to lose
    (run / "train.log").write_text("x")
    (tmp_path / "v1.5-2").write_text("a file in the way")
    assert capsys.readouterr().out == ""
    assert free_run_dir(run) == tmp_path / "v1.5-3"
    assert f"run folder: {tmp_path / 'v1.5-3'}" in capsys.readouterr().out
    assert not (tmp_path / "v1.5-3").exists()
    config = SimpleNamespace(run_dir=run, checkpoint_dir=run / "checkpoints", actor=SimpleNamespace(load=run / "checkpoints"))
    assert resumed_run_dir(config) == run


def test_a_resume_does_not_touch_another_run(tmp_path):
    """The second run of a config lies in X-2; its resume with the config's own run_dir X would cut the first run's files."""
    first, second = tmp_path / "x", tmp_path / "x-2"
    first.mkdir()
    config = SimpleNamespace(run_dir=first, checkpoint_dir=first / "checkpoints", actor=SimpleNamespace(load=second / "checkpoints"))
    assert resumed_run_dir(config) == first  # empty: nothing to lose
    (first / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=f"set training.run_dir={second}, or a new folder"):
        resumed_run_dir(config)


def test_answers_to_other_prompts_end_the_run(tmp_path, prompts):
    with RunLog(config(tmp_path / "run"), 0, prompts) as log, log.step(1):
        pass
    rollout = answers(prompts, 1).select([1, 0, 2, 3])
    with RunLog(config(tmp_path / "run2"), 0, prompts) as log:
        with log.step(1) as timed, timed("rollout"):
            pass
        scores = torch.tensor(SCORES)
        with pytest.raises(
            WorkerError, match=r"iteration 1: the rollout answered the prompts \[1, 0, 2, 3\] .* its batch has \[0, 1, 2, 3\]"
        ):
            log.record(rollout, scores, make_pairs(scores, rollout, PairsConfig()), StepStats(dict.fromkeys(STATS, 0.0), pairs=1), 0.1)


def test_summary_compares_start_and_end(tmp_path, prompts, capsys):
    """14 iterations, first answers score 1 to 14: means of the first six 3.5, of the last six 11.5; others score 0 each.
    Square brackets in an answer are shown, not read as markup."""
    run = tmp_path / "run"
    with RunLog(config(run, 14), 0, prompts) as log:
        for step in range(1, 15):
            iteration(log, prompts, step, scores=[[step * 8.0, 0.0]] + [[0.0, 0.0]] * 3)
        capsys.readouterr()
        log.summary({"ask": PROMPTS[1]}, "[bold]dull[/bold]", "bright", run / "checkpoints", None)
    out = capsys.readouterr().out
    cells = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in out.splitlines()]
    table = {row[0]: row[1:] for row in cells if len(row) == 3}
    assert table["score"] == ["3.500", "11.500"]
    assert table["EOS rate"] == ["0.625", "0.625"]
    assert table["answer to: two"] == ["[bold]dull[/bold]", "bright"]
    assert "first 6 iterations" in out and "14 iterations of 0.0 s" in out
    assert f"\ncheckpoint: {run / 'checkpoints'}\n" in out and "Hugging Face folder" not in out
    assert "11.500" in (run / "train.log").read_text()


def test_summary_of_a_short_run(tmp_path, prompts, capsys):
    """Three iterations: one against one; none at all: no number."""
    with RunLog(config(tmp_path / "a"), 0, prompts) as log:
        for step in (1, 2, 3):
            iteration(log, prompts, step, scores=[[step * 8.0, 0.0]] + [[0.0, 0.0]] * 3)
        log.summary({"ask": "x"}, "", "", None, None)
    assert re.search(r"score\s+│ 1\.000\s+│ 3\.000", capsys.readouterr().out)
    with RunLog(config(tmp_path / "b", 0), 0, prompts) as log:
        log.summary({"ask": "x"}, "", "", None, None)
    assert re.search(r"score\s+│ -\s+│ -", capsys.readouterr().out)


@pytest.mark.parametrize("columns", [80, 160])
def test_progress_bar_on_a_terminal(tmp_path, prompts, monkeypatch, columns):
    """On a terminal, a narrow one too, the bar stands alone with all its numbers; the line for parsers is in train.log."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setattr("sys.stderr", terminal)
        with RunLog(config(tmp_path / "run", iterations=100), 97, prompts) as log:
            for step in (98, 99, 100):
                iteration(log, prompts, step)
        monkeypatch.undo()
        terminal.flush()
        written = b""
        while select.select([ours], [], [], 0.5)[0]:  # one read gives what is there, not all that was written
            written += os.read(ours, 1 << 16)
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    os.close(ours)
    assert "100/100" in shown and "loss 0.7000 reward 0.400 margin 1.000 EOS 62% 0.0 s/step" in shown
    assert "INFO:root" not in shown
    assert (tmp_path / "run" / "train.log").read_text().count("INFO:root") == 3
