"""The leaderboard of finished runs: methods by mean accuracy, with the spread over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfed import config as configuration
from perfed import rundir
from perfed.errors import StoreError
from perfed.result import Result

FIGURE = "comparison.png"


@dataclass
class Comparison:
    """Finished runs by method, one per seed."""

    runs: dict[str, list[Result]]
    directory: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The leaderboard, best mean accuracy first."""
        used = [results[0].config.net for results in self.runs.values()]
        usual = max(used, key=used.count)
        rows = [_row(name, results) | _unlike(results[0].config.net, usual) for name, results in self.runs.items()]
        return sorted(rows, key=lambda row: -row["mean"])

    def facts(self) -> dict[str, Any]:
        """What leaderboard.json holds."""
        first = next(iter(self.runs.values()))
        shared = {k: v for k, v in first[0].config.identity().items() if k not in ("method", "seed")}
        return {
            "config": shared,
            "seeds": [result.config.seed for result in first],
            "partition_sha256": {str(result.config.seed): result.partition_sha256 for result in first},
            "rows": self.rows,
        }

    def table(self) -> str:
        """The leaderboard as text."""
        from perfed.report.tables import leaderboard_table, plain_text

        return plain_text(leaderboard_table(self.rows, self.title))

    @property
    def title(self) -> str:
        """What was compared, in a line."""
        results = next(iter(self.runs.values()))
        config = results[0].config
        many = f"{len(results)} seeds" if len(results) > 1 else f"seed {config.seed}"
        return f"{config.data['name']}, {config.split}, {config.clients} clients, {config.rounds} rounds, {many}"

    def write(self) -> None:
        """Write the leaderboard and the figure."""
        from perfed.report.figures import curves
        from perfed.report.tables import markdown

        curves({row["method"]: self.runs[row["method"]] for row in self.rows}, self.directory / FIGURE)
        rundir.write_json(self.directory / "leaderboard.json", self.facts())
        rundir.write(self.directory / "leaderboard.md", f"{self.title}\n\n{markdown(self.rows)}".encode())

    @classmethod
    def load(cls, directory: Path | str) -> Comparison:
        """The finished runs of a comparison."""
        place = Path(directory)
        plan = read_plan(place)
        runs = {
            name: [
                Result.load(place / name / str(s)) for s in plan["seeds"] if rundir.is_finished(place / name / str(s))
            ]
            for name in plan["methods"]
        }
        runs = {name: results for name, results in runs.items() if results}
        if not runs:
            raise StoreError(f"No run of the comparison in {place} is finished.", f"Run 'perfed resume {place}'.")
        return cls(runs, place)


def read_plan(place: Path) -> dict[str, Any]:
    """What a comparison's directory says it compares."""
    if not rundir.is_comparison(place):
        raise StoreError(f"There is no comparison in {place}.", f"Name a directory that has a {rundir.COMPARE}.")
    plan = configuration.read(place / rundir.COMPARE)
    methods, seeds, tables, shared = (plan.get(key) for key in ("methods", "seeds", "method", "config"))
    sound = (
        isinstance(methods, list) and isinstance(seeds, list) and isinstance(tables, dict) and isinstance(shared, dict)
    )
    if not sound or not all(isinstance(tables.get(name), dict) for name in methods if isinstance(name, str)):  # type: ignore[union-attr]
        raise StoreError(f"{place / rundir.COMPARE} is damaged.", "Start the comparison again in another directory.")
    return plan


def _unlike(net: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, str]:
    """The network's name, or the options by which it differs from the usual one, if it does."""
    if net["name"] != usual["name"]:
        return {"net": net["name"]}
    options = [key for key in net.keys() | usual.keys() if net.get(key) != usual.get(key)]
    return {"net": ", ".join(sorted(options))} if options else {}


def _row(name: str, results: Sequence[Result]) -> dict[str, Any]:
    means = [result.metrics["local.mean"] for result in results]

    def over(key: str) -> float | None:
        values = [result.metrics.get(key) for result in results]
        return None if None in values else statistics.fmean(v for v in values if v is not None)

    costs = {
        key: statistics.fmean(result.cost[key] for result in results)
        for key in ("bytes_up", "bytes_down", "flops", "param_batches", "seconds")
    }
    return {
        "method": name,
        "mean": statistics.fmean(means),
        "spread": statistics.stdev(means) if len(means) > 1 else None,
        "seeds": len(means),
        "weighted": over("local.weighted"),
        "std": over("local.std"),
        "worst10": over("local.worst10"),
        "new": over("new"),
        **costs,
        "state_sha256": [result.state_sha256 for result in results],
    }
