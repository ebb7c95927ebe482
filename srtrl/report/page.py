"""`srtrl report`: a run's summary, curves and samples as one HTML page that needs no network."""

import os
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from srtrl import __version__
from srtrl.environments.base import count_turns, segment_titles
from srtrl.files import check_output, write_atomic
from srtrl.report.charts import CHARTS, SPEED, Chart, draw, inline, lines_of
from srtrl.report.decoded_response import DecodedResponse, decoded_response, last_rollout, text_decoder
from srtrl.report.rollouts import read_samples, token_rewards_text
from srtrl.report.runs import Run, read_run
from srtrl.run.machine import read_machines
from srtrl.run.step_metrics import MANY_TRUNCATED, TIME, headline, longest_stages, run_figures

TEMPLATE = Path(__file__).parent / "page.html"
MARK = "· srtrl</title>"
"""In the template, and so in every report."""
NUM_STEPS = 6
"""Steps of which samples are shown."""
MAX_POINTS = 250
"""Points of a line that show their value under the pointer."""
NUM_PER_OUTCOME = 3
"""Samples of a step and outcome that are shown."""


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run's folder; returns its path.

    Works on a run that is going on, was interrupted, or did not keep its rollouts: what is missing is left out.

    Raises:
        ValueError: `folder` is not a run's folder, nothing has been logged yet, a row lacks a metric of each step, or
            `report.html` is not a report.
    """
    run, path = read_run(folder), folder / "report.html"
    check_output("report", path, MARK)
    write_atomic(path, render(run))
    return path


def open_in_browser(path: Path) -> None:
    """Show a page in the desktop's browser; where there is no desktop, do nothing."""
    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(path.resolve().as_uri())


def render(run: Run) -> str:
    """The page as HTML text."""
    from jinja2 import Environment, StrictUndefined

    figures = run_figures(run.rows)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        num_steps=run.num_steps,
        recipe=run.recipe,
        recipe_text=(run.folder / "recipe.yaml").read_text(encoding="utf-8"),
        headline=list(headline(figures).items()),
        time=figures[TIME],
        decoded=_decoded(run),
        figures=[(name, figure) for name, figure in figures.items() if name != TIME],
        stages=[(name, seconds) for name, seconds in longest_stages(run.rows) if seconds > 0],
        notices=list(_notices(run)),
        sections={name: list(charts) for name, charts in _sections(run).items() if charts},
        run_folder=run.folder,
        machines=read_machines(run.folder),
        samples=list(_samples(run)),
        segment_titles=segment_titles,
        token_rewards_text=token_rewards_text,
        count_turns=count_turns,
        version=__version__,
    )


def _notices(run: Run) -> Iterator[str]:
    """Notices that a reader needs before believing the curves."""
    if not run.is_finished:
        yield (
            f"This run has done {run.num_steps} of {run.recipe.train.num_steps} steps: it is still running, or it was "
            "interrupted (`srtrl train RECIPE --resume` continues it)."
        )
    truncated = run.rows[-1].get("length/truncated_share", 0.0)
    if truncated > MANY_TRUNCATED:
        yield (
            f"{truncated:.0%} of the responses of the last step were cut off at rollout.max_new_tokens "
            f"({run.recipe.rollout.max_new_tokens}): most of them could not end. Raise it, or reward short responses."
        )
    failed = {kind: sum(row.get(f"grading/{kind}", 0) for row in run.rows) for kind in ("timeout", "crash", "error")}
    if any(failed.values()):
        counts = ", ".join(f"{count:.0f} {kind}" for kind, count in failed.items() if count)
        yield f"Grading failed for some training samples, whose reward is 0: {counts}."


def _sections(run: Run) -> dict[str, list[tuple[Chart, str, dict[str, list[tuple[float, float]]]]]]:
    """The charts that there is data for, each with its picture as SVG for the page, and the points of its lines."""
    in_training = [
        # Compilation, which is part of the first step, would dwarf all other seconds.
        {**row, "time/step": row["time/step"] - row.get("time/compile", 0)}
        for row in run.rows
        if row["step"] > 0
    ]
    sections = {}
    for name, charts in CHARTS.items():
        rows = in_training if name == SPEED else run.rows
        sections[name] = [
            (chart, inline(draw(chart, rows, lines)), {line.label: _thinned(line.points) for line in lines})
            for chart in charts
            if (lines := lines_of(chart, rows))
        ]
    return sections


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MAX_POINTS` of them, of four digits."""
    every = -(-len(points) // MAX_POINTS)
    return [(step, float(f"{value:.4g}")) for step, value in points[::every]]


def _decoded(run: Run) -> DecodedResponse | None:
    """A response with the tokens of each decode step; None without drafts, kept rollouts or a tokenizer."""
    if run.recipe.rollout.drafter == "none" or not run.rollout_files:
        return None
    try:
        decode = text_decoder(run)
    except ValueError:  # no checkpoint yet, and the model is elsewhere
        return None
    return decoded_response(*last_rollout(run), decode)


def _samples(run: Run) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
    """The first, the last and evenly spaced steps between: step, number of its samples, and some of each outcome.

    Those of a prompt that was shown before come first, so that a reader sees how its responses change.
    """
    steps = list(run.rollout_files)
    shown: set[str] = set()
    for index in np.unique(np.linspace(0, len(steps) - 1, NUM_STEPS).round().astype(int)) if steps else []:
        samples = read_samples(run, step=steps[index])
        chosen: dict[str, list[dict[str, Any]]] = {}
        for sample in sorted(samples, key=lambda sample: (sample["prompt_id"] not in shown, sample["sample_index"])):
            chosen.setdefault(sample["outcome"], []).append(sample)
        picked = [sample for outcome in sorted(chosen) for sample in chosen[outcome][:NUM_PER_OUTCOME]]
        shown |= {sample["prompt_id"] for sample in picked}
        yield steps[index], len(samples), picked
