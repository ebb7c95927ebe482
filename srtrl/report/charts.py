"""Charts of metrics over steps, drawn by matplotlib into SVG text: one line a metric, in words in the legend."""

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import filter as match_names
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

STYLE: dict[Any, Any] = {
    "axes.formatter.limits": (-3, 6),
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.alpha": 0.4,
    "legend.columnspacing": 1.0,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 1.0,
    "svg.fonttype": "none",  # text stays text: the file is small
    "svg.hashsalt": "srtrl",  # the same data gives the same bytes
}
COLOURS = ("#2563eb", "#ea580c", "#059669", "#7c3aed", "#dc2626", "#0891b2", "#ca8a04", "#db2777", "#65a30d", "#64748b")
"""Colours of lines; readable on a light and on a dark page."""
MIN_SPAN = 0.1
"""Least span of an axis, by its largest value: rounding errors do not look like a curve."""
CREATOR = "srtrl"
"""In each picture, which is how `--out` knows one."""
STAGES = (
    *("step", "rollout", "acceptance", "tools", "grading", "reference", "values", "critic", "update"),
    *("save_rollouts", "checkpoint", "eval"),
)
"""Stages of a training step, under `time/`; the first is the sum."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart to draw."""

    title: str
    unit: str
    metrics: Sequence[str]
    """Names of `metrics.jsonl`, or patterns such as `reward/*`; see docs/metrics.md."""
    note: str = ""
    is_log: bool = False
    """Logarithmic scale."""
    includes: tuple[float, ...] = ()
    """Values that the axis shows in any case."""


@dataclass(slots=True)
class Line:
    """A line of a chart."""

    metric: str
    label: str
    points: list[tuple[float, float]]
    """Step and value."""


SPEED = "Speed and speculation"
DECODE_TIMES = [f"engine/{part}_seconds" for part in ("schedule", "drafting", "forward", "sample")]
CHARTS = {
    "Learning": (
        Chart(
            "Reward",
            "reward",
            ["reward/*", "eval/reward", "eval/reward/*"],
            "Each reward before its weight; mean and eval/reward are weighted sums.",
        ),
        Chart(
            "Accuracy",
            "share",
            ["accuracy", "accuracy/*", "eval/accuracy", "eval/accuracy/*"],
            "Held-out problems (eval/) with 95% intervals.",
        ),
        Chart("Response length", "tokens", ["length/mean", "length/max"], "The end token included."),
        Chart("Truncated responses", "share of samples", ["length/truncated_share"], "Reached the length limit."),
        Chart(
            "Groups",
            "groups",
            ["data/draws", "groups/[!z]*"],
            "Drawn, kept by the filters; of these, all samples correct or all wrong.",
        ),
        Chart(
            "Groups with equal rewards", "share of groups", ["groups/zero_advantage_share"], "They have no gradient."
        ),
        Chart("Failed gradings", "samples", ["grading/timeout", "grading/crash", "grading/error"], "Left out."),
    ),
    "Turns and tools": (
        Chart("Turns", "turns of a sample", ["environment/turns_*"]),
        Chart("Tool calls", "share", ["environment/*call_share", "eval/environment/*call_share"]),
        Chart("How calls ended", "calls", ["environment/outcome_*"], "ok, or a kind of error."),
        Chart("Why samples ended", "share of samples", ["environment/stop_*"], "answered: by the policy."),
        Chart("Tokens by kind", "tokens", ["tokens/model", "tokens/observation", "tokens/boundary"], "Of responses."),
        Chart("Time of tools", "seconds", ["engine/tool_seconds_*", "time/tools"], "time/tools: nothing decoded."),
    ),
    "Update": (
        Chart("Loss", "loss", ["loss"], "Not a measure of progress.", includes=(-1e-3, 1e-3)),
        Chart("KL to the reference", "nats per token", ["kl/ref"], "How far the policy has moved from its start."),
        Chart("Gap to the teacher", "nats per token", ["teacher/gap"], "An estimate of KL(policy, teacher)."),
        Chart("Entropy", "nats per token", ["entropy"], "Near zero the policy hardly explores any more."),
        Chart("Clipped tokens", "share", ["clip_share/*"], "Tokens whose gradient the clipped ratio took away."),
        Chart("Importance weights", "weight, share of tokens", ["importance/*"], "Trainer over decoder."),
        Chart("Stale tokens", "share", ["off_policy/*share", "off_policy/age_*"], "Of earlier policies, by age."),
        Chart("Weights of stale tokens", "weight", ["off_policy/weight_*"], "Current over earlier policy, not capped."),
        Chart("Gradient norm", "norm", ["grad_norm", "critic/grad_norm"], "Before clipping.", is_log=True),
        Chart("Learning rate", "learning rate", ["learning_rate", "critic/learning_rate"], includes=(0.0,)),
        Chart("Critic", "reward", ["critic/loss", "critic/value_mean", "critic/return_mean"], "Loss: squared reward."),
        Chart("Explained variance", "share of variance", ["critic/explained_variance"], "1: perfect, 0: no help."),
        Chart(
            "Decoder vs. trainer log-probs",
            "nats",
            ["logprob_difference/m*"],
            "Should only show rounding error.",
            is_log=True,
        ),
    ),
    SPEED: (
        Chart("Speed of the decoder", "tokens per second", ["time/tokens_per_second"], "Response tokens."),
        Chart("Speed of the update", "tokens per second", ["time/update_tokens_per_second"]),
        Chart("Time by stage", "seconds", [f"time/{stage}" for stage in STAGES], "Compilation is left out."),
        Chart("Decode time", "seconds", DECODE_TIMES, "drafting: only drafts need it."),
        Chart("Decode steps", "steps", ["engine/decode_steps"], includes=(0.0,)),
        Chart(
            "Tokens per decode step",
            "tokens of a sequence",
            ["engine/*_per_decode_step"],
            "Of a sample in a forward pass; 1 without drafts.",
        ),
        Chart(
            "Acceptance by depth",
            "share of drafts",
            ["engine/acceptance_depth_[1248]"],
            "Drafts of which at least 1, 2, 4, 8 tokens were accepted.",
        ),
        Chart(
            "Run-ahead",
            "tokens",
            ["engine/run_ahead_tokens", "engine/text_tokens_repeated"],
            "Tokens decoded early for the next step, and those that its samples repeated.",
        ),
        Chart("Peak memory", "GiB", ["memory/peak_gib"]),
    ),
}
"""The charts of a report by section."""


def chart_style() -> AbstractContextManager[None]:
    """The look of all charts."""
    from cycler import cycler
    from matplotlib import rc_context

    return rc_context(STYLE | {"axes.prop_cycle": cycler(color=COLOURS)})


def lines_of(chart: Chart, rows: Sequence[Mapping[str, float]]) -> list[Line]:
    """The chart's lines, without metrics that are absent or zero throughout; equal ones are one line."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value)
    lines: list[Line] = []
    for metric in (name for pattern in chart.metrics for name in match_names(names, pattern)):
        points = [(row["step"], row[metric]) for row in rows if metric in row]
        if same := next((line for line in lines if line.points == points), None):
            same.label += f" = {in_words(metric)}"
        else:
            lines.append(Line(metric, in_words(metric), points))
    return lines


def in_words(metric: str) -> str:
    """A metric's name in a legend: that in docs/metrics.md without its group, where that is not the point."""
    group, _, name = metric.partition("/")
    beginning = {"eval": "held-out ", "critic": "critic "}.get(group, "")
    return beginning + (name or group).replace("_", " ").replace("/", " ")


def draw(chart: Chart, rows: Sequence[Mapping[str, float]], lines: Sequence[Line]) -> str:
    """SVG text of the chart's `lines`, at least one, as `lines_of` found them in these rows.

    Where rows have `<metric>_low` and `<metric>_high`, they are drawn as an interval. Two evaluations are two points,
    not a line.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with chart_style():
        figure = Figure(figsize=(4.4, 2.5 + 0.16 * len(lines)), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel=chart.unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        for curve in lines:
            steps, values = zip(*curve.points, strict=True)
            line = draw_line(axes, steps, values, label=curve.label)
            if curve.metric.startswith("eval/") and len(steps) < 3:
                line.set_linestyle("none")
            logged = [row for row in rows if f"{curve.metric}_low" in row]
            if logged:
                low, high = ([row[f"{curve.metric}_{end}"] for row in logged] for end in ("low", "high"))
                arms = [np.subtract(values, low), np.subtract(high, values)]
                axes.errorbar(steps, values, arms, fmt="none", color=line.get_color())
        if chart.is_log:
            axes.set_yscale("log", nonpositive="clip")
        else:
            bottom, top = axes.get_ylim()
            bottom, top = min(bottom, *chart.includes, top), max(top, *chart.includes, bottom)
            missing = MIN_SPAN * max(abs(bottom), abs(top)) - (top - bottom)
            axes.set_ylim(bottom - max(missing, 0) / 2, top + max(missing, 0) / 2)
        figure.legend(loc="outside lower left", ncols=2)
        return to_svg(figure)


def inline(svg: str) -> str:
    """A picture as a part of a page: text and axes have the page's colour, and there is no background."""
    picture = svg[svg.index("<svg") :].replace("#000000", "currentColor").replace("fill: #ffffff", "fill: none")
    return re.sub(r"<svg ", '<svg fill="currentColor" role="img" ', picture, count=1)


def draw_line(axes: "Axes", steps: Sequence[float], values: Sequence[float], *, label: str) -> "Line2D":
    """Draw a line, a long one as its moving average over a twentieth of the steps, over the values in a faint line."""
    marker = "o" if len(steps) <= 25 else ""
    half = len(values) // 40
    middle = slice(half, len(values) - half)
    averages = np.convolve(values, np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid")
    (line,) = axes.plot(steps[middle], averages, marker=marker, markersize=3, label=label)
    if half:
        axes.plot(steps, values, color=line.get_color(), alpha=0.25, linewidth=0.8)
    return line


def to_svg(figure: "Figure") -> str:
    """SVG text of a figure, the same bytes for the same data."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": CREATOR})
    return buffer.getvalue()
