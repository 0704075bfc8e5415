"""A deployment on loopback: a SuperLink and three sites as real processes, over TLS, with a folder of images each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits

import perfed
from perfed import config as configuration
from perfed.data import Federation
from perfed.data.federation import PARTS
from perfed.flower import deployment
from perfed.flower.coordinate import Terms
from perfed.flower.site import KEYS, Site
from perfed.privacy.ckks import Keyring
from perfed.result import Result

SITES = {"anna": (0, 1, 2), "berta": (2, 3, 4), "carla": (0, 5, 6, 7)}
NET = {"name": "mlp", "hidden": [16, 12]}


def pictures(folder: Path, each: int = 60) -> None:
    """Every site's own images of some digits, one folder per class."""
    x, y = load_digits(return_X_y=True)
    pixels = (x.reshape(-1, 8, 8) * 15.9).astype(np.uint8)
    for number, (name, digits) in enumerate(SITES.items()):
        for row in np.flatnonzero(np.isin(y, digits))[number::3][:each]:
            place = folder / name / str(y[row])
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[row]).save(place / f"{row:04d}.png")


class Cluster:
    """The processes of a deployment, each ended by its own number."""

    def __init__(self, place: Path, *, insecure: bool = False) -> None:
        self.place, self.port, self.insecure = place, deployment.free_port(), insecure
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        pictures(place / "data")
        bind = None if insecure else "127.0.0.1"  # then it is the default
        deployment.init_coordinator(place / "coordinator", "127.0.0.1", self.port, bind, insecure=insecure)
        self.coordinator = deployment.Coordinator.load(place / "coordinator")
        for name in SITES:
            self.init_site(name, name)

    def init_site(self, folder: str, name: str, ca: Path | None = None) -> Path:
        directory = self.place / folder
        data = str(self.place / "data" / (name if name in SITES else "anna"))
        deployment.init_site(directory, name, data, f"127.0.0.1:{self.port}", insecure=self.insecure)
        if self.insecure:
            return directory
        (directory / "ca.crt").write_bytes((ca or self.coordinator.directory / "ca.crt").read_bytes())
        return directory

    def share_key(self) -> None:
        """The secret key that sites share, a copy in every site's directory."""
        Keyring.make(self.place / KEYS)
        for name in SITES:
            (self.place / name / KEYS).write_bytes((self.place / KEYS).read_bytes())

    # Processes

    def _start(self, name: str, *words: str) -> None:
        with (self.place / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "perfed.cli", *words],
                stdout=log,
                stderr=log,
                cwd=self.place,
                start_new_session=True,
                env={**os.environ, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"},
            )

    def start_link(self) -> None:
        self._start("link", "coordinator", "start", str(self.coordinator.directory))
        self.until(lambda: b"startup complete" in self._log("link")[self._mark :], 180, "the SuperLink to start")

    _mark = 0

    def start_site(self, name: str) -> None:
        self._start(name, "site", "start", str(self.place / name))

    def start(self) -> None:
        self.start_link()
        for name in SITES:
            if not self.insecure:
                self.coordinator.add(self.place / name / f"{name}.csr")
            self.start_site(name)

    def kill(self, name: str) -> None:
        """End a process and what it started, at once and without a word."""
        process = self.processes.pop(name)
        for child in [*descendants(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.wait()
        self._mark = len(self._log("link"))

    def server_app(self) -> int | None:
        """The process that runs the ServerApp."""
        link = self.processes["link"].pid
        found = [pid for pid in descendants(link) if "flwr-serverapp" in command(pid)]
        return found[0] if found else None

    def stop(self) -> None:
        for name in list(self.processes):
            self.kill(name)

    # Runs

    def submit(self, out: Path, words: dict[str, Any], terms: Terms) -> subprocess.Popen[bytes]:
        """Hand a run to the SuperLink and follow it, in a process of its own."""
        app = self.coordinator.app(words, terms, out)
        with (self.place / "run.log").open("ab") as log:
            return subprocess.Popen(
                [deployment.program("flwr"), "run", str(app), deployment.CONNECTION, "--stream"],
                stdout=log,
                stderr=log,
                env=deployment.environment(self.coordinator.home),
                start_new_session=True,
            )

    def finish(self, out: Path, words: dict[str, Any], terms: Terms, seconds: float = 900) -> Result:
        """Submit a run until it is finished, as a person would who restarts what fell over."""
        ends = time.monotonic() + seconds
        while not (out / "result.json").is_file():
            assert time.monotonic() < ends, self.told()
            following = self.submit(out, words, terms)
            self.until(
                lambda: (out / "result.json").is_file() or following.poll() is not None,  # noqa: B023
                ends - time.monotonic(),
                "the run to end",
            )
            end(following)
        return Result.load(out)

    def until(self, true: Any, seconds: float, what: str) -> None:
        ends = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < ends, f"waited {seconds:.0f} s for {what}\n{self.told()}"
            time.sleep(0.2)

    def told(self) -> str:
        logs = sorted(self.place.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    def _log(self, name: str) -> bytes:
        path = self.place / f"{name}.log"
        return path.read_bytes() if path.exists() else b""


@contextmanager
def cluster(place: Path) -> Iterator[Cluster]:
    made = Cluster(place)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def descendants(pid: int) -> list[int]:
    """The processes below one, deepest first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        below = parents.get(queue.pop(0), [])
        found += below
        queue += below
    return found[::-1]


def command(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def words(method: str, rounds: int = 3, **hyper: Any) -> dict[str, Any]:
    return {
        "method": {"name": method, "lr": 0.05, **hyper},
        "net": NET,
        "rounds": rounds,
        "eval_every": rounds,
    }


def in_process(made: Cluster, given: dict[str, Any]) -> Result:
    """The same run in this process, over the sites' divisions put together."""
    config = configuration.resolve(given)
    parts = [Site.load(made.place / name).own(config) for name in sorted(SITES)]
    classes = tuple(sorted({name for part in parts for name in part.classes}))
    placed = [part.placed(number, len(parts), classes) for number, part in enumerate(parts)]
    owners: dict[str, Any] = {part: [] for part in PARTS}
    for number, one in enumerate(placed):
        for part in PARTS:
            owner = np.full(len(one._y), -1, np.int64)
            owner[one.rows(number, part).numpy()] = number
            owners[part].append(owner)
    joined = Federation(
        torch.cat([one._x for one in placed]),
        torch.cat([one._y for one in placed]),
        {part: np.concatenate(owners[part]) for part in PARTS},
        len(parts),
        classes,
    )
    return perfed.run(data=joined, **given)
