"""The command line, by real tiny runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner, Result

import perfed
from perfed.cli import app
from perfed.cli.progress import Watch
from perfed.errors import ConfigError, StoreError

SMALL = ["--net", "mlp", "--set", "net.hidden=[12, 8]", "--clients", "5", "--rounds", "3", "--set", "method.lr=0.05"]


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def stop_after(monkeypatch: pytest.MonkeyPatch, t: int) -> None:
    """Press Ctrl-C as soon as round t is committed."""

    def press(_: Watch, now: Any) -> None:
        if now.doing == "done" and now.t == t:
            raise KeyboardInterrupt

    monkeypatch.setattr(Watch, "__call__", press)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "one"
    answer = call("run", "--method", "fedrep+ft", *SMALL, "--out", place)
    assert answer.exit_code == 0, answer.output
    assert "accuracy, mean over clients" in answer.stdout
    assert "round 3/3" in answer.stderr
    return place


def facts(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "result.json").read_text())
    return found


def test_a_run_directory_has_what_it_promises(finished: Path) -> None:
    found = facts(finished)
    assert {p.name for p in finished.iterdir()} >= {
        "config.toml",
        "run.db",
        "result.json",
        "partition.png",
        "curves.png",
    }
    assert found["metrics"].keys() >= {"local.mean", "local.weighted", "local.std", "local.worst10", "local.loss"}
    assert found["metrics"].keys() >= {"local.macro_f1", "local.before.mean", "new"}
    assert found["cost"].keys() >= {"bytes_up", "bytes_down", "flops", "param_batches", "samples", "seconds"}
    assert found["metrics"]["local.mean"] == pytest.approx(np.mean(found["clients"]["accuracy"]))
    assert found["config"]["clients"] == 5
    assert found["config"]["split"] == "classes:2"
    assert found["config"]["method"]["head_epochs"] == 10
    assert found["versions"]["torch"] == torch.__version__
    assert found["numerics"] == "plain"
    assert [entry["t"] for entry in found["history"]] == [1, 2, 3]


def test_a_taken_directory_is_refused_and_untouched(finished: Path) -> None:
    before = {p.name: p.read_bytes() for p in finished.iterdir()}
    answer = call("run", *SMALL, "--out", finished)
    assert answer.exit_code == 2
    assert answer.stderr.startswith("error [E400]:")
    assert f"perfed resume {finished}" in answer.stderr
    assert {p.name: p.read_bytes() for p in finished.iterdir()} == before


def test_the_saved_file_runs_to_the_same_bits_with_more_workers(finished: Path, tmp_path: Path) -> None:
    answer = call("run", "--config", finished / "config.toml", "--workers", "2", "--out", tmp_path / "two", "--json")
    assert json.loads(answer.stdout)["state_sha256"] == facts(finished)["state_sha256"]


def test_stopped_moved_and_resumed_is_the_same_run(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        stop_after(patched, 2)
        answer = call("run", "--method", "fedrep+ft", *SMALL, "--out", tmp_path / "stopped")
    assert answer.exit_code == 130
    assert "up to round 2 is kept" in answer.stderr
    assert f"perfed resume {tmp_path / 'stopped'}" in answer.stderr
    assert not (tmp_path / "stopped" / "result.json").exists()
    assert call("show", tmp_path / "stopped").exit_code == 2
    (tmp_path / "stopped").rename(tmp_path / "moved")
    assert call("resume", tmp_path / "moved").exit_code == 0
    found, whole = facts(tmp_path / "moved"), facts(finished)
    assert found["state_sha256"] == whole["state_sha256"]
    assert found["metrics"] == whole["metrics"]
    assert found["cost"] | {"seconds": 0} == whole["cost"] | {"seconds": 0}
    again = call("resume", tmp_path / "moved")
    assert again.exit_code == 0
    assert "nothing is left to do" in again.stderr


def test_a_changed_configuration_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        stop_after(patched, 1)
        call("run", *SMALL, "--out", tmp_path / "a")
    file = tmp_path / "a" / "config.toml"
    file.write_text(file.read_text().replace("lr = 0.05", "lr = 0.06"))
    answer = call("resume", tmp_path / "a")
    assert answer.exit_code == 2
    assert "another configuration" in answer.stderr


def test_a_real_ctrl_c(tmp_path: Path) -> None:
    words = ["run", *SMALL, "--rounds", "500", "--workers", "2", "--out", "r"]
    # A shell's background job, and so its children, ignore SIGINT: the program must start as from a terminal.
    begin = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{begin}; from perfed.cli import main; main()", *words]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any("round 1/500" in line for line in iter(process.stderr.readline, ""))  # advice may come first
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 130
    assert out == ""
    assert "Stopped. Everything up to round" in err
    assert err.splitlines()[-1] == "Continue with: perfed resume r"


def test_compare_ranks_skips_and_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "c"
    words = ["compare", *SMALL, "--rounds", "2", "--out", place, "--set", "fedrep.head_epochs=3"]
    with monkeypatch.context() as patched:
        stop_after(patched, 1)
        assert call(*words, "--methods", "local,fedrep", "--seeds", "0,1").exit_code == 130
    assert call("resume", place).exit_code == 0
    stamp = (place / "local" / "0" / "result.json").stat().st_mtime_ns
    answer = call(*words, "--methods", "local,fedavg+ft,fedrep", "--seeds", "0,1", "--json")
    assert answer.exit_code == 0, answer.output
    assert (place / "local" / "0" / "result.json").stat().st_mtime_ns == stamp
    rows = json.loads(answer.stdout)["rows"]
    assert [row["mean"] for row in rows] == sorted((row["mean"] for row in rows), reverse=True)
    assert {row["method"] for row in rows} == {"local", "fedavg+ft", "fedrep"}
    means = [facts(place / "fedrep" / seed)["metrics"]["local.mean"] for seed in "01"]
    fedrep = next(row for row in rows if row["method"] == "fedrep")
    assert fedrep["mean"] == pytest.approx(np.mean(means))
    assert fedrep["spread"] == pytest.approx(np.std(means, ddof=1))
    assert facts(place / "fedrep" / "0")["config"]["method"]["head_epochs"] == 3
    sums = {facts(place / name / "1")["partition_sha256"] for name in ("local", "fedavg+ft", "fedrep")}
    assert len(sums) == 1
    assert {"leaderboard.json", "leaderboard.md", "comparison.png"} <= {p.name for p in place.iterdir()}
    assert "fedavg+ft" in call("show", place).stdout
    other = call(*words, "--methods", "local,fedrep", "--seeds", "0", "--fraction", "0.5")
    assert other.exit_code == 2
    assert "fraction" in other.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["run", "--method", "fedrap"], 2, "error [E101]: There is no method 'fedrap'. Did you mean 'fedrep'?"),
        (["run", "--set", "method.lr=abc"], 2, "error [E100]: method.lr = 'abc' is not accepted."),
        (["run", "--data", "minst"], 2, "error [E101]: There is no data set 'minst'."),
        (["run", "--net", "ccn"], 2, "error [E101]: There is no network 'ccn'."),
        (["run", "--config", "absent.toml"], 2, "error [E100]: The file absent.toml cannot be read"),
        (["run", "--split", "classes:11"], 2, "error [E201]:"),
        (["compare", "--methods", "local,local"], 2, "named twice"),
        (["compare", "--methods", "local", "--seeds", "x"], 2, "error [E100]: seeds"),
        (["compare"], 2, "which methods"),
        (["resume", "absent"], 2, "error [E400]: There is no run in absent."),
        (["show", "absent"], 2, "error [E400]"),
        (["methods", "fedrap"], 2, "Did you mean 'fedrep'?"),
        (["data", "get", "minst"], 2, "error [E101]"),
        (["run", "--rounds", "many"], 2, "--rounds"),
    ],
)
def test_failures_are_told_in_words(
    words: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = call(*words)
    assert answer.exit_code == code
    assert said in answer.stderr
    assert "Traceback" not in answer.output
    assert list(tmp_path.iterdir()) == []


def test_an_unexpected_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfed.prepare.federate", lambda *_, **__: 1 / 0)
    answer = call("run", "--out", tmp_path / "x")
    assert answer.exit_code == 1
    assert answer.stderr.splitlines() == [
        "error: ZeroDivisionError: division by zero",
        "Run with PERFED_TRACEBACK=1 for details.",
    ]


def test_lists_for_people_and_machines(tmp_path: Path) -> None:
    assert call("--version").stdout.strip() == f"perfed {perfed.__version__}"
    assert json.loads(call("methods", "--json").stdout)["fedrep"]["keeps"] == "the head"
    listed = json.loads(call("methods", "fedrep+ft", "--json").stdout)["hyper-parameters"]
    own = {field["name"]: field for field in listed}
    assert own["head_epochs"]["meaning"] == "epochs on the head with the body frozen (tau_h)"
    assert own["finetune_epochs"]["default"] == 10
    trained = json.loads(call("methods", "vanilla", "--json").stdout)["recipes"]
    assert trained["scheduling-table2-mnist"]["method"] == {
        "lr": 0.005, "batch_size": 10, "epochs": 1, "finetune_epochs": 10, "unfreeze": [0, 100, 200],
    }  # fmt: skip
    assert "leaderboard" not in trained
    assert "scheduling-table2-mnist" in call("methods", "vanilla").stdout
    assert json.loads(call("methods", "privacypfedc", "--json").stdout)["recipes"].keys() >= {"pfedc-table1-mnist"}
    shown = call("methods", "cd2pfed").stdout
    assert re.search(r"momentum +0\.0 +0\.9 ", shown), "the paper's beside the default"
    assert re.search(r"batch_size +10 +128, 4 ", shown)
    assert "its recipes" not in call("methods", "fedavg").stdout
    assert "…" not in shown + call("methods", "fedbsd").stdout
    assert "FedRep" in call("methods").stdout
    assert call("methods").stdout.count("…") == 0
    assert "digits" in json.loads(call("data", "list", "--json").stdout)
    shown = json.loads(call("data", "show", "--clients", "5", "-o", tmp_path / "p.png", "--json").stdout)
    assert (shown["clients"], shown["classes_per_client"][0]) == (5, 2)
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_import_is_quick() -> None:
    code = "import sys, perfed; assert 'torch' not in sys.modules; perfed.run; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


def folders(place: Path) -> Path:
    source = np.random.default_rng(0)
    for client in ("north", "south", "west"):
        for label, light in (("dark", 60), ("pale", 190)):
            (place / client / label).mkdir(parents=True)
            for number in range(10):
                noise = source.integers(-40, 40, (8, 8))
                Image.fromarray((light + noise).astype(np.uint8)).save(place / client / label / f"{number}.png")
    return place


def test_own_folders_and_own_module_in_python(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("flat", nn.Flatten())
    model.add_module("hidden", nn.Linear(64, 8))
    model.add_module("relu", nn.ReLU())
    model.add_module("fc", nn.Linear(8, 2))
    before = model.hidden.weight.detach().clone()
    result = perfed.run(data=str(folders(tmp_path / "f")), net=perfed.wrap(model, head="fc"), method="fedrep", rounds=5)
    assert "accuracy, mean over clients" in result.table()
    assert (result.config.split, result.config.clients) == ("domain", 3)
    assert torch.equal(model.hidden.weight, before)
    test = result.made().federation.client(1).test
    scores = result.model(client=1)(test.x)
    assert float((scores.argmax(1) == test.y).double().mean()) == result.accuracy[1]
    assert torch.allclose(result.predict(1, test.x), scores.softmax(1), atol=1e-6)
    kept = result.save(tmp_path / "kept")
    with pytest.raises(ConfigError, match="given as an object"):
        perfed.load(kept).model(1)
    (kept / "result.json").unlink()
    torch.nn.init.zeros_(model.hidden.weight)
    again = perfed.resume(kept, net=perfed.wrap(model, head="fc"))
    assert again.state_sha256 == result.state_sha256
    temporary = result.directory
    del result
    assert not temporary.exists()


def test_objects_in_python_are_checked(tmp_path: Path) -> None:
    federation = perfed.federate("digits", clients=5)
    with pytest.raises(ConfigError, match="already divided"):
        perfed.run(data=federation, split="iid")
    with pytest.raises(ConfigError, match=r"perfed\.wrap"):
        perfed.run(net=nn.Linear(3, 4))  # type: ignore[arg-type]
    with pytest.raises(perfed.PerfedError, match="10"):
        perfed.run(data=federation, net=perfed.wrap(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), head="1"))
    with pytest.raises(StoreError, match="no run"):
        perfed.resume(tmp_path)
    shutil.rmtree(tmp_path)
