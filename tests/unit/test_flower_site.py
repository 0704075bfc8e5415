"""A site keeps what was committed until the server says otherwise; its keys and requests are what they claim."""

from __future__ import annotations

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
import torch
from cryptography import x509
from flwr.app import ConfigRecord, RecordDict
from typer.testing import CliRunner

from perfed import config as configuration
from perfed.cli import app
from perfed.core.plan import Round
from perfed.core.server import Peer, Server
from perfed.core.state import State
from perfed.data import Federation
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.engine.store import fingerprint
from perfed.engine.worker import Kept, Reply, Task
from perfed.errors import ConfigError, QuorumError, StoreError, UpdateError
from perfed.flower import answering, deployment, keys, messages
from perfed.flower.coordinate import Terms, words_of
from perfed.flower.messages import Job, write_task
from perfed.flower.resident import Resident, ask
from perfed.flower.rollcall import Present
from perfed.flower.site import Site
from perfed.flower.sitestore import Model, SiteStore
from tests.conftest import small_net
from tests.e2e.cluster import pictures


def state(value: float) -> State:
    return {"head": torch.full((3,), value)}


def test_a_state_is_pending_until_the_server_has_committed_its_round(tmp_path: Path) -> None:
    with closing(SiteStore(tmp_path)) as store:
        one = store.pend("r", 1, state(1))
        store.settle("r", Kept())  # the server knows of no round yet
        assert store.state("r", 1, one)["head"][0] == 1  # scored before the commit
        store.settle("r", Kept(one, 1, one))
        two = store.pend("r", 2, state(2))
        again = store.pend("r", 2, state(2))
        assert two == again == fingerprint(state(2))
        store.settle("r", Kept(one, 1, one))  # round 2 was not committed: it is repeated from round 1
        assert store.state("r", 1, one)["head"][0] == 1
        store.settle("r", Kept(two, 2, two))
        assert store.state("r", 2, two)["head"][0] == 2
        with pytest.raises(StoreError, match="does not have"):
            store.state("r", 1, one)


def test_a_server_that_knows_another_history_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    with closing(SiteStore(tmp_path)) as store:
        one = store.pend("r", 1, state(1))
        store.settle("r", Kept(one, 1, one))
        for other in (Kept(), Kept("0" * 64, 1, "0" * 64), Kept(one, 5, one)):
            with pytest.raises(StoreError, match="committed round 1"):
                store.settle("r", other)
        assert store.state("r", 1, one)["head"][0] == 1
        store.settle("another run", Kept())


def test_what_was_kept_survives_the_process_and_damage_is_noticed(tmp_path: Path) -> None:
    with closing(SiteStore(tmp_path)) as store:
        one = store.pend("r", 1, state(1))
        store.keep(Model("r", 0, 1, 1, "rounds = 1", ("a", "b"), 3, state(5)))
    with closing(SiteStore(tmp_path)) as store:
        model, private = store.model("r")
        assert (model.classes, model.received["head"][0], private["head"][0]) == (("a", "b"), 5, 1)
    with closing(sqlite3.connect(tmp_path / "site.db")) as database, database:
        blob = bytearray(database.execute("select blob from states").fetchone()[0])
        blob[-1] ^= 1
        database.execute("update states set blob = ?", (bytes(blob),))
    with closing(SiteStore(tmp_path)) as store, pytest.raises(StoreError, match="damaged"):
        store.state("r", 1, one)


class Keeping:
    """Clients that keep their private states, in this process."""

    apart = True

    def __init__(self, simulation_worker: object, lost: tuple[int, ...] = ()) -> None:
        self.worker, self.held, self.lost = simulation_worker, {}, lost

    def run(self, tasks, done=None):  # type: ignore[no-untyped-def]
        replies = []
        for task in tasks:
            private = self.held.get((task.client, task.since), {})
            if task.client in self.lost:
                replies.append(Reply(task.client, {}, {}, {"error": "gone"}))
                continue
            reply = self.worker.run(type(task)(**{**task.__dict__, "private": private}))
            if task.op == "train":
                self.held[task.client, task.t] = reply.private
                kept = fingerprint(reply.private)
                reply = Reply(reply.client, reply.state, {}, reply.scalars, kept)
            replies.append(reply)
        return replies

    def close(self) -> None:
        pass


def run(digits: Federation, **others: object) -> Simulation:
    from perfed.core import registry

    method = registry.make("fedrep", lr=0.05)
    return Simulation(digits, small_net(digits), method, Settings(rounds=3, fraction=0.5), **others)  # type: ignore[arg-type]


def test_the_sum_of_a_run_is_made_from_the_sums_of_states_kept_elsewhere(digits: Federation, tmp_path: Path) -> None:
    plain = run(digits).run()
    away = run(digits, directory=tmp_path, executor=Keeping, sites=True).run()
    assert plain is not None
    assert away is not None
    assert away.state_sha256 == plain.state_sha256
    assert away.metrics == plain.metrics
    with closing(sqlite3.connect(tmp_path / "run.db")) as database:
        rows = database.execute("select blob from states where kind = 'client'").fetchall()
    assert rows
    assert all(row[0] is None for row in rows)  # no private state is with the server


def test_too_few_updates_stop_the_run_before_the_round_counts(digits: Federation, tmp_path: Path) -> None:
    losing = run(digits, directory=tmp_path, quorum=0.9, executor=lambda w: Keeping(w, (0, 1, 2, 3)), sites=True)
    with pytest.raises(QuorumError, match="below the quorum"):
        losing.run()
    again = run(digits, directory=tmp_path, quorum=0.9, executor=Keeping, sites=True).run()
    plain = run(digits).run()
    assert again is not None
    assert plain is not None
    assert again.state_sha256 == plain.state_sha256


# Directories, keys, words


@pytest.fixture
def site(tmp_path: Path) -> Site:
    pictures(tmp_path / "data", each=40)
    deployment.init_site(tmp_path / "anna", "anna", str(tmp_path / "data" / "anna"), "host:8100")
    return Site.load(tmp_path / "anna")


def test_a_sites_secrets_are_its_own_and_its_request_proves_the_key(site: Site, tmp_path: Path) -> None:
    assert stat.S_IMODE((site.directory / "key").stat().st_mode) == 0o600
    name, public = keys.read_request(site.directory / "anna.csr")
    assert (name, public.split()[0]) == ("anna", b"ecdsa-sha2-nistp384")
    request = x509.load_pem_x509_csr((site.directory / "anna.csr").read_bytes())
    forged = bytearray(request.public_bytes(keys.serialization.Encoding.DER))
    forged[-5] ^= 1
    broken = x509.load_der_x509_csr(bytes(forged)).public_bytes(keys.serialization.Encoding.PEM)
    (tmp_path / "forged.csr").write_bytes(broken)
    with pytest.raises(ConfigError, match="not signed"):
        keys.read_request(tmp_path / "forged.csr")
    with pytest.raises(ConfigError, match="no request"):
        keys.read_request(site.directory / "site.toml")
    with pytest.raises(ConfigError, match="not empty"):
        deployment.init_site(site.directory, "anna", "digits", "host:8100")


def test_the_server_certificate_is_of_the_authority_and_names_the_host(tmp_path: Path) -> None:
    deployment.init_coordinator(tmp_path / "c", "hub.example", 8100)
    authority = x509.load_pem_x509_certificate((tmp_path / "c" / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((tmp_path / "c" / "server.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "hub.example" in names.get_values_for_type(x509.DNSName)
    for secret in ("ca.key", "server.key"):
        assert stat.S_IMODE((tmp_path / "c" / secret).stat().st_mode) == 0o600
    command, variables = deployment.Coordinator.load(tmp_path / "c").start_command()
    assert "--enable-supernode-auth" in command
    assert "--insecure" not in command
    assert variables["FLWR_TELEMETRY_ENABLED"] == "0"


def test_a_site_without_the_coordinators_certificate_does_not_start(site: Site) -> None:
    with pytest.raises(ConfigError, match=r"ca\.crt is missing"):
        deployment.site_command(site.directory)


@pytest.mark.parametrize("address", ["host", ":1", "host:0", "host:99999", "host:x"])
def test_addresses_that_are_none_are_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no address"):
        deployment.init_site(tmp_path / "s", "anna", "digits", address)


def test_a_site_tells_the_outline_of_its_data_and_its_run_may_not_name_other_data(site: Site) -> None:
    config = configuration.resolve({"net": {"name": "mlp"}, "data": "folder:/etc"})
    told = site.present(config)
    assert (told.classes, told.shape, told.train + told.test) == (("0", "1", "2"), (1, 8, 8), 37)
    assert Present.read(told.write(), "anna") == told
    worker = site.worker(config.toml(), 1, 3, ("0", "1", "2", "9"))
    assert worker.federation.size(1) == told.train
    assert worker.federation.num_clients == 3


def test_an_outline_that_cannot_be_is_refused(site: Site) -> None:
    good = dict(site.present(configuration.resolve({"net": "mlp"})).write()["present"])  # type: ignore[arg-type]
    for key, value in {
        "train": 0,
        "test": -1,
        "classes": [],
        "shape": [1, 8],
        "sha": "x",
        "name": 5,
        "kind": 3,
    }.items():
        with pytest.raises(UpdateError):
            Present.read(RecordDict({"present": ConfigRecord({**good, key: value})}), "anna")


def test_the_resident_answers_and_is_done_without_when_it_is_gone(site: Site) -> None:
    question = RecordDict({"call": ConfigRecord({"protocol": 1, "words": 'net = "mlp"'})})
    assert ask(str(site.directory), "query", question) is None
    resident = Resident(site.directory)
    try:
        answer = ask(str(site.directory), "query", question)
        assert answer is not None
        assert Present.read(answer, "anna").name == "anna"
        assert stat.S_IMODE(resident.path.stat().st_mode) == 0o600
    finally:
        resident.close()
    assert ask(str(site.directory), "query", question) is None


def test_words_come_back_from_flowers_flat_configuration() -> None:
    flat = {"method": "fedrep", "method.lr": 0.1, "net.name": "mlp", "net.hidden": "[16, 12]", "rounds": 3, "out": ""}
    assert words_of(flat) == {
        "method": {"name": "fedrep", "lr": 0.1},
        "net": {"name": "mlp", "hidden": [16, 12]},
        "rounds": 3,
    }


@pytest.mark.parametrize("terms", [{"quorum": 1.5}, {"deadline": 0}, {"sites": -1}, {"wait": -3}])
def test_terms_that_cannot_be_are_refused(terms: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="cannot be"):
        Terms(**terms)  # type: ignore[arg-type]


def test_a_key_that_sites_share_is_the_sites_own_and_no_run_names_it(site: Site, tmp_path: Path) -> None:
    """Privacy-pFedC at a site: without the file it does not take part, and says what to do."""
    pytest.importorskip("tenseal")
    given = {"name": "privacypfedc", "keys": str(tmp_path / "elsewhere.ckks")}
    config = configuration.resolve({"method": given, "net": {"name": "mlp", "hidden": [8]}})
    with pytest.raises(ConfigError, match="anna has none"):
        site.present(config)
    done = CliRunner().invoke(app, ["site", "key", str(site.directory / "clients.ckks")])
    assert done.exit_code == 0, done.output
    assert stat.S_IMODE((site.directory / "clients.ckks").stat().st_mode) == 0o600
    assert site.present(config).name == "anna"
    worker = site.worker(config.toml(), 0, 3, ("0", "1", "2"))
    assert worker.method.keys == str(site.directory / "clients.ckks")  # type: ignore[attr-defined]
    assert not (tmp_path / "elsewhere.ckks").exists()
    again = CliRunner().invoke(app, ["site", "key", str(site.directory / "clients.ckks")])
    assert again.exit_code == 2
    other = configuration.resolve({"method": "fedrep", "net": "mlp"})
    assert site.at_home(other) is other


@pytest.mark.parametrize("method", ["privacypfedc", "pfedc"])
def test_scores_leave_a_site_without_labels_where_the_method_says_so(site: Site, method: str) -> None:
    pytest.importorskip("tenseal")
    CliRunner().invoke(app, ["site", "key", str(site.directory / "clients.ckks")])
    config = configuration.resolve({"method": method, "net": {"name": "mlp", "hidden": [8]}, "val_fraction": 0.2})
    classes = ("0", "1", "2", "9")
    worker = site.worker(config.toml(), 0, 3, classes)
    server = Server(worker.method.start(worker.net, 3, worker.plan.initial), worker.plan, 3)
    received = worker.method.send(server, Peer(0), Round(1, config.rounds))
    task = Task("evaluate", 0, 1, 0, received, {}, {"seen": True, "adapt": True}, Kept())
    told = site.answer(task, Job(config.toml(), "r", classes, 3)).state
    whole = worker.run(task).state
    assert told.keys() == whole.keys()
    for name in ("before/test", "before/val", "after/test", "after/val"):
        matrix, full = told[f"{name}/confusion"], whole[f"{name}/confusion"]
        assert full.sum(dim=1).count_nonzero() > 1
        if method == "pfedc":
            assert torch.equal(matrix, full)
            continue
        right, samples = int(full.diagonal().sum()), int(full.sum())
        assert matrix[0].tolist() == [right, samples - right, 0, 0]
        assert not matrix[1:].any()
        assert torch.equal(told[f"{name}/loss"], whole[f"{name}/loss"])


def test_a_private_state_that_is_sent_to_a_site_is_refused_undecoded(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration.resolve({"method": "fedrep", "net": {"name": "mlp", "hidden": [8]}})
    content = write_task(Task("train", 0, 1, 0, {}, state(1)), Job(config.toml(), "r", ("0", "1", "2"), 3))
    assert "private" in content
    read: list[object] = []
    monkeypatch.setattr(messages, "read_state", lambda *given: read.append(given) or {})
    reply = answering.answer("train", content, str(site.directory), None)
    assert "keeps its own" in str(reply["reply"]["error"])  # type: ignore[index]
    assert read == []
