"""`srtrl bench train`: drafters in whole training steps of a recipe, update included.

Real updates from the same weights; whole steps in turns, whose order changes each time. The first step, in which
kernels compile, does not count. In deterministic mode (on a CPU) all runs were checked to have the same rewards, losses
and lengths in every step (`==`). Rollout seconds are those of decoding until the last sample has ended; step seconds
add grading, log-probs, advantages and the update. Sums over the steps; `times as fast` is the median over pairs of the
same step, with a 95% interval (how steps differ is in it, too).
"""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from srtrl.bench import measure
from srtrl.bench.measure import Row, alternate, paired_ratio, publish, read_environment
from srtrl.metrics import MetricRow, read_metrics
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.recipe.file import load_recipe
from srtrl.recipe.schema import Recipe
from srtrl.run.interrupt import freeze_gc
from srtrl.trainer.build import choose_device
from srtrl.trainer.trainer import Trainer

TIMING = ("engine/", "memory/", "time/")
"""Metrics that may differ between runs that learn the same."""
SETTINGS = ("eval.before_and_after=false", "eval.every_steps=null", "log.trackers=[]", "name=bench")
"""Nothing is evaluated or kept."""


def command(
    *,
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Changes to the recipe.")
    ] = None,
    drafters: measure.Drafters = "none,srt",
    json_file: measure.JsonFile = None,
    force: measure.Force = False,
) -> None:
    """Train the recipe once with each drafter, in alternating steps, and compare the times.

    All runs must learn the same; on a CPU this is checked after every step. Their files are deleted, and nothing is
    evaluated. Each epoch has a row, because a drafter learns from the epochs before.
    """
    names, overrides = measure.parse_drafters(drafters), overrides or []
    plain = load_recipe(recipe, overrides)
    set_cpu_threads(plain.num_threads)
    device = choose_device(plain)
    environment = read_environment(device, json_file, force=force)
    with tempfile.TemporaryDirectory() as folder:
        recipes = {name: _recipe_of(recipe, overrides, name, f"{folder}/{index}") for index, name in enumerate(names)}
        runs = train_in_turns(recipes, is_same=device.type == "cpu")
    title = f"Training with drafters: {recipe.name}, {plain.rollout.slots} slots, {', '.join(names)}"
    publish(title, {"rows": rows_of(runs)}, __doc__, environment, json_file)


def _recipe_of(path: Path, overrides: Sequence[str], drafter: str, output: str) -> Recipe:
    """The recipe with this drafter, which trains into the folder `output`."""
    recipe = load_recipe(path, [*overrides, *SETTINGS, f"rollout.drafter={drafter}", f"output_dir={output}"])
    # One checkpoint, at the end; set here, for in the recipe it must divide what may not divide the number of steps.
    train = recipe.train.model_copy(update={"checkpoint_every": recipe.train.num_steps})
    return recipe.model_copy(update={"train": train})


def train_in_turns(recipes: Mapping[str, Recipe], *, is_same: bool) -> dict[str, list[MetricRow]]:
    """Take all steps, each run's one after the other's; returns the metrics of all steps but the first.

    Raises:
        ValueError: Two runs learned different things where they must not (`is_same`).
    """
    num_steps = next(iter(recipes.values())).train.num_steps
    learned: dict[int, MetricRow] = {}

    def take_step(drafter: str, trainer: Trainer) -> MetricRow:
        trainer.train_step(trainer.step + 1)
        row = read_metrics(trainer.run.path / "metrics.jsonl")[-1]
        if is_same:
            check_same(drafter, row, learned)
        return row

    with ExitStack() as stack:
        steps = {
            drafter: partial(take_step, drafter, stack.enter_context(Trainer(recipe, console=Console(quiet=True))))
            for drafter, recipe in recipes.items()
        }
        stack.enter_context(freeze_gc())
        return alternate(steps, num_steps - 1)


def check_same(drafter: str, row: MetricRow, learned: dict[int, MetricRow]) -> None:
    """Check that the step has the metrics that the first run had in it, timing apart; `learned`: step -> those.

    Raises:
        ValueError: It has not.
    """
    row = {name: value for name, value in row.items() if not name.startswith(TIMING)}
    first = learned.setdefault(int(row["step"]), row)
    if row != first:
        different = ", ".join(sorted(name for name in row | first if row.get(name) != first.get(name)))
        raise ValueError(
            f"step {row['step']:.0f}: {drafter} did not learn what the first run did, so their times cannot be "
            f"compared ({different}); does a reward or loss of your own draw random numbers or keep a state?"
        )


def rows_of(runs: Mapping[str, Sequence[MetricRow]]) -> list[Row]:
    """One row per epoch (and `all`) and drafter; ratios are those of pairs of steps."""
    baseline = next(iter(runs))
    epochs = [int(step["data/epoch"]) + 1 for step in runs[baseline]]
    table: list[Row] = []
    for epoch in (*sorted(set(epochs)), "all"):
        first: dict[str, list[float]] = {}
        for drafter, steps in runs.items():
            chosen = [step for step, number in zip(steps, epochs, strict=True) if epoch in (number, "all")]
            seconds = {name: [step[f"time/{name}"] for step in chosen] for name in ("rollout", "step")}
            num_decodes = [step["engine/tokens"] / step["engine/tokens_per_decode_step"] for step in chosen]
            row: dict[str, Any] = {"epoch": str(epoch), "drafter": drafter, "steps": len(chosen)}
            row |= {f"{name}_seconds": sum(values) for name, values in seconds.items()}
            for name in ("tokens", "verified"):
                means = [step[f"engine/{name}_per_decode_step"] for step in chosen]
                row[f"{name}_per_step"] = float(np.average(means, weights=num_decodes))
            first = first or seconds
            if drafter != baseline:
                for name, values in seconds.items():
                    row[f"{name}s_times_as_fast"] = paired_ratio(first[name], values)
            table.append(row)
    return table
