"""Recorded preferences of an iteration: which rows, as token ids, with what counts in the loss.

A row is two dialogues, chosen and rejected. Its prompt is what both begin with before the first token that counts; what follows
is each one's answer, index 0 (chosen) and 1 (rejected) on K. Which tokens count (``answer_mask``)::

    answer            the last assistant turn up to and with its EOS, as a rollout would have sampled it
    dialogue          every assistant turn, as long as the chat template writes it (its EOS, and a line end behind that)
    dialogue_shifted  dialogue, one token late: without each turn's first token, with the one behind its end (MiniMind's
                      dataset of 2025; behind the row's end that is the first token of its padding to seq_length)

Turns of the user are read by the model and never count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mindspeed_odpo.config import DataConfig
from mindspeed_odpo.data.formats import Preference, read_preferences
from mindspeed_odpo.data.order import Order
from mindspeed_odpo.data.prompts import as_messages, encode_plain, encode_prompt, render
from mindspeed_odpo.errors import DataError
from mindspeed_odpo.types import REASONS, Pairs, Rollout

Messages = list[dict[str, Any]]
CHOSEN, REJECTED = 0, 1
KEPT, EMPTY, IDENTICAL = (REASONS.index(name) for name in ("kept", "empty", "identical"))


@dataclass(frozen=True)
class Recorded:
    """One dialogue: its token ids, which of them count, and whether its last turn ends with an EOS id."""

    ids: list[int]
    counted: list[bool]
    finished: bool


@dataclass(frozen=True)
class _Row:
    """Token ids i32, masks bool: a data set of long dialogues stays small in memory."""

    prompt: Tensor
    answers: tuple[Tensor, ...]
    counted: tuple[Tensor, ...]
    finished: tuple[bool, bool]
    reason: int
    length: int
    """Tokens of the longer side, prompt included."""


def cut_tokens(tokenizer: PreTrainedTokenizerBase, text: str, edges: Sequence[int]) -> tuple[list[int], list[int]]:
    """Token ids of ``text`` such that every edge (a character offset, ascending) falls between two tokens, and where.

    The text is encoded as a whole. Where a token would reach over an edge (the prompt's last character merged with the answer's
    first one), what follows the edge is encoded by itself: a rollout's answer too begins behind whole prompt tokens.
    """

    def encode(part: str) -> list[int]:
        return list(tokenizer.encode(part, add_special_tokens=False))

    done: list[int] = []
    base, rest, places = 0, encode(text), []
    for edge in edges:
        head = encode(text[base:edge])
        if rest[: len(head)] != head:
            done, base, rest, head = done + head, edge, encode(text[edge:]), []
        places.append(len(done) + len(head))
    return done + rest, places


class Speller:
    """Dialogues to token ids, by one tokenizer, its chat template and the ids that end an answer."""

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int], seq_length: int) -> None:
        self.mask, self.system_prompt = config.answer_mask, config.system_prompt
        self.tokenizer, self.eos_ids, self.seq_length = tokenizer, tuple(eos_ids), seq_length
        self._eos = tokenizer.eos_token_id if tokenizer.eos_token_id in self.eos_ids else self.eos_ids[0]
        known = (tokenizer.convert_ids_to_tokens(i) for i in self.eos_ids)  # None: an id that the tokenizer has no entry for
        self._eos_texts = tuple(str(text) for text in known if text)
        if self.mask != "answer" and not tokenizer.chat_template:
            raise DataError(f"answer_mask: {self.mask} needs a chat template, the tokenizer has none; add one, or set answer_mask: answer")

    def spell(self, dialogue: Messages, where: str) -> Recorded:
        """``dialogue`` ends with the assistant's turn. An answer that spells its EOS out is not given a second one."""
        turns = [self._without_eos(turn) if turn["role"] == "assistant" else turn for turn in dialogue]
        return self._answer(turns, where) if self.mask == "answer" else self._dialogue(turns, where)

    def _without_eos(self, turn: dict[str, Any]) -> dict[str, Any]:
        text = turn["content"]
        while text.endswith(self._eos_texts):
            text = next(text.removesuffix(eos) for eos in self._eos_texts if text.endswith(eos))
        return {**turn, "content": text}

    def _answer(self, turns: Messages, where: str) -> Recorded:
        tokenizer, before, answer = self.tokenizer, turns[:-1], turns[-1]["content"]
        prompt = encode_prompt(tokenizer, before, self.system_prompt, where)  # what a rollout is given
        if tokenizer.chat_template:
            head = render(tokenizer, as_messages(before, self.system_prompt), where)
            text = render(tokenizer, as_messages(turns, self.system_prompt), where, add_generation_prompt=False)
            self._continues(text, head, len(turns), where)
            ids, _ = cut_tokens(tokenizer, text, [len(head)])
        else:
            ids = encode_plain(tokenizer, before[-1]["content"] + answer)
            if ids[: len(prompt)] != prompt:
                ids = prompt + tokenizer.encode(answer, add_special_tokens=False)
        answer_ids = ids[len(prompt) :]
        end = self._end(answer_ids, len(turns), where)
        answer_ids = [*answer_ids, self._eos] if end is None else answer_ids[:end]
        return Recorded(prompt + answer_ids, [False] * len(prompt) + [True] * len(answer_ids), finished=True)

    def _dialogue(self, turns: Messages, where: str) -> Recorded:
        messages = as_messages(turns, self.system_prompt)
        text = render(self.tokenizer, messages, where, add_generation_prompt=False)
        edges: list[int] = []
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        added = len(messages) - len(turns)  # the system turn, which is not in the file
        for i in answers:
            start = render(self.tokenizer, messages[:i], where)
            end = render(self.tokenizer, messages[: i + 1], where, add_generation_prompt=False)
            for head in (start, end):
                self._continues(text, head, i + 1 - added, where)
            edges += [len(start), len(end)]
        ids, places = cut_tokens(self.tokenizer, text, edges)
        counted = [False] * len(ids)
        finished = False
        for i, begin, stop in zip(answers, places[::2], places[1::2], strict=True):
            counted[begin:stop] = [True] * (stop - begin)
            finished = self._end(ids[begin:stop], i + 1 - added, where) is not None
        if self.mask == "dialogue_shifted":
            if len(ids) < self.seq_length and self.tokenizer.pad_token_id is not None:
                ids, counted = [*ids, self.tokenizer.pad_token_id], [*counted, False]
            return Recorded(ids, [False, *counted[:-1]], finished)
        if not finished:  # a template that does not close the last turn: without an EOS the policy would unlearn to stop
            ids, counted = [*ids, self._eos], [*counted, True]
        return Recorded(ids, counted, finished=True)

    def _end(self, ids: list[int], turn: int, where: str) -> int | None:
        """Length up to and with the first EOS; None without one. Only white space may follow it."""
        end = next((i for i, token in enumerate(ids) if token in self.eos_ids), None)
        if end is not None and str(self.tokenizer.decode(ids[end + 1 :])).strip():
            raise DataError(
                f"{where}: turn {turn}: {len(ids) - end - 1} tokens follow the end-of-answer token "
                f"'{self.tokenizer.convert_ids_to_tokens(ids[end])}', a policy could never say them; remove it from the text"
            )
        return None if end is None else end + 1

    def _continues(self, text: str, head: str, turn: int, where: str) -> None:
        if text.startswith(head):
            return
        at = next(i for i, (a, b) in enumerate(zip(text + "\0", head + "\1", strict=False)) if a != b)
        raise DataError(
            f"{where}: the chat template writes the whole dialogue otherwise than its beginning up to turn {turn} (they part at character "
            f"{at}: {text[at : at + 20]!r} against {head[at : at + 20]!r}), so that the answer cannot be told apart; use a template that "
            "appends turn by turn"
        )


class Preferences:
    """The endless, seeded stream of preference pairs, in the order of ``data/order.py``: iteration n is a function of (seed, n).

    Rows with a side longer than ``seq_length`` tokens (prompt and answer) are left out and counted in ``notices``. Rows whose two
    sides are the same tokens, or one of whose answers is empty, stay in their batch with a ``reason`` and train nothing.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Sequence[int],
        seq_length: int,
        batch_size: int,
        seed: int,
    ) -> None:
        self.tokenizer = tokenizer
        self._mask = config.answer_mask
        speller = Speller(config, tokenizer, eos_ids, seq_length)
        records = read_preferences(config.path, config.prompt_key, config.chosen_key, config.rejected_key)
        self._rows = [_row(record, speller) for record in records]
        self.usable = tuple(i for i, row in enumerate(self._rows) if row.length <= seq_length)
        lengths = [row.length for row in self._rows]
        if not self.usable:
            raise DataError(
                f"{config.path}: none of {len(lengths)} rows fits: the longer dialogue of the shortest has {min(lengths)} tokens, "
                f"seq_length is {seq_length}; raise seq_length"
            )
        self.notices = tuple(self._tell(str(config.path), seq_length, max(lengths)))
        if all(self._rows[i].reason != KEPT for i in self.usable):
            raise DataError(f"{config.path}: no row can train: {', '.join(self.notices)}; give rows with two different answers")
        self.order = Order(self.usable, batch_size, seed, config.shuffle)

    def _tell(self, path: str, seq_length: int, longest: int) -> list[str]:
        total, left_out = len(self._rows), len(self._rows) - len(self.usable)
        out = []
        if left_out:
            out.append(
                f"{path}: {left_out} of {total} rows left out: chosen or rejected is longer than seq_length {seq_length} "
                f"(the longest has {longest} tokens)"
            )
        for reason, what in ((EMPTY, "an empty answer"), (IDENTICAL, "two identical answers")):
            count = sum(self._rows[i].reason == reason for i in self.usable)
            if count:
                out.append(f"{path}: {count} of {total} rows train nothing: {what}")
        return out

    def __len__(self) -> int:
        """Rows that fit."""
        return len(self.order)

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return len(self._rows)

    def length(self, row: int) -> int:
        """Tokens of the longer side of a row of the file, prompt included."""
        return self._rows[row].length

    def rollout(self, rows: Sequence[int]) -> Rollout:
        """Rows of the file as if a policy had answered them: K=2, chosen and rejected, ``policy_version`` 0."""
        some = [self._rows[i] for i in rows]
        s = max(len(row.prompt) for row in some)
        r = max(len(answer) for row in some for answer in row.answers)
        prompt_ids, prompt_mask = torch.zeros(len(some), s, dtype=torch.int64), torch.zeros(len(some), s, dtype=torch.bool)
        ids = torch.zeros(len(some), 2, r, dtype=torch.int64)
        mask, counted = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        for p, row in enumerate(some):
            prompt_ids[p, s - len(row.prompt) :] = row.prompt
            prompt_mask[p, s - len(row.prompt) :] = True
            for k, answer in enumerate(row.answers):
                ids[p, k, : len(answer)] = answer
                mask[p, k, : len(answer)] = True
                counted[p, k, : len(answer)] = row.counted[k]
        finished = torch.tensor([row.finished for row in some])
        loss_mask = None if self._mask == "answer" else counted
        return Rollout(prompt_ids, prompt_mask, ids, mask, finished, torch.tensor(list(rows)), 0, loss_mask).check()

    def batch(self, step: int) -> tuple[Rollout, Pairs]:
        """The recorded answers and pairs ``[P,1]`` of iteration ``step`` (from 1); P = batch_size."""
        rows = self.order.rows(step)
        zeros = torch.zeros(len(rows), 1, dtype=torch.int64)
        reason = torch.tensor([[self._rows[i].reason] for i in rows])
        pairs = Pairs(chosen=zeros + CHOSEN, rejected=zeros + REJECTED, margin=torch.zeros(len(rows), 1), reason=reason)
        return self.rollout(rows), pairs.check(len(rows), 2)

    def epoch(self, step: int) -> float:
        """Passes over the data when iteration ``step`` is done."""
        return self.order.epochs(step)

    def epoch_index(self, step: int) -> int:
        """The epoch, from 0, in which the first row of iteration ``step`` stands."""
        return self.order.epoch_index(step)

    def facts(self) -> dict[str, Any]:
        """What the iterations' rows depend on besides seed and batch size: a resumed run must find the same."""
        return {"data": f"{len(self.usable)} rows, sha256 {self.digest()[:16]}", "shuffle": self.order.shuffle}

    def digest(self) -> str:
        """sha256 of everything a model sees of the usable rows: token ids, and which of them count."""
        total = hashlib.sha256()
        for i in self.usable:
            row = self._rows[i]
            for part in (row.prompt, *row.answers, *row.counted):
                total.update(f"{i}/{len(part)}:".encode())
                total.update(part.numpy().tobytes())
        return total.hexdigest()


def _row(record: Preference, speller: Speller) -> _Row:
    if speller.mask == "answer":
        _same_turns(record)
    sides = [speller.spell(dialogue, record.where) for dialogue in (record.chosen, record.rejected)]
    empty = any(not dialogue[-1]["content"].strip() for dialogue in (record.chosen, record.rejected))
    first = min(side.counted.index(True) if any(side.counted) else len(side.ids) for side in sides)
    common = next((i for i, (a, b) in enumerate(zip(*(side.ids for side in sides), strict=False)) if a != b), first)
    start = min(first, common)
    if start == 0:
        raise DataError(
            f"{record.where}: chosen and rejected have no first token in common, so the answers have no prompt; begin both alike"
        )
    empty = empty or any(not any(side.counted) for side in sides)
    identical = sides[0].ids == sides[1].ids
    answers, counted = (
        tuple(torch.tensor(getattr(side, name)[start:], dtype=kind) for side in sides)
        for name, kind in (("ids", torch.int32), ("counted", torch.bool))
    )
    return _Row(
        prompt=torch.tensor(sides[0].ids[:start], dtype=torch.int32),
        answers=answers,
        counted=counted,
        finished=(sides[0].finished, sides[1].finished),
        reason=EMPTY if empty else IDENTICAL if identical else KEPT,
        length=max(len(side.ids) for side in sides),
    )


def _same_turns(record: Preference) -> None:
    chosen, rejected = record.chosen[:-1], record.rejected[:-1]
    cure = "answer_mask: answer wants equal turns before the last answer: make them equal, or set answer_mask: dialogue"
    if len(chosen) != len(rejected):
        raise DataError(f"{record.where}: chosen has {len(chosen) + 1} turns, rejected {len(rejected) + 1}; {cure}")
    for i, (a, b) in enumerate(zip(chosen, rejected, strict=True), start=1):
        if a != b:
            first, second = (f"{turn['role']} {turn['content'][:30]!r}" for turn in (a, b))
            raise DataError(f"{record.where}: turn {i} of chosen ({first}) is not turn {i} of rejected ({second}); {cure}")
