"""Pairs and log-probs to one loss a pair. Pure torch; no config, no machine, nothing in place.

Sources: DPO, Rafailov et al. 2023 (arXiv 2305.18290) equation 7; its label smoothing (cDPO), Mitchell 2023; IPO, Azar
et al. 2023 (arXiv 2310.12036) equation 17. TRL's OnlineDPOTrainer has the first and the last on the same sums.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

LOSS_TYPES = ("sigmoid", "ipo")


def preference_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    loss_type: str,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Loss of each pair, f32 ``[P]``, not reduced.

    The four inputs are f32 ``[P]``: log-probability of a whole answer, summed over its tokens with the EOS. With
    ``d = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)``:

    * ``sigmoid``: ``-(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d)``, s the label smoothing; ln 2 at d = 0.
    * ``ipo``: ``(d - 1 / (2 beta))**2``, on sums as in online DPO of TRL (its offline trainer averages per token).
    """
    log_ratio = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    if loss_type == "sigmoid":
        scaled = beta * log_ratio
        return -(1 - label_smoothing) * F.logsigmoid(scaled) - label_smoothing * F.logsigmoid(-scaled)
    if loss_type == "ipo":
        return (log_ratio - 1 / (2 * beta)) ** 2
    raise ValueError(f"dpo_loss_type '{loss_type}': known are {', '.join(LOSS_TYPES)}")
