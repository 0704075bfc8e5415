"""Run a federation from Python: the same words as the command line and the TOML file, or objects in their place."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from perfed import config as configuration
from perfed import hyperparameters, rundir
from perfed.config import DIVISION, GIVEN, Config
from perfed.core.method import Method
from perfed.core.registry import methods as registered
from perfed.data import Federation, Source
from perfed.engine.settings import Watcher
from perfed.errors import ConfigError
from perfed.nets import Net
from perfed.prepare import Prepared, prepare
from perfed.result import Result

Data = str | Path | Mapping[str, Any] | Source | Federation
Network = str | Mapping[str, Any] | Net
Algorithm = str | Mapping[str, Any] | Method


def run(
    method: Algorithm = "fedavg",
    data: Data = "digits",
    net: Network = "cnn",
    *,
    watch: Watcher | None = None,
    **words: Any,
) -> Result:
    """Run one method over one federation.

    The words are those of `perfed run`: split, clients, rounds, fraction, seed, workers, out and so on. Without `out`
    the run's files last as long as the result; `Result.save` keeps them.
    """
    config, objects = describe(method, data, net, words)
    return begin(prepare(config, **objects), watch=watch)


def resume(
    directory: Path | str, *, watch: Watcher | None = None, workers: int | None = None, **objects: Any
) -> Result:
    """Continue the run in a directory to its end; nothing is computed if it is already there.

    `data`, `net` and `method` are needed where the run was given objects instead of names; `data_dir` if it moved.
    """
    place = Path(directory)
    rundir.require(place)
    config = configuration.load(place / rundir.CONFIG)
    words = {key: objects.pop(key) for key in ("data_dir",) if objects.get(key)} | (
        {"workers": workers} if workers else {}
    )
    config = config.changed(**words) if words else config
    if rundir.is_finished(place) and not objects:
        return Result.load(place)
    return finish(prepare(config, directory=place, **objects), place, watch=watch)


def begin(prepared: Prepared, *, watch: Watcher | None = None) -> Result:
    """Start a prepared run in its new directory."""
    out = prepared.config.out
    place = Path(out) if out else Path(tempfile.mkdtemp(prefix="perfed-"))
    try:
        rundir.claim(place, prepared.config.toml())
        prepared.keep_initial(place)
        draw_partition(prepared, place)
        result = finish(prepared, place, watch=watch)
    except BaseException:
        if not out:
            shutil.rmtree(place, ignore_errors=True)
        raise
    if not out:
        weakref.finalize(result, shutil.rmtree, place, ignore_errors=True)
    return result


def finish(prepared: Prepared, directory: Path, *, watch: Watcher | None = None) -> Result:
    """Run what is left of the rounds and write the result."""
    if prepared.config.engine == "flower":
        from perfed.flower.simulate import simulate

        outcome = simulate(prepared, lambda make: prepared.simulation(directory, watch, executor=make).run())
    else:
        outcome = prepared.simulation(directory, watch, prepared.config.workers).run()
    assert outcome is not None
    result = Result.of(outcome, directory, prepared)
    result.write()
    return result


def describe(method: Algorithm, data: Data, net: Network, words: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    """The configuration of a call, and the objects among its arguments."""
    objects: dict[str, Any] = {}
    named: dict[str, Any] = {"method": method, "data": str(data) if isinstance(data, Path) else data, "net": net}
    if isinstance(data, Source | Federation):
        named["data"], objects["data"] = GIVEN + getattr(data, "name", "federation"), data
    if isinstance(data, Federation) and (useless := [key for key in DIVISION if key in words]):
        raise ConfigError(
            f"{useless[0]} = {words[useless[0]]!r} has no effect: the data is already divided.", "Leave it out."
        )
    if isinstance(net, Net):
        named["net"], objects["net"] = GIVEN + type(net.module).__name__, net
    elif isinstance(net, nn.Module):
        raise ConfigError(
            f"net is a {type(net).__name__} whose head is not known.", "Give perfed.wrap(model, head='NAME')."
        )
    if isinstance(method, Method):
        names = {cls: name for name, cls in registered().items()}
        name = names.get(type(method), GIVEN + type(method).__name__)
        named["method"], objects["method"] = {"name": name} | hyperparameters.table(method), method
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in words.items()}
    return configuration.resolve(named | plain), objects


def draw_partition(prepared: Prepared, directory: Path) -> None:
    """Save who has what, as a picture and as numbers."""
    from perfed.data.picture import draw

    draw(prepared.federation, directory / rundir.PARTITION)
    rundir.write(directory / rundir.COUNTS, json.dumps(prepared.federation.summary()).encode())
