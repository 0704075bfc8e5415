"""Fetching: checked, atomic, and plain about what went wrong."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import socket
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from perfed.data import download, get
from perfed.data.download import CATALOGUE, File
from perfed.errors import DataError, UnknownNameError


class Handler(http.server.SimpleHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path == "/cut.bin":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"x" * 10)
            return
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    root = tmp_path / "www"
    root.mkdir()
    Handler.asked = []
    handler = functools.partial(Handler, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as s:
        thread = threading.Thread(target=s.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{s.server_port}", root
        s.shutdown()
        thread.join()


def md5(b: bytes) -> str:
    return hashlib.md5(b).hexdigest()


def left(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("progress", [False, True])
def test_a_file_arrives_whole_and_is_not_fetched_twice(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: bool
) -> None:
    url, root = server
    body = bytes(range(256)) * 3000
    (root / "a.bin").write_bytes(body)
    monkeypatch.setitem(CATALOGUE, "toy", (File(f"{url}/a.bin", md5(body), "toy/a.bin"),))
    assert get("toy", tmp_path / "data", progress) == [tmp_path / "data/toy/a.bin"]
    assert (tmp_path / "data/toy/a.bin").read_bytes() == body
    get("toy", tmp_path / "data", progress)
    assert Handler.asked == ["/a.bin"]
    (tmp_path / "data/toy/a.bin").write_bytes(b"damaged")
    get("toy", tmp_path / "data", progress)
    assert Handler.asked == ["/a.bin", "/a.bin"]
    assert (tmp_path / "data/toy/a.bin").read_bytes() == body


def test_sha256_is_understood(server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, root = server
    (root / "a.bin").write_bytes(b"abc")
    entry = File(f"{url}/a.bin", hashlib.sha256(b"abc").hexdigest(), "a.bin")
    monkeypatch.setitem(CATALOGUE, "toy", (entry,))
    assert get("toy", tmp_path / "data", False)[0].read_bytes() == b"abc"


@pytest.mark.parametrize(
    ("name", "why"),
    [("wrong.bin", "checksum is"), ("cut.bin", "10 of 1000 bytes|cannot be reached"), ("gone.bin", "answers 404")],
)
def test_a_bad_answer_leaves_nothing_behind(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    url, root = server
    (root / "wrong.bin").write_bytes(b"somebody else's file")
    monkeypatch.setitem(CATALOGUE, "toy", (File(f"{url}/{name}", md5(b"x" * 1000), "toy/a.bin"),))
    with pytest.raises(DataError, match=why) as e:
        get("toy", tmp_path / "data", False)
    assert f"{url}/{name} by hand and put it at {tmp_path}/data/toy/a.bin" in str(e.value)
    assert left(tmp_path / "data") == []


def test_no_network_says_what_to_fetch_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    entry = File(f"http://127.0.0.1:{port}/a.bin", md5(b""), "a.bin")
    monkeypatch.setitem(CATALOGUE, "toy", (entry,))
    with pytest.raises(DataError, match=r"cannot be reached: .*refused.*fetch http://127.*by hand"):
        get("toy", tmp_path, False)
    assert left(tmp_path) == []


def archive(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, body in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


def test_archives_are_unpacked_and_may_not_escape(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, root = server
    good, bad = archive({"batches/one": b"1"}), archive({"../escaped": b"1"})
    (root / "good.tar.gz").write_bytes(good)
    (root / "bad.tar.gz").write_bytes(bad)
    entries = {
        k: File(f"{url}/{k}.tar.gz", md5(b), f"{k}.tar.gz", "batches") for k, b in (("good", good), ("bad", bad))
    }
    monkeypatch.setitem(CATALOGUE, "good", (entries["good"],))
    monkeypatch.setitem(CATALOGUE, "bad", (entries["bad"],))
    assert get("good", tmp_path / "data", False) == [tmp_path / "data/batches"]
    assert (tmp_path / "data/batches/one").read_bytes() == b"1"
    with pytest.raises(DataError, match="cannot be unpacked"):
        get("bad", tmp_path / "data", False)
    assert not (tmp_path / "escaped").exists()


def test_the_catalogue_is_complete() -> None:
    assert set(CATALOGUE) == {"mnist", "fashionmnist", "cifar10", "cifar100", "usps"}
    for file in (f for files in CATALOGUE.values() for f in files):
        assert len(file.checksum) in (32, 64)
        assert file.url.startswith("http")
    with pytest.raises(UnknownNameError, match="'mnist'"):
        get("minst")


def test_checksum_of_reads_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "BLOCK", 7)
    (tmp_path / "a").write_bytes(b"0123456789" * 5)
    assert download.checksum_of(tmp_path / "a", "0" * 32) == md5(b"0123456789" * 5)
