"""A reward model that megatron-core runs: the classifier's transformer with a value head."""

from __future__ import annotations

from pathlib import Path

import torch

from mindspeed_odpo.config import ParallelConfig
from mindspeed_odpo.engine.value_head import values
from mindspeed_odpo.hf.config import read_model_config
from mindspeed_odpo.hosts.standalone import Host
from mindspeed_odpo.rewards.model import ModelReward


class MegatronReward(ModelReward):
    """The same folder, text and position as :class:`ClassifierReward`, and in fp32 the same score, for Llama and Qwen2
    classifiers. In bf16 the head stays fp32 (transformers rounds its output to bf16, three digits). The architecture comes
    from the folder, weights are read file by file. Its process must have joined a group (``Host.init``)."""

    def __init__(self, folder: Path, micro_batch_size: int, host: Host, parallel: ParallelConfig) -> None:
        super().__init__(folder, micro_batch_size)
        architecture = read_model_config(self._folder, "reward")
        self._check_vocabulary(architecture.vocab_size)
        self._longest = architecture.max_position_embeddings
        self._device = host.device
        self.chunks = host.build_model(architecture, parallel, trainable=False, value_head=True)
        host.load_hf(self.chunks, self._folder, architecture, value_head=True)

    def _forward(self, encoded: list[list[int]]) -> list[float]:
        # Padding stands on the right of a causal model: what it holds does not matter, and no id has to be told from it.
        width = max(map(len, encoded))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in encoded])
        last = torch.tensor([len(row) - 1 for row in encoded])
        return values(self.chunks, ids, last, self._device).tolist()
