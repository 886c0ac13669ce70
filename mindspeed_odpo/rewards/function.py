"""A reward written as a Python function."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from mindspeed_odpo.config import RewardFunction
from mindspeed_odpo.errors import ConfigError, DataError, WorkerError, nearest

ARGUMENTS = ("prompts", "responses", "response_ids")
_LARGEST = torch.finfo(torch.float32).max


def load_function(target: str) -> Callable[..., Any]:
    """The callable named by ``package.module:name`` or ``path/to/file.py:name`` (path from the working directory)."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"reward function '{target}': expected 'package.module:name' or 'path/to/file.py:name'")
    module = _load_file(Path(place), target) if place.endswith(".py") else _load_module(place, target)
    if name not in vars(module):
        callables = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(f"reward function '{target}': {place} has no '{name}'{nearest(name, callables)}")
    function = vars(module)[name]
    if not callable(function):
        raise ConfigError(f"reward function '{target}': '{name}' is a {type(function).__name__}, not a function")
    return function


def _load_module(place: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:  # whatever the user's module raises at import is the user's to read
        if isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"reward function '{target}': no module '{error.name}'; install it, or name a file: 'path/to/file.py:name'"
            ) from error
        raise ConfigError(f"reward function '{target}': importing {place} failed: {_describe(error)}") from error


def _load_file(path: Path, target: str) -> ModuleType:
    if not path.is_file():
        near = nearest(path.name, (p.name for p in path.parent.glob("*.py"))) if path.parent.is_dir() else ""
        raise ConfigError(f"reward function '{target}': no file {path.resolve()}{near}")
    name = f"odpo_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"reward function '{target}': loading {path} failed: {_describe(error)}") from error
    return module


def _describe(error: BaseException) -> str:
    """``ValueError: message (file.py:12)``: the line that raised, not the one that called."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message} ({frames[-1].filename}:{frames[-1].lineno})"


class FunctionReward:
    """The weighted sum of user functions, each called once a batch.

    A function gets keyword arguments: ``prompts`` (as in the data: text or messages), ``responses`` (text without special
    tokens), ``response_ids`` (token ids with the EOS) and every column of the data as a list, all of one length N; only
    those that it declares, all with ``**kwargs``. It returns N numbers; None: this answer has no score.
    """

    def __init__(self, functions: tuple[RewardFunction, ...]) -> None:
        self._functions = [(f.target, f.weight, load_function(f.target)) for f in functions]
        self._parameters = {target: _parameters(target, function) for target, _, function in self._functions}

    def check(self, columns: Iterable[str]) -> None:
        """``ConfigError`` where a function needs an argument that the data does not have. Cheap: call it before a run."""
        offered = dict.fromkeys([*ARGUMENTS, *columns])
        for target, parameters in self._parameters.items():
            for p in parameters:
                if p.kind != p.VAR_KEYWORD and p.default is p.empty and p.name not in offered:
                    have = ", ".join(offered)
                    raise ConfigError(f"reward function '{target}' needs '{p.name}', there are: {have}{nearest(p.name, offered)}")

    def score(
        self, prompts: Sequence[Any], responses: Sequence[str], response_ids: Sequence[list[int]], rows: Sequence[Mapping[str, Any]]
    ) -> list[float | None]:
        """One score for each of N answers; None where any function gave none. All arguments have length N (a prompt's
        row stands once for each of its answers); a column that a row lacks is None there."""
        columns = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
        for name in ARGUMENTS:
            if name in columns and not (name == "prompts" and columns[name] == list(prompts)):
                raise DataError(f"column '{name}' of the data has the name of a reward function's argument; rename the column")
        self.check(columns)
        everything = {**columns, "prompts": list(prompts), "responses": list(responses), "response_ids": list(response_ids)}
        total: list[float | None] = [0.0] * len(responses)
        for target, weight, function in self._functions:
            parameters = self._parameters[target]
            if any(p.kind == p.VAR_KEYWORD for p in parameters):
                arguments = everything
            else:
                arguments = {p.name: everything[p.name] for p in parameters if p.name in everything}
            try:
                result = function(**arguments)
            except Exception as error:
                raise WorkerError(f"reward function '{target}' raised {_describe(error)}") from error
            scores = _scores(target, result, responses)
            total = [None if t is None or s is None else t + weight * s for t, s in zip(total, scores, strict=True)]
        return total


def _parameters(target: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:  # some built-ins have none
        raise ConfigError(f"reward function '{target}': its parameters cannot be read; wrap it in a Python function") from error
    for p in parameters:
        if p.kind == p.POSITIONAL_ONLY:
            raise ConfigError(f"reward function '{target}': '{p.name}' is positional-only; arguments are passed by name, remove the '/'")
    return [p for p in parameters if p.kind != p.VAR_POSITIONAL]


def _scores(target: str, result: Any, responses: Sequence[str]) -> list[float | None]:
    wanted = len(responses)
    if isinstance(result, (torch.Tensor, np.ndarray)):
        if result.ndim != 1:
            raise WorkerError(f"reward function '{target}': expected {wanted} scores, got an array of shape {list(result.shape)}")
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise WorkerError(f"reward function '{target}': expected a list of {wanted} scores, got {type(result).__name__}")
    if len(result) != wanted:
        raise WorkerError(
            f"reward function '{target}': expected {wanted} scores, got {len(result)}; return one an answer, None for no score"
        )
    return [_number(target, i, value, responses[i]) for i, value in enumerate(result)]


def _number(target: str, index: int, value: Any, response: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and value.ndim == 0:
        value = value.item()
    where = f"reward function '{target}': score {index}"
    if not isinstance(value, (int, float)):  # a bool is an int
        raise WorkerError(f"{where} is a {type(value).__name__}, expected a number or None; answer: {response[:80]!r}")
    if not abs(value) <= _LARGEST:  # also false for NaN; scores travel as float32
        raise WorkerError(f"{where} is {value}, expected a finite number or None; answer: {response[:80]!r}")
    return float(value)
