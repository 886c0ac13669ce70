"""``[P, K, ...]`` to rows and back: packing, sums, and invariance to padding and micro-batches.

The model is a bigram table (the log-prob of a token depends on the token before it alone), so that every expected number can
be read off the table; what a transformer adds is tested in test_model.py and test_train_step.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mindspeed_odpo import device

device.setup()

from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from mindspeed_odpo.config import ParallelConfig  # noqa: E402
from mindspeed_odpo.engine.forward import _micro_batches, answer_logps, filled, pack_rows, row_multiple  # noqa: E402
from mindspeed_odpo.engine.logprobs import token_logps  # noqa: E402
from mindspeed_odpo.types import Pairs, Rollout, TrainBatch  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("single_rank")
VOCAB = 13


def table() -> torch.Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))


class Bigram(torch.nn.Module):
    """One chunk of a pipeline of one stage, as Megatron's schedule wants it."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self):
        super().__init__()
        self.config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)

    def set_input_tensor(self, tensor):
        pass

    def forward(self, ids, positions, mask, *, select, targets):
        assert torch.equal(positions[0], torch.arange(ids.shape[1]))
        hidden = torch.nn.functional.one_hot(ids[select], VOCAB).float()
        return token_logps(hidden, table().T, targets, VOCAB)


def make(prompts: list[list[int]], answers: list[list[list[int]]], left: int = 0, right: int = 0) -> Rollout:
    p, k = len(prompts), len(answers[0])
    s, r = max(map(len, prompts)) + left, max(len(a) for row in answers for a in row) + right
    prompt_ids, prompt_mask = torch.full((p, s), 9), torch.zeros(p, s, dtype=torch.bool)
    ids, mask = torch.full((p, k, r), 9), torch.zeros(p, k, r, dtype=torch.bool)
    for i in range(p):
        prompt_ids[i, s - len(prompts[i]) :] = torch.tensor(prompts[i])
        prompt_mask[i, s - len(prompts[i]) :] = True
        for j in range(k):
            ids[i, j, : len(answers[i][j])] = torch.tensor(answers[i][j], dtype=torch.int64)
            mask[i, j, : len(answers[i][j])] = True
    return Rollout(prompt_ids, prompt_mask, ids, mask, torch.ones(p, k, dtype=torch.bool), torch.arange(p), 0).check()


def pairs_of(reason: torch.Tensor) -> Pairs:
    zeros = torch.zeros(reason.shape, dtype=torch.int64)
    return Pairs(chosen=zeros, rejected=zeros + 1, margin=torch.zeros(reason.shape), reason=reason.to(torch.int64))


PROMPTS = [[7, 8], [3, 4, 5, 6], [1]]
ANSWERS = [[[5, 2], [6, 6, 2]], [[1, 2], [2]], [[10, 11, 12, 2], [4, 4]]]


def by_hand(prompt: list[int], answer: list[int]) -> float:
    logp = table().log_softmax(-1)
    chain = [prompt[-1], *answer]
    return sum(logp[before, token].item() for before, token in zip(chain, answer, strict=False))


def test_rows_of_the_docstring():
    rows = pack_rows(make([[7, 8]], [[[5, 2], [6]]]), torch.tensor([0]), torch.tensor([0]))
    assert rows.ids.tolist() == [[7, 8, 5]]
    assert (rows.row.tolist(), rows.column.tolist(), rows.target.tolist()) == ([0, 0], [1, 2], [5, 2])


@pytest.mark.parametrize(("left", "right"), [(0, 0), (40, 0), (0, 40), (7, 13)])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_every_answer_equals_the_hand_sum_whatever_the_padding_and_batch(left, right, micro_batch_size):
    got = answer_logps([Bigram()], make(PROMPTS, ANSWERS, left, right), micro_batch_size, CPU)
    expected = [[by_hand(prompt, answer) for answer in row] for prompt, row in zip(PROMPTS, ANSWERS, strict=True)]
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-6, atol=1e-5)


def test_pad_equal_to_a_real_token_changes_nothing():
    """Masks decide, not ids: here the padding id 9 also stands in the prompt and in the answer."""
    got = answer_logps([Bigram()], make([[9, 9], [1, 9, 3]], [[[9, 2], [9, 9]], [[2], [9]]], left=3, right=3), 2, CPU)
    assert got[0].tolist() == pytest.approx([by_hand([9, 9], [9, 2]), by_hand([9, 9], [9, 9])], abs=1e-5)
    assert got[1].tolist() == pytest.approx([by_hand([3], [2]), by_hand([3], [9])], abs=1e-5)


def test_an_empty_answer_sums_to_zero():
    got = answer_logps([Bigram()], make([[7, 8]], [[[], [5, 2]]]), 1, CPU)
    assert got[0, 0].item() == 0.0
    assert got[0, 1].item() == pytest.approx(by_hand([7, 8], [5, 2]), abs=1e-5)


def test_micro_batches_hold_each_kept_pair_once():
    p = 7
    rollout = make([[1]] * p, [[[3] * (1 + i % 3), [4, 2]] for i in range(p)])
    keep = torch.tensor([True, False, True, True, False, True, True])
    pieces = _micro_batches(TrainBatch(rollout, pairs_of(~keep[:, None]), torch.zeros(p, 2)), 2)
    assert [len(piece) for piece in pieces] == [2, 2, 1]
    assert sorted(torch.cat(pieces).tolist()) == [[0, 0], [2, 0], [3, 0], [5, 0], [6, 0]]


def test_a_rank_without_a_kept_pair_still_runs_one_micro_batch():
    rollout = make([[1]], [[[3, 2], [4, 2]]])
    pieces = _micro_batches(TrainBatch(rollout, pairs_of(torch.ones(1, 1)), torch.zeros(1, 2)), 4)
    assert [piece.tolist() for piece in pieces] == [[[0, 0]]]


def test_pairs_of_one_prompt_stay_together():
    """So that an answer that stands in several of them is run once."""
    rollout = make([[1], [1, 1, 1], [1, 1]], [[[3, 2], [4, 2], [5]]] * 3)
    pieces = _micro_batches(TrainBatch(rollout, pairs_of(torch.zeros(3, 3)), torch.zeros(3, 3)), 3)
    assert [piece[:, 0].tolist() for piece in pieces] == [[0] * 3, [2] * 3, [1] * 3]
    assert [piece[:, 1].tolist() for piece in pieces] == [[0, 1, 2]] * 3


def test_a_loss_mask_takes_tokens_out_of_the_sum_and_leaves_them_in_the_context():
    """Turns of the user inside a recorded dialogue are read and do not count."""
    rollout = make([[7, 8]], [[[5, 6, 3, 2], [6, 2]]])
    mask = rollout.response_mask.clone()
    mask[0, 0, 1:3] = False
    rows = pack_rows(replace(rollout, loss_mask=mask), torch.tensor([0]), torch.tensor([0]))
    assert rows.ids.tolist() == [[7, 8, 5, 6, 3]]
    assert (rows.column.tolist(), rows.target.tolist()) == ([1, 4], [5, 2])
    got = answer_logps([Bigram()], replace(rollout, loss_mask=mask), 1, CPU)
    assert got[0, 0].item() == pytest.approx(by_hand([8], [5]) + by_hand([3], [2]), abs=1e-5)


def test_context_parallel_parts_of_the_docstring():
    """Eight columns on two ranks: runs 0 and 3, runs 1 and 2. Targets and positions are those of the whole row, at the edge of a
    run too (column 1 predicts the token of column 2, which the other rank has)."""
    rows = pack_rows(make([[7, 8]], [[[5, 4, 3, 6, 1, 9, 2]]]), torch.tensor([0]), torch.tensor([0]))
    assert rows.ids.tolist() == [[7, 8, 5, 4, 3, 6, 1, 9]]
    first, second = (rows.part(rank, 2, 4) for rank in (0, 1))
    assert (first.ids.tolist(), first.positions.tolist()) == ([[7, 8, 1, 9]], [0, 1, 6, 7])
    assert (second.ids.tolist(), second.positions.tolist()) == ([[5, 4, 3, 6]], [2, 3, 4, 5])
    assert (first.column.tolist(), first.target.tolist()) == ([1, 2, 3], [5, 9, 2])
    assert (second.column.tolist(), second.target.tolist()) == ([0, 1, 2, 3], [4, 3, 6, 1])


def test_parts_hold_every_token_once_whatever_the_ranks():
    """On 1 to 4 ranks, padded to the ranks' multiple; the sums of the parts add up. A rank may have no token at all."""
    rollout = make(PROMPTS, ANSWERS)
    rows = pack_rows(rollout, torch.arange(3), torch.zeros(3, dtype=torch.int64))
    for ranks in (1, 2, 3, 4):
        multiple = 2 * ranks if ranks > 1 else 3
        parts = [rows.part(rank, ranks, multiple) for rank in range(ranks)]
        width = sum(part.ids.shape[1] for part in parts)
        assert width % multiple == 0 and torch.cat([part.positions for part in parts]).sort()[0].tolist() == list(range(width))
        found = [
            (r, part.positions[c].item(), t)
            for part in parts
            for r, c, t in zip(part.row.tolist(), part.column, part.target.tolist(), strict=True)
        ]
        assert sorted(found) == sorted(zip(rows.row.tolist(), rows.column.tolist(), rows.target.tolist(), strict=True))
        total = sum(part.sums(part.target.float()) for part in parts)
        assert torch.equal(total, rows.sums(rows.target.float()))
    short = pack_rows(make([[3] * 14], [[[5, 2]]]), torch.tensor([0]), torch.tensor([0]))
    assert [len(short.part(rank, 2, 4).row) for rank in (0, 1)] == [2, 0]


@pytest.mark.parametrize(
    ("sizes", "multiple"),
    [
        ({}, 1),
        ({"tensor": 4}, 1),
        ({"tensor": 4, "sequence": True}, 4),
        ({"context": 2}, 4),
        ({"context": 2, "tensor": 3, "sequence": True}, 12),
    ],
)
def test_row_length_is_padded_to_whole_runs(sizes, multiple):
    """Of 2 runs a context-parallel rank, and what a rank has to whole runs of its sequence-parallel ranks: 2 · lcm(2, 3)."""
    parallel = ParallelConfig(**sizes)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=12,
        num_attention_heads=12,
        tensor_model_parallel_size=parallel.tensor,
        context_parallel_size=parallel.context,
        sequence_parallel=parallel.sequence,
    )
    assert row_multiple(config) == multiple


def test_the_interleaved_schedule_gets_whole_rounds():
    config = TransformerConfig(
        num_layers=4,
        hidden_size=4,
        num_attention_heads=1,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
    )
    assert filled([1, 2, 3], 0, config, CPU) == [1, 2, 3, 0]
    assert filled([1, 2], 0, config, CPU) == [1, 2]
    assert filled([1, 2, 3], 0, Bigram().config, CPU) == [1, 2, 3]


def test_nothing_writes_to_its_input():
    rollout = make(PROMPTS, ANSWERS)
    before = replace(rollout, response_ids=rollout.response_ids.clone(), prompt_ids=rollout.prompt_ids.clone())
    answer_logps([Bigram()], rollout, 2, CPU)
    assert torch.equal(before.response_ids, rollout.response_ids) and torch.equal(before.prompt_ids, rollout.prompt_ids)
