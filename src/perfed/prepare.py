"""From a configuration to what a run is made of: the federation, the network with its first weights, the method."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perfed import hyperparameters, nets, rundir
from perfed.config import GIVEN, Config
from perfed.core import rng
from perfed.core.method import Method
from perfed.core.state import from_bytes, to_bytes
from perfed.data import Federation, Source, federate
from perfed.data import load as load_data
from perfed.data.federate import DEFAULT_CLIENTS
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings, Watcher
from perfed.errors import ConfigError, NetError, StoreError
from perfed.nets import Net


def settings_of(config: Config) -> Settings:
    """The engine's part of a configuration."""
    return Settings(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Settings)})


@dataclass(frozen=True)
class Prepared:
    """Everything a run needs, and its configuration with every default filled in."""

    config: Config
    federation: Federation
    net: Net
    method: Method

    @property
    def settings(self) -> Settings:
        """The engine's part of the configuration."""
        return settings_of(self.config)

    def simulation(self, directory: Path, watch: Watcher | None = None, workers: int = 1, **others: Any) -> Simulation:
        """The run in this directory, from where it stands."""
        net, settings = first_weights(self.config, self.net, self.method), self.settings
        return Simulation(
            self.federation,
            net,
            self.method,
            settings,
            directory=directory,
            workers=workers,
            watch=watch,
            numerics=self.config.executor,
            **others,
        )

    def keep_initial(self, directory: Path) -> None:
        """Save the first weights of a network that was given in Python, so that the run can be resumed."""
        if self.config.net["name"].startswith(GIVEN):
            rundir.write(directory / rundir.INITIAL, to_bytes(self.net.module.state_dict()))


def prepare(
    config: Config,
    *,
    data: Source | Federation | None = None,
    net: Net | None = None,
    method: Method | None = None,
    directory: Path | None = None,
    alike: Prepared | None = None,
) -> Prepared:
    """Make what the configuration names; objects given here take the place of names that begin with `python:`.

    A run prepared before from the same words for its data, `alike`, lends its federation.
    """
    if method is None:
        name, settings = config.method["name"], {k: v for k, v in config.method.items() if k != "name"}
        _refuse_given("method", name)
        method = hyperparameters.check(name, settings)
    if net is None:
        _refuse_given("net", config.net["name"])
    if alike is None:
        config, federation = _federation(config, data)
    else:
        config, federation = config.changed(**_division(alike.config)), alike.federation
    if net is None:
        options = {key: value for key, value in config.net.items() if key != "name"}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.derive(config.seed, "init"))
            net = nets.build(config.net["name"], federation.input_shape, federation.num_classes, **options)
    else:
        net = _own(net, federation, directory)
    return Prepared(config, federation, net, method)


def first_weights(config: Config, net: Net, method: Method) -> Net:
    """The network that the method makes of a copy of this one; what it adds is drawn from the run's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.derive(config.seed, "build"))
        built = method.build(net.clone())
    built.compute_in(torch.bfloat16 if config.precision else None)
    built.compiled = config.kernels == "compiled"
    return built


def _division(config: Config) -> dict[str, int | str | None]:
    """The words that are filled in when the data is divided."""
    return {"split": config.split, "clients": config.clients, "unseen": config.unseen}


def _federation(config: Config, data: Source | Federation | None) -> tuple[Config, Federation]:
    if isinstance(data, Federation):
        return config.changed(clients=data.num_clients, unseen=len(data.unseen)), data
    if data is None:
        name, options = config.data["name"], {k: v for k, v in config.data.items() if k != "name"}
        _refuse_given("data", name)
        data = load_data(name, config.data_dir, **options)
    split, clients = config.split, config.clients
    if config.assignment and split and not split.startswith("file:"):
        raise ConfigError(
            f"split = {split!r} has no effect beside assignment = {config.assignment!r}.", "Give one of them."
        )
    if config.assignment:
        split = f"file:{config.assignment}"
    elif split is None:
        split = "classes:2" if data.domain is None else "domain"
    if clients is None and not split.startswith(("domain", "file")):
        clients = DEFAULT_CLIENTS
    name = config.net["name"]
    federation = federate(
        data,
        data_dir=config.data_dir,
        clients=clients,
        split=split,
        test=config.test,
        test_fraction=config.test_fraction,
        val_fraction=config.val_fraction,
        seed=config.seed,
        shift=config.shift,
        unseen=config.unseen,
        external=config.external,
        min_size=None if name.startswith(GIVEN) else nets.min_size(name),
    )
    return config.changed(split=split, clients=federation.num_clients), federation


def _own(net: Net, federation: Federation, directory: Path | None) -> Net:
    """A user's network: a copy, tried on the data's shape, with the first weights that the run began with."""
    if net.num_classes != federation.num_classes:
        raise NetError(
            f"The network tells {net.num_classes} classes apart, the data has {federation.num_classes}.",
            f"Give its head {federation.num_classes} outputs.",
        )
    net = net.clone()
    net.probe(federation.input_shape)
    kept = directory / rundir.INITIAL if directory else None
    if kept and kept.is_file():
        state, _ = from_bytes(kept.read_bytes())
        try:
            net.module.load_state_dict(state)
        except RuntimeError as error:
            raise StoreError(f"The run began with another network: {error}.", "Give the same one.") from None
    return net


def _refuse_given(key: str, name: str) -> None:
    if name.startswith(GIVEN):
        raise ConfigError(
            f"{key} = {name!r} was given as an object in Python.", f"Give it again: perfed.resume(DIR, {key}=...)."
        )
