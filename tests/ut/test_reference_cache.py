"""The file of the reference's log-probs: computed once, found again, refused when it was made from something else.

The reference here is a formula; that cached numbers are a model's is shown in test_train_offline.py.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from offline import LONG, ROWS, load, make_config, write_rows
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mindspeed_odpo.errors import ConfigError, DataError, WorkerError
from mindspeed_odpo.roles.reference_cache import ReferenceCache, _model_files, _sha256


class Formula:
    """Row and answer in one number; notes how many rows each call had."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, rollout):
        self.calls.append(len(rollout))
        return -(rollout.prompt_index[:, None] * 10.0 + torch.arange(2) + 1)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cache_of(home: Path, **overrides) -> ReferenceCache:
    config = make_config(home, **overrides)
    return ReferenceCache(config, load(config))


EXPLICIT = {"actor_rollout_ref__ref__logps_cache": "kept/here.safetensors"}


def test_computed_once_and_found_again(home):
    """The same table by row of the file, NaN where a row was left out; the file lies in runs/ref_logps under the data's name."""
    cache, reference = cache_of(home), Formula()
    assert cache.read() is None
    table = cache.fill(reference)
    assert table.dtype == torch.float32 and table.shape == (12, 2)
    assert table[:2].tolist() == [[-1, -2], [-11, -12]] and table[LONG].isnan().all() and table.isnan().sum() == 2
    again = cache_of(home)
    torch.testing.assert_close(again.read(), table, rtol=0, atol=0, equal_nan=True)
    assert again.path == cache.path and cache.path.parent == home / "runs" / "ref_logps" and cache.path.name.startswith("rows-")
    assert [path.name for path in cache.path.parent.iterdir()] == [cache.path.name]  # nothing half-written beside it


def test_the_file_itself(home):
    cache = cache_of(home, **EXPLICIT)
    cache.fill(Formula())
    tensors = load_file(home / "kept" / "here.safetensors")
    assert tensors["row"].tolist() == [i for i in range(12) if i != LONG] and tensors["ref_logps"].dtype == torch.float32


def test_every_rank_gets_as_many_rows(home):
    """Eleven rows over three ranks: the last call is filled up and what was added is dropped again."""
    config = make_config(home)
    three = replace(config, reference=replace(config.reference, micro_batch_size=1, parallel=replace(config.reference.parallel, data=3)))
    reference = Formula()
    table = ReferenceCache(three, load(config)).fill(reference)
    assert reference.calls == [12]
    torch.testing.assert_close(table, cache_of(home, **EXPLICIT).fill(Formula()), equal_nan=True)


def test_order_and_batches_do_not_make_it_stale(home):
    cache = cache_of(home, **EXPLICIT)
    cache.fill(Formula())
    other = {"training__seed": 9, "training__global_batch_size": 2, "training__train_iters": 99, "actor_rollout_ref__actor_rollout__lr": 1}
    assert cache_of(home, **EXPLICIT, **other).read() is not None


def _other_weights(home):
    from tiny import make_tiny_hf

    make_tiny_hf(home / "model", seed=5)
    return {}


def _other_template(home):
    path = home / "model" / "chat_template.jinja"
    path.write_text("Hello. " + path.read_text())
    return {}


def _other_data(home):
    write_rows(home / "rows.jsonl", [{**ROWS[0], "chosen": "maybe"}, *ROWS[1:]])
    return {}


CHANGES = [
    (_other_weights, "made from another model than"),
    (_other_template, "made from another tokenizer, chat template or system prompt than"),
    (_other_data, "made from another data file than"),
    (lambda home: {"actor_rollout_ref__actor_rollout__system_prompt": "kind"}, "another tokenizer, chat template or system prompt"),
    (lambda home: {"actor_rollout_ref__actor_rollout__answer_mask": "dialogue"}, "other settings (answer_mask answer, seq_length 64"),
    (lambda home: {"training__seq_length": 300}, "now answer_mask answer, seq_length 300"),
    (lambda home: {"training__bf16": "true"}, "precision bf16"),
    (lambda home: {"actor_rollout_ref__ref__rotary_interleaved": "true"}, "made from another model than"),
    (lambda home: {"actor_rollout_ref__ref__attention_softmax_in_fp32": "true"}, "made from another model than"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_a_stale_file_is_refused_and_told_apart(home, change, said):
    """Named in the config: an error with what differs and the cure. Unnamed: another file, so the reference is asked again."""
    cache_of(home, **EXPLICIT).fill(Formula())
    cache_of(home).fill(Formula())
    overrides = change(home)
    with pytest.raises(ConfigError) as error:
        cache_of(home, **EXPLICIT, **overrides).read()
    assert said in str(error.value) and "Delete the file" in str(error.value) and "\n" not in str(error.value)
    assert cache_of(home, **overrides).read() is None


def test_a_reference_in_a_checkpoint_is_known_by_its_latest_iteration(tmp_path):
    """Another iteration, or other bytes in it, is another model; older iterations beside it are not looked at."""
    for step, text in ((1, "one"), (2, "two")):
        (tmp_path / f"iter_{step:07d}").mkdir()
        (tmp_path / f"iter_{step:07d}" / "shard").write_text(text)
    tracker, shards = tmp_path / "latest_checkpointed_iteration.txt", [tmp_path / f"iter_{n:07d}" / "shard" for n in (1, 2)]
    tracker.write_text("2\n")
    second = _sha256(_model_files(tmp_path))
    shards[0].write_text("changed")
    assert _model_files(tmp_path) == [shards[1]] and _sha256(_model_files(tmp_path)) == second
    shards[1].write_text("owt")
    assert _sha256(_model_files(tmp_path)) != second
    tracker.write_text("1\n")
    assert _model_files(tmp_path) == [shards[0]]


def test_tokens_that_came_out_otherwise_are_refused(home, monkeypatch):
    """A template that writes the date, or another tokenizer library: every file is the same and the ids are not."""
    cache_of(home, **EXPLICIT).fill(Formula())
    cache = cache_of(home, **EXPLICIT)
    monkeypatch.setattr(cache.data, "digest", lambda: "another day")
    with pytest.raises(ConfigError, match="made from other tokens"):
        cache.read()


def test_a_file_that_is_none(home):
    cache = cache_of(home, **EXPLICIT)
    cache.path.parent.mkdir()
    cache.path.write_bytes(b"half")
    with pytest.raises(DataError, match=r"here\.safetensors: no readable safetensors file .*delete it"):
        cache.read()
    save_file({"weight": torch.zeros(1)}, cache.path)
    with pytest.raises(ConfigError, match=r"here\.safetensors: not a file of reference log-probs"):
        cache.read()


@pytest.mark.parametrize("place", ["rows.jsonl/x", "model"])
def test_a_place_that_cannot_be_written_is_told_before_the_work(home, place):
    cache = cache_of(home, actor_rollout_ref__ref__logps_cache=place)
    with pytest.raises(ConfigError, match="ref.logps_cache: .* (cannot be written|is a folder; name a file in it)"):
        cache.check_place()
        cache.read()


def test_a_file_with_a_nan_or_another_precision_is_refused(home):
    cache = cache_of(home)
    cache.fill(Formula())
    with safe_open(cache.path, framework="pt") as file:
        told, good = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    save_file({**good, "ref_logps": good["ref_logps"] * float("nan")}, cache.path, told)
    with pytest.raises(DataError, match="log-probs are not finite; delete it"):
        cache.read()
    save_file({**good, "ref_logps": good["ref_logps"].double()}, cache.path, told)
    with pytest.raises(DataError, match="delete it, it will be made anew"):
        cache.read()


def test_rows_of_another_count_are_refused(home):
    cache = cache_of(home, **EXPLICIT)
    cache.path.parent.mkdir()
    save_file({"row": torch.arange(3), "ref_logps": torch.zeros(3, 2)}, cache.path, metadata=dict(cache.parts))
    with pytest.raises(DataError, match="3 rows where 11 are used"):
        cache.read()


def test_numbers_that_are_not_finite_are_not_kept(home):
    cache = cache_of(home, **EXPLICIT)
    with pytest.raises(WorkerError, match=r"of row 4 \(from 0\) are not finite"):
        cache.fill(lambda rollout: Formula()(rollout).masked_fill(rollout.prompt_index[:, None] == 4, float("nan")))
    assert not cache.path.exists()


def test_a_write_that_fails_leaves_no_cache(home, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    cache = cache_of(home, **EXPLICIT)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        cache.fill(Formula())
    assert cache.read() is None


@pytest.mark.parametrize("part", ["model", "template", "data", "settings", "tokens"])
def test_mutant_key_without_a_part_is_caught(home, part):
    """A cache that forgets one part of its key takes a stale file for a good one; each part is needed to tell some change."""
    cache = cache_of(home, **EXPLICIT)
    cache.fill(Formula())
    stale = cache_of(home, **EXPLICIT)
    stale.parts = {**stale.parts, part: "changed"}
    with pytest.raises(ConfigError):
        stale.read()
    stale.parts = {name: value for name, value in stale.parts.items() if name != part}
    assert stale.read() is not None
    assert json.dumps(stale.parts) != json.dumps(cache.parts)
