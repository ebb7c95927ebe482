"""The curves of a report, drawn with matplotlib into SVG text. A chart whose metrics a run lacks is left out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from srtrl.metrics import MetricRow
from srtrl.report.drawing import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    Chart,
    draw,
    draw_line,
    draw_stack,
    series,
    widen_flat,
)
from srtrl.report.run_data import RunData, StepRollouts
from srtrl.trainer.run_metrics import timed_stages

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STAGE_COLOURS = {"rollout": BLUE, "update": ORANGE, "grading": PURPLE, "eval": GREEN, "checkpoint": GREY}


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
        "KL coefficient",
        "coefficient",
        (("kl/coefficient", "coefficient"),),
        "With a target it rises while the KL is above it and falls while it is below.",
    ),
    Curves(
        "Explained variance of the critic",
        "share",
        (("critic/explained_variance", "before the update"),),
        "Of the returns, by the critic's values. 1 is perfect, 0 no better than a constant, below 0 worse.",
    ),
    Curves(
        "Loss of the critic",
        "squared reward",
        (("critic/loss", "mean"),),
        "Mean over a step's optimizer steps.",
    ),
    Curves(
        "Decoder against trainer",
        "difference of log-probs",
        (("logprob_difference/mean", "mean"), ("logprob_difference/max", "largest")),
        "Of the same tokens, by the decoder and by the training pass; absolute. It should stay near rounding error.",
        log=True,
    ),
    Curves("Speed of the decoder", "tokens a second", (("time/tokens_per_second", "rollout"),), "Response tokens."),
)


DRAWS = Curves(
    "Prompts drawn for a batch",
    "prompts",
    (("data/draws", "drawn"), ("groups/kept", "kept")),
    "With dynamic sampling: groups that the filters drop are replaced until the batch is full.",
)


def draw_charts(run: RunData) -> list[Chart]:
    """All charts that the run has data for, in reading order."""
    drawn = [draw_curves(curves, run.steps) for curves in CURVES]
    drawn += [draw_curves(DRAWS, run.steps)] if run.recipe.rollout.dynamic_sampling else []
    accuracy = _draw_accuracy(run)
    parts = draw_curves(_reward_parts(run), run.steps)
    later = [_draw_stage_times(run.steps), _draw_lengths(run.rollouts)]
    return [chart for chart in (drawn[0], accuracy, parts, *drawn[1:], *later) if chart is not None]


def draw_curves(curves: Curves, rows: Sequence[MetricRow]) -> Chart | None:
    """Draw the metrics that were logged; None where none was."""
    found = [(label, *series(rows, metric)) for metric, label in curves.metrics]
    found = [(label, steps, values) for label, steps, values in found if len(steps)]
    if not found:
        return None

    def paint(axes: "Axes") -> None:
        from matplotlib.ticker import PercentFormatter

        for (label, steps, values), colour in zip(found, COLOURS, strict=False):
            draw_line(axes, steps, values, colour, label if len(found) > 1 else None)
        axes.set_xlabel("step")
        axes.set_ylabel(curves.unit)
        widen_flat(axes)
        if curves.log and all((values > 0).all() for _, _, values in found):
            axes.set_yscale("log")
        if curves.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.set_ylim(bottom=0, top=max(0.01, 1.1 * max(values.max() for _, _, values in found)))

    return draw(curves.title, curves.note, paint)


def _reward_parts(run: RunData) -> Curves:
    """One curve a named reward; none where there is only one."""
    names = [reward.name for reward in run.recipe.rewards]
    metrics = tuple((f"reward/{name}", name) for name in names) if len(names) > 1 else ()
    return Curves("Reward by part", "reward", metrics, "Each named reward, unweighted.")


def _draw_accuracy(run: RunData) -> Chart | None:
    steps, values = series(run.steps, "accuracy")
    held_out = [row for row in run.rows if "eval/accuracy" in row]
    if not len(steps) and not held_out:
        return None

    def paint(axes: "Axes") -> None:
        from matplotlib.ticker import PercentFormatter

        if len(steps):
            draw_line(axes, steps, values, BLUE, "training samples")
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
    return draw("Accuracy", note, paint)


def _draw_stage_times(rows: Sequence[MetricRow]) -> Chart | None:
    stages = timed_stages(rows)
    if not stages:
        return None
    steps = np.array([row["step"] for row in rows], np.float64)
    seconds = {stage: np.array([row.get(f"time/{stage}", 0.0) for row in rows]) for stage in stages}
    order = sorted(stages, key=lambda stage: -float(seconds[stage].sum()))
    spare = iter(COLOURS[4:])
    colours = [STAGE_COLOURS[stage] if stage in STAGE_COLOURS else next(spare, RED) for stage in order]
    parts = [(stage, colour, seconds[stage]) for stage, colour in zip(order, colours, strict=True)]

    def paint(axes: "Axes") -> None:
        draw_stack(axes, steps, parts)
        axes.set_ylabel("seconds")

    return draw("Seconds of each stage", "Stacked: the height is the whole step.", paint)


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

    return draw("Distribution of lengths", "First, middle and last step that have rollouts on disk.", paint)
