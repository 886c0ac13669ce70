"""The second loop: offline DPO (``stage: ray_dpo``), the policy learns from recorded preferences.

The same actor, reference, loss and log as in ``train.py``; nobody answers and nothing is scored. The reference's
log-probabilities do not change, so they are computed once for all rows, before training, and kept in a file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mindspeed_odpo.config import Config
from mindspeed_odpo.hosts.standalone import Host
from mindspeed_odpo.ray.group import Roles, wait
from mindspeed_odpo.ray.placement import cluster
from mindspeed_odpo.report.run_log import RunLog, free_run_dir, resumed_run_dir
from mindspeed_odpo.roles.reference_cache import ReferenceCache
from mindspeed_odpo.train import begin_data
from mindspeed_odpo.types import TrainBatch


def train(config: Config, roles: Any, data: Any, ref_logps: Tensor, log: Any, first: int) -> None:
    """Iterations ``first + 1 .. train_iters`` of an actor that has done ``first``.

    ``roles``: an actor (``ray.group.Roles``, or a plain Python object with the same methods); ``data``: ``batch(step) ->
    (Rollout, Pairs)``, ``epoch_index(step) -> int``; ``ref_logps``: f32 ``[rows of the file, 2]``; ``log``: a ``RunLog``.
    """
    for step in range(first + 1, config.train_iters + 1):
        with log.step(step) as timed:
            with timed("pairs"):
                rollout, pairs = data.batch(step)
                batch = TrainBatch(rollout, pairs, ref_logps[rollout.prompt_index])
            beta = config.actor.loss.beta_at(data.epoch_index(step))
            with timed("update"):
                stats = wait(roles.actor.update(batch, step, beta))
        unscored = torch.full_like(batch.ref_logps, float("nan"))
        log.record(rollout, unscored, pairs, stats, beta)
        if config.save.due(step) or (step == config.train_iters and config.save.checkpoint_at_end):
            wait(roles.actor.save(step))


def run(config: Config) -> None:
    """A whole run: check everything that is cheap to check, ask the reference or its cache, train, save, export, sum up."""
    host = Host(config)
    config = replace(config, run_dir=resumed_run_dir(config) if host.resumes() else free_run_dir(config.run_dir))
    data = host.preflight_preferences()
    for notice in data.notices:
        print(f"note: {notice}", flush=True)
    cache = ReferenceCache(config, data)
    needed = config.actor.loss.needs_reference
    if needed:
        cache.check_place()
    ref_logps = cache.read() if needed else torch.full((data.num_rows, 2), float("nan"))
    with cluster(config):
        if ref_logps is None:
            with Roles(config, ("reference",)) as roles:  # ended before the actor starts: one model in memory at a time
                ref_logps = cache.fill(lambda rollout: wait(roles.reference.logps(rollout)))
        elif needed:
            print(f"reference: log-probs from {cache.path}", flush=True)
        with Roles(config, ("actor",)) as roles:
            first = wait(roles.actor.start(data.facts()))
            begin_data(data, wait(roles.actor.data_began()), first)
            with RunLog(config, first, data) as log:
                train(config, roles, data, ref_logps, log, first)
                export = config.run_dir / "policy_hf" if config.save.export_hf else None
                if export is not None:
                    wait(roles.actor.export_hf(export))
                log.summary(None, None, None, config.checkpoint_dir if config.save.checkpoint_at_end else None, export)
