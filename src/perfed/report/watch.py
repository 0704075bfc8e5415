"""A page that follows runs: served on this machine alone, told from the runs' files, nothing is written."""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from perfed.errors import ConfigError
from perfed.report.html import page
from perfed.report.live import Follower

LOOPBACK = "127.0.0.1"
PORT = 8400


def serve(directory: Path, port: int | None = None) -> Server:
    """A server for the runs below a directory; on a port that is free, unless one is named."""
    if not directory.is_dir():
        raise ConfigError(f"There is no directory {directory}.", "Name one that has runs, or will have them.")
    tries = [port] if port is not None else [*range(PORT, PORT + 20), 0]
    for one in tries:
        try:
            return Server(directory, one)
        except OSError as error:
            reason = error
    raise ConfigError(f"port = {port} cannot be used: {reason.strerror}.", "Give another --port.")


class Server(ThreadingHTTPServer):
    """Answers with the page and with where the runs stand."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, directory: Path, port: int) -> None:
        self.follower, self.looking = Follower(directory), threading.Lock()
        self.text = page("watch.html", ("watch.js",), connect="connect-src 'self'; ").encode()
        super().__init__((LOOPBACK, port), Handler)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names by which this machine calls itself; a page of another name may not read here."""
        return tuple(f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost"))


class Handler(BaseHTTPRequestHandler):
    """Two addresses, GET alone, and only for those who ask by this machine's own name."""

    server: Server
    server_version = "perfed"
    sys_version = ""

    def do_GET(self) -> None:
        """The page, or the state of the runs."""
        if self.headers.get("Host", "") not in self.server.hosts:
            return self._answer(HTTPStatus.FORBIDDEN, b"Ask by the address that perfed watch printed.", "text/plain")
        path = self.path.partition("?")[0]
        if path == "/":
            return self._answer(HTTPStatus.OK, self.server.text, "text/html; charset=utf-8")
        if path == "/state.json":
            with self.server.looking:
                state = json.dumps(self.server.follower.look(), allow_nan=False).encode("utf-8", "replace")
            return self._answer(HTTPStatus.OK, state, "application/json")
        return self._answer(HTTPStatus.NOT_FOUND, b"There is nothing here.", "text/plain")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody wants to read a line per second."""
