"""The rollout engine ``replay``: recorded answers instead of sampled ones, to compare two trainers or to look at one step.

It reads ``completions.jsonl`` of a run (``report/run_log.py``) as it is. The policy trains as ever; it is never asked.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_odpo.config import Config
from mindspeed_odpo.errors import DataError, WorkerError
from mindspeed_odpo.hosts.standalone import Host
from mindspeed_odpo.types import PromptBatch, Rollout, padded

_SAME_RUN = "replay with the data, seed, shuffle and global_batch_size of the recorded run"


@dataclass(frozen=True)
class _Record:
    """One line: K answers to one prompt of one iteration."""

    line: int
    step: int
    version: int
    prompt: Any
    index: int
    answers: tuple[array[int], ...]
    finished: tuple[bool, ...]


class ReplayEngine:
    """One data-parallel rank of the rollout engine ``replay``; the same methods as ``rollout.RolloutEngine``.

    Of each line it reads ``step``, ``policy_version``, ``prompt``, ``prompt_index``, ``answer_ids`` and ``finished``; an
    empty list in ``answer_ids`` is an answer of length 0. The whole file is read and checked here, so that a wrong one ends
    the run before its first iteration. DataError names file and line.
    """

    def __init__(self, config: Config, host: Host) -> None:
        assert config.rollout.replay is not None, "config.parse lets no engine replay without a file through"
        self.config = config
        self.version: int | None = None
        """Of the policy in training, by the last sync; the answers carry the recorded one."""
        self._path = config.rollout.replay
        self._eos = frozenset(host.eos_ids())
        self._steps: dict[int, list[_Record]] = {}
        for record in self._read():
            self._steps.setdefault(record.step, []).append(record)
        for step in range(min(self._steps), config.train_iters + 1):
            self._check_step(step)

    def load_weights(self, version: int, items: Iterable[tuple[str, Tensor]]) -> None:
        """Takes note of the version; the weights are not looked at."""
        self.version = version

    def weight_shapes(self) -> None:
        """Any weights will do."""

    def holds(self, name: str, whole: Tensor) -> bool:
        """Nothing is kept, so nothing is wrong."""
        return True

    def generate(self, prompts: PromptBatch, greedy: bool = False) -> Rollout:
        """The recorded answers of iteration ``prompts.step``, padded with id 0 to the longest of them."""
        if greedy:
            raise WorkerError("rollout_engine replay has recorded answers only: ask rollout_engine megatron for greedy ones")
        prompts.check()
        self._check_step(prompts.step)
        key = self.config.data.prompt_key
        asked = zip(prompts.index.tolist(), prompts.slot.tolist(), prompts.rows, strict=True)
        records = [self._find(prompts.step, index, slot, row[key]) for index, slot, row in asked]
        ids, mask = padded([answer.tolist() for record in records for answer in record.answers])
        shape = (len(records), self.config.rollout.num_answers, -1)
        return Rollout(
            prompt_ids=prompts.ids,
            prompt_mask=prompts.mask,
            response_ids=ids.view(shape),
            response_mask=mask.view(shape),
            finished=torch.tensor([record.finished for record in records]),
            prompt_index=prompts.index,
            policy_version=records[0].version,
        ).check()

    def _find(self, step: int, index: int, slot: int, prompt: Any) -> _Record:
        records = self._steps[step]
        found = [record for record in records if record.index == index]
        if len(found) > 1:  # a batch longer than the data holds a row twice; the lines stand in the order of the batch
            found = [record for record in records[slot : slot + 1] if record.index == index]
        if not found:
            recorded = ", ".join(str(record.index) for record in records[:8])
            raise DataError(
                f"{self._path}: iteration {step}, place {slot} of its batch: the data gives prompt_index {index}, recorded are {recorded}"
                f"{', ...' if len(records) > 8 else ''}; {_SAME_RUN}"
            )
        if found[0].prompt != prompt:
            raise DataError(
                f"{self._where(found[0])}: prompt_index {index} was {_short(found[0].prompt)}, the data has {_short(prompt)} there; "
                f"{_SAME_RUN}"
            )
        return found[0]

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read(self) -> list[_Record]:
        if not self._path.is_file():
            raise DataError(f"replay_path: no file {self._path}; give the completions.jsonl of a run")
        # Split on the newline byte alone, as data/formats.py does: texts may hold other line marks.
        lines = enumerate(self._path.read_bytes().split(b"\n"), start=1)
        records = [self._record(number, line) for number, line in lines if line.strip()]
        if not records:
            raise DataError(f"{self._path}: 0 records; give the completions.jsonl of a run")
        return records

    def _record(self, number: int, line: bytes) -> _Record:
        where = f"{self._path}:{number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deeply
            raise DataError(f"{where}: not JSON ({error}); a run that was killed may leave half a line, delete it") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a JSON object, found a {type(row).__name__}; give the completions.jsonl of a run")
        kinds = {"step": int, "policy_version": int, "prompt": (str, list), "prompt_index": int, "answer_ids": list, "finished": list}
        for key, kind in kinds.items():
            if not isinstance(row.get(key), kind) or isinstance(row[key], bool):
                found = repr(row[key])[:40] if key in row else "nothing"
                raise DataError(f"{where}: {key}: expected {_NAMES[key]}, found {found}; give the completions.jsonl of a run")
        if row["step"] < 1:
            raise DataError(f"{where}: step {row['step']}: iterations count from 1")
        k, answers, finished = self.config.rollout.num_answers, row["answer_ids"], row["finished"]
        if len(answers) != k or len(finished) != k:
            raise DataError(
                f"{where}: {len(answers)} answers and {len(finished)} flags 'finished', n_samples_per_prompt is {k}; "
                "set it to the recorded run's"
            )
        for answer, ended in zip(answers, finished, strict=True):
            self._check_answer(where, answer, ended)
        ids = tuple(array("i", answer) for answer in answers)
        return _Record(number, row["step"], row["policy_version"], row["prompt"], row["prompt_index"], ids, tuple(finished))

    def _check_answer(self, where: str, answer: Any, finished: Any) -> None:
        settings = self.config.rollout
        if not isinstance(answer, list) or any(type(token) is not int for token in answer) or not isinstance(finished, bool):
            raise DataError(f"{where}: expected token ids and a flag for each answer, found {answer!r:.60} and {finished!r:.20}")
        vocab = settings.model.vocab_size
        wrong = next((token for token in answer if not 0 <= token < vocab), None)
        if wrong is not None:
            raise DataError(f"{where}: token id {wrong} lies outside the vocabulary of {vocab}; the answers belong to another model")
        if len(answer) > settings.max_new_tokens:
            raise DataError(
                f"{where}: an answer of {len(answer)} tokens, max_new_tokens is {settings.max_new_tokens}; raise training.seq_length by "
                f"{len(answer) - settings.max_new_tokens} or more"
            )
        ends = [place for place, token in enumerate(answer, start=1) if token in self._eos]
        if ends != ([len(answer)] if finished else []):
            raise DataError(
                f"{where}: an answer of {len(answer)} tokens with finished {str(finished).lower()} has its EOS ids {sorted(self._eos)} at "
                f"{ends or 'no place'} (from 1); finished answers alone have one, at their end: were they recorded with another model?"
            )

    def _check_step(self, step: int) -> None:
        """DataError unless the iteration was recorded whole and once, by weights of one version."""
        records = self._steps.get(step)
        if records is None:
            raise DataError(
                f"{self._path}: iteration {step} is not recorded, {min(self._steps)} to {max(self._steps)} are; "
                "set training.train_iters to the recorded run's, or start where it started"
            )
        if len(records) != self.config.global_batch_size:
            counts = Counter(record.index for record in records)
            twice = next((index for index, count in counts.items() if count > 1), None)
            lines = ", ".join(str(record.line) for record in records if record.index == twice)
            repeated = "" if twice is None else f" (prompt_index {twice} in the lines {lines})"
            raise DataError(
                f"{self._path}: iteration {step} has {len(records)} records{repeated}, global_batch_size is "
                f"{self.config.global_batch_size}; each prompt of the batch has one record"
            )
        for record in records:
            if record.version != records[0].version:
                raise DataError(
                    f"{self._where(record)}: policy_version {record.version}, line {records[0].line} of the same iteration has "
                    f"{records[0].version}; one iteration is answered by one version"
                )

    def _where(self, record: _Record) -> str:
        return f"{self._path}:{record.line}"


_NAMES = {
    "step": "a number",
    "policy_version": "a number",
    "prompt": "a text or messages",
    "prompt_index": "a number",
    "answer_ids": "a list of lists of token ids",
    "finished": "a list of true and false",
}


def _short(prompt: str | Sequence[Any]) -> str:
    text = repr(prompt)
    return text if len(text) <= 60 else text[:57] + "..."
