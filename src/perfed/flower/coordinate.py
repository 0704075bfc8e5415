"""The coordinator's side of a deployment: the run's rounds over sites that keep their data and private states.

The run's directory remembers which sites take part and in which order; a run that is submitted again goes on after its
last committed round. It also remembers which sites have not got their last model: they get it when the run is
submitted again.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from perfed import config as configuration
from perfed import rundir
from perfed.config import GIVEN, Config
from perfed.data import Federation
from perfed.engine.cost import blank
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Progress, Watcher
from perfed.engine.worker import Reply, Task
from perfed.errors import ConfigError, StoreError
from perfed.flower.extra import refuse_cohorts
from perfed.flower.messages import Job
from perfed.flower.nodes import Nodes, StoppedError
from perfed.flower.rollcall import Present, Roll
from perfed.flower.simulate_nodes import nodes as simulated_nodes
from perfed.prepare import Prepared, prepare
from perfed.result import Result

SITES = "sites.json"
UNSERVED = "unserved.json"
"""names the sites that were not given their last model; it is not there when all have it"""
SITES_NAME = GIVEN + "sites"
MOST_IMAGES = 10**8
"""training images of all sites together; the coordinator counts them one by one"""
BUSY = 30.0
"""seconds to wait for a server that was just killed to let go of the directory"""


@dataclass(frozen=True)
class Terms:
    """What a deployment states beside the run's configuration."""

    sites: int = 0
    """how many sites take part; the run begins when all of them are there"""
    quorum: float = 0.5
    """share of a round's sites whose good updates are needed; with fewer, the run stops and can be continued"""
    deadline: float = 600.0
    """seconds that sites have to answer in a round"""
    wait: float = 600.0
    """seconds that sites have to appear"""

    def __post_init__(self) -> None:
        for key, ok, want in (
            ("sites", type(self.sites) is int and self.sites >= 0, "a whole number"),
            ("quorum", 0 <= self.quorum <= 1, "a share from 0 to 1"),
            ("deadline", 0 < self.deadline <= 10**7, "a number of seconds"),
            ("wait", 0 < self.wait <= 10**7, "a number of seconds"),
        ):
            if not ok:
                raise ConfigError(f"{key} = {getattr(self, key)!r} cannot be.", f"It must be {want}.")


TERMS = tuple(Terms.__dataclass_fields__)


def words_of(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A run's words from Flower's flat run configuration: `method.lr` is a table's key, lists are written as text."""
    words: dict[str, Any] = {}
    for key, value in flat.items():
        if value == "":
            continue  # declared in pyproject.toml so that it can be given, and not given
        plain = configuration.parse(f"value = {value}")["value"] if str(value).startswith("[") else value
        table, dot, rest = key.partition(".")
        if not dot:
            words[key] = plain
            continue
        held = words.get(table, {})
        words[table] = (held if isinstance(held, dict) else {"name": held}) | {rest.replace("-", "_"): plain}
    return words


@dataclass(frozen=True)
class Hooks:
    """How others look on, and carry the messages themselves."""

    watch: Watcher
    opened: Callable[[Simulation], None] = lambda _: None
    carry: Callable[[Nodes, Sequence[Task]], list[Reply]] | None = None


def coordinate(grid: Grid, flat: Mapping[str, Any], hooks: Hooks | None = None) -> Result:
    """Run what the run configuration says over the nodes of a grid, from where its directory stands."""
    words = words_of(flat)
    terms = Terms(**{key: words.pop(key) for key in TERMS if key in words})
    out = words.pop("out", None)
    if not out:
        raise ConfigError("It is not said where the run is kept.", "Give out = 'DIRECTORY' in the run configuration.")
    directory = Path(str(out)).expanduser().absolute()
    deployed = terms.sites > 0 or (directory / SITES).is_file()
    roll = Roll(grid, configuration.resolve(words | {"data": SITES_NAME}).toml(), only_sites=deployed)
    if not deployed:
        if not roll.call(lambda: bool(roll.nodes), terms.wait):
            raise StoppedError(f"No node came within {terms.wait:g} s. {_refusals(roll)}", "Start the sites.")
        if all(node.partition is None for node in roll.nodes.values()):
            raise ConfigError("It is not said how many sites take part.", "Give sites = 3 in the run configuration.")
    config = configuration.resolve(words | {"data": SITES_NAME} if deployed else words)
    refuse_cohorts(config)
    if rundir.is_run(directory):
        began = configuration.load(directory / rundir.CONFIG)
        same = began.identity() == _filled(config, began).identity()
        if rundir.is_finished(directory) and same and not _unserved(directory):
            return Result.load(directory)
    run = _deployed if deployed else _simulated
    return run(grid, roll, config, terms, directory, hooks or Hooks(_say))


def _simulated(grid: Grid, roll: Roll, config: Config, terms: Terms, directory: Path, hooks: Hooks) -> Result:
    """Every client is a simulated node; data and private states are made and kept as on one machine."""
    prepared = prepare(config)
    _claim(directory, prepared)
    executor = replace(simulated_nodes(grid, prepared, roll), carry=hooks.carry)
    simulation = prepared.simulation(directory, hooks.watch, executor=executor.limited)
    hooks.opened(simulation)
    return _finish(simulation, prepared, directory)


def _deployed(grid: Grid, roll: Roll, config: Config, terms: Terms, directory: Path, hooks: Hooks) -> Result:
    _refuse(config)
    sites, run = _members(roll, terms, directory)
    federation = _outline(list(sites.values()))
    prepared = prepare(config.changed(new=False), data=federation)
    if not (directory / SITES).is_file():  # only now: sites of which no run can be made are not remembered
        directory.mkdir(parents=True, exist_ok=True)
        facts = {name: asdict(facts) for name, facts in sites.items()}
        rundir.write_json(directory / SITES, {"run": run, "sites": facts})
    _claim(directory, prepared)
    address = _Sites(roll, sites)
    job = Job(prepared.config.toml(), run, federation.classes, len(sites))
    executor = Nodes(grid, job, address, federation.num_classes, deadline=terms.deadline, patient=True)
    executor.carry, executor.tests = hooks.carry, [facts.test for facts in sites.values()]
    simulation = _opened(prepared, directory, hooks.watch, executor, terms)
    hooks.opened(simulation)
    return _finish(simulation, prepared, directory, executor)


def _opened(prepared: Prepared, directory: Path, watch: Watcher, executor: Nodes, terms: Terms) -> Simulation:
    """The run, once a server that was killed just before has let go of it."""
    ends = time.monotonic() + BUSY
    while True:
        try:
            return prepared.simulation(directory, watch, executor=executor.limited, sites=True, quorum=terms.quorum)
        except StoreError as error:
            if "in use" not in error.cause or time.monotonic() > ends:
                raise
            time.sleep(0.5)


def _finish(simulation: Simulation, prepared: Prepared, directory: Path, executor: Nodes | None = None) -> Result:
    """The remaining rounds; then every site that has not got it is given its last model, which it keeps."""
    left: dict[int, str] = {}
    names, last = simulation.federation.client_names or (), simulation.settings.rounds
    ended = rundir.is_finished(directory)
    if ended:  # what was sent after the last round is in no record of a round
        simulation.ledger.bytes_scored = Result.load(directory).cost["bytes_scored"]
    try:
        for t in range(simulation.store.round + 1, last + 1):
            simulation.step(t)
        if executor:
            due = _unserved(directory) if ended else list(names)
            rundir.write_json(directory / UNSERVED, {"sites": due})  # before the result: a server may be killed here
            left = _hand_over(
                simulation, executor.limited(simulation.worker), [names.index(name) for name in due], patient=not ended
            )
        outcome = simulation.outcome()
        if left:
            reasons = [(client, f"It did not get its last model: {reason}") for client, reason in left.items()]
            outcome.faults = outcome.faults + [{"t": last, "client": c, "reason": r} for c, r in reasons]
    finally:
        simulation.close()
    result = Result.of(outcome, directory, prepared)
    result.write()
    if left:
        rundir.write_json(directory / UNSERVED, {"sites": [names[client] for client in left]})
    else:
        (directory / UNSERVED).unlink(missing_ok=True)
    return result


def _hand_over(simulation: Simulation, executor: Nodes, clients: Sequence[int], *, patient: bool) -> dict[int, str]:
    """Give clients their last models; who did not get its own, and why. With patience, absent ones may still come."""
    t, last = simulation.settings.rounds, replace(executor, last=True)
    there = [client for client in clients if patient or executor.address.node(client) is not None]
    tasks = [simulation._task("evaluate", client, t, seen=True) for client in there]
    simulation.ledger.send(tasks)
    replies = last.run(tasks)
    lost = {client: "It was not there." for client in clients if client not in there}
    lost |= {reply.client: reply.error for reply in replies if reply.error}
    return {client: f"{lost[client]} Start it, and give the same command again." for client in sorted(lost)}


def _unserved(directory: Path) -> list[str]:
    """The sites that were not given their last model when the run ended."""
    path = directory / UNSERVED
    return list(rundir.read_json(path)["sites"]) if path.is_file() else []


# Who takes part


def _members(roll: Roll, terms: Terms, directory: Path) -> tuple[dict[str, Present], str]:
    """The sites of a run in the order of their names, and the run's own number: from its directory, once begun."""
    kept = directory / SITES
    if kept.is_file():
        held = rundir.read_json(kept)
        sites = {
            name: Present(**facts | {key: tuple(facts[key]) for key in ("classes", "shape")})
            for name, facts in held["sites"].items()
        }
        finished = rundir.is_finished(directory)
        wanted = set(_unserved(directory) if finished else sites)
        need = 0 if finished else max(1, round(terms.quorum * len(sites)))
        roll.call(lambda: wanted <= _by_name(roll, sites).keys(), min(terms.wait, terms.deadline))
        missing = sorted(wanted - _by_name(roll, sites).keys())
        if len(wanted) - len(missing) < need:
            raise StoppedError(f"These sites are not there: {', '.join(missing)}. {_refusals(roll)}", "Start them.")
        return sites, held["run"]
    if not roll.call(lambda: len(_by_name(roll)) >= terms.sites, terms.wait):
        there = ", ".join(sorted(_by_name(roll))) or "none"
        raise StoppedError(f"Of {terms.sites} sites there are: {there}. {_refusals(roll)}", "Start the others.")
    found = _by_name(roll)
    if len(found) > terms.sites:
        raise ConfigError(f"{len(found)} sites are there, not {terms.sites}: {', '.join(sorted(found))}.", "Say so.")
    sites = {name: roll.nodes[found[name]] for name in sorted(found)}
    shapes = {facts.shape for facts in sites.values()}
    if len(shapes) > 1:
        told = ", ".join(f"{name} {facts.shape}" for name, facts in sites.items())
        raise ConfigError(
            f"The sites' images differ in shape: {told}.", "Give size and channels in every site.toml, under data."
        )
    for name, reason in sorted(roll.refused.items()):
        print(f"{name} does not take part: {reason}", flush=True)
    return sites, secrets.token_hex(8)


def _by_name(roll: Roll, sites: Mapping[str, Present] | None = None) -> dict[str, int]:
    """Nodes by their sites' names; of those that a run began with, only if their data is the same."""
    found: dict[str, int] = {}
    for node, facts in roll.nodes.items():
        if facts.name and (sites is None or (facts.name in sites and sites[facts.name].sha == facts.sha)):
            found[facts.name] = node  # a site without a registered key has another number when it comes back
    return found


class _Sites:
    """Client i is the i-th site by name."""

    def __init__(self, roll: Roll, sites: Mapping[str, Present]) -> None:
        self._roll, self._sites, self._names = roll, sites, list(sites)

    def node(self, client: int) -> int | None:
        return _by_name(self._roll, self._sites).get(self._names[client])

    def refresh(self) -> dict[int, str]:
        return self._roll.look()


def _outline(sites: list[Present]) -> Federation:
    """The federation as the coordinator knows it: sizes, classes and the sum over the sites' sums; no image."""
    classes = tuple(sorted({name for facts in sites for name in facts.classes}))
    if (total := sum(facts.train for facts in sites)) > MOST_IMAGES:
        told = ", ".join(f"{facts.name} {facts.train}" for facts in sites)
        raise ConfigError(
            f"The sites say that they have {total} images: {told}.", f"At most {MOST_IMAGES} are accepted."
        )
    sums = json.dumps([[facts.name, facts.sha] for facts in sites])
    made = blank(sites[0].shape, len(classes), [facts.train for facts in sites])
    made.classes, made.client_names = classes, tuple(facts.name for facts in sites)
    made.__dict__["sha256"] = sha256(sums.encode()).hexdigest()  # in place of the cached sum over blank images
    return made


# The run's directory


def _claim(directory: Path, prepared: Prepared) -> None:
    if not rundir.is_run(directory):
        rundir.claim(directory, prepared.config.toml())
        return
    began = configuration.load(directory / rundir.CONFIG)
    if began.identity() != prepared.config.identity():
        had, want = began.identity(), prepared.config.identity()
        key = next(key for key in {**had, **want} if had.get(key) != want.get(key))
        raise StoreError(
            f"The run in {directory} has {key} = {had.get(key)!r}, not {want.get(key)!r}.",
            "Submit it with the same words, or give another out.",
        )


def _filled(config: Config, began: Config) -> Config:
    """A configuration with what is filled in when the data is known."""
    return config.changed(split=began.split, clients=began.clients, unseen=began.unseen, new=began.new)


def _refuse(config: Config) -> None:
    """Words that say nothing where the data lies with the sites."""
    useless = {
        "split": None,
        "clients": None,
        "shift": None,
        "unseen": 0,
        "external": None,
        "assignment": None,
        "new": None,
    }
    for key, unset in useless.items():
        if getattr(config, key) not in (unset, False):
            raise ConfigError(
                f"{key} = {getattr(config, key)!r} has no effect: the sites have the data.", "Leave it out."
            )


def _refusals(roll: Roll) -> str:
    return " ".join(f"{name}: {reason}" for name, reason in sorted(roll.refused.items()))


def _say(now: Progress) -> None:
    if now.doing == "done":
        score = f", accuracy {now.metrics['local.mean']:.4f}" if "local.mean" in now.metrics else ""
        print(f"round {now.t}/{now.rounds}{score}", flush=True)
