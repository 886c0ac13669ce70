"""A reward written as a Python function, and what it shares with a judge: how a user's function is found, called and read."""

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

_LARGEST = torch.finfo(torch.float32).max


def load_function(target: str, kind: str = "reward function") -> Callable[..., Any]:
    """The callable named by ``package.module:name`` or ``path/to/file.py:name`` (path from the working directory); ConfigError,
    naming ``kind`` and target, where there is none."""
    what = f"{kind} '{target}'"
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{what}: expected 'package.module:name' or 'path/to/file.py:name'")
    module = _load_file(Path(place), what) if place.endswith(".py") else _load_module(place, what)
    if name not in vars(module):
        callables = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(f"{what}: {place} has no '{name}'{nearest(name, callables)}")
    function = vars(module)[name]
    if not callable(function):
        raise ConfigError(f"{what}: '{name}' is a {type(function).__name__}, not a function")
    return function


def _load_module(place: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:  # whatever the user's module raises at import is the user's to read
        if isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}."):
            raise ConfigError(f"{what}: no module '{error.name}'; install it, or name a file: 'path/to/file.py:name'") from error
        raise ConfigError(f"{what}: importing {place} failed: {_describe(error)}") from error


def _load_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        near = nearest(path.name, (p.name for p in path.parent.glob("*.py"))) if path.parent.is_dir() else ""
        raise ConfigError(f"{what}: no file {path.resolve()}{near}")
    name = f"odpo_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{what}: loading {path} failed: {_describe(error)}") from error
    return module


def _describe(error: BaseException) -> str:
    """``ValueError: message (file.py:12)``: the line that raised, not the one that called."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message} ({frames[-1].filename}:{frames[-1].lineno})"


class UserFunction:
    """One function of the user's, called by name with what it declares; with ``**kwargs`` it gets all that is offered."""

    def __init__(self, target: str, kind: str = "reward function") -> None:
        self.name = f"{kind} '{target}'"
        self._function = load_function(target, kind)
        try:
            parameters = list(inspect.signature(self._function).parameters.values())
        except ValueError as error:  # some built-ins have none
            raise ConfigError(f"{self.name}: its parameters cannot be read; wrap it in a Python function") from error
        for p in parameters:
            if p.kind == p.POSITIONAL_ONLY:
                raise ConfigError(f"{self.name}: '{p.name}' is positional-only; arguments are passed by name, remove the '/'")
        self._required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self._named = {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        self._takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)

    def check(self, offered: Iterable[str]) -> None:
        """ConfigError where the function needs an argument that is not offered. Cheap: it is asked before a run."""
        names = list(dict.fromkeys(offered))
        for name in self._required:
            if name not in names:
                raise ConfigError(f"{self.name} needs '{name}', there are: {', '.join(names)}{nearest(name, names)}")

    def __call__(self, offered: Mapping[str, list[Any]], count: int, returns: str, cure: str) -> list[Any]:
        """The ``count`` values that it returns for ``offered``, as a list; zero-dimensional tensors as Python numbers. WorkerError
        where it raises or returns something else: ``returns`` and ``cure`` say what it should have returned."""
        self.check(offered)
        arguments = offered if self._takes_all else {name: value for name, value in offered.items() if name in self._named}
        try:
            result = self._function(**arguments)
        except Exception as error:
            raise WorkerError(f"{self.name} raised {_describe(error)}") from error
        if isinstance(result, (torch.Tensor, np.ndarray)):
            if result.ndim != 1:
                raise WorkerError(f"{self.name}: expected {count} {returns}, got an array of shape {list(result.shape)}")
            result = result.tolist()
        if not isinstance(result, (list, tuple)):
            raise WorkerError(f"{self.name}: expected a list of {count} {returns}, got {type(result).__name__}")
        if len(result) != count:
            raise WorkerError(f"{self.name}: expected {count} {returns}, got {len(result)}; {cure}")
        return [
            value.item() if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and value.ndim == 0 else value for value in result
        ]


def data_columns(rows: Sequence[Mapping[str, Any]], arguments: Sequence[str], prompts: Sequence[Any]) -> dict[str, list[Any]]:
    """The data's columns as lists, None where a row lacks one. DataError for a column that has the name of an argument (but
    for ``prompts``, where it holds the prompts)."""
    columns = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
    own = [] if columns.get("prompts") == list(prompts) else ["prompts"]
    free_columns(columns, [*(name for name in arguments if name != "prompts"), *own])
    return columns


def free_columns(columns: Iterable[str], arguments: Sequence[str]) -> list[str]:
    """``columns`` as they are. DataError for one that has the name of an argument."""
    columns = list(columns)
    for name in arguments:
        if name in columns:
            raise DataError(f"column '{name}' of the data has the name of an argument of the reward; rename the column")
    return columns


class FunctionReward:
    """The weighted sum of user functions, each called once a batch.

    A function gets keyword arguments: ``prompts`` (as in the data: text or messages), ``responses`` (text without special
    tokens), ``response_ids`` (token ids with the EOS) and every column of the data as a list, all of one length N; only
    those that it declares, all with ``**kwargs``. It returns N numbers; None: this answer has no score.
    """

    ARGUMENTS = ("prompts", "responses", "response_ids")

    def __init__(self, functions: tuple[RewardFunction, ...]) -> None:
        self._functions = [(UserFunction(f.target), f.weight) for f in functions]

    def check(self, columns: Iterable[str]) -> None:
        """``ConfigError`` where a function needs an argument that the data does not have, ``DataError`` where a column has an
        argument's name."""
        # Whether a column "prompts" holds the prompts, as it may, shows when they come.
        offered = [*self.ARGUMENTS, *free_columns(columns, [name for name in self.ARGUMENTS if name != "prompts"])]
        for function, _ in self._functions:
            function.check(offered)

    def score(
        self,
        prompts: Sequence[Any],
        responses: Sequence[str],
        response_ids: Sequence[list[int]],
        rows: Sequence[Mapping[str, Any]],
        answers_per_prompt: int = 1,
    ) -> list[float | None]:
        """One score for each of N answers; None where any function gave none. All arguments have length N: a prompt and its
        row stand once for each of its ``answers_per_prompt`` answers (not read here: an answer is judged alone)."""
        columns = data_columns(rows, self.ARGUMENTS, prompts)
        offered = {**columns, "prompts": list(prompts), "responses": list(responses), "response_ids": list(response_ids)}
        total: list[float | None] = [0.0] * len(responses)
        for function, weight in self._functions:
            values = function(offered, len(responses), "scores", "return one an answer, None for no score")
            scores = [_number(f"{function.name}: score {i}", value, responses[i]) for i, value in enumerate(values)]
            total = [None if t is None or s is None else t + weight * s for t, s in zip(total, scores, strict=True)]
        return total


def _number(where: str, value: Any, response: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)):  # a bool is an int
        raise WorkerError(f"{where} is a {type(value).__name__}, expected a number or None; answer: {response[:80]!r}")
    if not abs(value) <= _LARGEST:  # also false for NaN; scores travel as float32
        raise WorkerError(f"{where} is {value}, expected a finite number or None; answer: {response[:80]!r}")
    return float(value)
