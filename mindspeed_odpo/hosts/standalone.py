"""The standalone host: plain megatron-core and Hugging Face folders. The host is what differs between ways to run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_odpo import device
from mindspeed_odpo.config import Config, ModelConfig, ParallelConfig
from mindspeed_odpo.data.prompts import Prompts, load_tokenizer
from mindspeed_odpo.errors import ConfigError, DataError
from mindspeed_odpo.hf.config import check_model_config, eos_token_ids
from mindspeed_odpo.rewards.function import FunctionReward


class Host:
    """Init, model, load, save, tokenizer, prompts: six things that a host does its own way."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device: torch.device = device.device()

    def init(self, parallel: ParallelConfig, rank: int, address: str, port: int) -> None:
        from mindspeed_odpo.engine.parallel import init_parallel

        init_parallel(parallel, rank, address, port, self.config.seed, self.config.timeout_minutes)

    def build_model(self, model: ModelConfig, parallel: ParallelConfig, *, trainable: bool) -> nn.Module:
        from mindspeed_odpo.engine.model import build_model

        role = "actor_rollout" if trainable else "ref"
        built = build_model(model, parallel, self.config.bf16, trainable=trainable, forwarded=self.config.forwarded.get(role, {}))
        return built.to(self.device)

    def load_hf(self, model: nn.Module, folder: Path, architecture: ModelConfig) -> None:
        from mindspeed_odpo.engine.weights import load_named
        from mindspeed_odpo.hf.weights import hf_to_megatron

        check_model_config(folder, architecture)
        load_named(model, hf_to_megatron(folder, architecture))

    def export_hf(self, folder: Path, items: Iterable[tuple[str, Tensor]], architecture: ModelConfig) -> None:
        from mindspeed_odpo.hf.weights import export_folder

        export_folder(folder, self.config.reference.load, items, architecture, torch.bfloat16 if self.config.bf16 else torch.float32)

    def tokenizer(self) -> Any:
        return load_tokenizer(self.config.tokenizer)

    def eos_ids(self) -> tuple[int, ...]:
        return eos_token_ids(self.config.reference.load)

    def resumes(self) -> bool:
        """Whether the run goes on from a checkpoint (and not merely starts from its weights)."""
        return _is_checkpoint(self.config.actor.load) and not self.config.actor.finetune

    def preflight(self) -> Prompts:
        """All that can be found wrong before a rank starts, in seconds: folders, architecture, reward, prompts."""
        config = self.config
        if not _is_checkpoint(config.actor.load):
            check_model_config(config.actor.load, config.actor.model)
        check_model_config(config.reference.load, config.reference.model)
        if config.reward.load is not None and not (config.reward.load / "config.json").is_file():
            raise DataError(
                f"reward.load: {config.reward.load} is no Hugging Face folder (no config.json); give a sequence classifier's folder"
            )
        vocab = len(self.tokenizer())
        if vocab > config.rollout.model.vocab_size:
            raise ConfigError(
                f"the tokenizer in {config.tokenizer} has {vocab} entries, the model's vocab_size is {config.rollout.model.vocab_size}: "
                "they do not belong together"
            )
        prompts = self.prompts()
        if config.reward.functions:
            FunctionReward(config.reward.functions).check(prompts.columns)
        return prompts

    def prompts(self) -> Prompts:
        config = self.config
        return Prompts(config.data, self.tokenizer(), config.rollout.max_prompt_length, config.global_batch_size, config.seed)


def _is_checkpoint(folder: Path) -> bool:
    # Spelt out and not taken from engine/checkpoint.py: the driver asks it, and need not import Megatron for it.
    return (folder / "latest_checkpointed_iteration.txt").is_file()
