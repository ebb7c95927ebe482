"""From the command line of `srtrl eval` to its tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from srtrl.checks import build_checked
from srtrl.evaluation import grader_check, tables
from srtrl.evaluation.policy import EvalOutcome, resolve_eval_source, run_evals
from srtrl.evaluation.suite import Suite, bare_source, suite_recipe
from srtrl.ranks.processes import Ranks, is_main_process
from srtrl.recipe.file import read_source
from srtrl.recipe.schema import Recipe
from srtrl.run.metrics import describe_held_out
from srtrl.run.progress import RunProgress, reporting_compilation
from srtrl.tasks.base import load_task
from srtrl.trainer.build import build_tokenizer

ANY_MODEL = "bundled:tiny"
"""Its tokenizer reads the problems where only their grader is checked."""


def find_recipes(
    model_or_run: str | None,
    overrides: Sequence[str],
    *,
    recipe: Path | None = None,
    task: str | None = None,
    suite: Suite | None = None,
    step: int | None = None,
) -> tuple[str, dict[str, Recipe]]:
    """The policy, and for each benchmark of the suite, or for the task, its name and the recipe of its evaluation.

    The policy is the model, or the checkpoint of the run. The recipe is that of `--recipe`, of the run, or the smallest
    one that the task or the suite needs.

    Raises:
        ValueError: a run without (this) checkpoint, a value that cannot be used, or neither a task nor a suite.
    """
    model, run_recipe = (ANY_MODEL, None) if model_or_run is None else resolve_eval_source(model_or_run, step=step)
    source = None
    if (path := recipe or run_recipe) is not None:
        source = read_source(path)
        if model_or_run is not None:
            source.put(("model", "path"), model, "MODEL_OR_RUN")
    elif task is not None:
        source = bare_source(model)
    if suite is not None:
        recipes = {one.name: suite_recipe(suite, one, model, source, overrides) for one in suite.benchmarks}
        return model, recipes
    if source is None:
        raise ValueError(
            f"{model} is not a run folder: name what to evaluate, with --suite NAME, --task NAME or --recipe FILE"
        )
    if task is not None:
        source.put(("task", "name"), task, "--task")
    source.override(overrides)
    resolved = build_checked(source)
    return model, {resolved.task.name: resolved}


def evaluate(
    model: str, recipes: Mapping[str, Recipe], *, suite: str | None, output: Path | None, as_json: bool, ranks: Ranks
) -> None:
    """Evaluate a policy on all ranks and print its figures; the rows of each recipe are written when it is done.

    Raises:
        ValueError: the data or the model cannot be used.
    """
    outcomes: list[EvalOutcome] = []
    progress = RunProgress(len(recipes), console=Console(stderr=True, quiet=not ranks.is_main))
    with progress, reporting_compilation(progress.compiling):
        for outcome in run_evals(model, recipes, on_progress=progress.stage, ranks=ranks):
            if output is not None and ranks.is_main:
                tables.write_rows(output, outcome, is_first=not outcomes)
            outcomes.append(outcome)
            if len(recipes) > 1:
                progress.step(len(outcomes), f"{outcome.name}: {describe_held_out(outcome.metrics)}")
    title = model if suite is None else f"{model}: suite {suite}"
    records = [tables.eval_record(outcome) for outcome in outcomes]
    record = {"model": model, **records[0]}
    if suite is not None:
        record = {"model": model, "suite": suite, "benchmarks": records}
        record["macro_average"] = asdict(tables.macro_estimate(outcomes))
    _print(tables.eval_table(title, outcomes), record, as_json=as_json)


def check_graders(recipes: Mapping[str, Recipe], *, as_json: bool) -> None:
    """Grade the reference solutions of the problems of each recipe, of any length; print where the grader disagrees.

    Raises:
        ValueError: a task has no verifier, or its data cannot be used.
    """
    reports = []
    for name, recipe in recipes.items():
        rollout = recipe.rollout.model_copy(update={"max_prompt_tokens": sys.maxsize})
        task = load_task(recipe.model_copy(update={"rollout": rollout}), build_tokenizer(recipe))
        reports.append(grader_check.check_grader(name, task, recipe.grading, recipe.eval.num_problems))
    _print(grader_check.grader_table(reports), [asdict(report) for report in reports], as_json=as_json)
    for report in [] if as_json else reports:
        for row in report.disagreements:
            print(f"{report.name} {row.prompt_id}: {row.question}: {row.reason}")


def _print(table: Table, record: Any, *, as_json: bool) -> None:
    if is_main_process():
        print(json.dumps(record)) if as_json else Console().print(table)
