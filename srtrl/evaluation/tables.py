"""The figures of evaluations for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table

from srtrl.trainer.evaluate import Estimate, EvalResult, macro_average
from srtrl.types import GradeOutcome

FAILURES: tuple[GradeOutcome, ...] = ("timeout", "crash", "error")
"""Outcomes of grading that are failures of the grader."""


@dataclass(kw_only=True, slots=True, frozen=True)
class BenchmarkReport:
    """One row of a suite's table."""

    name: str
    title: str
    place: str
    """File or hub data set."""
    num_rows: int
    """Problems in the data."""
    expected_rows: int | None
    """Problems that the benchmark is known to have."""
    num_left_out: int
    """Problems whose prompt is longer than `max_prompt_tokens`; they are in no figure."""
    max_prompt_tokens: int
    max_new_tokens: int
    prompt_template: str
    chat_template: bool
    system_prompt: str | None
    temperature: float
    top_k: int
    top_p: float
    result: EvalResult

    @property
    def accuracy(self) -> Estimate:
        """avg@N with its interval."""
        return Estimate(value=self.result.accuracy, low=self.result.interval[0], high=self.result.interval[1])


@dataclass(kw_only=True, slots=True, frozen=True)
class SuiteReport:
    """What `srtrl eval --suite` prints."""

    model: str
    suite: str
    seed: int
    benchmarks: Sequence[BenchmarkReport]
    missing: Mapping[str, str] = field(default_factory=dict)
    """Benchmark -> why its data was not to be had (`--skip-missing`)."""

    @property
    def macro(self) -> Estimate:
        """Macro average of avg@N over the benchmarks that were evaluated."""
        return macro_average([one.accuracy for one in self.benchmarks])

    def as_record(self) -> dict[str, Any]:
        """What `--json` prints."""
        record = asdict(self)
        record["missing"] = dict(self.missing)
        record["macro_average"] = {**asdict(self.macro), "num_benchmarks": len(self.benchmarks)}
        return record


@dataclass(kw_only=True, slots=True, frozen=True)
class TaskReport:
    """What an evaluation on one task ran with."""

    model: str
    task: str
    seed: int
    temperature: float
    top_k: int
    top_p: float
    max_prompt_tokens: int
    max_new_tokens: int
    num_left_out: int
    """Problems whose prompt is longer than `max_prompt_tokens`; they are in no figure."""


def eval_table(model: str, result: EvalResult, report: TaskReport | None = None) -> Table:
    """One evaluation, a figure a line; with `report`, what it ran with stands below."""
    name = "pass@1" if result.num_samples == 1 else f"pass@1 (avg@{result.num_samples})"
    title = f"{model}: {result.num_problems} problems x {result.num_samples}"
    caption = None if report is None else escape(_task_caption(report))
    table = Table(title=title, caption=caption, caption_justify="left", show_header=False)
    table.add_row(name, _line(Estimate(value=result.accuracy, low=result.interval[0], high=result.interval[1])))
    for k, share in result.pass_at.items():
        if k > 1:
            table.add_row(f"pass@{k}", _line(share))
    if result.majority is not None:
        table.add_row(f"maj@{result.num_samples}", _line(result.majority))
    table.add_row("reward, mean", f"{result.reward:.4f}")
    lengths = f"{result.mean_length:.1f} / {result.median_length:.0f} / {result.max_length} tokens"
    table.add_row("response length, mean / median / max", lengths)
    table.add_row("cut at the length limit", f"{result.truncated_share:.2%}")
    for outcome, count in result.outcomes.items():
        table.add_row(f"graded {outcome}", str(count))
    table.add_row("time", f"{result.seconds:.1f} s  ({_speed(result):,.0f} tokens/s)")
    if result.tokens_per_decode_step is not None:
        table.add_row("tokens per decode step", f"{result.tokens_per_decode_step:.2f}")
    return table


def suite_table(report: SuiteReport) -> Table:
    """One row a benchmark, and the macro average."""
    num_all = len(report.benchmarks) + len(report.missing)
    table = Table(title=f"{report.model}: suite {report.suite}", caption=_caption(report), caption_justify="left")
    table.add_column("benchmark")
    table.add_column("problems\nx samples", justify="right")
    table.add_column("avg@N and pass@k\n(95% interval)", no_wrap=True)
    table.add_column("maj@N\n(95% interval)", no_wrap=True)
    table.add_column("tokens: mean,\nmedian, max", justify="right", no_wrap=True)
    table.add_column("cut", justify="right", no_wrap=True)
    table.add_column("not\ngraded", justify="right")
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("tokens\na step", justify="right", no_wrap=True)
    for one in report.benchmarks:
        result = one.result
        majority = "" if result.majority is None else _short(result.majority)
        table.add_row(
            one.title,
            f"{result.num_problems:,}\nx {result.num_samples}",
            _passes(one),
            majority,
            f"{result.mean_length:,.0f}\n{result.median_length:,.0f}\n{result.max_length:,}",
            f"{result.truncated_share:.1%}",
            str(sum(result.outcomes[outcome] for outcome in FAILURES)),
            f"{result.seconds:,.1f}",
            f"{_speed(result):,.0f}",
            "" if result.tokens_per_decode_step is None else f"{result.tokens_per_decode_step:.2f}",
            end_section=True,
        )
    for name in report.missing:
        table.add_row(name, "", "no data", end_section=True)
    average = f"avg@N {_short(report.macro)}"
    table.add_row(f"macro average\nof {len(report.benchmarks)} of {num_all}", "", average, style="bold")
    return table


def _passes(one: BenchmarkReport) -> str:
    """`avg@8 62.0% (55.1 to 68.9)`, then a line for each k above 1."""
    lines = [(f"avg@{one.result.num_samples}", one.accuracy)]
    lines += [(f"pass@{k}", share) for k, share in one.result.pass_at.items() if k > 1]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}} {_short(share)}" for name, share in lines)


def _caption(report: SuiteReport) -> str:
    """What a reader must know to believe the figures: what is in none of them, and how the policy was asked."""
    lines = []
    for one in report.benchmarks:
        if one.num_left_out:
            what = f"{one.num_left_out} of {one.num_rows} problems are in no figure"
            lines.append(f"{one.title}: {what}: their prompts have more than {one.max_prompt_tokens} tokens.")
        if one.expected_rows is not None and one.num_rows != one.expected_rows:
            lines.append(f"{one.title}: {one.place} has {one.num_rows} problems, known are {one.expected_rows}.")
    lines += [f"{name}: no data: {reason}" for name, reason in report.missing.items()]
    settings: dict[str, list[str]] = {}
    for one in report.benchmarks:
        settings.setdefault(_how_asked(one), []).append(one.title)
    lines += [f"{', '.join(titles)}: {how}" for how, titles in settings.items()]
    lines.append(f"Seed {report.seed}.")
    return "\n".join(escape(line) for line in lines)


def _task_caption(report: TaskReport) -> str:
    lines = [f"Task {report.task}: {_sampling(report)}, seed {report.seed}."]
    if report.num_left_out:
        lines.append(
            f"{report.num_left_out} problems are in no figure: their prompts have more than "
            f"{report.max_prompt_tokens} tokens."
        )
    return "\n".join(lines)


def _how_asked(one: BenchmarkReport) -> str:
    chat = "chat template, " if one.chat_template else "no chat template, "
    system = "" if one.system_prompt is None else f"system prompt {one.system_prompt!r}, "
    return f"{_sampling(one)}, {chat}{system}prompt {one.prompt_template!r}."


def _sampling(one: BenchmarkReport | TaskReport) -> str:
    top_k = f"top-k {one.top_k}, " if one.top_k else ""
    return f"temperature {one.temperature:g}, {top_k}top-p {one.top_p:g}, at most {one.max_new_tokens} new tokens"


def _line(share: Estimate) -> str:
    return f"{share.value:.2%}  (95% interval {share.low:.2%} to {share.high:.2%})"


def _short(share: Estimate) -> str:
    return f"{100 * share.value:5.1f}% ({100 * share.low:.1f} to {100 * share.high:.1f})"


def _speed(result: EvalResult) -> float:
    return result.num_tokens / result.seconds if result.seconds > 0 else 0.0
