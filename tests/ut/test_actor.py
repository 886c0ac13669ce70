"""The roles actor and reference as a config describes them, in this process: where their weights come from, when they give up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mindspeed_odpo import device

device.setup()

import problem  # noqa: E402

from mindspeed_odpo.config import Config, parse  # noqa: E402
from mindspeed_odpo.errors import ConfigError, WorkerError  # noqa: E402
from mindspeed_odpo.hosts.standalone import Host  # noqa: E402
from mindspeed_odpo.launch import compose  # noqa: E402
from mindspeed_odpo.pairs import make_pairs  # noqa: E402
from mindspeed_odpo.roles.actor import MOST_BAD_UPDATES, Actor  # noqa: E402
from mindspeed_odpo.roles.reference import Reference  # noqa: E402
from mindspeed_odpo.types import TrainBatch  # noqa: E402

pytestmark = pytest.mark.usefixtures("single_rank")
ACTOR = "actor_rollout_ref.actor_rollout"


def config(hf: Path, load: Path, run_dir: Path, **settings: object) -> Config:
    """A run from ``load`` with the tokenizer of ``hf`` and no word on the reference."""
    overrides = [f"{ACTOR}.load={load}", f"training.run_dir={run_dir}", f"training.tokenizer_name_or_path={hf}"]
    overrides += ["~actor_rollout_ref.ref.load", "reward.functions=builtins:len"]
    overrides += [f"{ACTOR}.{key}={value}" for key, value in settings.items()]
    return parse(compose("online_dpo_tiny", overrides), "test")


def batch(reference: Reference) -> TrainBatch:
    rollout = problem.rollout(vocab=300)
    return TrainBatch(rollout, make_pairs(problem.scores(), rollout, problem.PAIRS_CONFIG), reference.logps(rollout))


def test_a_policy_that_starts_from_a_checkpoint_has_its_reference_there(folders, tmp_path):
    """Trained, saved, started anew from the weights alone: the first loss is ln 2, so the reference is not the model before
    that training."""
    whole = config(folders[0], folders[0], tmp_path)
    actor, reference = (role(whole, Host(whole)) for role in (Actor, Reference))
    pairs = batch(reference)
    actor.update(pairs, 1, beta=0.1, global_pairs=5)
    actor.save(1)
    assert abs(actor.update(pairs, 2, beta=0.1, global_pairs=5).mean("loss") - 0.693147) > 1e-4
    again = config(folders[0], tmp_path / "checkpoints", tmp_path / "again", finetune=True)
    assert again.reference.load == tmp_path / "checkpoints" and again.hf_folder == folders[0]
    actor, reference = (role(again, Host(again)) for role in (Actor, Reference))
    assert actor.start({}) == 0
    assert actor.update(batch(reference), 1, beta=0.1, global_pairs=5).mean("loss") == pytest.approx(0.693147, abs=1e-6)


def test_a_resume_with_other_data_or_another_order_is_refused(folders, tmp_path):
    """Iteration 2 would not be what it would have been; the same facts go on, with finetune anything goes."""
    whole = config(folders[0], folders[0], tmp_path)
    actor = Actor(whole, Host(whole))
    assert actor.start({"data": "10 prompts, sha256 a", "shuffle": True}) == 0
    actor.update(batch(Reference(whole, Host(whole))), 1, beta=0.1, global_pairs=5)
    actor.save(1)
    again = replace(whole, actor=replace(whole.actor, load=tmp_path / "checkpoints"))
    assert Actor(again, Host(again)).start({"data": "10 prompts, sha256 a", "shuffle": True}) == 1
    with pytest.raises(ConfigError, match="shuffle is False, the checkpoint in .* was made with True: set it back"):
        Actor(again, Host(again)).start({"data": "10 prompts, sha256 a", "shuffle": False})
    with pytest.raises(ConfigError, match="data is 9 prompts, sha256 b, .* with 10 prompts, sha256 a"):
        Actor(again, Host(again)).start({"data": "9 prompts, sha256 b", "shuffle": True})
    other = replace(again, seed=7)
    with pytest.raises(ConfigError, match="seed is 7"):
        Actor(other, Host(other)).start({})


def test_a_step_without_a_pair_is_not_a_bad_one(folders, tmp_path):
    """Iterations whose pairs were all dropped say nothing about the run's health."""
    whole = config(folders[0], folders[0], tmp_path, on_nonfinite="skip")
    actor = Actor(whole, Host(whole))
    good = batch(Reference(whole, Host(whole)))
    none = replace(good, pairs=replace(good.pairs, reason=torch.ones_like(good.pairs.reason)))
    for step in range(1, MOST_BAD_UPDATES + 3):
        assert actor.update(none, step, beta=0.1, global_pairs=0).skipped


def test_a_run_whose_updates_are_all_nan_ends(folders, tmp_path):
    """Skipped and counted, until five in a row say that the run is lost; one good update in between starts the count anew."""
    whole = config(folders[0], folders[0], tmp_path, on_nonfinite="skip")
    actor = Actor(whole, Host(whole))
    good = batch(Reference(whole, Host(whole)))
    bad = TrainBatch(good.rollout, good.pairs, torch.full_like(good.ref_logps, float("nan")))
    for step in range(1, MOST_BAD_UPDATES):
        assert actor.update(bad, step, beta=0.1, global_pairs=5).nonfinite
    assert not actor.update(good, 5, beta=0.1, global_pairs=5).skipped
    for step in range(6, 5 + MOST_BAD_UPDATES):
        assert actor.update(bad, step, beta=0.1, global_pairs=5).skipped
    with pytest.raises(WorkerError, match="5 updates in a row had a loss or gradient that is not finite, the last at iteration 10"):
        actor.update(bad, 10, beta=0.1, global_pairs=5)
