"""The curves of a report, drawn with matplotlib into SVG text. A chart whose metrics a run lacks is left out."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from srtrl.metrics import MetricRow
from srtrl.report.run_data import RunData, StepRollouts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
STAGE_COLOURS = {"rollout": BLUE, "update": ORANGE, "grading": PURPLE, "eval": GREEN, "checkpoint": GREY}
SMOOTH_FROM = 40
"""From this many steps on, a line is the moving average and the steps themselves stand faint behind it."""
BARS_UP_TO = 40
"""Up to this many steps, stage times are one bar a step; beyond, areas."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn chart."""

    title: str
    note: str
    """One or two sentences on what is shown and how to read it."""
    svg: str


@dataclass(frozen=True, slots=True)
class Curves:
    """A chart of metrics over steps."""

    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    """(metric name, label)."""
    note: str
    percent: bool = False
    log: bool = False
    """Logarithmic scale."""


CURVES = (
    Curves("Reward", "reward", (("reward/mean", "mean"),), "Weighted sum of the rewards, mean over a step's samples."),
    Curves(
        "Response length",
        "tokens",
        (("length/mean", "mean"), ("length/max", "longest")),
        "Tokens of a response, the end token included.",
    ),
    Curves(
        "Cut at the length limit",
        "share of samples",
        (("length/truncated_share", "truncated"),),
        "Responses that reached the limit before they ended. A high share hides right answers.",
        percent=True,
    ),
    Curves(
        "KL to the reference",
        "nats a token",
        (("kl/ref", "estimate"),),
        "How far the policy has moved from the one it started as.",
    ),
    Curves(
        "Entropy",
        "nats a token",
        (("entropy", "mean"),),
        "Of the policy's next-token distribution. Near zero it hardly explores any more.",
    ),
    Curves(
        "Clipped tokens",
        "share of tokens",
        (("clip_share/low", "below 1 - clip_low"), ("clip_share/high", "above 1 + clip_high")),
        "Tokens whose gradient the clipped ratio took away. Zero where each rollout is used for one optimizer step.",
        percent=True,
    ),
    Curves("Gradient norm", "norm", (("grad_norm", "before clipping"),), "Mean over a step's optimizer steps."),
    Curves("Learning rate", "rate", (("learning_rate", "last optimizer step"),), "Of a step's last optimizer step."),
    Curves(
        "Decoder against trainer",
        "difference of log-probs",
        (("logprob_difference/mean", "mean"), ("logprob_difference/max", "largest")),
        "Of the same tokens, by the decoder and by the training pass; absolute. It should stay near rounding error.",
        log=True,
    ),
    Curves("Speed of the decoder", "tokens a second", (("time/tokens_per_second", "rollout"),), "Response tokens."),
)


def draw_charts(run: RunData) -> list[Chart]:
    """All charts that the run has data for, in reading order."""
    drawn = [_draw_curves(curves, run.steps) for curves in CURVES]
    accuracy = _draw_accuracy(run)
    parts = _draw_curves(_reward_parts(run), run.steps)
    later = [_draw_stage_times(run.steps), _draw_lengths(run.rollouts)]
    return [chart for chart in (drawn[0], accuracy, parts, *drawn[1:], *later) if chart is not None]


def smooth(values: Array) -> Array:
    """Moving average over about a twentieth of the steps, centred, with shorter windows at the ends."""
    reach = max(1, len(values) // 40)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    starts = np.maximum(np.arange(len(values)) - reach, 0)
    ends = np.minimum(np.arange(len(values)) + reach + 1, len(values))
    smoothed: Array = (sums[ends] - sums[starts]) / (ends - starts)
    return smoothed


def _series(rows: Sequence[MetricRow], metric: str) -> tuple[Array, Array]:
    """Steps and values of a metric, where it was logged."""
    found = [(row["step"], row[metric]) for row in rows if metric in row]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps, np.float64), np.array(values, np.float64)


def _draw(title: str, note: str, paint: Callable[["Axes"], None]) -> Chart:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with rc_context(STYLE):
        figure = Figure(figsize=(4.4, 2.6), layout="constrained")
        axes = figure.add_subplot()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        paint(axes)
        if axes.get_legend_handles_labels()[0] and axes.get_legend() is None:
            axes.legend(loc="best")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return Chart(title, note, buffer.getvalue())


def _line(axes: "Axes", steps: Array, values: Array, colour: str, label: str | None) -> None:
    marker = "o" if len(steps) <= 25 else ""
    if len(steps) >= SMOOTH_FROM and np.ptp(values) > 0:
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        values = smooth(values)
    axes.plot(steps, values, color=colour, linewidth=1.8, marker=marker, markersize=3.5, label=label)


def _widen_flat(axes: "Axes") -> None:
    """Give a line that does not move a scale by which that can be seen (matplotlib would show rounding noise)."""
    low, high = axes.dataLim.intervaly
    if high - low <= 1e-6 * abs(high) and high > 0:
        axes.set_ylim(0, 2 * high)


def _draw_curves(curves: Curves, rows: Sequence[MetricRow]) -> Chart | None:
    found = [(label, *_series(rows, metric)) for metric, label in curves.metrics]
    found = [(label, steps, values) for label, steps, values in found if len(steps)]
    if not found:
        return None

    def paint(axes: "Axes") -> None:
        from matplotlib.ticker import PercentFormatter

        for (label, steps, values), colour in zip(found, COLOURS, strict=False):
            _line(axes, steps, values, colour, label if len(found) > 1 else None)
        axes.set_xlabel("step")
        axes.set_ylabel(curves.unit)
        _widen_flat(axes)
        if curves.log and all((values > 0).all() for _, _, values in found):
            axes.set_yscale("log")
        if curves.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.set_ylim(bottom=0, top=max(0.01, 1.1 * max(values.max() for _, _, values in found)))

    return _draw(curves.title, curves.note, paint)


def _reward_parts(run: RunData) -> Curves:
    """One curve a named reward; none where there is only one."""
    names = [reward.name for reward in run.recipe.rewards]
    metrics = tuple((f"reward/{name}", name) for name in names) if len(names) > 1 else ()
    return Curves("Reward by part", "reward", metrics, "Each named reward, unweighted.")


def _draw_accuracy(run: RunData) -> Chart | None:
    steps, values = _series(run.steps, "accuracy")
    held_out = [row for row in run.rows if "eval/accuracy" in row]
    if not len(steps) and not held_out:
        return None

    def paint(axes: "Axes") -> None:
        from matplotlib.ticker import PercentFormatter

        if len(steps):
            _line(axes, steps, values, BLUE, "training samples")
        if held_out:
            at = [row["step"] for row in held_out]
            share = np.array([row["eval/accuracy"] for row in held_out])
            low = share - [row["eval/accuracy_low"] for row in held_out]
            high = np.array([row["eval/accuracy_high"] for row in held_out]) - share
            axes.errorbar(
                at, share, yerr=[low, high], color=ORANGE, marker="D", markersize=5, capsize=3, linestyle="--",
                linewidth=1.2, label="held-out problems",
            )  # fmt: skip
        axes.set_xlabel("step")
        axes.set_ylabel("right answers")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))

    note = (
        "Share of samples graded correct. Held-out problems have 95% intervals; step 0 is the policy before training."
    )
    return _draw("Accuracy", note, paint)


def _draw_stage_times(rows: Sequence[MetricRow]) -> Chart | None:
    names = {key for row in rows for key in row if key.startswith("time/")} - {"time/step", "time/tokens_per_second"}
    if not names:
        return None
    steps = np.array([row["step"] for row in rows], np.float64)
    seconds = {name: np.array([row.get(name, 0.0) for row in rows]) for name in names}
    order = sorted(names, key=lambda name: -float(seconds[name].sum()))
    labels = [name.removeprefix("time/") for name in order]
    spare = iter(COLOURS[4:])
    colours = [STAGE_COLOURS[label] if label in STAGE_COLOURS else next(spare, RED) for label in labels]

    def paint(axes: "Axes") -> None:
        if len(steps) <= BARS_UP_TO:
            below = np.zeros(len(steps))
            for name, label, colour in zip(order, labels, colours, strict=True):
                axes.bar(steps, seconds[name], bottom=below, color=colour, label=label, width=0.8)
                below = below + seconds[name]
        else:
            axes.stackplot(steps, [seconds[name] for name in order], colors=colours, labels=labels)
        axes.set_xlabel("step")
        axes.set_ylabel("seconds")
        axes.margins(x=0.01)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, columnspacing=1, handlelength=1)

    return _draw("Seconds of each stage", "Stacked: the height is the whole step.", paint)


def _draw_lengths(rollouts: Sequence[StepRollouts]) -> Chart | None:
    """Length histograms of the first, the middle and the last step, on the same bins."""
    lengths = [np.array([sample.length for sample in step.samples]) for step in rollouts if step.samples]
    if not lengths:
        return None
    longest = max(int(values.max()) for values in lengths)
    bins = np.linspace(0, longest + 1, min(longest + 1, 36) + 1).tolist()

    def paint(axes: "Axes") -> None:
        for step, values, colour in zip(rollouts, lengths, (GREY, ORANGE, BLUE), strict=False):
            weights = np.full(len(values), 1 / len(values))
            axes.hist(values, bins, weights=weights, color=colour, alpha=0.18)
            axes.hist(
                values, bins, weights=weights, color=colour, histtype="step", linewidth=1.6, label=f"step {step.step}"
            )
        axes.set_xlabel("response tokens")
        axes.set_ylabel("share of samples")

    return _draw("Distribution of lengths", "First, middle and last step that have rollouts on disk.", paint)
