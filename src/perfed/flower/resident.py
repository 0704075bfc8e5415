"""A site's resident process: answers messages over a local socket, one after another, with everything loaded.

The socket lies in the site's directory and is its owner's alone. What goes over it are a kind and a content of a
Flower message, and back a content, each as a length and bytes.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.app import RecordDict

SOCKET = "resident.sock"
LENGTH = struct.Struct("<Q")
LONGEST = 4 << 30
WAIT = 3600.0
"""seconds that an answer may take, unless the message says how long anybody waits for it"""
PATIENCE = 60.0
"""seconds that a question may stop in the middle"""


def ask(site: str, kind: str, content: RecordDict, seconds: float = WAIT) -> RecordDict | None:
    """The resident's answer; None if it is not there, ends before it has answered, or takes longer than that."""
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
    from flwr.proto.recorddict_pb2 import RecordDict as Proto

    try:
        with socket.socket(socket.AF_UNIX) as link, _beside(site) as path:
            link.settimeout(seconds)
            link.connect(path)
            _put(link, kind.encode())
            _put(link, recorddict_to_proto(content).SerializeToString())
            return recorddict_from_proto(Proto.FromString(_get(link)))
    except (OSError, EOFError):
        return None


class Resident:
    """Serves a site's socket in a thread of this process."""

    def __init__(self, site: Path) -> None:
        self.site, self.path = str(site), site / SOCKET
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            with _beside(self.site) as path:
                self._listener.bind(path)
        finally:
            os.umask(before)
        self._listener.listen()
        self._closed = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                link, _ = self._listener.accept()
            except OSError:
                if not self._closed.wait(1.0):  # too many open files, say: that passes
                    traceback.print_exc()
                continue
            with link:
                try:
                    link.settimeout(PATIENCE)
                    self._answer(link)
                except (OSError, EOFError):  # whoever asked is gone
                    continue
                except Exception:  # one bad question costs its own answer
                    traceback.print_exc()

    def _answer(self, link: socket.socket) -> None:
        from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
        from flwr.proto.recorddict_pb2 import RecordDict as Proto

        from perfed.flower.answering import answer

        kind, content = _get(link).decode(), recorddict_from_proto(Proto.FromString(_get(link)))
        try:
            found = answer(kind, content, self.site, None)
        except Exception:  # the app's process then does it again, and tells Flower
            traceback.print_exc()
            return
        _put(link, recorddict_to_proto(found).SerializeToString())

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        self._listener.close()
        self.path.unlink(missing_ok=True)


class _beside:  # noqa: N801
    """The socket's path, short enough for the system however deep the directory lies."""

    def __init__(self, site: str) -> None:
        self._site = site

    def __enter__(self) -> str:
        self._folder = os.open(self._site, os.O_RDONLY | os.O_DIRECTORY)
        return f"/proc/self/fd/{self._folder}/{SOCKET}"

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)


def _put(link: socket.socket, data: bytes) -> None:
    link.sendall(LENGTH.pack(len(data)))
    link.sendall(data)


def _get(link: socket.socket) -> bytes:
    (size,) = LENGTH.unpack(_exactly(link, LENGTH.size))
    if size > LONGEST:
        raise EOFError
    return _exactly(link, size)


def _exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = link.recv(min(1 << 20, size - len(data)))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
