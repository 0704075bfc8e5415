"""Commands around the papers' tables: recipes, reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from perfed.cli.progress import Watching
from perfed.errors import ConfigError


def recipes() -> None:
    """List the tables of the papers that can be run."""
    from perfed import recipes as kept

    table = Table("recipe", "table", "methods", "data", box=None, pad_edge=False)
    for name in kept.names():
        recipe = kept.load(name)
        table.add_row(name, f"{recipe.paper}, {recipe.table}", str(len(recipe.entries)), str(recipe.words["data"]))
    Console().print(table)


def reproduce(
    name: Annotated[str, typer.Argument(help="A recipe's name, or a recipe file of your own.")],
    budget: Annotated[str, typer.Option(help="smoke (seconds), quick (a fraction of the rounds) or full.")] = "quick",
    seeds: Annotated[int, typer.Option(help="How many seeds.", min=1)] = 1,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that compute.", min=1)] = 1,
    only: Annotated[str, typer.Option(help="Some of the methods, with commas between.")] = "",
    runs: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs/reproduce"),
    results: Annotated[Path, typer.Option(help="Where the results are written.")] = Path("results"),
) -> None:
    """Run a table of a paper; the same command again goes on where it stopped."""
    from perfed import recipes as kept
    from perfed import reproduce as reproducing
    from perfed.cli.running import _announcer

    if budget not in ("smoke", "quick", "full"):
        raise ConfigError(f"budget = {budget[:80]!r} is not accepted.", "It must be smoke, quick or full.")
    recipe = kept.load(name)
    place = runs / f"{recipe.name}-{budget}"
    with Watching(place) as watching:
        found = reproducing.reproduce(
            recipe,
            budget=budget,  # type: ignore[arg-type]
            seeds=range(seeds),
            out=place,
            data_dir=str(data_dir) if data_dir else None,
            workers=workers,
            only=[part.strip() for part in only.split(",") if part.strip()],
            announce=_announcer(watching),
        )
    written = reproducing.write(found, results)
    console = Console()
    console.print(f"{recipe.title} ({recipe.paper}, {recipe.table}; {budget})", highlight=False)
    console.print(Markdown(reproducing.markdown(found)))
    close, compared = found["within_2_points"]
    console.print(f"{close} of {compared} within 2 points. Written: {written}", highlight=False, soft_wrap=True)
