"""What a step does under its options: every loss and reduction, several pairs a prompt, a NaN, a broken batch; and that it learns.

The exact numbers of the plain step are in test_train_step.py, those of each formula in test_loss.py; here they meet the model.
"""

from __future__ import annotations

from dataclasses import replace

import problem
import pytest
import torch

from mindspeed_odpo.config import LossConfig, PairsConfig
from mindspeed_odpo.engine import forward
from mindspeed_odpo.errors import WorkerError
from mindspeed_odpo.keys import LOSS_TYPES, SMOOTHED
from mindspeed_odpo.loss import preference_loss, reduced, sft_loss
from mindspeed_odpo.pairs import make_pairs
from mindspeed_odpo.types import Pairs, Rollout, TrainBatch

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.fixture
def policy(folders):
    return problem.load(folders[0], True)


@pytest.fixture(scope="module")
def reference(folders, single_rank):
    return problem.load(folders[1], False)


def batch_of(reference, rollout: Rollout | None = None, pairs: Pairs | None = None) -> TrainBatch:
    rollout = problem.rollout() if rollout is None else rollout
    pairs = make_pairs(problem.scores(), rollout, problem.PAIRS_CONFIG) if pairs is None else pairs
    return TrainBatch(rollout, pairs, forward.answer_logps(reference.chunks, rollout, 2, CPU))


def four_answers() -> Rollout:
    """Three prompts of four answers each."""
    two = problem.rollout()
    even, odd = two.select([0, 2, 4]), two.select([1, 3, 5])
    joined = {name: torch.cat([getattr(even, name), getattr(odd, name)], 1) for name in ("response_ids", "response_mask", "finished")}
    return replace(even, **joined).check()


def gaps(policy, batch: TrainBatch) -> list[float]:
    """log-prob of the chosen answer less that of the rejected one, for each kept pair."""
    logps = forward.answer_logps(policy.chunks, batch.rollout, 2, CPU)
    both = (logps.gather(1, side) for side in (batch.pairs.chosen, batch.pairs.rejected))
    chosen, rejected = both
    return (chosen - rejected)[batch.pairs.keep].tolist()


@pytest.mark.parametrize(("reduction", "divisors"), [("sum", (1, 1)), ("masked_mean", (3, 4)), ("padded_mean", (50, 50))])
def test_tokens_that_do_not_count_are_not_in_the_mean(policy, reference, reduction, divisors):
    """A dialogue whose middle tokens are the user's: log-probs and their number are of the counted tokens alone."""
    whole = problem.rollout().select([1])  # two answers of four tokens
    mask = whole.response_mask.clone()
    mask[0, 0, 1] = False
    dialogue = replace(whole, loss_mask=mask)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    batch = batch_of(reference, dialogue, Pairs(chosen=zero, rejected=zero + 1, margin=torch.zeros(1, 1), reason=zero))
    sums = forward.answer_logps(policy.chunks, dialogue, 1, CPU)
    ratio = (sums - batch.ref_logps) / torch.tensor([divisors])
    expected = torch.nn.functional.softplus(-problem.BETA * (ratio[0, 0] - ratio[0, 1])).item()
    stats = problem.step(policy, batch, loss=LossConfig(reduction=reduction, padded_length=50))
    assert stats.mean("loss") == pytest.approx(expected, rel=1e-6)
    assert stats.mean("sft") == pytest.approx(-sums[0, 0].item() / 3, rel=1e-6)


def test_a_dropped_pair_may_hold_anything(policy, reference):
    """A rank whose pairs are all dropped runs its first one with weight 0, and a NaN times 0 would be a NaN."""
    batch = batch_of(reference)
    none = replace(batch.pairs, reason=torch.ones_like(batch.pairs.reason))
    batch.ref_logps[0] = float("nan")
    stats = problem.step(policy, replace(batch, pairs=none), global_pairs=5)
    assert stats.pairs == 0 and stats.grad_norm == 0.0 and all(value == 0.0 for value in stats.sums.values())


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_either_a_loss_or_a_gradient_that_is_not_finite_stops(policy, reference, monkeypatch, where):
    """A finite loss may have an infinite gradient, and the other way round."""
    inner = forward.preference_loss

    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + float("inf") if where == "loss" else x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * float("inf") if where == "gradient" else grad

    monkeypatch.setattr(forward, "preference_loss", lambda *args, **kwargs: Spoil.apply(inner(*args, **kwargs)))
    before = policy.weights()
    assert problem.step(policy, batch_of(reference), nonfinite="skip").nonfinite
    assert all(torch.equal(value, before[name]) for name, value in policy.weights().items())


@pytest.mark.parametrize("reduction", ["sum", "masked_mean", "padded_mean"])
@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_every_loss_is_the_formula_on_the_models_log_probs(policy, reference, kind, reduction):
    """Mean over kept pairs of ``preference_loss`` on log-probs that a separate forward gave; micro-batches of 1 and 4 agree."""
    batch = batch_of(reference)
    loss = LossConfig(kind, label_smoothing=0.1 * (kind in SMOOTHED), reduction=reduction, padded_length=50, sft_weight=0.3)
    policy_logps, lengths = forward.answer_logps(policy.chunks, batch.rollout, 2, CPU), batch.rollout.lengths()
    at = [side[:, 0] for side in (batch.pairs.chosen, batch.pairs.rejected)]
    row = torch.arange(problem.PAIRS)
    values = [
        reduced(sums[row, side], lengths[row, side], reduction, 50) for sums in (policy_logps, batch.ref_logps) for side in at
    ]  # chosen, rejected of the policy, then of the reference
    each = preference_loss(
        *values, loss_type=kind, beta=problem.BETA, label_smoothing=loss.label_smoothing, gamma_beta_ratio=loss.gamma_beta_ratio
    )
    each = each + 0.3 * sft_loss(policy_logps[row, at[0]], lengths[row, at[0]])
    expected = each[batch.pairs.keep[:, 0]].mean().item()
    one = problem.step(policy, batch, 1, loss=loss)
    assert one.mean("loss") == pytest.approx(expected, rel=1e-5)
    # logged log-probs are sums over an answer's tokens, whatever the loss reduces them to
    keep = batch.pairs.keep[:, 0]
    assert one.mean("logps_chosen") == pytest.approx(policy_logps[row, at[0]][keep].mean().item(), rel=1e-5)
    assert one.mean("ref_logps_rejected") == pytest.approx(batch.ref_logps[row, at[1]][keep].mean().item(), rel=1e-5)
    again = problem.load(policy.folder, True)
    four = problem.step(again, batch, 4, loss=loss)
    assert four.mean("loss") == pytest.approx(expected, rel=1e-5) and four.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    for name, value in policy.weights().items():
        torch.testing.assert_close(again.weights()[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_simpo_runs_without_a_reference(policy, reference):
    """No reference model, no reference log-probs: NaN stands for them and reaches neither loss nor gradient."""
    loss = LossConfig("simpo", reduction="masked_mean")
    batch = batch_of(reference)
    bare = replace(batch, ref_logps=torch.full_like(batch.ref_logps, float("nan")))
    stats = problem.step(policy, bare, loss=loss)
    with_reference = problem.step(problem.load(policy.folder, True), batch, loss=loss)
    assert stats.mean("loss") == with_reference.mean("loss") and stats.grad_norm == with_reference.grad_norm > 0
    assert stats.mean("reward_chosen") == with_reference.mean("reward_chosen")
    assert stats.mean("ref_logps_chosen") != stats.mean("ref_logps_chosen")


@pytest.mark.parametrize("micro_batch_size", [1, 4, 18])
def test_all_pairs_of_a_prompt_equal_the_pairs_one_by_one(policy, reference, micro_batch_size, monkeypatch):
    """Six pairs of four answers: the loss is the mean over the pairs, and an answer of several pairs is run once a micro-batch."""
    rollout = four_answers()
    scores = torch.tensor([[0.1, 0.4, 0.2, 0.3], [4.0, 3.0, 2.0, 1.0], [0.0, 1.0, 0.0, 2.0]])
    pairs = make_pairs(scores, rollout, PairsConfig(select="all"))
    batch = batch_of(reference, rollout, pairs)
    assert int(pairs.keep.sum()) == 17  # of 18, one is a tie
    logps = forward.answer_logps(policy.chunks, rollout, 2, CPU)
    each = [
        preference_loss(
            *(t[p, side[p, m]] for t in (logps, batch.ref_logps) for side in (pairs.chosen, pairs.rejected)),
            loss_type="sigmoid",
            beta=problem.BETA,
        )
        for p, m in pairs.keep.nonzero().tolist()
    ]
    rows = []
    pack = forward.pack_rows
    monkeypatch.setattr(forward, "pack_rows", lambda *args: rows.append(pack(*args)) or rows[-1])
    stats = problem.step(policy, batch, micro_batch_size)
    assert stats.mean("loss") == pytest.approx(torch.stack(each).mean().item(), rel=1e-5)
    if micro_batch_size == 18:
        assert [r.num_rows for r in rows] == [12]  # 34 sequences without sharing


@pytest.mark.parametrize("at", ["policy", "reference"])
def test_a_nan_is_skipped_or_stops_and_never_reaches_the_weights(policy, reference, at):
    """One NaN among the logits (or one reference log-prob): the weights and the optimizer keep what they had."""
    batch = batch_of(reference)
    row = int(batch.rollout.response_ids[0, 0, 0])
    if at == "reference":
        batch.ref_logps[0, 1] = float("nan")
    else:
        with torch.no_grad():
            policy.model.embedding.word_embeddings.weight[row, 0] = float("nan")
    before = policy.weights()
    with pytest.raises(WorkerError, match="loss nan, .*nothing was updated: .* or set on_nonfinite: skip"):
        problem.step(policy, batch)
    stats = problem.step(policy, batch, nonfinite="skip")
    assert stats.skipped and stats.nonfinite and stats.pairs == 5
    for name, value in policy.weights().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
    with torch.no_grad():
        policy.model.embedding.word_embeddings.weight[row, 0] = 0.01
    batch.ref_logps[0, 1] = -5.0
    after = problem.step(policy, batch, nonfinite="skip")
    assert not after.skipped and after.grad_norm > 0
    assert all(value.isfinite().all() for value in policy.weights().values())


def test_an_empty_answer_leaves_the_rest_as_if_it_were_not_there(policy, reference):
    """A response cut to nothing: its pair is dropped and counted, loss and weights are those of the other pairs alone."""
    rollout = problem.rollout()
    empty = rollout.response_mask.clone()
    empty[2, 0] = False
    broken = replace(rollout, response_mask=empty)
    pairs = make_pairs(problem.scores(), broken, problem.PAIRS_CONFIG)
    assert pairs.keep[:, 0].tolist() == [True, True, False, False, True, True]
    stats = problem.step(policy, batch_of(reference, broken, pairs))
    alone = problem.load(policy.folder, True)
    rest = rollout.select([0, 1, 4, 5])
    expected = problem.step(alone, batch_of(reference, rest, make_pairs(problem.scores()[[0, 1, 4, 5]], rest, problem.PAIRS_CONFIG)))
    assert stats.mean("loss") == pytest.approx(expected.mean("loss"), rel=1e-6)
    assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


def test_a_batch_of_empty_answers_updates_nothing_and_says_so(policy, reference):
    """An all-masked batch does not train on a loss of ln 2 for ever: no pair is kept, the step is skipped."""
    rollout = replace(problem.rollout(), response_mask=torch.zeros(problem.PAIRS, 2, 9, dtype=torch.bool))
    pairs = make_pairs(problem.scores(), rollout, problem.PAIRS_CONFIG)
    before = policy.weights()
    stats = problem.step(policy, batch_of(reference, rollout, pairs))
    assert stats.skipped and stats.pairs == 0
    assert all(torch.equal(value, before[name]) for name, value in policy.weights().items())


def test_training_prefers_the_chosen_answer(folders):
    """Fifty steps on fixed pairs from the reference's own weights: every chosen answer gains on its rejected one, the loss
    leaves ln 2, and the logged rewards have the signs of it: margin and accuracy rise."""
    policy, reference = problem.load(folders[0], True, lr=1e-3), problem.load(folders[0], False)
    batch = batch_of(reference)
    before = gaps(policy, batch)
    first = problem.step(policy, batch)
    for _ in range(19):
        twentieth = problem.step(policy, batch)
    for _ in range(30):
        last = problem.step(policy, batch)
    assert first.mean("loss") == pytest.approx(0.693147, abs=1e-6)
    assert twentieth.mean("loss") < 0.6
    assert all(now > then for now, then in zip(gaps(policy, batch), before, strict=True))
    assert last.mean("reward_chosen") > last.mean("reward_rejected") and last.mean("accuracy") == 1.0


def test_log_probs_are_of_the_whole_distribution_whatever_the_sampler_did(policy, reference):
    """The rollout carries no log-prob of its own: with temperature and nucleus sampling the numbers of the loss are still those
    at temperature 1 over the full vocabulary, which the decoder's own distribution is not."""
    rollout = problem.rollout().select([0])
    got = forward.answer_logps(policy.chunks, rollout, 1, CPU)[0, 0].item()
    rows = forward.pack_rows(rollout, torch.tensor([0]), torch.tensor([0]))
    with torch.no_grad():
        logits = policy.model(rows.ids)[rows.row, rows.column]
    full = logits.log_softmax(-1).gather(1, rows.target[:, None]).sum().item()
    tempered = (logits / 0.5).log_softmax(-1).gather(1, rows.target[:, None]).sum().item()
    assert got == pytest.approx(full, rel=1e-5)
    assert abs(got - tempered) > 0.5
