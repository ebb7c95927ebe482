"""The command line: a command checks its arguments and calls one function. Heavy imports wait until then."""

import atexit
import errno
import gc
import os
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup
from typer.exceptions import TyperException

from srtrl import __version__, generation
from srtrl.bench.replay import replay
from srtrl.checks import build_checked, check_data, check_recipe
from srtrl.evaluation import command as evaluation
from srtrl.files import shown_path
from srtrl.ranks import interrupt_exit_code, is_main_process, should_report
from srtrl.recipe.fields import describe_fields, fields_of
from srtrl.recipe.file import build_recipe, dump_recipe, expectation, is_recipe, keys_named, read_source, unknown_key
from srtrl.recipe.schema import Recipe
from srtrl.report import compare, export, rollouts
from srtrl.resolve import is_message, shorten
from srtrl.run.place import check_place

RecipePath = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A YAML file, or a recipe that comes with srtrl (quickstart).")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Values that replace those of the recipe."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Rename an existing result to NAME.1 and start again.")]
OPTIONS = {
    "Task": "task.options",
    "Environment": "rollout.environment.options",
    "Drafter": "rollout.drafter_options",
}
"""Class of parts, each in a module of its own -> the key of their options."""


class Commands(TyperGroup):
    """The commands; their errors become messages and exit codes.

    2: a mistake of the user, a ValueError raised by our code. 1: a run that had to stop, a RuntimeError or
    FloatingPointError raised by our code, or an error of the system (a full disk, a missing permission). 130:
    interrupted (0 under a launcher). Any other exception is a bug and keeps its traceback, as all do with
    SRTRL_TRACEBACK=1.
    """

    def invoke(self, context: Any) -> Any:
        """Run the command that the arguments name."""
        try:
            return super().invoke(context)
        except (typer.Exit, BrokenPipeError):  # typer handles these
            raise
        except TyperException as error:
            if isinstance(error, typer.BadParameter) and error.param and isinstance(error.__cause__, ValidationError):
                option, detail = error.param.opts[0], error.__cause__.errors()[0]
                print(f"error: {option}: {expectation(detail)}, found {detail['input']!r}", file=sys.stderr)
                raise typer.Exit(2) from None
            if keys := keys_named(getattr(error, "option_name", "").lstrip("-").replace("-", "_")):
                error.message += f"; a value of the recipe is given as {' or '.join(f'{key}=VALUE' for key in keys)}"
            raise
        except (KeyboardInterrupt, ValueError, RuntimeError, FloatingPointError, OSError) as error:
            if not is_message(error):
                raise
            is_interrupt = isinstance(error, KeyboardInterrupt)
            if should_report(error):
                place = "" if is_main_process() else f"rank {os.environ['RANK']}: "
                print("interrupted" if is_interrupt else f"error: {place}{shorten(str(error))}", file=sys.stderr)
            if is_interrupt:
                raise typer.Exit(interrupt_exit_code()) from None
            is_mistake = isinstance(error, ValueError) or getattr(error, "errno", None) == errno.ENAMETOOLONG
            raise typer.Exit(2 if is_mistake else 1) from None


app = typer.Typer(
    name="srtrl",
    cls=Commands,
    help="Reinforcement learning of language models with fast and exact rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the console script."""
    gc.set_threshold(50_000)  # imports make half a million objects, and no garbage
    atexit.register(_skip_last_collection)
    app()


def _skip_last_collection() -> None:
    """At the end of the process, look for no garbage among these objects: nearly a second of four in `generate`.

    Triton's library would report them as leaks.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def _print_version(value: bool) -> None:
    if value:
        print(f"srtrl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning of language models with fast and exact rollouts."""


@app.command("train")
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the run's last checkpoint.")] = False,
    checkpoint: Annotated[
        int | None, typer.Option(metavar="STEP", help="With --resume: the checkpoint to resume from; drops later ones.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Train a policy by reinforcement learning.

    Everything is written into the folder <output_dir>/<name> (runs/<name> by default). With --resume, RECIPE may be
    that folder, or its name in runs/: its own recipe.yaml is used, and SECTION.KEY=VALUE holds from there on
    (train.learning_rate=5e-7).
    """
    if resume and not is_recipe(recipe) and (Path("runs") / recipe / "recipe.yaml").is_file():
        recipe = Path("runs") / recipe
    is_run = resume and recipe.is_dir()
    source = read_source(recipe / "recipe.yaml" if is_run else recipe, overrides or ())
    if is_run:
        folder = recipe.resolve()
        if Path(source.data.get("output_dir", "runs")).resolve() != folder.parent:  # it was moved, or we are elsewhere
            source.put(["output_dir"], str(folder.parent), "RECIPE")
        source.put(["name"], folder.name, "RECIPE")
    loaded = build_recipe(source)
    check_place(loaded, resume=resume, overwrite=overwrite, from_step=checkpoint)
    if is_main_process():  # torch takes seconds
        passes = loaded.train.num_passes
        steps = f"{loaded.train.num_steps} steps" if passes is None else f"{passes:g} passes over the prompts"
        print(f"{recipe}: {steps} into {loaded.output_dir}/{loaded.name}; loading torch ...", flush=True)
    check_recipe(loaded, source, downloads=True)
    from rich.console import Console

    from srtrl.build import run_training
    from srtrl.metrics import read_metrics
    from srtrl.run.progress import styled
    from srtrl.run.step_metrics import run_figures

    result = run_training(loaded, resume=resume, overwrite=overwrite, from_step=checkpoint)
    if is_main_process():
        for name, figure in run_figures(read_metrics(result.folder / "metrics.jsonl")).items():
            line = textwrap.fill(f"{name + ':':<34} {figure}", 78, subsequent_indent=" " * 35)
            Console(soft_wrap=True).print(styled(line))
        again = shlex.join(["srtrl", "train", str(shown_path(result.folder)), "--resume"])
        if result.interrupted:
            print(f"interrupted after step {result.num_steps}; to resume: {again}")
        else:
            print(f"the run is in {shown_path(result.folder)}")
            from srtrl.report.page import write_report

            try:
                print(f"its report: {write_report(result.folder).resolve().as_uri()}")
            except (ValueError, OSError) as error:  # the run itself is complete
                print(f"its report was not written: {error}", file=sys.stderr)
    if result.interrupted:
        raise typer.Exit(interrupt_exit_code())


@app.command("warm-start")
def warm_start(recipe: RecipePath, overrides: Overrides = None, overwrite: Overwrite = False) -> None:
    """Fine-tune a policy on the task's solutions.

    After it, reinforcement learning has correct samples to reinforce. The policy is written to warm_start.output.
    """
    loaded = build_checked(read_source(recipe, overrides or ()), warm_start=True, downloads=True)
    from rich.console import Console

    from srtrl.evaluation.tables import eval_table
    from srtrl.warm_start.training import run_warm_start

    summary = run_warm_start(loaded, overwrite=overwrite)
    if summary.held_out is not None and is_main_process():
        Console().print(eval_table(str(summary.output), [summary.held_out]))


app.command("eval")(evaluation.command)
app.command("generate")(generation.command)


app.command("replay")(replay)


@app.command("report")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser, if there is one.")] = False,
) -> None:
    """Write the report of a run.

    One page, report.html in the run's folder, readable without network: a summary, curves and samples.
    """
    from srtrl.report.page import open_in_browser, write_report

    path = write_report(run)
    print(path)
    if open_page:
        open_in_browser(path)


app.command("compare")(compare.command)
app.command("rollouts")(rollouts.command)
app.command("export")(export.command)


@app.command("show-config")
def show_config(
    recipe: Annotated[Path | None, typer.Argument(metavar="[RECIPE]", help="As `srtrl train`.")] = None,
    overrides: Overrides = None,
    as_json: Json = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Check names, paths and options, as `train` does; compute time, disk and memory."),
    ] = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="With --check: also print the recipe.")] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="GIB",
            help="With --check: memory of the GPU, or its name (a100, h100, h200, b200); by default this machine's, "
            "else 80.",
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, max=4096, metavar="N", help="With --check: GPUs that share a step.")
    ] = None,
    help_fields: Annotated[
        bool, typer.Option("--help-fields", help="Print every field and its meaning, or those of a KEY.")
    ] = False,
) -> None:
    """Print a recipe with all values filled in.

    These are its own, defaults and overrides. With --check, what is computed of a run in place of them: its time, its
    disk, the memory of a step on each GPU, and what to change if it does not fit; the last line is the verdict.
    With --help-fields: print every field and its meaning; with a KEY (train, train.num_steps) those of this section
    or this key.
    """
    if help_fields:
        if len(overrides or ()) > 1:
            raise ValueError(f"--help-fields: expected one KEY, found {' '.join(overrides or ())}")
        key = overrides[0] if overrides else str(recipe or "")
        print_fields("" if is_recipe(Path(key)) and key not in fields_of(Recipe) else key)
        return
    if recipe is None:
        raise ValueError("show-config needs a RECIPE, or --help-fields")
    if (gpu is not None or gpus is not None or as_yaml) and not check:
        raise ValueError("--gpu, --gpus and --yaml need --check")
    source = read_source(recipe, overrides or ())
    resolved = build_recipe(source)
    if check:
        build_checked(source, warm_start=resolved.warm_start is not None)
        resolved = check_data(resolved)
    text = resolved.model_dump_json(indent=2) if as_json else dump_recipe(resolved).rstrip()
    if as_yaml or as_json or not check:
        print(text)
    if not check:
        return
    from srtrl.planner import describe_plan

    lines = [*describe_plan(resolved, gpu, gpus)]
    print(*(f"# {line}" if as_yaml else line for line in lines), sep="\n", file=sys.stderr if as_json else sys.stdout)


def print_fields(key: str) -> None:
    """Print every field of a recipe, with the options of each task, environment and drafter; with `key` those in it.

    Raises:
        ValueError: there is no such key.
    """
    from srtrl.resolve import list_modules, resolve_class

    parts, fields = [describe_fields(Recipe, within=key)], fields_of(Recipe)
    for kind, option in OPTIONS.items():
        package = f"srtrl.{kind.lower()}s"
        for name in list_modules(package, kind):
            options = resolve_class(package, name, kind).Options
            fields |= fields_of(options, f"{option}.")
            if text := describe_fields(options, f"{option}.", within=key):
                parts.append(f"{option} of {kind.lower()} {name}:\n{text}")
    if not any(parts):
        raise ValueError(f"--help-fields: {key}: {unknown_key(key, fields)}")
    print(*filter(None, parts), sep="\n\n")


if __name__ == "__main__":
    main()
