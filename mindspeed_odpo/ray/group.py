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

from mindspeed_odpo.config import Config
from mindspeed_odpo.errors import WorkerError
from mindspeed_odpo.ray.placement import threads, worker_options
from mindspeed_odpo.ray.worker import RankWorker, check_error
from mindspeed_odpo.types import PromptBatch, Rollout, StepStats, TrainBatch

Splittable = (PromptBatch, Rollout, TrainBatch)


class Pending:
    """A call under way on ranks of a group. ``result()`` waits for all of them and gathers the parts of those in ``take``
    (indices of ``references``; None: all)."""

    def __init__(self, what: str, references: Sequence[ray.ObjectRef], minutes: float, take: Sequence[int] | None = None) -> None:
        self.what = what
        self.references = list(references)
        self.minutes = minutes
        self.take = range(len(self.references)) if take is None else take

    def parts(self) -> list[Any]:
        try:
            answers = ray.get(self.references, timeout=self.minutes * 60)
            return [answers[index] for index in self.take]
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
    """The ranks of one process group and the roles that live in it, each with a layout of its own over the same ranks."""

    def __init__(self, config: Config, roles: Sequence[str]) -> None:
        self.roles = tuple(roles)
        self.layouts = {role: config.parallel(role) for role in self.roles}
        # Megatron's groups are those of the first role, which the other Megatron models of a process share.
        self.parallel = self.layouts[self.roles[0]]
        self.minutes = config.timeout_minutes
        remote = ray.remote(RankWorker)
        count = threads(config, self.roles[0])
        options = worker_options(count)
        self.ranks = [remote.options(**options).remote(config, self.roles, rank, count) for rank in range(self.parallel.world_size)]

    def setup(self) -> Pending:
        address, port = self.all("address", ranks=self.ranks[:1]).result()
        return self.all("setup", self.parallel, address, port)

    def all(self, method: str, *args: Any, ranks: Sequence[Any] | None = None) -> Pending:
        references = [getattr(rank, method).remote(*args) for rank in (self.ranks if ranks is None else ranks)]
        return Pending(f"{'+'.join(self.roles)}.{method}", references, self.minutes)

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Pending:
        """``method`` of ``role`` on every rank. Arguments with an axis P are cut into equal runs, one a data-parallel index, and
        every rank gets that of its index; others go to all. The ranks of one index give the same results: of a call that was cut
        the first of them hands its own over, the others say nothing; without a cut all of them answer and must agree.
        """
        layout = self.layouts[role]
        shares = [[_share(arg, index, layout.data) for arg in args] for index in range(layout.data)]
        indices = [layout.data_index(rank) for rank in range(layout.world_size)]
        firsts = [indices.index(index) for index in range(layout.data)]
        take = firsts if any(isinstance(arg, Splittable) for arg in args) else range(len(indices))
        references = [
            rank.call.remote(role, method, number in take, *shares[index], **kwargs)
            for number, (rank, index) in enumerate(zip(self.ranks, indices, strict=True))
        ]
        return Pending(f"{role}.{method}", references, self.minutes, take)

    def call_first(self, role: str, method: str, *args: Any, **kwargs: Any) -> Pending:
        """``method`` of ``role`` on the ranks of the first data-parallel index, with whole arguments; the first rank's answer."""
        layout = self.layouts[role]
        ranks = [rank for number, rank in enumerate(self.ranks) if layout.data_index(number) == 0]
        references = [rank.call.remote(role, method, number == 0, *args, **kwargs) for number, rank in enumerate(ranks)]
        return Pending(f"{role}.{method}", references, self.minutes, [0])


def _share(arg: Any, index: int, dp: int) -> Any:
    if not isinstance(arg, Splittable) or dp == 1:
        return arg
    if len(arg) % dp:
        raise WorkerError(f"{type(arg).__name__} of {len(arg)} prompts over {dp} data-parallel ranks: not a whole number each")
    size = len(arg) // dp
    return arg.select(range(index * size, (index + 1) * size))


class _ActorCalls:
    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def start(self, facts: Mapping[str, Any]) -> Pending:
        return self.group.call("actor", "start", facts)

    def data_began(self) -> Pending:
        return self.group.call("actor", "data_began")

    def update(self, batch: TrainBatch, step: int, beta: float) -> Pending:
        return self.group.call("actor", "update", batch, step=step, beta=beta, global_pairs=int(batch.pairs.keep.sum()))

    def save(self, step: int) -> Pending:
        return self.group.call("actor", "save", step)

    def export_hf(self, folder: Path) -> Pending:
        return self.group.call("actor", "export_hf", folder)

    def greedy_gaps(self, answers: Rollout) -> Pending:
        """f32 ``[P,K]``, see ``engine.greedy``. Every rank gets all prompts; the first one answers."""
        references = [rank.call.remote("actor", "greedy_gaps", number == 0, answers) for number, rank in enumerate(self.group.ranks)]
        return Pending("actor.greedy_gaps", references, self.group.minutes, [0])


class _RolloutCalls:
    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def generate(self, prompts: PromptBatch) -> Pending:
        return self.group.call("rollout", "generate", prompts)

    def greedy(self, prompts: PromptBatch) -> Pending:
        """One greedy answer a prompt, on the first ranks: for showing, not for training."""
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
            self.groups = [RankGroup(config, names)]
            by_role = dict.fromkeys(names, self.groups[0])
        else:
            by_role = {name: RankGroup(config, (name,)) for name in names}
            self.groups = list(by_role.values())
        self._by_role = by_role
        wait(*[group.setup() for group in self.groups])
        self._checksum, self._synced, self._minutes = config.sync_checksum, False, config.timeout_minutes
        if not self._colocated and {"actor", "rollout"} <= set(names):
            self._join_sync()
        calls = {"actor": _ActorCalls, "rollout": _RolloutCalls, "reference": _ReferenceCalls, "reward": _RewardCalls}
        if "reference" not in names:
            self.reference = _NoReference()
        for name, group in by_role.items():
            setattr(self, name, calls[name](group))

    def _join_sync(self) -> None:
        """One group for the run's weight syncs: the actor's first rank and all of the rollout's."""
        actor = self._by_role["actor"]
        address, port = actor.all("address", ranks=actor.ranks[:1]).result()
        ranks = [actor.ranks[0], *self._by_role["rollout"].ranks]
        references = [rank.join_sync.remote(address, port, number, len(ranks)) for number, rank in enumerate(ranks)]
        Pending("weight sync.join", references, self._minutes).parts()

    def sync_weights(self, version: int) -> int:
        """The rollout takes over the actor's weights, as ``version``. Every rank confirms it. Returns their bytes."""
        check = self._checksum == "always" or (self._checksum == "first" and not self._synced)
        if self._colocated:
            loaded, moved = self._by_role["actor"].all("hand_over_weights", version, check).result()
        else:
            references = [rank.receive_weights.remote(version) for rank in self._by_role["rollout"].ranks]
            references += [rank.send_weights.remote(version, check) for rank in self._by_role["actor"].ranks]
            loaded, moved = Pending("weight sync", references, self._minutes).result()
        if loaded != version:
            raise WorkerError(f"weight sync: asked for version {version}, the rollout says {loaded}")
        self._synced = True
        return int(moved)

    def __enter__(self) -> Roles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End every rank. After an error they are killed: a rank may hang in a collective that the failed one never joins."""
        for group in self.groups:
            if error is None:
                group.all("close").parts()
            for rank in group.ranks:
                ray.kill(rank)
