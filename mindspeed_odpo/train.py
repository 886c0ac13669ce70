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
from mindspeed_odpo.ray.weight_sync import check_greedy
from mindspeed_odpo.report.run_log import RunLog, free_run_dir, resumed_run_dir
from mindspeed_odpo.types import PromptBatch, Rollout, TrainBatch


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
                moved = roles.sync_weights(version=step)
        log.record(rollout, scores, pairs, stats, beta, moved)
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
        begin_data(prompts, wait(roles.actor.data_began()), first)
        roles.sync_weights(version=first)
        before = _greedy(config, roles, prompts)
        if before is not None and config.verify_sync:
            check_greedy(wait(roles.actor.greedy_gaps(before)), first, config.bf16)
        with RunLog(config, first, prompts) as log:
            train(config, roles, prompts, log, first)
            after = _greedy(config, roles, prompts)
            export = config.run_dir / "policy_hf" if config.save.export_hf else None
            if export is not None:
                wait(roles.actor.export_hf(export))
            checkpoint = config.checkpoint_dir if config.save.checkpoint_at_end else None
            log.summary(_first(prompts).rows[0], _text(prompts, before), _text(prompts, after), checkpoint, export)


def begin_data(data: Any, began: int, first: int) -> None:
    """Let ``data`` (prompts or preferences) count from iteration ``began``; tell when it is another file than before."""
    data.order.began = began
    if began == first > 0:
        print(f"note: the data is not what iterations up to {first} were trained on: it starts at its first row", flush=True)


def _first(prompts: Prompts) -> PromptBatch:
    return prompts.batch(prompts.order.began + 1)


def _greedy(config: Config, roles: Any, prompts: Prompts) -> Rollout | None:
    """The rollout's greedy answers to the first prompts of the run, at most 3; None where answers are recorded."""
    if config.rollout.engine == "replay":
        return None
    batch = _first(prompts)
    answers: Rollout = wait(roles.rollout.greedy(batch.select(range(min(3, len(batch))))))
    return answers


def _text(prompts: Prompts, answers: Rollout | None) -> str | None:
    """The first of them, for people to compare."""
    return None if answers is None else decode_answers(prompts.tokenizer, answers)[0][0][0]
