"""Runs beside each other: those that differ only in their seed are one group, and a group has a mean and a spread."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from srtrl.metrics import MetricRow, read_metrics
from srtrl.recipe import Recipe
from srtrl.recipe_file import load_recipe
from srtrl.report.run_data import require_run
from srtrl.resolve import suggestion
from srtrl.trainer.run_metrics import summarise_run

FREE_FIELDS = frozenset({"seed", "name", "output_dir", "log"})
"""Sections of a recipe in which the runs of a group may differ: what is learned depends on the seed alone."""
SEED_ENDING = re.compile(r"[-_.](seed|s)?[-_.]?\d*$")
"""What the common part of run names such as `ppo_s0`, `ppo_s1` ends with."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Spread:
    """One figure over the runs of a group."""

    mean: float
    min: float
    max: float
    sd: float | None
    """Sample standard deviation; None of one run."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ComparedRun:
    """One run, finished or not, and one metric of it."""

    folder: Path
    recipe: Recipe
    rows: Sequence[MetricRow]
    values: Mapping[int, float]
    """The metric by step, in the order of steps; step 0 is the policy before training."""

    @property
    def num_steps(self) -> int:
        """Training steps done."""
        return sum(row["step"] > 0 for row in self.rows)

    @property
    def is_finished(self) -> bool:
        """Whether all of the recipe's steps are done."""
        return self.num_steps >= self.recipe.train.num_steps


@dataclass(kw_only=True, slots=True, frozen=True)
class RunGroup:
    """Runs of one recipe."""

    label: str
    runs: Sequence[ComparedRun]
    """By seed."""
    steps: Sequence[int]
    """Steps at which every run has the metric, ascending; never empty."""
    before: Spread
    """The metric at the first of `steps`."""
    after: Spread | None
    """The metric at the last of `steps`; None where there is only one."""
    change: Spread | None
    """Of each run, `after` - `before`."""
    seconds: Spread
    """All stages up to the last of `steps`."""
    num_response_tokens: Spread
    """Sampled for training up to there."""

    @property
    def means(self) -> list[float]:
        """Mean of the metric over the runs at each of `steps`."""
        return [fmean(run.values[step] for run in self.runs) for step in self.steps]


def group_runs(folders: Sequence[Path], metric: str) -> list[RunGroup]:
    """Read run folders and put the runs that differ only in seed and name together, in the order given.

    An interrupted run holds its group back: the figures of a group are those of the last step that all its runs have,
    so that like is compared with like.

    Args:
        folders: Run folders.
        metric: A name of `metrics.jsonl`, such as `eval/accuracy`.

    Raises:
        ValueError: a folder is given twice or is not a run's, or a run has not logged the metric.
    """
    resolved = [folder.resolve() for folder in folders]
    for index, folder in enumerate(resolved):
        if folder in resolved[:index]:
            raise ValueError(f"{folders[index]} is given twice")
    grouped: dict[str, list[ComparedRun]] = {}
    for run in [_read_run(folder, metric) for folder in folders]:
        grouped.setdefault(_what_is_learned(run.recipe), []).append(run)
    groups = [sorted(runs, key=lambda run: run.recipe.seed) for runs in grouped.values()]
    labels = [_label(runs) for runs in groups]
    return [
        _make_group(label if labels.count(label) == 1 else str(runs[0].folder), runs, metric)
        for label, runs in zip(labels, groups, strict=True)
    ]


def spread(values: Sequence[float]) -> Spread:
    """Mean, range and sample standard deviation of one figure of each run."""
    return Spread(mean=fmean(values), min=min(values), max=max(values), sd=stdev(values) if len(values) > 1 else None)


def _read_run(folder: Path, metric: str) -> ComparedRun:
    require_run(folder)
    rows = read_metrics(folder / "metrics.jsonl")
    values = {int(row["step"]): row[metric] for row in rows if metric in row}
    if not values:
        names = sorted({name for row in rows for name in row} - {"step"})
        there = f"there: {', '.join(names)}" if names else "it has no complete row yet"
        raise ValueError(f"{folder} has not logged `{metric}`{suggestion(metric, names) or ';'} {there}")
    return ComparedRun(folder=folder, recipe=load_recipe(folder / "recipe.yaml"), rows=rows, values=values)


def _what_is_learned(recipe: Recipe) -> str:
    """Equal for recipes that learn the same but for chance."""
    return json.dumps(recipe.model_dump(exclude=set(FREE_FIELDS)), sort_keys=True, default=str)


def _label(runs: Sequence[ComparedRun]) -> str:
    """The common beginning of the runs' names without the seed, or the first run's name."""
    names = [run.recipe.name for run in runs]
    common = names[0]
    for name in names[1:]:
        while not name.startswith(common):
            common = common[:-1]
    if len(set(names)) == 1:
        return names[0]
    return SEED_ENDING.sub("", common) or names[0]


def _make_group(label: str, runs: Sequence[ComparedRun], metric: str) -> RunGroup:
    steps = sorted(set.intersection(*(set(run.values) for run in runs)))
    if not steps:
        places = ", ".join(f"{run.folder}: {min(run.values)} to {max(run.values)}" for run in runs)
        raise ValueError(f"the runs of {label} have `{metric}` at no common step ({places}); leave one out")
    first, last = steps[0], steps[-1]
    summaries = [
        summarise_run(run.recipe.name, [row for row in run.rows if row["step"] <= last], interrupted=False)
        for run in runs
    ]
    is_pair = last > first
    return RunGroup(
        label=label,
        runs=runs,
        steps=steps,
        before=spread([run.values[first] for run in runs]),
        after=spread([run.values[last] for run in runs]) if is_pair else None,
        change=spread([run.values[last] - run.values[first] for run in runs]) if is_pair else None,
        seconds=spread([sum(summary.seconds.values()) for summary in summaries]),
        num_response_tokens=spread([summary.num_response_tokens for summary in summaries]),
    )
