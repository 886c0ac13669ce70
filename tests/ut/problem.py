"""A small training problem shared by tests: a tiny policy, answers of mixed length, scores, and the exact answer.

The exact answer comes from transformers, one unpadded sequence at a time, with nothing of ours in between: plain softmax over
the true vocabulary, a Python sum over the answer's tokens, the DPO formula written out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_odpo import device

device.setup()

from mindspeed_odpo.config import LossConfig, ModelConfig, OptimizerConfig, PairsConfig, ParallelConfig  # noqa: E402
from mindspeed_odpo.engine import forward  # noqa: E402
from mindspeed_odpo.engine.model import build_model  # noqa: E402
from mindspeed_odpo.engine.optimizer import make_optimizer, wrap_for_training  # noqa: E402
from mindspeed_odpo.engine.weights import load_named, named_weights  # noqa: E402
from mindspeed_odpo.hf.config import read_model_config  # noqa: E402
from mindspeed_odpo.hf.weights import hf_to_megatron  # noqa: E402
from mindspeed_odpo.types import Rollout  # noqa: E402

BETA = 0.3
PENALTY = 0.5
PAIRS_CONFIG = PairsConfig(missing_eos_penalty=PENALTY)
LR = 1e-2
PAIRS = 6


def rollout(left: int = 0, right: int = 0, vocab: int = 384) -> Rollout:
    """Six prompts of 1 to 7 tokens, two answers each of 2 to 9; padding ids are random, as the masks alone decide."""
    g = torch.Generator().manual_seed(3)
    s, r = 7 + left, 9 + right
    prompt_ids, ids = torch.randint(3, vocab, (PAIRS, 7), generator=g), torch.randint(3, vocab, (PAIRS, 2, 9), generator=g)
    prompt_len = torch.tensor([1, 7, 3, 5, 2, 6])
    answer_len = torch.tensor([[2, 9], [4, 4], [9, 3], [5, 6], [3, 3], [8, 2]])
    wide_prompt = torch.randint(3, vocab, (PAIRS, s), generator=torch.Generator().manual_seed(left))
    wide = torch.randint(3, vocab, (PAIRS, 2, r), generator=torch.Generator().manual_seed(right))
    prompt_mask = torch.arange(s)[None] >= s - prompt_len[:, None]
    mask = torch.arange(r)[None, None] < answer_len[:, :, None]
    wide_prompt[:, left:][prompt_mask[:, left:]] = prompt_ids[prompt_mask[:, left:]]
    wide[..., :9][mask[..., :9]] = ids[mask[..., :9]]
    finished = torch.tensor([[True, True], [True, False], [True, True], [True, True], [False, True], [True, True]])
    return Rollout(wide_prompt, prompt_mask, wide, mask, finished, torch.arange(PAIRS), 0).check()


def scores() -> Tensor:
    """Row 1 is decided by the EOS penalty (1.0 without EOS against 0.8), row 3 is a tie; the best is mostly the second sample."""
    return torch.tensor([[0.0, 1.0], [0.8, 1.0], [0.2, 0.9], [0.4, 0.4], [0.7, 0.3], [-1.0, 2.0]])


CHOSEN = [1, 0, 1, 0, 1, 1]
KEEP = [True, True, True, False, True, True]
"""By hand: row 4 is 0.7 - 0.5 = 0.2 (no EOS) against 0.3."""


@dataclass(frozen=True)
class Exact:
    loss: float
    logps: Tensor
    ref_logps: Tensor
    grad_norm: float


def sequence_logps(model, batch: Rollout) -> Tensor:
    rows = []
    for p in range(len(batch)):
        prompt = batch.prompt_ids[p][batch.prompt_mask[p]].tolist()
        for k in range(batch.num_answers):
            answer = batch.response_ids[p, k][batch.response_mask[p, k]].tolist()
            logits = model(torch.tensor([prompt + answer])).logits[0].float().log_softmax(-1)
            rows.append(sum(logits[len(prompt) - 1 + i, token] for i, token in enumerate(answer)))
    return torch.stack(rows).view(len(batch), -1)


def exact(policy_folder: Path, ref_folder: Path) -> Exact:
    """DPO on the six prompts by transformers and the formula, fp32."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32).eval()
    reference = AutoModelForCausalLM.from_pretrained(ref_folder, dtype=torch.float32).eval()
    batch = rollout()
    logps = sequence_logps(policy, batch)
    with torch.no_grad():
        ref = sequence_logps(reference, batch)
    losses = []
    for p in range(PAIRS):
        if KEEP[p]:
            c, r = CHOSEN[p], 1 - CHOSEN[p]
            z = BETA * ((logps[p, c] - ref[p, c]) - (logps[p, r] - ref[p, r]))
            losses.append(torch.log1p(torch.exp(-z)))
    loss = sum(losses) / len(losses)
    loss.backward()
    norm = torch.stack([x.grad.norm() for x in policy.parameters() if x.grad is not None]).norm()
    return Exact(loss.item(), logps.detach(), ref, norm.item())


@dataclass
class Ours:
    chunks: list
    ddps: list
    optimizer: object
    config: ModelConfig
    folder: Path

    @property
    def model(self):
        """The whole model of one rank."""
        (model,) = self.chunks
        return model

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in named_weights(self.chunks)}


def load(
    folder: Path,
    trainable: bool,
    padded_to: int | None = None,
    bf16: bool = False,
    lr: float = LR,
    parallel: ParallelConfig = ParallelConfig(),  # noqa: B008
    padding: float = 0.0,
    forwarded: dict | None = None,
) -> Ours:
    """``padding``: what stands in the embedding's rows above the true vocabulary."""
    from dataclasses import replace

    config = read_model_config(folder, "tiny")
    if padded_to:
        config = replace(config, padded_vocab_size=padded_to)
    chunks = build_model(config, parallel, bf16, trainable=trainable, forwarded=forwarded)
    weights = dict(hf_to_megatron(folder, config))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in weights:
            weights[name][config.vocab_size :] = padding
    load_named(chunks, weights.items())
    if not trainable:
        return Ours(chunks, chunks, None, config, folder)
    ddps = wrap_for_training(chunks, bf16, parallel)
    settings = OptimizerConfig(lr=lr, clip_grad=0.0, adam_eps=1e-5)
    return Ours(chunks, ddps, make_optimizer(ddps, settings, bf16, parallel), config, folder)


def step(policy: Ours, batch, micro_batch_size: int = 2, global_pairs: int | None = None, loss=LossConfig(), **options):  # noqa: B008
    return forward.train_step(
        policy.ddps,
        policy.optimizer,
        batch,
        global_pairs=int(batch.pairs.keep.sum()) if global_pairs is None else global_pairs,
        micro_batch_size=micro_batch_size,
        loss=loss,
        device=torch.device("cpu"),
        **{"beta": BETA, "lr": LR, **options},
    )
