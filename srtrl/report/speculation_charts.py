"""What drafts brought to a run: acceptance, tokens a decode step, time shares, and the decode steps of a rollout."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from srtrl.engine.stats import DecodeStep
from srtrl.metrics import MetricRow
from srtrl.report.charts import Curves, draw_curves
from srtrl.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    Array,
    Chart,
    draw,
    draw_figure,
    draw_line,
    draw_stack,
    series,
)
from srtrl.report.run_data import RunData, StepTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_DEPTH = 8
"""Depths that `engine/acceptance_depth_N` goes to."""
NUM_LATEST = 10
"""Training steps that make up "the latest"."""
MAX_POINTS = 600
"""A timeline of more decode steps is averaged over several at a time."""
MAX_EPOCH_NAMES = 8
INK = "#0f172a"
"""Of a line over areas."""
TIME_PARTS = (("draft", PURPLE, "drafting"), ("forward", BLUE, "forward"), ("sample", GREEN, "sampling"))
LAST_PART = ("commit", ORANGE, "commit")

CURVES = (
    Curves(
        "Acceptance of drafts",
        "share of drafts",
        (("engine/draft_hit_rate", "at least one token accepted"),),
        "Of the draft trees that were verified.",
        percent=True,
    ),
    Curves(
        "Tokens decoded ahead",
        "tokens",
        (("engine/run_ahead_tokens_made", "made"), ("engine/run_ahead_tokens_used", "used")),
        "By run-ahead in idle slots, and those of them that a later sample accepted. They are never learned from.",
    ),
    Curves(
        "Steps with drafts",
        "share of decode steps",
        (("engine/drafted_steps_share", "drafted"),),
        "Where drafts do not pay they are only tried now and then.",
    ),
)


def draw_speculation(run: RunData) -> list[Chart]:
    """The charts of a run that speculates, in reading order; none for a run that does not."""
    if not run.speculates:
        return []
    drawn = [
        _draw_tokens_per_step(run.steps),
        _draw_acceptance(run.steps),
        _draw_time_shares(run.steps),
        *(draw_curves(curves, _without_zeros(curves, run.steps)) for curves in CURVES),
        *(_draw_timeline(timeline) for timeline in run.timelines if timeline.decode_steps),
    ]
    return [chart for chart in drawn if chart is not None]


def _without_zeros(curves: Curves, rows: Sequence[MetricRow]) -> Sequence[MetricRow]:
    """No rows where the metrics are zero throughout: what was never used has no chart."""
    return rows if any(row.get(metric) for row in rows for metric, _ in curves.metrics) else []


def epoch_starts(rows: Sequence[MetricRow]) -> list[tuple[float, int]]:
    """(step, number of the epoch) of the first steps that begin in a further pass over the prompts."""
    starts = []
    epoch = 0
    for row in rows:
        if int(row.get("data/epoch", 0.0)) > epoch:
            epoch = int(row["data/epoch"])
            starts.append((row["step"], epoch + 1))
    return starts


def _draw_tokens_per_step(rows: Sequence[MetricRow]) -> Chart | None:
    steps, tokens = series(rows, "engine/tokens_per_decode_step")
    verified_steps, verified = series(rows, "engine/verified_per_decode_step")
    starts = epoch_starts(rows)

    def paint(axes: "Axes") -> None:
        draw_line(axes, verified_steps, verified, GREY, "verified")
        draw_line(axes, steps, tokens, BLUE, "gained")
        axes.set_ylim(0, 1.18 * max(verified.max(), tokens.max()))
        for step, number in starts:
            axes.axvline(step, color=ORANGE, linewidth=1, linestyle="--", alpha=0.7)
            if len(starts) <= MAX_EPOCH_NAMES:
                is_near_end = step > steps[0] + 0.85 * (steps[-1] - steps[0])
                axes.annotate(
                    f"epoch {number}", (step, 1), xycoords=("data", "axes fraction"), textcoords="offset points",
                    xytext=(-3 if is_near_end else 3, -9), ha="right" if is_near_end else "left", fontsize=7.5,
                    color=ORANGE,
                )  # fmt: skip
        axes.set_xlabel("step")
        axes.set_ylabel("tokens a decode step")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, handlelength=1.5)

    note = (
        "Of one sample in one decode step: tokens that were verified (the root included) and tokens that it gained; 1 "
        "is what decoding without drafts gives. From the second epoch on each prompt has rollouts to draft from."
    )
    return draw("Tokens a decode step", note, paint) if len(steps) else None


def _draw_acceptance(rows: Sequence[MetricRow]) -> Chart | None:
    groups = [(label, colour, *_acceptance(of)) for label, colour, of in early_and_late(rows)]
    groups = [group for group in groups if len(group[2])]
    if not groups:
        return None

    def paint(axes: "Axes") -> None:
        from matplotlib.ticker import PercentFormatter

        for number, (label, colour, depths, shares) in enumerate(groups):
            width = 0.8 / len(groups)
            places = depths + (number - (len(groups) - 1) / 2) * width
            axes.bar(places, shares, width=width, color=colour, label=label)
        axes.set_xticks(np.arange(1, 1 + max(depths.max() for _, _, depths, _ in groups)))
        axes.set_xlabel("depth in the draft tree")
        axes.set_ylabel("went on")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(0, 1.0)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, handlelength=1)

    note = (
        "Of the walks that came to drafted tokens of a depth, the share that found the sampled token among them. "
        "The deeper a walk has come, the surer the text."
    )
    return draw("Acceptance by depth", note, paint)


def early_and_late(rows: Sequence[MetricRow]) -> list[tuple[str, str, Sequence[MetricRow]]]:
    """(label, colour, rows) of the first epoch and of the latest steps beyond it; one group where there is no more."""
    starts = epoch_starts(rows)
    first_end = starts[0][0] if starts else rows[-1]["step"] + 1
    first = [row for row in rows if row["step"] < first_end]
    latest = [row for row in rows if row["step"] >= first_end][-NUM_LATEST:]
    if not latest:
        return [("all steps", BLUE, first)]
    named = "latest step" if len(latest) == 1 else f"latest {len(latest)} steps"
    return [("first epoch", GREY, first), (named, BLUE, latest)]


def _acceptance(rows: Sequence[MetricRow]) -> tuple[Array, Array]:
    """Depths and the mean share at each, of those that were logged."""
    found = []
    for depth in range(1, MAX_DEPTH + 1):
        _, values = series(rows, f"engine/acceptance_depth_{depth}")
        if len(values):
            found.append((depth, values.mean()))
    return np.array([depth for depth, _ in found], np.float64), np.array([share for _, share in found], np.float64)


def _draw_time_shares(rows: Sequence[MetricRow]) -> Chart | None:
    names = [f"engine/{part}_seconds" for part, _, _ in (*TIME_PARTS, LAST_PART)]
    rows = [row for row in rows if sum(row.get(name, 0.0) for name in names) > 0]
    if not rows:
        return None
    steps = np.array([row["step"] for row in rows], np.float64)
    seconds = np.array([[row.get(name, 0.0) for row in rows] for name in names])
    shares = seconds / seconds.sum(axis=0)
    parts = [
        (f"{label} {mean:.0%}", colour, values)
        for (_, colour, label), values, mean in zip(
            (*TIME_PARTS, LAST_PART), shares, seconds.sum(axis=1) / seconds.sum(), strict=True
        )
    ]

    def paint(axes: "Axes") -> None:
        from matplotlib.ticker import PercentFormatter

        draw_stack(axes, steps, parts)
        axes.set_ylabel("share of decoding")
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.legend(loc="lower left", bbox_to_anchor=(-0.16, 1), ncols=4, columnspacing=0.8, handlelength=0.8)

    return draw("Where decoding time goes", "Parts of the decode steps; in the legend, of the whole run.", paint)


def _draw_timeline(timeline: StepTimeline) -> Chart:
    steps = timeline.decode_steps
    seconds, columns = timeline_columns(steps)

    def paint(figure: "Figure") -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _paint_slots(above, seconds, columns)
        below.step(seconds, columns["num_rows"], color=PURPLE, linewidth=1.2, label="verified")
        below.step(seconds, columns["num_tokens"], color=GREEN, linewidth=1.2, label="gained")
        below.set_ylabel("tokens")
        below.set_xlabel("seconds of the rollout")
        below.set_xlim(0, seconds[-1])
        below.set_ylim(bottom=0)
        for axes in (above, below):
            axes.legend(loc="lower left", bbox_to_anchor=(0, 0.96), ncols=3, columnspacing=1.5, handlelength=1.5)

    num_prefill = sum(step.num_prefill for step in steps)
    note = (
        f"{len(steps):,} decode steps in {steps[-1].seconds:.3g} seconds. Above: slots in use, and the samples that "
        f"wait for one. Below: tokens that each decode step verified, and those that the step's samples gained by it; "
        f"{num_prefill:,} prompt tokens were computed beside them."
    )
    return draw_figure(f"Timeline of step {timeline.step}", note, paint, inches=(11.6, 3.6), is_wide=True)


def _paint_slots(axes: "Axes", seconds: Array, columns: Mapping[str, Array]) -> None:
    """Slots in use as areas; who waits, on a scale of its own at the right."""
    primaries, waiting = columns["num_primaries"], columns["num_waiting"]
    both = primaries + columns["num_run_ahead"]
    axes.fill_between(seconds, primaries, step="pre", linewidth=0, color=BLUE, alpha=0.75, label="samples of the step")
    if columns["num_run_ahead"].any():
        axes.fill_between(
            seconds, primaries, both, step="pre", linewidth=0, color=ORANGE, alpha=0.75, label="run-ahead"
        )
    axes.set_ylabel("slots")
    axes.set_ylim(0, 1.1 * max(1.0, both.max()))
    if waiting.any():
        right = axes.twinx()
        right.step(seconds, waiting, color=INK, linestyle="--", linewidth=1.2)
        axes.plot([], [], color=INK, linestyle="--", linewidth=1.2, label="waiting (right)")  # for the legend alone
        right.set_ylabel("waiting samples")
        right.set_ylim(0, 1.1 * waiting.max())
        right.grid(visible=False)


def timeline_columns(steps: Sequence[DecodeStep]) -> tuple[Array, dict[str, Array]]:
    """End times (seconds) and counts of the decode steps, from 0 on; of very many, means over several at a time."""
    names = ("num_primaries", "num_run_ahead", "num_waiting", "num_rows", "num_tokens")
    size = -(-len(steps) // MAX_POINTS)
    begins = np.arange(0, len(steps), size)
    sizes = np.diff([*begins, len(steps)])
    seconds = np.array([step.seconds for step in steps])[begins + sizes - 1]
    columns = {}
    for name in names:
        values = np.add.reduceat(np.array([getattr(step, name) for step in steps], np.float64), begins) / sizes
        columns[name] = np.concatenate([values[:1], values])
    return np.concatenate([[0.0], seconds]), columns
