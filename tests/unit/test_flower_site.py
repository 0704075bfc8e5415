"""What a site keeps, tells and refuses; its keys and requests are what they claim."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cryptography import x509
from flwr.app import ConfigRecord, RecordDict
from typer.testing import CliRunner

from perfed import config as configuration
from perfed.cli import app
from perfed.core.method import Method, probabilities
from perfed.core.plan import Round
from perfed.core.server import Peer, Server
from perfed.engine.executors import one_thread
from perfed.engine.worker import Kept, Task
from perfed.errors import ConfigError, StoreError, UpdateError
from perfed.flower import answering, deployment, keys, messages
from perfed.flower import resident as residents
from perfed.flower import site as sites
from perfed.flower.answering import answer
from perfed.flower.coordinate import Terms, words_of
from perfed.flower.messages import PROTOCOL, Job, read_reply, write_task
from perfed.flower.resident import Resident, ask
from perfed.flower.rollcall import Present
from perfed.flower.site import Site
from perfed.flower.sitestore import SiteStore
from perfed.privacy import ckks
from tests.contract.rows import ROWS
from tests.e2e.cluster import pictures

STATE = {"head": torch.ones(3)}


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


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_a_site_keeps_is_its_owners_alone(site: Site) -> None:
    before = os.umask(0)
    try:
        with closing(SiteStore(site.directory)) as store:
            store.pend("r", 1, STATE)
            assert {path.name: mode(path) for path in site.directory.glob("site.db*")} == {
                "site.db": 0o600,
                "site.db-shm": 0o600,
                "site.db-wal": 0o600,
            }
        (site.directory / "site.db").chmod(0o644)  # as it was made before
        SiteStore(site.directory).close()
        assert mode(site.directory / "site.db") == 0o600
    finally:
        os.umask(before)
    assert mode(site.directory) == 0o700


def test_what_the_coordinator_keeps_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes its database itself, in a process that gives nothing away."""
    before = os.umask(0)
    try:
        deployment.init_coordinator(tmp_path / "c", "hub.example", 8100)
        assert (mode(tmp_path / "c"), mode(tmp_path / "c" / "flower")) == (0o700, 0o700)
        (tmp_path / "c" / "superlink.db").touch()
        (tmp_path / "c").chmod(0o755)
        started: list[tuple[list[str], int]] = []

        def execve(_: str, command: list[str], __: object) -> None:
            os.umask(mask := os.umask(0))
            started.append((command, mask))

        monkeypatch.setattr(os, "execve", execve)
        done = CliRunner().invoke(app, ["coordinator", "start", str(tmp_path / "c")])
        assert done.exit_code == 0, done.output
        assert (mode(tmp_path / "c"), mode(tmp_path / "c" / "superlink.db")) == (0o700, 0o600)
        assert started[0][1] == 0o077
        assert "all addresses of this machine, port 8100" in done.output
        assert "whoever reaches it can submit runs" in done.output
    finally:
        os.umask(before)


def test_a_site_is_started_in_a_process_that_gives_nothing_away(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.directory / "ca.crt").touch()
    masks: list[int] = []

    def started(*_: object, **__: object) -> None:
        os.umask(mask := os.umask(0))
        masks.append(mask)
        raise InterruptedError

    before = os.umask(0o022)
    try:
        monkeypatch.setattr(deployment.subprocess, "Popen", started)
        monkeypatch.setattr(deployment.signal, "signal", lambda *_: None)
        with pytest.raises(InterruptedError):
            deployment.serve_site(site.directory)
        assert masks == [0o077]
    finally:
        os.umask(before)


def test_one_request_that_is_refused_does_not_keep_the_others_out(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.init_coordinator(tmp_path / "c", "hub.example", 8100)
    deployment.init_site(tmp_path / "berta", "berta", "digits", "host:8100")
    registered: list[str] = []
    monkeypatch.setattr(deployment.Coordinator, "reached", lambda *_: None)
    monkeypatch.setattr(deployment.Coordinator, "_flwr", lambda _, *words: registered.append(words[-1]))
    good = [str(site.directory / "anna.csr"), str(tmp_path / "berta" / "berta.csr")]
    done = CliRunner().invoke(
        app, ["coordinator", "add", str(tmp_path / "c"), str(site.directory / "site.toml"), *good]
    )
    assert registered == ["anna", "berta"]
    assert "admitted: anna" in done.output
    assert "admitted: berta" in done.output
    assert done.exit_code == 2
    assert "1 of 3" in " ".join(done.output.split())


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


# Tasks


WORDS = {"method": {"name": "fedrep", "lr": 0.05}, "net": {"name": "mlp", "hidden": [8]}, "rounds": 3}


def job_of(words: dict[str, object], run: str = "r") -> Job:
    return Job(configuration.resolve(words).toml(), run, ("0", "1", "2"), 2)


def task_of(site: Site, job: Job, t: int, since: int = 0, op: str = "train", sha: str = "") -> Task:
    """What a server with the method's first state asks of the site; `sha` is of the state that it has committed."""
    worker = site.worker(job.words, 0, job.clients, job.classes)
    server = Server(worker.method.start(worker.plan.net, 2, worker.plan.initial), worker.plan, 2)
    received = worker.method.send(server, Peer(0, since, learns=op == "train"), Round(t, worker.rounds))
    return Task(op, 0, t, since, received, {}, {}, Kept(sha, since, sha))  # type: ignore[arg-type]


def test_a_task_that_comes_late_does_not_cost_the_site_its_newer_state(site: Site) -> None:
    job = job_of(WORDS)
    one = site.answer(task_of(site, job, 1), job).kept
    assert one
    late, newer = (task_of(site, job, t, 1, sha=one) for t in (2, 3))
    three = site.answer(newer, job).kept
    assert site.answer(newer, job).kept == three  # asked twice
    assert site.answer(late, job).kept
    assert three
    found = site.answer(task_of(site, job, 3, 3, "evaluate", three), job)
    assert found.error is None
    assert "before/test/confusion" in found.state
    with pytest.raises(StoreError, match="committed round 3"):
        site.answer(late, job)


@pytest.mark.parametrize("op", ["new", "external"])
def test_a_site_tells_nothing_of_single_images(op: str, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of({**WORDS, "method": "fedavg"})
    task = task_of(site, job, 1, op=op)
    with pytest.raises(ConfigError, match="asked of a site"):
        site.answer(task, job)
    told = answer("evaluate", write_task(task, job), str(site.directory), None)
    assert "asked of a site" in str(told["reply"]["error"])  # type: ignore[index, call-overload]
    assert not told["state"]


def test_no_file_name_leaves_a_site_and_its_log_has_all(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of({**WORDS, "method": "fedavg"})
    message = write_task(task_of(site, job, 1), job)
    message["task"]["client"] = 1  # type: ignore[index, call-overload]
    question = RecordDict({"call": ConfigRecord({"protocol": PROTOCOL, "words": job.words})})
    (tmp_path / "data" / "anna" / "0" / "jane doe, 1970.png").write_bytes(b"no image")

    asked_of = Task("train", 1, 1, 0, {}, {}, {}, Kept())

    def told() -> list[str]:
        sites._worker.cache_clear()
        asked = answer("query", question, str(site.directory), None)["present"]["reason"]  # type: ignore[index, call-overload]
        reply = read_reply(answer("train", message, str(site.directory), None), asked_of, 3)
        return [str(asked), str(reply.error)]

    for spoil in (
        lambda: None,  # an image that is none
        lambda: shutil.rmtree(tmp_path / "data"),
        lambda: (site.directory / "site.toml").write_text("nonsense = 1"),
        lambda: monkeypatch.setattr(Site, "load", fail),
    ):
        spoil()
        for text in told():
            assert "log" in text
            for secret in ("jane", "doe", "anna", str(tmp_path), ".toml", "/"):
                assert secret not in text
        assert str(tmp_path) in capsys.readouterr().err


def fail(directory: Path) -> Site:
    raise OSError(13, "Permission denied", str(directory / "site.toml"))


def test_what_a_method_says_of_a_sites_files_does_not_leave_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of({**WORDS, "method": "fedavg"})
    message = write_task(task_of(site, job, 1), job)
    for text, sent in (("The key in /home/anna/k cannot open this.", False), ("train/test is 3/4.", True)):
        monkeypatch.setattr(Method, "train", lambda *_, text=text: (_ for _ in ()).throw(StoreError(text)))
        reply = answer("train", message, str(site.directory), None)["reply"]
        assert (text in str(reply["error"])) == sent  # type: ignore[index, call-overload]
        assert str(reply["error"]).startswith("[E400]")  # type: ignore[index, call-overload]


def pictured(number: int = 5) -> torch.Tensor:
    return torch.randint(0, 256, (number, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_a_last_model_that_is_not_finite_does_not_take_the_place_of_a_good_one(site: Site) -> None:
    job = job_of({**WORDS, "method": "fedavg"})
    good = task_of(site, job, 3, op="evaluate")
    assert site.answer(good, job, last=True).error is None
    before, _ = site.predict(pictured())
    bad = replace(good, received={name: torch.full_like(value, torch.nan) for name, value in good.received.items()})
    with pytest.raises(UpdateError, match="not finite"):
        site.answer(bad, job, last=True)
    assert torch.equal(site.predict(pictured())[0], before)


@pytest.mark.parametrize("name", ROWS)
def test_a_site_predicts_as_it_was_scored_when_its_data_is_gone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finished model is what predicts: nothing is read from the data's folder, and nothing is trained again."""
    row = ROWS[name]
    if name == "privacypfedc":
        pytest.importorskip("tenseal")
    side = 8 if row.net == "mlp" else 28
    pictures(tmp_path / "data", each=40)
    folder = tmp_path / "data" / "anna"
    deployment.init_site(tmp_path / "anna", "anna", str(folder), "host:8100")
    with (tmp_path / "anna" / "site.toml").open("a") as file:
        file.write(f"size = {side}\n")
    site = Site.load(tmp_path / "anna")
    if name == "privacypfedc":
        ckks.Keyring.make(site.directory / "clients.ckks")
    net = {"mlp": {"name": "mlp", "hidden": [12, 8]}, "batchnorm": {"name": "digitsnet"}}.get(
        row.net, {"name": row.net}
    )
    job = job_of({"method": {"name": name, "lr": 0.05, **row.hyper}, "net": net, "rounds": 2})
    kept = site.answer(task_of(site, job, 1), job).kept
    assert kept
    task = task_of(site, job, 2, 1, "evaluate", kept)
    assert site.answer(task, job, last=True).error is None
    with closing(SiteStore(site.directory)) as store:
        private = store.state("r", 1, kept)
    worker = site.worker(job.words, 0, job.clients, job.classes)
    x = torch.nn.functional.interpolate(pictured().float() / 127.5 - 1, side)
    with one_thread():
        client = worker.client(replace(task, private=private))
        worker.personal(client)
        worker.prepare(client, seen=True)
        client.net.module.eval()
        expected = probabilities(worker.method, client, x)
    shutil.rmtree(folder)
    sites._worker.cache_clear()
    monkeypatch.setattr(Method, "fit", None)
    found, classes = site.predict(x)
    assert classes == ("0", "1", "2")
    assert torch.equal(found, expected)


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


def test_a_bad_question_costs_the_resident_its_own_answer_only(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(residents, "PATIENCE", 0.3)
    question = RecordDict({"call": ConfigRecord({"protocol": PROTOCOL, "words": 'net = "mlp"'})})
    resident = Resident(site.directory)
    try:
        with residents._beside(str(site.directory)) as path, socket.socket(socket.AF_UNIX) as silent:
            for kind, content in ((b"\xff\xfe", b""), (b"query", b"\xff\xff\xff no message")):
                with socket.socket(socket.AF_UNIX) as link, suppress(ConnectionError):
                    link.settimeout(20)
                    link.connect(path)
                    residents._put(link, kind)
                    residents._put(link, content)
                    assert link.recv(1) == b""  # no answer
            silent.connect(path)  # and says nothing
            answered = ask(str(site.directory), "query", question, 20)
        assert answered is not None
        assert Present.read(answered, "anna").name == "anna"
    finally:
        resident.close()
    assert "UnicodeDecodeError" in capsys.readouterr().err


def test_who_asks_a_resident_that_hangs_does_not_wait_for_ever(site: Site) -> None:
    with socket.socket(socket.AF_UNIX) as listener, residents._beside(str(site.directory)) as path:
        listener.bind(path)
        listener.listen()
        assert ask(str(site.directory), "query", RecordDict(), 0.2) is None


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
    content = write_task(Task("train", 0, 1, 0, {}, STATE), Job(config.toml(), "r", ("0", "1", "2"), 3))
    assert "private" in content
    read: list[object] = []
    monkeypatch.setattr(messages, "read_state", lambda *given: read.append(given) or {})
    reply = answering.answer("train", content, str(site.directory), None)
    assert "keeps its own" in str(reply["reply"]["error"])  # type: ignore[index]
    assert read == []
