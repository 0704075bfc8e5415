"""A run on disk: the server's state, the clients' private states and every round's record, one commit per round.

Everything lies in one SQLite file. A round becomes visible in a single transaction or not at all. Records form a chain
of SHA-256 sums that names every state, so a damaged or exchanged file is refused and never silently used.
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from perfed.core.state import State, digest, from_bytes, to_bytes, unsealed
from perfed.engine.worker import Kept
from perfed.errors import PerfedError, StoreError

FILE = "run.db"
SCHEMA = """
create table if not exists states (kind text, id integer, since integer, sha text, blob blob, primary key (kind, id));
create table if not exists rounds (t integer primary key, record text, chain text);
create temp table waiting (kind text, id integer, since integer, sha text, blob blob, primary key (kind, id));
"""
LOCK_TRIES = 5
NEVER: tuple[int, State] = (0, {})


class Store:
    """The states and records of one run. With no directory it lives in memory."""

    def __init__(self, directory: Path | None, fingerprint: str, cache_bytes: int = 256 << 20) -> None:
        self.directory = directory
        self._lock = _lock(directory) if directory else None
        self._pending: dict[tuple[str, int], tuple[int, State]] = {}
        self._elsewhere: dict[int, str] = {}
        self._waiting = 0
        self._spilt: dict[tuple[str, int], str] = {}
        """sums of those states of this round that wait in a table, as there is no room for them in memory"""
        self._cache = _Cache(cache_bytes)
        with ExitStack() as undo:
            undo.callback(self.unlock)
            with self._guard():
                self._db = sqlite3.connect(directory / FILE if directory else ":memory:", isolation_level=None)
                undo.callback(self._db.close)
                self._open()
                self._chain = self._verify(fingerprint)
            undo.pop_all()

    def _open(self) -> None:
        if not self._db.execute("select count(*) from sqlite_master").fetchone()[0]:
            self._db.execute("pragma page_size = 16384")
        elif self._db.execute("pragma quick_check").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("its pages do not fit together")
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = full")
        self._db.executescript(SCHEMA)

    # Reading

    @property
    def round(self) -> int:
        """The last committed round; 0 before the first."""
        with self._guard():
            return int(self._db.execute("select coalesce(max(t), 0) from rounds").fetchone()[0])

    def client(self, client: int) -> tuple[int, State]:
        """The last round a client took part in, and what it kept; (0, nothing) if it never did."""
        return self._get("client", client) or NEVER

    def kept(self, client: int) -> Kept:
        """The sums of a private state that the client itself keeps: as it is now, and as it was committed."""
        with self._guard():
            row = self._db.execute(
                "select since, sha from states where kind = 'client' and id = ?", (client,)
            ).fetchone()
        committed = Kept(row[1], row[0], row[1]) if row else Kept()
        return replace(committed, sha=self._elsewhere.get(client, committed.sha))

    def slot(self, client: int) -> State:
        """What the server remembers about a client."""
        return (self._get("slot", client) or NEVER)[1]

    def slots(self) -> list[int]:
        """The clients about which the server remembers something."""
        with self._guard():
            return [row[0] for row in self._db.execute("select id from states where kind = 'slot' order by id")]

    def server(self) -> State:
        """The server's state after the last committed round."""
        found = self._get("server", 0)
        return found[1] if found else {}

    def records(self) -> Iterator[dict[str, Any]]:
        """Every committed round's record, in order."""
        with self._guard():
            rows = self._db.execute("select record from rounds where t > 0 order by t").fetchall()
        return (json.loads(row[0]) for row in rows)

    def state_sha256(self) -> str:
        """One sum over the server's state, its memory of clients and all private states; ciphertexts apart."""
        with self._guard():
            rows = self._db.execute("select kind, id, since, sha from states order by kind, id").fetchall()
        plain = [(kind, id, since, sha.rpartition("/")[2]) for kind, id, since, sha in rows]
        return sha256(json.dumps(plain).encode()).hexdigest()

    @property
    def room(self) -> int:
        """Bytes of private states that are held in memory at a time."""
        return self._cache.limit

    # Writing

    def put_client(self, client: int, since: int, state: State, sha: str | None = None) -> None:
        """Keep a client's private state until the round is committed; only its sum, if the client has the state."""
        self._pending["client", client] = (since, state)
        if sha is not None:
            self._elsewhere[client] = sha
        self._waiting += _bytes(state)
        if self._waiting > self.room:
            self._spill()

    def put_slot(self, client: int, t: int, state: State) -> None:
        """Keep the server's memory of a client until the round is committed."""
        self._pending["slot", client] = (t, state)

    def put_server(self, t: int, state: State) -> None:
        """Keep the server's new state until the round is committed."""
        self._pending["server", 0] = (t, state)

    def discard(self) -> None:
        """Forget what was not committed."""
        self._db.execute("delete from waiting")
        self._forget()

    def forget_client(self, client: int) -> None:
        """Forget what a client would have kept of this round: it stays as it was before."""
        key = "client", client
        self._pending.pop(key, None)
        if self._spilt.pop(key, None):
            self._db.execute("delete from waiting where kind = 'client' and id = ?", (client,))
        self._elsewhere.pop(client, None)

    def _forget(self) -> None:
        for held in (self._pending, self._elsewhere, self._spilt):
            held.clear()
        self._waiting = 0

    def commit(self, t: int, record: dict[str, Any]) -> None:
        """Make a round visible: all its states and its record together."""
        sums = self._spilt | {key: self._sum(key) for key in self._pending}
        named = {f"{kind}/{id}": sums[kind, id] for kind, id in sorted(sums)}
        text = json.dumps(record | {"t": t, "states": named}, sort_keys=True)
        chain = _link(self._chain, text)
        with self._guard():
            self._db.execute("begin immediate")
            try:
                self._db.execute("insert or replace into states select * from waiting")
                self._write("states", sums)
                self._db.execute("insert into rounds values (?, ?, ?)", (t, text, chain))
                self._db.execute("delete from waiting")
                self._db.execute("commit")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("rollback")
                raise
        self._chain = chain
        for key in self._spilt:
            self._cache.drop(key)
        for key, held in self._pending.items():
            self._cache.put(key, held)
        self._forget()

    def _sum(self, key: tuple[str, int]) -> str:
        kind, id = key
        return self._elsewhere[id] if kind == "client" and id in self._elsewhere else fingerprint(self._pending[key][1])

    def _write(self, table: str, sums: Mapping[tuple[str, int], str]) -> None:
        def rows() -> Iterator[tuple[str, int, int, str, bytes | None]]:
            for (kind, id), (since, state) in self._pending.items():
                away = kind == "client" and id in self._elsewhere
                yield kind, id, since, sums[kind, id], None if away else to_bytes(state)

        self._db.executemany(f"insert or replace into {table} values (?, ?, ?, ?, ?)", rows())

    def _spill(self) -> None:
        """Let what waits for the commit wait on disk."""
        sums = {key: self._sum(key) for key in self._pending}
        with self._guard():
            self._write("waiting", sums)
        self._spilt |= sums
        self._pending.clear()
        self._waiting = 0

    def unlock(self) -> None:
        """Let go of the directory: a forked worker must not keep it when the run itself is killed."""
        if self._lock:
            self._lock.close()

    def close(self) -> None:
        """Close the file and let others use it."""
        self._db.close()
        self.unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _get(self, kind: str, id: int) -> tuple[int, State] | None:
        spilt = (kind, id) in self._spilt
        held = self._pending.get((kind, id)) or (None if spilt else self._cache.get((kind, id)))
        if held:
            return held
        table = "waiting" if spilt else "states"
        with self._guard():
            row = self._db.execute(
                f"select since, sha, blob from {table} where kind = ? and id = ?",
                (kind, id),
            ).fetchone()
        if row is None:
            return None
        since, sha, blob = row
        if blob is None:  # the client has it
            return since, {}
        state, _ = from_bytes(blob)
        if fingerprint(state) != sha:
            raise StoreError(f"The {kind} state {id} in {self._where} is damaged.", _CURE)
        if not spilt:
            self._cache.put((kind, id), (since, state))
        return since, state

    def _verify(self, fingerprint: str) -> str:
        """Check the chain of records from its start, and that the states on file are the last ones it names."""
        first = self._db.execute("select record, chain from rounds where t = 0").fetchone()
        if first is None:
            if self._db.execute("select count(*) from rounds").fetchone()[0]:
                raise StoreError(f"{self._where} has lost its beginning.", _CURE)
            self._db.execute("insert into rounds values (0, ?, ?)", (fingerprint, _link("", fingerprint)))
            return _link("", fingerprint)
        if first[0] != fingerprint:
            raise StoreError(
                f"{self._where} was made by another configuration, network or partition.",
                "Resume with the same ones, or choose another directory.",
            )
        chain, named, last = "", {}, -1
        for t, text, stored in self._db.execute("select t, record, chain from rounds order by t"):
            chain = _link(chain, text)
            if chain != stored or t != last + 1:
                raise StoreError(f"The record of round {t} in {self._where} is damaged.", _CURE)
            last = t
            if t:
                for key, sha in json.loads(text)["states"].items():
                    named[key] = (t, sha)
        rows = self._db.execute("select kind, id, since, sha from states")
        if {f"{kind}/{id}": (since, sha) for kind, id, since, sha in rows} != named:
            raise StoreError(f"The states in {self._where} are not those its records name.", _CURE)
        return chain

    @property
    def _where(self) -> str:
        return str(self.directory / FILE) if self.directory else "the run in memory"

    def _guard(self) -> AbstractContextManager[None]:
        return guard(self._where, _CURE)


@contextmanager
def guard(where: str, cure: str) -> Iterator[None]:
    """Whatever a damaged database makes go wrong inside, told as one."""
    try:
        yield
    except PerfedError:
        raise
    except (sqlite3.Error, ValueError, KeyError, TypeError, OverflowError) as error:
        raise StoreError(f"{where} cannot be used: {error}.", cure) from error


_CURE = "Restore the directory from a copy, or start the run anew in another directory."


class _Cache:
    """The most recently used states, up to a number of bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._held: OrderedDict[tuple[str, int], tuple[int, State]] = OrderedDict()

    def get(self, key: tuple[str, int]) -> tuple[int, State] | None:
        if key in self._held:
            self._held.move_to_end(key)
        return self._held.get(key)

    def drop(self, key: tuple[str, int]) -> None:
        if key in self._held:
            self.used -= _bytes(self._held.pop(key)[1])

    def put(self, key: tuple[str, int], value: tuple[int, State]) -> None:
        self.drop(key)
        self._held[key] = value
        self.used += _bytes(value[1])
        while self.used > self.limit and len(self._held) > 1:
            self.used -= _bytes(self._held.popitem(last=False)[1][1])


def _bytes(state: State) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def fingerprint(state: State) -> str:
    """The digest of a state; if some of it is sealed, followed by the digest of the rest, which equal runs share."""
    rest = unsealed(state)
    return digest(state) if len(rest) == len(state) else f"{digest(state)}/{digest(rest)}"


def _link(chain: str, text: str) -> str:
    return sha256(f"{chain}\n{text}".encode()).hexdigest()


def _lock(directory: Path) -> TextIO:
    directory.mkdir(parents=True, exist_ok=True)
    handle = (directory / "lock").open("w")
    for left in range(LOCK_TRIES - 1, -1, -1):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError:  # someone who looks whether the run is alive holds it for a moment
            if left:
                time.sleep(0.05)
    handle.close()
    raise StoreError(f"{directory} is in use by another process.", "Wait for it, or choose another directory.")
