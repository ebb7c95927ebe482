"""`srtrl eval`: a policy on held-out problems, of a task or of a suite; or its graders on reference solutions."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from srtrl.environments import options


def command(
    model_or_run: Annotated[
        str | None, typer.Argument(metavar="MODEL_OR_RUN", help="A model, or the folder of a run.")
    ] = None,
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
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="A benchmark's problems, instead of the hub's; repeatable."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of NAME.jsonl or .parquet, instead of the hub.")
    ] = None,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Leave out the benchmarks whose data is not available.")
    ] = False,
    step: Annotated[int | None, typer.Option(help="Checkpoint of the run; by default the newest.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples per problem.")] = None,
    problems: Annotated[int | None, typer.Option(help="Number of held-out problems to use, from the first.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Maximum number of tokens of a response.")] = None,
    prompt_template: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text of the prompt, with {problem} in it (task prompts: {prompt})."),
    ] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Put the prompt into the model's chat template, or do not.")
    ] = None,
    environment: options.Name = None,
    environment_format: options.FormatName = None,
    environment_option: options.Options = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a row for each sample: .jsonl or .parquet.")
    ] = None,
    check_grader: Annotated[
        bool, typer.Option("--check-grader", help="Grade the reference solutions, not a model.")
    ] = False,
    import_from_here: Annotated[
        bool,
        typer.Option(
            "--import-from-here",
            help="Import what the run's recipe names (rewards, task, ...) from the current folder as well.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a policy on held-out problems.

    Prints pass@k and the majority vote with 95% confidence intervals, for the task of a recipe (--task, --recipe, or
    that of a run) or for each benchmark of a suite (--suite math). Values of the recipe may be overridden, the task's
    options for example: task.options.eval.files=[test.jsonl]. A run that was trained with an environment is evaluated
    with it, on a suite too.
    """
    from srtrl.evaluation import run
    from srtrl.evaluation.settings import EvalFlags
    from srtrl.evaluation.suite import open_suite
    from srtrl.ranks.processes import open_ranks

    suite_flags = {"--only": only, "--data": data, "--data-dir": data_dir, "--skip-missing": skip_missing}
    flags = EvalFlags(
        task=task,
        samples=samples,
        problems=problems,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        prompt_template=prompt_template,
        chat=chat,
        environment=options.EnvironmentFlags(
            name=environment, format=environment_format, options=environment_option or ()
        ),
        overrides=tuple(overrides or ()),
        import_from_here=import_from_here,
    )
    chosen = None
    if suite is not None:
        chosen = partial(open_suite, suite, only=only, data=data or (), data_dir=data_dir, skip_missing=skip_missing)
    elif given := [flag for flag, value in suite_flags.items() if value]:
        raise ValueError(f"{given[0]}: it needs --suite")
    if check_grader:
        run.check_graders(model_or_run, recipe, chosen, flags, as_json=as_json)
    else:
        with open_ranks() as ranks:
            run.evaluate(model_or_run, step, recipe, chosen, flags, output=output, as_json=as_json, ranks=ranks)
