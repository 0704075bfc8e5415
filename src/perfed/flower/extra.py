"""Flower is an extra; this imports it, or says how to install it."""

from __future__ import annotations

import os
from importlib.util import find_spec

from perfed.config import Config
from perfed.errors import ConfigError, ExtraError

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Flower tells nobody about runs and looks for no updates, unless the user set these."""


def require(*packages: str) -> None:
    """Refuse to go on without these packages."""
    for package in packages:
        if find_spec(package) is None:
            raise ExtraError(
                f"This needs the package {package}, which is not installed.", "pip install 'perfed[flower]'"
            )
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def refuse_cohorts(config: Config) -> None:
    """Each node computes one client, so no step is taken for many at once."""
    if config.executor != "plain":
        raise ConfigError(f"executor = {config.executor!r} cannot be on Flower.", "Give executor = plain.")
