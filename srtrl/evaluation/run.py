"""From the command line of `srtrl eval` to its tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from srtrl.evaluation import grader_check, settings, tables
from srtrl.evaluation.policy import EvalOutcome, resolve_eval_source, run_evals
from srtrl.ranks.processes import Ranks, is_main_process
from srtrl.recipe.file import RecipeSource, read_source
from srtrl.recipe.schema import Recipe
from srtrl.run.metrics import describe_held_out
from srtrl.run.progress import RunProgress
from srtrl.tasks.base import load_task
from srtrl.trainer.build import build_tokenizer

if TYPE_CHECKING:
    from srtrl.evaluation.suite import OpenSuite

ANY_MODEL = "bundled:tiny"
"""Its tokenizer reads the problems where only their grader is checked."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Subject:
    """The policy that is evaluated, and the recipe that comes with it."""

    model: str | None
    """None: no policy, only a grader."""
    source: RecipeSource | None
    """The recipe of the run or of `--recipe`; for a model with `--task` the smallest one."""
    overrides: Sequence[str]

    @classmethod
    def find(
        cls,
        model_or_run: str | None,
        recipe: Path | None,
        *,
        step: int | None,
        task: str | None,
        overrides: Sequence[str],
        from_here: bool,
    ) -> Subject:
        """Find the checkpoint of a run, and read the recipe.

        Raises:
            ValueError: a run without (this) checkpoint, or a recipe that cannot be read.
        """
        model, run_recipe = (None, None) if model_or_run is None else resolve_eval_source(model_or_run, step=step)
        path = recipe or run_recipe
        source = read_source(path) if path else None
        if source is None and task is not None:
            source = settings.bare_source(model or ANY_MODEL)
        elif source is not None:
            source.is_foreign = recipe is None and not from_here
            if model is not None:
                source.put(("model", "path"), model, "MODEL_OR_RUN")
        if source is not None and task is not None:
            source.put(("task", "name"), task, "--task")
        return cls(model=model, source=source, overrides=overrides)


def evaluate(
    subject: Subject,
    open_suite: Callable[[], OpenSuite] | None,
    *,
    output: Path | None,
    as_json: bool,
    ranks: Ranks,
) -> None:
    """Evaluate a policy on all ranks, and print its figures on the first one.

    Raises:
        ValueError: an option, the recipe, the data or the model cannot be used.
    """
    model = subject.model
    if model is None:
        raise ValueError("MODEL_OR_RUN is missing: name a model or the folder of a run (--check-grader needs neither)")
    if output is not None:
        tables.check_output(output)
    if open_suite is not None:
        suite = open_suite()
        recipes = settings.suite_recipes(suite, model, subject.source, subject.overrides)
        outcomes = list(_run(model, recipes, output, ranks))
        results = {one.title: outcome.result for one, outcome in zip(suite.benchmarks, outcomes, strict=True)}
        table = tables.eval_table(f"{model}: suite {suite.name}", results, tables.suite_notes(suite, outcomes))
        _print(table, tables.suite_record(model, suite, outcomes), as_json=as_json)
        return
    if subject.source is None:
        raise ValueError(
            f"{model} is not a run folder: say what to evaluate on, with --suite NAME, --task NAME or --recipe FILE"
        )
    recipe = settings.task_recipe(subject.source, subject.overrides)
    name = recipe.task.name
    [outcome] = _run(model, {name: recipe}, output, ranks)
    record = {"model": model, "task": name, **tables.settings_of(outcome), **asdict(outcome.result)}
    _print(tables.eval_table(model, {name: outcome.result}, tables.task_notes(outcome)), record, as_json=as_json)


def _run(model: str, recipes: Mapping[str, Recipe], output: Path | None, ranks: Ranks) -> Iterator[EvalOutcome]:
    """Evaluate, showing progress on standard error and writing the rows of each recipe when it is done."""
    with RunProgress(len(recipes), console=Console(stderr=True, quiet=not ranks.is_main)) as progress:
        outcomes = run_evals(model, recipes, on_progress=progress.stage, on_compile=progress.compiling, ranks=ranks)
        for number, outcome in enumerate(outcomes, start=1):
            if output is not None and ranks.is_main:
                tables.append_rows(output, outcome)
            if len(recipes) > 1:
                progress.step(number, f"{outcome.name}: {describe_held_out(outcome.result.metrics())}")
            yield outcome


def check_graders(subject: Subject, open_suite: Callable[[], OpenSuite] | None, *, as_json: bool) -> None:
    """Grade the reference solutions of a suite's data, or of a recipe's task, and print where the grader disagrees.

    Raises:
        ValueError: an option, the recipe or the data cannot be used.
    """
    missing: dict[str, str] = {}
    if open_suite is not None:
        suite = open_suite()
        missing = suite.missing
        recipes = settings.suite_recipes(suite, ANY_MODEL, None, subject.overrides)
        places = [one.place for one in suite.benchmarks]
    elif subject.source is None:
        raise ValueError("--check-grader: say what to check, with --suite NAME, --recipe FILE or the folder of a run")
    else:
        recipe = settings.task_recipe(subject.source, subject.overrides)
        recipes, places = {recipe.task.name: recipe}, [f"task {recipe.task.name}"]
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
