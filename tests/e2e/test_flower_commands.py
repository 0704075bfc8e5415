"""`perfed run --engine flower` from the shell: the bits of one process, also when it is stopped and resumed.

`PERFED_FLOWER=all` also kills it without a word, and runs it on a Ray cluster that is already there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import perfed
from perfed import rundir
from tests.e2e.cluster import descendants
from tests.e2e.namespace import in_a_namespace

FULL = os.environ.get("PERFED_FLOWER") == "all"
WORDS = {"net": {"name": "mlp", "hidden": [16]}, "clients": 4, "split": "iid", "seed": 1}
FLAGS = ["--net", "mlp", "--set", "net.hidden=[16]", "--clients", "4", "--split", "iid", "--seed", "1"]
ENGINE = ["--engine", "flower", "--workers", "1"]
CLI = [sys.executable, "-m", "perfed.cli"]


def expected(rounds: int) -> str:
    return perfed.run("fedrep", rounds=rounds, **WORDS).state_sha256  # type: ignore[arg-type]


def gone(processes: list[int]) -> bool:
    """Whether none of them lives; who is dead and not yet buried does not."""
    alive = []
    for pid in processes:
        try:
            state = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        alive += [pid] if state not in "ZX" else []
    return not alive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL] if FULL else [signal.SIGINT])
def test_a_run_on_ray_that_is_stopped_resumes_to_the_same_bits(number: signal.Signals, tmp_path: Path) -> None:
    out, rounds = tmp_path / "run", 40
    words = ["run", "--method", "fedrep", "--rounds", str(rounds), *FLAGS, *ENGINE, "--out", str(out)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(in_a_namespace(*CLI, *words), stdout=log, stderr=log, start_new_session=True)
    ends = time.monotonic() + 300
    while not rundir.committed(out):
        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
        assert time.monotonic() < ends
        time.sleep(0.05)
    started = descendants(process.pid)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        os.kill(process.pid, number)
    code = process.wait(120)
    told = (tmp_path / "log").read_text()
    assert code == (130 if number == signal.SIGINT else -number), told[-3000:]
    assert "Traceback" not in told
    assert 1 <= rundir.committed(out) < rounds
    while not gone(started):
        assert time.monotonic() < ends, "Ray outlived the run"
        time.sleep(0.5)
    done = subprocess.run(
        in_a_namespace(*CLI, "resume", str(out), "--json"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["state_sha256"] == expected(rounds)


CLUSTER = """
ray start --head --node-ip-address 127.0.0.1 --port 6399 --num-cpus 2 --include-dashboard=false >&2 || exit 3
RAY_ADDRESS=127.0.0.1:6399 "$@"
code=$?
ray stop >&2  # which also forgets, for whoever starts Ray here, that there was a cluster
exit $code
"""


@pytest.mark.skipif(not FULL, reason="a Ray cluster that is already there: PERFED_FLOWER=all")
def test_a_ray_cluster_that_is_there_is_used(tmp_path: Path) -> None:
    words = ["run", "--method", "fedrep", "--rounds", "2", *FLAGS, *ENGINE, "--out", str(tmp_path / "run"), "--json"]
    command = in_a_namespace("sh", "-c", CLUSTER, "sh", *CLI, *words, processes=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["state_sha256"] == expected(2)
