"""Three sites as real processes over TLS: the bits of a run in one process, whoever is killed; strangers are refused.

`PERFED_FLOWER=all` tries six methods and ten kills of each kind at random moments; otherwise one method and one kill.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from perfed.flower.deployment import init_coordinator, site_command
from perfed.flower.site import Site
from tests.e2e.cluster import SITES, Cluster, cluster, end, in_process, words
from tests.e2e.kills import KINDS, TERMS, Kind, kill

FULL = os.environ.get("PERFED_FLOWER") == "all"
ALL = {"fedrep": {}, "fedavg": {}, "scaffold": {}, "fedfomo": {"M": 3}, "pfedc": {}, "privacypfedc": {}}
METHODS = ALL if FULL else {"fedrep": {}}
WAYS = ("bytes_up", "bytes_down")
KILLS = [(kind, seed) for kind in KINDS for seed in range(10)] if FULL else [("server", 0)]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("deployed")) as made:
        yield made


@pytest.mark.parametrize("method", METHODS)
def test_a_deployment_ends_with_the_bits_of_one_process(deployed: Cluster, method: str) -> None:
    """And every site has its personal model, with which it predicts when no server is there."""
    given = words(method, **METHODS[method])
    if method == "privacypfedc":
        deployed.share_key()
    expected = in_process(deployed, given)
    result = deployed.finish(deployed.place / f"run-{method}", given, TERMS)
    assert result.state_sha256 == expected.state_sha256
    assert result.faults == []
    assert result.metrics["local.mean"] == expected.metrics["local.mean"]
    assert [result.cost[key] for key in WAYS] == [expected.cost[key] for key in WAYS]
    assert expected.cost["bytes_scored"] == 0
    assert (result.cost["bytes_scored"] > 0) == (method != "fedfomo")  # whose models are all the sites' own
    images = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for number, name in enumerate(sorted(SITES)):
        found, classes = Site.load(deployed.place / name).predict(images)
        assert classes == ("0", "1", "2", "3", "4", "5", "6", "7")
        torch.testing.assert_close(found, expected.predict(number, images))


@pytest.mark.parametrize(("kind", "seed"), KILLS)
def test_whoever_is_killed_the_run_ends_with_the_same_bits(deployed: Cluster, kind: Kind, seed: int) -> None:
    """A site comes back within the deadline, the SuperLink or the ServerApp is started again: nothing is lost."""
    found = next(done for number in range(seed, 1000, 10) if (done := kill(deployed, kind, number)))
    assert found.ended
    assert found.same
    assert (found.faults, found.lost, found.without_model) == (0, 0, 0)


def test_strangers_are_refused(deployed: Cluster, tmp_path: Path) -> None:
    """No TLS, another authority, no key, a key that nobody registered: none gets a connection or is activated."""
    init_coordinator(tmp_path / "other", "127.0.0.1", deployed.port, "127.0.0.1")
    plain = deployed.init_site("no-certificate", "no-certificate")
    (plain / "site.toml").write_text("insecure = true\n" + (plain / "site.toml").read_text())
    deployed.init_site("wrong-authority", "wrong-authority", ca=tmp_path / "other" / "ca.crt")
    deployed.init_site("unregistered", "unregistered")
    deployed.until(lambda: deployed._log("link").count(b"Activated node") >= len(SITES), 300, "the sites themselves")
    before = len(deployed._log("link"))
    strangers = ["no-certificate", "wrong-authority", "unregistered"]
    keyless = start_without_key(deployed, "no-key")
    try:
        deployed.until(lambda: refused(deployed._log("link")[before:]), 300, "the refusal of a node without a key")
        end(keyless)
        assert b"Activated node" not in deployed._log("link")[before:]
        between = len(deployed._log("link"))
        for name in strangers:
            deployed.start_site(name)
        deployed.until(lambda: deployed._log("no-certificate").count(b"attempt failed") > 1, 300, "no certificate")
        deployed.until(lambda: b"CERTIFICATE_VERIFY_FAILED" in deployed._log("wrong-authority"), 300, "wrong authority")
        deployed.until(lambda: refused(deployed._log("link")[between:]), 300, "the refusal of an unregistered key")
    finally:
        end(keyless)
        for name in strangers:
            if name in deployed.processes:
                deployed.kill(name)
    told = deployed._log("link")[before:]
    assert b"Activated node" not in told
    assert b'activate-node HTTP/1.1" 200' not in told


def start_without_key(deployed: Cluster, name: str) -> subprocess.Popen[bytes]:
    """A node that trusts the right authority and shows no key at all."""
    deployed.init_site(name, name)
    command, environment = site_command(deployed.place / name)
    at = command.index("--auth-supernode-private-key")
    with (deployed.place / f"{name}.log").open("ab") as log:
        return subprocess.Popen([*command[:at], *command[at + 2 :]], stdout=log, stderr=log, env=environment)


def refused(told: bytes) -> bool:
    return any(b"/v1/fleet/" in line and line.rstrip()[-3:-2] == b"4" for line in told.splitlines())
