"""Write the measured tables into the pages: every number in the docs comes from a file under results/.

    python docs/tables.py            fill the marked places in README.md and docs/, write docs/reproductions/
    python docs/tables.py --check    fail if a page is not what results/ says

A place is marked by `<!-- results:NAME -->` and `<!-- end -->`; NAME is `demo`, `flower` or a recipe,
`RECIPE:COLUMN` one column of it, `reproductions` what is measured of all of them.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
REPRODUCTIONS = ROOT / "docs" / "reproductions"
PLACE = re.compile(r"<!-- results:(\S+) -->.*?<!-- end -->", re.DOTALL)


def table(name: str) -> str:
    """The table that belongs at a place, with what it was made from."""
    from perfed.report.reproductions import overview

    if name == "reproductions":
        return overview(RESULTS, "docs/reproductions")
    name, _, column = name.partition(":")
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return "Not measured yet."
    found = json.loads(path.read_text())
    if name in OWN:
        return OWN[name](found)
    return reproduction(name, found, column)


def leaderboard(found: dict[str, Any]) -> str:
    """The demo's ranking."""
    from perfed.report.tables import markdown

    return f"{markdown(found['rows']).strip()}\n\nMade by `perfed demo`; [results/demo.json](results/demo.json)."


def side_by_side(found: dict[str, Any]) -> str:
    """Seconds of each tool, and how many times as long as perfed it took."""
    text = []
    for name, work in found["workloads"].items():
        own = work["tools"].get("perfed", {})
        text += [
            f"**{name}**: {work['title']}.",
            "",
            "| tool | train s/round | ratio | in single repeats | evaluation s | ratio | accuracy | peak MB |",
        ]
        text += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
        for tool, one in work["tools"].items():
            if "error" in one:
                text.append(f"| {tool} | failed | | | | | | |")
                continue
            ratios = [one[part] / own[part] if own else float("nan") for part in ("train", "eval")]
            accuracy = 100 * sum(one["accuracy"]) / len(one["accuracy"])
            each = [a / b for a, b in zip(one["trains"], own["trains"], strict=False)]
            text.append(
                f"| {tool} {one['version']} | {one['train']:.3f} | {ratios[0]:.2f} |"
                f" {min(each):.2f} to {max(each):.2f} | {one['eval']:.3f} |"
                f" {ratios[1]:.2f} | {accuracy:.2f} | {one['peak_mb']} |"
            )
        text += ["", accuracies(work), ""]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return "\n".join(text) + (
        f"\nTraining: the least time per sample of {found['repeats']} repeats times the mean number of samples, mean of"
        f" {found['rounds']} rounds; evaluation: the least of {found['repeats']}. On {found['machine']}; {versions}."
        " Made by `make bench`; results/bench.json."
    )


def accuracies(work: dict[str, Any]) -> str:
    """Whether the tools are found to differ in accuracy, and how large a difference would have been found."""
    from scipy import stats

    if not work["accuracies_agree"]:
        return "On the same divisions the accuracies do not agree."
    own, *others = (np.array(one["accuracy"]) for one in work["tools"].values() if "error" not in one)
    if not others or len(own) < 2:
        return "Nothing to compare accuracies by."
    spread = max(float(np.std(other - own, ddof=1)) for other in others)
    least = max(1.0, 100 * float(stats.t.ppf(0.995, len(own) - 1)) * spread / len(own) ** 0.5)
    return (
        f"On the same divisions no difference in accuracy is found; as much as the {len(own)} repeats vary, a mean"
        f" difference to every tool would count from {least:.1f} points on."
    )


def flower(found: dict[str, Any]) -> str:
    """What Flower costs per round, and what goes over the wire."""
    lines = ["| engine | clients | s per round | beside one process |", "|---|---:|---:|---:|"]
    for clients, row in found.get("simulated", {}).items():
        local, there = row["local_seconds"], row["flower_seconds"]
        lines.append(f"| simulation | {clients} | {there:.2f} | {there / local:.1f} x |")
    if wire := found.get("deployed"):
        local, there = wire["local_seconds_per_round"], wire["seconds_per_round"]
        lines.append(f"| deployment | 3 | {there:.1f} | {there / local:.1f} x |")
    text = "\n".join(lines)
    if wire:
        parts = [wire[f"{what}_bytes"] / 1e6 for what in ("training", "scoring")]
        text += (
            f"\n\nBytes on the wire of the deployment, TLS and all, over {wire['rounds']} rounds with the CNN:"
            f" {wire['wire_bytes'] / 1e6:.1f} MB, {wire['ratio']:.3f} times the {sum(parts):.1f} MB of the ledger"
            f" ({parts[0]:.1f} MB to train, {parts[1]:.1f} MB only to be scored and for the last model)."
        )
    if kills := found.get("kills"):
        text += "\n\n" + killed(kills)
    made = "Made by `benchmarks/flower.py` on two cores, where ratios count; results/flower.json, torch"
    return f"{text}\n\n{made} {found['versions']['torch']}."


def scaling(found: dict[str, Any]) -> str:
    """Rounds of a growing federation, of more workers, and with many private states."""
    groups = found["groups"]
    text = ["| clients | participants | CPU s per round | beside 100 clients | memory that rounds add, MB |"]
    text += ["|---:|---:|---:|---:|---:|"]
    first = groups["growth"][0]["cpu_seconds"]
    for row in groups["growth"]:
        case, seconds = row["case"], row["cpu_seconds"]
        cells = f"{seconds:.3f} | {seconds / first:.2f} x | {row['grown_mb']:.0f}"
        text.append(f"| {case['clients']:,} | {case['participants']} | {cells} |")
    one, two = (row["seconds"] for row in groups["workers"])
    text += ["", f"Two workers are {one / two:.2f} times as fast as one (CNN, 20 participants).", ""]
    text += ["| clients | participants | method | network | s per round | s to score all | cached, MB | peak, MB |"]
    text += ["|---:|---:|---|---|---:|---:|---:|---:|"]
    for row in groups["private"]:
        case = row["case"]
        cells = f"{row['seconds']:.1f} | {row['score_seconds']:.1f} | {row['cache_mb']:.0f} | {row['peak_mb']:.0f}"
        text.append(f"| {case['clients']:,} | {case['participants']:,} | {case['method']} | {case['net']} | {cells} |")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    made = f"Best of {found['repeats']} on {found['machine']}; {versions}. Made by `python benchmarks/scaling.py`"
    return "\n".join(text) + f"\n\n{made}; results/scaling.json."


def kernels(found: dict[str, Any]) -> str:
    """How much of a round is torch's."""
    text = ["| workload | CPU s of a round | the same, profiled | inside torch's operators | share |"]
    text += ["|---|---:|---:|---:|---:|"]
    for name, one in found["workloads"].items():
        low, high = sorted((one["share"], min(1.0, one["inside"] / one["seconds"])))
        bounds = f"{100 * low:.0f} to {100 * high:.0f} %"
        times = f"{one['seconds']:.2f} | {one['profiled_seconds']:.2f} | {one['inside']:.2f}"
        text.append(f"| {name} | {times} | {bounds} |")
    made = f"One process on {found['machine']}; torch {found['versions']['torch']}. Made by"
    return "\n".join(text) + f"\n\n{made} `python benchmarks/kernels.py`; results/kernels.json."


def _steps(found: dict[str, Any], mode: str, heads: str, off: Callable[[dict[str, Any]], str]) -> str:
    """A training step of networks as torch does it and in a mode."""
    text = [f"| network | input | batch | ms of a step, float32 | {mode} | | {heads} |"]
    text += ["|---|---|---:|---:|---:|---:|" + "---:|" * (heads.count("|") + 1)]
    for one in found["steps"]:
        plain, ms = one["ms"]["float32"], one["ms"][mode]
        size = " x ".join(map(str, one["input"]))
        times = f"{plain:.2f} | {ms:.2f} | {plain / ms:.2f} x"
        text.append(f"| `{one['net']}` | {size} | {one['batch']} | {times} | {off(one)} |")
    known = ", which has bfloat16" if found["bfloat16"] else ", which has no bfloat16"
    machine = f"{found['machine']}{known if mode == 'bfloat16' else ''}"
    made = f"CPU time on one core of {machine}; torch {found['versions']['torch']}. Made by"
    return "\n".join(text) + f"\n\n{made} `python benchmarks/modes.py {mode}`"


def precision(found: dict[str, Any]) -> str:
    """What fewer bits are worth."""
    table = _steps(found, "bfloat16", "gradient off by", lambda one: f"{100 * one['gradient_error']:.1f} %")
    return table + "; results/precision.json."


def compiled(found: dict[str, Any]) -> str:
    """What compiled kernels are worth."""
    heads = "gradient off from float64's, float32 | compiled"

    def errors(one: dict[str, Any]) -> str:
        return " | ".join(f"{one['from_float64'][kind]:.0e}" for kind in ("float32", "compiled"))

    return _steps(found, "compiled", heads, errors) + "; results/compiled.json."


def killed(found: dict[str, Any]) -> str:
    """What became of runs in which somebody was killed at a random moment and started again."""
    names = {"site": "a site's node", "link": "the SuperLink", "server": "the ServerApp"}
    lines = [
        "| SIGKILL of | kills | runs that ended | same hash | lost updates | lost private states | s, median |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, runs in found.items():
        ended, same, faults, lost = (sum(run[key] for run in runs) for key in ("ended", "same", "faults", "lost"))
        seconds = sorted(run["seconds"] for run in runs)[len(runs) // 2]
        lines.append(f"| {names[kind]} | {len(runs)} | {ended} | {same} | {faults} | {lost} | {seconds:.0f} |")
    return "\n".join(lines)


def compute(found: dict[str, Any]) -> str:
    """Hours of the papers' tables, with and without the fast paths."""
    lines = [
        "| recipe | budget | runs | h on two cores | h without the fast paths | |",
        "|---|---|---:|---:|---:|---:|",
    ]
    total = {"fast": 0.0, "plain": 0.0}
    for name, one in found["recipes"].items():
        fast, plain = (one["hours"][kind] for kind in total)
        total = {"fast": total["fast"] + fast, "plain": total["plain"] + plain}
        times = f"{plain / fast:.2f} x" if fast else "–"
        cells = f"{one['budget']} | {one['runs']} | {fast:.2f} | {plain:.2f} | {times}"
        lines.append(f"| `{name}` | {cells} |")
    fast, plain = total["fast"], total["plain"]
    runs = sum(one["runs"] for one in found["recipes"].values())
    lines.append(f"| all | | {runs} | {fast:.1f} | {plain:.1f} | {plain / fast:.2f} x |")
    made = f"CPU time divided by two, sampled, not run, on {found['machine']}; torch {found['versions']['torch']}."
    return "\n".join(lines) + f"\n\n{made} Made by `python benchmarks/compute.py`; results/compute.json."


OWN = {
    "compiled": compiled,
    "compute": compute,
    "kernels": kernels,
    "precision": precision,
    "scaling": scaling,
    "demo": leaderboard,
    "bench": side_by_side,
    "flower": flower,
}


def reproduction(name: str, found: dict[str, Any], column: str) -> str:
    """A recipe's table, or a column of it."""
    from perfed import recipes
    from perfed.measured import markdown
    from perfed.report.reproduction import budget_note, command, seeds_note

    close, compared = found["within_2_points"]
    where = " in all columns of the table" if column else ""
    held = f"{close} of {compared} within {found['within']:g} points{where}. "
    if column:
        found = found | {
            "rows": {label: row | {"cells": {column: row["cells"][column]}} for label, row in found["rows"].items()}
        }
    recipe = recipes.load(found["recipe"])
    state = f"{seeds_note(found)}{budget_note(recipe, found)}, accuracy in per cent" if found["seeds"] else "Counted"
    return (
        f"{found['title']} ({found['paper']}, {found['table']}). {state}.\n\n"
        f"{markdown(found).strip()}\n\n{held if compared else ''}Made by"
        f" `{command(found)}`; results/{name}.json, torch {found['versions']['torch']}."
    )


def filled(text: str) -> str:
    """A page with every marked place filled anew."""
    return PLACE.sub(lambda m: f"<!-- results:{m[1]} -->\n{table(m[1])}\n<!-- end -->", text)


def wanted() -> dict[Path, str]:
    """Every page as it should be: marked places filled, and the generated pages of the reproductions."""
    from perfed import recipes
    from perfed.report.reproduction import page_text, results_of
    from perfed.report.reproductions import index

    pages = {REPRODUCTIONS / "README.md": index(RESULTS)}
    for name in recipes.names():
        if (found := results_of(RESULTS, name)) is not None:
            pages[REPRODUCTIONS / f"{name}.md"] = page_text(recipes.load(name), found)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if page not in pages:
            pages[page] = filled(page.read_text(encoding="utf-8"))
    return pages


def pictures() -> dict[Path, bytes]:
    """The plots beside the pages of the reproductions."""
    from perfed import recipes
    from perfed.report.dots import draw
    from perfed.report.reproduction import results_of

    drawn = {}
    with tempfile.TemporaryDirectory() as place:
        for name in recipes.names():
            if (found := results_of(RESULTS, name)) is not None:
                draw(found, picture := Path(place) / f"{name}.svg")
                drawn[REPRODUCTIONS / picture.name] = picture.read_bytes()
    return drawn


def main() -> None:
    """Fill or check all pages."""
    check = "--check" in sys.argv
    REPRODUCTIONS.mkdir(exist_ok=True)
    files = {page: text.encode() for page, text in wanted().items()} | pictures()
    stale = {path: held for path, held in files.items() if not path.exists() or path.read_bytes() != held}
    for path, held in stale.items():
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_bytes(held)
    if stale and check:
        sys.exit("Run python docs/tables.py.")


if __name__ == "__main__":
    main()
