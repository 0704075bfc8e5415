"""`--engine flower`: the clients of a run as Flower's simulated nodes, computed by Ray on this machine or a cluster.

The rounds, their store and their result are those of every run; private states lie in the run's directory, as simulated
clients have no disk of their own.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from perfed.config import GIVEN
from perfed.engine.worker import Worker
from perfed.errors import ConfigError
from perfed.flower.extra import refuse_cohorts, require
from perfed.prepare import Prepared

require("flwr", "ray")

from flwr.app import Context  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402

from perfed.flower.client_app import app as client_app  # noqa: E402
from perfed.flower.nodes import Nodes, StoppedError  # noqa: E402
from perfed.flower.rollcall import Roll  # noqa: E402
from perfed.flower.simulate_nodes import nodes  # noqa: E402

T = TypeVar("T")


def simulate(prepared: Prepared, run: Callable[[Callable[[Worker | None], Nodes]], T]) -> T:
    """Call `run` with an executor of simulated nodes, inside a ServerApp, and return what it returns."""
    refuse_cohorts(prepared.config)
    for key in ("data", "net", "method"):
        if (name := getattr(prepared.config, key)["name"]).startswith(GIVEN):
            raise ConfigError(
                f"{key} = {name!r} is an object that no other process has.", "Name it, or engine = local."
            )
    found: list[T] = []
    failed: list[BaseException] = []
    stop = threading.Event()
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            there = nodes(grid, prepared, Roll(grid, "", stop))
            found.append(run(lambda worker: there.limited(worker) if worker else there))
        except BaseException as error:
            failed.append(error)

    try:
        with _quiet():
            run_simulation(server, client_app, prepared.federation.num_clients, backend_config=_backend(prepared))
    finally:
        stop.set()
    if failed:
        raise failed[0]
    if not found:
        raise StoppedError("Flower ended before the run did.", "Resume the run.")
    return found[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Errors of Flower's are told, but after Ctrl-C not those of actors that got the signal too."""
    flower = logging.getLogger("flwr")
    level, before = flower.level, signal.getsignal(signal.SIGINT)
    flower.setLevel(logging.ERROR)

    def interrupted(number: int, frame: FrameType | None) -> None:
        flower.setLevel(logging.CRITICAL + 1)
        if callable(before):
            before(number, frame)

    wrapped = threading.current_thread() is threading.main_thread() and callable(before)
    if wrapped:
        signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        if wrapped:
            signal.signal(signal.SIGINT, before)
        if flower.level == logging.ERROR:  # threads of an interrupted simulation speak even after this
            flower.setLevel(level)


def _backend(prepared: Prepared) -> dict[str, dict[str, Any]]:
    """As many single-thread actors as workers; on a cluster that exists, as many as it has room for."""
    init: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not os.environ.get("RAY_ADDRESS"):
        init |= {"address": "local", "num_cpus": prepared.config.workers}  # and no cluster that was there once
    return {"init_args": init, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
