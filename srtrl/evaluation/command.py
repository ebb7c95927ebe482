"""`srtrl eval`: a policy on held-out problems, of a task or of a suite."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    model_or_run: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="A model, or the folder of a run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Values that replace those of the recipe."),
    ] = None,
    *,
    recipe: Annotated[Path | None, typer.Option(help="Recipe with the task; by default the run's own.")] = None,
    task: Annotated[str | None, typer.Option(help="Task to evaluate on; set its options by overrides.")] = None,
    suite: Annotated[
        str | None, typer.Option(metavar="NAME", help="Benchmarks to evaluate on: `math`, or a YAML file.")
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="A,B", help="Only these benchmarks of the suite.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of NAME.jsonl or .parquet, instead of the hub.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Checkpoint of the run; by default the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint that train.keep_best has kept.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Write a row for each sample into this file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --output replace a file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a policy on held-out problems.

    Prints pass@k and the majority vote with 95% confidence intervals, for the task of a recipe (--task, --recipe, or
    that of a run) or for each benchmark of a suite (--suite math). Samples, lengths, prompts and all else are values of
    the recipe: eval.num_samples=8 eval.num_problems=100 eval.temperature=0 rollout.max_new_tokens=512 seed=1
    task.options.chat_template=true.
    """
    from srtrl.evaluation import run
    from srtrl.evaluation.policy import resolve_eval_source
    from srtrl.evaluation.suite import open_suite
    from srtrl.files import check_output
    from srtrl.ranks import open_ranks

    if suite is None and (only or data_dir):
        raise ValueError("--only and --data-dir belong to --suite NAME, which is missing")
    if suite is not None and task is not None:
        raise ValueError("--task and --suite: choose one")
    check_output("--output", output, None, force=force)
    with open_ranks():
        opened = None if suite is None else open_suite(suite, only=only, data_dir=data_dir)
        model, of_run = resolve_eval_source(model_or_run, step=step, best=best)
        recipes = run.find_recipes(model, recipe or of_run, overrides or (), task=task, suite=opened)
        run.evaluate(model, recipes, suite=suite, output=output and output.absolute(), as_json=as_json)
