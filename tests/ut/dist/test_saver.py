"""How checkpoints are written: which stay, beside the training, and what a killed process leaves behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import policies
import pytest
import torch
from launcher import free_port

from mindspeed_odpo.config import TRACKER, ParallelConfig
from mindspeed_odpo.engine import checkpoint

ONE = ParallelConfig()


@pytest.fixture
def policy(folders, single_rank):
    return policies.fill(policies.build(policies.architecture(folders[0]), ONE))


def written(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_newest_stay(policy, tmp_path):
    """Two of four; a number from beyond the tracker is left alone."""
    (tmp_path / "iter_0000099").mkdir()
    for step in (10, 20, 30, 40):
        policies.save(policy, tmp_path, step, keep_last=2)
    assert written(tmp_path) == ["iter_0000030", "iter_0000040", "iter_0000099", TRACKER]
    policies.save(policy, tmp_path, 50, keep_last=1)
    assert written(tmp_path) == ["iter_0000050", "iter_0000099", TRACKER]
    policies.save(policy, tmp_path, 60)
    assert written(tmp_path) == ["iter_0000050", "iter_0000060", "iter_0000099", TRACKER]


def test_old_ones_go_when_the_tracker_names_the_new_one(policy, tmp_path, monkeypatch):
    policies.save(policy, tmp_path, 1, keep_last=1)
    seen = []
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path: seen.append((path.name, checkpoint.latest_iteration(tmp_path))))
    policies.save(policy, tmp_path, 2, keep_last=1)
    assert seen == [(".iter_0000001.removed", 2)]


def test_what_a_killed_save_left_is_removed_by_the_next(policy, tmp_path):
    for torn in (".iter_0000001.partial", ".iter_0000000.removed"):
        (tmp_path / torn).mkdir()
    policies.save(policy, tmp_path, 2)
    assert written(tmp_path) == ["iter_0000002", TRACKER]


def saver(policy, root: Path, **options) -> checkpoint.Saver:
    return checkpoint.Saver(root, asynchronous=True, **options)


def test_an_asynchronous_save_holds_the_weights_of_its_iteration(folders, policy, tmp_path):
    """Training goes on while it is written; it is the latest once finished, with the same bytes as a synchronous one."""
    policies.step(policy, ONE, 0)
    policies.save(policy, tmp_path / "sync", 1)
    background = saver(policy, tmp_path / "async")
    background.save(1, policy.chunks, policy.optimizer, policy.config, {})
    policies.step(policy, ONE, 0)
    assert not (tmp_path / "async" / TRACKER).exists()
    background.finish()
    assert checkpoint.latest_iteration(tmp_path / "async") == 1
    model = policies.architecture(folders[0])
    ours, theirs = (policies.everything(tmp_path / name, model) for name in ("async", "sync"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and len(theirs) > 20


def test_the_next_save_finishes_the_one_before(policy, tmp_path):
    background = saver(policy, tmp_path, keep_last=1)
    for step in (1, 2):
        background.save(step, policy.chunks, policy.optimizer, policy.config, {})
    assert checkpoint.latest_iteration(tmp_path) == 1
    background.finish()
    background.finish()
    assert written(tmp_path) == ["iter_0000002", TRACKER]


def test_a_written_save_is_named_in_passing(policy, tmp_path):
    """``poll`` does not wait, and names what is done."""
    background = saver(policy, tmp_path)
    background.save(1, policy.chunks, policy.optimizer, policy.config, {})
    deadline = time.monotonic() + 60
    while not (tmp_path / TRACKER).exists() and time.monotonic() < deadline:
        background.poll()
        time.sleep(0.05)
    assert checkpoint.latest_iteration(tmp_path) == 1


def test_other_masters_are_refused(folders, policy, tmp_path):
    policies.save(policy, tmp_path, 1)
    other = policies.build(policies.architecture(folders[0]), ONE, bf16=True)
    with pytest.raises(checkpoint.ConfigError, match="training.bf16 is True, the checkpoint in .* was made with False: set it back"):
        policies.resume(other, tmp_path)


# --- killed ----------------------------------------------------------------------------------------------------------


def save_and_stop(rank: int, port: int, root: Path, hf: Path, where: str) -> None:
    """Saves iteration 1; stops in the middle of saving 2, says so, and waits to be killed."""
    policies.join(rank, port, ONE)
    policy = policies.fill(policies.build(policies.architecture(hf), ONE))
    policies.save(policy, root, 1)
    policies.step(policy, ONE, rank)

    def stop(*args, **kwargs):
        (root.parent / "stopped").write_text(str(os.getpid()))
        time.sleep(600)

    if where == "shards":  # some are there, the metadata is not
        import torch.distributed.checkpoint.filesystem as files

        files.FileSystemWriter.finish = stop
        checkpoint.dist_checkpointing.serialization.save_config = stop
    elif where == "tracker":  # the checkpoint is whole and has its name
        checkpoint.os.replace = stop
    elif where == "asynchronous":  # written, never finished
        checkpoint.Saver(root, asynchronous=True).save(2, policy.chunks, policy.optimizer, policy.config, {})
        stop()
    policies.save(policy, root, 2)


@pytest.mark.parametrize("where", ["shards", "tracker", "asynchronous"])
def test_a_killed_save_leaves_the_one_before(folders, policy, tmp_path, where):
    root = tmp_path / "checkpoints"
    worker = multiprocessing.get_context("spawn").Process(target=save_and_stop, args=(0, free_port(), root, folders[0], where))
    worker.start()
    deadline = time.monotonic() + 120
    while not (tmp_path / "stopped").exists():
        assert worker.is_alive() and time.monotonic() < deadline, f"exit code {worker.exitcode}"
        time.sleep(0.05)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert [path.name for path in root.glob("*iter_0000002*")], "the second save had begun"
    assert checkpoint.latest_iteration(root) == 1
    assert policies.resume(policy, root)[0] == 1
    policies.save(policy, root, 2)
    assert written(root) == ["iter_0000001", "iter_0000002", TRACKER]
