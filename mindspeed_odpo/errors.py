"""Every error a user can meet. One line each: the number, the name and the cure.

The launcher prints ``str(error)`` alone and exits with 1; a traceback is for bugs, not for a misspelt key.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable


class OdpoError(Exception):
    """Base of all errors whose message is written for the person who started the run."""


class ConfigError(OdpoError):
    """A setting is missing, misspelt, contradictory, or does not fit the machine or the model."""


class DataError(OdpoError):
    """Prompts, a checkpoint or a Hugging Face folder is missing or not what it should be."""


class HostError(OdpoError):
    """The host (megatron-core, MindSpeed-LLM) lacks something that we need."""


class PatchError(OdpoError):
    """A host patch does not fit the source that is installed. Nothing was changed."""


class WorkerError(OdpoError):
    """A role failed while it ran: a reward function, a rank, a collective."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A ``; did you mean 'x'?`` tail for an unknown name, or an empty string when nothing is near."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{match[0]}'?" if match else ""


def exit_code(call: Callable[[], int]) -> int:
    """What a command returns: ``call()``'s code, 1 after an OdpoError told in one line, 130 after Ctrl-C."""
    try:
        return call()
    except OdpoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
