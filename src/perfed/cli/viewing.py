"""Commands for people who look: the report page, tables for papers, live view, explanations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfed import rundir

Runs = Annotated[list[Path], typer.Argument(help="Directories of finished runs and comparisons.")]


def report(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
) -> None:
    """One page with everything that runs and comparisons found: a single file to open or to send."""
    from perfed.report.page import write

    typer.echo(write(runs, out))


def table(
    runs: Runs,
    format: Annotated[str, typer.Option("--format", "-f", help="md, latex or csv.")] = "md",
    metrics: Annotated[str, typer.Option(help="Metrics, with commas between.")] = "local.mean",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A file; without it, the terminal.")] = None,
) -> None:
    """A table for a paper: mean ± spread over seeds, the best in bold, the second underlined."""
    from perfed.report.papers import table as make

    text = make(runs, format, [name.strip() for name in metrics.split(",") if name.strip()])
    typer.echo(rundir.hand_out(text, out) if out else text, nl=bool(out))


def watch(
    directory: Annotated[Path, typer.Argument(help="A run, a comparison, or a directory with some inside.")] = Path(
        "runs"
    ),
    port: Annotated[int | None, typer.Option(help="The port; without it, a free one.", min=0, max=65535)] = None,
) -> None:
    """A page on this machine that follows runs while they go on. Ctrl-C ends it; the runs do not notice."""
    from perfed.report.watch import serve

    server = serve(directory, port)
    typer.echo(f"Following {directory} at {server.url} (Ctrl-C ends)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("Stopped.", err=True)
    finally:
        server.server_close()


def explain(
    run: Annotated[Path, typer.Argument(help="The directory of a finished run.")],
    client: Annotated[int, typer.Option(help="Whose models.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A directory for the pictures; RUN/explain-client-N.")
    ] = None,
) -> None:
    """Why a client's model says what it says: pictures beside the run, which `perfed report` puts into its page."""
    from perfed.explain.explanation import explain as write
    from perfed.result import Result

    for file in write(Result.load(run), client, out):
        typer.echo(file)
