"""perfed data: which data sets there are, fetching them, and what a federation of one looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from perfed import config
from perfed.cli.failures import Commands
from perfed.cli.running import Json, print_json
from perfed.cli.words import with_words

app = typer.Typer(cls=Commands, help="List and fetch data sets, and show how they are divided.", no_args_is_help=True)
NOT_DATA = ("method", "rounds", "fraction", "eval_every", "last_k", "adapt", "new", "workers", "out")


@app.command("list")
def list_names(as_json: Json = False) -> None:
    """The data sets that perfed reads."""
    from perfed.data import describe

    found = describe()
    if as_json:
        return print_json(found)
    table = Table("name", "what it is", box=box.SIMPLE_HEAD, show_edge=False)
    for name, line in found.items():
        table.add_row(name, line)
    Console().print(table)


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="The data set.")],
    data_dir: Annotated[Path, typer.Option(help="Where data sets are kept.")] = Path("data"),
) -> None:
    """Fetch a data set's published files and check them."""
    from perfed.data import get as fetch

    for path in fetch(name, data_dir):
        typer.echo(path)


@app.command("show")
@with_words(without=NOT_DATA)
def show(
    words: dict[str, Any],
    settings: list[str],
    picture: Annotated[Path, typer.Option("--picture", "-o", help="Where the bubble chart is saved.")] = Path(
        "partition.png"
    ),
    as_json: Json = False,
) -> None:
    """How a data set is divided among clients: numbers, and a bubble chart."""
    from perfed.data.picture import draw
    from perfed.prepare import prepare

    prepared = prepare(config.resolve(config.override(words, settings)))
    federation, used = prepared.federation, prepared.config
    draw(federation, picture)
    sizes = {part: federation.sizes(part) for part in ("train", "val", "test")}
    held = (federation.counts("train") > 0).sum(axis=1)
    facts = {
        "data": used.data["name"],
        "split": used.split,
        "clients": federation.num_clients,
        "unseen": len(federation.unseen),
        "classes": federation.num_classes,
        "shape": list(federation.input_shape),
        "classes_per_client": [int(held.min()), float(held.mean()), int(held.max())],
        **{
            part: {"total": int(n.sum()), "smallest": int(n.min()), "largest": int(n.max())}
            for part, n in sizes.items()
        },
        "partition_sha256": federation.sha256,
        "picture": str(picture),
    }
    if as_json:
        return print_json(facts)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=False)
    worded = facts | {part: f"{n.sum()} samples, {n.min()} to {n.max()} per client" for part, n in sizes.items()}
    worded["classes_per_client"] = f"{held.min()} to {held.max()}, {held.mean():.1f} on average"
    worded["shape"] = " x ".join(map(str, federation.input_shape))
    for key, value in worded.items():
        if key != "partition_sha256":
            table.add_row(key.replace("_", " "), str(value))
    Console().print(table)
    typer.echo(f"partition SHA-256: {federation.sha256}")
