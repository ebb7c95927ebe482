"""Tables of a comparison of drafters: how fast, where the time goes, and what run-ahead brought."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from srtrl.bench.comparison import Comparison
from srtrl.bench.statistics import Ratio
from srtrl.bench.tables import Align, Grid

PARTS = ("draft", "forward", "sample", "commit")
"""Of a decode step, as the engine counts their seconds."""
_COUNTS = frozenset(
    f"engine/{name}"
    for name in (
        *("decode_steps", "tokens", "prefill_tokens", "preemptions", "run_ahead_rows", "run_ahead_tokens_made"),
        *("run_ahead_tokens_used", "run_ahead_followed", "run_ahead_reanchored"),
    )
)
"""Metrics that add up; so do seconds."""
_FIRST_MISMATCH = "engine/run_ahead_first_mismatch"
_DEPTHS = (1, 2, 4, 8)
"""Depths whose acceptance is shown."""


def mean_metric(runs: Sequence[Mapping[str, float]], name: str) -> float:
    """Mean of a metric over the runs that have it; NaN where none has."""
    values = [run[name] for run in runs if name in run]
    return statistics.fmean(values) if values else float("nan")


def ratios_of(comparison: Comparison) -> dict[str, Ratio]:
    """How many times as fast as the first contender each of the others is."""
    first, *others = comparison.seconds
    return {name: comparison.ratio(name, to=first) for name in others}


def aligned(num_labels: int, num_numbers: int, num_words: int) -> tuple[Align, ...]:
    """Alignment of labels, the drafter's name, numbers, and words."""
    right: Align = "right"
    left: Align = "left"
    return (*[right] * num_labels, left, *[right] * num_numbers, *[left] * num_words)


def drafter_grid(
    comparisons: Sequence[Comparison],
    columns: Sequence[str],
    cells: Callable[[Comparison, str], Sequence[str]],
    *,
    caption: str,
) -> Grid:
    """One row a comparison and contender: the comparison's labels, the contender, numbers, and one column of words.

    Args:
        comparisons: With the same labels and contenders.
        columns: Headings behind those of the labels and the drafter; all but the last are numbers.
        cells: What stands below them for a contender.
        caption: A line above the table.
    """
    labels = tuple(comparisons[0].labels)
    return Grid(
        caption=caption,
        columns=(*labels, "drafter", *columns),
        alignments=aligned(len(labels), len(columns) - 1, 1),
        rows=tuple(
            (*comparison.labels.values(), name, *cells(comparison, name))
            for comparison in comparisons
            for name in comparison.seconds
        ),
        group_by=len(labels),
    )


def speed_grid(comparisons: Sequence[Comparison], caption: str = "") -> Grid:
    """Seconds, and what a decode step took and brought."""

    def cells(comparison: Comparison, name: str) -> Sequence[str]:
        runs = comparison.metrics[name]
        median = statistics.median(comparison.seconds[name])
        return (
            f"{median:.3f}",
            f"{1000 * median / mean_metric(runs, 'engine/decode_steps'):.2f}",
            f"{1000 * median / comparison.num_tokens:.3f}",
            f"{mean_metric(runs, 'engine/tokens_per_decode_step'):.2f}",
            f"{mean_metric(runs, 'engine/verified_per_decode_step'):.2f}",
            _ratio(comparison, name),
        )

    columns = ("seconds", "ms/step", "ms/token", "tokens/step", "verified/step", _against(comparisons))
    return drafter_grid(comparisons, columns, cells, caption=caption)


def time_grid(comparisons: Sequence[Comparison]) -> Grid:
    """Shares of the time by part of a decode step, and how far drafts were accepted."""

    def cells(comparison: Comparison, name: str) -> Sequence[str]:
        runs = comparison.metrics[name]
        seconds = [mean_metric(runs, f"engine/{part}_seconds") for part in PARTS]
        depths = [mean_metric(runs, f"engine/acceptance_depth_{depth}") for depth in _DEPTHS]
        return (
            *(f"{part / sum(seconds):.1%}" for part in seconds),
            _cell(mean_metric(runs, "engine/draft_hit_rate"), ".0%"),
            _cell(mean_metric(runs, "engine/accepted_per_draft"), ".2f"),
            " ".join(_cell(depth, ".2f") for depth in depths),
        )

    columns = (*PARTS, "hits", "accepted/draft", f"accepted at depth {_words(_DEPTHS)}")
    caption = "Where the time of the clock goes, and what became of the drafts"
    return drafter_grid(comparisons, columns, cells, caption=caption)


def run_ahead_grid(comparisons: Sequence[Comparison], num_tokens: Sequence[int]) -> Grid:
    """What run-ahead made, how much of it later samples took over, and what that was worth.

    Args:
        comparisons: Each of all steps together, with different labels.
        num_tokens: For each the tokens of the steps that had one before them, and could follow its run-ahead.
    """
    most = {tuple(one.labels.values()): count for one, count in zip(comparisons, num_tokens, strict=True)}

    def cells(comparison: Comparison, name: str) -> Sequence[str]:
        runs = comparison.metrics[name]
        used = mean_metric(runs, "engine/run_ahead_tokens_used")
        return (
            _cell(mean_metric(runs, "engine/run_ahead_tokens_made"), ",.0f"),
            _cell(mean_metric(runs, "engine/run_ahead_followed"), ",.0f"),
            _cell(used / max(most[tuple(comparison.labels.values())], 1), ".1%"),
            _cell(mean_metric(runs, _FIRST_MISMATCH), ".1f"),
            _ratio(comparison, name),
        )

    columns = (
        "tokens decoded ahead",
        "samples that followed",
        "share of tokens accepted from it",
        "tokens before the first mismatch or its end",
        _against(comparisons),
    )
    return drafter_grid(comparisons, columns, cells, caption="What run-ahead brought")


def merge_steps(steps: Sequence[Comparison]) -> Comparison:
    """All steps of a series as one comparison: run i of a contender is its run i of every step."""
    names = steps[0].seconds
    return Comparison(
        lengths=steps[0].lengths,
        num_sequences=sum(step.num_sequences for step in steps),
        num_tokens=sum(step.num_tokens for step in steps),
        longest=max(step.longest for step in steps),
        seconds={
            name: [sum(runs) for runs in zip(*(step.seconds[name] for step in steps), strict=True)] for name in names
        },
        metrics={
            name: [merge_metrics(runs) for runs in zip(*(step.metrics[name] for step in steps), strict=True)]
            for name in names
        },
        labels={"slots": steps[0].labels["slots"]},
        num_pilot=steps[0].num_pilot,
    )


def merge_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several steps as of one: counts and seconds add up, means count as often as samples sampled.

    The mean run before the first mismatch counts as often as samples followed a run-ahead.
    """
    merged = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        having = [step for step in steps if name in step]
        if name in _COUNTS or name.endswith("_seconds"):
            merged[name] = sum(step[name] for step in having)
            continue
        if name == _FIRST_MISMATCH:
            weights = [step["engine/run_ahead_followed"] for step in having]
        else:
            weights = [step["engine/tokens"] / step["engine/tokens_per_decode_step"] for step in having]
        merged[name] = sum(w * step[name] for w, step in zip(weights, having, strict=True)) / sum(weights)
    return merged


def _against(comparisons: Sequence[Comparison]) -> str:
    """Heading of the ratios."""
    return f"against {next(iter(comparisons[0].seconds))}"


def _ratio(comparison: Comparison, name: str) -> str:
    """How many times as fast as the first contender it is; nothing for that one."""
    first = next(iter(comparison.seconds))
    return "" if name == first else str(comparison.ratio(name, to=first))


def _cell(value: float, form: str) -> str:
    """A number in a format, or a dash where there is none."""
    return "-" if math.isnan(value) else format(value, form)


def _words(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
