"""What a site keeps for itself: its private state of every run, and the finished model to predict with.

A state is pending from when it was made until the server says that the round which made it was committed. The last
committed one stays until then, so that a round that is repeated begins where the first attempt began. Several states
can be pending: tasks come late, twice and out of order, and the server alone knows which answer it took.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import fields
from hashlib import sha256
from pathlib import Path

from perfed.core.state import State, from_bytes, to_bytes
from perfed.engine.store import fingerprint, guard
from perfed.engine.worker import Kept
from perfed.errors import StoreError
from perfed.flower.personal import Model

FILE = "site.db"
SCHEMA = """
create table if not exists states (run text, slot text, t integer, sha text, blob blob, primary key (run, slot));
create table if not exists personal (run text primary key, at integer, sha text, blob blob);
"""
COMMITTED, PENDING = "committed", "pending"
CURE = "Restore the site's directory from a copy, or begin a new run."


class SiteStore:
    """One SQLite file in the site's directory; what it says is on disk before it returns."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        _for_the_owner(self.path)
        with self._guard():
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=60)
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = full")
            self._db.executescript(SCHEMA)

    def settle(self, run: str, kept: Kept) -> None:
        """Take note of the last round of this site that the server has committed; what came before it is forgotten."""
        with self._transaction():
            held = self._rows(run)
            known, told = held.get(COMMITTED), (kept.round, kept.committed)
            if known != told and (known or kept.round):
                slot = next((slot for slot, which in held.items() if slot != COMMITTED and which == told), None)
                if slot is None or (known and known[0] > kept.round):
                    have = f"committed round {known[0]}" if known else "committed no round"
                    raise StoreError(
                        f"The server has committed round {kept.round} of this site, which {have} of run {run}.",
                        CURE,
                    )
                self._db.execute("delete from states where run = ? and slot = ?", (run, COMMITTED))
                self._db.execute("update states set slot = ? where run = ? and slot = ?", (COMMITTED, run, slot))
            old = (run, COMMITTED, kept.round)
            self._db.execute("delete from states where run = ? and slot <> ? and t <= ?", old)

    def _rows(self, run: str) -> dict[str, tuple[int, str]]:
        rows = self._db.execute("select slot, t, sha from states where run = ?", (run,)).fetchall()
        return {slot: (t, sha) for slot, t, sha in rows}

    def state(self, run: str, since: int, sha: str) -> State:
        """The private state after this site's round `since`, pending or committed; nothing before the first."""
        if not since:
            return {}
        with self._guard():
            row = self._db.execute(
                "select blob from states where run = ? and t = ? and sha = ? limit 1", (run, since, sha)
            ).fetchone()
            found = from_bytes(row[0])[0] if row else None
        if found is None or fingerprint(found) != sha:
            what = "does not have" if found is None else "has a damaged copy of"
            raise StoreError(
                f"This site {what} its private state of round {since} of run {run}.",
                CURE,
            )
        return found

    def pend(self, run: str, t: int, state: State) -> str:
        """Keep a state until it is known whether its round counts; returns its sum.

        Pending states of earlier rounds go: the server has ended those rounds before it asked for this one, and what
        it took of them it said with this task. Those of later rounds stay, as this task may have come late.
        """
        sha = fingerprint(state)
        with self._transaction():
            self._db.execute("delete from states where run = ? and slot <> ? and t < ?", (run, COMMITTED, t))
            row = (run, f"{PENDING}/{t}/{sha}", t, sha, to_bytes(state))
            self._db.execute("insert or replace into states values (?, ?, ?, ?, ?)", row)
        return sha

    def keep(self, model: Model) -> None:
        """Keep the finished model of a run."""
        facts = {field.name: getattr(model, field.name) for field in fields(model) if field.name != "state"}
        blob = to_bytes(model.state, facts)
        with self._transaction():
            self._db.execute(
                "insert or replace into personal values (?, unixepoch(), ?, ?)",
                (model.run, sha256(blob).hexdigest(), blob),
            )

    def models(self) -> list[str]:
        """The runs that left a model, the newest last."""
        with self._guard():
            return [row[0] for row in self._db.execute("select run from personal order by at, rowid")]

    def model(self, run: str) -> Model:
        """The finished model of a run."""
        with self._guard():
            row = self._db.execute("select sha, blob from personal where run = ?", (run,)).fetchone()
            if row is None:
                raise StoreError(f"This site has no model of run {run!r}.", f"It has: {', '.join(self.models())}.")
            if sha256(row[1]).hexdigest() != row[0]:
                raise StoreError(f"This site has a damaged copy of its model of run {run!r}.", CURE)
            state, facts = from_bytes(row[1])
            return Model(**facts | {key: tuple(facts[key]) for key in ("classes", "shape")}, state=state)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._guard():
            self._db.execute("begin immediate")
            try:
                yield
                self._db.execute("commit")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("rollback")
                raise

    def _guard(self) -> AbstractContextManager[None]:
        return guard(str(self.path), "Restore it from a copy.")


def _for_the_owner(path: Path) -> None:
    """Make a database its owner's alone, before anything is written to it; what SQLite puts beside it is made alike."""
    try:
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        for file in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
            with suppress(FileNotFoundError):
                file.chmod(0o600)
    except OSError as error:
        raise StoreError(f"{path} cannot be used: {error}.", "Give the directory to who runs the site.") from None
