"""How the command line fails: a line or two for a person, an exit code for a program, no traceback."""

from __future__ import annotations

import os
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from perfed.errors import PerfedError

REFUSED, BROKEN, STOPPED = 2, 1, 130
DETAILS = "PERFED_TRACEBACK"


class Commands(TyperGroup):
    """Commands whose failures are told in words."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; every exception becomes a message and an exit code."""
        try:
            return super().invoke(ctx)
        except PerfedError as error:
            _detail()
            typer.echo(f"error [{error.code}]: {_sentences(error)}", err=True)
            raise typer.Exit(REFUSED) from None
        except KeyboardInterrupt:
            typer.echo("Stopped.", err=True)
            raise typer.Exit(STOPPED) from None
        except BrokenPipeError:  # whoever read our output has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise typer.Exit(BROKEN) from None
        except Exception as error:
            if type(error).__module__.startswith(("typer", "click")):
                raise
            _detail()
            words = " ".join(str(error).split())[:300]
            typer.echo(f"error: {type(error).__name__}: {words}\nRun with {DETAILS}=1 for details.", err=True)
            raise typer.Exit(BROKEN) from None


def _sentences(error: PerfedError) -> str:
    cause, cure = (" ".join(text.split("Traceback")[0].split()) for text in (error.cause, error.cure))
    if "Traceback" in error.cure + error.cause:
        cure = f"{cure} Run with {DETAILS}=1 for details.".strip()
    return f"{cause} {cure}".strip()


def _detail() -> None:
    if os.environ.get(DETAILS):
        typer.echo(traceback.format_exc(), err=True)
