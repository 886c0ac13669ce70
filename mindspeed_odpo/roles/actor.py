"""The actor: holds the trainable policy, learns from pairs, gives its weights away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_odpo.config import Config, is_checkpoint
from mindspeed_odpo.engine.checkpoint import load_checkpoint, save_checkpoint
from mindspeed_odpo.engine.forward import train_step
from mindspeed_odpo.engine.optimizer import Schedule, make_optimizer, wrap_for_training
from mindspeed_odpo.engine.weights import named_weights
from mindspeed_odpo.errors import ConfigError, WorkerError
from mindspeed_odpo.hosts.standalone import Host
from mindspeed_odpo.types import StepStats, TrainBatch

MOST_BAD_UPDATES = 5
"""So many skipped for NaN in a row mean that the run is lost: it ends instead of burning hours."""


class Actor:
    """One data-parallel rank of the policy in training. Needs ``init_parallel`` to have run."""

    def __init__(self, config: Config, host: Host) -> None:
        self.config = config
        self.host = host
        self.model = host.build_model(config.actor.model, config.actor.parallel, trainable=True)
        resumes = is_checkpoint(config.actor.load)
        if not resumes:
            host.load_hf(self.model, config.actor.load, config.actor.model)
        self.ddp = wrap_for_training(self.model, config.bf16)
        # The fp32 masters are copied from the weights here: load first, or the first step would undo the load.
        self.optimizer = make_optimizer(self.ddp, config.actor.optimizer, config.bf16)
        self.schedule = Schedule(self.optimizer, config.actor.optimizer, config.train_iters)
        self.first_step = 0
        self._bad_in_a_row = 0
        self._facts: Mapping[str, Any] = {}
        self._then: Mapping[str, Any] = {}
        if resumes and config.actor.finetune:
            load_checkpoint(config.actor.load, self.model, None, config.actor.model)
            self.optimizer.reload_model_params()
        elif resumes:
            self.first_step, self._then = load_checkpoint(config.actor.load, self.model, self.optimizer, config.actor.model)

    def start(self, facts: Mapping[str, Any]) -> int:
        """The iteration that the weights come from: 0 for a fresh start, n after a checkpoint of iteration n.

        ``facts``: what the data is and in which order it comes; it goes into every checkpoint. ConfigError where the
        checkpoint that is resumed was made with others: iteration n + 1 would not be what it would have been.
        """
        self._facts = {"seed": self.config.seed, "global_batch_size": self.config.global_batch_size, **facts}
        for name, now in self._facts.items():
            if name in self._then and self._then[name] != now:
                raise ConfigError(
                    f"{name} is {now}, the checkpoint in {self.config.actor.load} was made with {self._then[name]}: "
                    "set it back to go on exactly, or finetune=true to start a new run from these weights"
                )
        return self.first_step

    def update(self, batch: TrainBatch, step: int, beta: float, global_pairs: int) -> StepStats:
        self.ddp.train()
        stats = train_step(
            self.ddp,
            self.optimizer,
            batch,
            global_pairs=global_pairs,
            micro_batch_size=self.config.actor.micro_batch_size,
            loss=self.config.actor.loss,
            beta=beta,
            lr=self.schedule.set(step),
            device=self.host.device,
            nonfinite=self.config.actor.nonfinite,
        )
        self._bad_in_a_row = self._bad_in_a_row + 1 if stats.nonfinite else 0
        if self._bad_in_a_row == MOST_BAD_UPDATES:
            raise WorkerError(
                f"{MOST_BAD_UPDATES} updates in a row had a loss or gradient that is not finite, the last at iteration {step}: "
                "resume from the last checkpoint with a smaller lr or dpo_beta"
            )
        return stats

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights in Megatron's names and layout, in the training dtype."""
        with torch.no_grad():
            yield from named_weights(self.model)

    def save(self, step: int) -> Path:
        return save_checkpoint(self.config.checkpoint_dir, step, self.model, self.optimizer, self.config.actor.model, self._facts)

    def export_hf(self, folder: Path) -> Path:
        """The policy as a Hugging Face folder, with the tokenizer; written by the first rank."""
        self.host.export_hf(folder, self.weights(), self.config.actor.model)
        return folder
