"""A mixture of experts on one rank; ``test_checkpoints.py`` has the same numbers over two."""

from __future__ import annotations

from dataclasses import replace

import policies
import problem
import pytest
import torch

from mindspeed_odpo.config import ParallelConfig, parameters

pytestmark = pytest.mark.usefixtures("single_rank")
ONE = ParallelConfig()


def policy(folder, **model) -> problem.Ours:
    return policies.fill(policies.build(replace(policies.architecture(folder, experts=4), **model), ONE))


def test_the_load_balancing_loss_is_in_the_gradient_alone(folders):
    with_loss = policies.step(policy(folders[0]), ONE, 0)
    without = policies.step(policy(folders[0], moe_aux_loss_coeff=0.0), ONE, 0)
    assert with_loss.sums == without.sums
    assert abs(with_loss.grad_norm / without.grad_norm - 1) > 1e-3


@pytest.mark.parametrize("topk", [1, 4])
def test_the_router_weighs_the_experts(folders, topk):
    """Written out for the last hidden state of one MLP: softmax over the chosen experts, over all of them for a single one."""
    ours = policy(folders[0], moe_router_topk=topk)
    mlp = ours.model.decoder.layers[1].mlp
    x = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(0))
    out = mlp(x)[0]
    logits = x @ mlp.router.weight.T
    weights = logits.softmax(-1)
    if topk == 1:
        weights = weights * (weights == weights.amax(-1, keepdim=True))
    expected = torch.zeros_like(x)
    for number, expert in enumerate(mlp.experts.local_experts):
        gate, up = (x @ expert.linear_fc1.weight.T).chunk(2, -1)
        expected += weights[..., number : number + 1] * ((torch.nn.functional.silu(gate) * up) @ expert.linear_fc2.weight.T)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_every_weight_of_every_expert_is_trained(folders):
    ours = policy(folders[0])
    before = {name: weight.detach().clone() for name, weight in ours.model.named_parameters()}
    policies.step(ours, ONE, 0)
    for name, weight in ours.model.named_parameters():
        assert not torch.equal(weight, before[name]), name


def test_the_plan_counts_them(folders):
    ours = policy(folders[0])
    assert parameters(ours.config) == sum(weight.numel() for weight in ours.model.parameters())
