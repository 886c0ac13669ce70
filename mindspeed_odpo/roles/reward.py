"""The reward: one score an answer, from Python functions or a reward model."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_odpo.config import Config
from mindspeed_odpo.data.prompts import decode_answers
from mindspeed_odpo.hosts.standalone import Host
from mindspeed_odpo.rewards.function import FunctionReward
from mindspeed_odpo.rewards.model import ClassifierReward
from mindspeed_odpo.types import PromptBatch, Rollout


class Reward:
    """One data-parallel rank of the reward."""

    def __init__(self, config: Config, host: Host) -> None:
        self.tokenizer = host.tokenizer()
        self.prompt_key = config.data.prompt_key
        self.judge: FunctionReward | ClassifierReward
        if config.reward.functions:
            self.judge = FunctionReward(config.reward.functions)
        else:
            assert config.reward.load is not None, "config.parse lets no reward without functions and without load through"
            self.judge = ClassifierReward(config.reward.load, config.reward.micro_batch_size, config.bf16)

    def score(self, rollout: Rollout, prompts: PromptBatch) -> Tensor:
        """f32 ``[P,K]``; NaN where a function gave no score (None). Special tokens never reach the text."""
        p, k = rollout.finished.shape
        texts, ids = ([one for answers in nested for one in answers] for nested in decode_answers(self.tokenizer, rollout))
        rows = [row for row in prompts.rows for _ in range(k)]
        scores = self.judge.score(prompts=[row[self.prompt_key] for row in rows], responses=texts, response_ids=ids, rows=rows)
        return torch.tensor([float("nan") if s is None else float(s) for s in scores], dtype=torch.float32).view(p, k)
