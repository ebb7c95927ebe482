"""`srtrl compare`: a metric of several runs side by side, as a table, JSON or one picture.

Runs that differ only in their seed are one group, and a group has a mean and a spread.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from srtrl.report.runs import Run

FREE_FIELDS = {"seed", "name", "output_dir", "log"}
"""Sections of a recipe in which the runs of a group may differ: what is learned depends on the seed alone."""
SEED_ENDING = re.compile(r"([-_.](seed|s)?[-_.]?)?\d+$")
"""What run names such as `ppo_s0`, `ppo_s1` end with."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Spread:
    """One figure over the runs of a group."""

    mean: float
    min: float
    max: float
    sd: float | None
    """Sample standard deviation; None for one run."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ComparedRun:
    """One run, finished or not, and one metric of it."""

    folder: str
    name: str
    seed: int
    num_steps: int
    """Training steps done."""
    is_finished: bool
    values: list[tuple[int, float]]
    """(step, metric) in the order of steps; step 0 is the policy before training."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RunGroup:
    """Runs of one recipe, as `--json` prints them."""

    label: str
    first_step: int
    """The first step at which every run has the metric."""
    last_step: int
    before: Spread
    """The metric at `first_step`."""
    after: Spread | None
    """The metric at `last_step`; None where that is the same."""
    change: Spread | None
    """Of each run, `after` - `before`."""
    seconds: Spread
    """All stages up to `last_step`."""
    num_response_tokens: Spread
    """Sampled for training up to there."""
    runs: list[ComparedRun]
    """By seed."""


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    *,
    metric: Annotated[
        str | None,
        typer.Option(help="Name of the metric in metrics.jsonl; by default eval/accuracy, or eval/reward without it."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the metric over the steps into this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare runs by one metric.

    Runs that differ only in their seed share a line of the table, with mean, minimum and maximum. The figures are those
    of the first and of the last step at which all runs of the line have the metric.
    """
    from srtrl.metrics import write_atomic

    if out is not None and out.suffix != ".svg":
        raise ValueError(f"--out: expected a file name that ends in .svg, found {out}")
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out: there is no folder {out.parent}")
    metric = metric or default_metric(runs)
    groups = group_runs(runs, metric)
    if out is not None:
        write_atomic(out, draw_comparison(groups, metric))
    if as_json:
        print(json.dumps({"metric": metric, "groups": [asdict(group) for group in groups]}))
        return
    from rich.console import Console

    Console().print(comparison_table(groups, metric))
    for group in groups:
        for run in group.runs:
            if not run.is_finished:
                print(
                    f"{run.folder} has done {run.num_steps} steps and is not finished: it is still running, or it was "
                    f"interrupted; the figures of {group.label} are those up to step {group.last_step}"
                )
    if out is not None:
        print(f"the picture is in {out}")


def default_metric(folders: Sequence[Path]) -> str:
    """`eval/accuracy`, or `eval/reward` where only that was logged: the task has no verifier."""
    from srtrl.report.runs import read_run

    names = {name for folder in folders for row in read_run(folder).rows for name in row}
    return "eval/reward" if "eval/reward" in names and "eval/accuracy" not in names else "eval/accuracy"


def group_runs(folders: Sequence[Path], metric: str) -> list[RunGroup]:
    """Read run folders and put the runs that differ only in seed and name together, in the order given.

    An interrupted run limits its group: the figures of a group are those of the last step that all its runs have, so
    that like is compared with like.

    Args:
        folders: Run folders.
        metric: A name of `metrics.jsonl`, such as `eval/accuracy`.

    Raises:
        ValueError: a folder is given twice or is not a run's, or a run has not logged the metric.
    """
    from srtrl.report.runs import read_run

    resolved = [folder.resolve() for folder in folders]
    for index, folder in enumerate(resolved):
        if folder in resolved[:index]:
            raise ValueError(f"{folders[index]} is given twice")
    grouped: dict[str, list[Run]] = {}
    for run in map(read_run, folders):
        what_is_learned = run.recipe.model_dump_json(exclude=FREE_FIELDS)
        grouped.setdefault(what_is_learned, []).append(run)
    groups = [sorted(runs, key=lambda run: run.recipe.seed) for runs in grouped.values()]
    labels = [_label([run.recipe.name for run in runs]) for runs in groups]
    return [
        _make_group(label if labels.count(label) == 1 else str(runs[0].folder), runs, metric)
        for label, runs in zip(labels, groups, strict=True)
    ]


def _label(names: list[str]) -> str:
    """The runs' name without the seed where that is the same for all, else the first run's name."""
    common = {SEED_ENDING.sub("", name) for name in names}
    return common.pop() or names[0] if len(set(names)) > 1 == len(common) else names[0]


def _values(run: "Run", metric: str) -> dict[int, float]:
    """The metric by step."""
    from srtrl.resolve import suggestion

    values = {int(row["step"]): row[metric] for row in run.rows if metric in row}
    if not values:
        names = sorted({name for row in run.rows for name in row} - {"step"})
        near = suggestion(metric, names) or ";"
        raise ValueError(f"{run.folder} has not logged `{metric}`{near} there: {', '.join(names)}")
    return values


def _make_group(label: str, runs: Sequence["Run"], metric: str) -> RunGroup:
    from srtrl.run.metrics import summarise_run

    values = [_values(run, metric) for run in runs]
    steps = set.intersection(*map(set, values))
    if not steps:
        places = ", ".join(f"{run.folder}: {min(of)} to {max(of)}" for run, of in zip(runs, values, strict=True))
        raise ValueError(f"the runs of {label} have `{metric}` at no common step ({places}); leave one out")
    first, last = min(steps), max(steps)
    summaries = [
        summarise_run(run.recipe.name, [row for row in run.rows if row["step"] <= last], interrupted=False)
        for run in runs
    ]
    return RunGroup(
        label=label,
        first_step=first,
        last_step=last,
        before=spread([of[first] for of in values]),
        after=spread([of[last] for of in values]) if last > first else None,
        change=spread([of[last] - of[first] for of in values]) if last > first else None,
        seconds=spread([sum(summary.seconds.values()) for summary in summaries]),
        num_response_tokens=spread([summary.num_response_tokens for summary in summaries]),
        runs=[
            ComparedRun(
                folder=str(run.folder),
                name=run.recipe.name,
                seed=run.recipe.seed,
                num_steps=run.num_steps,
                is_finished=run.is_finished,
                values=list(of.items()),
            )
            for run, of in zip(runs, values, strict=True)
        ],
    )


def spread(values: Sequence[float]) -> Spread:
    """Mean, range and sample standard deviation of one figure of each run."""
    return Spread(mean=fmean(values), min=min(values), max=max(values), sd=stdev(values) if len(values) > 1 else None)


def comparison_table(groups: Sequence[RunGroup], metric: str) -> "Table":
    """The groups, one a line, for people."""
    from rich.table import Table

    table = Table("run", title=f"{metric}, mean over seeds (least to greatest)")
    for name in ("seeds", "steps", "before", "after", "change", "seconds", "response tokens"):
        table.add_column(name, justify="right")
    for group in groups:
        table.add_row(
            group.label,
            f"{len(group.runs)} ({', '.join(str(run.seed) for run in group.runs)})",
            f"{group.first_step} to {group.last_step}",
            _cell(group.before, ".4g"),
            _cell(group.after, ".4g"),
            _cell(group.change, "+.4g"),
            _cell(group.seconds, ",.0f"),
            _cell(group.num_response_tokens, ",.0f"),
        )
    return table


def _cell(figure: Spread | None, digits: str) -> str:
    if figure is None:
        return "-"
    mean, least, greatest = (format(value, digits) for value in (figure.mean, figure.min, figure.max))
    return mean if figure.sd is None else f"{mean} ({least} to {greatest})"


def draw_comparison(groups: Sequence[RunGroup], metric: str) -> str:
    """SVG text: the mean of each group over the steps and, where it has several runs, each of them as a thin line."""
    from matplotlib.figure import Figure

    from srtrl.report.charts import chart_style, draw_line, to_svg

    with chart_style():
        figure = Figure(figsize=(5.6, 3.2), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel=metric)
        for group in groups:
            by_run = [dict(run.values) for run in group.runs]
            steps = sorted(set.intersection(*map(set, by_run)))
            means = [fmean(values[step] for values in by_run) for step in steps]
            is_one = len(by_run) == 1
            label = group.label if is_one else f"{group.label} (mean of {len(by_run)})"
            line = draw_line(axes, steps, means, label=label)
            for values in [] if is_one else by_run:
                axes.plot(list(values), list(values.values()), color=line.get_color(), linewidth=0.8, alpha=0.4)
        axes.legend()
        return to_svg(figure)
