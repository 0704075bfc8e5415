"""Commands around the papers' tables: recipes, reproduce."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from perfed.errors import ConfigError

if TYPE_CHECKING:
    from perfed.reproduce import Plan


def recipes() -> None:
    """List the tables and figures of the papers that can be run."""
    from perfed import recipes as kept

    table = Table("recipe", "table", "methods", "settings", "data", box=None, pad_edge=False)
    for name in kept.names():
        recipe = kept.load(name)
        data = "counted" if recipe.dry else _data(recipe.words["data"])
        count = str(len(recipe.settings))
        table.add_row(name, f"{recipe.paper}, {recipe.table}", str(len(recipe.entries)), count, data)
    Console().print(table)


def _data(word: Any) -> str:
    return str(word["name"] if isinstance(word, dict) else word)


def reproduce(
    name: Annotated[str, typer.Argument(help="A recipe's name, or a recipe file of your own.")],
    budget: Annotated[str, typer.Option(help="smoke (seconds), quick (a fraction of the rounds) or full.")] = "quick",
    seeds: Annotated[int, typer.Option(help="How many seeds, from 0.", min=1)] = 1,
    top: Annotated[int, typer.Option(help="So many of the best methods get --top-seeds seeds.", min=0)] = 0,
    top_seeds: Annotated[int, typer.Option(help="How many seeds the best methods get.", min=1)] = 3,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that compute; 0: one per core.", min=0)] = 0,
    in_turn: Annotated[bool, typer.Option(help="One run at a time, on all processes.")] = False,
    only: Annotated[str, typer.Option(help="Some of the methods, with commas between.")] = "",
    settings: Annotated[
        str, typer.Option(help="Some of the settings, with commas between; `base` is [run] as it stands.")
    ] = "",
    join: Annotated[
        list[Path] | None,
        typer.Option(help="A results file of another machine or of another recipe; its runs are not made again."),
    ] = None,
    tune: Annotated[bool, typer.Option(help="Choose learning rates on validation data first.")] = False,
    runs: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs/reproduce"),
    results: Annotated[Path, typer.Option(help="Where the results are written.")] = Path("results"),
    pages: Annotated[Path, typer.Option(help="Where the page and its plot are written.")] = Path("docs/reproductions"),
) -> None:
    """Run a table of a paper; the same command again goes on where it stopped."""
    from perfed import measured
    from perfed import recipes as kept
    from perfed import reproduce as reproducing
    from perfed.cli.gridwatch import GridWatch
    from perfed.joining import joined_rates, results_in
    from perfed.recipes.budget import BUDGETS

    if budget not in BUDGETS:
        raise ConfigError(f"budget = {budget[:80]!r} is not accepted.", "It must be smoke, quick or full.")
    for place in (results, pages):
        if place.exists() and not place.is_dir():
            raise ConfigError(f"{place} is a file.", "Name a directory.")
    recipe, cores = kept.load(name), workers or os.cpu_count() or 1
    for source in join or ():
        results_in(source)  # what cannot be read is told before learning rates are tried
    file = measured.results_file(recipe.name, budget, results)
    plan = reproducing.Plan(
        recipe=recipe,
        budget=budget,
        out=runs / f"{recipe.name}-{budget}",
        data_dir=str(data_dir) if data_dir else None,
        cores=cores,
        side_by_side=not in_turn and budget != "smoke",  # a process takes longer to start than a smoke run
        only=_names(only),
        within=tuple("" if name == "base" else name for name in _names(settings)),
    )
    with GridWatch(f"perfed reproduce {name} --budget {budget}", 1 if in_turn else cores) as watch:
        plan = replace(plan, look=watch)
        plan, extra = _tuned(plan) if tune else (plan, {})
        plan = plan.join(join or ())
        for source in join or ():
            if rates := reproducing.rates_in(source, recipe.name):
                extra = {"tuning": joined_rates(rates, extra.get("tuning", rates))}
        if budget != "smoke":
            plan.keep_all(range(seeds), file)

        def keep(facts: dict[str, Any]) -> None:
            """Not while it would have less than what is there."""
            if budget == "smoke" or not plan.lost(file):
                reproducing.write(facts | extra, results)

        found = reproducing.reproduce(
            plan,
            range(seeds),
            top=top,
            top_seeds=range(top_seeds),
            keep=keep,
        )
    written = [reproducing.write(found | extra, results)]
    console = Console()
    console.print(f"{recipe.title} ({recipe.paper}, {recipe.table}; {found['budget']})", highlight=False)
    console.print(Markdown(measured.markdown(found)))
    if budget != "smoke":
        from perfed.report.reproduction import results_of, write_page

        written += write_page(recipe, results_of(results, recipe.name) or found, pages)
    close, compared = found["within_2_points"]
    console.print(
        f"{close} of {compared} within {recipe.within:g}. Written: {', '.join(map(str, written))}",
        highlight=False,
        soft_wrap=True,
    )


def _tuned(plan: Plan) -> tuple[Plan, dict[str, Any]]:
    """The plan with the rates that validation data chose, and what to keep of the choice."""
    from perfed import reproduce as reproducing

    found = reproducing.tune(plan)
    typer.echo("Chosen on validation data; for the recipe:\n\n[tuned]", err=True)
    for label, lr in found["chosen"].items():
        typer.echo(f'"{label}" = {lr:g}', err=True)
    return replace(plan, recipe=replace(plan.recipe, tuned=plan.recipe.tuned | found["chosen"])), {"tuning": found}


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
