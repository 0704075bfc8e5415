"""Trackers: what every evaluation of a run found, also sent to TensorBoard or MLflow.

They read what the run has committed, so a resumed run is tracked whole, and they change nothing in it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from perfed import rundir
from perfed.config import Config
from perfed.engine.settings import Progress, Watcher
from perfed.errors import ExtraError, unknown

EVENTS = "tensorboard"
MLFLOW_ID = "mlflow-run"
EXPERIMENT = "perfed"


class Sink(Protocol):
    """Where numbers go."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of one round."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoard:
    """Event files in the run's directory; those of an earlier start are superseded."""

    def __init__(self, config: Config, directory: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own dependencies
            from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(directory / EVENTS), purge_step=0)
        self.writer.add_text("config", "```toml\n" + config.toml() + "```", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A scalar each."""
        for name, value in values.items():
            self.writer.add_scalar(name.replace(".", "/", 1), value, step)
        self.writer.flush()

    def close(self) -> None:
        """Close the file."""
        self.writer.close()


class MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI or in mlruns/ here; a resumed run goes on in its own."""

    def __init__(self, config: Config, directory: Path) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = Path("mlruns").absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mlflow.tracking import MlflowClient

            self.client = MlflowClient(tracking_uri=uri)
            kept = directory / MLFLOW_ID
            self.run = kept.read_text().strip() if kept.is_file() else self._start(config, kept)
            self.logged = {m.step for m in self.client.get_metric_history(self.run, "local.mean")}

    def _start(self, config: Config, kept: Path) -> str:
        found = self.client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else self.client.create_experiment(EXPERIMENT)
        name = f"{config.method['name']}, seed {config.seed}"
        run = str(self.client.create_run(experiment, run_name=name).info.run_id)
        for key, value in config.identity().items():
            table = value if isinstance(value, dict) else {"": value}
            for part, item in table.items():
                self.client.log_param(run, f"{key}.{part}" if part else key, str(item)[:500])
        rundir.write(kept, run.encode())
        return run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """All numbers of a round at once; those that are there already are not sent again."""
        if step in self.logged:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, value in values.items():
                self.client.log_metric(self.run, name, value, step=step)

    def close(self) -> None:
        """The run is finished."""
        self.client.set_terminated(self.run)


SINKS: dict[str, tuple[Callable[[Config, Path], Sink], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "mlflow": (MLflow, "mlflow"),
}


def check(name: str) -> None:
    """Refuse a tracker that is not there."""
    if name not in SINKS:
        raise unknown("tracker", name, SINKS)
    if not find_spec(SINKS[name][1]):
        raise ExtraError(
            f"Tracking by {name} needs the package {SINKS[name][1]}.", f"Run: pip install 'perfed[{name}]'."
        )


def tracked(name: str, config: Config, directory: Path, watch: Watcher | None = None) -> Watcher:
    """A watcher of the run in this directory that feeds a tracker, beside another watcher."""
    check(name)
    return _Tracked(name, config, directory, watch)


class _Tracked:
    def __init__(self, name: str, config: Config, directory: Path, watch: Watcher | None) -> None:
        self.config, self.directory, self.watch = config, directory, watch
        self.make, self.last = SINKS[name][0], 0
        self.sink: Sink | None = None

    def __call__(self, now: Progress) -> None:
        """Pass on, and log the evaluations that were committed since."""
        if self.watch:
            self.watch(now)
        if now.doing != "done":
            return
        if self.sink is None:
            self.sink = self.make(self.config, self.directory)
        for record in rundir.records(self.directory, self.last):
            self.last = record["t"]
            if "metrics" in record:
                self.sink.log(record["t"], numbers(record))
        if now.t == now.rounds:
            self.sink.close()


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """What a round's record has to follow: metrics, costs so far, refused updates."""
    found = {key: value for key, value in rundir.finite(record["metrics"]).items() if isinstance(value, float)}
    costs = {f"cost.{k}": float(v) for k, v in record["ledger"].items() if isinstance(v, int | float)}
    return found | costs | {"faults": float(len(record["faults"]))}
