"""Ray: where the roles run and how they are called. Imported before ``ray`` itself, to tell it how to start."""

from __future__ import annotations

import os

_ADDRESS_FILE = "/tmp/ray/ray_current_cluster"
"""Where ``ray start`` notes its cluster."""


def joins_cluster() -> bool:
    """Whether a run joins a cluster that is there: RAY_ADDRESS names one, or ``ray start`` left one on this machine.
    ``RAY_ADDRESS=local`` says no."""
    address = os.environ.get("RAY_ADDRESS", "")
    return address != "local" and (bool(address) or os.path.exists(_ADDRESS_FILE))


os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
if not joins_cluster():
    # A cluster of one machine listens on loopback. On Linux Ray asks for the outward address unless this is off; it reads
    # the variable when it is imported.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
