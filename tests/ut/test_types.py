"""What travels between roles: checks at the mouth, splitting on P, joining on P."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mindspeed_odpo.errors import WorkerError
from mindspeed_odpo.types import REASONS, Pairs, PromptBatch, Rollout, StepStats, TrainBatch


def rollout(p: int = 4, s: int = 3, k: int = 2, r: int = 5, version: int = 1, start: int = 0) -> Rollout:
    index = torch.arange(start, start + p)
    ids = index[:, None, None] * 100 + torch.arange(k)[None, :, None] * 10 + torch.arange(r)
    return Rollout(
        prompt_ids=index[:, None] + torch.arange(s) + 1,
        prompt_mask=torch.ones(p, s, dtype=torch.bool),
        response_ids=ids,
        response_mask=torch.ones(p, k, r, dtype=torch.bool),
        finished=torch.zeros(p, k, dtype=torch.bool),
        prompt_index=index,
        policy_version=version,
    )


def batch(p: int = 4) -> TrainBatch:
    zeros = torch.zeros(p, 1, dtype=torch.int64)
    pairs = Pairs(chosen=zeros, rejected=zeros + 1, margin=torch.ones(p, 1), reason=zeros)
    return TrainBatch(rollout(p), pairs, torch.arange(2.0 * p).view(p, 2))


def test_a_wrong_field_is_named_with_expected_and_got():
    wrong = replace(batch(), ref_logps=torch.zeros(4, 2, 53))
    with pytest.raises(WorkerError, match=r"TrainBatch.ref_logps: expected float32 \[P=4, K=2\], got float32 \[4, 2, 53\]; the reference"):
        wrong.check()


def test_an_unknown_reason_is_refused():
    wrong = replace(batch(), pairs=replace(batch().pairs, reason=torch.full((4, 1), len(REASONS))))
    with pytest.raises(WorkerError, match=rf"Pairs.reason: indexes lie in 0..{len(REASONS) - 1}"):
        wrong.check()


def test_a_loss_mask_lies_within_the_answer_and_travels():
    mask = torch.ones(4, 2, 5, dtype=torch.bool)
    mask[..., 0] = False
    whole = replace(rollout(), loss_mask=mask)
    assert whole.check().counted_lengths().tolist() == [[4, 4]] * 4 and whole.lengths().tolist() == [[5, 5]] * 4
    wider = Rollout.concat([whole.select([0]), replace(rollout(1, r=7, start=1), loss_mask=torch.ones(1, 2, 7, dtype=torch.bool))])
    assert wider.counted_lengths().tolist() == [[4, 4], [7, 7]]
    with pytest.raises(WorkerError, match="Rollout.loss_mask: counts tokens that response_mask calls padding"):
        replace(whole, response_mask=torch.zeros(4, 2, 5, dtype=torch.bool)).check()
    with pytest.raises(WorkerError, match="some parts have a loss_mask and some have none"):
        Rollout.concat([whole, rollout()])


def test_a_pair_that_points_past_the_answers_is_refused():
    wrong = replace(batch(), pairs=replace(batch().pairs, chosen=torch.full((4, 1), 2)))
    with pytest.raises(WorkerError, match=r"indexes lie in 0..1 \(K=2 answers\), got 2..2"):
        wrong.check()


def test_every_field_of_a_rollout_is_checked():
    good = rollout()
    for name in ("prompt_ids", "prompt_mask", "response_ids", "response_mask", "finished", "prompt_index"):
        with pytest.raises(WorkerError, match=f"Rollout.{name}: expected"):
            replace(good, **{name: getattr(good, name).to(torch.float16)}).check()


def test_padding_stands_on_one_side_and_no_prompt_is_empty():
    """Rows are packed by lengths: a hole would shift every token behind it, an empty prompt would predict from another place."""
    good = rollout()
    hole = torch.tensor([True, False, True])
    with pytest.raises(WorkerError, match="Rollout.prompt_mask: a prompt has no token"):
        replace(good, prompt_mask=torch.zeros(4, 3, dtype=torch.bool)).check()
    with pytest.raises(WorkerError, match="Rollout.prompt_mask: .* padding stands on the left alone"):
        replace(good, prompt_mask=hole.expand(4, 3)).check()
    with pytest.raises(WorkerError, match="Rollout.response_mask: .* padding stands on the right alone"):
        replace(good, response_ids=good.response_ids[..., :3], response_mask=hole.expand(4, 2, 3)).check()


def test_select_then_concat_is_the_same_batch():
    whole = rollout(4)
    again = Rollout.concat([whole.select([0, 1]), whole.select([2, 3])])
    assert torch.equal(again.response_ids, whole.response_ids)
    assert torch.equal(again.prompt_index, whole.prompt_index)


def test_concat_pads_prompts_left_and_answers_right():
    joined = Rollout.concat([rollout(1, s=2, r=3), rollout(1, s=4, r=5, start=1)])
    assert joined.prompt_mask.tolist() == [[False, False, True, True], [True] * 4]
    assert joined.prompt_ids[0].tolist() == [0, 0, 1, 2]
    assert joined.response_mask[0, 0].tolist() == [True] * 3 + [False] * 2
    assert joined.response_ids[0, 1].tolist() == [10, 11, 12, 0, 0]


def test_answers_of_different_weights_do_not_mix():
    with pytest.raises(WorkerError, match=r"different weights, versions \[1, 2\]"):
        Rollout.concat([rollout(version=1), rollout(version=2)])


def test_prompts_need_one_row_each():
    ids = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(WorkerError, match="expected 2 rows, one a prompt, got 1"):
        PromptBatch(1, ids, ids.bool(), torch.arange(2), torch.arange(2), ({"prompt": "a"},)).check()


def test_the_mean_of_no_pairs_is_nan():
    assert StepStats({"loss": 0.0}, 0).mean("loss") != StepStats({"loss": 0.0}, 0).mean("loss")
    assert StepStats({"loss": 3.0}, 4).mean("loss") == 0.75
