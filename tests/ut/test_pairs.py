"""Scores to pairs: which answer is preferred, and which prompts are dropped and why."""

from __future__ import annotations

import pytest
import torch

from mindspeed_odpo.errors import WorkerError
from mindspeed_odpo.pairs import make_pairs, penalised
from mindspeed_odpo.types import Rollout

NAN = float("nan")


def rollout(answers: list[list[list[int]]], finished: list[list[bool]] | None = None) -> Rollout:
    """Answers ``[P][K][length]`` behind a one-token prompt."""
    p, k = len(answers), len(answers[0])
    r = max(len(a) for row in answers for a in row) or 1
    ids, mask = torch.zeros(p, k, r, dtype=torch.int64), torch.zeros(p, k, r, dtype=torch.bool)
    for i, row in enumerate(answers):
        for j, answer in enumerate(row):
            ids[i, j, : len(answer)] = torch.tensor(answer, dtype=torch.int64)
            mask[i, j, : len(answer)] = True
    done = torch.ones(p, k, dtype=torch.bool) if finished is None else torch.tensor(finished)
    one = torch.ones(p, 1, dtype=torch.int64)
    return Rollout(one, one.bool(), ids, mask, done, torch.arange(p), 0).check()


def pairs(scores: list[list[float]], answers: list[list[list[int]]] | None = None, finished=None, penalty: float = 0.0):
    answers = answers or [[[10 + j, 2] for j in range(len(row))] for row in scores]
    return make_pairs(torch.tensor(scores), rollout(answers, finished), penalty)


def test_the_higher_score_is_chosen_whichever_sample_it_is():
    """Each prompt by itself: upstream 2.0.0 chose the first sample in a batch of several, whatever the scores."""
    got = pairs([[0.0, 1.0], [1.0, 0.0], [-3.0, -2.0]])
    assert got.chosen.tolist() == [1, 0, 1]
    assert got.rejected.tolist() == [0, 1, 0]
    assert got.keep.tolist() == [True, True, True]
    assert got.margin.tolist() == [1.0, 1.0, 1.0]


def test_of_four_answers_best_and_worst_are_taken():
    got = pairs([[1.0, 4.0, 2.0, 3.0]])
    assert (got.chosen.item(), got.rejected.item(), got.margin.item()) == (1, 0, 3.0)


def test_a_tie_is_dropped_and_counted():
    got = pairs([[0.5, 0.5], [0.0, 1.0]])
    assert got.keep.tolist() == [False, True]
    assert got.reason == ("tie", None)
    assert got.margin.tolist() == [0.0, 1.0]


def test_identical_answers_with_different_scores_are_dropped():
    """A noisy judge may score the same text twice; there is nothing to prefer."""
    got = pairs([[0.0, 1.0]], answers=[[[5, 6, 2], [5, 6, 2]]])
    assert got.keep.tolist() == [False]
    assert got.reason == ("identical",)


def test_an_answer_that_is_a_prefix_of_the_other_is_not_identical():
    got = pairs([[0.0, 1.0]], answers=[[[5, 6], [5, 6, 2]]])
    assert got.keep.tolist() == [True]


def test_an_unscored_answer_is_neither_chosen_nor_rejected():
    """With three answers the other two are compared; with two the prompt is dropped (a None once beat a negative score)."""
    got = pairs([[NAN, -0.8, -0.9], [NAN, -0.8, NAN]])
    assert got.chosen[0].item() == 1 and got.rejected[0].item() == 2
    assert got.keep.tolist() == [True, False]
    assert got.reason == (None, "no_score")


def test_an_empty_answer_is_not_used():
    got = pairs([[5.0, 1.0]], answers=[[[], [3, 2]]])
    assert got.keep.tolist() == [False]
    assert got.reason == ("no_score",)


def test_the_eos_penalty_is_subtracted_before_the_comparison():
    """Scores 1.0 (no EOS) and 0.8 (EOS), penalty 1: 0.0 against 0.8, the second is chosen, margin 0.8."""
    got = pairs([[1.0, 0.8]], finished=[[False, True]], penalty=1.0)
    assert got.chosen.item() == 1
    assert got.margin.item() == pytest.approx(0.8)


def test_the_penalty_keeps_the_order_of_unfinished_answers_and_the_input():
    scores = torch.tensor([[1.0, 2.0]])
    got = penalised(scores, torch.tensor([[False, False]]), 0.5)
    assert got.tolist() == [[0.5, 1.5]]
    assert scores.tolist() == [[1.0, 2.0]]


def test_pairs_follow_their_prompt_when_prompts_are_shuffled():
    scores = torch.tensor([[0.0, 1.0], [3.0, 2.0], [1.0, 1.0], [5.0, 9.0]])
    answers = [[[10 * i + j, 2] for j in range(2)] for i in range(1, 5)]
    order = [2, 0, 3, 1]
    straight = make_pairs(scores, rollout(answers))
    shuffled = make_pairs(scores[order], rollout(answers).select(order))
    for name in ("chosen", "rejected", "keep", "margin"):
        assert torch.equal(getattr(straight, name)[order], getattr(shuffled, name)), name


@pytest.mark.parametrize(("scores", "got"), [(torch.zeros(2, 3), r"\[2, 3\]"), (torch.zeros(2, 2, dtype=torch.float64), "float64")])
def test_scores_of_the_wrong_shape_or_type_are_refused(scores, got):
    with pytest.raises(WorkerError, match=rf"scores: expected float32 \[P=2, K=2\].*{got}"):
        make_pairs(scores, rollout([[[5, 2], [6, 2]]] * 2))
