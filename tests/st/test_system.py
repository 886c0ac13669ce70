"""The commands a user types, on a CPU: a tiny random model through every part, real weights for three iterations, and what is
said when something is wrong.

Shows that the parts fit together, that placement, data parallelism and a resume do not change a number, and that a run leaves
what it promises and no process. Does not show that a policy learns anything useful: that is the quick start's business.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "st" / "shell_scripts"
sys.path.insert(0, str(ROOT / "tests" / "ut"))
from tiny import make_tiny_hf  # noqa: E402

REWARD = """
def length(responses):
    return [float(len(r)) for r in responses]

def one_for_all(responses):
    return [1.0]

def not_a_number(responses):
    return [float("nan")] * len(responses)

def broken(responses):
    return [1 / 0 for _ in responses]
"""
ACTOR, REF = "actor_rollout_ref.actor_rollout", "actor_rollout_ref.ref"
SEPARATE = ("training.placement=separate", f"{ACTOR}.num_gpus_for_infer=1", "resource_pool.actor_rollout=[2]")
SEPARATE_2 = (
    "training.placement=separate",
    f"{ACTOR}.num_gpus_for_train=2",
    f"{ACTOR}.num_gpus_for_infer=2",
    "resource_pool.actor_rollout=[4]",
)


@dataclass
class Run:
    code: int
    out: str
    err: str
    folder: Path
    left_over: list[str]

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def completions(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "completions.jsonl").read_text().splitlines()]

    def weights(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.folder / "policy_hf" / "model.safetensors")


def launch(script: str, folder: Path, *overrides: str, tiny: Path | None = None, seconds: float = 240) -> Run:
    """Run a shell script as a user would; every process that carries this run's mark afterwards is left over."""
    mark = uuid.uuid4().hex
    env = {**os.environ, "PYTHON": sys.executable, "RAY_ADDRESS": "local", "ODPO_RUN_MARK": mark, "PYTHONPATH": str(ROOT)}
    core = os.environ.get("PYTHONPATH")
    if core:
        env["PYTHONPATH"] = f"{core}{os.pathsep}{ROOT}"
    if tiny is not None:
        env["ODPO_TINY"] = str(tiny)
    command = ["bash", str(SCRIPTS / script), f"training.run_dir={folder}", *overrides]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds, cwd=folder.parent)
    finally:
        left = marked(mark)
        for process in left:
            process.kill()
    return Run(done.returncode, done.stdout, done.stderr, folder, [" ".join(p.info["cmdline"] or [])[:120] for p in left])


def marked(mark: str) -> list[psutil.Process]:
    """Processes that have the mark in their environment and have not ended within two seconds."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            if process.environ().get("ODPO_RUN_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return psutil.wait_procs(found, timeout=2)[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("tiny")
    make_tiny_hf(root / "hf", seed=1)
    make_tiny_hf(root / "judge", seed=5, classifier=True)
    (root / "reward.py").write_text(REWARD)
    prompts = ["ab", "hello", "tell me", "x", "day", "night", "up", "down", "why", "how"]
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    return root


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory) -> Run:
    """Four iterations, colocated, a checkpoint every two."""
    run = launch(
        "online_dpo_tiny.sh", tmp_path_factory.mktemp("base") / "run", "training.train_iters=4", "training.save_interval=2", tiny=tiny
    )
    assert run.code == 0, run.out + run.err
    return run


def same_numbers(run: Run, other: Run, rel: float) -> None:
    """Every logged number but seconds and rates; answers to the token."""
    assert len(run.metrics()) == len(other.metrics())
    for row, wanted in zip(run.metrics(), other.metrics(), strict=True):
        for name, value in wanted.items():
            if name != "time" and not name.startswith(("timing/", "throughput/")):
                assert row[name] == pytest.approx(value, rel=rel, abs=rel), (row["step"], name)
    for row, wanted in zip(run.completions(), other.completions(), strict=True):
        assert row["answer_ids"] == wanted["answer_ids"]
        assert (row["chosen"], row["kept"]) == (wanted["chosen"], wanted["kept"])


def test_a_run_leaves_what_it_promises(base):
    """Log lines for parsers, metrics, answers, TensorBoard, checkpoints, a summary; and no process."""
    losses = re.findall(r"^INFO:root:\[.*\] iteration: (\d) / 4 \|.* actor/pg_loss : ([0-9.]+) ", base.out, re.MULTILINE)
    assert [step for step, _ in losses] == ["1", "2", "3", "4"]
    rows = base.metrics()
    assert [f"{row['actor/pg_loss']:.4f}" for row in rows] == [loss for _, loss in losses]
    assert all(isinstance(value, (int, float, str)) for row in rows for value in row.values()), "a null: something was not finite"
    assert len(base.completions()) == 4 * 4
    assert {row["chosen"] for row in base.completions() if row["kept"]} == {0, 1}
    assert list((base.folder / "tensorboard").glob("events.*"))
    assert (base.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4\n"
    assert "online DPO: what changed" in base.out and "policy_hf" in base.out
    assert base.left_over == []


def test_step_1_is_ln_2(base):
    """The policy is the reference before its first update."""
    first = base.metrics()[0]
    assert first["actor/pg_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(first["objective/kl"]) < 1e-5


def test_the_reward_decides_which_answer_is_chosen(base):
    for row in base.completions():
        if row["kept"]:
            assert row["scores"][row["chosen"]] > row["scores"][row["rejected"]]


def test_transformers_opens_the_trained_policy_and_generates(base):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = base.folder / "policy_hf"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert out.shape[1] > ids["input_ids"].shape[1]


def test_separate_placement_with_two_ranks_each_gives_the_same_numbers(base, tiny, tmp_path):
    """Two ranks train, two roll out, one is the reference, one the reward: six processes against one."""
    run = launch("online_dpo_tiny.sh", tmp_path / "run", "training.train_iters=4", *SEPARATE_2, tiny=tiny)
    assert run.code == 0, run.out + run.err
    same_numbers(run, base, rel=1e-4)
    for name, value in base.weights().items():
        torch.testing.assert_close(run.weights()[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert run.left_over == []


def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(base, tiny, tmp_path):
    """Iterations 3 and 4 from the checkpoint of iteration 2: metrics, answers and weights."""
    kept = tmp_path / "run" / "checkpoints"
    kept.mkdir(parents=True)
    shutil.copytree(base.folder / "checkpoints" / "iter_0000002", kept / "iter_0000002")
    (kept / "latest_checkpointed_iteration.txt").write_text("2\n")
    for name in ("metrics.jsonl", "completions.jsonl"):
        shutil.copy(base.folder / name, tmp_path / "run" / name)
    run = launch("online_dpo_tiny.sh", tmp_path / "run", "training.train_iters=4", f"{ACTOR}.load={kept}", tiny=tiny)
    assert run.code == 0, run.out + run.err
    assert "iteration: 2 /" not in run.out and "iteration: 3 / 4" in run.out
    same_numbers(run, base, rel=0.0)
    for name, value in base.weights().items():
        assert torch.equal(run.weights()[name], value), name


def test_a_reward_model_judges(tiny, tmp_path):
    overrides = ("training.train_iters=2", f"reward.load={tiny / 'judge'}", "reward.functions=null")
    script = SCRIPTS / "online_dpo_tiny.sh"
    text = script.read_text().replace('    reward.functions="$ODPO_TINY/reward.py:length" \\\n', "")
    assert text != script.read_text()
    own = tmp_path / "tests" / "st" / "shell_scripts" / "judge.sh"
    own.parent.mkdir(parents=True)
    own.write_text(text.replace("$basepath/ray_gpt.py", str(ROOT / "ray_gpt.py")))
    run = launch(str(own), tmp_path / "run", *overrides, tiny=tiny)
    assert run.code == 0, run.out + run.err
    scores = [score for row in run.completions() for score in row["scores"]]
    assert all(math.isfinite(score) for score in scores) and len(set(scores)) > 4


@pytest.mark.skipif(not (ROOT / "models" / "smollm2-135m" / "config.json").is_file(), reason="no models/smollm2-135m: run 'make model'")
def test_real_weights_for_three_iterations(tmp_path):
    """SmolLM2-135M-Instruct in bf16 by the quick start's own config: starts at ln 2 to bf16's precision, answers are words."""
    run = launch("online_dpo_smollm2.sh", tmp_path / "run", "training.global_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4", seconds=600)
    assert run.code == 0, run.out + run.err
    rows = run.metrics()
    assert len(rows) == 3 and rows[0]["actor/pg_loss"] == pytest.approx(math.log(2), abs=0.05)
    assert all(math.isfinite(row["actor/pg_loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
    answers = [answer for row in run.completions() for answer in row["answers"]]
    assert sum(" " in answer for answer in answers) >= len(answers) - 2, answers
    assert run.left_over == []


WRONG = {
    "a misspelt key": ((f"{ACTOR}.lrr=1",), r"lrr.*did you mean '.*lr'\?"),
    "no model folder": ((f"{ACTOR}.load=nowhere", f"{REF}.load=nowhere"), r"nowhere"),
    "no such module": (
        ("reward.functions=no_such_package.rewards:score",),
        r"reward function 'no_such_package.*no module 'no_such_package'",
    ),
    "no such function": (("reward.functions={tiny}/reward.py:lenght",), r"has no 'lenght'; did you mean 'length'\?"),
    "prompts too long": (
        (f"{ACTOR}.max_prompt_length=3",),
        r"none of 10 prompts fits: .* \d+ tokens.*max_prompt_length is 3",
    ),
    "no room for an answer": (("training.seq_length=24",), r"max_prompt_length.*24"),
    "more ranks than devices": (
        (
            "training.placement=separate",
            "training.global_batch_size=64",
            f"{ACTOR}.num_gpus_for_train=64",
            f"{ACTOR}.num_gpus_for_infer=1",
            "resource_pool.actor_rollout=[65]",
        ),
        r"64 ranks would work at the same time .*CPU cores",
    ),
}
WRONG_LATER = {
    "too few scores": ("one_for_all", r"reward function '.*:one_for_all'.*expected 8 scores, got 1"),
    "NaN scores": ("not_a_number", r"reward function '.*:not_a_number'.*nan"),
    "an exception": ("broken", r"reward function '.*:broken' raised ZeroDivisionError: .*reward.py:12"),
}


def told_in_one_line(run: Run, pattern: str) -> None:
    assert run.code == 1, run.out + run.err
    lines = run.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), run.err
    assert re.search(pattern, lines[0]), lines[0]
    assert run.left_over == []


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_before_the_start_is_told_in_one_line(name, tiny, tmp_path):
    overrides, pattern = WRONG[name]
    run = launch("online_dpo_tiny.sh", tmp_path / "run", *(o.format(tiny=tiny) for o in overrides), tiny=tiny)
    told_in_one_line(run, pattern)
    assert not run.folder.exists(), "a refused start left a run folder"


@pytest.mark.parametrize("name", WRONG_LATER)
def test_a_reward_that_fails_ends_the_run_in_one_line(name, tiny, tmp_path):
    function, pattern = WRONG_LATER[name]
    run = launch("online_dpo_tiny.sh", tmp_path / "run", f"reward.functions={tiny}/reward.py:{function}", tiny=tiny)
    told_in_one_line(run, pattern)
