"""The real ``train()`` over four roles in plain Python: a bandit that learns in a second.

The policy is one table of logits; an answer is two tokens drawn from it; the reward likes token 3. Shows that the loop hands
the right thing to the right role in the right order. Does not show that a transformer learns (the system tests do).
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from mindspeed_odpo.config import LossConfig, PairsConfig, SaveConfig
from mindspeed_odpo.loss import preference_loss
from mindspeed_odpo.train import train
from mindspeed_odpo.types import PromptBatch, Rollout, StepStats

VOCAB, P, K, R, LIKED = 6, 8, 2, 2, 3


class World:
    """Policy, rollout copy and reference as tables ``[V]``; notes every call."""

    def __init__(self) -> None:
        self.policy = torch.zeros(VOCAB, requires_grad=True)
        self.served = torch.full((VOCAB,), float("nan"))
        self.served_version = -1
        self.calls: list[str] = []
        self.scores: list[float] = []
        self.betas: list[float] = []
        self.random = torch.Generator().manual_seed(0)
        self.actor = SimpleNamespace(update=self.update, save=lambda step: self.calls.append(f"save {step}"))
        self.rollout = SimpleNamespace(generate=self.generate)
        self.reference = SimpleNamespace(logps=self.logps)
        self.reward = SimpleNamespace(score=self.score)

    def sync_weights(self, version: int) -> None:
        self.calls.append(f"sync {version}")
        self.served, self.served_version = self.policy.detach().clone(), version

    def generate(self, prompts: PromptBatch) -> Rollout:
        self.calls.append("generate")
        ids = torch.multinomial(self.served.softmax(0), P * K * R, replacement=True, generator=self.random).view(P, K, R)
        done = torch.ones(P, K, dtype=torch.bool)
        return Rollout(prompts.ids, prompts.mask, ids, torch.ones_like(ids, dtype=torch.bool), done, prompts.index, self.served_version)

    def score(self, rollout: Rollout, prompts: PromptBatch) -> torch.Tensor:
        self.calls.append("score")
        scores = (rollout.response_ids == LIKED).float().sum(-1)
        self.scores.append(float(scores.mean()))
        return scores

    def logps(self, rollout: Rollout) -> torch.Tensor:
        self.calls.append("logps")
        return torch.zeros(VOCAB).log_softmax(0)[rollout.response_ids].sum(-1)

    def update(self, batch, step: int, beta: float) -> StepStats:
        self.calls.append(f"update {step}")
        self.betas.append(beta)
        batch.check()
        logps = self.policy.log_softmax(0)[batch.rollout.response_ids].sum(-1)
        row, (c, r) = torch.arange(P), (batch.pairs.chosen[:, 0], batch.pairs.rejected[:, 0])
        keep = batch.pairs.keep[:, 0]
        ref = batch.ref_logps
        each = preference_loss(logps[row, c], logps[row, r], ref[row, c], ref[row, r], loss_type="sigmoid", beta=beta)
        kept = int(keep.sum())
        (each * keep).sum().div(max(kept, 1)).backward()
        with torch.no_grad():
            self.policy -= 1.0 * self.policy.grad
            self.policy.grad = None
        return StepStats({"loss": float((each * keep).sum().detach())}, kept)


class Log:
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.versions: list[int] = []
        self.phases: list[str] = []

    @contextmanager
    def step(self, step: int):
        @contextmanager
        def timed(name: str):
            self.phases.append(name)
            yield

        yield timed

    def record(self, rollout, scores, pairs, stats, beta, sync_bytes=None) -> None:
        self.losses.append(stats.mean("loss"))
        self.versions.append(rollout.policy_version)


def prompts(step: int) -> PromptBatch:
    ids = torch.ones(P, 1, dtype=torch.int64)
    return PromptBatch(step, ids, ids.bool(), torch.arange(P), torch.arange(P), ({"prompt": "x"},) * P)


def run(iterations: int, first: int = 0, save_interval: int = 0, beta: tuple[float, ...] = (0.5,)) -> tuple[World, Log]:
    config = SimpleNamespace(
        train_iters=iterations,
        seed=0,
        pairs=PairsConfig(),
        actor=SimpleNamespace(loss=LossConfig(beta=beta)),
        save=SaveConfig(interval=save_interval, checkpoint_at_end=False),
    )
    world, log = World(), Log()
    world.sync_weights(first)
    train(config, world, SimpleNamespace(batch=prompts, epoch_index=lambda step: (step - 1) // 3), log, first)
    return world, log


def test_the_reward_goes_up():
    """Chance is 2/6 liked tokens an answer; after 40 iterations nearly both tokens are the liked one."""
    world, log = run(40)
    assert sum(world.scores[:5]) / 5 < 0.8
    assert sum(world.scores[-5:]) / 5 > 1.6
    assert log.losses[0] == pytest.approx(0.693147, abs=1e-6)


def test_an_iteration_calls_each_role_once_and_in_order():
    world, log = run(2)
    one = ["generate", "score", "logps"]
    assert world.calls == ["sync 0", *one, "update 1", "sync 1", *one, "update 2", "sync 2"]
    assert log.phases[:4] == ["rollout", "judge", "update", "sync"]


def test_answers_come_from_the_weights_of_the_iteration_before():
    _, log = run(3)
    assert log.versions == [0, 1, 2]


def test_after_a_resume_numbering_goes_on():
    world, log = run(5, first=3)
    assert [call for call in world.calls if call.startswith(("sync", "update"))] == ["sync 3", "update 4", "sync 4", "update 5", "sync 5"]
    assert log.versions == [3, 4]


def test_beta_follows_the_epoch_also_after_a_resume():
    """Three iterations an epoch: one value an epoch, the last one holds; a run resumed in epoch 1 has that epoch's."""
    assert run(7, beta=(0.1, 0.05))[0].betas == [0.1] * 3 + [0.05] * 4
    assert run(7, first=4, beta=(0.1, 0.05))[0].betas == [0.05] * 3


def test_checkpoints_fall_on_the_interval():
    world, _ = run(7, save_interval=3)
    assert [call for call in world.calls if call.startswith("save")] == ["save 3", "save 6"]
