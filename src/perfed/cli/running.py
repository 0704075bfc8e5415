"""Commands that compute: run, compare, resume."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from perfed import config, rundir
from perfed.cli.progress import Watch, Watching
from perfed.cli.words import with_words
from perfed.errors import ConfigError

if TYPE_CHECKING:
    from perfed.config import Config
    from perfed.engine.settings import Watcher
    from perfed.leaderboard import Comparison
    from perfed.prepare import Prepared
    from perfed.result import Result

Track = Annotated[
    str | None, typer.Option("--track", help="Also send every evaluation to tensorboard or mlflow (extras).")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]


@with_words()
def run(words: dict[str, Any], settings: list[str], track: Track = None, as_json: Json = False) -> None:
    """Run one method: perfed run --method fedrep --data mnist --split dirichlet:0.1 --clients 100 --net cnn."""
    from perfed.experiment import begin
    from perfed.prepare import prepare

    resolved = config.resolve(config.override(words, settings))
    place = (
        Path(resolved.out)
        if resolved.out
        else _free(f"{resolved.data['name']}-{resolved.method['name']}-{resolved.seed}")
    )
    rundir.refuse_taken(place)
    _check(track)
    with Watching(place) as watching:
        prepared = prepare(resolved.changed(out=str(place)))
        _advise(prepared)
        watch = _also(track, prepared.config, place, watching.watch(resolved.method["name"], place))
        result = begin(prepared, watch=watch)
    report(result, as_json)


@with_words(without=("method", "seed"))
def compare(
    words: dict[str, Any],
    settings: list[str],
    methods: Annotated[str, typer.Option("--methods", help="Names, with commas between; NAME+ft fine-tunes.")] = "",
    seeds: Annotated[str, typer.Option("--seeds", help="Whole numbers, with commas between.")] = "",
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Run several methods and seeds and rank them. The same command again goes on where it stopped."""
    from perfed import comparison

    wanted = [name.strip() for name in methods.split(",") if name.strip()] or words.pop("methods", None)
    tries = _numbers(seeds) or words.pop("seeds", None) or [words.pop("seed", 0)]
    own = words.pop("settings", {})
    words.pop("methods", None), words.pop("seeds", None), words.pop("seed", None)
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise ConfigError("It is not said which methods to compare.", "Give --methods local,fedavg,fedrep.")
    if not isinstance(tries, list) or not all(type(seed) is int for seed in tries) or not isinstance(own, dict):
        raise ConfigError("seeds is not a list of whole numbers, or settings not a table.", "Write seeds = [0, 1, 2].")
    single = [setting for setting in settings if setting.partition(".")[0] in wanted]
    words = config.override(words, [setting for setting in settings if setting not in single])
    for setting in single:
        name, _, rest = setting.partition(".")
        own[name] = config.override({"method": own.get(name, {})}, [f"method.{rest}"])["method"]
    _check(track)
    out = words.pop("out", None)
    place = Path(out) if out else _free("compare-" + str(words.get("data", "digits")))
    with Watching(place) as watching:
        made = comparison.compare(
            wanted, tries, out=place, announce=_announcer(watching, track), settings=own, **_checked(words)
        )
    report_comparison(made, as_json)


def resume(
    directory: Annotated[Path, typer.Argument(help="The directory of a run or of a comparison.")],
    workers: Annotated[int | None, typer.Option(help="Processes that compute, if others than before.", min=1)] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are kept, if it moved.")] = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Continue a run or a comparison after a crash or Ctrl-C, to the same bits."""
    words: dict[str, Any] = {"workers": workers} if workers is not None else {}
    if data_dir:
        words["data_dir"] = str(data_dir)
    _check(track)
    if rundir.is_comparison(directory):
        from perfed import comparison

        with Watching(directory) as watching:
            made = comparison.resume_comparison(directory, _announcer(watching, track), **words)
        return report_comparison(made, as_json)
    rundir.require(directory)
    if rundir.is_finished(directory):
        typer.echo(f"The run in {directory} is finished: nothing is left to do.", err=True)
    from perfed.experiment import resume as resume_run

    with Watching(directory) as watching:
        watch = _also(
            track, config.load(directory / rundir.CONFIG), directory, watching.watch(directory.name, directory)
        )
        result = resume_run(directory, watch=watch, **words)
    report(result, as_json)


def demo(
    out: Annotated[Path, typer.Option(help="Where the runs, the leaderboard and the figures go.")] = Path("demo"),
    workers: Annotated[int, typer.Option(help="Processes that compute.", min=1)] = 2,
    as_json: Json = False,
) -> None:
    """Compare all methods on embedded real data: twenty clients, two handwritten digits each."""
    from perfed.demo import demo as run_demo

    with Watching(out) as watching:
        made = run_demo(out, workers=workers, announce=_announcer(watching))
    report_comparison(made, as_json)


def report(result: Result, as_json: bool) -> None:
    """Print a run's result."""
    from perfed.report.tables import result_table

    if as_json:
        return print_json(result.facts() | {"directory": str(result.directory)})
    console = Console()
    console.print(result_table(result))
    console.print(f"\nFiles: {result.directory}", highlight=False, soft_wrap=True)


def report_comparison(made: Comparison, as_json: bool) -> None:
    """Print a leaderboard."""
    from perfed.report.tables import leaderboard_table

    if as_json:
        return print_json(made.facts() | {"directory": str(made.directory)})
    console = Console()
    console.print(leaderboard_table(made.rows, made.title, console.width))
    console.print(f"\nFiles: {made.directory}", highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Machine output: one JSON document."""
    typer.echo(json.dumps(rundir.finite(value), indent=1))


def _advise(prepared: Prepared) -> None:
    """Say so if a cohort would be faster."""
    from perfed.engine.calibrate import PAYS, speedup
    from perfed.prepare import first_weights

    chosen = prepared.config
    if chosen.executor != "plain":
        return
    net = first_weights(chosen, prepared.net, prepared.method)
    gain = speedup(prepared.federation, net, prepared.method, chosen.rounds, chosen.fraction)
    if gain and gain > PAYS:
        typer.echo(f"--executor cohort would train about {gain:.1f} times as fast, equal to 1e-5.", err=True)


def _announcer(watching: Watching, track: str | None = None) -> Callable[[Config, str], Watcher | None]:
    def announce(run: Config, what: str) -> Watcher | None:
        name = f"{run.method['name']}, seed {run.seed}"
        if what == "skip":
            typer.echo(f"{name}: finished before", err=True)
            return None
        place = watching.place / run.method["name"] / str(run.seed)
        return _also(track, run, place, watching.watch(name, place))

    return announce


def _check(track: str | None) -> None:
    if track is not None:
        from perfed.track import check

        check(track)


def _also(track: str | None, run: Config, place: Path, watch: Watch) -> Watcher:
    """The watcher, and a tracker beside it if one is asked for."""
    if track is None:
        return watch
    from perfed.track import tracked

    return tracked(track, run, place, watch)


def _checked(words: dict[str, Any]) -> dict[str, Any]:
    """Words without those that only single runs have; unknown ones are refused before anything runs."""
    method = words.pop("method", {})
    table = {"name": method} if isinstance(method, str) else method
    if not isinstance(table, dict):
        raise ConfigError(f"method = {str(method)[:80]!r} is not accepted.", "It must be a table of hyper-parameters.")
    config.resolve(words)
    return words | {"method": table}


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"seeds = {text[:80]!r} is not accepted.", "Write --seeds 0,1,2.") from None


def _free(name: str) -> Path:
    """The first place under runs/ of this name and a number that is not taken."""
    stem = re.sub(r"[^A-Za-z0-9.+-]+", "_", name.rsplit("/", 1)[-1])[:60]
    number = 1
    while (place := Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return place
