"""The directory of a run: which files it has, how they are written, and whether it may be written to."""

from __future__ import annotations

import fcntl
import json
import math
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from perfed.errors import ConfigError, StoreError

CONFIG = "config.toml"
RESULT = "result.json"
COMPARE = "compare.toml"
DATABASE = "run.db"
INITIAL = "initial.safetensors"
PARTITION = "partition.png"
COUNTS = "partition.json"
LOCK = "lock"
CURVES = "curves.png"


def is_run(directory: Path) -> bool:
    """Whether a run was begun here."""
    return (directory / CONFIG).is_file()


def is_finished(directory: Path) -> bool:
    """Whether a run was ended here."""
    return (directory / RESULT).is_file()


def is_comparison(directory: Path) -> bool:
    """Whether a comparison was begun here."""
    return (directory / COMPARE).is_file()


def require(directory: Path) -> None:
    """Refuse a place that is no run."""
    if not is_run(directory):
        raise StoreError(f"There is no run in {directory}.", f"Name a directory that has a {CONFIG}.")


def refuse_taken(directory: Path) -> None:
    """Refuse a place that a run or a comparison has."""
    if any((directory / name).exists() for name in (CONFIG, RESULT, COMPARE, DATABASE)):
        raise StoreError(
            f"{directory} already holds a run.",
            f"Continue it with 'perfed resume {directory}', or give another --out.",
        )


def committed(directory: Path) -> int:
    """The last round that is safe on disk."""
    return _number(directory, "select coalesce(max(t), 0) from rounds")


def refused(directory: Path, after: int, last: int) -> int:
    """How many updates were refused in the rounds behind `after`, up to the last one given."""
    count = "select coalesce(sum(json_array_length(record, '$.faults')), 0) from rounds where t > ? and t <= ?"
    return _number(directory, count, after, last)


def _number(directory: Path, question: str, *values: int) -> int:
    """What a run's database answers; 0 while there is none."""
    try:
        with closing(sqlite3.connect(f"file:{directory / DATABASE}?mode=ro", uri=True)) as database:
            return int(database.execute(question, values).fetchone()[0])
    except sqlite3.Error:
        return 0


def read_only(directory: Path) -> sqlite3.Connection:
    """The run's database, to look at while whoever runs it writes; also from a place that cannot be written."""
    path = (directory / DATABASE).absolute().as_uri()
    if not (directory / DATABASE).is_file():
        raise StoreError(f"{directory} has no {DATABASE}.", "No round was finished yet.")
    database = sqlite3.connect(f"{path}?mode=ro", uri=True, timeout=1, check_same_thread=False)
    try:
        database.execute("select count(*) from rounds").fetchone()
    except sqlite3.OperationalError:
        database.close()
        database = sqlite3.connect(f"{path}?mode=ro&immutable=1", uri=True, check_same_thread=False)
    return database


def records(directory: Path, after: int = 0) -> list[dict[str, Any]]:
    """The records of the rounds that are safe on disk, in order, from the one behind `after` on."""
    try:
        with closing(read_only(directory)) as database:
            rows = database.execute("select record from rounds where t > ? order by t", (max(0, after),)).fetchall()
        return [json.loads(row[0]) for row in rows]
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise StoreError(f"{directory / DATABASE} cannot be read: {error}.", "Restore it from a copy.") from None


def in_use(directory: Path) -> bool:
    """Whether a living process holds the run."""
    try:
        with (directory / LOCK).open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def claim(directory: Path, config: str) -> None:
    """Begin a run here by writing its configuration; refuse a place that another run has."""
    refuse_taken(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{directory} cannot be made: {error}.", "Give another --out.") from None
    try:
        write(directory / CONFIG, config.encode(), new=True)
    except FileExistsError:
        raise StoreError(f"{directory} was just taken by another run.", "Give another --out.") from None
    except OSError as error:
        raise StoreError(f"{directory} cannot be written: {error}.", "Give another --out.") from None


def hand_out(text: str, out: Path) -> Path:
    """Write a file where a person asked for it."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write(out, text.encode())
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}.", "Give another --out.") from None
    return out


def write(path: Path, content: bytes, *, new: bool = False) -> None:
    """Write a file so that it is there whole or not at all; with `new`, only where none is."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if new:
            os.link(temporary, path)
        else:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, value: Any) -> None:
    """Write plain values as JSON; what is not a number becomes null."""
    write(path, (json.dumps(finite(value), indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file, or say that it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read: {error}.", "Delete it and resume the run to make it again.") from None
    if not isinstance(found, dict):
        raise StoreError(f"{path} is not a result.", "Delete it and resume the run to make it again.")
    return found


def finite(value: Any) -> Any:
    """Plain values with None for what is not a number, as JSON has it."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
