"""The store: whole commits, damage found, memory bounded, one user at a time."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from perfed.core.state import State
from perfed.engine.store import FILE, Store
from perfed.errors import StoreError


def state(value: float, size: int = 4) -> State:
    return {"w": torch.full((size,), value), "n": torch.tensor(int(value))}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path, "print") as opened:
        yield opened


def test_nothing_is_visible_before_the_commit(tmp_path: Path) -> None:
    with Store(tmp_path, "print") as store:
        store.put_client(3, 1, state(1))
        store.put_server(1, state(2))
        assert store.client(3)[0] == 1, "the round itself sees what it staged"
    with Store(tmp_path, "print") as store:
        assert store.round == 0
        assert store.client(3) == (0, {})
        assert store.server() == {}
        store.put_client(3, 1, state(1))
        store.put_server(1, state(2))
        store.commit(1, {"a": 1})
    with Store(tmp_path, "print") as store:
        assert store.round == 1
        assert store.client(3)[0] == 1
        assert store.client(3)[1]["w"].tolist() == [1.0] * 4
        assert next(store.records())["a"] == 1


def test_a_failed_commit_leaves_the_round_before(store: Store) -> None:
    store.put_client(0, 1, state(1))
    store.commit(1, {})
    store.put_client(0, 2, state(5))
    with pytest.raises(StoreError):
        store.commit(1, {})  # round 1 is there already
    store.discard()
    assert store.client(0)[1]["n"].item() == 1


def test_the_hash_sees_every_client(store: Store) -> None:
    seen = {store.state_sha256()}
    for t, client in enumerate([0, 1, 0], start=1):
        store.put_client(client, t, state(t))
        store.commit(t, {})
        seen.add(store.state_sha256())
    assert len(seen) == 4


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    Store(tmp_path, "one").close()
    with pytest.raises(StoreError, match="another configuration"):
        Store(tmp_path, "two")


def test_a_directory_in_use_is_refused(store: Store) -> None:
    assert store.directory
    with pytest.raises(StoreError, match="in use"):
        Store(store.directory, "print")


def test_the_cache_stays_within_its_bytes(tmp_path: Path) -> None:
    with Store(tmp_path, "print", cache_bytes=10_000) as store:
        for t in range(1, 41):
            store.put_client(t, t, state(t, size=500))
            store.commit(t, {})
            assert store._cache.used <= 10_000
        for client in range(1, 41):
            assert store.client(client)[1]["n"].item() == client
            assert store._cache.used <= 10_000


def filled(directory: Path) -> Path:
    with Store(directory, "print") as store:
        for t in range(1, 4):
            for client in range(t, t + 3):
                store.put_client(client, t, state(10 * t + client, size=300))
            store.put_server(t, state(t, size=300))
            store.commit(t, {"cohort": [t]})
    return directory


def contents(store: Store) -> list[object]:
    """All that a run would read."""
    clients = [store.client(i) for i in range(8)]
    read = [(since, {k: v.tolist() for k, v in s.items()}) for since, s in clients]
    return [
        store.round,
        store.state_sha256(),
        read,
        {k: v.tolist() for k, v in store.server().items()},
        [*store.records()],
    ]


def test_changed_rows_are_refused(tmp_path: Path) -> None:
    """Whoever edits the file with SQLite itself is found out by the chain of sums."""
    changes = [
        "delete from states where id = 4",
        "update states set since = 1 where id = 4",
        "update states set blob = (select blob from states where id = 1) where id = 4",
        "update states set id = 9 where id = 4",
        "delete from rounds where t = 3",
        "delete from rounds where t = 2",
        "update rounds set record = replace(record, 'cohort', 'c0hort')",
        "insert into states select 'client', 77, since, sha, blob from states where id = 1",
    ]
    good = filled(tmp_path / "good")
    for number, change in enumerate(changes):
        bad = tmp_path / str(number)
        shutil.copytree(good, bad)
        db = sqlite3.connect(bad / FILE)
        db.execute(change)
        db.commit()
        db.close()
        with pytest.raises(StoreError), Store(bad, "print") as store:
            contents(store)


@pytest.mark.parametrize("seed", range(10))
def test_mutated_files_are_refused_or_read_as_they_were(seed: int, tmp_path: Path) -> None:
    good = filled(tmp_path / "good")
    with Store(good, "print") as store:
        expected = contents(store)
    original = (good / FILE).read_bytes()
    chance, bad, refused = Random(seed), tmp_path / "bad", 0
    for _ in range(60):
        data = bytearray(original)
        match chance.randrange(4):
            case 0:
                for _ in range(chance.choice([1, 1, 8, 200])):
                    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            case 1:
                del data[chance.randrange(len(data)) :]
            case 2:
                at = chance.randrange(len(data))
                data[at : at + chance.randrange(1, 3000)] = chance.randbytes(chance.randrange(1, 3000))
            case _:
                a, b = (16384 * chance.randrange(len(data) // 16384) for _ in range(2))
                data[a : a + 16384], data[b : b + 16384] = data[b : b + 16384], data[a : a + 16384]
        shutil.rmtree(bad, ignore_errors=True)
        bad.mkdir()
        (bad / FILE).write_bytes(data)
        try:
            with Store(bad, "print") as store:
                if store.round:  # an emptied file is a new run, which begins at the beginning
                    assert contents(store) == expected
        except StoreError:
            refused += 1
    assert refused > 20


def test_ciphertexts_are_guarded_against_damage_but_not_part_of_the_hash(tmp_path: Path) -> None:
    hashes = set()
    for run, noise in enumerate((1.0, 2.0)):
        with Store(tmp_path / str(run), "print") as store:
            store.put_server(1, state(3) | {"sealed/sum": torch.full((5000,), noise)})
            store.commit(1, {})
            hashes.add(store.state_sha256())
    assert len(hashes) == 1
    with Store(tmp_path / "other", "print") as store:
        store.put_server(1, state(4) | {"sealed/sum": torch.full((5000,), 1.0)})
        store.commit(1, {})
        assert store.state_sha256() not in hashes
    path = tmp_path / "0" / FILE
    data = path.read_bytes()
    spot = data.rindex(torch.full((100,), 1.0).numpy().tobytes())
    path.write_bytes(data[:spot] + b"\x07" + data[spot + 1 :])
    with Store(tmp_path / "0", "print") as store, pytest.raises(StoreError, match="damaged"):
        store.server()


def test_a_client_can_be_forgotten_before_the_commit_wherever_its_state_waits(tmp_path: Path) -> None:
    """In memory or on disk: it stays as the last round left it, and nobody else loses anything."""

    def state(value: float) -> State:
        return {"w": torch.full((100,), value)}

    with Store(tmp_path, "f", cache_bytes=1000) as store:
        for client in range(8):
            store.put_client(client, 1, state(client))
        store.commit(1, {})
        for client in range(8):  # two fit in memory: the first ones are on disk by now
            store.put_client(client, 2, state(10.0 + client))
        assert store.client(0)[1]["w"][0] == 10
        store.forget_client(0)
        store.forget_client(7)
        store.commit(2, {})
        seen = {client: (store.client(client)[0], float(store.client(client)[1]["w"][0])) for client in range(8)}
    want = {client: (2, 10.0 + client) for client in range(1, 7)} | {0: (1, 0.0), 7: (1, 7.0)}
    assert seen == want
    with Store(tmp_path, "f") as store:
        assert {
            client: (store.client(client)[0], float(store.client(client)[1]["w"][0])) for client in range(8)
        } == want
