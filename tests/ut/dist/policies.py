"""The small training problem of ``problem.py`` on one rank of any layout: build, load, take a step, read everything back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import problem
import torch
import torch.distributed as dist
from launcher import free_port
from torch import Tensor

from mindspeed_odpo.config import ModelConfig, OptimizerConfig, ParallelConfig
from mindspeed_odpo.engine import checkpoint, forward, optimizer, parallel
from mindspeed_odpo.engine.model import build_model
from mindspeed_odpo.hf.config import read_model_config
from mindspeed_odpo.pairs import make_pairs
from mindspeed_odpo.types import StepStats, TrainBatch

ADAM = OptimizerConfig(lr=problem.LR, clip_grad=1.0, adam_eps=1e-4, weight_decay=0.01)


def architecture(folder: Path, experts: int | None = None) -> ModelConfig:
    """Four layers, so that two stages may have two chunks each; with ``experts`` two of them a token."""
    model = replace(read_model_config(folder, "tiny"), num_layers=4)
    if experts:
        model = replace(model, num_experts=experts, moe_ffn_hidden_size=48, moe_router_topk=2, moe_aux_loss_coeff=0.5)
    return model


def join(rank: int, port: int, layout: ParallelConfig) -> None:
    parallel.init_parallel(layout, rank, "127.0.0.1", port, 0, 1.0)


def leave() -> int:
    """Leave the group; the port where the same ranks may meet again. Chosen now: one chosen long before may be taken by then."""
    port: list[int] = [free_port()]
    dist.broadcast_object_list(port, src=0)
    parallel.destroy()
    return port[0]


def build(model: ModelConfig, layout: ParallelConfig, bf16: bool = False) -> problem.Ours:
    """A policy to train, its weights still to come from a checkpoint."""
    chunks = build_model(model, layout, bf16, trainable=True)
    ddps = optimizer.wrap_for_training(chunks, bf16, layout)
    return problem.Ours(chunks, ddps, optimizer.make_optimizer(ddps, ADAM, bf16, layout), model, Path())


def fill(policy: problem.Ours, seed: int = 5) -> problem.Ours:
    """Random weights of a whole model on one rank, norms around 1, in the order of their names."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(policy.model.named_parameters()):
            weight.copy_(torch.randn(weight.shape, generator=draw) * 0.2 + ("layernorm" in name))
    policy.optimizer.reload_model_params()
    return policy


def resume(policy: problem.Ours, folder: Path) -> tuple[int, dict[str, Any]]:
    step, facts = checkpoint.load_checkpoint(folder, policy.chunks, policy.optimizer, policy.config)
    return step, dict(facts)


def save(policy: problem.Ours, folder: Path, step: int, **options: Any) -> Path:
    optimizer.sync_params(policy.ddps)
    return checkpoint.save_checkpoint(folder, step, policy.chunks, policy.optimizer, policy.config, {}, **options)


def whole_batch(even: bool) -> TrainBatch:
    """Six prompts of one pair, of which the fourth, a tie, is kept with ``even`` only."""
    rollout = problem.rollout()
    settings = replace(problem.PAIRS_CONFIG, ties="first" if even else "drop")
    return TrainBatch(rollout, make_pairs(problem.scores(), rollout, settings), -5.0 * rollout.counted_lengths().float())


def step(policy: problem.Ours, layout: ParallelConfig, rank: int, micro_batch_size: int = 1) -> StepStats:
    """One update on this rank's prompts: three and three of a world with two data-parallel indices. Experts have as many
    micro-batches on every rank, as the load-balancing loss is a mean over micro-batches."""
    whole = whole_batch(even=policy.config.num_experts is not None)
    size, index = problem.PAIRS // layout.data, layout.data_index(rank)
    mine = whole.select(range(index * size, (index + 1) * size))
    return problem.step(policy, mine, micro_batch_size, global_pairs=int(whole.pairs.keep.sum()))


def everything(folder: Path, model: ModelConfig, bf16: bool = False) -> dict[str, Tensor]:
    """Weights, moments and masters in a checkpoint, read on one rank, by name; the number of updates as ``step``."""
    policy = build(model, ParallelConfig(), bf16)
    resume(policy, folder)
    found: dict[str, Tensor] = {"step": torch.tensor(float(optimizer.optimizer_step(policy.optimizer)))}
    held = optimizer.pieces(policy.optimizer)
    for name, weight in policy.model.named_parameters():
        found[name] = weight.detach().clone()
        found |= {f"{kind}.{name}": tensor.detach().clone() for kind, tensor in held[id(weight)].live.items()}
    return found


def logps(policy: problem.Ours) -> Tensor:
    return forward.answer_logps(policy.chunks, problem.rollout(), 2, torch.device("cpu"))
