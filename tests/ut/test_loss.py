"""The two losses against hand-worked numbers and finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from mindspeed_odpo.loss import preference_loss


def loss(margin: float, **settings) -> float:
    """Loss of one pair whose log-ratio difference is ``margin``, put together from four unequal numbers."""
    chosen, rejected, ref_chosen, ref_rejected = -10.0 + margin, -20.0, -12.0, -22.0
    values = [torch.tensor([x], dtype=torch.float64) for x in (chosen, rejected, ref_chosen, ref_rejected)]
    return preference_loss(*values, **{"loss_type": "sigmoid", "beta": 0.1, **settings}).item()


@pytest.mark.parametrize(("margin", "expected"), [(0, math.log(2)), (6, 0.437488), (-6, 1.037488), (25, 0.078890)])
def test_sigmoid_by_hand(margin, expected):
    assert loss(margin) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("margin", "expected"), [(0, 25.0), (6, 1.0), (-6, 121.0)])
def test_ipo_by_hand(margin, expected):
    """(d - 1 / (2 * 0.1))**2 = (d - 5)**2."""
    assert loss(margin, loss_type="ipo") == pytest.approx(expected, abs=1e-9)


def test_label_smoothing_mixes_both_directions():
    """0.9 * 0.437488 + 0.1 * 1.037488 = 0.497488."""
    assert loss(6, label_smoothing=0.1) == pytest.approx(0.497488, abs=1e-6)


def test_beta_scales_the_margin():
    assert loss(6, beta=0.2) == pytest.approx(loss(12, beta=0.1), abs=1e-12)


def test_without_a_difference_to_the_reference_the_loss_is_ln_2_in_fp32():
    policy = torch.tensor([-57.25, -81.5])
    got = preference_loss(policy, policy - 3, policy, policy - 3, loss_type="sigmoid", beta=0.1)
    assert (got - math.log(2)).abs().max() < 1e-6


def test_far_margins_stay_finite():
    far = torch.tensor([1e5, -1e5])
    zero = torch.zeros(2)
    got = preference_loss(far, zero, zero, zero, loss_type="sigmoid", beta=0.1)
    assert got.tolist() == pytest.approx([0.0, 1e4])


@pytest.mark.parametrize("settings", [{"loss_type": "sigmoid"}, {"loss_type": "sigmoid", "label_smoothing": 0.2}, {"loss_type": "ipo"}])
def test_gradient_against_finite_differences(settings):
    torch.manual_seed(0)
    inputs = [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    assert torch.autograd.gradcheck(lambda *x: preference_loss(*x, beta=0.3, **settings), inputs)


def test_an_unknown_loss_names_the_known_ones():
    with pytest.raises(ValueError, match="'sigmod': known are sigmoid, ipo"):
        loss(0, loss_type="sigmod")
