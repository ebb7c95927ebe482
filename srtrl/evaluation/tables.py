"""The figures of evaluations for people and for programs, and their rows: one a sample (`--output`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from srtrl.evaluation.policy import EvalOutcome
from srtrl.statistics import Estimate, macro_average
from srtrl.tasks.final_answer import extractor
from srtrl.tasks.math import MathOptions
from srtrl.trainer.evaluate import EvalResult

if TYPE_CHECKING:
    from srtrl.evaluation.suite import OpenSuite
    from srtrl.types import Rollout


PROMPTING = ("prompt_template", "chat_template", "system_prompt")
"""Options of the task `math` for the text of a prompt."""


def eval_table(title: str, results: Mapping[str, EvalResult], notes: Sequence[str] = ()) -> Table:
    """A column for each evaluation, a row for each figure; docs/evaluation.md explains them.

    Args:
        title: Of the table.
        results: Name of the task or benchmark -> its figures.
        notes: Lines below the table.
    """
    table = Table("", title=escape(title), caption=escape("\n".join(notes)) or None, caption_justify="left")
    columns = [_figures(result) for result in results.values()]
    for name in results:
        table.add_column(escape(name), justify="right", overflow="fold")
    for figure in dict.fromkeys(figure for column in columns for figure in column):
        table.add_row(figure, *(column.get(figure, "") for column in columns))
    return table


def _figures(result: EvalResult) -> dict[str, str]:
    """Text of each figure; those that not every evaluation has are last."""
    num_failed = result.outcomes["timeout"] + result.outcomes["crash"] + result.outcomes["error"]
    speed = result.num_tokens / result.seconds if result.seconds > 0 else 0.0
    figures = {
        "problems x samples": f"{result.num_problems:,} x {result.num_samples}",
        **_score(result),
        "tokens: mean, median, max": f"{result.mean_length:,.0f}, {result.median_length:,.0f}, {result.max_length:,}",
        "truncated": f"{result.truncated_share:.1%}",
        "not graded": str(num_failed),
        "seconds": f"{result.seconds:,.1f}",
        "tokens per second": f"{speed:,.0f}",
    }
    if result.tokens_per_decode_step is not None:
        figures["tokens per decode step"] = f"{result.tokens_per_decode_step:.2f}"
    if result.majority is not None:
        figures["maj@N"] = _text(result.majority)
    figures |= _turns(result.environment)
    return figures | {f"pass@{k}": _text(share) for k, share in result.pass_at.items() if k > 1}


def _turns(turns: Mapping[str, float]) -> dict[str, str]:
    """How the turns went, where samples have several."""
    if not turns:
        return {}
    stops = {name.removeprefix("stop_"): share for name, share in turns.items() if name.startswith("stop_")}
    valid = f"{turns['valid_call_share']:.1%} of {turns['calls']:,.0f}" if "valid_call_share" in turns else "no calls"
    return {
        "turns: mean, max": f"{turns['turns_mean']:.2f}, {turns['turns_max']:.0f}",
        "samples with a call": f"{turns['call_share']:.1%}",
        "valid calls": valid,
        "void turns": f"{turns['void_turns']:.0f}",
        "ended by": ", ".join(f"{name} {share:.1%}" for name, share in sorted(stops.items(), key=lambda one: -one[1])),
    }


def _score(result: EvalResult) -> dict[str, str]:
    """Accuracy and reward, or, where the task has no verifier, the reward with its interval."""
    if result.accuracy is not None:
        return {"avg@N (95% interval)": _text(_accuracy(result)), "mean reward": f"{result.reward:.4g}"}
    low, high = result.reward_interval
    interval = f" ({low:.4g} to {high:.4g})" if low < high else ""  # none for one problem, or where all are alike
    return {"mean reward (95% interval)": f"{result.reward:.4g}{interval}"}


def settings_of(outcome: EvalOutcome) -> dict[str, Any]:
    """How the policy was sampled, and the number of problems that were left out."""
    recipe = outcome.recipe
    turns = recipe.rollout.environment
    prompting = MathOptions.model_validate(recipe.task.options).model_dump() if recipe.task.name == "math" else {}
    return {
        "seed": recipe.seed,
        **{name: getattr(recipe.eval, name) for name in ("temperature", "top_k", "top_p")},
        **{name: getattr(recipe.rollout, name) for name in ("max_prompt_tokens", "max_new_tokens")},
        **({"environment": turns.name, "format": turns.format, "max_turns": turns.max_turns} if turns else {}),
        **{name: prompting[name] for name in PROMPTING if prompting},
        "num_left_out": outcome.num_left_out,
    }


def suite_record(model: str, suite: OpenSuite, outcomes: Sequence[EvalOutcome]) -> dict[str, Any]:
    """What `--suite --json` prints."""
    return {
        "model": model,
        "suite": suite.name,
        "seed": outcomes[0].recipe.seed,
        "benchmarks": [
            {
                "name": benchmark.name,
                "title": benchmark.title,
                "place": benchmark.place,
                "num_rows": outcome.task.load_report["eval/rows"],
                "expected_rows": benchmark.num_rows,
                **settings_of(outcome),
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
        titles.setdefault(_described(settings_of(outcome)), []).append(benchmark.title)
    notes += [f"{name}: no data: {reason}" for name, reason in suite.missing.items()]
    notes += [f"{', '.join(names)}: {settings}" for settings, names in titles.items()]
    num_all = len(outcomes) + len(suite.missing)
    macro = _text(_macro(outcome.result for outcome in outcomes))
    return [f"macro average of avg@N over {len(outcomes)} of {num_all} benchmarks: {macro}", *notes]


def _described(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in settings.items() if name != "num_left_out")


def _left_out(outcome: EvalOutcome) -> list[str]:
    if not outcome.num_left_out:
        return []
    what = f"{outcome.num_left_out} of {outcome.task.load_report['eval/rows']} problems are in no figure"
    return [f"{what}: their prompts have more than {outcome.recipe.rollout.max_prompt_tokens} tokens."]


def _accuracy(result: EvalResult) -> Estimate:
    assert result.accuracy is not None
    assert result.interval is not None
    return Estimate(value=result.accuracy, low=result.interval[0], high=result.interval[1])


def _macro(results: Iterable[EvalResult]) -> Estimate:
    """Macro average of avg@N over the benchmarks that were evaluated."""
    return macro_average([_accuracy(result) for result in results])


def _text(share: Estimate) -> str:
    return f"{100 * share.value:.1f}% ({100 * share.low:.1f} to {100 * share.high:.1f})"


# --- Rows of samples --------------------------------------------------------------------------------------------------


def check_output(path: Path) -> None:
    """Raise ValueError where the rows could not be written, or would replace a file."""
    if path.suffix != ".jsonl":
        raise ValueError(f"--output: expected a .jsonl file, found {path}")
    if path.exists():
        raise ValueError(f"--output: {path} exists; name another file, or remove that one")
    if not path.parent.is_dir():
        raise ValueError(f"--output: there is no folder {path.parent}")


def append_rows(path: Path, outcome: EvalOutcome) -> None:
    """Add the rows of one benchmark, by problem and sample: what was measured before an interrupt is not lost."""
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        for group in outcome.groups:
            for rollout in group.rollouts:
                file.write(json.dumps(_row(outcome, rollout), ensure_ascii=False) + "\n")


def _row(outcome: EvalOutcome, rollout: Rollout) -> dict[str, Any]:
    extract = extractor(outcome.task.verifier)
    row = {
        "benchmark": outcome.name,
        "problem_id": rollout.prompt.prompt_id,
        "sample_index": rollout.sample_index,
        "prompt": rollout.prompt.text,
        "text": rollout.text,
        "extracted": None if extract is None else extract(rollout.policy_text),
        "answer": rollout.prompt.answer,
        "correct": None if outcome.task.verifier is None else rollout.grade.outcome == "correct",
        "reward": rollout.grade.reward,
        "outcome": rollout.grade.outcome,
        "detail": rollout.grade.detail,
        "num_tokens": len(rollout.token_ids),
        "finish_reason": rollout.finish_reason,
    }
    if (turns := rollout.conversation) is not None:
        segments = zip(turns.segments, turns.texts, strict=True)
        row |= {
            "num_turns": turns.num_turns,
            "stop_reason": turns.stop_reason,
            "segments": [{"kind": kind, "text": text} for (kind, _), text in segments],
        }
    return row
