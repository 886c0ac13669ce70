"""The rollout engine ``replay``: what a run's log recorded comes back as the same Rollout; a file that does not fit is refused.

Does not show that training on replayed answers equals the recorded run: benchmarks/trl_parity.py does.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from byte_tokenizer import EOS, byte_tokenizer

from mindspeed_odpo.config import DataConfig, PairsConfig
from mindspeed_odpo.data.prompts import Prompts
from mindspeed_odpo.errors import DataError, WorkerError
from mindspeed_odpo.pairs import make_pairs
from mindspeed_odpo.report.run_log import RunLog
from mindspeed_odpo.roles.replay import ReplayEngine
from mindspeed_odpo.types import PromptBatch, Rollout, StepStats

VOCAB = 266
PROMPTS = ["one \U0001f600", [{"role": "user", "content": "two\u2028lines"}], "three", "four", "five"]


def config(path: Path, **changes) -> SimpleNamespace:
    settings = {"num_answers": 2, "max_new_tokens": 4, "iterations": 1, "batch": 2, **changes}
    return SimpleNamespace(
        train_iters=settings["iterations"],
        global_batch_size=settings["batch"],
        data=SimpleNamespace(prompt_key="ask"),
        rollout=SimpleNamespace(
            replay=path,
            num_answers=settings["num_answers"],
            max_new_tokens=settings["max_new_tokens"],
            model=SimpleNamespace(vocab_size=VOCAB),
        ),
    )


def engine(path: Path, **changes) -> ReplayEngine:
    return ReplayEngine(config(path, **changes), SimpleNamespace(eos_ids=lambda: (EOS,)))


def batch(step: int = 1, rows: tuple[int, ...] = (7, 3)) -> PromptBatch:
    """Prompts of the rows ``rows`` of a data file, texts 'p7', 'p3'."""
    mask = torch.ones(len(rows), 2, dtype=torch.bool)
    data = tuple({"ask": f"p{row}", "topic": "t"} for row in rows)
    return PromptBatch(step, torch.full((len(rows), 2), 11), mask, torch.tensor(rows), torch.arange(len(rows)), data)


def record(row: int, *answers: list[int], step: int = 1, version: int = 0, **changes) -> dict:
    finished = [EOS in answer for answer in answers]
    whole = {"step": step, "policy_version": version, "prompt": f"p{row}", "prompt_index": row, "answer_ids": answers, "finished": finished}
    return {**whole, **changes}


def write(path: Path, *rows: dict | str) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def two(tmp_path) -> Path:
    return write(tmp_path / "completions.jsonl", record(7, [5, EOS], [5, 6, 7, 8]), record(3, [9, 9, EOS], []))


# -- what comes back ----------------------------------------------------------------------------------------------------


def test_a_small_file_by_hand(two):
    """Four answers of 2, 4, 3 and 0 tokens: ids padded with 0 to 4, masks by length, the last one empty."""
    replay = engine(two)
    replay.load_weights(5, iter(()))
    out = replay.generate(batch())
    assert out.response_ids.tolist() == [[[5, EOS, 0, 0], [5, 6, 7, 8]], [[9, 9, EOS, 0], [0, 0, 0, 0]]]
    assert out.lengths().tolist() == [[2, 4], [3, 0]]
    assert out.response_mask[0, 0].tolist() == [True, True, False, False]
    assert out.finished.tolist() == [[True, False], [True, False]]
    assert out.prompt_index.tolist() == [7, 3]
    assert (out.policy_version, replay.version) == (0, 5)


def test_answers_follow_the_prompt_not_the_order_of_lines(two):
    """The batch asks for row 3 first: it gets row 3's answers."""
    assert engine(two).generate(batch(rows=(3, 7))).lengths().tolist() == [[3, 0], [2, 4]]


def test_only_empty_answers(tmp_path):
    path = write(tmp_path / "c.jsonl", record(7, [], []))
    out = engine(path, batch=1).generate(batch(rows=(7,)))
    assert out.response_ids.shape == (1, 2, 1) and not out.response_mask.any() and not out.finished.any()


def test_weights_are_not_read(two):
    """An iterator that would fail when read: nothing is copied."""

    def items():
        raise AssertionError("read")
        yield

    engine(two).load_weights(1, items())


def same(a: Rollout, b: Rollout) -> bool:
    """Equal in everything that counts: what stands on padding does not."""
    ids = [x.response_ids.masked_fill(~x.response_mask, 0) for x in (a, b)]
    pairs = [(a.prompt_ids, b.prompt_ids), (a.prompt_mask, b.prompt_mask), (a.response_mask, b.response_mask), (a.finished, b.finished)]
    equal = all(torch.equal(x, y) for x, y in [*pairs, (a.prompt_index, b.prompt_index), ids])
    return equal and a.policy_version == b.policy_version


def answers(prompts: PromptBatch, seed: int) -> Rollout:
    """Random answers of 1 to 6 tokens of plain bytes, some ended by an EOS, all different."""
    g = torch.Generator().manual_seed(seed)
    p, k, r = len(prompts), 3, 6
    lengths = torch.randint(1, r + 1, (p, k), generator=g)
    lengths[0, 0] = r
    finished = (torch.rand(p, k, generator=g) < 0.5) | (lengths < r)
    response = torch.randint(42, 137, (p, k, r), generator=g)
    response.scatter_(
        2, (lengths - 1)[..., None], torch.where(finished, EOS, response.gather(2, (lengths - 1)[..., None])[..., 0])[..., None]
    )
    mask = torch.arange(r) < lengths[..., None]
    return Rollout(
        prompts.ids, prompts.mask, response.masked_fill(~mask, 0), mask, finished, prompts.index, policy_version=prompts.step - 1
    ).check()


@pytest.fixture
def recorded(tmp_path) -> tuple[Prompts, dict[int, Rollout], Path]:
    """Three iterations of four prompts, written by the run log. Five rows of data: a batch may span two epochs."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"ask": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8")
    prompts = Prompts(DataConfig(path=data, prompt_key="ask"), byte_tokenizer(), max_prompt_length=64, batch_size=4, seed=1)
    run_config = SimpleNamespace(
        run_dir=tmp_path / "run",
        train_iters=3,
        pairs=PairsConfig(),
        data=SimpleNamespace(prompt_key="ask"),
    )
    rollouts = {}
    with RunLog(run_config, 0, prompts) as log:
        for step in (1, 2, 3):
            with log.step(step) as timed, timed("rollout"):
                rollouts[step] = answers(prompts.batch(step), seed=step)
            scores = torch.rand(4, 3, generator=torch.Generator().manual_seed(step))
            pairs = make_pairs(scores, rollouts[step], PairsConfig())
            log.record(rollouts[step], scores, pairs, StepStats(defaultdict(float), 4), beta=0.1)
    return prompts, rollouts, tmp_path / "run" / "completions.jsonl"


LOGGED = {"num_answers": 3, "max_new_tokens": 6, "iterations": 3, "batch": 4}


def test_a_runs_completions_are_replayed_as_they_are(recorded):
    """Every field equals what the log was given, in every iteration, whatever order they are asked in."""
    prompts, rollouts, path = recorded
    replay = engine(path, **LOGGED)
    for step in (3, 1, 2):
        assert same(replay.generate(prompts.batch(step)), rollouts[step])


def test_data_parallel_ranks_get_their_prompts(recorded):
    """Two ranks with two prompts each, and any order of prompts: the same answers as the whole batch."""
    prompts, rollouts, path = recorded
    for step, rollout in rollouts.items():
        whole = prompts.batch(step)
        parts = [engine(path, **LOGGED).generate(whole.select(share)) for share in ([0, 1], [2, 3])]
        assert same(Rollout.concat(parts), rollout)
        assert same(Rollout.concat([engine(path, **LOGGED).generate(whole.select([2, 0, 3, 1]))]), rollout.select([2, 0, 3, 1]))


def test_a_prompt_that_a_batch_holds_twice(tmp_path):
    """A batch longer than the data: both visits have answers of their own, told apart by their place, on any rank."""
    path = write(tmp_path / "c.jsonl", record(7, [5, EOS], [6]), record(3, [4], [4, 4]), record(7, [8], [9, 9, 9]))
    replay, whole = engine(path, batch=3), batch(rows=(7, 3, 7))
    assert replay.generate(whole).lengths().tolist() == [[2, 1], [1, 2], [1, 3]]
    assert replay.generate(whole.select([2])).lengths().tolist() == [[1, 3]]


def by_line(self, step, index, slot, prompt):
    return self._steps[step][slot]


def by_index_alone(self, step, index, slot, prompt):
    return next(record for records in self._steps.values() for record in records if record.index == index)


def first_visit(self, step, index, slot, prompt):
    return next(record for record in self._steps[step] if record.index == index)


@pytest.mark.parametrize("wrong", [by_line, by_index_alone, first_visit])
def test_mutant_wrong_records_are_seen(tmp_path, two, recorded, monkeypatch, wrong):
    """Wrong ways to look a record up: by line order, in any iteration, always the first visit. Each fails a check above."""
    monkeypatch.setattr(ReplayEngine, "_find", wrong)
    with pytest.raises(AssertionError):
        test_answers_follow_the_prompt_not_the_order_of_lines(two)
        test_a_runs_completions_are_replayed_as_they_are(recorded)
        test_a_prompt_that_a_batch_holds_twice(tmp_path)


# -- what is refused ----------------------------------------------------------------------------------------------------

GOOD = record(3, [9, EOS], [1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 1, "prom', r":2: not JSON .*half a line, delete it"),
        ("[1]", r":2: expected a JSON object, found a list"),
        ({"prompt": "p7"}, r":2: step: expected a number, found nothing"),
        (record(7, [5], [6], prompt=None), r":2: prompt: expected a text or messages, found None"),
        (record(7, [5], [6], prompt_index=True), r":2: prompt_index: expected a number, found True"),
        (record(7, [5], [6], step=0), r":2: step 0: iterations count from 1"),
        (record(7, [5], [6], [7]), r":2: 3 answers and 3 flags 'finished', n_samples_per_prompt is 2; set it"),
        (record(7, [5], [6], finished=[True]), r":2: 2 answers and 1 flags"),
        (record(7, [5], [6, VOCAB]), r":2: token id 266 lies outside the vocabulary of 266"),
        (record(7, [5], [-1]), r":2: token id -1 lies outside"),
        (record(7, [5], [6.0]), r":2: expected token ids and a flag for each answer, found \[6.0\]"),
        (record(7, [5], [6], answer_ids=[[5], "ab"]), r":2: expected token ids .* found 'ab'"),
        (record(7, [5], [6], finished=[0, False]), r":2: expected token ids .* and 0"),
        (record(7, [5], [6] * 5), r":2: an answer of 5 tokens, max_new_tokens is 4; raise training.seq_length by 1"),
        (record(7, [5], [6, 7], finished=[False, True]), r":2: an answer of 2 tokens with finished true has its EOS ids \[2\] at no place"),
        (record(7, [5], [6, EOS], finished=[False, False]), r":2: .* finished false has its EOS ids \[2\] at \[2\]"),
        (record(7, [5], [EOS, 6]), r":2: .* at \[1\]"),
        (record(7, [5], [6], version=4), r":2: policy_version 4, line 1 of the same iteration has 0"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    """File and line, what was found, and the cure; all before the first iteration."""
    with pytest.raises(DataError, match=message) as error:
        engine(write(tmp_path / "c.jsonl", GOOD, line))
    assert "\n" not in str(error.value)


def test_a_missing_or_empty_file(tmp_path):
    with pytest.raises(DataError, match=r"replay_path: no file .*gone.jsonl; give the completions.jsonl"):
        engine(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match="0 records"):
        engine(write(tmp_path / "c.jsonl", ""))


def test_a_step_that_was_not_recorded(tmp_path, two):
    """Told at the start where the record is too short or has a hole, and in any case when it is asked for."""
    with pytest.raises(DataError, match="iteration 2 is not recorded, 1 to 1 are; set training.train_iters"):
        engine(two, iterations=3)
    with pytest.raises(DataError, match="iteration 9 is not recorded"):
        engine(two).generate(batch(step=9))
    hole = write(tmp_path / "hole.jsonl", *(record(7, [5], [6], step=step) for step in (1, 3)))
    with pytest.raises(DataError, match="iteration 2 is not recorded, 1 to 3 are"):
        engine(hole, iterations=3, batch=1)


def test_a_record_that_is_there_twice(tmp_path):
    """Two runs in one file, or a line copied: which one is meant cannot be known."""
    path = write(tmp_path / "c.jsonl", record(7, [5], [6]), GOOD, record(7, [8], [9]))
    with pytest.raises(DataError, match=r"iteration 1 has 3 records \(prompt_index 7 in the lines 1, 3\), global_batch_size is 2"):
        engine(path)


def test_another_batch_size(two):
    with pytest.raises(DataError, match="iteration 1 has 2 records, global_batch_size is 4"):
        engine(two, batch=4)


def test_other_prompts_than_the_recorded_ones(two):
    """Another shuffle or seed gives another row; edited data another text."""
    with pytest.raises(
        DataError, match=r"iteration 1, place 1 of its batch: the data gives prompt_index 4, recorded are 7, 3; replay with"
    ):
        engine(two).generate(batch(rows=(7, 4)))
    edited = batch()
    rows = (edited.rows[0], {"ask": "another text"})
    with pytest.raises(DataError, match=r"completions.jsonl:2: prompt_index 3 was 'p3', the data has 'another text' there"):
        engine(two).generate(PromptBatch(1, edited.ids, edited.mask, edited.index, edited.slot, rows))


def test_greedy_answers_are_not_recorded(two):
    with pytest.raises(WorkerError, match="recorded answers only"):
        engine(two).generate(batch(), greedy=True)
