"""perfed watch in a browser while a run goes on, is killed and resumed, and while the server itself comes and goes."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w

from perfed import rundir
from tests.browser import made_up
from tests.browser.chromium import Browser

PERFED = [sys.executable, "-m", "perfed.cli"]
RUN = ["run", "--method", "fedrep", "--net", "mlp", "--set", "net.hidden=[16]", "--clients", "6", "--rounds", "100000"]


class Programs:
    """Programs that are ended with the test."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        program = subprocess.Popen([*PERFED, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.started.append(program)
        return program

    def watch(self, place: Path, port: int = 0) -> tuple[subprocess.Popen[str], str]:
        program = self.start("watch", str(place), "--port", str(port))
        assert program.stdout
        found = re.search(r"http://127\.0\.0\.1:\d+/", program.stdout.readline())
        assert found
        return program, found[0]


@pytest.fixture
def programs() -> Iterator[Programs]:
    made = Programs()
    yield made
    for program in made.started:
        program.kill()
        program.wait()
        if program.stdout:
            program.stdout.close()


def test_a_run_is_followed_through_a_kill_and_a_restart_of_either_side(
    browser: Browser, programs: Programs, tmp_path: Path
) -> None:
    server, address = programs.watch(tmp_path)
    browser.open(address)
    browser.until(lambda: browser.text("h1") == "No run here yet")
    browser.run("window.same = 1")
    run = programs.start(*RUN, "--eval-every", "2", "--out", str(tmp_path / "one"))

    def at() -> int:
        return int(browser.run("document.querySelector('.round')?.textContent ?? 0"))

    def status() -> str:
        return str(browser.run("document.querySelector('.status')?.textContent ?? ''"))

    first = browser.until(at)
    browser.until(lambda: status() == "running" and at() > first + 2)
    browser.until(lambda: browser.count("#accuracy g.series") == browser.count("#sorted g.series") == 1)
    assert "running" in browser.text("h1")
    assert browser.findings() == []

    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    browser.until(lambda: status() == "stopped")
    kept = at()
    assert f"up to round {kept} is kept" in browser.text(".cure")
    assert f"perfed resume {tmp_path / 'one'}" in browser.text(".cure")

    server.send_signal(signal.SIGINT)
    assert server.wait(20) == 0
    browser.until(lambda: not browser.run("document.querySelector('#link').hidden"))
    programs.watch(tmp_path, int(address.rsplit(":")[-1].strip("/")))
    browser.until(lambda: browser.run("document.querySelector('#link').hidden"))
    assert (status(), at()) == ("stopped", kept)

    programs.start("resume", str(tmp_path / "one"))
    browser.until(lambda: status() == "running" and at() > kept + 1)
    assert browser.run("document.querySelector('.cure').hidden")
    assert browser.run("window.same") == 1  # the page was never loaded again
    browser.screen(390)
    assert browser.sideways() <= 0


def test_refused_updates_and_hostile_names_are_shown_as_text(
    browser: Browser, programs: Programs, tmp_path: Path
) -> None:
    bad = "<script>alert(1)</script><img src=x onerror='window.hacked = 1'>"
    reasons = [
        f"Client 2 ({bad}) sent other tensors than declared.",
        "z" * 10_000,
        "Client 3 (клиент 顧客) failed: \u202e",
    ]
    faults = [{"t": t, "client": 1 + t, "reason": reason} for t, reason in enumerate(reasons, start=1)]
    methods = {"bad": bad, "long": "x" * 10_000, "far": "клиент 顧客 \u202ename"}
    for place, name in methods.items():
        run = made_up.run(tmp_path / f"{place}{bad.replace('/', '')}"[:200], "fedrep", 3, 6, 0, 0.5, faults=faults)
        words = tomllib.loads((run / rundir.CONFIG).read_text())
        words["method"] = {"name": name}
        (run / rundir.CONFIG).write_text(tomli_w.dumps(words))
    _, address = programs.watch(tmp_path)
    for width in (1300, 320):
        browser.open(address, width=width)
        browser.until(lambda: browser.count(".run") == 3)
        assert browser.count("#fault-rows tr") == 9
        assert browser.sideways() <= 0
    rows = browser.run("[...document.querySelectorAll('#fault-rows tr')].map((e) => e.textContent)")
    named = [row for row in rows if f"12Client 2 ({bad}) sent other tensors" in row]  # round 1, client 2
    assert len(named) == 3
    assert len([row for row in rows if "Client 3 (клиент 顧客) failed" in row]) == 3
    assert max(map(len, rows)) < 500
    names = browser.run("[...document.querySelectorAll('.run h3')].map((e) => e.textContent)")
    assert any(name.startswith("<script>alert(1)</script><img") for name in names)
    assert any(name.startswith("клиент 顧客") for name in names)
    assert "3 updates refused" in browser.text(".run .facts")
    assert not browser.run("document.querySelector('#faults').hidden")
    assert browser.count("img") == 0
    assert browser.run("window.hacked === undefined")
    assert browser.log() == []
    assert browser.findings() == []


def test_only_this_machine_may_ask_and_only_by_its_own_name(programs: Programs, tmp_path: Path) -> None:
    _, address = programs.watch(tmp_path)
    port = int(address.rsplit(":")[-1].strip("/"))

    def ask(path: str, host: str | None = None, method: str = "GET") -> int:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        link.request(method, path, headers={"Host": host} if host else {})
        answer = link.getresponse()
        answer.read()
        link.close()
        return answer.status

    assert ask("/") == ask("/state.json") == ask("/", f"localhost:{port}") == 200
    assert ask("/state.json", "evil.example") == ask("/state.json", f"evil.example:{port}") == 403
    assert ask("/../../etc/passwd") == ask("/one/config.toml") == 404
    assert ask("/", method="POST") == 501
