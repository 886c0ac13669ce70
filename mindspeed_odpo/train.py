"""THE LOOP. Start reading here.

For every prompt the policy samples K answers, a reward says which is better, and the policy learns to prefer it, held
near a frozen reference. The phases of an iteration are the blocks of ``train``; ``run`` puts the parts around it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mindspeed_odpo.config import Config
from mindspeed_odpo.data.prompts import Prompts, decode_answers
from mindspeed_odpo.hosts.standalone import Host
from mindspeed_odpo.pairs import make_pairs
from mindspeed_odpo.ray.group import Roles, wait
from mindspeed_odpo.ray.placement import cluster
from mindspeed_odpo.report.run_log import RunLog, free_run_dir, resumed_run_dir
from mindspeed_odpo.types import TrainBatch


def train(config: Config, roles: Any, prompts: Any, log: Any, first: int) -> None:
    """Iterations ``first + 1 .. train_iters``, with weights of version ``first`` already in the rollout.

    ``roles``: the four roles and ``sync_weights`` (``ray.group.Roles``, or plain Python objects with the same methods);
    ``prompts``: ``batch(step) -> PromptBatch``, ``epoch_index(step) -> int``; ``log``: a ``RunLog``.
    """
    for step in range(first + 1, config.train_iters + 1):
        with log.step(step) as timed:
            batch = prompts.batch(step)
            with timed("rollout"):
                rollout = wait(roles.rollout.generate(batch))
            with timed("judge"):  # neither needs the other: both run
                scores, ref_logps = wait(roles.reward.score(rollout, batch), roles.reference.logps(rollout))
            pairs = make_pairs(scores, rollout, config.pairs, config.seed, step)
            beta = config.actor.loss.beta_at(prompts.epoch_index(step))
            with timed("update"):
                stats = wait(roles.actor.update(TrainBatch(rollout, pairs, ref_logps), step, beta))
            with timed("sync"):
                roles.sync_weights(version=step)
        log.record(rollout, scores, pairs, stats, beta)
        if config.save.due(step) or (step == config.train_iters and config.save.checkpoint_at_end):
            wait(roles.actor.save(step))


def run(config: Config) -> None:
    """A whole run: check everything that is cheap to check, start the ranks, train, save, export, sum up."""
    if config.stage == "ray_dpo":
        from mindspeed_odpo.train_offline import run as run_offline

        return run_offline(config)
    host = Host(config)
    config = replace(config, run_dir=resumed_run_dir(config) if host.resumes() else free_run_dir(config.run_dir))
    prompts = host.preflight()
    for notice in prompts.notices:
        print(f"note: {notice}", flush=True)
    with cluster(config), Roles(config) as roles:
        first = wait(roles.actor.start(prompts.facts()))
        roles.sync_weights(version=first)
        before = _greedy(config, roles, prompts)
        with RunLog(config, first, prompts) as log:
            train(config, roles, prompts, log, first)
            after = _greedy(config, roles, prompts)
            export = config.run_dir / "policy_hf" if config.save.export_hf else None
            if export is not None:
                wait(roles.actor.export_hf(export))
            checkpoint = config.checkpoint_dir if config.save.checkpoint_at_end else None
            log.summary(prompts.batch(1).rows[0], before, after, checkpoint, export)


def _greedy(config: Config, roles: Any, prompts: Prompts) -> str | None:
    """The policy's greedy answer to the first prompt of the run, for people to compare; None where answers are recorded."""
    if config.rollout.engine == "replay":
        return None
    texts, _ = decode_answers(prompts.tokenizer, wait(roles.rollout.greedy(prompts.batch(1).select([0]))))
    return texts[0][0]
