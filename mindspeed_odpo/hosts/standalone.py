"""The standalone host: plain megatron-core and Hugging Face folders. The host is what differs between ways to run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_odpo import device
from mindspeed_odpo.config import Config, ModelConfig, ParallelConfig, check_split, is_checkpoint
from mindspeed_odpo.data.preferences import Preferences
from mindspeed_odpo.data.prompts import Prompts, load_tokenizer
from mindspeed_odpo.errors import ConfigError, DataError
from mindspeed_odpo.hf.config import check_model_config, eos_token_ids, read_model_config
from mindspeed_odpo.rewards.function import FunctionReward
from mindspeed_odpo.rewards.judge import JudgeReward


class Host:
    """Init, model, load, save, tokenizer, prompts: six things that a host does its own way."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device: torch.device = device.device()

    def init(self, parallel: ParallelConfig, rank: int, address: str, port: int) -> None:
        from mindspeed_odpo.engine.parallel import init_parallel

        init_parallel(parallel, rank, address, port, self.config.seed, self.config.timeout_minutes)

    def tensor_group(self, parallel: ParallelConfig) -> tuple[int, int, Any] | None:
        """(rank, size, group) of the tensor-parallel ranks of a role with a layout of its own; None for a size of 1."""
        from mindspeed_odpo.engine.generate import tensor_group

        return tensor_group(parallel.tensor, self.config.timeout_minutes) if parallel.tensor > 1 else None

    def build_model(self, model: ModelConfig, parallel: ParallelConfig, *, trainable: bool, value_head: bool = False) -> list[Any]:
        """Policy (``trainable``) or reference; with ``value_head`` the reward model. One chunk for each virtual stage."""
        from mindspeed_odpo.engine.model import build_model
        from mindspeed_odpo.engine.value_head import build_value_model

        if value_head:
            return [chunk.to(self.device) for chunk in build_value_model(model, parallel, self.config.bf16)]
        role = "actor_rollout" if trainable else "ref"
        built = build_model(model, parallel, self.config.bf16, trainable=trainable, forwarded=self.config.forwarded.get(role, {}))
        return [chunk.to(self.device) for chunk in built]

    def load_hf(self, chunks: Sequence[nn.Module], folder: Path, architecture: ModelConfig, *, value_head: bool = False) -> None:
        from mindspeed_odpo.engine.weights import load_named
        from mindspeed_odpo.hf.weights import hf_to_megatron

        check_model_config(folder, architecture)
        load_named(chunks, hf_to_megatron(folder, architecture, value_head))

    def export_hf(self, folder: Path, items: Iterable[tuple[str, Tensor]], architecture: ModelConfig) -> None:
        from mindspeed_odpo.hf.weights import export_folder

        export_folder(folder, self.config.hf_folder, items, architecture, torch.bfloat16 if self.config.bf16 else torch.float32)

    def tokenizer(self) -> Any:
        return load_tokenizer(self.config.tokenizer)

    def eos_ids(self) -> tuple[int, ...]:
        return eos_token_ids(self.config.hf_folder)

    def resumes(self) -> bool:
        """Whether the run goes on from a checkpoint (and not merely starts from its weights)."""
        return is_checkpoint(self.config.actor.load) and not self.config.actor.finetune

    def preflight(self) -> Prompts:
        """All that can be found wrong before a rank starts, in seconds: folders, architecture, reward, prompts."""
        self._check_models()
        config = self.config
        if config.reward.load is not None and not (config.reward.load / "config.json").is_file():
            raise DataError(
                f"reward.load: {config.reward.load} is no Hugging Face folder (no config.json); give a sequence classifier's folder"
            )
        if config.reward.load is not None and config.reward.engine == "megatron":
            check_split(read_model_config(config.reward.load, "reward"), config.reward.parallel, "reward.tensor_model_parallel_size")
        prompts = self.prompts()
        if config.reward.functions:
            FunctionReward(config.reward.functions).check(prompts.columns)
        if config.reward.judge is not None:
            JudgeReward(config.reward.judge).check(prompts.columns)
        return prompts

    def preflight_preferences(self) -> Preferences:
        """The same for recorded preferences: folders, architecture, every row."""
        self._check_models()
        config = self.config
        return Preferences(config.data, self.tokenizer(), self.eos_ids(), config.rollout.seq_length, config.global_batch_size, config.seed)

    def _check_models(self) -> None:
        config = self.config
        if not is_checkpoint(config.actor.load):
            check_model_config(config.actor.load, config.actor.model)
        if not is_checkpoint(config.reference.load):
            check_model_config(config.reference.load, config.reference.model)
        vocab = len(self.tokenizer())
        if vocab > config.rollout.model.vocab_size:
            raise ConfigError(
                f"the tokenizer in {config.tokenizer} has {vocab} entries, the model's vocab_size is {config.rollout.model.vocab_size}: "
                "they do not belong together"
            )

    def prompts(self) -> Prompts:
        config = self.config
        return Prompts(config.data, self.tokenizer(), config.rollout.max_prompt_length, config.global_batch_size, config.seed)
