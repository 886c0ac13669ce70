"""Checkpoints: what is saved comes back bit for bit, and a torn one is never the latest."""

from __future__ import annotations

from dataclasses import replace

import problem
import pytest
import torch

from mindspeed_odpo.config import PairsConfig
from mindspeed_odpo.engine import checkpoint, forward
from mindspeed_odpo.errors import ConfigError, DataError
from mindspeed_odpo.pairs import make_pairs
from mindspeed_odpo.types import TrainBatch

pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.fixture(scope="module")
def folder(folders):
    return folders[0]


def batch(policy) -> TrainBatch:
    rollout = problem.rollout()
    ref = forward.answer_logps(policy.chunks, rollout, 2, torch.device("cpu")) - 1.0
    return TrainBatch(rollout, make_pairs(problem.scores(), rollout, PairsConfig()), ref)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_resumed_policy_trains_on_bit_for_bit(folder, tmp_path, bf16):
    """Two steps, save, a third; load into fresh weights and take the third there: same weights to the last bit."""
    straight = problem.load(folder, True, bf16=bf16)
    data = batch(straight)
    problem.step(straight, data)
    problem.step(straight, data)
    checkpoint.save_checkpoint(tmp_path, 2, straight.chunks, straight.optimizer, straight.config, {"seed": 3})
    problem.step(straight, data)

    resumed = problem.load(folder, True, bf16=bf16)
    assert checkpoint.load_checkpoint(tmp_path, resumed.chunks, resumed.optimizer, resumed.config) == (2, {"seed": 3})
    problem.step(resumed, data)
    for name, value in straight.weights().items():
        assert torch.equal(resumed.weights()[name], value), name


def test_weights_only(folder, tmp_path):
    saved = problem.load(folder, True)
    problem.step(saved, batch(saved))
    checkpoint.save_checkpoint(tmp_path, 1, saved.chunks, saved.optimizer, saved.config, {})
    fresh = problem.load(folder, True)
    assert not torch.equal(fresh.weights()["decoder.final_layernorm.weight"], saved.weights()["decoder.final_layernorm.weight"])
    checkpoint.load_checkpoint(tmp_path, fresh.chunks, None, fresh.config)
    for name, value in saved.weights().items():
        assert torch.equal(fresh.weights()[name], value), name


def test_a_save_that_fails_leaves_the_former_checkpoint_the_latest(folder, tmp_path, monkeypatch):
    policy = problem.load(folder, True)
    checkpoint.save_checkpoint(tmp_path, 1, policy.chunks, policy.optimizer, policy.config, {})

    def torn(*args, **kwargs):
        (tmp_path / ".iter_0000002.partial" / "half").write_text("x")
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.dist_checkpointing, "save", torn)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save_checkpoint(tmp_path, 2, policy.chunks, policy.optimizer, policy.config, {})
    assert checkpoint.latest_iteration(tmp_path) == 1
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == ["iter_0000001", checkpoint.TRACKER]


def test_a_bad_tracker_is_named(tmp_path):
    (tmp_path / checkpoint.TRACKER).write_text("release\n")
    with pytest.raises(DataError, match="expected an iteration number, found 'release'"):
        checkpoint.latest_iteration(tmp_path)
    (tmp_path / checkpoint.TRACKER).write_text("7\n")
    with pytest.raises(DataError, match="names iteration 7, but .*iter_0000007 is not there"):
        checkpoint.latest_iteration(tmp_path)


def test_a_model_with_another_rope_is_refused(folder, tmp_path):
    """The tensors fit, the numbers would not."""
    policy = problem.load(folder, True)
    checkpoint.save_checkpoint(tmp_path, 1, policy.chunks, policy.optimizer, policy.config, {})
    other = replace(policy.config, rotary_interleaved=True)
    with pytest.raises(ConfigError, match="rotary_interleaved is True, the checkpoint in .* was made with False: take the model yaml"):
        checkpoint.load_checkpoint(tmp_path, policy.chunks, None, other)
