"""benchmarks/vs_trl.py: its arithmetic, its table, and the watcher of a turn. Nothing here needs TRL."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mindspeed_odpo.errors import WorkerError

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "vs_trl.py"
spec = importlib.util.spec_from_file_location("vs_trl", SCRIPT)
vs_trl = importlib.util.module_from_spec(spec)
sys.modules["vs_trl"] = vs_trl  # dataclasses look their module up
spec.loader.exec_module(vs_trl)

OURS = {
    "timing/gen": 2.0,
    "timing/ref": 0.5,
    "timing/update_actor": 1.25,
    "timing/sync": 0.125,
    "timing/all": 3.9,
    "response_length/mean": 10.3125,
    "prompt_length/mean": 20.25,
    "pairs/kept": 7.0,
}
TRL = {"generate": 3.0, "reference": 0.75, "reward": 0.25, "policy": 2.0, "tokens": 330, "prompt_tokens": 162, "pairs": 8}


def test_phases_add_up_to_the_wall_time_on_both_sides():
    """Reference and reward are one phase; what no phase has is the rest, not lost."""
    ours, trl = vs_trl.phase_seconds(True, OURS, 4.0), vs_trl.phase_seconds(False, TRL, 6.5)
    assert ours == {"generate": 2.0, "reference + reward": 0.5, "policy": 1.25, "sync": 0.125, "rest": 0.125}
    assert trl == {"generate": 3.0, "reference + reward": 1.0, "policy": 2.0, "sync": 0.0, "rest": 0.5}


def test_counts_turn_our_means_into_sums():
    """16 answers of 10.3125 tokens are 165 tokens, 8 prompts of 20.25 are 162; TRL's lines hold sums already."""
    assert vs_trl.counts(True, OURS, prompts=8) == {"tokens": 165.0, "prompt_tokens": 162.0, "pairs": 7.0}
    assert vs_trl.counts(False, TRL, prompts=8) == {"tokens": 330, "prompt_tokens": 162, "pairs": 8}


def test_turn_medians_seconds_and_sums_throughput():
    """Three iterations of 2, 4, 9 s with 100, 100, 25 tokens: median 4 s, 225 tokens / 15 s, not the mean of three rates."""
    rows = [
        {"generate": g, "reference + reward": 0.0, "policy": 0.0, "sync": 0.0, "rest": 0.0, "tokens": t, "pairs": 8.0}
        for g, t in ((1.0, 100.0), (2.0, 100.0), (6.0, 25.0))
    ]
    numbers = vs_trl.turn_numbers(rows, [2.0, 4.0, 9.0])
    assert (numbers["step"], numbers["generate"]) == (4.0, 2.0)
    assert (numbers["tokens/s"], numbers["tokens/s, generation"], numbers["tokens a step"]) == (15.0, 25.0, 75.0)


def test_measured_skips_the_warm_up_and_takes_wall_time_between_lines():
    """Lines at 10, 13, 17, 22 s, one of warm-up, two measured: 3 s and 4 s; the last one is for memory alone."""
    turn = vs_trl.Turn(rows=[dict(TRL) for _ in range(4)], arrived=[10.0, 13.0, 17.0, 22.0], peak_bytes=3 * 2**29)
    numbers, rows = vs_trl.measured("trl-bf16", turn, warmup=1, iterations=2, prompts=8)
    assert [row["step"] for row in rows] == [3.0, 4.0]
    assert [row["rest"] for row in rows] == [-3.0, -2.0]
    assert (numbers["memory"], numbers["start"]) == (1.5, 10.0)


@pytest.mark.parametrize(("name", "expected"), [("step", [2.0, 0.5]), ("memory", [2.0, 0.5]), ("tokens/s", [0.5, 2.0]), ("sync", None)])
def test_advantage_is_above_one_where_ours_is_better(name, expected):
    """Half the time or memory is 2x, half the tokens a second is 0.5x; a ratio belongs to one round."""
    assert vs_trl.advantage(name, [1.0, 4.0], [2.0, 2.0]) == expected


def test_advantage_is_left_out_where_a_side_has_nothing():
    assert vs_trl.advantage("step", [1.0], [0.0]) is None


def test_show_gives_median_and_range():
    assert vs_trl.show([3.0, 1.0, 2.0]) == "2.00 (1.00-3.00)"
    assert vs_trl.show([2.0], unit="x") == "2.00x"


def test_table_compares_ours_with_each_side_of_trl():
    """The ratio is the median of the rounds' ratios (2, 1, 3), which the ratio of medians (6 / 2 = 3) is not."""

    def turns(*seconds):
        return [{**dict.fromkeys(vs_trl.UNITS, 1.0), "step": s} for s in seconds]

    header, rows = vs_trl.rows_of_table(
        {"trl-autocast": turns(2.0, 6.0, 6.0), "ours-bf16": turns(1.0, 6.0, 2.0), "trl-bf16": turns(1, 6, 2)}
    )
    assert header == ["", "trl-autocast", "ours-bf16", "trl-bf16", "ours-bf16 against trl-autocast", "ours-bf16 against trl-bf16"]
    step = next(row for row in rows if row[0] == "whole step, s")
    assert step[1:] == ["6.00 (2.00-6.00)", "2.00 (1.00-6.00)", "2.00 (1.00-6.00)", "2.00x (1.00-3.00)", "1.00x"]
    assert all(len(row) == len(header) for row in rows)


def test_table_without_a_peer_has_no_ratio():
    header, rows = vs_trl.rows_of_table({"ours-bf16": [dict.fromkeys(vs_trl.UNITS, 1.0)]})
    assert header == ["", "ours-bf16"] and all(len(row) == 2 for row in rows)


def test_different_prompts_end_the_comparison():
    vs_trl.check_same_prompts({"a": [10.0, 12.0], "b": [10.0, 12.0]})
    with pytest.raises(WorkerError, match="iteration 2: a read 12 prompt tokens, b 13"):
        vs_trl.check_same_prompts({"a": [10.0, 12.0], "b": [10.0, 13.0]})


def test_tie_breaker_differs_where_answers_differ():
    scores = vs_trl.tie_breaker(["Hello.", "Hello!", "Hello."])
    assert scores[0] == scores[2] != scores[1] and all(0 <= s < 1 for s in scores)


def test_fixed_length_makes_the_token_the_only_eos(tmp_path):
    """Every file that names an EOS names the new one; the weights are linked, the source stays as it was."""
    from byte_tokenizer import byte_tokenizer

    source = tmp_path / "source"
    byte_tokenizer().save_pretrained(source)
    for name in ("config.json", "generation_config.json"):
        (source / name).write_text(json.dumps({"eos_token_id": [0, 1], "kept": 5}))
    (source / "model.safetensors").write_bytes(b"weights")
    made = vs_trl.model_without_stop(source, tmp_path / "made", "Z")
    number = byte_tokenizer().get_vocab()["Z"]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((made / name).read_text()) == {"eos_token_id": number, "kept": 5}
        assert json.loads((source / name).read_text())["eos_token_id"] == [0, 1]
    assert json.loads((made / "tokenizer_config.json").read_text())["eos_token"] == "Z"
    assert (made / "model.safetensors").resolve() == source / "model.safetensors"


def watcher(tmp_path: Path, code: str):
    lines = tmp_path / "lines.jsonl"
    command = [sys.executable, "-c", f"import json, subprocess, sys, time\nLINES = {str(lines)!r}\n{code}"]
    return vs_trl.Watcher(command, {}, lines, tmp_path / "output.txt", quiet=(0, 0))


def test_watcher_times_lines_and_sees_the_memory_of_children(tmp_path):
    """Two lines 0.4 s apart, the first written in two halves; the memory is a child's 64 MB, not the parent's."""
    turn = watcher(
        tmp_path,
        """
child = subprocess.Popen([sys.executable, "-c", "import time; x = bytearray(64 * 2**20); time.sleep(1.5)"])
with open(LINES, "w") as file:
    file.write('{"a": '); file.flush(); time.sleep(0.1)
    file.write('1}\\n'); file.flush(); time.sleep(0.4)
    file.write('{"a": 2}\\n'); file.flush()
child.wait()
""",
    ).run()
    assert turn.rows == [{"a": 1}, {"a": 2}]
    assert 0.35 < turn.arrived[1] - turn.arrived[0] < 1.5
    assert turn.peak_bytes > 64 * 2**20


def test_watcher_ends_what_a_failed_side_left_behind(tmp_path, capsys):
    """The side dies with a child that would sleep on: the error has the exit code, the log's end is shown, the child is gone."""
    side = watcher(
        tmp_path,
        """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(LINES, "w").write(json.dumps({"pid": child.pid}) + "\\n")
time.sleep(0.5)
sys.exit("no such model")
""",
    )
    side_wait, vs_trl.Watcher._wait_for_all = vs_trl.Watcher._wait_for_all, lambda self: time.sleep(0.2)
    try:
        with pytest.raises(WorkerError, match="exit code 1 after 1 iterations"):
            side.run()
    finally:
        vs_trl.Watcher._wait_for_all = side_wait
    assert "no such model" in capsys.readouterr().err
    left = side.turn.rows[0]["pid"]
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sides", "ours-bf16,trl-bf61"], "no side 'trl-bf61'; did you mean 'trl-bf16'?"),
        (["--warmup", "0"], "--warmup 0: must be at least 1"),
        (["--sides", "ours-bf16,ours-bf16"], "name each side once"),
    ],
)
def test_wrong_options_are_one_line(arguments, message, capsys):
    assert vs_trl.main(arguments) == 1
    out = capsys.readouterr().err
    assert out.startswith("error: ") and message in out and out.count("\n") == 1


def test_without_trl_the_cure_is_named_and_help_works(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "trl" else find("json" if name == "datasets" else name, *rest)
    )
    assert vs_trl.main([]) == 1
    assert "trl not installed: pip install -e '.[benchmark]'" in capsys.readouterr().err
    done = subprocess.run([sys.executable, "-I", "-S", str(SCRIPT), "--help"], capture_output=True, text=True)  # nothing installed at all
    assert done.returncode == 0 and "--fixed-length TOKEN" in done.stdout
