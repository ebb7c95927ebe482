"""`srtrl report`: a run's curves, lengths and samples as one HTML page that needs no network."""

import base64
import os
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from srtrl import __version__
from srtrl.metrics import MetricRow, write_atomic
from srtrl.report.charts import draw_charts
from srtrl.report.drawing import Chart
from srtrl.report.run_data import RunData, StepRollouts, choose_samples, read_run
from srtrl.report.speculation_charts import NUM_LATEST, draw_speculation
from srtrl.report.trie_section import look_at_trie
from srtrl.trainer.run_metrics import HeldOut, RunSummary, summarise_run

TEMPLATE = Path(__file__).parent / "page.html"


@dataclass(frozen=True, slots=True)
class Tile:
    """One of the figures at the top of the page."""

    label: str
    value: str
    detail: str = ""
    mood: str = ""
    """`good` or `bad` colours the value."""


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run's folder; returns its path.

    Works on a run that is going on, was interrupted, or did not keep its rollouts: what is missing is left out.

    Raises:
        ValueError: `folder` is not a run's folder, or nothing has been logged yet.
    """
    path = folder / "report.html"
    write_atomic(path, render(read_run(folder)))
    return path


def open_in_browser(path: Path) -> None:
    """Show a page in the desktop's browser; where there is no desktop, do nothing."""
    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(path.resolve().as_uri())


def render(run: RunData) -> str:
    """The page as HTML text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    is_finished = bool(run.steps) and run.steps[-1]["step"] >= run.recipe.train.num_steps
    summary = summarise_run(run.recipe.name, run.rows, interrupted=not is_finished)
    trie = look_at_trie(run) if run.speculates else None
    sections = {
        "Curves": draw_charts(run),
        "Speculation": [*draw_speculation(run), *([trie.picture] if trie is not None else [])],
    }
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        summary=summary,
        recipe=run.recipe,
        recipe_text=run.recipe_text,
        tiles=_tiles(run, summary),
        notices=_notices(run, summary),
        sections=[(name, [_shown(chart) for chart in charts]) for name, charts in sections.items() if charts],
        trie=trie,
        samples=[StepRollouts(step=step.step, samples=choose_samples(step)) for step in _ends(run.rollouts)],
        version=__version__,
    )


def _ends(rollouts: Sequence[StepRollouts]) -> list[StepRollouts]:
    """The first and the last, which may be the same."""
    return [rollouts[index] for index in sorted({0, len(rollouts) - 1})] if rollouts else []


def _tiles(run: RunData, summary: RunSummary) -> list[Tile]:
    tiles = [Tile("Held-out accuracy before", *_accuracy(summary.before))]
    gain = None
    if summary.before is not None and summary.after is not None:
        gain = 100 * (summary.after.accuracy - summary.before.accuracy)
    mood = "" if not gain else "good" if gain > 0 else "bad"
    value, detail = _accuracy(summary.after)
    tiles.append(Tile("Held-out accuracy after", value, detail, mood))
    if gain is not None:
        tiles.append(Tile("Gain", f"{gain:+.1f}", "percentage points", mood))
    if summary.first_reward is not None and summary.last_reward is not None:
        tiles.append(
            Tile("Training reward", f"{summary.last_reward:.3f}", f"{summary.first_reward:.3f} at the first step")
        )
    tiles.append(Tile("Steps", f"{summary.num_steps}", f"of {run.recipe.train.num_steps}"))
    total = sum(summary.seconds.values())
    share = summary.seconds.get("rollout", 0.0) / total if total else 0.0
    tiles.append(Tile("Time of all stages", _duration(total), f"{share:.0%} of it rollouts"))
    tiles.append(Tile("Response tokens", f"{summary.num_response_tokens:,}", "sampled for training"))
    if run.speculates:
        tiles += _speculation_tiles(run.steps[-NUM_LATEST:])
    return tiles


def _speculation_tiles(rows: Sequence[MetricRow]) -> list[Tile]:
    """What drafts bring in the latest steps."""
    tokens, verified = (
        fmean(row.get(f"engine/{name}_per_decode_step", 1.0) for row in rows) for name in ("tokens", "verified")
    )
    tiles = [Tile("Tokens a decode step", f"{tokens:.2f}", f"{verified:.1f} verified, in the latest steps")]
    saved = sum(row.get("engine/saved_seconds", 0.0) for row in rows)
    spent = sum(row.get("time/rollout", 0.0) for row in rows)
    if saved and spent and saved + spent > 0:
        share = saved / (saved + spent)
        tiles.append(Tile("Rollout time saved", f"{share:.0%}", "estimated, in the latest steps"))
    return tiles


def _notices(run: RunData, summary: RunSummary) -> list[str]:
    """What a reader must know before believing the curves."""
    notices = []
    if summary.interrupted:
        notices.append(
            f"This run has done {summary.num_steps} of {run.recipe.train.num_steps} steps: it is still going on, or "
            "it was interrupted (`srtrl train RECIPE --resume` goes on)."
        )
    if summary.num_skipped_steps:
        notices.append(
            f"{summary.num_skipped_steps} steps had nothing to learn from: the filters dropped all their groups, or "
            "overlong filtering all that was left."
        )
    failed = {
        kind: int(sum(row.get(f"grading/{kind}", 0) for row in run.rows)) for kind in ("timeout", "crash", "error")
    }
    if any(failed.values()):
        counts = ", ".join(f"{count} {kind}" for kind, count in failed.items() if count)
        notices.append(f"Grading failed for some training samples, which count as not correct: {counts}.")
    return notices


def _accuracy(held_out: HeldOut | None) -> tuple[str, str]:
    """Value and detail of a tile."""
    if held_out is None:
        return "-", "not evaluated"
    interval = f"{held_out.accuracy_low:.1%} to {held_out.accuracy_high:.1%}"
    return f"{held_out.accuracy:.1%}", f"step {held_out.step}, 95% interval {interval}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _shown(chart: Chart) -> dict[str, object]:
    """A chart as the template takes it."""
    return {"title": chart.title, "note": chart.note, "uri": _data_uri(chart.svg), "is_wide": chart.is_wide}


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode("utf-8")).decode("ascii")
