"""Fetch the published files of a data set, check them, and put them where `load` looks."""

from __future__ import annotations

import hashlib
import http.client
import os
import tarfile
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from perfed.errors import DataError, unknown

BLOCK = 1 << 18
TIMEOUT = 30.0


@dataclass(frozen=True)
class File:
    """One published file: its address, the checksum of the original, its place under the data folder."""

    url: str
    checksum: str  # MD5 (32 digits) or SHA-256 (64 digits)
    path: str
    unpack: str = ""  # the folder that the archive unpacks to

    @property
    def name(self) -> str:
        """The file's own name."""
        return Path(self.path).name


def _idx(base: str, folder: str, checksums: tuple[str, str, str, str]) -> tuple[File, ...]:
    files = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        File(f"{base}{f}-ubyte.gz", checksum, f"{folder}/raw/{f}-ubyte.gz")
        for f, checksum in zip(files, checksums, strict=True)
    )


_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"
CATALOGUE: dict[str, tuple[File, ...]] = {
    "mnist": _idx(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "MNIST",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "fashionmnist": _idx(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "FashionMNIST",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    "cifar10": (
        File(
            _TORONTO + "cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            "cifar-10-python.tar.gz",
            "cifar-10-batches-py",
        ),
    ),
    "cifar100": (
        File(
            _TORONTO + "cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            "cifar-100-python.tar.gz",
            "cifar-100-python",
        ),
    ),
    "usps": (
        File(_LIBSVM + "usps.bz2", "ec16c51db3855ca6c91edd34d0e9b197", "usps/usps.bz2"),
        File(_LIBSVM + "usps.t.bz2", "8ea070ee2aca1ac39742fdd1ef5ed118", "usps/usps.t.bz2"),
    ),
}


def get(name: str, data_dir: Path | str = "data", progress: bool = True) -> list[Path]:
    """Fetch a data set's files into data_dir; what is there and whole is not fetched again."""
    if name not in CATALOGUE:
        raise unknown("data set to fetch", name, CATALOGUE)
    base = Path(data_dir)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=not progress) as bar:
        return [_get(file, base, bar) for file in CATALOGUE[name]]


def checksum_of(path: Path, like: str) -> str:
    """The MD5 or SHA-256 of a file, whichever `like` is."""
    digest = hashlib.md5(usedforsecurity=False) if len(like) == 32 else hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _get(file: File, base: Path, bar: Progress) -> Path:
    place = base / file.path
    if not (place.exists() and checksum_of(place, file.checksum) == file.checksum):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _fetch(file, place, bar)
        except PermissionError as e:
            raise DataError(f"{place.parent} cannot be written to.", "Give another --data-dir.") from e
    if not file.unpack:
        return place
    _unpack(place, base)
    return base / file.unpack


def _fetch(file: File, place: Path, bar: Progress) -> None:
    """Stream into a temporary file beside the place, check it, and only then give it its name."""
    handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            _stream(file, place, out.fileno(), bar)
            os.fsync(out.fileno())
        if (got := checksum_of(Path(temporary), file.checksum)) != file.checksum:
            raise DataError(
                f"{file.url} is not the published file: its checksum is {got} instead of {file.checksum}.",
                _by_hand(file, place),
            )
        Path(temporary).chmod(0o644)
        Path(temporary).replace(place)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _stream(file: File, place: Path, out: int, bar: Progress) -> None:
    try:
        with urllib.request.urlopen(file.url, timeout=TIMEOUT) as answer:
            length = answer.headers.get("Content-Length")
            total = int(length) if length and length.isdigit() else None
            task = bar.add_task(file.name, total=total)
            done = 0
            while block := answer.read(BLOCK):
                os.write(out, block)
                done += len(block)
                bar.update(task, completed=done)
    except urllib.error.HTTPError as e:
        e.close()
        raise DataError(f"{file.url} answers {e.code} {e.reason}.", _by_hand(file, place)) from e
    except (OSError, http.client.HTTPException) as e:
        reason = getattr(e, "reason", None) or e
        raise DataError(f"{file.url} cannot be reached: {reason}.", _by_hand(file, place)) from e
    if total is not None and done != total:
        raise DataError(f"{file.url} broke off after {done} of {total} bytes.", _by_hand(file, place))


def _by_hand(file: File, place: Path) -> str:
    return f"Try again, or fetch {file.url} by hand and put it at {place}."


def _unpack(archive: Path, base: Path) -> None:
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(base, filter="data")
    except (tarfile.TarError, OSError, EOFError) as e:
        raise DataError(f"{archive} cannot be unpacked: {e}.", "Delete it and fetch it again.") from e
