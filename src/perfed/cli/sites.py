"""Commands of a deployment on Flower: `perfed site` and `perfed coordinator`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from perfed.cli.words import with_words

site = typer.Typer(name="site", help="A site with its own data, in a federation on Flower.", no_args_is_help=True)
coordinator = typer.Typer(name="coordinator", help="The server of sites on Flower.", no_args_is_help=True)

DIVISION = ("split", "clients", "unseen", "shift", "external", "assignment", "test")
"""Words about how data is divided: here it is where it is."""

OPEN = "Insecure: without TLS and keys, whoever reaches the port can read everything and take part."

Directory = Annotated[Path, typer.Argument(help="The directory that init made.")]
New = Annotated[Path, typer.Argument(help="A new directory.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS and keys: for trying out on one machine only.")]


@site.command("init")
def init_site(
    directory: New,
    name: Annotated[str, typer.Option(help="The site's name in the federation.")],
    data: Annotated[str, typer.Option(help="Its own data: a folder with one folder per class, npz:PATH or a name.")],
    coordinator: Annotated[str, typer.Option(help="Where the coordinator is: HOST:PORT.")],
    data_dir: Annotated[Path | None, typer.Option(help="Where named data sets are kept.")] = None,
    insecure: Insecure = False,
) -> None:
    """Make what a site needs: its configuration, its key, and the request that it sends to the coordinator."""
    from perfed.flower import deployment

    made = deployment.init_site(
        directory, name, data, coordinator, str(data_dir) if data_dir else None, insecure=insecure
    )
    for file in made:
        typer.echo(file)


@site.command("start")
def start_site(
    directory: Directory, port: Annotated[int, typer.Option(help="A local port for Flower; 0: any.")] = 0
) -> None:
    """Take part: run this site's Flower node until it is stopped."""
    from perfed.flower import deployment
    from perfed.flower.site import Site

    if Site.load(directory).insecure:
        typer.echo(OPEN, err=True)
    raise typer.Exit(deployment.serve_site(directory, port))


@site.command("key")
def key(
    file: Annotated[Path, typer.Argument(help="A new file. Give every site a copy, and nobody else.")],
) -> None:
    """Make the secret key that sites share, for methods that seal what they send (Privacy-pFedC)."""
    from perfed.errors import ConfigError
    from perfed.privacy.ckks import Keyring

    if file.exists():
        raise ConfigError(f"{file} exists.", "Give a new file.")
    Keyring.make(file)
    typer.echo(file)


@site.command("predict")
def predict(
    directory: Directory,
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    run: Annotated[str | None, typer.Option(help="Of which run; default: the last.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """What the site's personal model says to images. No server is needed."""
    import torch

    from perfed.cli.running import print_json
    from perfed.data.sources.folder import load_images
    from perfed.flower.site import Site

    here = Site.load(directory)
    found, classes = here.predict(load_images(images, here.data.get("size"), here.data.get("channels")), run)
    best = [classes[int(k)] for k in torch.argmax(found, dim=1)]
    if as_json:
        rows = zip(images, best, found.tolist(), strict=True)
        return print_json([{"image": str(path), "class": label, "probabilities": row} for path, label, row in rows])
    for image, label, row in zip(images, best, found, strict=True):
        typer.echo(f"{image}\t{label}\t{float(row.max()):.3f}")


@coordinator.command("init")
def init_coordinator(
    directory: New,
    host: Annotated[str, typer.Option(help="The name or address by which sites reach this machine.")],
    port: Annotated[int, typer.Option(help="The port.", min=1, max=65535)] = 8100,
    bind: Annotated[
        str | None,
        typer.Option(help="The address of this machine to listen at; default: all, with --insecure loopback."),
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Make what the coordinator needs: an authority, its certificate, and Flower's connection."""
    from perfed.flower import deployment

    for file in deployment.init_coordinator(directory, host, port, bind, insecure=insecure):
        typer.echo(file)


@coordinator.command("start")
def start_coordinator(directory: Directory) -> None:
    """Run Flower's SuperLink until it is stopped."""
    from perfed.flower import deployment

    made = deployment.Coordinator.load(directory)
    command, environment = made.start_command()
    if made.insecure:
        typer.echo(OPEN, err=True)
    typer.echo(made.notice(), err=True)
    deployment.keep_private()
    os.execve(command[0], command, environment)


@coordinator.command("add")
def add(
    directory: Directory, requests: Annotated[list[Path], typer.Argument(help="Requests that sites sent: NAME.csr.")]
) -> None:
    """Admit sites: check their requests and register their keys with the running SuperLink."""
    from perfed.errors import ConfigError, PerfedError
    from perfed.flower import deployment

    made, failed = deployment.Coordinator.load(directory), []
    if not made.insecure:
        made.reached()
    for request in requests:
        try:
            typer.echo(f"admitted: {made.add(request)}")
        except PerfedError as error:
            failed.append(f"{request}: {error.cause} {error.cure}")
    if failed:
        raise ConfigError(f"{len(failed)} of {len(requests)} were not admitted. {' '.join(failed)}")


@coordinator.command("run")
@with_words(
    without=(
        "data",
        "data_dir",
        "split",
        "clients",
        "unseen",
        "shift",
        "external",
        "assignment",
        "workers",
        "engine",
        "executor",
        "new",
        "test",
    )
)
def run(
    words: dict[str, Any],
    settings: list[str],
    directory: Directory,
    sites: Annotated[int, typer.Option(help="How many sites take part.", min=1)],
    quorum: Annotated[float, typer.Option(help="Share of the sites whose updates a round needs.")] = 0.5,
    deadline: Annotated[float, typer.Option(help="Seconds that sites have to answer in a round.")] = 600.0,
    wait: Annotated[float, typer.Option(help="Seconds that sites have to appear.")] = 600.0,
) -> None:
    """Train among the sites. The same command again continues a run that was cut short."""
    from perfed import config, rundir
    from perfed.cli.running import report
    from perfed.errors import StoreError
    from perfed.flower import deployment
    from perfed.flower.coordinate import Terms
    from perfed.result import Result

    words = config.override(words, settings)
    resolved = config.resolve(words)
    out = Path(resolved.out or directory / "runs" / f"{resolved.method['name']}-{resolved.seed}").absolute()
    kept = {key: value for key, value in words.items() if key != "out"}
    deployment.Coordinator.load(directory).run(kept, Terms(sites, quorum, deadline, wait), out)
    if not rundir.is_finished(out):
        raise StoreError(f"The run in {out} was cut short.", "The same command again continues it.")
    report(Result.load(out), False)
