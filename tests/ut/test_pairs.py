"""Scores to pairs: which answers meet, which is preferred, which pairs are left out and why. Every number is worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mindspeed_odpo import pairs as module
from mindspeed_odpo.config import PairsConfig
from mindspeed_odpo.errors import WorkerError
from mindspeed_odpo.loss import preference_loss
from mindspeed_odpo.types import REASONS, Pairs, Rollout

NAN, INF = float("nan"), float("inf")
EOS = 2
FIELDS = ("chosen", "rejected", "margin", "reason")
SELECTS = ("best_worst", "best_random", "all")


def rollout(answers: list[list[list[int]]], finished: list[list[bool]] | None = None) -> Rollout:
    """Answers ``[P][K][length]`` behind a one-token prompt, which is an EOS id: only answers may be looked at. Padding ids differ."""
    p, k = len(answers), len(answers[0])
    r = max(len(a) for row in answers for a in row) or 1
    ids, mask = torch.arange(900, 900 + p * k * r).view(p, k, r), torch.zeros(p, k, r, dtype=torch.bool)
    for i, row in enumerate(answers):
        for j, answer in enumerate(row):
            ids[i, j, : len(answer)] = torch.tensor(answer, dtype=torch.int64)
            mask[i, j, : len(answer)] = True
    done = torch.ones(p, k, dtype=torch.bool) if finished is None else torch.tensor(finished)
    prompt = torch.full((p, 1), EOS)
    return Rollout(prompt, prompt.bool(), ids, mask, done, torch.arange(p) + 40, 0).check()


def pairs(scores: list[list[float]], answers: list[list[list[int]]] | None = None, finished: list[list[bool]] | None = None, **options):
    answers = answers or [[[10 + j, EOS] for j in range(len(row))] for row in scores]
    got = module.make_pairs(torch.tensor(scores), rollout(answers, finished), PairsConfig(**options))
    return got.check(len(scores), len(scores[0]))


def reasons(got: Pairs) -> list[list[str]]:
    return [[REASONS[code] for code in row] for row in got.reason.tolist()]


def met(got: Pairs, p: int = 0) -> list[tuple[int, int]]:
    return list(zip(got.chosen[p].tolist(), got.rejected[p].tolist(), strict=True))


# -- best against worst -------------------------------------------------------------------------------------------------


def test_the_higher_score_is_chosen_whichever_sample_it_is():
    """Each prompt by itself: upstream 2.0.0 chose the first sample in a batch of several, whatever the scores."""
    got = pairs([[0.0, 1.0], [1.0, 0.0], [-3.0, -2.0]])
    assert got.chosen.tolist() == [[1], [0], [1]]
    assert got.rejected.tolist() == [[0], [1], [0]]
    assert got.margin.tolist() == [[1.0], [1.0], [1.0]]
    assert reasons(got) == [["kept"]] * 3


@pytest.mark.parametrize(
    ("scores", "pair", "margin"),
    [([1.0, 4.0], (1, 0), 3.0), ([2.0, 1.0, 3.0], (2, 1), 2.0), ([1.0, 4.0, 2.0, 3.0], (1, 0), 3.0), ([3.0, 1.0, 3.0, 1.0], (0, 1), 2.0)],
)
def test_of_two_three_and_four_answers_best_and_worst_are_taken(scores, pair, margin):
    """All K answers are looked at; of equals the first is taken."""
    got = pairs([scores])
    assert (met(got), got.margin.item()) == ([pair], margin)


def test_answers_past_the_second_are_looked_at():
    got = pairs([[2.0, 3.0, 1.0, 4.0]])
    assert met(got) == [(3, 2)] and got.margin.item() == 3.0


# -- best against a random worse one ------------------------------------------------------------------------------------


def drawn(scores: list[float], draws: int = 400, seed: int = 0, **options) -> list[int]:
    """The rejected answers of many iterations."""
    tensor, batch = torch.tensor([scores]), rollout([[[10 + j, EOS] for j in range(len(scores))]])
    config = PairsConfig(select="best_random", **options)
    return [module.make_pairs(tensor, batch, config, seed, step).rejected.item() for step in range(draws)]


def test_best_random_draws_evenly_among_the_lower_ones():
    """Scores 1, 4, 2, 4: the first 4 is best, 0 and 2 score lower, the other 4 does not. 400 draws: 200 each, four sigmas are 40."""
    got = drawn([1.0, 4.0, 2.0, 4.0])
    assert set(got) == {0, 2}
    assert abs(got.count(0) - 200) <= 40


def test_best_random_of_two_answers_is_best_against_worst():
    assert set(drawn([1.0, 4.0], draws=8)) == {0} and set(drawn([4.0, 1.0], draws=8)) == {1}


def test_best_random_never_draws_an_answer_without_score():
    assert set(drawn([NAN, 4.0, 2.0, 1.0], draws=40)) == {2, 3}


def test_the_draw_depends_on_seed_step_and_row_of_the_data():
    """One of them changed gives other draws; none changed gives the same ones. The two numbers hold on every machine."""
    assert drawn([3.0, 1.0, 2.0], 40) == drawn([3.0, 1.0, 2.0], 40) != drawn([3.0, 1.0, 2.0], 40, seed=1)
    scores, batch = torch.tensor([[3.0, 1.0, 2.0]] * 40), rollout([[[5, EOS], [6, EOS], [7, EOS]]] * 40)
    got = module.make_pairs(scores, batch, PairsConfig(select="best_random"), seed=5, step=6)
    assert len(set(got.rejected.flatten().tolist())) == 2
    assert (module._draw((0, 0, 0), 1000), module._draw((1, 2, 3), 1000)) == (228, 736)


# -- every two answers --------------------------------------------------------------------------------------------------


def test_all_makes_every_two_answers_a_pair():
    """Scores 1, 4, 2: (0,1) 4 over 1, (0,2) 2 over 1, (1,2) 4 over 2."""
    got = pairs([[1.0, 4.0, 2.0]], select="all")
    assert met(got) == [(1, 0), (2, 0), (1, 2)]
    assert got.margin.tolist() == [[3.0, 1.0, 2.0]]


@pytest.mark.parametrize(("k", "m"), [(2, 1), (3, 3), (4, 6)])
def test_all_makes_k_times_k_less_one_over_two(k, m):
    assert pairs([[float(i) for i in range(k)]] * 2, select="all").chosen.shape == (2, m)


def test_each_pair_of_all_has_its_own_reason():
    """Scores none, 1, 1, 2 and an empty last answer: pairs (0,1) (0,2) (0,3) without score, (1,2) tie, (1,3) (2,3) empty."""
    got = pairs([[NAN, 1.0, 1.0, 2.0]], answers=[[[5, EOS], [6, EOS], [7, EOS], []]], select="all")
    assert reasons(got) == [["no_score", "no_score", "no_score", "tie", "empty", "empty"]]
    assert got.margin.tolist() == [[0.0] * 6]


# -- what is left out ---------------------------------------------------------------------------------------------------


def test_a_tie_is_dropped_and_counted():
    got = pairs([[0.5, 0.5], [0.0, 1.0]])
    assert reasons(got) == [["tie"], ["kept"]]
    assert got.keep.tolist() == [[False], [True]]
    assert got.margin.tolist() == [[0.0], [1.0]]


def test_a_dropped_tie_adds_exactly_nothing_to_the_loss():
    """Log-probs 1 apart in the tied prompt; its loss and gradient are 0, not small."""
    got = pairs([[0.5, 0.5], [0.0, 1.0]])
    logps = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    chosen, rejected = logps.gather(1, got.chosen), logps.gather(1, got.rejected)
    zero = torch.zeros_like(chosen)
    each = preference_loss(chosen, rejected, zero, zero, loss_type="sigmoid", beta=0.1) * got.keep
    each.sum().backward()
    assert each[0].item() == 0.0 and logps.grad[0].tolist() == [0.0, 0.0]
    assert each[1].item() == pytest.approx(math.log(1 + math.exp(0.1)))


@pytest.mark.parametrize(("scores", "pair"), [([0.5, 0.5], (0, 1)), ([NAN, 1.0, 1.0], (1, 2)), ([2.0, 2.0, 2.0, 2.0], (0, 1))])
@pytest.mark.parametrize("select", ["best_worst", "best_random"])
def test_ties_first_prefers_the_first_answer(select, scores, pair):
    """TRL's ``first >= second``; the two answers are never one and the same."""
    got = pairs([scores], select=select, ties="first")
    assert reasons(got) == [["kept"]] and got.margin.item() == 0.0
    assert met(got) == [pair] or (select == "best_random" and len(scores) == 4 and got.chosen.item() == 0 != got.rejected.item())


def test_ties_first_with_every_two():
    got = pairs([[1.0, 2.0, 1.0]], select="all", ties="first")
    assert met(got) == [(1, 0), (0, 2), (1, 2)] and got.margin.tolist() == [[1.0, 0.0, 1.0]]


def test_identical_answers_with_different_scores_are_dropped():
    """A noisy judge may score the same text twice; there is nothing to prefer. What stands in the padding does not matter."""
    got = pairs([[0.0, 1.0], [0.0, 1.0]], answers=[[[5, 6, EOS], [5, 6, EOS]], [[5, 6, 7, EOS], [5, 6, EOS]]])
    assert reasons(got) == [["identical"], ["kept"]]
    assert reasons(pairs([[0.0, 1.0]], answers=[[[5, 6, EOS], [5, 6, EOS]]], identical="keep")) == [["kept"]]


def test_identical_answers_that_tie_are_a_tie_unless_ties_train():
    same = [[[5, EOS], [5, EOS]]]
    assert reasons(pairs([[1.0, 1.0]], answers=same)) == [["tie"]]
    assert reasons(pairs([[1.0, 1.0]], answers=same, ties="first")) == [["identical"]]
    assert reasons(pairs([[1.0, 1.0]], answers=same, ties="first", identical="keep")) == [["kept"]]


def test_an_answer_that_is_a_prefix_of_the_other_is_not_identical():
    assert reasons(pairs([[0.0, 1.0]], answers=[[[5, 6], [5, 6, EOS]]])) == [["kept"]]


def test_an_unscored_answer_is_neither_chosen_nor_rejected():
    """With three answers the other two are compared; with two the prompt is dropped (a None once beat a negative score)."""
    got = pairs([[NAN, -0.8, -0.9], [NAN, -0.8, NAN], [NAN, NAN, NAN]])
    assert met(got) == [(1, 2)] and got.margin[0].item() == pytest.approx(0.1)
    assert reasons(got) == [["kept"], ["no_score"], ["no_score"]]
    assert reasons(pairs([[NAN, -0.8], [NAN, NAN]])) == [["no_score"], ["no_score"]]
    assert not got.margin.isnan().any()


@pytest.mark.parametrize(
    ("scores", "lengths", "reason"),
    [
        ([5.0, 1.0], (0, 2), "empty"),
        ([5.0, 1.0], (0, 0), "empty"),
        ([NAN, 1.0], (2, 0), "no_score"),
        ([5.0, 1.0, NAN], (0, 2, 2), "empty"),
        ([5.0, NAN, NAN], (2, 0, 2), "no_score"),
        ([5.0, 1.0, 2.0], (0, 2, 2), "kept"),
    ],
)
def test_an_empty_answer_is_not_used(scores, lengths, reason):
    """Fewer than two scores: no_score. Two scores, but fewer than two of them on answers with a token: empty."""
    got = pairs([scores], answers=[[[3 + j] * n for j, n in enumerate(lengths)]])
    assert reasons(got) == [[reason]]
    assert 0 not in met(got)[0] or reason != "kept"


def test_an_answer_none_of_whose_tokens_counts_is_empty():
    """Recorded dialogues: response_mask is what the model reads, loss_mask what trains."""
    batch = rollout([[[5, EOS], [6, EOS]]])
    counted = torch.tensor([[[True, True], [False, False]]])
    got = module.make_pairs(torch.tensor([[0.0, 1.0]]), replace(batch, loss_mask=counted), PairsConfig())
    assert reasons(got) == [["empty"]]


def test_a_gap_below_min_margin_is_left_out():
    """0.25 is kept at a min_margin of 0.25; a tie that would train has no gap."""
    got = pairs([[0.0, 0.25], [0.0, 0.2], [1.0, 1.0]], min_margin=0.25)
    assert reasons(got) == [["kept"], ["margin"], ["tie"]]
    assert got.margin.tolist() == [[0.25], [0.0], [0.0]]
    assert reasons(pairs([[1.0, 1.0]], ties="first", min_margin=0.25)) == [["margin"]]


def test_chosen_and_rejected_are_two_answers_whatever_the_scores():
    """Also where nothing is kept: completions.jsonl shows two answers, not one twice."""
    for scores in ([1.0, 1.0, 1.0], [NAN] * 3, [NAN, 1.0, NAN], [1.0, NAN, NAN], [NAN, NAN, 1.0]):
        for select in SELECTS:
            for a, b in met(pairs([scores], select=select)):
                assert a != b, (scores, select)


# -- the missing-EOS penalty --------------------------------------------------------------------------------------------


def test_the_eos_penalty_is_subtracted_before_the_comparison():
    """Scores 1.0 (no EOS) and 0.8 (EOS), penalty 1: 0.0 against 0.8, the second is chosen, margin 0.8."""
    got = pairs([[1.0, 0.8]], finished=[[False, True]], missing_eos_penalty=1.0)
    assert met(got) == [(1, 0)]
    assert got.margin.item() == pytest.approx(0.8)


def test_the_penalty_keeps_the_order_of_unfinished_answers():
    """Both unfinished: 1.5 and 2.5 less 0.5, the margin stays 1 (a penalty in place of the score would make a tie)."""
    got = pairs([[1.5, 2.5]], finished=[[False, False]], missing_eos_penalty=0.5)
    assert met(got) == [(1, 0)] and got.margin.item() == 1.0
    final = module.penalised(torch.tensor([[1.5, 2.5], [1.0, 1.0]]), torch.tensor([[False, False], [True, False]]), 0.5)
    assert final.tolist() == [[1.0, 2.0], [1.0, 0.5]]


def test_the_penalty_can_make_and_break_a_tie():
    got = pairs([[1.0, 0.5], [1.0, 1.0]], finished=[[False, True], [True, False]], missing_eos_penalty=0.5)
    assert reasons(got) == [["tie"], ["kept"]] and met(got, 1) == [(0, 1)]


# -- errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "got"),
    [
        (torch.zeros(2, 3), r"float32 \[2, 3\]"),
        (torch.zeros(2, 2, dtype=torch.float64), r"float64 \[2, 2\]"),
        (torch.zeros(1), r"float32 \[1\]"),
        (torch.zeros(4), r"float32 \[4\]"),
    ],
)
def test_scores_of_the_wrong_shape_or_type_are_refused(scores, got):
    """One value for four answers is not spread over them."""
    with pytest.raises(WorkerError, match=rf"scores: expected float32 \[P=2, K=2\], one an answer, got {got}"):
        module.make_pairs(scores, rollout([[[5, EOS], [6, EOS]]] * 2), PairsConfig())


def test_one_answer_a_prompt_is_refused():
    with pytest.raises(WorkerError, match=r"K=1 .*set n_samples_per_prompt to 2 or more"):
        pairs([[1.0], [2.0]])


@pytest.mark.parametrize("score", [INF, -INF])
def test_an_infinite_score_is_named(score):
    with pytest.raises(WorkerError, match=rf"prompt 41 of the data, answer 1 of 0..2: score {score}; a score is a finite number"):
        pairs([[0.0, 1.0, 2.0], [0.0, score, NAN]])


def test_stop_names_the_answer_without_score():
    with pytest.raises(WorkerError, match=r"prompt 41 of the data, answer 0 of 0..1: score nan; .*pair_unscored: drop \(2 such answers"):
        pairs([[0.0, 1.0], [NAN, 1.0], [0.0, NAN]], unscored="stop")
    assert reasons(pairs([[0.0, 1.0]], unscored="stop")) == [["kept"]]


def test_stop_names_the_empty_answer():
    with pytest.raises(WorkerError, match=r"prompt 40 of the data, answer 1 of 0..1: length 0; .*pair_empty: drop \(1 such answers"):
        pairs([[0.0, 1.0]], answers=[[[5, EOS], []]], empty="stop")
    assert reasons(pairs([[0.0, 1.0]], empty="stop")) == [["kept"]]


def test_inputs_are_not_written_to():
    scores, batch = torch.tensor([[1.0, 2.0], [NAN, 1.0]]), rollout([[[5, EOS], [6]]] * 2, [[True, False]] * 2)
    kept = scores.clone(), {name: value.clone() for name, value in batch._tensors().items()}
    module.make_pairs(scores, batch, PairsConfig(missing_eos_penalty=0.5))
    assert torch.equal(scores.nan_to_num(7.0), kept[0].nan_to_num(7.0))
    assert all(torch.equal(batch._tensors()[name], value) for name, value in kept[1].items())


# -- pairs survive whatever happens to the batch ------------------------------------------------------------------------


def problem(k: int, p: int = 24) -> tuple[torch.Tensor, Rollout]:
    """Random scores with ties, missing ones and empty answers among them."""
    g = torch.Generator().manual_seed(k)
    scores = torch.randint(0, 6, (p, k), generator=g) / 4
    scores[torch.rand(p, k, generator=g) < 0.15] = NAN
    lengths, tokens = torch.randint(0, 5, (p, k), generator=g), torch.randint(3, 6, (p, k, 5), generator=g)
    finished = (torch.rand(p, k, generator=g) < 0.6).tolist()
    answers = [[tokens[i, j, : int(lengths[i, j])].tolist() for j in range(k)] for i in range(p)]
    return scores, rollout(answers, finished)


def config(select: str) -> PairsConfig:
    return PairsConfig(missing_eos_penalty=0.25, select=select, min_margin=0.5)


@pytest.mark.parametrize("select", SELECTS)
@pytest.mark.parametrize("k", [2, 3, 4])
def test_pairs_follow_their_prompt_when_prompts_are_shuffled_and_split(k, select):
    """Any order and any size of parts (micro-batches, data-parallel ranks): select of pairs equals pairs of select."""
    scores, batch = problem(k)
    whole = module.make_pairs(scores, batch, config(select), 1, 2)
    kept = int(whole.keep.sum())
    assert 5 <= kept < whole.keep.numel() - 3 and len(whole.reason.unique()) >= 3, (
        "the problem has kept pairs, and others for several reasons"
    )
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(9)).tolist()
    for size in range(1, len(batch) + 1):
        parts = [order[i : i + size] for i in range(0, len(batch), size)]
        made = [module.make_pairs(scores[part], batch.select(part), config(select), 1, 2) for part in parts]
        for name in FIELDS:
            assert torch.equal(torch.cat([getattr(m, name) for m in made]), getattr(whole.select(order), name)), (name, size)


@pytest.mark.parametrize("select", SELECTS)
@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_same_two_answers_meet_in_whatever_order_the_answers_stand(k, select):
    """Scores without equals; ``all`` lists its pairs in another order, so they are compared as sets."""
    p = 12
    scores = torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(i))[:k].float() for i in range(p)])
    batch = rollout([[[10 + j, EOS] for j in range(k)] for _ in range(p)])
    for seed in range(3):
        order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
        moved = replace(batch, response_ids=batch.response_ids[:, order], response_mask=batch.response_mask[:, order])
        straight, turned = (
            module.make_pairs(s, b, PairsConfig(select=select), seed=3, step=4) for s, b in ((scores, batch), (scores[:, order], moved))
        )
        for i in range(p):
            assert {(order[a].item(), order[b].item()) for a, b in met(turned, i)} == set(met(straight, i))


def test_each_score_belongs_to_its_answer_when_ranks_answer_in_turn():
    """Three prompts of two ranks, answers of (3,2), (4,1), (5,2) tokens; the shorter is better: chosen 1, gaps 1, 3, 3."""
    lengths = [(3, 2), (4, 1), (5, 2)]
    answers = [[[100 * p + 10 * k + i for i in range(n)] for k, n in enumerate(row)] for p, row in enumerate(lengths)]
    whole = Rollout.concat([rollout(answers[:2]), rollout(answers[2:])])
    assert whole.lengths().tolist() == [list(row) for row in lengths]
    got = module.make_pairs(-whole.lengths().float(), whole, PairsConfig())
    assert got.chosen.flatten().tolist() == [1, 1, 1] and got.margin.flatten().tolist() == [1.0, 3.0, 3.0]
    for p in range(3):
        for which in (got.chosen[p, 0], got.rejected[p, 0]):
            assert whole.response_ids[p, which][whole.response_mask[p, which]].tolist() == answers[p][which]


def test_no_prompt_makes_no_pair():
    _, batch = problem(3)
    for select, m in (("best_worst", 1), ("all", 3)):
        got = module.make_pairs(torch.zeros(0, 3), batch.select([]), PairsConfig(select=select))
        assert got.check(0, 3).chosen.shape == (0, m)


# -- wrong versions -----------------------------------------------------------------------------------------------------

_make = module.make_pairs


def _wrong(change: Callable) -> Callable:
    """make_pairs on changed (scores, rollout, config)."""
    return lambda scores, batch, config, seed=0, step=0: _make(*change(scores, batch, config), seed, step)


def _flipped(scores, batch, config, seed=0, step=0):
    got = _make(scores, batch, config, seed, step)
    return Pairs(got.rejected, got.chosen, got.margin, got.reason)


def _in_place(scores, batch, config, seed=0, step=0):
    scores -= config.missing_eos_penalty * ~batch.finished
    return _make(scores, batch, replace(config, missing_eos_penalty=0.0), seed, step)


def _first_two_only(scores, batch, config):
    short = replace(batch, **{name: getattr(batch, name)[:, :2] for name in ("response_ids", "response_mask", "finished")})
    return scores[:, :2], short, config


def _blocks(scores, batch, config):
    p, k = scores.shape
    return scores.reshape(k, p).t().contiguous(), batch, config


def _prefix(batch, a, b):
    row = torch.arange(len(batch))[:, None]
    both = batch.response_mask[row, a] & batch.response_mask[row, b]
    return (~both | (batch.response_ids[row, a] == batch.response_ids[row, b])).all(-1)


def _with_padding(batch, a, b):
    row = torch.arange(len(batch))[:, None]
    return (batch.response_ids[row, a] == batch.response_ids[row, b]).all(-1)


higher, penalty_first = test_the_higher_score_is_chosen_whichever_sample_it_is, test_the_eos_penalty_is_subtracted_before_the_comparison
penalty_keeps_order = test_the_penalty_keeps_the_order_of_unfinished_answers
MUTANTS: dict[str, tuple[str, Callable, Callable]] = {
    "sign_flipped": ("make_pairs", _flipped, higher),
    "first_sample_wins": ("make_pairs", _wrong(lambda s, r, c: (-torch.arange(s.shape[1]).float().expand_as(s), r, c)), higher),
    "scores_in_blocks_of_prompts": ("make_pairs", _wrong(_blocks), higher),
    "first_two_answers_only": ("make_pairs", _wrong(_first_two_only), test_answers_past_the_second_are_looked_at),
    "penalty_ignored": ("penalised", lambda s, f, p: s.clone(), penalty_first),
    "penalty_added": ("penalised", lambda s, f, p: s + p * ~f, penalty_first),
    "penalty_replaces_the_score": ("penalised", lambda s, f, p: torch.where(f, s, torch.tensor(-p)), penalty_keeps_order),
    "penalty_on_finished_ones": ("penalised", lambda s, f, p: s - p * f, penalty_keeps_order),
    "penalty_looks_in_the_prompt": (
        "make_pairs",
        _wrong(lambda s, r, c: (s, replace(r, finished=r.finished | (r.prompt_ids == EOS).any(1, keepdim=True)), c)),
        penalty_first,
    ),
    "penalty_written_into_the_input": ("make_pairs", _in_place, test_inputs_are_not_written_to),
    "no_score_is_zero": (
        "make_pairs",
        _wrong(lambda s, r, c: (s.nan_to_num(0.0), r, c)),
        test_an_unscored_answer_is_neither_chosen_nor_rejected,
    ),
    "a_tie_trains": ("make_pairs", _wrong(lambda s, r, c: (s, r, replace(c, ties="first"))), test_a_tie_is_dropped_and_counted),
    "a_prefix_is_identical": ("_same_tokens", _prefix, test_an_answer_that_is_a_prefix_of_the_other_is_not_identical),
    "padding_is_compared": ("_same_tokens", _with_padding, test_identical_answers_with_different_scores_are_dropped),
    "draw_by_place_in_the_batch": (
        "make_pairs",
        _wrong(lambda s, r, c: (s, replace(r, prompt_index=torch.arange(len(r))), c)),
        lambda: test_pairs_follow_their_prompt_when_prompts_are_shuffled_and_split(4, "best_random"),
    ),
    "draw_by_place_of_the_answer": (
        "sorted",
        lambda values, key: list(values),
        lambda: test_the_same_two_answers_meet_in_whatever_order_the_answers_stand(4, "best_random"),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, monkeypatch):
    """Each named wrong version makes the check named beside it fail; unbroken, the check passes."""
    attribute, wrong, check = MUTANTS[name]
    check()
    monkeypatch.setattr(module, attribute, wrong, raising=attribute != "sorted")
    with pytest.raises(AssertionError):
        check()
