"""Files of prompts and of preferences: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_odpo.errors import DataError, nearest

_BOM = b"\xef\xbb\xbf"


def read_rows(path: Path, prompt_key: str) -> list[dict[str, Any]]:
    """The rows of a JSONL file, in file order; blank lines are skipped.

    UTF-8 with or without BOM, LF or CRLF; text is kept byte for byte. ``row[prompt_key]`` is a non-empty string, or a
    list of ``{role, content}`` messages (more keys are kept) that ends with the turn to be answered. Every other column
    is kept as it is, for the reward. ``DataError`` names file, line, key and what was found there.
    """
    rows = []
    for where, row in _objects(path, f"a '{prompt_key}' column"):
        _check_prompt(_column(row, prompt_key, where, "prompt_key"), f"{where}:{prompt_key}")
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, each as a whole dialogue that ends with the assistant's turn; ``where`` is file:line."""

    where: str
    chosen: list[dict[str, Any]]
    rejected: list[dict[str, Any]]


def read_preferences(path: Path, prompt_key: str, chosen_key: str, rejected_key: str) -> list[Preference]:
    """The rows of a JSONL file of preferences, in file order. The two answer columns hold

    * two texts: answers to ``row[prompt_key]``, which is text or messages as in a file of prompts;
    * two lists of messages that begin with the assistant's turn: the same;
    * two lists of messages that begin with another turn: whole dialogues, ``row[prompt_key]`` is not looked at.

    An answer may be empty (it trains nothing, and is counted there). ``DataError`` names file, line, key and what was found.
    """
    rows = []
    for where, row in _objects(path, f"the columns '{chosen_key}' and '{rejected_key}'"):
        answers = [_column(row, key, where, name) for key, name in ((chosen_key, "chosen_key"), (rejected_key, "rejected_key"))]
        sides = [_answer(answer, f"{where}:{key}") for answer, key in zip(answers, (chosen_key, rejected_key), strict=True)]
        whole = [side[0]["role"] != "assistant" for side in sides]
        if whole[0] != whole[1]:
            first, second = (chosen_key, rejected_key) if whole[0] else (rejected_key, chosen_key)
            raise DataError(f"{where}: '{first}' is a whole dialogue, '{second}' an answer alone; write both in the same form")
        if not whole[0]:
            prompt = _column(row, prompt_key, where, "prompt_key")
            _check_prompt(prompt, f"{where}:{prompt_key}")
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            sides = [[*turns, *side] for side in sides]
        rows.append(Preference(where, *sides))
    return rows


def _objects(path: Path, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """``file:line`` and object of every line that is not blank; at least one."""
    path = Path(path)
    if not path.is_file():
        near = nearest(path.name, (p.name for p in path.parent.iterdir())) if path.parent.is_dir() else ""
        raise DataError(f"{path}: no such file; data_path must be a JSONL file with {what}{near}")
    empty = True
    # Split on the newline byte alone: str.splitlines would also split at U+2028 and other marks inside a string.
    for number, line in enumerate(path.read_bytes().removeprefix(_BOM).split(b"\n"), start=1):
        if line.strip():
            empty = False
            yield f"{path}:{number}", _object(line, f"{path}:{number}")
    if empty:
        raise DataError(f"{path}: 0 rows; expected one JSON object a line with {what}")


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8") from error
    except RecursionError as error:
        raise DataError(f"{where}: brackets nested too deeply to be read") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON, {error.msg} at column {error.colno}; expected one whole object a line (JSONL)") from error
    except ValueError as error:  # a number of more digits than Python reads
        raise DataError(f"{where}: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {_found(row)}; the file must be JSONL, one object a line")
    return row


def _column(row: dict[str, Any], key: str, where: str, setting: str) -> Any:
    if key not in row:
        columns = ", ".join(map(str, row)) or "none"
        raise DataError(f"{where}:{key}: no such column; columns there: {columns}{nearest(key, row)}; set {setting}")
    return row[key]


def _check_prompt(prompt: Any, where: str) -> None:
    if isinstance(prompt, str):
        _check_text(prompt, where)
        return
    _check_messages(prompt, where)
    last = prompt[-1]
    if last["role"] == "assistant":
        raise DataError(f"{where}[{len(prompt) - 1}].role: the prompt ends with an answer (role 'assistant'); end it with the user's turn")
    _check_text(last["content"], f"{where}[{len(prompt) - 1}].content")


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: expected text or a list of {{role, content}} messages, found {_found(messages)}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise DataError(f"{where}[{i}]: expected a {{role, content}} message, found {_found(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise DataError(f"{where}[{i}].{key}: expected text, found {_found(message.get(key))}")


def _answer(answer: Any, where: str) -> list[dict[str, Any]]:
    """An answer column as messages; text is one turn of the assistant."""
    if isinstance(answer, str):
        _check_unicode(answer, where)
        return [{"role": "assistant", "content": answer}]
    _check_messages(answer, where)
    for i, message in enumerate(answer):
        _check_unicode(message["content"], f"{where}[{i}].content")
    last = answer[-1]["role"]
    if last != "assistant":
        raise DataError(f"{where}[{len(answer) - 1}].role: the dialogue ends with role '{last}'; end it with the assistant's turn")
    return answer


def _check_text(text: str, where: str) -> None:
    if not text.strip():
        raise DataError(f"{where}: expected text, found {'an empty string' if not text else 'white space only'}")
    _check_unicode(text, where)


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half of a surrogate pair at character {error.start + 1}; write the whole \\uXXXX\\uXXXX pair") from error


def _found(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", dict: "an object"}
    if isinstance(value, (str, list)):
        kind = "string" if isinstance(value, str) else "list"
        return f"an empty {kind}" if not value else f"a {kind} {str(value)[:40]!r}"
    shown = names[type(value)]
    return shown if value is None or isinstance(value, dict) else f"{shown} ({value})"
