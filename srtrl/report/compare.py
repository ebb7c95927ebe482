"""`srtrl compare`: a metric of several runs side by side, as a table or one picture.

Runs that differ only in their seed are one group, and a group has a mean and a spread.
"""

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from srtrl.report.runs import Run

T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)
"""97.5% quantiles of Student's t distribution of 1, 2, ... degrees of freedom; the last one is taken for more."""
FREE_FIELDS = {"seed", "name", "output_dir", "log"}
"""Sections of a recipe in which the runs of a group may differ: what is learned depends on the seed alone."""


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    *,
    metric: Annotated[
        str | None,
        typer.Option(help="Name in metrics.jsonl (reward: reward/mean); by default eval/accuracy, else eval/reward."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the metric over the steps into this file.")
    ] = None,
) -> None:
    """Compare runs by one metric.

    Runs that differ only in their seed share a row of the table, with mean, minimum and maximum. `before` and `after`
    are the first and the last step at which all runs of the row have the metric; `seconds` are those of all stages up
    to there, without compilation. The last line says which differences are more than the noise of seeds.
    """
    from rich.console import Console

    from srtrl.files import check_output, write_atomic
    from srtrl.report.charts import CREATOR
    from srtrl.report.runs import read_run

    if out is not None and out.suffix != ".svg":
        raise ValueError(f"--out: expected a file name that ends in .svg, found {out}")
    check_output("--out", out, f"<dc:title>{CREATOR}</dc:title>")
    read = [read_run(folder) for folder in runs]
    names = {name for run in read for row in run.rows for name in row}
    if metric is None:  # a task without verifier has no accuracy
        metric = "eval/reward" if "eval/reward" in names and "eval/accuracy" not in names else "eval/accuracy"
    if metric not in names and f"{metric}/mean" in names:
        metric += "/mean"
    groups = group_runs(read, metric)
    Console().print(comparison_table(groups, metric))
    for run in read:
        if not run.is_finished:
            print(f"{run.folder} has done {run.num_steps} steps and is not finished")
    print(textwrap.fill(describe_noise(groups, metric), 78))
    if out is not None:
        write_atomic(out, draw_comparison(groups, metric))
        print(f"the picture is in {out}")


@dataclass(slots=True)
class RunGroup:
    """Runs of one recipe, by seed."""

    runs: "list[Run]"
    """By seed."""
    values: list[dict[int, float]]
    """For each run step -> metric, in order; step 0 is the policy before training."""

    @property
    def label(self) -> str:
        """The folder of the first run stands for all."""
        return str(self.runs[0].folder)

    @property
    def steps(self) -> list[int]:
        """Steps at which every run has the metric; an interrupted run limits its group."""
        return sorted(set.intersection(*map(set, self.values)))


def group_runs(runs: "Sequence[Run]", metric: str) -> list[RunGroup]:
    """Put the runs that differ only in seed and name together, in the order given.

    Raises:
        ValueError: a run has not logged the metric, or runs of a group have it at no common step.
    """
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.recipe.model_dump_json(exclude=FREE_FIELDS), []).append(run)
    groups = []
    for members in grouped.values():
        members.sort(key=lambda run: run.recipe.seed)
        group = RunGroup(members, [values_of(run, metric) for run in members])
        if not group.steps:
            raise ValueError(f"the runs of {group.label} have `{metric}` at no common step; leave one out")
        groups.append(group)
    return groups


def values_of(run: "Run", metric: str) -> dict[int, float]:
    """The metric by step; ValueError, with those that there are, if the run has not logged it."""
    from srtrl.resolve import suggestion

    values = {int(row["step"]): row[metric] for row in run.rows if metric in row}
    if not values:
        names = sorted({name for row in run.rows for name in row} - {"step"})
        near, prefix = suggestion(metric, names) or ";", f"{metric.partition('/')[0]}/"
        of_group = [name for name in names if name.startswith(prefix)]
        groups = dict.fromkeys(re.sub("/.*", "/...", name) for name in names)
        raise ValueError(f"{run.folder} has not logged `{metric}`{near} there: {', '.join(of_group or groups)}")
    return values


def comparison_table(groups: Sequence[RunGroup], metric: str) -> "Table":
    """A row for each group: means over the seeds with minimum and maximum."""
    from rich.table import Table

    from srtrl.report.charts import STAGES

    has_seeds = any(len(group.runs) > 1 for group in groups)
    table = Table(title=f"{metric}: mean over seeds, below it minimum to maximum" if has_seeds else metric)
    table.add_column("run", overflow="fold", min_width=8)
    table.add_column("seeds", overflow="fold", min_width=5)
    for name in ("steps", "before", "after", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    digits = ".1%" if is_share(metric) else ".4g"
    for group in groups:
        first, last = group.steps[0], group.steps[-1]
        seconds = [
            sum(row.get(f"time/{stage}", 0) for row in run.rows if row["step"] <= last for stage in STAGES[1:])
            for run in group.runs
        ]
        table.add_row(
            group.label,
            ", ".join(str(run.recipe.seed) for run in group.runs),
            f"{first} to {last}",
            _cell([values[first] for values in group.values], digits),
            _cell([values[last] for values in group.values], digits),
            _cell(seconds, ",.1f" if max(seconds) < 1000 else ",.0f"),
        )
    return table


def _cell(values: Sequence[float], digits: str) -> str:
    mean, low, high = (format(value, digits) for value in (fmean(values), min(values), max(values)))
    return mean if low == high else f"{mean}\n{low} to {high}"


def is_share(metric: str) -> bool:
    """Whether a metric is shown in percent."""
    return metric.endswith(("accuracy", "share"))


def describe_noise(groups: Sequence[RunGroup], metric: str) -> str:
    """One sentence: how large a difference between two rows must be to be more than the noise of seeds.

    By the t-test of two rows with the fewest runs (of one row, against another of as many), the variance pooled over
    all rows: a difference of t s sqrt(1/n + 1/m).
    """
    lasts = [[values[group.steps[-1]] for values in group.values] for group in groups]
    degrees = sum(len(last) - 1 for last in lasts)
    if degrees == 0:
        return "Each row is one run: train each recipe with several seeds to see which differences are more than noise."
    spread = math.sqrt(sum(variance(last) * (len(last) - 1) for last in lasts if len(last) > 1) / degrees)
    n, m = sorted(map(len, lasts if len(lasts) > 1 else lasts * 2))[:2]
    least = T_95[min(degrees, len(T_95)) - 1] * spread * math.sqrt(1 / n + 1 / m)
    shown = [f"{100 * value:.1f} points" if is_share(metric) else f"{value:.3g}" for value in (spread, least)]
    return (
        f"Seeds differ by {shown[0]} (standard deviation): between rows of {n} and {m} runs, differences of less than "
        f"{shown[1]} after training cannot be told from noise (95%)."
    )


def draw_comparison(groups: Sequence[RunGroup], metric: str) -> str:
    """SVG text: the mean of each group over the steps and, where it has several runs, each of them as a thin line."""
    from matplotlib.figure import Figure

    from srtrl.report.charts import chart_style, draw_line, to_svg

    with chart_style():
        figure = Figure(figsize=(5.6, 3.2), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel=metric)
        for group in groups:
            means = [fmean(values[step] for values in group.values) for step in group.steps]
            label = f"{group.label} (mean of {len(group.runs)})" if len(group.runs) > 1 else group.label
            line = draw_line(axes, group.steps, means, label=label)
            for values in group.values if len(group.runs) > 1 else ():
                axes.plot(list(values), list(values.values()), color=line.get_color(), linewidth=0.8, alpha=0.4)
        axes.legend()
        return to_svg(figure)
