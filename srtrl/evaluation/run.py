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

from srtrl.evaluation import grader_check, settings, tables
from srtrl.evaluation.policy import EvalOutcome, resolve_eval_source, run_evals
from srtrl.evaluation.suite import open_suite
from srtrl.ranks.processes import Ranks, is_main_process
from srtrl.recipe.file import RecipeSource, read_source
from srtrl.recipe.schema import Recipe
from srtrl.run.metrics import describe_held_out
from srtrl.run.progress import RunProgress, reporting_compilation
from srtrl.tasks.base import load_task
from srtrl.trainer.build import build_tokenizer

ANY_MODEL = "bundled:tiny"
"""Its tokenizer reads the problems where only their grader is checked."""


def find_policy(
    model_or_run: str | None, recipe: Path | None, task: str | None, *, step: int | None, from_here: bool
) -> tuple[str, RecipeSource | None]:
    """The model or the checkpoint of a run, and the recipe: that of `--recipe`, of the run, or the smallest for `task`.

    Raises:
        ValueError: a run without (this) checkpoint, or a recipe that cannot be read.
    """
    model, run_recipe = (ANY_MODEL, None) if model_or_run is None else resolve_eval_source(model_or_run, step=step)
    path = recipe or run_recipe
    source = None
    if path is not None:
        source = read_source(path)
        source.is_foreign = recipe is None and not from_here
        if model_or_run is not None:
            source.put(("model", "path"), model, "MODEL_OR_RUN")
    elif task is not None:
        source = settings.bare_source(model)
    if source is not None and task is not None:
        source.put(("task", "name"), task, "--task")
    return model, source


def find_recipes(
    model: str,
    source: RecipeSource | None,
    overrides: Sequence[str],
    *,
    suite: str | None,
    only: str | None,
    data_dir: Path | None,
) -> dict[str, Recipe]:
    """Name of each benchmark of the suite, or of the task -> the recipe of its evaluation.

    Raises:
        ValueError: a value cannot be used, data is missing, or neither a task nor a suite is given.
    """
    if suite is not None:
        opened = open_suite(suite, only=only, data_dir=data_dir)
        return {one.name: settings.suite_recipe(opened, one, model, source, overrides) for one in opened.benchmarks}
    if source is None:
        raise ValueError(
            f"{model} is not a run folder: name what to evaluate, with --suite NAME, --task NAME or --recipe FILE"
        )
    recipe = settings.task_recipe(source, overrides)
    return {recipe.task.name: recipe}


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
