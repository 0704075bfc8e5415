"""Without TLS and keys only when somebody says --insecure, on both sides; real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perfed.flower.deployment import Coordinator
from perfed.result import Result
from tests.e2e.cluster import SITES, Cluster, in_process, words
from tests.e2e.kills import TERMS

FULL = os.environ.get("PERFED_FLOWER") == "all"


def perfed(*told: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "perfed.cli", *told], capture_output=True, text=True, check=False)


def test_without_the_flag_nothing_starts_insecurely(tmp_path: Path) -> None:
    data = tmp_path / "data" / "0"
    data.mkdir(parents=True)
    site, hub = str(tmp_path / "anna"), str(tmp_path / "hub")
    address = ["--coordinator", "127.0.0.1:8100"]
    assert perfed("site", "init", site, "--name", "anna", "--data", str(data.parent), *address).returncode == 0
    refused = perfed("site", "start", site)
    assert refused.returncode == 2
    assert "ca.crt is missing" in refused.stderr
    assert perfed("coordinator", "init", hub, "--host", "127.0.0.1").returncode == 0
    command, _ = Coordinator.load(Path(hub)).start_command()
    assert "--insecure" not in command
    assert {"--ssl-certfile", "--enable-supernode-auth"} <= set(command)
    (tmp_path / "hub" / "server.crt").unlink()
    refused = perfed("coordinator", "start", hub)
    assert refused.returncode == 2
    assert "server.crt is missing" in refused.stderr


@pytest.mark.skipif(not FULL, reason="a deployment without TLS: PERFED_FLOWER=all")
def test_with_the_flag_on_both_sides_a_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    made = Cluster(tmp_path, insecure=True)
    assert not list((tmp_path / "coordinator").glob("*.key"))
    assert made.coordinator.bind == "127.0.0.1"
    try:
        made.start()
        given = words("fedrep", rounds=1)
        result: Result = made.finish(tmp_path / "run", given, TERMS)
        assert result.state_sha256 == in_process(made, given).state_sha256
        for name in ("link", *SITES):
            assert b"Insecure: without TLS and keys" in made._log(name)
    finally:
        made.stop()
