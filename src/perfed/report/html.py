"""Pages that are one file and ask nothing of the network: style, program and data stand inside."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from perfed import rundir

SCRIPTS = ("dom.js", "chart.js")
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page(template: str, scripts: Sequence[str], **values: Any) -> str:
    """A page from its template, with style and program inside and nothing else allowed to run."""
    from jinja2 import Environment
    from markupsafe import Markup

    style = _read("page.css")
    script = "\n".join(_read(name) for name in (*SCRIPTS, *scripts))
    whole = Environment(autoescape=True).from_string(_read(template))
    return whole.render(
        style=Markup(style),
        script=Markup(script),
        style_hash=_allowed(style),
        script_hash=_allowed(script),
        version=_version(),
        **values,
    )


def embedded(value: Any) -> Any:
    """Plain values as JSON that cannot end the element it stands in."""
    from markupsafe import Markup

    text = json.dumps(rundir.finite(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for letter, escape in ESCAPES.items():
        text = text.replace(letter, escape)
    return Markup(text.encode("utf-8", "replace").decode())  # a lone surrogate is no text


def _read(name: str) -> str:
    return (files("perfed.report") / "web" / name).read_text(encoding="utf-8")


def _allowed(text: str) -> str:
    return "sha256-" + base64.b64encode(sha256(text.encode()).digest()).decode()


def _version() -> str:
    try:
        return version("perfed")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
