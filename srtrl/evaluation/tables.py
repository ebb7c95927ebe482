"""The figures of evaluations for people and for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from srtrl.recipe_errors import validate_section
from srtrl.tasks.math import MathOptions
from srtrl.trainer.evaluate import Estimate, EvalOutcome, EvalResult, macro_average

if TYPE_CHECKING:
    from srtrl.evaluation.suite import OpenSuite

COLUMNS = (
    *("problems\nx samples", "avg@N and pass@k\n(95% interval)", "maj@N\n(95% interval)", "tokens: mean,\nmedian, max"),
    *("cut", "not\ngraded", "seconds", "tokens/s", "tokens\na step"),
)
"""Headings of `eval_table`; docs/evaluation.md explains them."""


def eval_table(
    title: str, results: Mapping[str, EvalResult], notes: Sequence[str] = (), missing: Sequence[str] = ()
) -> Table:
    """One row an evaluation, and the macro average of several.

    Args:
        title: Of the table.
        results: Name of the task or benchmark -> its figures.
        notes: Lines below the table.
        missing: Benchmarks without data.
    """
    table = Table(
        "", title=escape(title), caption=escape("\n".join(notes)) or None, caption_justify="left", show_lines=True
    )
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if "interval" in heading else "right", no_wrap=True)
    for name, result in results.items():
        shares = {f"avg@{result.num_samples}": _accuracy(result)}
        shares |= {f"pass@{k}": share for k, share in result.pass_at.items() if k > 1}
        width = max(map(len, shares))
        speed = result.num_tokens / result.seconds if result.seconds > 0 else 0.0
        table.add_row(
            escape(name),
            f"{result.num_problems:,}\nx {result.num_samples}",
            "\n".join(f"{kind:{width}} {_text(share)}" for kind, share in shares.items()),
            "" if result.majority is None else _text(result.majority),
            f"{result.mean_length:,.0f}\n{result.median_length:,.0f}\n{result.max_length:,}",
            f"{result.truncated_share:.1%}",
            str(result.outcomes["timeout"] + result.outcomes["crash"] + result.outcomes["error"]),
            f"{result.seconds:,.1f}",
            f"{speed:,.0f}",
            "" if result.tokens_per_decode_step is None else f"{result.tokens_per_decode_step:.2f}",
        )
    for name in missing:
        table.add_row(escape(name), "", "no data")
    num_all = len(results) + len(missing)
    if num_all > 1:
        average = f"avg@N {_text(_macro(results.values()))}"
        table.add_row(f"macro average\nof {len(results)} of {num_all}", "", average, style="bold")
    return table


def settings_of(outcome: EvalOutcome) -> dict[str, Any]:
    """How the policy was sampled, and the number of problems that were left out."""
    recipe = outcome.job.recipe
    return {
        "seed": recipe.seed,
        **{name: getattr(recipe.eval, name) for name in ("temperature", "top_k", "top_p")},
        **{name: getattr(recipe.rollout, name) for name in ("max_prompt_tokens", "max_new_tokens")},
        "num_left_out": outcome.num_left_out,
    }


def prompting_of(outcome: EvalOutcome) -> dict[str, Any]:
    """How the task `math` put its problems, as resolved."""
    options = validate_section(MathOptions, dict(outcome.job.recipe.task.options))
    return {name: getattr(options, name) for name in ("prompt_template", "chat_template", "system_prompt")}


def suite_record(model: str, suite: OpenSuite, outcomes: Sequence[EvalOutcome]) -> dict[str, Any]:
    """What `--suite --json` prints."""
    return {
        "model": model,
        "suite": suite.name,
        "seed": outcomes[0].job.recipe.seed,
        "benchmarks": [
            {
                "name": benchmark.name,
                "title": benchmark.title,
                "place": benchmark.place,
                "num_rows": outcome.task.load_report["eval/rows"],
                "expected_rows": benchmark.num_rows,
                **settings_of(outcome),
                **prompting_of(outcome),
                "result": asdict(outcome.result),
            }
            for benchmark, outcome in zip(suite.benchmarks, outcomes, strict=True)
        ],
        "missing": suite.missing,
        "macro_average": {**asdict(_macro(one.result for one in outcomes)), "num_benchmarks": len(outcomes)},
    }


def task_notes(outcome: EvalOutcome) -> list[str]:
    """What a reader must know to believe the figures: how the policy was sampled, and what is in no figure."""
    return [_described(settings_of(outcome)), *_left_out(outcome)]


def suite_notes(suite: OpenSuite, outcomes: Sequence[EvalOutcome]) -> list[str]:
    """The same for the benchmarks of a suite; those with the same settings are in one line."""
    notes = []
    titles: dict[str, list[str]] = {}
    for benchmark, outcome in zip(suite.benchmarks, outcomes, strict=True):
        num_rows = outcome.task.load_report["eval/rows"]
        notes += [f"{benchmark.title}: {note}" for note in _left_out(outcome)]
        if benchmark.num_rows not in (None, num_rows):
            place, expected = benchmark.place, benchmark.num_rows
            notes.append(f"{benchmark.title}: {place} has {num_rows} problems, known are {expected}.")
        titles.setdefault(_described(settings_of(outcome) | prompting_of(outcome)), []).append(benchmark.title)
    notes += [f"{name}: no data: {reason}" for name, reason in suite.missing.items()]
    return notes + [f"{', '.join(names)}: {settings}" for settings, names in titles.items()]


def _described(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in settings.items() if name != "num_left_out")


def _left_out(outcome: EvalOutcome) -> list[str]:
    if not outcome.num_left_out:
        return []
    what = f"{outcome.num_left_out} of {outcome.task.load_report['eval/rows']} problems are in no figure"
    return [f"{what}: their prompts have more than {outcome.job.recipe.rollout.max_prompt_tokens} tokens."]


def _accuracy(result: EvalResult) -> Estimate:
    return Estimate(value=result.accuracy, low=result.interval[0], high=result.interval[1])


def _macro(results: Iterable[EvalResult]) -> Estimate:
    """Macro average of avg@N over the benchmarks that were evaluated."""
    return macro_average([_accuracy(result) for result in results])


def _text(share: Estimate) -> str:
    return f"{100 * share.value:5.1f}% ({100 * share.low:.1f} to {100 * share.high:.1f})"
