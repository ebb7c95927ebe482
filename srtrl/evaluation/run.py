"""From the command line of `srtrl eval` to its tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from srtrl.evaluation import grader_check, settings, tables
from srtrl.evaluation.policy import EvalOutcome, resolve_eval_source, run_evals
from srtrl.ranks.processes import Ranks, is_main_process
from srtrl.recipe.file import read_source
from srtrl.recipe.schema import Recipe
from srtrl.run.folder import RunProgress
from srtrl.run.metrics import describe_held_out
from srtrl.tasks.base import load_task
from srtrl.trainer.build import build_tokenizer

if TYPE_CHECKING:
    from srtrl.evaluation.suite import OpenSuite

ANY_MODEL = "bundled:tiny"
"""Its tokenizer reads the problems where only their grader is checked."""


def evaluate(
    model_or_run: str | None,
    step: int | None,
    recipe: Path | None,
    open_suite: Callable[[], OpenSuite] | None,
    flags: settings.EvalFlags,
    *,
    output: Path | None,
    as_json: bool,
    ranks: Ranks,
) -> None:
    """Evaluate a policy on all ranks, and print its figures on the first one.

    Raises:
        ValueError: an option, the recipe, the data or the model is wrong.
    """
    if model_or_run is None:
        raise ValueError("MODEL_OR_RUN is missing: name a model or the folder of a run (--check-grader needs neither)")
    if open_suite is not None and flags.task is not None:
        raise ValueError("--task and --suite: choose one")
    if output is not None:
        tables.check_output(output)
    model, run_recipe = resolve_eval_source(model_or_run, step=step)
    recipe_path = recipe or run_recipe
    source = read_source(recipe_path) if recipe_path else None
    if source is not None:
        source.is_foreign = recipe is None and not flags.import_from_here
        source.put(("model", "path"), model, "MODEL_OR_RUN")
    elif open_suite is None and flags.task is None:
        raise ValueError(
            f"{model_or_run} is not a run folder: say what to evaluate on, with --suite NAME, --task NAME or "
            "--recipe FILE"
        )
    if open_suite is not None:
        suite = open_suite()
        outcomes = list(_run(model, settings.suite_recipes(suite, model, source, flags), output, ranks))
        results = {one.title: outcome.result for one, outcome in zip(suite.benchmarks, outcomes, strict=True)}
        table = tables.eval_table(f"{model}: suite {suite.name}", results, tables.suite_notes(suite, outcomes))
        _print(table, tables.suite_record(model, suite, outcomes), as_json=as_json)
        return
    loaded = settings.task_recipe(source or settings.bare_source(model), flags)
    name = loaded.task.name
    [outcome] = _run(model, {name: loaded}, output, ranks)
    record = {"model": model, "task": name, **tables.settings_of(outcome), **asdict(outcome.result)}
    table = tables.eval_table(model, {name: outcome.result}, tables.task_notes(outcome))
    _print(table, record, as_json=as_json)


def _run(model: str, recipes: Mapping[str, Recipe], output: Path | None, ranks: Ranks) -> Iterator[EvalOutcome]:
    """Evaluate, showing progress on standard error and writing the rows of each recipe when it is done."""
    with RunProgress("eval", len(recipes), console=Console(stderr=True, quiet=not ranks.is_main)) as progress:
        outcomes = run_evals(model, recipes, on_progress=progress.stage, on_compile=progress.compiling, ranks=ranks)
        for number, outcome in enumerate(outcomes, start=1):
            if output is not None and ranks.is_main:
                tables.append_rows(output, outcome)
            if len(recipes) > 1:
                progress.step(number, f"{outcome.name}: {describe_held_out(outcome.result.metrics())}")
            yield outcome


def check_graders(
    model_or_run: str | None,
    recipe: Path | None,
    open_suite: Callable[[], OpenSuite] | None,
    flags: settings.EvalFlags,
    *,
    as_json: bool,
) -> None:
    """Grade the reference solutions of a suite's data, or of a recipe's task, and print where the grader disagrees.

    Raises:
        ValueError: an option, the recipe or the data is wrong.
    """
    if model_or_run is not None and "=" in model_or_run:  # there is no model: that was an override
        flags = replace(flags, overrides=(model_or_run, *flags.overrides))
        model_or_run = None
    missing: dict[str, str] = {}
    if open_suite is not None:
        suite = open_suite()
        missing = suite.missing
        recipes = settings.suite_recipes(suite, ANY_MODEL, None, flags)
        places = [one.place for one in suite.benchmarks]
    else:
        path = recipe or (None if model_or_run is None else resolve_eval_source(model_or_run)[1])
        if path is None:
            raise ValueError(
                "--check-grader: say what to check, with --suite NAME, --recipe FILE or the folder of a run"
            )
        source = read_source(path)
        source.is_foreign = recipe is None and not flags.import_from_here
        loaded = settings.task_recipe(source, flags)
        recipes = {loaded.task.name: loaded}
        places = [f"task {loaded.task.name}"]
    reports = [_check_recipe(place, *item) for place, item in zip(places, recipes.items(), strict=True)]
    _print(grader_check.grader_table(reports), [asdict(report) for report in reports], as_json=as_json)
    for report in [] if as_json else reports:
        for one in report.disagreements:
            print(f"{report.name} {one.prompt_id}: {one.question}: {one.reason}")
    for name, reason in missing.items():
        print(f"{name}: no data: {reason}", file=sys.stderr if as_json else sys.stdout)


def _check_recipe(place: str, name: str, recipe: Recipe) -> grader_check.GraderReport:
    """Check the grader on the recipe's problems, of any length."""
    rollout = recipe.rollout.model_copy(update={"max_prompt_tokens": sys.maxsize})
    task = load_task(recipe.model_copy(update={"rollout": rollout}), build_tokenizer(recipe))
    return grader_check.check_grader(name, place, task, recipe.grading, recipe.eval.num_problems)


def _print(table: Any, record: Any, *, as_json: bool) -> None:
    if not is_main_process():
        return
    if as_json:
        print(json.dumps(record))
        return
    Console().print(table)
