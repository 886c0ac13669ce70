"""Pairs and log-probs to one loss a pair. Pure torch; no config, no machine, nothing in place.

Every function keeps the dtype of its input: training hands in f32, the tests f64. The formulas are the papers'; the docstring
of each names its paper, and TRL's class where TRL has it. Two choices run through all of them: ``log sigmoid`` and
``sigmoid(-x)`` instead of ``log(sigmoid(x))`` and ``1 - sigmoid(x)``, which lose every digit at large margins; and a
setting that a loss does not know is an error, where TRL warns or says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_odpo.keys import LOSS_TYPES, REDUCTIONS, SMOOTHED


def reduced(sums: Tensor, lengths: Tensor, reduction: str, padded_length: int) -> Tensor:
    """One log-probability an answer, f32 in the shape of ``sums``; nats, or nats a token.

    ``sums`` f32: log-probability summed over an answer's tokens; ``lengths`` i64, same shape: how many tokens were summed.

    * ``sum``: as it is; DPO's own form (arXiv 2305.18290, equation 7) and TRL's.
    * ``masked_mean``: over the answer's own length; SimPO (arXiv 2405.14734), and IPO in TRL's DPOTrainer.
    * ``padded_mean``: over the constant ``padded_length``, tokens, whatever the length; MiniMind's notebook of 2025-02, whose
      rows are all padded to one length. A constant, not the width of this batch, on which no result may depend.

    An answer of length 0 gives 0 and a gradient of 0. Raises ValueError for an unknown reduction, shapes that differ and,
    with ``padded_mean``, a ``padded_length`` below 1.
    """
    if lengths.shape != sums.shape:
        raise ValueError(f"lengths {list(lengths.shape)}: one an answer, expected the shape of the sums, {list(sums.shape)}")
    if reduction == "sum":
        values = sums
    elif reduction == "masked_mean":
        values = sums / lengths.clamp(min=1)
    elif reduction == "padded_mean":
        if padded_length < 1:
            raise ValueError(f"padded_length {padded_length}: padded_mean divides by it, give the tokens of a full row (1 or more)")
        values = sums / padded_length
    else:
        raise ValueError(f"dpo_logps_reduction '{reduction}': known are {', '.join(REDUCTIONS)}")
    # Chosen, not multiplied by 0: nothing that stands in an empty answer's place may come through, not even a NaN.
    return torch.where(lengths > 0, values, torch.zeros_like(values))


def sft_loss(chosen_sums: Tensor, chosen_lengths: Tensor) -> Tensor:
    """Negative log-likelihood a token of each chosen answer, f32 ``[N]``, nats; 0 for an answer of length 0.

    ``chosen_sums`` f32 ``[N]``, ``chosen_lengths`` i64 ``[N]``. The term that iterative RPO adds to DPO (arXiv 2404.19733), divided by
    the answer's own length once and by nothing else, as in LLaMA-Factory. TRL's DPOTrainer (``sft``) averages over all tokens of
    a micro-batch instead, so that long answers weigh more and the loss depends on how a batch was split.
    """
    return -reduced(chosen_sums, chosen_lengths, "masked_mean", 1)


def preference_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    loss_type: str,
    beta: float,
    label_smoothing: float = 0.0,
    gamma_beta_ratio: float = 0.0,
) -> Tensor:
    """Loss of each pair, f32 ``[N]``, not reduced.

    The four inputs are f32 ``[N]``, log-probabilities of whole answers as ``reduced`` gives them, one a pair. ``loss_type`` is one
    of ``LOSS_TYPES``; ``beta`` > 0; ``label_smoothing`` in [0, 0.5) is the probability that a preference is wrong, for the losses of
    ``SMOOTHED`` alone (``exo_pair`` needs more than 0). ``gamma_beta_ratio`` >= 0 is read by ``simpo`` alone, which for its part never
    reads the reference inputs: they may be NaN.

    Raises ValueError for an unknown loss, a number out of its range, and shapes that differ.
    """
    _check(loss_type, beta, label_smoothing, gamma_beta_ratio)
    if loss_type == "simpo":
        _same_shape(policy_chosen=policy_chosen, policy_rejected=policy_rejected)
        return _simpo(policy_chosen, policy_rejected, beta, label_smoothing, gamma_beta_ratio)
    _same_shape(policy_chosen=policy_chosen, policy_rejected=policy_rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    return _LOSSES[loss_type](policy_chosen - ref_chosen, policy_rejected - ref_rejected, beta, label_smoothing)


def _check(loss_type: str, beta: float, label_smoothing: float, gamma_beta_ratio: float) -> None:
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"dpo_loss_type '{loss_type}': known are {', '.join(LOSS_TYPES)}")
    if not 0 < beta < math.inf:
        raise ValueError(f"dpo_beta {beta:g}: must be more than 0 and finite; 0.1 is usual")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"dpo_label_smoothing {label_smoothing:g}: must be in [0, 0.5), the probability that a preference is wrong")
    if label_smoothing and loss_type not in SMOOTHED:
        raise ValueError(f"dpo_label_smoothing {label_smoothing:g}: {loss_type} has none, set it to 0 (known to {', '.join(SMOOTHED)})")
    if loss_type == "exo_pair" and not label_smoothing:
        raise ValueError("dpo_label_smoothing 0: exo_pair takes its logarithm and needs more than 0; its paper has 0.001")
    if loss_type == "simpo" and not 0 <= gamma_beta_ratio < math.inf:
        raise ValueError(f"gamma_beta_ratio {gamma_beta_ratio:g}: must be 0 or more and finite; 1.4 is the default")


def _same_shape(**tensors: Tensor) -> None:
    # Broadcasting would turn [N] beside [N, 1] into N x N pairs that nobody made.
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    first = shapes["policy_chosen"]
    for name, shape in shapes.items():
        if shape != first:
            raise ValueError(f"{name} {shape}: one log-prob a pair, expected the shape of policy_chosen, {first}")


# ---------------------------------------------------------------------------------------------------------------------
# One function a loss. c and r: log pi / pi_ref of the chosen and the rejected answer, f32 [N]; s: the label smoothing.


def _sigmoid(c: Tensor, r: Tensor, beta: float, s: float) -> Tensor:
    """``-(1 - s) log sigmoid(x) - s log sigmoid(-x)``, ``x = beta (c - r)``; ln 2 at x = 0.

    DPO, arXiv 2305.18290, equation 7; with s > 0 cDPO (Mitchell 2023, "A note on DPO with noisy preferences"). TRL: s = 0 in
    DPOTrainer, whose sigmoid ignores a label smoothing, and in OnlineDPOTrainer; s > 0 in CPOTrainer.
    """
    return _logistic(beta * (c - r), s)


def _logistic(x: Tensor, s: float) -> Tensor:
    return -(1 - s) * F.logsigmoid(x) - s * F.logsigmoid(-x)


def _robust(c: Tensor, r: Tensor, beta: float, s: float) -> Tensor:
    """``(-(1 - s) log sigmoid(x) + s log sigmoid(-x)) / (1 - 2 s)``, ``x = beta (c - r)``: unbiased under labels flipped with
    probability s; falls below 0 for large x.

    Robust DPO, arXiv 2403.00409. TRL: DPOTrainer, which takes s = 0.5 too and then divides by 0.
    """
    x = beta * (c - r)
    return (-(1 - s) * F.logsigmoid(x) + s * F.logsigmoid(-x)) / (1 - 2 * s)


def _hinge(c: Tensor, r: Tensor, beta: float, s: float) -> Tensor:
    """``max(0, 1 - beta (c - r))``. RSO, arXiv 2309.06657 (SLiC's hinge, 2305.10425, on log-ratios). TRL: DPOTrainer."""
    return F.relu(1 - beta * (c - r))


def _ipo(c: Tensor, r: Tensor, beta: float, s: float) -> Tensor:
    """``(c - r - 1 / (2 beta))**2``. IPO, arXiv 2310.12036, equation 17, whose tau is our beta.

    On whatever the log-probs were reduced to, and the target 1 / (2 beta) with them: sums are the equation's letter and
    TRL's OnlineDPOTrainer; means a token (``masked_mean``) are TRL's DPOTrainer, OAT and LLaMA-Factory.
    """
    return (c - r - 1 / (2 * beta)) ** 2


def _exo_pair(c: Tensor, r: Tensor, beta: float, s: float) -> Tensor:
    """``q (log q - log(1 - s)) + (1 - q) (log(1 - q) - log s)``, ``q = sigmoid(beta (c - r))``: the KL from the policy's preference to
    the labels'. EXO, arXiv 2402.00856, equation 16. TRL: DPOTrainer, which rounds s to f32."""
    x = beta * (c - r)
    return torch.sigmoid(x) * (F.logsigmoid(x) - math.log1p(-s)) + torch.sigmoid(-x) * (F.logsigmoid(-x) - math.log(s))


def _nca_pair(c: Tensor, r: Tensor, beta: float, s: float) -> Tensor:
    """``-log sigmoid(beta c) - log sigmoid(-beta c) / 2 - log sigmoid(-beta r) / 2``. NCA for pairs, arXiv 2402.05369. TRL: DPOTrainer."""
    return -F.logsigmoid(beta * c) - 0.5 * F.logsigmoid(-beta * c) - 0.5 * F.logsigmoid(-beta * r)


def _sppo_hard(c: Tensor, r: Tensor, beta: float, s: float) -> Tensor:
    """``(c - 1 / (2 beta))**2 + (r + 1 / (2 beta))**2``. SPPO, arXiv 2405.00675, equation 4.7 with a winning probability of 1 and 0, and
    1 / beta for its eta. TRL: DPOTrainer."""
    return (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2


def _apo_zero(c: Tensor, r: Tensor, beta: float, s: float) -> Tensor:
    """``sigmoid(-beta c) + sigmoid(beta r)``: chosen up, rejected down. APO, arXiv 2408.06266, equation 7. TRL: DPOTrainer."""
    return torch.sigmoid(-beta * c) + torch.sigmoid(beta * r)


def _apo_down(c: Tensor, r: Tensor, beta: float, s: float) -> Tensor:
    """``sigmoid(beta c) + sigmoid(-beta (c - r))``: both down, rejected further. APO, arXiv 2408.06266, equation 8. TRL: DPOTrainer."""
    return torch.sigmoid(beta * c) + torch.sigmoid(-beta * (c - r))


def _simpo(policy_chosen: Tensor, policy_rejected: Tensor, beta: float, s: float, gamma_beta_ratio: float) -> Tensor:
    """``-(1 - s) log sigmoid(x) - s log sigmoid(-x)``, ``x = beta (log pi(chosen) - log pi(rejected) - gamma_beta_ratio)``.

    SimPO, arXiv 2405.14734, on means a token (``masked_mean``). TRL: CPOTrainer with
    ``simpo_gamma = beta * gamma_beta_ratio``; MindSpeed-LLM 2.0.0 has our key. An empty answer is NaN in TRL.
    """
    return _logistic(beta * (policy_chosen - policy_rejected - gamma_beta_ratio), s)


_LOSSES: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
}
