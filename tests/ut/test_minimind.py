"""MiniMind's DPO notebook of 2025-02 as the second seed: its model written again in plain torch, its loss, its sizes.

Weights are random and shared by name, in both rope layouts: neighbouring channels as complex numbers (MiniMind until
2025-04) and halves (after). Nothing here shows that training learns, nor anything about MiniMind's own files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_odpo import device
from mindspeed_odpo.config import ModelConfig, ParallelConfig, parameters

device.setup()

from mindspeed_odpo.engine.forward import answer_logps  # noqa: E402
from mindspeed_odpo.engine.model import PolicyModel, build_model  # noqa: E402
from mindspeed_odpo.engine.parallel import destroy, init_single  # noqa: E402
from mindspeed_odpo.engine.weights import load_named, named_weights  # noqa: E402
from mindspeed_odpo.hf.random_init import read_model  # noqa: E402
from mindspeed_odpo.loss import preference_loss, reduced  # noqa: E402
from mindspeed_odpo.types import Rollout  # noqa: E402

DIM, HEADS, GROUPS, FFN, VOCAB, THETA, EPS, BETA = 512, 8, 2, 1408, 6400, 1e6, 1e-5, 0.1
HEAD = DIM // HEADS
WIDTH = 64  # tokens that every dialogue is padded to; the notebook's 512 would only cost time
REDUCTIONS = ("padded_mean", "masked_mean", "sum")


@pytest.fixture(scope="module", autouse=True)
def _group() -> Any:
    torch.set_num_threads(1)
    init_single()
    yield
    destroy()


# The notebook's model, loss and batch, in plain torch


def _random_weights(seed: int) -> dict[str, Tensor]:
    """Queries and keys are wide (attention scores of several units), so that every rotation shows in the loss."""
    g = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, std: float) -> Tensor:
        return torch.randn(rows, columns, generator=g) * std

    return {
        "embedding": matrix(VOCAB, DIM, 0.05),
        "wq": matrix(HEADS * HEAD, DIM, 0.1),
        "wk": matrix(GROUPS * HEAD, DIM, 0.1),
        "wv": matrix(GROUPS * HEAD, DIM, 0.05),
        "wo": matrix(DIM, HEADS * HEAD, 0.05),
        "gate": matrix(FFN, DIM, 0.05),
        "up": matrix(FFN, DIM, 0.05),
        "down": matrix(DIM, FFN, 0.05),
        "norm_attention": torch.rand(DIM, generator=g) + 0.5,
        "norm_ffn": torch.rand(DIM, generator=g) + 0.5,
        "norm": torch.rand(DIM, generator=g) + 0.5,
    }


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def _rope(x: Tensor, interleaved: bool) -> Tensor:
    """``x`` ``[N,T,heads,64]``; interleaved: channels 2i and 2i + 1 are one complex number, turned by multiplication."""
    angle = torch.outer(torch.arange(x.shape[1]).float(), THETA ** (-torch.arange(0, HEAD, 2).float() / HEAD))[:, None]
    if interleaved:
        number = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(number * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    left, right = x.chunk(2, -1)
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)


def _plain_logits(w: dict[str, Tensor], ids: Tensor, interleaved: bool) -> Tensor:
    """``[N,T,V]`` of one layer: attention with 4 query heads a key head, SwiGLU, head = embedding."""
    x = w["embedding"][ids]
    h = _rms_norm(x, w["norm_attention"])
    q, k, v = ((h @ w[name].T).unflatten(-1, (-1, HEAD)) for name in ("wq", "wk", "wv"))
    q, k = _rope(q, interleaved), _rope(k, interleaved)
    k, v = k.repeat_interleave(HEADS // GROUPS, 2), v.repeat_interleave(HEADS // GROUPS, 2)
    scores = torch.einsum("nqhd,nkhd->nhqk", q, k) / HEAD**0.5
    future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    mixed = torch.einsum("nhqk,nkhd->nqhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)
    x = x + mixed.flatten(2) @ w["wo"].T
    h = _rms_norm(x, w["norm_ffn"])
    x = x + (F.silu(h @ w["gate"].T) * (h @ w["up"].T)) @ w["down"].T
    return _rms_norm(x, w["norm"]) @ w["embedding"].T


def _notebook_loss(
    policy: dict[str, Tensor], ref: dict[str, Tensor], rows: list[list[int]], starts: list[int], interleaved: bool, reduction: str
) -> Tensor:
    """Rows: the chosen dialogues, then the rejected ones. ``starts``: where each answer begins. Padded with 0 to WIDTH."""
    ids = torch.tensor([row + [0] * (WIDTH - len(row)) for row in rows])
    x, y = ids[:, :-1], ids[:, 1:]
    at = torch.arange(1, WIDTH)
    mask = torch.stack([(at >= start) & (at < len(row)) for row, start in zip(rows, starts, strict=True)]).float()

    def each(w: dict[str, Tensor]) -> Tensor:
        logps = _plain_logits(w, x, interleaved).log_softmax(-1).gather(2, y[..., None])[..., 0] * mask
        return {"padded_mean": logps.mean(1), "masked_mean": logps.sum(1) / mask.sum(1), "sum": logps.sum(1)}[reduction]

    (policy_chosen, policy_rejected), (ref_chosen, ref_rejected) = each(policy).chunk(2), each(ref).chunk(2)
    return -F.logsigmoid(BETA * ((policy_chosen - policy_rejected) - (ref_chosen - ref_rejected))).mean()


# The same through the package


def _megatron(w: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Group by group: four query heads, their key head, their value head. Nothing moves within a head."""
    at = "decoder.layers.0."
    grouped = [w[name].unflatten(0, (GROUPS, -1)) for name in ("wq", "wk", "wv")]
    yield "embedding.word_embeddings.weight", w["embedding"]
    yield at + "input_layernorm.weight", w["norm_attention"]
    yield at + "self_attention.linear_qkv.weight", torch.cat(grouped, 1).flatten(0, 1)
    yield at + "self_attention.linear_proj.weight", w["wo"]
    yield at + "pre_mlp_layernorm.weight", w["norm_ffn"]
    yield at + "mlp.linear_fc1.weight", torch.cat([w["gate"], w["up"]])
    yield at + "mlp.linear_fc2.weight", w["down"]
    yield "decoder.final_layernorm.weight", w["norm"]


def _model(w: dict[str, Tensor], interleaved: bool) -> list[PolicyModel]:
    config = replace(read_model("minimind-1layer"), rotary_interleaved=interleaved)
    chunks = build_model(config, ParallelConfig(), False, trainable=False)
    load_named(chunks, _megatron(w))
    return chunks


def _rollout(rows: list[list[int]], starts: list[int]) -> Rollout:
    """Two prompts with the chosen answer at 0 and the rejected one at 1."""
    p = len(rows) // 2
    s, r = max(starts), max(len(row) - start for row, start in zip(rows, starts, strict=True))
    prompt_ids, prompt_mask = torch.zeros(p, s, dtype=torch.int64), torch.zeros(p, s, dtype=torch.bool)
    ids, mask = torch.zeros(p, 2, r, dtype=torch.int64), torch.zeros(p, 2, r, dtype=torch.bool)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        answer, where = row[start:], (i % p, i // p)
        prompt_ids[i % p, s - start :] = torch.tensor(row[:start])
        prompt_mask[i % p, s - start :] = True
        ids[where][: len(answer)] = torch.tensor(answer)
        mask[where][: len(answer)] = True
    return Rollout(prompt_ids, prompt_mask, ids, mask, torch.ones(p, 2, dtype=torch.bool), torch.arange(p), 0).check()


def _our_loss(policy: list[PolicyModel], ref: list[PolicyModel], rollout: Rollout, reduction: str) -> float:
    lengths = rollout.counted_lengths()
    values = [reduced(answer_logps(model, rollout, 2, torch.device("cpu")), lengths, reduction, WIDTH - 1) for model in (policy, ref)]
    (chosen, rejected), (ref_chosen, ref_rejected) = (value.unbind(1) for value in values)
    return preference_loss(chosen, rejected, ref_chosen, ref_rejected, loss_type="sigmoid", beta=BETA).mean().item()


def _dialogues() -> tuple[list[list[int]], list[int]]:
    g = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB, (n,), generator=g).tolist() for n in (24, 11)]
    answers = [torch.randint(3, VOCAB, (n,), generator=g).tolist() for n in (30, 9, 17, 22)]
    return [prompts[i % 2] + answer for i, answer in enumerate(answers)], [24, 11, 24, 11]


@pytest.mark.parametrize("interleaved", [True, False])
def test_loss_of_the_one_layer_model(interleaved: bool) -> None:
    """Policy and reference initialised apart: DPO's loss over two pairs agrees with the plain model to 1e-5 for every
    reduction, and lies away from ln 2, where it would say little. Logits agree to 1e-4 at a size of several units."""
    weights = [_random_weights(seed) for seed in (0, 1)]
    policy, ref = (_model(w, interleaved) for w in weights)
    rows, starts = _dialogues()
    with torch.no_grad():
        plain = _plain_logits(weights[0], torch.tensor(rows[:1]), interleaved)
        torch.testing.assert_close(policy[0](torch.tensor(rows[:1])), plain, atol=1e-4, rtol=0)
    assert plain.std() > 0.5
    for reduction, away in zip(REDUCTIONS, (1e-3, 1e-3, 1e-1), strict=True):
        expected = _notebook_loss(*weights, rows, starts, interleaved, reduction).item()
        assert _our_loss(policy, ref, _rollout(rows, starts), reduction) == pytest.approx(expected, abs=1e-5)
        assert abs(expected - 0.6931) > away, reduction


@pytest.mark.parametrize("interleaved", [True, False])
def test_mutant_the_wrong_rope_layout_is_caught(interleaved: bool) -> None:
    """The same weights with the other layout: every loss differs by more than 1e-3, a hundred times what is allowed."""
    weights = [_random_weights(seed) for seed in (0, 1)]
    rows, starts = _dialogues()
    policy, ref = (_model(w, not interleaved) for w in weights)
    for reduction in REDUCTIONS:
        expected = _notebook_loss(*weights, rows, starts, interleaved, reduction).item()
        assert abs(_our_loss(policy, ref, _rollout(rows, starts), reduction) - expected) > 1e-3, reduction


@pytest.mark.parametrize(("name", "count"), [("minimind-1layer", 6_096_384), ("minimind-26m", 25_829_888)])
def test_parameters(name: str, count: int) -> None:
    """From the yaml and from the built model. By hand, one layer: attention 512·(512 + 2·128 + 512) = 655,360, SwiGLU
    3·512·1408 = 2,162,688, two norms 1,024; the tied embedding 6400·512 = 3,276,800 and the last norm 512."""
    config: ModelConfig = read_model(name)
    assert config.rotary_interleaved and config.kv_channels == HEAD
    assert count == config.num_layers * (655_360 + 2_162_688 + 1_024) + 3_276_800 + 512
    assert parameters(config) == count
    built = build_model(config, ParallelConfig(), False, trainable=True)
    assert sum(tensor.numel() for _, tensor in named_weights(built)) == count
