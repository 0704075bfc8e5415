"""The two directories of a deployment, the coordinator's and a site's, and the Flower commands that serve them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from perfed import config as configuration
from perfed import rundir
from perfed.errors import ConfigError
from perfed.flower import keys
from perfed.flower.coordinate import TERMS, Terms
from perfed.flower.site import FILE as SITE_FILE
from perfed.flower.site import Site

CONNECTION = "perfed"
EVERYWHERE = ("", "0.0.0.0", "::", "[::]")
"""addresses that stand for all of a machine's"""
COORDINATOR_FILE = "coordinator.toml"
DATABASE = "superlink.db"
OFFLINE = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}
"""What Flower's processes are told: to install nothing, to tell nobody, and to look for work often."""
PAUSE = 5.0
"""seconds before a node that ended is started again"""


def program(name: str) -> str:
    """Flower's program of this name, first beside this Python."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise ConfigError(f"The program {name} is not installed.", "pip install 'perfed[flower]'")
    return found


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes; their files go to `home`, not to the user's."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**OFFLINE, **os.environ, "FLWR_HOME": str(home), "PATH": path}  # Flower starts its programs by name


def _new(directory: Path) -> Path:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is a file or not empty.", "Give a new directory.")
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    return directory.absolute()


def keep_private() -> None:
    """What this process and those that it starts write from here on is their owner's alone, Flower's files too."""
    os.umask(0o077)


def _own(*paths: Path) -> None:
    """Take from others what was made readable to them before."""
    for path in paths:
        try:
            if path.exists():
                path.chmod(0o700 if path.is_dir() else 0o600)
        except OSError as error:
            raise ConfigError(f"{path} cannot be kept from others: {error}.", "Its owner must start this.") from None


# A site


def init_site(
    directory: Path, name: str, data: str, coordinator: str, data_dir: str | None = None, *, insecure: bool = False
) -> list[Path]:
    """Make a site's directory: its configuration, its key and the request for the coordinator."""
    keys.checked_name(name)
    _address(coordinator)
    source = configuration.resolve({"data": data}).data  # makes paths absolute, refuses nonsense
    place = _new(directory)
    words: dict[str, Any] = {"name": name, "coordinator": coordinator}
    words |= {"data_dir": str(Path(data_dir).absolute())} if data_dir else {}
    words |= {"insecure": True} if insecure else {}
    rundir.write(place / SITE_FILE, tomli_w.dumps(words | {"data": source}).encode())
    if not insecure:
        keys.make_site_key(place, name)
    return sorted(place.iterdir())


def site_command(directory: Path, port: int = 0) -> tuple[list[str], dict[str, str]]:
    """Flower's command for a site's node, and its environment."""
    place, site = directory.absolute(), Site.load(directory.absolute())
    _own(place, place / "flower")
    command = [program("flower-supernode"), "--superlink", site.coordinator]
    if site.insecure:
        command.append("--insecure")
    else:
        for needed in ("ca.crt", "key"):
            if not (place / needed).is_file():
                raise ConfigError(f"{place / needed} is missing.", "ca.crt comes from the coordinator's directory.")
        command += ["--root-certificates", str(place / "ca.crt"), "--auth-supernode-private-key", str(place / "key")]
    command += ["--host", "127.0.0.1", "--port", str(port or free_port())]
    command += ["--node-config", f'site="{place}"']
    return command, environment(place / "flower")


def serve_site(directory: Path, port: int = 0) -> int:
    """Run a site's node, and beside it the process that answers for it, until this is stopped.

    A node that ends is started again: one that was killed is refused until the SuperLink has noticed that it is gone.
    """
    from perfed.flower import answering  # noqa: F401  loads what answers need, before the first comes
    from perfed.flower.resident import Resident

    keep_private()
    command, variables = site_command(directory, port)
    resident = Resident(directory.absolute())
    stopped = threading.Event()
    node: list[subprocess.Popen[bytes]] = []

    def stop(number: int, _: object) -> None:
        stopped.set()
        if node:
            node[-1].send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        while not stopped.is_set():
            node.append(subprocess.Popen(command, env=variables))
            code = node[-1].wait()
            if not stopped.is_set():
                print(f"The node ended ({code}); it is started again in {PAUSE:g} s.", file=sys.stderr, flush=True)
                stopped.wait(PAUSE)
        return 0
    finally:
        resident.close()


# The coordinator


@dataclass(frozen=True)
class Coordinator:
    """A coordinator's directory as `perfed coordinator init` made it."""

    directory: Path
    host: str
    port: int
    bind: str
    insecure: bool = False

    @classmethod
    def load(cls, directory: Path) -> Coordinator:
        """The coordinator in a directory."""
        words = configuration.read(directory / COORDINATOR_FILE)
        try:
            return cls(directory.absolute(), **words)
        except TypeError as error:
            raise ConfigError(f"{directory / COORDINATOR_FILE} is not understood: {error}.", "Make it anew.") from None

    @property
    def home(self) -> Path:
        """Where Flower's own files go."""
        return self.directory / "flower"

    def start_command(self) -> tuple[list[str], dict[str, str]]:
        """Flower's command for the SuperLink."""
        place = self.directory
        _own(place, self.home, *place.glob(f"{DATABASE}*"))
        command = [program("flower-superlink"), "--host", self.bind, "--port", str(self.port)]
        command += ["--database", str(place / DATABASE), "--disable-runtime-dependency-installation"]
        if self.insecure:
            command.append("--insecure")
        else:
            for needed in ("ca.crt", "server.crt", "server.key"):
                if not (place / needed).is_file():
                    raise ConfigError(
                        f"{place / needed} is missing.", "perfed coordinator init makes it, in a new place."
                    )
            command += ["--ssl-ca-certfile", str(place / "ca.crt"), "--ssl-certfile", str(place / "server.crt")]
            command += ["--ssl-keyfile", str(place / "server.key"), "--enable-supernode-auth"]
        return command, environment(self.home)

    def notice(self) -> str:
        """Who can reach the coordinator and what they can do there, in a line."""
        where = "all addresses of this machine" if self.bind in EVERYWHERE else self.bind
        return (
            f"It listens at {where}, port {self.port}. Nodes and control share the port, and control asks for no"
            " password: whoever reaches it can submit runs. Let only the sites' addresses through."
        )

    def add(self, request: Path) -> str:
        """Admit the site of a request; the SuperLink must be running."""
        name, public = keys.read_request(request)
        if self.insecure:
            raise ConfigError("This coordinator knows no keys: it was made with --insecure.", "Start the sites.")
        self.reached()
        known = self.directory / "sites"
        known.mkdir(mode=0o700, exist_ok=True)
        path = known / f"{name}.pub"
        if path.exists() and path.read_bytes() != public:
            raise ConfigError(f"A site called {name!r} has another key.", "Choose another name, or remove its file.")
        path.write_bytes(public)
        self._flwr("supernode", "register", str(path), CONNECTION, "--name", name)
        return name

    def app(self, words: Mapping[str, Any], terms: Terms, out: Path) -> Path:
        """Write the Flower app of a run: two components, and the run's words."""
        flat: dict[str, Any] = {}
        for key, value in {**words, **{name: getattr(terms, name) for name in TERMS}, "out": str(out)}.items():
            entries = {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
            flat |= {k: str(v) if isinstance(v, list) else v for k, v in entries.items()}
        place = self.directory / "app"
        place.mkdir(mode=0o700, exist_ok=True)
        rundir.write(place / "pyproject.toml", tomli_w.dumps(_project(flat)).encode())
        return place

    def run(self, words: Mapping[str, Any], terms: Terms, out: Path) -> None:
        """Submit a run and follow it to its end; the same words again continue it."""
        self.reached()
        self._flwr("run", str(self.app(words, terms, out)), CONNECTION, "--stream", shown=True)

    def reached(self, seconds: float = 60.0) -> None:
        """Wait until the SuperLink answers; it takes some seconds to start."""
        ends = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection((self.host, self.port), 5).close()
                return
            except OSError as error:
                if time.monotonic() > ends:
                    raise ConfigError(
                        f"Nobody answers at {self.host}:{self.port}: {error}.", "Is perfed coordinator start running?"
                    ) from None
                time.sleep(0.5)

    def _flwr(self, *words: str, shown: bool = False) -> None:
        told: dict[str, Any] = {"stdout": sys.stderr}
        if not shown:
            told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run([program("flwr"), *words], env=environment(self.home), text=True, check=False, **told)
        if done.returncode:
            why = " ".join((done.stdout or "").split())[-500:]
            raise ConfigError(f"flwr {words[0]} failed. {why}", "Is perfed coordinator start running?")


def init_coordinator(
    directory: Path, host: str, port: int, bind: str | None = None, *, insecure: bool = False
) -> list[Path]:
    """Make a coordinator's directory: authority, certificates, Flower's connection.

    It listens at every address of the machine, without TLS and keys only at loopback, unless `bind` says otherwise.
    """
    bind = bind or ("127.0.0.1" if insecure else "0.0.0.0")
    _address(f"{host}:{port}")
    place = _new(directory)
    words: dict[str, Any] = {"host": host, "port": port, "bind": bind} | ({"insecure": True} if insecure else {})
    rundir.write(place / COORDINATOR_FILE, tomli_w.dumps(words).encode())
    connection: dict[str, Any] = {"address": f"{host}:{port}"}
    if insecure:
        connection["insecure"] = True
    else:
        keys.make_authority(place, list(dict.fromkeys([host, "localhost", "127.0.0.1"])))
        connection["root-certificates"] = str(place / "ca.crt")
    (place / "flower").mkdir(mode=0o700)
    file = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    rundir.write(place / "flower" / "config.toml", tomli_w.dumps(file).encode())
    return sorted(place.iterdir())


def _project(flat: dict[str, Any]) -> dict[str, Any]:
    components = {"serverapp": "perfed.flower.server_app:app", "clientapp": "perfed.flower.client_app:app"}
    return {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": "perfed-run",
            "version": "1.0.0",
            "description": "A run of perfed",
            "license": "Apache-2.0",
            "dependencies": ["flwr"],
        },
        "tool": {"flwr": {"app": {"publisher": "perfed", "components": components, "config": flat}}},
    }


def _address(text: str) -> None:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{text[:80]!r} is no address.", "Write HOST:PORT.")


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
