"""Write the measured tables into the pages: every number in the docs comes from a file under results/.

    python docs/tables.py            fill the marked places in README.md and docs/
    python docs/tables.py --check    fail if a page is not what results/ says

A place is marked by `<!-- results:NAME -->` and `<!-- end -->`; NAME is `demo` or a recipe.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLACE = re.compile(r"<!-- results:(\S+) -->.*?<!-- end -->", re.DOTALL)


def table(name: str) -> str:
    """The table that belongs at a place, with what it was made from."""
    path = ROOT / "results" / f"{name}.json"
    if not path.exists():
        return "Not measured yet."
    found = json.loads(path.read_text())
    return leaderboard(found) if name == "demo" else reproduction(name, found)


def leaderboard(found: dict[str, Any]) -> str:
    """The demo's ranking."""
    from perfed.report.tables import markdown

    return f"{markdown(found['rows']).strip()}\n\nMade by `perfed demo`; [results/demo.json](results/demo.json)."


def reproduction(name: str, found: dict[str, Any]) -> str:
    """A recipe's table."""
    from perfed.reproduce import markdown

    close, compared = found["within_2_points"]
    budget = f" --budget {found['budget']}"
    count = len(found["seeds"])
    seeds = f"{count} seed{'s' if count > 1 else ''}"
    return (
        f"{found['title']} ({found['paper']}, {found['table']}). {seeds}, accuracy in per cent.\n\n"
        f"{markdown(found).strip()}\n\n{close} of {compared} within 2 points. Made by"
        f" `perfed reproduce {found['recipe']}{budget} --seeds {count}`; results/{name}.json,"
        f" partition {found['partition_sha256'][0][:12]}, torch {found['versions']['torch']}."
    )


def filled(text: str) -> str:
    """A page with every marked place filled anew."""
    return PLACE.sub(lambda m: f"<!-- results:{m[1]} -->\n{table(m[1])}\n<!-- end -->", text)


def main() -> None:
    """Fill or check all pages."""
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            stale.append(page)
            if "--check" not in sys.argv:
                page.write_text(new, encoding="utf-8")
    for page in stale:
        print(f"{'stale' if '--check' in sys.argv else 'written'}: {page.relative_to(ROOT)}")
    if stale and "--check" in sys.argv:
        sys.exit("Run python docs/tables.py.")


if __name__ == "__main__":
    main()
