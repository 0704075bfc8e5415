"""The command line: `perfed run`, `compare`, `resume`, `show`, `export`, `methods` and `data`."""

from __future__ import annotations

from typing import Annotated

import typer

from perfed import allocator
from perfed.cli import datasets, looking, reproducing, running, sites, viewing
from perfed.cli.failures import Commands

app = typer.Typer(
    name="perfed",
    cls=Commands,
    help="Personalised federated learning: clients learn together and each ends with a model of its own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"perfed {version('perfed')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """Personalised federated learning: clients learn together and each ends with a model of its own."""


app.command("run")(running.run)
app.command("compare")(running.compare)
app.command("resume")(running.resume)
app.command("show")(looking.show)
app.command("report")(viewing.report)
app.command("table")(viewing.table)
app.command("watch")(viewing.watch)
app.command("explain")(viewing.explain)
app.command("export")(looking.export)
app.command("demo")(running.demo)
app.command("methods")(looking.methods)
app.command("recipes")(reproducing.recipes)
app.command("reproduce")(reproducing.reproduce)
app.add_typer(datasets.app, name="data")
app.add_typer(sites.site, name="site")
app.add_typer(sites.coordinator, name="coordinator")


def main() -> None:
    """The program `perfed`."""
    allocator.keep()
    app()
