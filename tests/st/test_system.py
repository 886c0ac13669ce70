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
import time
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

def longer(first, second):
    return [None if len(a) == len(b) else int(len(b) > len(a)) for a, b in zip(first, second)]
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


def environment(mark: str) -> dict[str, str]:
    """A user's environment with this Python, a Ray of its own, and a mark to find the run's processes by."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return {**os.environ, "PYTHON": sys.executable, "RAY_ADDRESS": "local", "ODPO_RUN_MARK": mark, "PYTHONPATH": path}


def launch(script: str, folder: Path, *overrides: str, tiny: Path | None = None, seconds: float = 240) -> Run:
    """Run a shell script as a user would; every process that carries this run's mark afterwards is left over."""
    mark = uuid.uuid4().hex
    env = environment(mark)
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
    rows = [{"prompt": p, "chosen": "yes", "rejected": "no!"} for p in prompts]
    (root / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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


@pytest.fixture(scope="module")
def classified(tiny, tmp_path_factory) -> dict[str, Run]:
    """The same two iterations under a classifier that transformers runs, and under the same one on megatron-core."""
    folder = tmp_path_factory.mktemp("classified")
    settings = ("training.train_iters=2", f"reward.load={tiny / 'judge'}", "reward.functions=null")
    return {
        engine: launch("online_dpo_tiny.sh", folder / engine, *settings, f"reward.engine={engine}", tiny=tiny)
        for engine in ("hf", "megatron")
    }


def test_a_reward_model_scores(classified):
    run = classified["hf"]
    assert run.code == 0, run.out + run.err
    scores = [score for row in run.completions() for score in row["scores"]]
    assert all(math.isfinite(score) for score in scores) and len(set(scores)) > 4


def test_a_megatron_reward_model_gives_the_same_run(classified):
    run = classified["megatron"]
    assert run.code == 0, run.out + run.err
    same_numbers(run, classified["hf"], rel=1e-4)
    for row, wanted in zip(run.completions(), classified["hf"].completions(), strict=True):
        assert row["scores"] == pytest.approx(wanted["scores"], abs=1e-4)


def test_a_judge_and_every_pair_of_three_answers(tiny, tmp_path):
    """A pairwise judge in placement separate; SimPO, so that no reference runs and what needs one is null."""
    run = launch(
        "online_dpo_tiny.sh",
        tmp_path / "run",
        "training.train_iters=2",
        "reward.functions=null",
        f"reward.judge={tiny}/reward.py:longer",
        f"{ACTOR}.n_samples_per_prompt=3",
        f"{ACTOR}.dpo_loss_type=simpo",
        "algorithm.pair_select=all",
        *SEPARATE,
        tiny=tiny,
    )
    assert run.code == 0, run.out + run.err
    assert "separate: actor 1 rank, rollout 1 rank, reward 1 rank; 3 ranks in all" in run.out
    for row in run.completions():
        lengths = [len(answer) for answer in row["answers"]]
        assert len(row["kept"]) == 3
        for chosen, rejected, kept in zip(row["chosen"], row["rejected"], row["kept"], strict=True):
            assert not kept or lengths[chosen] > lengths[rejected]
    for row in run.metrics():
        assert row["objective/kl"] is None and math.isfinite(row["actor/pg_loss"]) and row["grad_norm"] > 0
        dropped = [value for name, value in row.items() if name.startswith("pairs/dropped_")]
        assert row["pairs/kept"] > 4 and row["pairs/kept"] + sum(dropped) == 12


def test_recorded_answers_give_the_same_run_bit_for_bit(base, tiny, tmp_path):
    """completions.jsonl as the run left it: nobody samples, every number and every weight is the same."""
    recorded = (f"{ACTOR}.rollout_engine=replay", f"{ACTOR}.replay_path={base.folder / 'completions.jsonl'}")
    run = launch("online_dpo_tiny.sh", tmp_path / "run", "training.train_iters=4", *recorded, tiny=tiny)
    assert run.code == 0, run.out + run.err
    same_numbers(run, base, rel=0.0)
    for name, value in base.weights().items():
        assert torch.equal(run.weights()[name], value), name


@pytest.fixture(scope="module")
def offline(tiny, tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("offline")
    return launch(
        "dpo_tiny.sh", folder / "run", "training.train_iters=4", "training.save_interval=2", f"{REF}.logps_cache={folder}/ref", tiny=tiny
    )


def test_offline_dpo_from_a_file_of_preferences(offline):
    """The reference runs once and is kept; the first loss is ln 2 and the fourth is lower."""
    assert offline.code == 0, offline.out + offline.err
    assert "reference: log-probs of 10 rows" in offline.out and (offline.folder.parent / "ref").is_file()
    losses = [row["actor/pg_loss"] for row in offline.metrics()]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < losses[0] - 0.01
    assert not (offline.folder / "completions.jsonl").exists() and "offline DPO: what changed" in offline.out
    assert offline.left_over == []


def test_offline_dpo_resumes_on_two_ranks_from_the_kept_reference(offline, tiny, tmp_path):
    """Placement separate with two training ranks, from the checkpoint of iteration 2: the numbers of the unbroken run."""
    kept = tmp_path / "run" / "checkpoints"
    shutil.copytree(offline.folder / "checkpoints" / "iter_0000002", kept / "iter_0000002")
    (kept / "latest_checkpointed_iteration.txt").write_text("2\n")
    shutil.copy(offline.folder / "metrics.jsonl", tmp_path / "run" / "metrics.jsonl")
    settings = (f"{ACTOR}.load={kept}", f"{REF}.logps_cache={offline.folder.parent}/ref", *SEPARATE_2)
    run = launch("dpo_tiny.sh", tmp_path / "run", "training.train_iters=4", *settings, tiny=tiny)
    assert run.code == 0, run.out + run.err
    assert "reference: log-probs from" in run.out and "iteration: 2 /" not in run.out
    for row, wanted in zip(run.metrics(), offline.metrics(), strict=True):
        for name in ("actor/pg_loss", "logps/chosen", "rewards/margins", "grad_norm"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), (row["step"], name)


def test_a_stale_file_of_reference_log_probs_is_refused(offline, tiny, tmp_path):
    """Another answer_mask than the one it was made with."""
    settings = (f"{REF}.logps_cache={offline.folder.parent}/ref", f"{ACTOR}.answer_mask=dialogue")
    run = launch("dpo_tiny.sh", tmp_path / "run", *settings, tiny=tiny)
    told_in_one_line(run, r"the reference log-probs in it were made from other settings \(answer_mask answer.*answer_mask dialogue")
    assert not run.folder.exists()


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


def test_a_rank_that_dies_ends_the_run_in_one_line(tiny, tmp_path):
    """Killed from outside, as by a machine that runs out of memory, after the first iteration: what was done stays on disk."""
    mark, out = uuid.uuid4().hex, tmp_path / "out"
    env = {**environment(mark), "ODPO_TINY": str(tiny)}
    command = ["bash", str(SCRIPTS / "online_dpo_tiny.sh"), f"training.run_dir={tmp_path / 'run'}", "training.train_iters=100000"]
    with out.open("w") as stdout, (tmp_path / "err").open("w") as stderr:
        process = subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while "iteration: 2 /" not in out.read_text():
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "err").read_text()
            time.sleep(0.1)
        ranks = [p for p in psutil.process_iter(["cmdline"]) if "ray::RankWorker" in " ".join(p.info["cmdline"] or [])]
        mine = [p for p in ranks if p.environ().get("ODPO_RUN_MARK") == mark]
        assert len(mine) == 1
        mine[0].kill()
        code = process.wait(60)
    finally:
        process.kill()
        left = marked(mark)
        for other in left:
            other.kill()
    run = Run(code, out.read_text(), (tmp_path / "err").read_text(), tmp_path / "run", [str(p) for p in left])
    told_in_one_line(run, r"failed: a rank's process died")
    assert len(run.metrics()) >= 2


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
