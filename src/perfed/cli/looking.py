"""Commands that show what there is: methods, finished runs, personal models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from perfed import rundir
from perfed.cli.running import Json, print_json, report, report_comparison

WIDE = 130
"""Terminals narrower than this are shown a method in one cell."""
SHORT = 20
"""Characters of a value that is shown beside a default."""


def methods(
    name: Annotated[str | None, typer.Argument(help="A method, to see its hyper-parameters.")] = None,
    as_json: Json = False,
) -> None:
    """The methods: what each keeps private and what it sends, or one method's hyper-parameters."""
    from perfed.core import registry
    from perfed.engine import relative

    if name is not None:
        return _method(name, as_json)
    found = {key: _describe(cls) for key, cls in registry.methods().items()}
    spent = {key: relative.known(key) for key in found}
    if as_json:
        costs = {key: {"cost": None if cost is None else dataclasses.asdict(cost)} for key, cost in spent.items()}
        return print_json({key: facts | costs[key] for key, facts in found.items()})
    console = Console()
    wide = console.width >= WIDE
    heads = ("name", "title", "family", "private", "travels") if wide else ("name", "what it is")
    table = Table(*heads, box=box.SIMPLE_HEAD, show_edge=False)
    for column in ("FLOPs", "up", "down"):
        table.add_column(column, justify="right")
    for key, facts in found.items():
        cost = spent[key]
        ratios = ["–"] * 3 if cost is None else [f"{ratio:.2f}" for ratio in (cost.flops, cost.up, cost.down)]
        short = f"{facts['family']}; private: {facts['keeps']}; travels: {facts['sends']}"
        told = [facts[column] for column in ("title", "family", "keeps", "sends")] if wide else [short]
        table.add_row(key, *told, *ratios)
    console.print(table)
    console.print(
        "FLOPs, up, down: local work and bytes sent each way as multiples of FedAvg's, on the network `cnn` (PSE:"
        " `conv3attn`) at each method's defaults.\n",
        highlight=False,
    )
    for facts in found.values():
        console.print(f"{facts['title']}: {facts['cites']}", highlight=False, markup=False)
    console.print("\nNAME+ft fine-tunes every client at the end. `perfed methods NAME` shows hyper-parameters.")


def _describe(cls: Any) -> dict[str, str]:
    return {"title": cls.title, "family": cls.family, "keeps": cls.keeps, "sends": cls.sends, "cites": cls.cites}


def _method(name: str, as_json: bool) -> None:
    from perfed import hyperparameters, recipes
    from perfed.core import registry

    cls = registry.method_class(name)
    known = {cls: key for key, cls in registry.methods().items()}
    family = [name, *(known[kind] for kind in cls.__mro__ if kind in known)]
    papers = next(filter(None, map(recipes.of_paper, family)), {})
    used = hyperparameters.table(registry.make(name))
    fields = [dataclasses.replace(field, default=used[field.name]) for field in hyperparameters.listing(cls)]
    if as_json:
        listed = {"hyper-parameters": [dataclasses.asdict(field) for field in fields]}
        trained = {recipe: {"table": table, "method": hyper} for recipe, (table, hyper) in papers.items()}
        return print_json(_describe(cls) | listed | {"recipes": trained})
    console = Console()
    console.print(f"[bold]{cls.title or name}[/bold]  {cls.cites}", highlight=False)
    console.print(f"Private: {cls.keeps}. Travels: {cls.sends}.\n", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("hyper-parameter", no_wrap=True)
    for head in ("default", *(["its recipes"] if papers else []), "what it is", "accepted"):
        table.add_column(head)
    for field in fields:
        told = [_in_recipes(field.name, papers)] if papers else []
        table.add_row(field.name, str(field.default), *told, field.meaning, field.type)
    console.print(table)
    console.print(f"\nChange one by --set method.{fields[0].name}=VALUE.", highlight=False)
    if papers:
        console.print("\nTraining settings are the same for all methods by default. Those of its paper's recipes:\n")
        table = Table(box=box.SIMPLE_HEAD, show_edge=False)
        table.add_column("recipe", overflow="fold")
        table.add_column("what it is")
        table.add_column("hyper-parameters")
        for recipe, (what, hyper) in papers.items():
            table.add_row(recipe, what, ", ".join(f"{key} {value}" for key, value in hyper.items()))
        console.print(table)


def _in_recipes(key: str, papers: Mapping[str, tuple[str, Mapping[str, Any]]]) -> str:
    """The values that a method's own recipes give a hyper-parameter; long lists are left to the recipes."""
    values = {str(hyper[key]) for _, hyper in papers.values() if key in hyper}
    return ", ".join(sorted(value for value in values if len(value) <= SHORT))


def show(
    directory: Annotated[Path, typer.Argument(help="The directory of a run or of a comparison.")],
    as_json: Json = False,
) -> None:
    """A finished run or comparison: its tables, and accuracy by round."""
    from perfed.leaderboard import Comparison
    from perfed.report.terminal import plot
    from perfed.result import Result

    console = Console()
    if rundir.is_comparison(directory):
        made = Comparison.load(directory)
        runs = {row["method"]: made.runs[row["method"]][0] for row in made.rows}
        report_comparison(made, as_json)
    else:
        result = Result.load(directory)
        runs = {result.config.method["name"]: result}
        report(result, as_json)
    if not as_json:
        series = {name: [(entry["t"], entry["local.mean"]) for entry in run.history] for name, run in runs.items()}
        console.print()
        console.print(plot(series, width=min(console.width, 90)))


def export(
    run: Annotated[Path, typer.Argument(help="The directory of a finished run.")],
    client: Annotated[int, typer.Option(help="Whose personal model.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A directory for the files; RUN/client-N.")] = None,
    format: Annotated[str, typer.Option(help="safetensors, or onnx with the extra perfed[onnx].")] = "safetensors",
    as_json: Json = False,
) -> None:
    """One client's personal model, adapted as it was scored, with a model card."""
    from perfed.export import export as write
    from perfed.result import Result

    files = write(Result.load(run), client, out or run / f"client-{client}", format)
    if as_json:
        return print_json({"files": [str(file) for file in files]})
    for file in files:
        typer.echo(file)
