"""Prompt files: one JSON object a line."""

from __future__ import annotations

import json
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
    path = Path(path)
    if not path.is_file():
        near = nearest(path.name, (p.name for p in path.parent.iterdir())) if path.parent.is_dir() else ""
        raise DataError(f"{path}: no such file; data.path must be a JSONL file with a '{prompt_key}' column{near}")
    rows = []
    # Split on the newline byte alone: str.splitlines would also split at U+2028 and other marks inside a string.
    for number, line in enumerate(path.read_bytes().removeprefix(_BOM).split(b"\n"), start=1):
        if line.strip():
            rows.append(_row(line, f"{path}:{number}", prompt_key))
    if not rows:
        raise DataError(f"{path}: 0 rows; expected one JSON object a line with a '{prompt_key}' column")
    return rows


def _row(line: bytes, where: str, prompt_key: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON, {error.msg} at column {error.colno}; expected one whole object a line (JSONL)") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {_found(row)}; the file must be JSONL, one object a line")
    if prompt_key not in row:
        columns = ", ".join(map(str, row)) or "none"
        raise DataError(f"{where}:{prompt_key}: no such column; columns there: {columns}{nearest(prompt_key, row)}; set data.prompt_key")
    _check_prompt(row[prompt_key], f"{where}:{prompt_key}")
    return row


def _check_prompt(prompt: Any, where: str) -> None:
    if isinstance(prompt, str):
        _check_text(prompt, where)
        return
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: expected text or a list of {{role, content}} messages, found {_found(prompt)}")
    for i, message in enumerate(prompt):
        if not isinstance(message, dict):
            raise DataError(f"{where}[{i}]: expected a {{role, content}} message, found {_found(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise DataError(f"{where}[{i}].{key}: expected text, found {_found(message.get(key))}")
    last = prompt[-1]
    if last["role"] == "assistant":
        raise DataError(f"{where}[{len(prompt) - 1}].role: the prompt ends with an answer (role 'assistant'); end it with the user's turn")
    _check_text(last["content"], f"{where}[{len(prompt) - 1}].content")


def _check_text(text: str, where: str) -> None:
    if not text.strip():
        raise DataError(f"{where}: expected text, found {'an empty string' if not text else 'white space only'}")
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
