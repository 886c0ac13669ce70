"""One optimizer step of a tiny Llama against transformers and the written-out formula; then the same with every wrong version.

A mutant is a version of our code with one known fault. Each must be caught by the same comparison that passes the right
code: a comparison that lets one through proves nothing. ``pytest -k mutant -v`` lists them.
"""

from __future__ import annotations

from dataclasses import replace

import problem
import pytest
import torch

from mindspeed_odpo import pairs as pairs_module
from mindspeed_odpo.config import PairsConfig
from mindspeed_odpo.engine import forward
from mindspeed_odpo.engine import logprobs as logprobs_module
from mindspeed_odpo.engine import model as model_module
from mindspeed_odpo.types import TrainBatch

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("single_rank")
PADDED = 400  # 16 rows of the embedding stand for no token


@pytest.fixture(scope="module")
def exact(folders):
    return problem.exact(*folders)


def batch_of(reference, rollout):
    ref = forward.answer_logps(reference.chunks, rollout, 2, CPU)
    return TrainBatch(rollout, pairs_module.make_pairs(problem.scores(), rollout, problem.PAIRS_CONFIG), ref)


def run(folders, micro_batch_size=2, left=0, right=0):
    """One step from fresh weights: (stats, log-probs of all answers before it, reference's, weights after it)."""
    policy, reference = problem.load(folders[0], True, PADDED), problem.load(folders[1], False, PADDED)
    for ours in (policy, reference):
        with torch.no_grad():  # large rows, so that a softmax over them would show
            ours.model.embedding.word_embeddings.weight[384:] = 0.3
    if policy.optimizer is not None:
        policy.optimizer.reload_model_params()
    rollout = problem.rollout(left, right)
    batch = batch_of(reference, rollout)
    before = forward.answer_logps(policy.chunks, rollout, 2, CPU)
    stats = problem.step(policy, batch, micro_batch_size)
    return stats, before, batch, policy.weights()


def compare(exact, result):
    """The whole comparison that right code passes and each mutant fails."""
    stats, before, batch, _ = result
    assert batch.pairs.keep.squeeze(1).tolist() == problem.KEEP
    kept = torch.tensor(problem.KEEP)
    assert batch.pairs.chosen.squeeze(1)[kept].tolist() == torch.tensor(problem.CHOSEN)[kept].tolist()
    assert stats.pairs == 5
    torch.testing.assert_close(before, exact.logps, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(batch.ref_logps, exact.ref_logps, rtol=1e-5, atol=1e-4)
    assert stats.mean("loss") == pytest.approx(exact.loss, rel=1e-5)
    assert stats.grad_norm == pytest.approx(exact.grad_norm, rel=1e-4)


def test_loss_log_probs_and_gradient_equal_transformers(folders, exact):
    compare(exact, run(folders))


def test_statistics_are_sums_over_kept_pairs(folders, exact):
    stats, *_ = run(folders)
    rows = [p for p in range(problem.PAIRS) if problem.KEEP[p]]
    chosen = sum(exact.logps[p, problem.CHOSEN[p]].item() for p in rows)
    rejected_ref = sum(exact.ref_logps[p, 1 - problem.CHOSEN[p]].item() for p in rows)
    assert stats.sums["logps_chosen"] == pytest.approx(chosen, rel=1e-5)
    assert stats.sums["ref_logps_rejected"] == pytest.approx(rejected_ref, rel=1e-5)


@pytest.mark.parametrize(("micro_batch_size", "left", "right"), [(1, 0, 0), (4, 0, 0), (6, 0, 0), (2, 40, 0), (3, 0, 40)])
def test_micro_batches_and_padding_change_nothing(folders, micro_batch_size, left, right):
    base, _, _, base_weights = run(folders)
    stats, _, _, weights = run(folders, micro_batch_size, left, right)
    assert stats.grad_norm == pytest.approx(base.grad_norm, rel=1e-5)
    for name, value in base.sums.items():
        assert stats.sums[name] == pytest.approx(value, rel=1e-5), name
    for name, value in base_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("bf16", [False, True])
def test_step_0_with_policy_equal_to_the_reference_is_ln_2(folders, bf16):
    policy, reference = (problem.load(folders[0], trainable, bf16=bf16) for trainable in (True, False))
    stats = problem.step(policy, batch_of(reference, problem.rollout()))
    assert abs(stats.mean("loss") - 0.69314718) < (1e-2 if bf16 else 1e-6)


def test_without_a_kept_pair_nothing_moves(folders):
    policy, reference = problem.load(folders[0], True), problem.load(folders[1], False)
    before = policy.weights()
    rollout = problem.rollout()
    pairs = pairs_module.make_pairs(torch.zeros(problem.PAIRS, 2), rollout, PairsConfig())
    stats = problem.step(policy, TrainBatch(rollout, pairs, forward.answer_logps(reference.chunks, rollout, 2, CPU)))
    assert stats.skipped and stats.pairs == 0
    assert all(torch.equal(value, before[name]) for name, value in policy.weights().items())


def test_bf16_training_moves_fp32_masters(folders):
    """At lr 1e-6 a bf16 weight of 0.2 cannot move in one step (its spacing is 1e-3); a hundred steps on fp32 masters show."""
    policy, reference = problem.load(folders[0], True, bf16=True), problem.load(folders[1], False, bf16=True)
    batch = batch_of(reference, problem.rollout())
    masters = [p for group in policy.optimizer.optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in masters]
    assert all(p.dtype == torch.float32 for p in masters)
    assert all(p.dtype == torch.bfloat16 for p in policy.model.parameters())
    policy.optimizer.param_groups[0]["lr"] = 1e-6
    problem.step(policy, batch)
    assert any(not torch.equal(a, b) for a, b in zip(before, masters, strict=True))


def test_a_nan_weight_stops_the_step_and_leaves_the_rest(folders):
    from mindspeed_odpo.errors import WorkerError

    policy, reference = problem.load(folders[0], True), problem.load(folders[1], False)
    batch = batch_of(reference, problem.rollout())
    with torch.no_grad():
        policy.model.decoder.final_layernorm.weight[0] = float("nan")
    before = policy.weights()
    with pytest.raises(WorkerError, match="loss nan, .* over 5 pairs .*nothing was updated"):
        problem.step(policy, batch)
    for name, value in policy.weights().items():
        assert torch.equal(value.nan_to_num(7.0), before[name].nan_to_num(7.0)), name


# ---------------------------------------------------------------- mutants: one fault each, all to be caught

_loss, _pack, _sums, _make = forward.preference_loss, forward.pack_rows, forward.Rows.sums, pairs_module.make_pairs
_token_logps = logprobs_module.token_logps


def _always_first(*args):
    got = _make(*args)
    return replace(got, chosen=torch.zeros_like(got.chosen), rejected=torch.ones_like(got.rejected))


def _across_prompts(*args):
    got = _make(*args)
    return replace(got, chosen=got.chosen.roll(1, 0), rejected=got.rejected.roll(1, 0))


def _train_on_ties(*args):
    got = _make(*args)
    return replace(got, reason=torch.zeros_like(got.reason))


def _shifted(by):
    def pack(*args):
        rows = _pack(*args)
        return replace(rows, column=(rows.column + by).clamp(0, rows.ids.shape[1] - 1))

    return pack


def _without_eos(*args):
    rows = _pack(*args)
    last = torch.cat([rows.row[1:] != rows.row[:-1], torch.ones(1, dtype=torch.bool)])
    return replace(rows, row=rows.row[~last], column=rows.column[~last], target=rows.target[~last])


def _with_prompt(*args):
    rows = _pack(*args)
    more = [(n, c) for n in range(rows.num_rows) for c in range(int(rows.column[rows.row == n].min()))]
    if not more:
        return rows
    row, column = torch.tensor(more).T
    return replace(
        rows,
        row=torch.cat([rows.row, row]),
        column=torch.cat([rows.column, column]),
        target=torch.cat([rows.target, rows.ids[row, column + 1]]),
    )


def _mean(self, token_logps):
    return _sums(self, token_logps) / torch.bincount(self.row, minlength=self.num_rows).clamp(min=1)


MUTANTS = {
    "sign_flipped": (forward, "preference_loss", lambda c, r, rc, rr, **k: _loss(r, c, rr, rc, **k)),
    "no_reference": (forward, "preference_loss", lambda c, r, rc, rr, **k: _loss(c, r, 0 * rc, 0 * rr, **k)),
    "reference_of_the_other_answer": (forward, "preference_loss", lambda c, r, rc, rr, **k: _loss(c, r, rr, rc, **k)),
    "beta_ignored": (forward, "preference_loss", lambda c, r, rc, rr, **k: _loss(c, r, rc, rr, **{**k, "beta": 1.0})),
    "pairs_scrambled": (pairs_module, "make_pairs", _across_prompts),
    "first_sample_is_chosen": (pairs_module, "make_pairs", _always_first),
    "ties_train": (pairs_module, "make_pairs", _train_on_ties),
    "eos_penalty_ignored": (pairs_module, "make_pairs", lambda s, r, c: _make(s, r, PairsConfig())),
    "eos_penalty_flipped": (
        pairs_module,
        "make_pairs",
        lambda s, r, c: _make(s, r, replace(c, missing_eos_penalty=-c.missing_eos_penalty)),
    ),
    "mask_late_by_one": (forward, "pack_rows", _shifted(1)),
    "mask_early_by_one": (forward, "pack_rows", _shifted(-1)),
    "eos_not_counted": (forward, "pack_rows", _without_eos),
    "prompt_counted": (forward, "pack_rows", _with_prompt),
    "mean_for_sum": (forward.Rows, "sums", _mean),
    "padded_vocabulary_in_softmax": (model_module, "token_logps", lambda h, w, t, v, **k: _token_logps(h, w, t, PADDED)),
    "tempered_log_probs": (model_module, "token_logps", lambda h, w, t, v, **k: _token_logps(h / 0.7, w, t, v)),
    "averaged_over_ranks_twice": (forward, "dp_size", lambda: 2),
    "micro_batches_averaged_unevenly": (forward, "_micro_batches", lambda b, m: [b.pairs.keep.nonzero()[:3]]),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, folders, exact, monkeypatch):
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises(AssertionError):
        compare(exact, run(folders))
