"""Offline DPO: the loop over plain-Python roles, a tiny model in process, what a whole run starts and leaves behind; MiniMind's
schedule. A run through Ray is a system test."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import problem
import pytest
import torch
from offline import LONG, ROWS, load, make_config
from test_train_loop import Log

from mindspeed_odpo import train_offline
from mindspeed_odpo.config import LossConfig, OptimizerConfig
from mindspeed_odpo.engine import forward
from mindspeed_odpo.engine import optimizer as optimizer_module
from mindspeed_odpo.errors import ConfigError
from mindspeed_odpo.loss import preference_loss
from mindspeed_odpo.roles.reference_cache import ReferenceCache
from mindspeed_odpo.train_offline import train
from mindspeed_odpo.types import StepStats, TrainBatch

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("single_rank")


class World:
    """A policy that is one table of logits over the bytes; notes every call."""

    def __init__(self) -> None:
        self.policy = torch.zeros(384, requires_grad=True)
        self.calls: list[str] = []
        self.betas: list[float] = []
        self.rows: list[list[int]] = []
        self.actor = SimpleNamespace(
            start=lambda facts: 0,
            data_began=lambda: 0,
            update=self.update,
            save=lambda step: self.calls.append(f"save {step}"),
            export_hf=print,
        )
        self.reference = SimpleNamespace(logps=lambda rollout: self.logps(torch.zeros(384), rollout))

    @staticmethod
    def logps(logits, rollout):
        return (logits.log_softmax(0)[rollout.response_ids] * rollout.counted).sum(-1)

    def update(self, batch: TrainBatch, step: int, beta: float) -> StepStats:
        batch.check()
        self.calls.append(f"update {step}")
        self.betas.append(beta)
        self.rows.append(batch.rollout.prompt_index.tolist())
        logps, ref = self.logps(self.policy, batch.rollout), batch.ref_logps
        each = preference_loss(logps[:, 0], logps[:, 1], ref[:, 0], ref[:, 1], loss_type="sigmoid", beta=beta)
        each.mean().backward()
        with torch.no_grad():
            self.policy -= 3.0 * self.policy.grad
            self.policy.grad = None
        return StepStats(dict.fromkeys(forward.STATS, 0.0) | {"loss": float(each.detach().sum())}, len(batch))


def run_loop(folder: Path, iterations: int, first: int = 0, **overrides) -> tuple[World, Log]:
    config = make_config(folder, training__train_iters=iterations, **overrides)
    world, log, data = World(), Log(), load(config)
    table = ReferenceCache(config, data).fill(world.reference.logps)
    train(config, world, data, table, log, first)
    return world, log


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- the loop -------------------------------------------------------------------------------------------------------


def test_the_policy_learns_the_preferences(home):
    """From ln 2, where policy and reference are equal, to less than half of it."""
    _, log = run_loop(home, 40)
    assert log.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert log.losses[-1] < 0.35


def test_an_iteration_is_one_update_and_checkpoints_fall_on_the_interval(home):
    world, log = run_loop(home, 5, training__save_interval=2)
    assert world.calls == ["update 1", "update 2", "save 2", "update 3", "update 4", "save 4", "update 5", "save 5"]
    assert log.phases[:2] == ["pairs", "update"] and log.versions == [0] * 5


def test_after_a_resume_rows_and_numbers_are_those_of_an_unbroken_run(home):
    whole, _ = run_loop(home, 7)
    rest, _ = run_loop(home, 7, first=4)
    assert rest.rows == whole.rows[4:] and rest.calls[0] == "update 5"
    assert LONG not in {row for rows in whole.rows for row in rows}


def test_beta_follows_the_epoch_also_after_a_resume(home):
    """Eleven rows, four an iteration: iterations 1 to 3 begin in the first epoch, 4 to 6 in the second, 7 in the third."""
    beta = {"actor_rollout_ref__actor_rollout__dpo_beta": "[0.1,0.05]"}
    assert run_loop(home, 7, **beta)[0].betas == [0.1] * 3 + [0.05] * 4
    assert run_loop(home, 7, first=4, **beta)[0].betas == [0.05] * 3


# --- a tiny model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["answer", "dialogue", "dialogue_shifted"])
def test_cached_numbers_are_fresh_ones_and_count_what_the_mask_says(home, mask):
    """All rows once, longest first, against each batch by itself; and against transformers, one unpadded sequence at a time."""
    from transformers import AutoModelForCausalLM

    config = make_config(home, actor_rollout_ref__actor_rollout__answer_mask=mask)
    data = load(config)
    ours = problem.load(home / "model", False)
    theirs = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32).eval()
    ReferenceCache(config, data).fill(lambda rollout: forward.answer_logps(ours.chunks, rollout, 2, CPU))
    cached = ReferenceCache(config, data).read()
    for step in (1, 2, 3):
        rollout, _ = data.batch(step)
        torch.testing.assert_close(cached[rollout.prompt_index], forward.answer_logps(ours.chunks, rollout, 3, CPU), rtol=0, atol=1e-5)
        for p in range(len(rollout)):
            prompt = rollout.prompt_ids[p][rollout.prompt_mask[p]]
            for k in range(2):
                read = rollout.response_mask[p, k]
                ids, counted = torch.cat([prompt, rollout.response_ids[p, k][read]]), rollout.counted[p, k][read]
                with torch.no_grad():
                    logps = theirs(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[len(prompt) - 1 :, 0]
                assert float((logps * counted).sum()) == pytest.approx(float(cached[rollout.prompt_index[p], k]), abs=1e-4)


def test_a_tiny_model_starts_at_ln_2_and_learns(home):
    """Policy and reference are the same weights. Twenty steps at 1e-3."""
    config = make_config(home)
    data, policy = load(config), problem.load(home / "model", True, lr=1e-3)
    table = ReferenceCache(config, data).fill(
        lambda rollout: forward.answer_logps(problem.load(home / "model", False).chunks, rollout, 4, CPU)
    )
    losses = []
    for step in range(1, 21):
        rollout, pairs = data.batch(step)
        stats = problem.step(policy, TrainBatch(rollout, pairs, table[rollout.prompt_index]), lr=1e-3)
        losses.append(stats.mean("loss"))
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < 0.6


# --- a whole run ----------------------------------------------------------------------------------------------------


class Started:
    """Stands in for ``Roles``: which roles were started and ended, in order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.world = World()

    def __call__(self, config, names):
        self.names = names
        return self

    def __enter__(self):
        self.order.append("+".join(self.names))
        return self.world

    def __exit__(self, *_):
        self.order.append("end")


def run_all(home: Path, monkeypatch, **overrides) -> list[str]:
    started = Started()
    monkeypatch.setattr(train_offline, "Roles", started)
    monkeypatch.setattr(train_offline, "cluster", lambda config: nullcontext())
    train_offline.run(make_config(home, **overrides))
    return started.order


def test_the_reference_runs_once_and_ends_before_the_actor_starts(home, monkeypatch, capsys):
    assert run_all(home, monkeypatch) == ["reference", "end", "actor", "end"]
    assert run_all(home, monkeypatch) == ["actor", "end"]
    out = capsys.readouterr().out
    assert "1 of 12 rows left out: chosen or rejected is longer than seq_length 64" in out
    assert "reference: log-probs from" in out and "run folder:" in out


def test_a_loss_without_reference_starts_none(home, monkeypatch):
    simpo = {"actor_rollout_ref__actor_rollout__dpo_loss_type": "simpo"}
    assert run_all(home, monkeypatch, **simpo) == ["actor", "end"]
    assert not (home / "runs").exists()


def test_a_stale_cache_is_refused_before_anything_starts(home, monkeypatch):
    cache = {"actor_rollout_ref__ref__logps_cache": "kept.safetensors"}
    run_all(home, monkeypatch, **cache)
    (home / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    started = Started()
    with pytest.raises(ConfigError, match="made from another data file"):
        monkeypatch.setattr(train_offline, "Roles", started)
        train_offline.run(make_config(home, **cache))
    assert started.order == []


def test_what_a_run_leaves_behind(home, monkeypatch, capsys):
    """The same files and line as online, but no completions: the answers are in the data. Scores there are none: null."""
    run_all(home, monkeypatch)
    assert sorted(path.name for path in (home / "run").iterdir()) == ["metrics.jsonl", "tensorboard", "train.log"]
    rows = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5] and rows[0]["actor/pg_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[0]["reward/score/mean"] is None and rows[0]["pairs/kept"] == 4 and "timing/update_actor" in rows[0]
    out = capsys.readouterr().out
    assert "iteration: 5 / 5 | timing/" in out and "actor/pg_loss : 0.6931 " in out and "offline DPO: what changed" in out


# --- MiniMind's schedule --------------------------------------------------------------------------------------------


def rates(steps, train_iters: int, **settings) -> list[float]:
    group = {"lr": 0.0, "weight_decay": 0.0}
    config = OptimizerConfig(**{"lr": 5e-4, "lr_decay_style": "minimind", **settings})
    schedule = optimizer_module.Schedule(SimpleNamespace(param_groups=[group]), config, train_iters)
    out = []
    for step in steps:
        out.append(schedule.set(step))
        assert group["lr"] == out[-1]
    return out


def check_minimind(steps: int = 4) -> None:
    """By hand for lr 5e-4 and four updates: 0.1 lr and half of (1 + cos 0, 45, 90, 135 degrees) lr."""
    halves = [1.0, 0.5 + 0.25 * math.sqrt(2), 0.5, 0.5 - 0.25 * math.sqrt(2)]
    assert rates([1, 2, 3, 4], steps) == pytest.approx([5e-4 * (0.1 + half) for half in halves], rel=1e-12)


def test_minimind_schedule_starts_at_eleven_tenths():
    """The notebook's only line: one update, lr 0.00055."""
    check_minimind()
    assert rates([1], 1) == pytest.approx([0.00055], rel=1e-12)
    assert rates([5, 9], 4) == pytest.approx([5e-5, 5e-5], rel=1e-12)
    assert rates([3], 9, lr_decay_iters=4) == pytest.approx([3e-4], rel=1e-12)


def test_minimind_schedule_has_no_state():
    assert rates([4, 1, 3], 4) == [rates([n], 4)[0] for n in (4, 1, 3)]


@pytest.mark.parametrize(
    "lr",
    [lambda n, total: 0.1 + 0.5 * (1 + math.cos(math.pi * n / total)), lambda n, total: 0.5 * (1 + math.cos(math.pi * (n - 1) / total))],
)
def test_mutant_schedule_is_caught(lr, monkeypatch):
    """Counted from 1; without the tenth."""
    monkeypatch.setattr(
        optimizer_module._MiniMindScheduler, "get_lr", lambda self, group: self.max_lr * lr(self.num_steps, self.lr_decay_steps)
    )
    with pytest.raises(AssertionError):
        check_minimind()


def _row_before(monkeypatch):
    monkeypatch.setattr(train_offline, "TrainBatch", lambda rollout, pairs, ref: TrainBatch(rollout, pairs, ref.roll(1, 0)))


def _swapped(monkeypatch):
    monkeypatch.setattr(train_offline, "TrainBatch", lambda rollout, pairs, ref: TrainBatch(rollout, pairs, ref.flip(1)))


@pytest.mark.parametrize("mutant", [_row_before, _swapped])
def test_mutant_reference_of_another_row_is_caught(mutant, home, monkeypatch):
    """Log-probs of another row, or of chosen for rejected: the first loss is not ln 2."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_the_policy_learns_the_preferences(home)


def test_loss_options_reach_the_actor(home):
    """The notebook's settings: mean over the padded length, which is seq_length - 1."""
    config = make_config(home, actor_rollout_ref__actor_rollout__dpo_logps_reduction="padded_mean")
    assert config.actor.loss == LossConfig(reduction="padded_mean", padded_length=63)
