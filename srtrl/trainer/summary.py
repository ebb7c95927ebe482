"""`summary.json` and the table at the end of a run; both are read off `metrics.jsonl`, so a resumed run's are whole."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from srtrl.metrics import MetricRow, read_metrics, write_atomic
from srtrl.trainer.step_metrics import timed_stages


@dataclass(kw_only=True, slots=True, frozen=True)
class HeldOut:
    """One evaluation on the held-out problems."""

    step: int
    accuracy: float
    accuracy_low: float
    """Lower end of the 95% confidence interval."""
    accuracy_high: float
    num_problems: int
    num_samples: int
    mean_length: float
    """Mean response length in tokens."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RunSummary:
    """What a run did; timing as far as its steps are in `metrics.jsonl`."""

    name: str
    num_steps: int
    """Training steps done."""
    interrupted: bool
    before: HeldOut | None
    """The policy that the run started from; None where the recipe asks for no evaluation."""
    after: HeldOut | None
    """The latest evaluation of a trained policy."""
    best: HeldOut | None
    """The most accurate evaluation (the earliest of equals)."""
    first_reward: float | None
    """Mean training reward of the first step."""
    last_reward: float | None
    seconds: dict[str, float]
    """Seconds of each stage over the whole run."""
    num_prompt_tokens: int
    num_response_tokens: int
    num_skipped_steps: int
    """Steps in which neither policy nor critic learned: filters or overlong filtering left no sample."""


def summarise_run(name: str, rows: Sequence[MetricRow], *, interrupted: bool) -> RunSummary:
    """The summary of the rows of `metrics.jsonl`."""
    steps = [row for row in rows if row["step"] > 0]
    evals = [_held_out(row) for row in rows if "eval/accuracy" in row]
    trained = [held_out for held_out in evals if held_out.step > 0]
    return RunSummary(
        name=name,
        num_steps=len(steps),
        interrupted=interrupted,
        before=next((held_out for held_out in evals if held_out.step == 0), None),
        after=trained[-1] if trained else None,
        best=max(evals, key=lambda held_out: held_out.accuracy, default=None),
        first_reward=steps[0]["reward/mean"] if steps else None,
        last_reward=steps[-1]["reward/mean"] if steps else None,
        seconds={stage: sum(row.get(f"time/{stage}", 0.0) for row in rows) for stage in sorted(timed_stages(rows))},
        num_prompt_tokens=int(sum(row["tokens/prompt"] for row in steps)),
        num_response_tokens=int(sum(row["tokens/response"] for row in steps)),
        num_skipped_steps=sum("grad_norm" not in row and "critic/grad_norm" not in row for row in steps),
    )


def write_summary(folder: Path, name: str, *, interrupted: bool) -> RunSummary:
    """Write `summary.json` of the run in `folder` from its `metrics.jsonl`."""
    summary = summarise_run(name, read_metrics(folder / "metrics.jsonl"), interrupted=interrupted)
    write_atomic(folder / "summary.json", json.dumps(asdict(summary), indent=2) + "\n")
    return summary


def summary_table(summary: RunSummary) -> Table:
    """Before, after and time by stage, for people."""
    table = Table(title=f"{summary.name}: {summary.num_steps} steps", show_header=False)
    table.add_row("held-out accuracy before", _accuracy(summary.before))
    table.add_row("held-out accuracy after", _accuracy(summary.after))
    if summary.before is not None:
        table.add_row("held-out problems x samples", f"{summary.before.num_problems} x {summary.before.num_samples}")
    if summary.before is not None and summary.after is not None:
        gain = summary.after.accuracy - summary.before.accuracy
        table.add_row("gain", f"{100 * gain:+.1f} points", end_section=True)
    if summary.first_reward is not None and summary.last_reward is not None:
        table.add_row("training reward, first to last step", f"{summary.first_reward:.3f} to {summary.last_reward:.3f}")
    if summary.num_skipped_steps:
        table.add_row("steps with nothing to learn from", str(summary.num_skipped_steps))
    table.add_row("response tokens", f"{summary.num_response_tokens:,}", end_section=True)
    total = sum(summary.seconds.values())
    for stage, seconds in sorted(summary.seconds.items(), key=lambda item: -item[1]):
        table.add_row(f"time: {stage}", f"{seconds:.1f} s  ({seconds / total:.0%})" if total else "0 s")
    table.add_row("time: all stages", f"{total:.1f} s")
    return table


def _held_out(row: MetricRow) -> HeldOut:
    return HeldOut(
        step=int(row["step"]),
        accuracy=row["eval/accuracy"],
        accuracy_low=row["eval/accuracy_low"],
        accuracy_high=row["eval/accuracy_high"],
        num_problems=int(row["eval/num_problems"]),
        num_samples=int(row["eval/num_samples"]),
        mean_length=row["eval/length/mean"],
    )


def _accuracy(held_out: HeldOut | None) -> str:
    if held_out is None:
        return "not evaluated"
    return f"{held_out.accuracy:.1%}  (95%: {held_out.accuracy_low:.1%} to {held_out.accuracy_high:.1%})"
