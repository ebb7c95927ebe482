"""The figures of evaluations for people and for programs, and their rows: one per sample (`--output`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from srtrl.evaluation.policy import EvalOutcome, majority_scores
from srtrl.evaluation.suite import PROMPT_OPTIONS
from srtrl.run.step_metrics import turn_metrics
from srtrl.statistics import Estimate, estimate, macro_average
from srtrl.tasks.final_answer import as_judged, extractor
from srtrl.tasks.math import MathOptions
from srtrl.trainer.evaluate import correct_shares

if TYPE_CHECKING:
    from srtrl.types import Rollout


def eval_table(title: str, outcomes: Sequence[EvalOutcome]) -> Table:
    """A column for each evaluation, a row for each figure, notes below; docs/evaluation.md explains them."""
    caption = escape("\n".join(_notes(outcomes)))
    table = Table("", title=escape(title), caption=caption, caption_justify="left")
    columns = [_cells(outcome) for outcome in outcomes]
    for outcome in outcomes:
        table.add_column(escape(outcome.name), justify="right", overflow="fold")
    for figure in dict.fromkeys(figure for column in columns for figure in column):
        table.add_row(figure, *(column.get(figure, "") for column in columns))
    return table


def _cells(outcome: EvalOutcome) -> dict[str, str]:
    """Text of each figure; those that not every evaluation has are last."""
    metrics = {name.removeprefix("eval/"): value for name, value in outcome.metrics.items()}
    seconds = metrics["time/eval"]
    lengths = ", ".join(f"{metrics[f'length/{name}']:,.0f}" for name in ("mean", "median", "max"))
    cells = {"problems x samples": f"{metrics['num_problems']:,} x {metrics['num_samples']}"}
    shares = estimates(outcome)
    if "accuracy" in shares:
        cells |= {"avg@N (95% interval)": _text(shares.pop("accuracy")), "mean reward": f"{metrics['reward']:.4g}"}
    else:
        low, high = metrics["reward_low"], metrics["reward_high"]
        interval = f" ({low:.4g} to {high:.4g})" if low < high else ""  # none for one problem, or where all are alike
        cells["mean reward (95% interval)"] = f"{metrics['reward']:.4g}{interval}"
    cells |= {
        "tokens: mean, median, max": lengths,
        "truncated": f"{metrics['length/truncated_share']:.1%}",
        "not graded": str(sum(metrics[f"grading/{name}"] for name in ("timeout", "crash", "error"))),
        "seconds": f"{seconds:,.1f}",
        "tokens per second": f"{metrics['tokens'] / seconds if seconds > 0 else 0:,.0f}",
    }
    cells |= {name.replace("_at_", "@"): _text(share) for name, share in shares.items()}
    return cells | {name.replace("_", " "): f"{value:.3g}" for name, value in _turns(outcome).items()}


def _turns(outcome: EvalOutcome) -> dict[str, float]:
    metrics = turn_metrics(list(chain.from_iterable(group.rollouts for group in outcome.groups)))
    prefix = "environment/"
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def estimates(outcome: EvalOutcome) -> dict[str, Estimate]:
    """`accuracy`, `maj_at_N` and `pass_at_2`, `pass_at_4`, ... with intervals; empty where the task has no verifier."""
    if outcome.task.verifier is None:
        return {}
    shares = correct_shares(outcome.groups)
    extract = extractor(outcome.task.verifier)
    if extract is None or outcome.recipe.eval.num_samples == 1:
        return shares
    return {"accuracy": shares["accuracy"], "maj_at_N": estimate(majority_scores(outcome.groups, extract)), **shares}


def eval_record(outcome: EvalOutcome) -> dict[str, Any]:
    """Settings and figures as `--json` prints them: metrics by their names in metrics.jsonl, and intervals."""
    return {
        "name": outcome.name,
        **_settings(outcome),
        "num_rows": outcome.task.load_report.get("eval/rows"),
        "num_left_out": _num_left_out(outcome),
        **outcome.metrics,
        **{f"environment/{name}": value for name, value in _turns(outcome).items()},
        "estimates": {name: asdict(share) for name, share in estimates(outcome).items()},
    }


def macro_estimate(outcomes: Sequence[EvalOutcome]) -> Estimate:
    """Macro average of avg@N over benchmarks."""
    return macro_average([estimates(outcome)["accuracy"] for outcome in outcomes])


def _settings(outcome: EvalOutcome) -> dict[str, Any]:
    """How the policy was sampled."""
    recipe = outcome.recipe
    turns = recipe.rollout.environment
    prompting = MathOptions.model_validate(recipe.task.options).model_dump() if recipe.task.name == "math" else {}
    return {
        "seed": recipe.seed,
        **{name: getattr(recipe.eval, name) for name in ("temperature", "top_k", "top_p")},
        **{name: getattr(recipe.rollout, name) for name in ("max_prompt_tokens", "max_new_tokens")},
        **({"environment": turns.name, "format": turns.format, "max_turns": turns.max_turns} if turns else {}),
        **{name: prompting[name] for name in PROMPT_OPTIONS if prompting},
    }


def _notes(outcomes: Sequence[EvalOutcome]) -> list[str]:
    """Notes that the figures need: how the policy was sampled, and which samples are in no figure."""
    notes = []
    names: dict[str, list[str]] = {}
    if len(outcomes) > 1:
        notes.append(f"macro average of avg@N over {len(outcomes)} benchmarks: {_text(macro_estimate(outcomes))}")
    for outcome in outcomes:
        if num := _num_left_out(outcome):
            what = f"{num} of {outcome.task.load_report['eval/rows']} problems are in no figure"
            limit = outcome.recipe.rollout.max_prompt_tokens
            notes.append(f"{outcome.name}: {what}: their prompts have more than {limit} tokens.")
        settings = ", ".join(f"{name} {value!r}" for name, value in _settings(outcome).items())
        names.setdefault(settings, []).append(outcome.name)
    return notes + [f"{', '.join(same)}: {settings}" for settings, same in names.items()]


def _num_left_out(outcome: EvalOutcome) -> int:
    """Problems whose prompt is longer than `rollout.max_prompt_tokens`."""
    return outcome.task.load_report.get("eval/overlong", 0)


def _text(share: Estimate) -> str:
    return f"{100 * share.value:.1f}% ({100 * share.low:.1f} to {100 * share.high:.1f})"


# --- Rows of samples --------------------------------------------------------------------------------------------------


def write_rows(path: Path, outcome: EvalOutcome, *, is_first: bool) -> None:
    """Add the rows of one benchmark, by problem and sample: an interrupt later loses none of them."""
    with path.open("w" if is_first else "a", encoding="utf-8", errors="backslashreplace") as file:
        for group in outcome.groups:
            for rollout in group.rollouts:
                file.write(json.dumps(_row(outcome, rollout), ensure_ascii=False) + "\n")


def _row(outcome: EvalOutcome, rollout: Rollout) -> Mapping[str, Any]:
    extract = extractor(outcome.task.verifier)
    row = {
        "benchmark": outcome.name,
        "problem_id": rollout.prompt.prompt_id,
        "sample_index": rollout.sample_index,
        "prompt": rollout.prompt.text,
        "text": rollout.text,
        "extracted": None if extract is None else extract(as_judged(rollout.prompt, rollout.policy_text)),
        "answer": rollout.prompt.answer,
        "correct": None if outcome.task.verifier is None else rollout.grade.outcome == "correct",
        "reward": rollout.grade.reward,
        "outcome": rollout.grade.outcome,
        "detail": rollout.grade.detail,
        "num_tokens": len(rollout.response.token_ids),
        "finish_reason": rollout.response.finish_reason,
    }
    if (turns := rollout.conversation) is not None:
        segments = zip(turns.segments, turns.texts, strict=True)
        row |= {
            "num_turns": turns.num_turns,
            "stop_reason": turns.stop_reason,
            "segments": [{"kind": kind, "text": text} for (kind, _), text in segments],
        }
    return row
