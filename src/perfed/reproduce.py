"""Run a recipe and set what was measured beside what was published."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from perfed import config as configuration
from perfed import grid, measured, rundir
from perfed.comparison import same_run
from perfed.config import Config
from perfed.errors import ConfigError, StoreError
from perfed.grid import Job, Look
from perfed.joining import joined, joined_rates, results_in, taken, taken_rates, told
from perfed.ran import Ran, Runs
from perfed.recipes import Budget, Cell, Recipe
from perfed.result import Result
from perfed.standing import comparable
from perfed.weigh import weigh

ANOTHER = "Give another --runs, or delete that run. If --tune chose its learning rate, put that into [tuned]."
Keep = Callable[[dict[str, Any]], object]
"""Told the facts whenever a run has ended."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a recipe is run."""

    recipe: Recipe
    budget: Budget
    out: Path
    data_dir: str | None = None
    cores: int = 1
    side_by_side: bool = True
    only: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    others: Runs = field(default_factory=dict)
    """runs that results files tell of"""
    look: Look | None = None

    @property
    def cells(self) -> list[Cell]:
        """The cells to run."""
        return self.recipe.chosen(self.budget, list(self.only), list(self.within))

    def config(self, cell: Cell, seed: int, **changes: Any) -> Config:
        """The configuration of a run."""
        words = self.recipe.run_words(self.budget, cell, own_data=self.data_dir is not None)
        if self.data_dir:
            words["data_dir"] = self.data_dir
        method = self.recipe.hyper(self.budget, cell) | changes.pop("method", {})
        return configuration.resolve(words | {"method": method, "seed": seed} | changes)

    @cached_property
    def makers(self) -> dict[Cell, Cell]:
        """The cell whose runs each cell tells of: the first one with the same configuration, mostly itself."""
        first: dict[str, Cell] = {}
        return {cell: first.setdefault(self.words(cell, 0), cell) for cell in self.recipe.cells}

    def words(self, cell: Cell, seed: int) -> str:
        """All that decides about a run, as text."""
        return json.dumps(self.config(cell, seed).identity(), sort_keys=True)

    def place(self, cell: Cell, seed: int) -> Path:
        """The directory of a run; cells with the same configuration have one in common."""
        cell = self.makers[cell]
        base = self.out / f"@{cell.setting}" if cell.setting else self.out
        return base / cell.label / self.recipe.entries[cell.label].method / str(seed)

    def job(self, cell: Cell, seed: int) -> Job:
        """A run to make."""
        name = f"{cell.label} ({cell.setting})" if cell.setting else cell.label
        return Job(name, self.config(cell, seed), self.place(cell, seed), cure=ANOTHER)

    def finished(self) -> Runs:
        """All runs of the recipe that are finished: in `out`, also those of earlier calls, and in `others`."""
        found: Runs = {}
        for cell in self.recipe.cells:
            place = self.place(cell, 0).parent
            seeds = sorted(int(p.name) for p in place.iterdir() if p.name.isdigit()) if place.is_dir() else []
            found[cell] = [self._kept(cell, seed) for seed in seeds if rundir.is_finished(place / str(seed))]
        found = joined(found, self.others, "--join")
        return {cell: some for cell, some in found.items() if some}

    def _kept(self, cell: Cell, seed: int) -> Ran:
        """A run of this call or of an earlier one; what another recipe would say of it must not be mixed in."""
        result = Result.load(place := self.place(cell, seed))
        same_run(result.config, self.config(cell, seed), place, ANOTHER)
        return Ran.of(result, self.recipe, self.budget, cell.setting)

    def facts(self, runs: Runs | None = None) -> dict[str, Any]:
        """What the results file holds by now, or would hold of these runs."""
        runs = self.finished() if runs is None else runs
        first = {cell.setting: cell for cell in reversed(list(runs))}
        configs = {setting: self._config_of_all(cell) for setting, cell in first.items()}
        return measured.facts(self.recipe, self.budget, runs, configs)

    def _config_of_all(self, cell: Cell) -> dict[str, Any]:
        """What all methods of a cell's setting are run with, apart from words that single ones change."""
        entries = self.recipe.entries
        plain = replace(self.recipe, entries=entries | {cell.label: replace(entries[cell.label], run={})})
        words = replace(self, recipe=plain).config(cell, 0).identity()
        return {key: value for key, value in words.items() if key not in ("method", "seed")}

    def join(self, sources: Iterable[Path]) -> Plan:
        """The plan with the runs of results files, which are not made again."""
        others, files = self.others, list(sources)
        if self.recipe.dry and files:
            raise _counted(self.recipe, "join")
        for source in files:
            others = joined(others, taken(self, source), source)
        plan = replace(self, others=others)
        plan.finished()  # refuses what does not belong together before anything is computed
        return plan

    def lost(self, place: Path, seeds: Iterable[int] = ()) -> list[str]:
        """The runs of a results file that are neither finished nor made by a call with these seeds."""
        if self.recipe.dry or not place.exists():
            return []
        try:
            if results_in(place).get("recipe") != self.recipe.name:
                return []
        except StoreError:  # damaged: to be replaced
            return []
        try:
            before = told(self, place)
        except StoreError as error:
            raise StoreError(
                f"{place} would be replaced, and what it has cannot be kept: {error.cause}",
                "Move it elsewhere, or give another --results.",
            ) from None
        kept = {(cell, ran.seed) for cell, some in self.finished().items() for ran in some}
        running, tries = {self.makers[cell] for cell in self.cells}, list(seeds)
        kept |= {(cell, seed) for cell in self.recipe.cells if self.makers[cell] in running for seed in tries}
        runs = [(cell, ran.seed) for cell, some in before.items() for ran in some]
        return [f"{cell.name}, seed {seed}" for cell, seed in runs if (cell, seed) not in kept]

    def keep_all(self, seeds: Iterable[int], place: Path) -> None:
        """Refuse to replace a results file by one that lacks some of its runs."""
        if lost := self.lost(place, seeds):
            which = f"a run ({lost[0]})" if len(lost) == 1 else f"{len(lost)} runs (first of all {lost[0]})"
            raise StoreError(
                f"{place} tells of {which} that would be gone: not in {self.out}.",
                f"Keep what it tells with --join {place}, or give another --results.",
            )


def reproduce(
    plan: Plan, seeds: Iterable[int] = (0,), *, top: int = 0, top_seeds: Iterable[int] = (), keep: Keep | None = None
) -> dict[str, Any]:
    """Run every cell with every seed, skipping what is done; the facts to keep.

    Then the `top` methods of every setting, by the mean of its first column, are run with `top_seeds` too.
    """
    if plan.recipe.dry:
        _all_or_nothing(plan)
        return measured.dry_facts(plan.recipe, counted(plan.recipe))
    plan.finished()  # refuses runs of another recipe before anything is computed
    tries = list(seeds)
    _run(plan, [(cell, seed) for seed in tries for cell in plan.cells], keep)
    if top:
        best = best_cells(plan, top)
        _run(plan, [(cell, seed) for seed in top_seeds for cell in best], keep)
    return plan.facts()


def _all_or_nothing(plan: Plan) -> None:
    """A table that is counted is counted as a whole."""
    for option, names in (("only", plan.only), ("settings", plan.within)):
        if names:
            raise _counted(plan.recipe, option)


def _counted(recipe: Recipe, option: str) -> ConfigError:
    cure = f"Leave --{option} out: counting takes no time."
    return ConfigError(f"The recipe {recipe.name} is counted as a whole, not run.", cure)


def _run(plan: Plan, wanted: Sequence[tuple[Cell, int]], keep: Keep | None) -> None:
    elsewhere = {(cell, ran.seed) for cell, some in plan.others.items() for ran in some}
    missing = [(cell, seed) for cell, seed in wanted if (cell, seed) not in elsewhere]
    jobs = list({plan.place(cell, seed): plan.job(cell, seed) for cell, seed in reversed(missing)}.values())[::-1]
    if plan.budget != "smoke" and len(jobs) > 1:
        weigh(jobs)
    ended = 0

    def look(now: Sequence[Job]) -> None:
        nonlocal ended
        done = sum(job.result is not None for job in now)
        if keep and done > ended:
            keep(plan.facts())
        ended = done
        if plan.look:
            plan.look(now)

    grid.run(jobs, cores=plan.cores, side_by_side=plan.side_by_side, look=look)


def best_cells(plan: Plan, top: int) -> list[Cell]:
    """The best methods of every setting by its first column; one of those that share their runs."""
    rows, best = plan.facts()["rows"], []
    for setting in plan.recipe.settings:
        if column := next((c for c in plan.recipe.columns if c.setting == setting), None):
            held = {Cell(setting, label): value for label, value in comparable(rows, column.key).items()}
            distinct = {plan.makers[cell]: cell for cell in held if cell in plan.cells}
            best += sorted(distinct.values(), key=lambda cell: held[cell], reverse=not column.falls)[:top]
    return best


def tune(plan: Plan) -> dict[str, Any]:
    """Try the recipe's learning rates with every method, in its first setting, and choose on validation data.

    Every method gets the same rates, rounds, partition and seed. Test data has no part in it.
    """
    recipe = plan.recipe
    if recipe.tune is None:
        raise ConfigError(
            f"The recipe {recipe.name} has nothing to tune.", "It has no [tune]: its learning rates are fixed."
        )
    plain = replace(plan, recipe=replace(recipe, tuned={}))
    setting = plain.cells[0].setting
    cells = [cell for cell in plain.cells if cell.setting == setting]
    jobs: dict[tuple[str, float], Job] = {}
    for cell in cells:
        words = recipe.run_words(plan.budget, cell, own_data=plan.data_dir is not None)
        rounds = max(1, round(words["rounds"] * recipe.tune.rounds))
        for lr in recipe.tune.lr:
            config = plain.config(
                cell, 0, method={"lr": lr}, rounds=rounds, eval_every=rounds, val_fraction=recipe.tune.val_fraction,
                new=False,
            )  # fmt: skip
            place = plan.out / "tune" / cell.label / f"{lr:g}"
            jobs[cell.label, lr] = Job(f"{cell.label}, lr {lr:g}", config, place, cure=ANOTHER)
    if plan.budget != "smoke":
        weigh(list(jobs.values()))
    grid.run(list(jobs.values()), cores=plan.cores, side_by_side=plan.side_by_side, look=plan.look)
    scores: dict[str, dict[str, float | None]] = {cell.label: {} for cell in cells}
    for (label, lr), job in jobs.items():
        value = job.result.metrics.get("local.val") if job.result else None
        scores[label][f"{lr:g}"] = None if value is None else 100 * value
    return {
        "setting": setting,
        "rounds": next(iter(jobs.values())).config.rounds,
        "val_fraction": recipe.tune.val_fraction,
        "seed": 0,
        "scores": scores,
        "chosen": {label: best_rate(tried) for label, tried in scores.items()},
    }


def best_rate(tried: Mapping[str, float | None]) -> float:
    """The rate with the highest validation accuracy; the smaller of equals."""
    judged = {float(lr): value for lr, value in tried.items() if value is not None}
    if not judged:
        raise ConfigError("No learning rate has an accuracy on validation data.", "Give [tune] a larger val_fraction.")
    return max(sorted(judged), key=lambda lr: judged[lr])


def counted(recipe: Recipe) -> dict[str, dict[str, float]]:
    """A table of costs, from the dry ledger: nothing is trained. In units of 10^9."""
    from perfed import nets
    from perfed.core.registry import make
    from perfed.engine.cost import estimate

    found: dict[str, dict[str, float]] = {}
    sizes = [recipe.dry["samples"]] * recipe.dry["clients"]
    shape = (recipe.dry["channels"], recipe.dry["side"], recipe.dry["side"])
    for label, entry in recipe.entries.items():
        method = make(entry.method, **entry.hyper)
        net = method.build(nets.build(str(recipe.words["net"]), shape, recipe.dry["classes"]))
        cost = estimate(net, method, int(recipe.words["rounds"]), sizes)
        found[label] = {"param_batches": cost.param_batches / 1e9, "flops": cost.flops / 1e9}
    return found


def rates_in(place: Path, recipe: str) -> dict[str, Any] | None:
    """How learning rates were chosen, if a results file of this recipe tells it."""
    try:
        found = rundir.read_json(place) if place.exists() else {}
    except StoreError:  # damaged: to be replaced
        return None
    return found.get("tuning") if found.get("recipe") == recipe else None


def write(found: dict[str, Any], results: Path) -> Path:
    """Keep the facts; how learning rates were chosen before stays with them, if they are those that were taken."""
    place = measured.results_file(found["recipe"], found["budget"], results)
    results.mkdir(parents=True, exist_ok=True)
    if before := rates_in(place, found["recipe"]):
        found = found | {"tuning": joined_rates(before, found.get("tuning", before))}
    if "tuning" in found:
        found = found | {"tuning": taken_rates(found["tuning"], found["rows"])}
        found = found if found["tuning"]["chosen"] else {k: v for k, v in found.items() if k != "tuning"}
    rundir.write_json(place, found)
    return place
