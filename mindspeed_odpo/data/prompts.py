"""Prompts of an iteration: which rows, rendered with the chat template, as token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mindspeed_odpo.config import DataConfig
from mindspeed_odpo.data.formats import read_rows
from mindspeed_odpo.data.order import Order
from mindspeed_odpo.errors import DataError
from mindspeed_odpo.types import PromptBatch, Rollout

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder; never looks anything up on the network. ``DataError`` without one."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"tokenizer folder {folder} does not exist; expected a Hugging Face folder with tokenizer.json")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise DataError(f"{folder} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}; copy them from the model's folder")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: the tokenizer cannot be read ({str(error).splitlines()[0]}); copy its files anew") from error


def as_messages(prompt: str | list[dict[str, Any]], system_prompt: str | None = None) -> list[dict[str, Any]]:
    """A prompt as messages: text is one user turn; ``system_prompt`` goes first where there is no system turn."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt is not None and all(m["role"] not in ("system", "developer") for m in messages):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], where: str, add_generation_prompt: bool = True) -> str:
    """Messages as one text, special tokens spelt out, by the tokenizer's own chat template."""
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        roles = ", ".join(m["role"] for m in messages)
        raise DataError(f"{where}: the chat template refuses the turns [{roles}]: {error}") from error
    return str(text)


def encode_plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Text without chat template: encoded once with the tokenizer's special tokens, one BOS at most and no EOS at the end."""
    bare = tokenizer.encode(text, add_special_tokens=False)
    if bare and bare[0] == tokenizer.bos_token_id:  # the text spells its BOS out: a second one would shift the model's input
        return bare
    full = tokenizer.encode(text, add_special_tokens=True)
    if full and full[-1] == tokenizer.eos_token_id and bare[-1:] != full[-1:]:  # tokenizers that close what they encode
        full.pop()
    return full


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]], system_prompt: str | None, where: str
) -> list[int]:
    """Token ids up to where the answer starts. The template writes the BOS, so its text is encoded without special tokens."""
    messages = as_messages(prompt, system_prompt)
    if tokenizer.chat_template:
        return tokenizer.encode(render(tokenizer, messages, where), add_special_tokens=False)
    if len(messages) > 1:
        raise DataError(
            f"{where}: the prompt has {len(messages)} turns and the tokenizer no chat template; use one turn, or add a template"
        )
    return encode_plain(tokenizer, messages[0]["content"])


def decode_answers(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> tuple[list[list[str]], list[list[list[int]]]]:
    """``[P][K]`` texts without special tokens, and ``[P][K]`` token ids with the EOS and without padding.

    The EOS that ended an answer is no text, also where a model ends on a token that its tokenizer does not call special.
    """
    ids = [
        [[token for token, real in zip(row, mask, strict=True) if real] for row, mask in zip(rows, masks, strict=True)]
        for rows, masks in zip(rollout.response_ids.tolist(), rollout.response_mask.tolist(), strict=True)
    ]

    def text(answer: list[int], finished: bool) -> str:
        return str(tokenizer.decode(answer[:-1] if finished else answer, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    ended = rollout.finished.tolist()
    texts = [[text(a, end) for a, end in zip(row, ends, strict=True)] for row, ends in zip(ids, ended, strict=True)]
    return texts, ids


class Prompts:
    """The endless, seeded stream of prompts, in the order of ``data/order.py``: iteration n is a function of (seed, n).

    Rows longer than ``max_prompt_length`` tokens are left out and counted in ``notices``.
    """

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, max_prompt_length: int, batch_size: int, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rows = read_rows(config.path, config.prompt_key)
        self.prompt_key = config.prompt_key
        self._ids = [
            encode_prompt(tokenizer, row[config.prompt_key], config.system_prompt, f"{config.path}: row {i} (from 0)")
            for i, row in enumerate(self.rows)
        ]
        lengths = [len(ids) for ids in self._ids]
        if not all(lengths):
            raise DataError(f"{config.path}: row {lengths.index(0)} (from 0) renders to 0 tokens; check the tokenizer's chat template")
        usable = [i for i, n in enumerate(lengths) if n <= max_prompt_length]
        if not usable:
            raise DataError(
                f"{config.path}: none of {len(lengths)} prompts fits: the shortest has {min(lengths)} tokens with the chat template, "
                f"max_prompt_length is {max_prompt_length}; raise max_prompt_length or shorten the prompts"
            )
        dropped = len(lengths) - len(usable)
        longest = f"{config.path}: {dropped} of {len(lengths)} prompts left out: longer than max_prompt_length {max_prompt_length} "
        self.notices: tuple[str, ...] = (longest + f"(the longest has {max(lengths)} tokens)",) if dropped else ()
        self.order = Order(usable, batch_size, seed, config.shuffle)

    def __len__(self) -> int:
        """Rows that fit."""
        return len(self.order)

    def facts(self) -> dict[str, Any]:
        """What the iterations' prompts depend on besides seed and batch size: a resumed run must find the same."""
        total = hashlib.sha256(json.dumps([self._ids[i] for i in self.order.usable]).encode())
        return {"data": f"{len(self)} prompts, sha256 {total.hexdigest()[:16]}", "shuffle": self.order.shuffle}

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that any row has, the prompt's too, in order of first sight."""
        return tuple(dict.fromkeys(key for row in self.rows for key in row))

    def batch(self, step: int) -> PromptBatch:
        """Prompts of iteration ``step`` (from 1), left-padded to the longest of them; P = batch_size."""
        index = self.order.rows(step)
        width = max(len(self._ids[i]) for i in index)
        ids = torch.zeros(len(index), width, dtype=torch.int64)
        mask = torch.zeros(len(index), width, dtype=torch.bool)
        for row, i in enumerate(index):
            ids[row, width - len(self._ids[i]) :] = torch.tensor(self._ids[i])
            mask[row, width - len(self._ids[i]) :] = True
        rows: tuple[Mapping[str, Any], ...] = tuple(self.rows[i] for i in index)
        return PromptBatch(step, ids, mask, torch.tensor(index), torch.arange(len(index)), rows).check()

    def epoch(self, step: int) -> float:
        """Passes over the data when iteration ``step`` is done."""
        return self.order.epochs(step)

    def epoch_index(self, step: int) -> int:
        """The epoch, from 0, in which the first prompt of iteration ``step`` stands."""
        return self.order.epoch_index(step)
