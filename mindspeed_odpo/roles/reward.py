"""The reward: one score an answer, from Python functions, a pairwise judge or a reward model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mindspeed_odpo.config import Config
from mindspeed_odpo.data.prompts import decode_answers
from mindspeed_odpo.hosts.standalone import Host
from mindspeed_odpo.rewards.function import FunctionReward
from mindspeed_odpo.rewards.judge import JudgeReward
from mindspeed_odpo.rewards.model import ClassifierReward
from mindspeed_odpo.types import PromptBatch, Rollout


class Scorer(Protocol):
    """What the four kinds of reward share; all arguments have length N = P * ``answers_per_prompt``, the answers of a prompt
    side by side. None: no score."""

    def score(
        self,
        prompts: Sequence[Any],
        responses: Sequence[str],
        response_ids: Sequence[list[int]],
        rows: Sequence[Mapping[str, Any]],
        answers_per_prompt: int,
    ) -> list[float | None]: ...


class Reward:
    """One data-parallel rank of the reward."""

    def __init__(self, config: Config, host: Host) -> None:
        self.tokenizer = host.tokenizer()
        self.prompt_key = config.data.prompt_key
        self.scorer: Scorer = _scorer(config, host)

    def score(self, rollout: Rollout, prompts: PromptBatch) -> Tensor:
        """f32 ``[P,K]``; NaN where an answer has no score (None). Special tokens never reach the text."""
        p, k = rollout.finished.shape
        texts, ids = ([one for answers in nested for one in answers] for nested in decode_answers(self.tokenizer, rollout))
        rows = [row for row in prompts.rows for _ in range(k)]
        scores = self.scorer.score([row[self.prompt_key] for row in rows], texts, ids, rows, k)
        return torch.tensor([float("nan") if s is None else s for s in scores], dtype=torch.float32).view(p, k)


def _scorer(config: Config, host: Host) -> Scorer:
    reward = config.reward
    if reward.functions:
        return FunctionReward(reward.functions)
    if reward.judge is not None:
        return JudgeReward(reward.judge)
    assert reward.load is not None, "config.parse lets no reward without functions, judge and load through"
    if reward.engine == "hf":
        return ClassifierReward(reward.load, reward.micro_batch_size, config.bf16, host.device)
    from mindspeed_odpo.rewards.megatron import MegatronReward  # here, because the other kinds need no Megatron

    return MegatronReward(reward.load, reward.micro_batch_size, host, reward.parallel)
