"""The actor: holds the trainable policy, learns from pairs, gives its weights away."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_odpo.config import Config, is_checkpoint
from mindspeed_odpo.engine.checkpoint import Saver, load_checkpoint
from mindspeed_odpo.engine.forward import train_step
from mindspeed_odpo.engine.greedy import greedy_gaps
from mindspeed_odpo.engine.optimizer import Schedule, make_optimizer, sync_params, wrap_for_training
from mindspeed_odpo.engine.weights import WeightLayout
from mindspeed_odpo.errors import ConfigError, WorkerError
from mindspeed_odpo.hosts.standalone import Host
from mindspeed_odpo.types import Rollout, StepStats, TrainBatch

MOST_BAD_UPDATES = 5
"""So many skipped for NaN in a row mean that the run is lost: it ends instead of burning hours."""


class Actor:
    """One data-parallel rank of the policy in training. Needs ``init_parallel`` to have run."""

    def __init__(self, config: Config, host: Host) -> None:
        self.config = config
        self.host = host
        self.chunks = host.build_model(config.actor.model, config.actor.parallel, trainable=True)
        resumes = is_checkpoint(config.actor.load)
        if not resumes:
            host.load_hf(self.chunks, config.actor.load, config.actor.model)
        self.ddps = wrap_for_training(self.chunks, config.bf16, config.actor.parallel)
        # The fp32 masters are copied from the weights here: load first, or the first step would undo the load.
        self.optimizer = make_optimizer(self.ddps, config.actor.optimizer, config.bf16, config.actor.parallel)
        self.schedule = Schedule(self.optimizer, config.actor.optimizer, config.train_iters)
        self.first_step, self._data_began = 0, 0
        self.saver = Saver(config.checkpoint_dir, config.save.keep_last, config.save.asynchronous)
        self._bad_in_a_row = 0
        self._facts: Mapping[str, Any] = {}
        self._then: Mapping[str, Any] = {}
        if resumes and config.actor.finetune:
            load_checkpoint(config.actor.load, self.chunks, None, config.actor.model)
            self.optimizer.reload_model_params()
        elif resumes:
            self.first_step, self._then = load_checkpoint(config.actor.load, self.chunks, self.optimizer, config.actor.model)

    def start(self, facts: Mapping[str, Any]) -> int:
        """The iteration that the weights come from: 0 for a fresh start, n after a checkpoint of iteration n.

        ``facts``: what the data is and in which order it comes; they go into every checkpoint. ConfigError where the
        checkpoint that is resumed was made with others: iteration n + 1 would not be what it would have been. Other data
        (the fact ``data``) is no error: the run goes on, and that data starts at its first row.
        """
        self._facts = {"seed": self.config.seed, "global_batch_size": self.config.global_batch_size, **facts}
        for name, now in self._facts.items():
            if name != "data" and name in self._then and self._then[name] != now:
                raise ConfigError(
                    f"{name} is {now}, the checkpoint in {self.config.actor.load} was made with {self._then[name]}: "
                    "set it back to go on exactly, or finetune=true to start a new run from these weights"
                )
        same = self._then.get("data") == self._facts.get("data")
        self._data_began = int(self._then.get("data_began", 0)) if same else self.first_step
        return self.first_step

    def data_began(self) -> int:
        """The iteration after which the data of this run came in: that of the checkpoint when it was made with another file."""
        return self._data_began

    def update(self, batch: TrainBatch, step: int, beta: float, global_pairs: int) -> StepStats:
        self.saver.poll()
        for ddp in self.ddps:
            ddp.train()
        stats = train_step(
            self.ddps,
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

    def weight_layout(self) -> WeightLayout:
        """All weights in Megatron's names and layout, in the training dtype, and this rank's share of them. A collective."""
        sync_params(self.ddps)
        return WeightLayout(self.chunks)

    def greedy_gaps(self, rollout: Rollout) -> Tensor:
        """f32 ``[P,K]``: how far each answer is from the policy's own greedy one (``engine.greedy``). Every rank gets all prompts."""
        sync_params(self.ddps)
        return greedy_gaps(self.chunks, rollout.check(), self.host.device)

    def save(self, step: int) -> Path:
        sync_params(self.ddps)
        facts = {**self._facts, "data_began": self._data_began}
        return self.saver.save(step, self.chunks, self.optimizer, self.config.actor.model, facts)

    def close(self) -> None:
        """Wait for a checkpoint that is still being written."""
        self.saver.finish()

    def export_hf(self, folder: Path) -> Path:
        """The policy as a Hugging Face folder, with the tokenizer; every rank calls it, the first one writes."""
        weights = self.weight_layout().gather()
        if torch.distributed.get_rank() == 0:
            self.host.export_hf(folder, weights, self.config.actor.model)
        else:
            for _ in weights:  # a collective: the first rank needs this one's part
                pass
        return folder
