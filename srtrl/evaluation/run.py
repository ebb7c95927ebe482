"""From the command line of `srtrl eval` to its tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from srtrl import ranks
from srtrl.checks import build_checked
from srtrl.evaluation import tables
from srtrl.evaluation.policy import EvalOutcome, run_evals
from srtrl.evaluation.suite import Suite, bare_source, suite_recipe
from srtrl.recipe.file import read_source
from srtrl.recipe.schema import Recipe
from srtrl.run.progress import RunProgress, reporting_compilation
from srtrl.run.step_metrics import describe_held_out


def find_recipes(
    model: str, path: Path | None, overrides: Sequence[str], *, task: str | None, suite: Suite | None
) -> dict[str, Recipe]:
    """For each benchmark of the suite, or for the task, its name and the recipe of its evaluation.

    Args:
        model: The policy.
        path: Recipe of `--recipe` or of the run; without it the smallest that the task or the suite needs.
        overrides: Of the command line.
        task: Of `--task`.
        suite: Of `--suite`.

    Raises:
        ValueError: a value that cannot be used, or neither a recipe nor a task nor a suite.
    """
    source = None
    if path is not None:
        source = read_source(path)
        source.put(("model", "path"), model, "MODEL_OR_RUN")
    elif task is not None:
        source = bare_source(model)
    if suite is not None:
        return {
            benchmark.name: suite_recipe(suite, benchmark, model, source, overrides) for benchmark in suite.benchmarks
        }
    if source is None:
        raise ValueError(
            f"{model} is not a run folder: name what to evaluate, with --suite NAME, --task NAME or --recipe FILE"
        )
    if task is not None:
        source.put(("task", "name"), task, "--task")
    source.override(overrides)
    resolved = build_checked(source)
    return {resolved.task.name: resolved}


def evaluate(
    model: str, recipes: Mapping[str, Recipe], *, suite: str | None, output: Path | None, as_json: bool
) -> None:
    """Evaluate a policy on all ranks and print its figures; the rows of each recipe are written when it is done.

    Raises:
        ValueError: the data or the model cannot be used.
    """
    outcomes: list[EvalOutcome] = []
    progress = RunProgress(len(recipes), console=Console(stderr=True, quiet=not ranks.is_main()))
    with progress, reporting_compilation(progress.compiling):
        for outcome in run_evals(model, recipes, on_progress=progress.stage, on_prompt=progress.say):
            if output is not None and ranks.is_main():
                tables.write_rows(output, outcome, is_first=not outcomes)
            outcomes.append(outcome)
            if len(recipes) > 1:
                progress.step(len(outcomes), f"{outcome.name}: {describe_held_out(outcome.metrics)}")
    if ranks.is_main() and as_json:
        records = [tables.eval_record(outcome) for outcome in outcomes]
        if suite is None:
            print(json.dumps({"model": model, **records[0]}))
            return
        macro = asdict(tables.macro_estimate(outcomes))
        print(json.dumps({"model": model, "suite": suite, "benchmarks": records, "macro_average": macro}))
    elif ranks.is_main():
        Console().print(tables.eval_table(model if suite is None else f"{model}: suite {suite}", outcomes))
