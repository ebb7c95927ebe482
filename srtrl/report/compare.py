"""`srtrl compare`: a metric of several runs side by side, as a table, JSON or one picture."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

    from srtrl.report.run_groups import RunGroup, Spread

INCHES = (5.6, 3.2)
LINE_STYLES = ("-", "--", ":", "-.")
"""Of the groups behind the last colour, which begin again with the first."""


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    *,
    metric: Annotated[str, typer.Option(help="A name of metrics.jsonl.")] = "eval/accuracy",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the metric over the steps into this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Compare runs by one metric.

    Runs that differ only in their seed are one line of the table: mean, and least to greatest. The figures are those of
    the first and of the last step at which all runs of the line have the metric.
    """
    from srtrl.metrics import write_atomic
    from srtrl.report.run_groups import group_runs

    if out is not None and out.suffix != ".svg":
        raise ValueError(f"--out: expected a file name that ends in .svg, found {out}")
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out: there is no folder {out.parent}")
    groups = group_runs(runs, metric)
    if out is not None:
        write_atomic(out, draw_comparison(groups, metric))
    if as_json:
        print(json.dumps({"metric": metric, "groups": [as_record(group) for group in groups]}))
        return
    from rich.console import Console

    Console().print(comparison_table(groups, metric))
    for note in notes(groups):
        print(note)
    if out is not None:
        print(f"the picture is in {out}")


def as_record(group: "RunGroup") -> dict[str, Any]:
    """A group as `--json` prints it."""
    figures = ("before", "after", "change", "seconds", "num_response_tokens")
    values = {name: getattr(group, name) for name in figures}
    return {
        "label": group.label,
        "first_step": group.steps[0],
        "last_step": group.steps[-1],
        **{name: None if value is None else asdict(value) for name, value in values.items()},
        "runs": [
            {
                "folder": str(run.folder),
                "name": run.recipe.name,
                "seed": run.recipe.seed,
                "num_steps": run.num_steps,
                "is_finished": run.is_finished,
                "values": [[step, value] for step, value in run.values.items()],
            }
            for run in group.runs
        ],
    }


def comparison_table(groups: Sequence["RunGroup"], metric: str) -> "Table":
    """The groups, one a line, for people."""
    from rich.table import Table

    table = Table(title=f"{metric}, mean over seeds (least to greatest)")
    table.add_column("run")
    for name in ("seeds", "steps", "before", "after", "change", "seconds", "response tokens"):
        table.add_column(name, justify="right")
    scale = 100 if is_share(metric) else 1
    digits = ".1f" if is_share(metric) else ".4g"
    for group in groups:
        table.add_row(
            group.label,
            f"{len(group.runs)} ({', '.join(str(run.recipe.seed) for run in group.runs)})",
            f"{group.steps[0]} to {group.steps[-1]}",
            _cell(group.before, scale, digits),
            _cell(group.after, scale, digits),
            _cell(group.change, scale, "+" + digits),
            _cell(group.seconds, 1, ",.0f"),
            _cell(group.num_response_tokens, 1, ",.0f"),
        )
    if is_share(metric):
        table.caption = "in percent; change in percentage points"
    return table


def notes(groups: Sequence["RunGroup"]) -> list[str]:
    """What must be known to read the table: runs that were not finished."""
    return [
        f"{run.folder} has done {run.num_steps} of {run.recipe.train.num_steps} steps: it is still going on, or it was "
        f"interrupted; the figures of {group.label} are those up to step {group.steps[-1]}"
        for group in groups
        for run in group.runs
        if not run.is_finished
    ]


def is_share(metric: str) -> bool:
    """Whether the metric is a share, to be read in percent."""
    last = metric.rpartition("/")[2]
    return last.startswith("accuracy") or "share" in metric or metric == "reward/correct"


def draw_comparison(groups: Sequence["RunGroup"], metric: str) -> str:
    """SVG text: the mean of each group over the steps and, where it has several runs, each of them as a thin line.

    The same runs give the same bytes (of one matplotlib), and text stays text, so that the file is small.
    """
    from matplotlib import rc_context

    from srtrl.report.drawing import draw_figure

    def paint(figure: "Figure") -> None:
        _paint(figure.add_subplot(), groups, metric)

    with rc_context({"svg.fonttype": "none"}):
        return draw_figure(metric, "", paint, inches=INCHES).svg


def _paint(axes: "Axes", groups: Sequence["RunGroup"], metric: str) -> None:
    import numpy as np
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    from srtrl.report.drawing import COLOURS, SMOOTH_FROM, smooth, widen_flat

    is_smoothed = any(len(group.steps) >= SMOOTH_FROM for group in groups)

    def plot(steps: Sequence[int], values: Sequence[float], **style: Any) -> None:
        ys = np.array(values, np.float64)
        axes.plot(steps, smooth(ys) if is_smoothed and len(steps) >= SMOOTH_FROM else ys, **style)

    for index, group in enumerate(groups):
        style = {
            "color": COLOURS[index % len(COLOURS)],
            "linestyle": LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)],
        }
        label = group.label if len(group.runs) == 1 else f"{group.label} (mean of {len(group.runs)})"
        if len(group.runs) > 1:
            for run in group.runs:
                plot(list(run.values), list(run.values.values()), **style, linewidth=0.8, alpha=0.4)
        marker = "o" if len(group.steps) <= 25 else ""
        plot(group.steps, group.means, **style, linewidth=1.8, marker=marker, markersize=3.5, label=label)
    axes.set_xlabel("step")
    name = "held-out accuracy" if metric == "eval/accuracy" else metric
    axes.set_ylabel(f"{name} (moving average)" if is_smoothed else name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    widen_flat(axes)
    if is_share(metric):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(loc="best")


def _cell(figure: "Spread | None", scale: float, digits: str) -> str:
    if figure is None:
        return "-"
    mean, least, most = (format(scale * value, digits) for value in (figure.mean, figure.min, figure.max))
    return mean if figure.sd is None else f"{mean} ({least} to {most})"
