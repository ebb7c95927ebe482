"""How every picture of a report is drawn: one style, one set of colours, SVG text."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from srtrl.metrics import MetricRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]

BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#2563eb", "#ea580c", "#059669", "#7c3aed", "#dc2626", "#64748b"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, "#0891b2", "#ca8a04", GREY)
STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#cbd5e1",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.labelcolor": "#475569",
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "white",
    "font.size": 9,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.7,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "svg.hashsalt": "srtrl",
    "text.color": "#334155",
    "xtick.color": "#64748b",
    "ytick.color": "#64748b",
}
BARS_UP_TO = 40
"""Up to this many steps, what adds up is drawn as one bar a step; beyond, as areas."""
SMOOTH_FROM = 40
"""From this many steps on, a line is the moving average and the steps themselves stand faint behind it."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn chart."""

    title: str
    note: str
    """One or two sentences on what is shown and how to read it."""
    svg: str
    is_wide: bool = False
    """Whether it needs the whole width of the page."""


def smooth(values: Array) -> Array:
    """Moving average over about a twentieth of the steps, centred, with shorter windows at the ends."""
    reach = max(1, len(values) // 40)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    starts = np.maximum(np.arange(len(values)) - reach, 0)
    ends = np.minimum(np.arange(len(values)) + reach + 1, len(values))
    smoothed: Array = (sums[ends] - sums[starts]) / (ends - starts)
    return smoothed


def series(rows: Sequence[MetricRow], metric: str) -> tuple[Array, Array]:
    """Steps and values of a metric, where it was logged."""
    found = [(row["step"], row[metric]) for row in rows if metric in row]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps, np.float64), np.array(values, np.float64)


def draw_figure(
    title: str, note: str, paint: Callable[["Figure"], None], *, inches: tuple[float, float], is_wide: bool = False
) -> Chart:
    """Draw a figure of one or more axes, which `paint` adds."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=inches, layout="constrained")
        paint(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return Chart(title, note, buffer.getvalue(), is_wide)


def draw(title: str, note: str, paint: Callable[["Axes"], None]) -> Chart:
    """Draw one axes over whole numbers, mostly steps, with a legend where its lines have labels."""

    def paint_axes(figure: "Figure") -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.add_subplot()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        paint(axes)
        if axes.get_legend_handles_labels()[0] and axes.get_legend() is None:
            axes.legend(loc="best")

    return draw_figure(title, note, paint_axes, inches=(4.4, 2.6))


def draw_line(axes: "Axes", steps: Array, values: Array, colour: str, label: str | None) -> None:
    """A line over steps, with dots where they are few."""
    marker = "o" if len(steps) <= 25 else ""
    if len(steps) >= SMOOTH_FROM and np.ptp(values) > 0:
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        values = smooth(values)
    axes.plot(steps, values, color=colour, linewidth=1.8, marker=marker, markersize=3.5, label=label)


def widen_flat(axes: "Axes") -> None:
    """Give a line that does not move a scale by which that can be seen (matplotlib would show rounding noise)."""
    low, high = axes.dataLim.intervaly
    if high - low <= 1e-6 * abs(high) and high > 0:
        axes.set_ylim(0, 2 * high)


def draw_stack(axes: "Axes", steps: Array, parts: Sequence[tuple[str, str, Array]]) -> None:
    """Draw (label, colour, values) on top of each other over steps, the legend above them."""
    if len(steps) <= BARS_UP_TO:
        below = np.zeros(len(steps))
        for label, colour, values in parts:
            axes.bar(steps, values, bottom=below, color=colour, label=label, width=0.8)
            below = below + values
    else:
        axes.stackplot(
            steps,
            [values for _, _, values in parts],
            colors=[colour for _, colour, _ in parts],
            labels=[label for label, _, _ in parts],
        )
    axes.set_xlabel("step")
    axes.margins(x=0.01)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, columnspacing=1, handlelength=1)
