"""Roles over ranks: call every rank, split by prompts, gather on prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from torch import Tensor

from mindspeed_odpo.config import Config, ParallelConfig
from mindspeed_odpo.errors import WorkerError
from mindspeed_odpo.ray.placement import threads, worker_options
from mindspeed_odpo.ray.worker import RankWorker, check_error
from mindspeed_odpo.types import PromptBatch, Rollout, StepStats, TrainBatch

Splittable = (PromptBatch, Rollout, TrainBatch)


class Pending:
    """A call under way on all ranks of a group. ``result()`` waits for it and gathers."""

    def __init__(self, what: str, references: Sequence[ray.ObjectRef], minutes: float) -> None:
        self.what = what
        self.references = list(references)
        self.minutes = minutes

    def parts(self) -> list[Any]:
        try:
            return ray.get(self.references, timeout=self.minutes * 60)
        except GetTimeoutError as error:
            raise WorkerError(
                f"{self.what}: no answer after {self.minutes:g} minutes from {len(self.references)} rank(s); a rank hangs or is too slow: "
                "raise training.timeout_minutes or look at the rank's log"
            ) from error
        except (RayTaskError, RayActorError) as error:
            known = check_error(error)
            if known is not None:
                raise known from None
            raise WorkerError(f"{self.what} failed: {_first_error(error)}") from error

    def result(self) -> Any:
        return _gather(self.what, self.parts())


def _first_error(error: RayTaskError | RayActorError) -> str:
    text = str(error).strip()
    return text if isinstance(error, RayTaskError) else f"a rank's process died: {text.splitlines()[0]}"


def _gather(what: str, parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Rollout):
        return Rollout.concat(parts)
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, StepStats):
        sums = {name: sum(part.sums[name] for part in parts) for name in first.sums}
        return replace(first, sums=sums, pairs=sum(part.pairs for part in parts))
    if any(part != first for part in parts):
        raise WorkerError(f"{what}: ranks disagree: {parts}")
    return first


def wait(*calls: Any) -> Any:
    """Results of calls that ran at the same time; plain values pass through, so that roles may be plain Python."""
    results = [call.result() if isinstance(call, Pending) else call for call in calls]
    return results[0] if len(results) == 1 else tuple(results)


class RankGroup:
    """The ranks of one process group and the roles that live in it."""

    def __init__(self, config: Config, roles: Sequence[str], parallel: ParallelConfig) -> None:
        self.roles = tuple(roles)
        self.parallel = parallel
        self.minutes = config.timeout_minutes
        remote = ray.remote(RankWorker)
        count = threads(config, self.roles[0])
        options = worker_options(count)
        self.ranks = [remote.options(**options).remote(config, self.roles, rank, count) for rank in range(parallel.world_size)]

    def setup(self) -> Pending:
        address, port = self.all("address", ranks=self.ranks[:1]).result()
        return self.all("setup", self.parallel, address, port)

    def all(self, method: str, *args: Any, ranks: Sequence[Any] | None = None) -> Pending:
        references = [getattr(rank, method).remote(*args) for rank in (self.ranks if ranks is None else ranks)]
        return Pending(f"{'+'.join(self.roles)}.{method}", references, self.minutes)

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Pending:
        """``method`` of ``role`` on every rank: arguments with an axis P are cut into equal runs, others go to all."""
        dp = self.parallel.data
        cut = [[_share(arg, rank, dp) for arg in args] for rank in range(dp)]
        references = [
            rank.call.remote(role, method, *mine, **kwargs) for rank, mine in zip(self.ranks, cut, strict=True)
        ]  # one rank a data-parallel index: no tensor or pipeline parallel yet
        return Pending(f"{role}.{method}", references, self.minutes)

    def call_first(self, role: str, method: str, *args: Any, **kwargs: Any) -> Pending:
        """``method`` of ``role`` on the first rank alone, with whole arguments."""
        return Pending(f"{role}.{method}", [self.ranks[0].call.remote(role, method, *args, **kwargs)], self.minutes)


def _share(arg: Any, rank: int, dp: int) -> Any:
    if not isinstance(arg, Splittable) or dp == 1:
        return arg
    if len(arg) % dp:
        raise WorkerError(f"{type(arg).__name__} of {len(arg)} prompts over {dp} data-parallel ranks: not a whole number each")
    size = len(arg) // dp
    return arg.select(range(rank * size, (rank + 1) * size))


class _ActorCalls:
    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def start(self, facts: Mapping[str, Any]) -> Pending:
        return self.group.call("actor", "start", facts)

    def update(self, batch: TrainBatch, step: int, beta: float) -> Pending:
        return self.group.call("actor", "update", batch, step=step, beta=beta, global_pairs=int(batch.pairs.keep.sum()))

    def save(self, step: int) -> Pending:
        return self.group.call("actor", "save", step)

    def export_hf(self, folder: Path) -> Pending:
        return self.group.call_first("actor", "export_hf", folder)


class _RolloutCalls:
    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def generate(self, prompts: PromptBatch) -> Pending:
        return self.group.call("rollout", "generate", prompts)

    def greedy(self, prompts: PromptBatch) -> Pending:
        """One greedy answer a prompt, on the first rank: for showing, not for training."""
        return self.group.call_first("rollout", "generate", prompts, greedy=True)


class _ReferenceCalls:
    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def logps(self, rollout: Rollout) -> Pending:
        return self.group.call("reference", "logps", rollout)


class _NoReference:
    """Stands in where the loss needs no reference: no model is loaded, no forward is run."""

    def logps(self, rollout: Rollout) -> Tensor:
        return torch.full(rollout.finished.shape, float("nan"))


class _RewardCalls:
    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def score(self, rollout: Rollout, prompts: PromptBatch) -> Pending:
        return self.group.call("reward", "score", rollout, prompts)


class Roles:
    """The roles of a run and the weight sync, as the training loop sees them. ``names``: the roles to start, by default
    all that the config's stage and loss need; the others are not there to be called."""

    actor: _ActorCalls
    rollout: _RolloutCalls
    reference: _ReferenceCalls | _NoReference
    reward: _RewardCalls

    def __init__(self, config: Config, names: Sequence[str] | None = None) -> None:
        names = config.roles if names is None else tuple(names)
        self._colocated = config.placement == "colocate"
        if self._colocated:
            self.groups = [RankGroup(config, names, config.actor.parallel)]
            by_role = dict.fromkeys(names, self.groups[0])
        else:
            by_role = {name: RankGroup(config, (name,), config.parallel(name)) for name in names}
            self.groups = list(by_role.values())
        self._by_role = by_role
        wait(*[group.setup() for group in self.groups])
        calls = {"actor": _ActorCalls, "rollout": _RolloutCalls, "reference": _ReferenceCalls, "reward": _RewardCalls}
        if "reference" not in names:
            self.reference = _NoReference()
        for name, group in by_role.items():
            setattr(self, name, calls[name](group))

    def sync_weights(self, version: int) -> None:
        """The rollout takes over the actor's weights, as ``version``. Every rank confirms it."""
        if self._colocated:
            loaded = self._by_role["actor"].all("hand_over_weights", version).result()
        else:
            actor, rollout = self._by_role["actor"], self._by_role["rollout"]
            stored = actor.all("push_weights", ranks=actor.ranks[:1]).parts()[0]
            loaded = rollout.all("pull_weights", version, stored).result()
        if loaded != version:
            raise WorkerError(f"weight sync: asked for version {version}, the rollout says {loaded}")

    def __enter__(self) -> Roles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End every rank. After an error they are killed: a rank may hang in a collective that the failed one never joins."""
        for group in self.groups:
            if error is None:
                group.all("close").parts()
            for rank in group.ranks:
                ray.kill(rank)
