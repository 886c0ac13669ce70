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
from mindspeed_odpo.engine.checkpoint import latest_iteration  # noqa: E402
from mindspeed_odpo.errors import ConfigError, WorkerError  # noqa: E402
from mindspeed_odpo.hosts.standalone import Host  # noqa: E402
from mindspeed_odpo.launch import compose  # noqa: E402
from mindspeed_odpo.pairs import make_pairs  # noqa: E402
from mindspeed_odpo.roles.actor import MOST_BAD_UPDATES, Actor  # noqa: E402
from mindspeed_odpo.roles.reference import Reference  # noqa: E402
from mindspeed_odpo.types import TrainBatch  # noqa: E402

pytestmark = pytest.mark.usefixtures("single_rank")
ACTOR = "actor_rollout_ref.actor_rollout"
FACTS = {"data": "10 prompts, sha256 a", "shuffle": True}


TRAINING = ("keep_last", "async_save")


def config(hf: Path, load: Path, run_dir: Path, **settings: object) -> Config:
    """A run from ``load`` with the tokenizer of ``hf`` and no word on the reference."""
    overrides = [f"{ACTOR}.load={load}", f"training.run_dir={run_dir}", f"training.tokenizer_name_or_path={hf}"]
    overrides += ["reward.functions=builtins:len"]
    reference = settings.pop("reference", None)
    overrides += [f"actor_rollout_ref.ref.load={reference}" if reference else "~actor_rollout_ref.ref.load"]
    overrides += [f"{'training' if key in TRAINING else ACTOR}.{key}={value}" for key, value in settings.items()]
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


@pytest.fixture
def saved(folders, tmp_path):
    """A run of two updates with a checkpoint after each, kept are the last one alone."""
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    whole = config(folders[0], folders[0], tmp_path, data_path=data, keep_last=1)
    actor = Actor(whole, Host(whole))
    assert actor.start(FACTS) == 0
    pairs = batch(Reference(whole, Host(whole)))
    for step in (1, 2):
        actor.update(pairs, step, beta=0.1, global_pairs=5)
        actor.save(step)
    return data


def resumed(folders, tmp_path, data: Path, **settings: object) -> Actor:
    whole = config(folders[0], tmp_path / "checkpoints", tmp_path, data_path=data, reference=folders[0], **settings)
    return Actor(whole, Host(whole))


def test_a_run_keeps_the_newest(saved, tmp_path):
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*")) == ["iter_0000002"]


def test_the_same_data_goes_on(folders, saved, tmp_path):
    actor = resumed(folders, tmp_path, saved)
    assert (actor.start(FACTS), actor.data_began()) == (2, 0)


def test_other_data_starts_at_its_first_row_and_stays_there(folders, saved, tmp_path):
    """Also after the next resume: the iteration at which it came in is in the checkpoint."""
    other = {**FACTS, "data": "9 prompts, sha256 b"}
    actor = resumed(folders, tmp_path, saved)
    assert (actor.start(other), actor.data_began()) == (2, 2)
    actor.save(3)
    actor = resumed(folders, tmp_path, saved)
    assert (actor.start(other), actor.data_began()) == (3, 2)


def test_another_order_is_another_run(folders, saved, tmp_path):
    with pytest.raises(ConfigError, match="shuffle is False, the checkpoint in .* was made with True: set it back to go on exactly"):
        resumed(folders, tmp_path, saved).start({**FACTS, "shuffle": False})


def test_a_background_save_ends_with_the_actor(folders, saved, tmp_path):
    actor = resumed(folders, tmp_path, saved, async_save="true")
    actor.start(FACTS)
    actor.save(3)
    actor.close()
    assert latest_iteration(tmp_path / "checkpoints") == 3
