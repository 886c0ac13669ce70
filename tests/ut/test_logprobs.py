"""Log-probs of answer tokens: the numbers, the padded vocabulary, and what is never built."""

from __future__ import annotations

import pytest
import torch

from mindspeed_odpo.engine.logprobs import token_logps


def problem(a: int = 7, h: int = 8, vocab: int = 11, padded: int = 16):
    torch.manual_seed(0)
    hidden, weight = torch.randn(a, h), torch.randn(padded, h)
    return hidden, weight, torch.randint(0, vocab, (a,)), vocab


def test_by_hand():
    """Logits [ln 1, ln 2, ln 5]: probabilities 1/8, 2/8, 5/8."""
    weight = torch.tensor([[1.0], [2.0], [5.0]]).log()
    got = token_logps(torch.ones(3, 1), weight, torch.tensor([0, 1, 2]), 3)
    assert got.exp().tolist() == pytest.approx([1 / 8, 2 / 8, 5 / 8])


def test_padded_rows_take_no_probability():
    """The four targets' probabilities over the true vocabulary sum to one, however large the padded rows are."""
    hidden, weight, _, vocab = problem(a=1)
    weight[vocab:] = 100.0 * hidden[0]
    got = token_logps(hidden.expand(vocab, -1), weight, torch.arange(vocab), vocab)
    assert got.exp().sum().item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_values_and_gradients_equal_log_softmax(chunk):
    """In pieces and whole: value, gradient of the hidden states and of the weight, whose padded rows get none."""
    hidden, weight, targets, vocab = problem()
    results = []
    for ours in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if ours:
            out = token_logps(h, w, targets, vocab, chunk=chunk)
        else:
            out = (h @ w[:vocab].T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        (out * torch.arange(1.0, 8.0)).sum().backward()
        results.append((out.detach(), h.grad, w.grad))
    for plain, got in zip(*results, strict=True):
        torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-5)
    assert results[1][2][vocab:].abs().sum() == 0


def test_no_position_at_all():
    """A rank of several that share a sequence may hold no answer token: nothing, with a gradient of zero."""
    hidden, weight, targets, vocab = problem()
    h, w = hidden[:0].clone().requires_grad_(), weight.clone().requires_grad_()
    token_logps(h, w, targets[:0], vocab).sum().backward()
    assert h.grad.shape == (0, 8) and w.grad.abs().sum() == 0


def test_a_frozen_weight_gets_no_gradient():
    hidden, weight, targets, vocab = problem()
    h = hidden.clone().requires_grad_()
    token_logps(h, weight, targets, vocab).sum().backward()
    assert weight.grad is None and h.grad.abs().sum() > 0


def test_bf16_inputs_are_reduced_in_fp32():
    """Over 50,000 equal logits the exact log-prob is -ln 50000; a bf16 softmax cannot say it."""
    weight = torch.zeros(50_000, 4, dtype=torch.bfloat16)
    got = token_logps(torch.ones(1, 4, dtype=torch.bfloat16), weight, torch.tensor([3]), 50_000)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(-10.819778, abs=1e-5)
