"""A site: its name, its data, which never leaves it, and the store of what it keeps for itself."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from perfed import config as configuration
from perfed import nets
from perfed.config import Config
from perfed.core.registry import method_class
from perfed.data import Federation, federate
from perfed.data import load as load_data
from perfed.engine.evaluate import without_labels
from perfed.engine.executors import one_thread
from perfed.engine.worker import Reply, Task, Worker
from perfed.errors import ConfigError
from perfed.flower.computing import compute, worker_of
from perfed.flower.messages import Job
from perfed.flower.personal import finish, predict
from perfed.flower.rollcall import Present
from perfed.flower.sitestore import SiteStore
from perfed.prepare import prepare

FILE = "site.toml"
KEYS = "clients.ckks"
"""the file with the secret key that sites share, for methods that seal what they send"""
WORDS = {"name", "coordinator", "data", "data_dir", "insecure"}


@dataclass(frozen=True)
class Site:
    """A site's directory as `perfed site init` made it."""

    directory: Path
    name: str
    data: dict[str, Any]
    data_dir: str | None = None
    coordinator: str = ""
    insecure: bool = False

    @classmethod
    def load(cls, directory: Path) -> Site:
        """The site in a directory."""
        words = configuration.read(directory / FILE)
        if strange := sorted(words.keys() - WORDS):
            raise ConfigError(f"{directory / FILE} has an unknown key {strange[0]!r}.", f"Known: {', '.join(WORDS)}.")
        data, name = words.get("data"), words.get("name")
        table = {"name": data} if isinstance(data, str) else data
        if not isinstance(name, str) or not isinstance(table, dict) or not isinstance(table.get("name"), str):
            raise ConfigError(f"{directory / FILE} lacks name or data.", "Make it by perfed site init.")
        rest = {key: words[key] for key in ("data_dir", "coordinator", "insecure") if key in words}
        return cls(directory, name, table, **rest)

    def own(self, config: Config) -> Federation:
        """The site's data, divided into parts by the run's shares and seed: a federation of this site alone."""
        options = {key: value for key, value in self.data.items() if key != "name"}
        source = load_data(self.data["name"], self.data_dir, **options)
        return federate(
            source,
            clients=1,
            split="iid",
            test_fraction=config.test_fraction,
            val_fraction=config.val_fraction,
            seed=config.seed,
            min_size=nets.min_size(config.net["name"]),
        )

    def present(self, config: Config) -> Present:
        """What the coordinator learns of the data: how many images, of which size, and the classes' names."""
        self.at_home(config)
        data = self.own(config)
        train, test = (int(data.sizes(part)[0]) for part in ("train", "test"))
        return Present(None, self.name, train, test, data.classes, data.input_shape, data.sha256)

    def at_home(self, config: Config) -> Config:
        """The configuration with what a run may not decide for a site: the file with the key that sites share."""
        named = config.method["name"]
        if "keys" not in method_class(named).__dataclass_fields__:
            return config
        if not (file := self.directory.absolute() / KEYS).is_file():
            raise ConfigError(
                f"{named} seals with a secret key that the sites share, and {self.name} has none.",
                f"Make one by perfed site key {KEYS} and put a copy into every site's directory.",
            )
        return config.changed(method={**config.method, "keys": str(file)})

    def worker(self, words: str, client: int, clients: int, classes: tuple[str, ...]) -> Worker:
        """The worker of a run, with this site's data in its place. The run's words about data do not count here."""
        if not 0 <= client < clients:
            raise ConfigError(f"client = {client} of {clients} cannot be.", "The coordinator numbers sites from 0.")
        return _worker(self.directory, words, client, clients, classes)

    def answer(self, task: Task, job: Job, *, last: bool = False) -> Reply:
        """Do a task with the private state that lies here; what becomes of the state stays here."""
        if task.op not in ("train", "evaluate"):
            raise ConfigError(
                f"{task.op!r} is asked of a site.", "It trains and scores; of single images it tells nothing."
            )
        if task.kept is None:
            raise ConfigError("A private state was sent to a site.", "A site keeps its own.")
        with closing(SiteStore(self.directory)) as store:
            store.settle(job.run, task.kept)
            private = store.state(job.run, task.since, task.kept.sha)
            worker = self.worker(job.words, task.client, job.clients, job.classes)
            own = replace(task, private=private)
            reply = compute(worker, own)
            if last and not reply.error and task.op == "evaluate":  # what cannot be used takes no good model's place
                store.keep(finish(worker, own, job))
            if reply.error or task.op != "train":
                told = without_labels(reply.state) if worker.method.labels_stay else reply.state
                return replace(reply, state=told, private={})
            return replace(reply, private={}, kept=store.pend(job.run, task.t, reply.private))

    def predict(self, x: Tensor, run: str | None = None) -> tuple[Tensor, tuple[str, ...]]:
        """The personal model's class probabilities for images, and the classes; neither server nor data is needed."""
        with closing(SiteStore(self.directory)) as store:
            runs = store.models()
            if not runs:
                raise ConfigError(f"{self.name} has no model yet.", "It has one when a run has ended.")
            model = store.model(run or runs[-1])
        return predict(model, x), model.classes


@lru_cache(maxsize=2)
def _worker(directory: Path, words: str, client: int, clients: int, classes: tuple[str, ...]) -> Worker:
    """Kept between the messages of a run, as long as the process lasts."""
    site = Site.load(directory)
    config = site.at_home(configuration.resolve(configuration.parse(words)))
    with one_thread():
        own = site.own(config)
        return worker_of(prepare(config, data=own.placed(client, clients, classes)))
