"""Numbers recorded from MindSpeed-LLM 2.0.0 (CPU, torch 2.13), against this package's pairs, loss, rows and metrics.

``golden/`` holds numbers only: 40 runs of its online DPO loss over 12 batches, four small ones with one-token answers, and what
its helpers gave. Upstream is right with one pair in a micro-batch and mostly wrong with more: it then calls the first sample
chosen, or makes pairs across prompts. Where it was right we give its numbers, where it was wrong the exact ones, worked out
pair by pair when the numbers were recorded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_odpo import device

device.setup()

from mindspeed_odpo.config import ModelConfig, PairsConfig  # noqa: E402
from mindspeed_odpo.engine import generate  # noqa: E402
from mindspeed_odpo.engine.forward import pack_rows  # noqa: E402
from mindspeed_odpo.loss import preference_loss  # noqa: E402
from mindspeed_odpo.metrics import step_metrics  # noqa: E402
from mindspeed_odpo.pairs import make_pairs  # noqa: E402
from mindspeed_odpo.types import Pairs, Rollout, StepStats  # noqa: E402


def golden(name: str) -> Any:
    return json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())


LOSS, HELPERS = golden("dpo_loss"), golden("helpers")
BETA, CASES = LOSS["beta"], LOSS["cases"]
CLOSE = {"rel": 2e-6, "abs": 2e-6}
STATS = (
    *("loss", "sft", "logps_chosen", "logps_rejected", "ref_logps_chosen", "ref_logps_rejected"),
    *("reward_chosen", "reward_rejected", "accuracy"),
)


def rollout(responses: list[list[int]], prompt_length: int = 3) -> Rollout:
    """Rows 2i and 2i + 1, upstream's order, are the two answers of prompt i: ``[P, K=2]`` from here on."""
    width = max(map(len, responses))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in responses]).view(-1, 2, width)
    mask = torch.tensor([[j < len(row) for j in range(width)] for row in responses]).view(-1, 2, width)
    finished = torch.tensor([row[-1] == LOSS["eos"] for row in responses]).view(-1, 2)
    prompt = torch.full((len(ids), prompt_length), 7)
    return Rollout(prompt, prompt.bool(), ids, mask, finished, torch.arange(len(ids)), 0).check()


def losses(pairs: Pairs, logps: Tensor, ref: Tensor, loss_type: str) -> Tensor:
    """One loss a pair, f32 ``[P]``; ``logps``, ``ref``: f32 ``[P,2]``, one sum an answer."""
    assert bool(pairs.keep.all()), "no recorded pair is left out"
    sides = [values.gather(1, which).squeeze(1) for values in (logps, ref) for which in (pairs.chosen, pairs.rejected)]
    return preference_loss(*sides, loss_type=loss_type, beta=BETA)


def ours(batch: dict[str, Any], loss_type: str) -> tuple[float, list[float], Pairs, Tensor]:
    """Our loss of a recorded batch; its gradient by row, which is the same at each of an answer's tokens and 0 on padding."""
    answers = rollout(batch["responses"])
    pairs = make_pairs(torch.tensor(batch["scores"]).view(-1, 2), answers, PairsConfig(missing_eos_penalty=LOSS["missing_eos_penalty"]))
    token_logps = torch.tensor(batch["log_prob"]).view(len(answers), 2, -1).requires_grad_()
    width = answers.response_mask.shape[-1]
    counted = torch.zeros(token_logps.shape, dtype=torch.bool)
    counted[..., :width] = answers.response_mask
    logps, ref = ((values * counted).sum(-1) for values in (token_logps, torch.tensor(batch["ref_log_prob"]).view(len(answers), 2, -1)))
    each = losses(pairs, logps, ref, loss_type)
    each.mean().backward()
    gradient = token_logps.grad
    first = gradient[..., :1]
    assert torch.equal(gradient, first * counted), "each real token has its answer's gradient, padding none"
    return each.mean().item(), first.flatten().tolist(), pairs, torch.stack([logps.detach(), ref])


def case_name(case: dict[str, Any]) -> str:
    pairs = case["micro_batch_rows"] // 2
    return f"batch{case['batch']}-{case['loss_type']}-{pairs}pairs-{'right' if case['right'] else 'wrong'}"


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_where_upstream_was_right_we_equal_it_and_elsewhere_the_exact_answer(case):
    """Loss and d loss / d log-prob. Where upstream was wrong its loss may be close by chance; some gradient is off by more than 0.02."""
    loss, gradient, _, _ = ours(LOSS["batches"][case["batch"]], case["loss_type"])
    exact = LOSS["batches"][case["batch"]]["exact"][case["loss_type"]]
    assert loss == pytest.approx(exact["loss"], **CLOSE)
    assert gradient == pytest.approx(exact["grad"], **CLOSE)
    if case["right"]:
        assert loss == pytest.approx(case["loss"], **CLOSE)
        assert gradient == pytest.approx(case["grad"], **CLOSE)
    else:
        assert loss != pytest.approx(case["loss"], abs=1e-5, rel=0)
        assert max(abs(a - b) for a, b in zip(gradient, case["grad"], strict=True)) > 0.02


def test_upstream_is_right_with_one_pair_and_wrong_in_18_of_40_cases():
    assert len(CASES) == 40 and sum(not case["right"] for case in CASES) == 18
    assert all(case["right"] for case in CASES if case["micro_batch_rows"] == 2)


@pytest.mark.parametrize("batch", [b for b in LOSS["batches"] if "upstream_stats" in b], ids=lambda b: f"{len(b['responses']) // 2}pairs")
def test_log_probs_and_rewards_of_single_pairs_are_upstreams(batch):
    """One pair a micro-batch: logps/chosen, logps/rejected, rewards/chosen, rewards/rejected."""
    _, _, pairs, (logps, ref) = ours(batch, "sigmoid")
    sides = [values.gather(1, which) for values in (logps, BETA * (logps - ref)) for which in (pairs.chosen, pairs.rejected)]
    torch.testing.assert_close(torch.cat(sides, 1), torch.tensor(batch["upstream_stats"]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", golden("pairing"), ids=lambda case: str(case["scores"]))
def test_two_pairs_of_one_token_answers(case):
    """Log-probs -1, -3, -10, -20, reference 0. Scores [0, 1, 0, 1]: ours 1.0557; upstream 0.4557, every gradient of the wrong sign."""
    logps = torch.tensor(case["logp"]).view(2, 2).requires_grad_()
    pairs = make_pairs(torch.tensor(case["scores"], dtype=torch.float32).view(2, 2), rollout([[5], [6], [7], [8]], 1), PairsConfig())
    loss = losses(pairs, logps, torch.zeros(2, 2), "sigmoid").mean()
    loss.backward()
    assert loss.item() == pytest.approx(case["exact_loss"], **CLOSE)
    assert logps.grad.flatten().tolist() == pytest.approx(case["exact_grad"], **CLOSE)
    if case["scores"] != [1, 0, 1, 0]:
        assert abs(loss.item() - case["upstream_loss"]) > 0.05


def upstream_rows(scores: list[float]) -> list[tuple[int, int]]:
    """(chosen row, rejected row) as upstream 2.0.0 finds them in the rows of one micro-batch: it orders rows as all chosen, then all
    rejected, and reads them as if the two of a pair stood side by side."""
    n = len(scores) // 2
    first_wins = [a >= b for a, b in zip(scores[0::2], scores[1::2], strict=True)]
    rows = [i + (0 if wins else n) for i, wins in enumerate(first_wins)] + [i + (n if wins else 0) for i, wins in enumerate(first_wins)]
    return list(zip(rows[0::2], rows[1::2], strict=True))


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_mutant_rows_scrambled_as_upstream_does(case):
    """Upstream's row order, put in the place of our pairs, gives upstream's recorded loss in all 40 cases: its fault is understood,
    and the checks above see it wherever it matters."""
    batch, size = LOSS["batches"][case["batch"]], case["micro_batch_rows"]
    _, _, _, (logps, ref) = ours(batch, case["loss_type"])
    answers, rows, refs = rollout(batch["responses"]), logps.flatten(), ref.flatten()
    scores = torch.tensor(batch["scores"]) - LOSS["missing_eos_penalty"] * ~answers.finished.flatten()
    parts = []
    for start in range(0, len(rows), size):
        pairs = torch.tensor(upstream_rows(scores[start : start + size].tolist())) + start
        chosen, rejected = pairs.unbind(1)
        sides = (rows[chosen], rows[rejected], refs[chosen], refs[rejected])
        parts.append(preference_loss(*sides, loss_type=case["loss_type"], beta=BETA).mean())
    wrong = torch.stack(parts).mean().item()
    assert wrong == pytest.approx(case["loss"], **CLOSE)
    assert (wrong == pytest.approx(batch["exact"][case["loss_type"]]["loss"], abs=1e-5, rel=0)) == case["right"]


@pytest.mark.parametrize("case", HELPERS["split"], ids=lambda case: f"{len(case['values'])}rows")
def test_the_two_answers_of_a_prompt_are_neighbours(case):
    """Scores that rise: each prompt's second answer wins over its first. Upstream 2.0.0 splits rows so, its forerunner into halves."""
    scores = torch.tensor(case["values"]).view(-1, 2)
    pairs = make_pairs(scores, rollout([[10 + i] for i in range(scores.numel())]), PairsConfig())
    split = [scores.gather(1, which).flatten().tolist() for which in (pairs.rejected, pairs.chosen)]
    assert split == case["after"]
    assert (split == case["before"]) == (len(scores) == 1)


@pytest.mark.parametrize("case", HELPERS["first_eos"], ids=lambda case: str(case["responses"]))
def test_an_answer_ends_with_its_first_eos(case, monkeypatch):
    """The decoder, made to draw the recorded tokens: upstream's index of the first EOS is our last one, its -1 our unfinished answer."""
    k, width = len(case["responses"]), len(case["responses"][0])
    tiny = ModelConfig("tiny", 1, 8, 8, 1, 1, 8, vocab_size=16, padded_vocab_size=16, max_position_embeddings=16)
    decoder = generate.Decoder(tiny, bf16=False)
    decoder.load_weights(1, ((name, torch.zeros(shape)) for name, shape in generate.weight_shapes(tiny).items()))
    now: list[tuple[int, Tensor]] = []
    monkeypatch.setattr(generate, "sample", lambda *_, **__: torch.tensor([case["responses"][row][now[-1][0]] for row in now[-1][1]]))
    ids, mask, finished = decoder.generate(
        torch.tensor([[7]]),
        torch.tensor([[True]]),
        num_answers=k,
        max_new_tokens=width,
        eos_ids=[case["eos"]],
        uniforms=torch.zeros(1, k, width, dtype=torch.float64),
        watch=lambda j, rows, logits: now.append((j, rows.clone())),
    )
    ends = [width if i < 0 else i + 1 for i in case["score_idx"]]
    assert mask.sum(-1).tolist() == [ends]
    assert finished.tolist() == [[i >= 0 for i in case["score_idx"]]]
    assert [ids[0, a, :n].tolist() for a, n in enumerate(ends)] == [row[:n] for row, n in zip(case["responses"], ends, strict=True)]


@pytest.mark.parametrize("case", HELPERS["positions"], ids=lambda case: str(case["prompts_ori_length"]))
def test_real_tokens_have_upstreams_positions(case):
    """Rows are packed, so a token's column is its position: what upstream counts from the first real token. Padding is 0."""
    s, r = case["prompts_pad_length"], case["responses_pad_length"]
    ids, mask, position = (torch.tensor(case[name]) for name in ("input_ids", "attention_mask", "position_ids"))
    mask, n = mask.bool(), len(ids)
    batch = Rollout(
        ids[:, :s], mask[:, :s], ids[:, None, s:], mask[:, None, s:], torch.ones(n, 1, dtype=torch.bool), torch.arange(n), 0
    ).check()
    assert batch.lengths().flatten().tolist() == case["responses_ori_length"] and batch.response_ids.shape[-1] == r
    rows = pack_rows(batch, torch.arange(n), torch.zeros(n, dtype=torch.int64))
    for i in range(n):
        real = ids[i][mask[i]].tolist()
        assert position[i][mask[i]].tolist() == list(range(len(real)))
        width = rows.ids.shape[1]  # the longest row goes without its last token, which predicts nothing
        assert rows.ids[i].tolist() == (real + [0] * width)[:width]
        of_answer = rows.row == i
        assert (rows.column[of_answer] + 1).tolist() == position[i, s:][mask[i, s:]].tolist()
        assert rows.target[of_answer].tolist() == ids[i, s:][mask[i, s:]].tolist()


def test_lengths_are_upstreams_and_scores_are_read_at_the_last_token():
    """Upstream adds up the reward model's outputs over all positions of an answer, padding too: its mean score is -0.54875. Ours are the
    outputs at the last real tokens: -0.57, -0.19, -1.63, -0.09, -0.84, 0.07, 0.78, 0.21, mean -0.2825."""
    recorded = HELPERS["metrics"]
    batch = rollout(recorded["responses"], recorded["prompt_length"])
    outputs = torch.tensor(recorded["rm_scores"])
    scores = outputs.gather(1, batch.lengths().view(-1, 1) - 1).view(-1, 2)
    stats = StepStats(dict.fromkeys(STATS, 0.0), pairs=4)
    got = step_metrics(stats, batch, make_pairs(scores, batch, PairsConfig()), scores, {"rollout": 1.0, "all": 1.0}, beta=BETA, epoch=0.0)
    upstream = recorded["upstream"]
    lengths = [name for name in upstream if "length" in name]
    assert len(lengths) == 6 and {name: got[name] for name in lengths} == {name: upstream[name] for name in lengths}
    assert got["reward/score/mean"] == pytest.approx(-0.2825, abs=1e-6)
    assert outputs.sum(1).mean().item() == pytest.approx(upstream["reward/score/mean"], abs=1e-5)
