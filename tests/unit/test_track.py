"""Trackers, read back with the libraries' own readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import perfed
from perfed.cli import app
from perfed.errors import ExtraError, UnknownNameError
from perfed.result import Result
from perfed.track import check, tracked

WORDS = ["--method", "fedrep", "--net", "mlp", "--set", "net.hidden=[8]", "--clients", "5", "--eval-every", "2"]


def invoke(*words: str) -> None:
    made = CliRunner().invoke(app, list(words))
    assert made.exit_code == 0, made.output


def expected(result: Result) -> list[tuple[int, float]]:
    return [(entry["t"], pytest.approx(entry["local.mean"], abs=1e-6)) for entry in result.history]


@pytest.mark.filterwarnings("ignore")  # of the libraries' own
def test_tensorboard_has_every_evaluation(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    invoke("run", *WORDS, "--rounds", "5", "--track", "tensorboard", "--out", str(tmp_path / "run"))
    result = perfed.load(tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("local/mean")] == expected(result)
    assert events.Scalars("cost/bytes_up")[-1].value == result.cost["bytes_up"]
    assert "fedrep" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_every_evaluation_once_also_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    whole = perfed.run("fedrep", net={"name": "mlp", "hidden": [8]}, clients=5, rounds=5, eval_every=2)
    place = tmp_path / "run"

    class KilledError(Exception):
        pass

    def stop(now: Any) -> None:
        if now.t == 3:
            raise KilledError

    watch = tracked("mlflow", whole.config, place, stop)
    with pytest.raises(KilledError):
        perfed.run(
            "fedrep", net={"name": "mlp", "hidden": [8]}, clients=5, rounds=5, eval_every=2, out=place, watch=watch
        )
    invoke("resume", str(place), "--track", "mlflow")
    result = perfed.load(place)
    assert result.state_sha256 == whole.state_sha256  # tracking is no part of a run
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("perfed")
    assert experiment
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["method.name"] == "fedrep"
    history = client.get_metric_history(run.info.run_id, "local.mean")
    assert sorted((m.step, m.value) for m in history) == expected(result)


def test_unknown_trackers_and_missing_packages_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="tensorbord"):
        check("tensorbord")
    monkeypatch.setattr("perfed.track.find_spec", lambda _: None)
    with pytest.raises(ExtraError, match="mlflow"):
        check("mlflow")
    made = CliRunner().invoke(app, ["run", *WORDS, "--track", "mlflow", "--out", str(tmp_path / "run")])
    assert made.exit_code == 2
    assert not (tmp_path / "run").exists()
