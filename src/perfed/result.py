"""What a run found, and the personal models it made."""

from __future__ import annotations

import dataclasses
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perfed import rundir
from perfed.config import Config, load
from perfed.core.client import Client
from perfed.core.method import Method, probabilities
from perfed.data import images
from perfed.engine.executors import one_thread
from perfed.engine.settings import Outcome
from perfed.errors import ConfigError, StoreError
from perfed.prepare import Prepared, prepare

_FACTS = tuple(f.name for f in dataclasses.fields(Outcome))


def versions() -> dict[str, str]:
    """The versions that a result was made with."""
    found = {"python": platform.python_version()}
    for package in ("perfed", "torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree
            found[package] = "unknown"
    return found


@dataclass
class Result:
    """A finished run: its configuration, numbers and directory."""

    config: Config
    state_sha256: str
    partition_sha256: str
    metrics: dict[str, float]
    cost: dict[str, Any]
    history: list[dict[str, Any]]
    clients: dict[str, Any]
    faults: list[dict[str, Any]]
    directory: Path
    prepared: Prepared | None = field(default=None, repr=False)
    made_with: dict[str, str] = field(default_factory=versions, repr=False)
    """the versions of Python and of the packages"""

    @classmethod
    def of(cls, outcome: Outcome, directory: Path, prepared: Prepared) -> Result:
        """The result of a run that just ended."""
        facts = {name: getattr(outcome, name) for name in _FACTS}
        return cls(config=prepared.config, directory=directory, prepared=prepared, **facts)

    @classmethod
    def load(cls, directory: Path | str) -> Result:
        """The result in a run's directory."""
        place = Path(directory)
        rundir.require(place)
        if not rundir.is_finished(place):
            raise StoreError(f"The run in {place} is not finished.", f"Continue it with 'perfed resume {place}'.")
        facts = rundir.read_json(place / rundir.RESULT)
        missing = [name for name in _FACTS if name not in facts]
        if missing:
            raise StoreError(
                f"{place / rundir.RESULT} lacks {', '.join(missing)}.", "Delete it and resume the run to make it again."
            )
        held = {name: facts[name] for name in _FACTS}
        return cls(config=load(place / rundir.CONFIG), directory=place, made_with=facts.get("versions", {}), **held)

    @property
    def accuracy(self) -> dict[int, float]:
        """Every client's accuracy on its own test data."""
        return dict(zip(self.clients["ids"], self.clients["accuracy"], strict=True))

    def facts(self) -> dict[str, Any]:
        """What result.json holds."""
        words = {key: value for key, value in self.config.words().items() if key != "out"}
        facts = {name: getattr(self, name) for name in _FACTS}
        return {"config": words} | facts | {"versions": self.made_with, "numerics": self.config.executor}

    def write(self) -> None:
        """Write result.json and the curves into the run's directory."""
        from perfed.report.figures import curves

        if len(self.history) > 1:
            curves({self.config.method["name"]: [self]}, self.directory / rundir.CURVES)
        rundir.write_json(self.directory / rundir.RESULT, self.facts())

    def save(self, directory: Path | str) -> Path:
        """Copy the run, with all that is needed to show, resume or export it, into a new directory."""
        place = Path(directory)
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise StoreError(f"{place} is a file or not empty.", "Give a new directory.")
        shutil.copytree(self.directory, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("lock"))
        return place

    def table(self) -> str:
        """The metrics and costs as text."""
        from perfed.report.tables import plain_text, result_table

        return plain_text(result_table(self))

    def model(self, client: int) -> nn.Module:
        """A client's personal model, adapted as it was scored; images in [-1, 1] go in, scores come out."""
        with self.scored(client) as found:
            if type(found.plan.method).predict is Method.predict:
                return found.net.module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload, no-any-return]
            return Personal(found).eval()

    def predict(self, client: int, x: Tensor) -> Tensor:
        """A client's class probabilities for images: uint8, or float in [-1, 1] as the network takes them."""
        with self.scored(client) as found, one_thread():
            shape = self.made().federation.input_shape
            ready = images.normalise(images.fit(x, shape)) if x.dtype == torch.uint8 else x
            return probabilities(found.plan.method, found, ready)

    @contextmanager
    def scored(self, client: int) -> Iterator[Client]:
        """The client as it was scored, for as long as the context lasts."""
        made = self.made()
        if not 0 <= client < made.federation.num_clients:
            raise ConfigError(
                f"client = {client} is not accepted.", f"It must be from 0 to {made.federation.num_clients - 1}."
            )
        simulation = made.simulation(self.directory)
        try:
            if simulation.store.round < made.settings.rounds:
                raise StoreError(f"The run in {self.directory} is not finished.", "Resume it first.")
            with torch.enable_grad():  # adapting is training, wherever this is called
                found = simulation.scored(client)
            yield found
        finally:
            simulation.close()

    def made(self) -> Prepared:
        """The run's data, network and method, made again if this result was read from disk."""
        if self.prepared is None:
            self.prepared = prepare(self.config, directory=self.directory)
        return self.prepared


class Personal(nn.Module):
    """A client's way to predict where it is more than its network."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.net = client.net.module
        self._client = client

    def forward(self, x: Tensor) -> Tensor:
        """Scores whose softmax are the class probabilities."""
        return self._client.plan.method.predict(self._client, x)
