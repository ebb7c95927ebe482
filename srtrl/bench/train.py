"""`srtrl bench train`: drafters in whole training steps of a recipe, update included."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from srtrl.bench.alternate import paired_ratio, tell
from srtrl.bench.environment import read_environment
from srtrl.bench.options import JsonFile, WriteDocs, check_output, parse_counts, parse_names
from srtrl.bench.tables import Document, Grid, publish
from srtrl.bench.workload import drafter_maker
from srtrl.metrics import MetricRow, read_metrics
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.recipe import Recipe
from srtrl.recipe_file import load_recipe
from srtrl.trainer.build import choose_device, is_deterministic
from srtrl.trainer.run_folder import RunProgress
from srtrl.trainer.trainer import long_lived_objects_left_alone, open_trainer

ROLLOUT, STEP = "time/rollout", "time/step"
TIMING = ("engine/", "memory/", "time/")
"""Metrics that may differ between runs that learn the same."""
SETTINGS = (
    "eval.before_and_after=false",
    "eval.every_steps=null",
    "log.trackers=[]",
    "log.save_rollouts=false",
    "name=bench",
)
"""Nothing is evaluated or kept."""


@dataclass(slots=True)
class TrainingRun:
    """One of the runs."""

    drafter: str
    recipe: Recipe
    rows: list[MetricRow] = field(default_factory=list)
    """Metrics, one row per step."""

    @property
    def slots(self) -> int:
        """Its decode slots."""
        return self.recipe.rollout.slots


def command(
    *,
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Changes to the recipe.")
    ] = None,
    drafters: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help="Compare these drafters with the first of them.")
    ] = "none,srt",
    slots: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Decode slots; one comparison each. [default: the recipe's]")
    ] = None,
    json_file: JsonFile = None,
    write_docs: WriteDocs = None,
) -> None:
    """Train the recipe once with each drafter and number of slots, whole steps in turns, and compare the times.

    All runs must learn the same: on a CPU that is checked after every step. What they write is thrown away, and nothing
    is evaluated. Epochs are told apart, for a drafter learns from the epochs before.
    """
    names = parse_names("--drafters", drafters)
    counts = parse_counts("--slots", slots) if slots is not None else None
    check_output("--json", json_file)
    check_output("--write-docs", write_docs)
    for name in names:
        drafter_maker(name)
    overrides = overrides or []
    _check_overrides(overrides, with_slots=counts is not None)
    plain = load_recipe(recipe, overrides)
    if plain.train.num_steps < 2:
        raise ValueError("train.num_steps: expected at least 2 for bench train, whose first step does not count")
    set_cpu_threads(plain.num_threads)
    device = choose_device(plain)
    environment = read_environment(device)
    is_same = is_deterministic(plain, device)
    counts = counts or (plain.rollout.slots,)
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            TrainingRun(name, _recipe_of(recipe, overrides, name, count, Path(folder) / f"{count}-{number}"))
            for count in counts
            for number, name in enumerate(names)
        ]
        train_in_turns(runs, is_same=is_same)
    publish(
        Document(
            title=f"Training with drafters: {recipe.name}, {', '.join(map(str, counts))} slots, {', '.join(names)}",
            environment=environment,
            notes=_notes(plain, is_same=is_same),
            grids=(seconds_grid(runs, by_epoch=True), seconds_grid(runs, by_epoch=False)),
            values={
                "runs": [
                    {"drafter": run.drafter, "slots": run.slots, "rows": [dict(row) for row in run.rows]}
                    for run in runs
                ]
            },
        ),
        json_file,
        write_docs,
    )


def _check_overrides(overrides: Sequence[str], *, with_slots: bool) -> None:
    """Raise ValueError for one that would be replaced: whoever gives it must not believe that it counts."""
    replaced = {setting.partition("=")[0]: "bench train sets that itself" for setting in (*SETTINGS, "output_dir")}
    replaced["rollout.drafter"] = "the drafters are those of --drafters"
    replaced["train.checkpoint_every"] = "bench train keeps no checkpoint"
    if with_slots:
        replaced["rollout.slots"] = "the slots are those of --slots"
    for override in overrides:
        key = override.partition("=")[0]
        if key in replaced:
            raise ValueError(f"override `{override}`: {replaced[key]}; leave it out")


def _recipe_of(path: Path, overrides: Sequence[str], drafter: str, slots: int, folder: Path) -> Recipe:
    """The recipe with this drafter and number of slots, which trains into `folder`."""
    mine = (f"rollout.drafter={drafter}", f"rollout.slots={slots}", f"output_dir={folder}")
    recipe = load_recipe(path, [*overrides, *SETTINGS, *mine])
    # One checkpoint, at the end; set here, for in the recipe it must divide what may not divide the number of steps.
    return recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"checkpoint_every": recipe.train.num_steps})}
    )


def train_in_turns(runs: Sequence[TrainingRun], *, is_same: bool) -> None:
    """Take all steps, each run's one after the other's, and fill the runs' rows; the order changes at every step.

    Raises:
        ValueError: Two runs learned different things where they must not (`is_same`).
    """
    num_steps = runs[0].recipe.train.num_steps
    with ExitStack() as stack:
        quiet = RunProgress("bench", num_steps, console=Console(quiet=True))
        trainers = [stack.enter_context(open_trainer(run.recipe, progress=quiet)) for run in runs]
        stack.enter_context(long_lived_objects_left_alone())
        for step in range(1, num_steps + 1):
            pairs = list(zip(runs, trainers, strict=True))
            for run, trainer in pairs if step % 2 else pairs[::-1]:
                trainer.train_step(step)
                run.rows.append(read_metrics(trainer.run.path / "metrics.jsonl")[-1])
                seconds = f"{run.rows[-1][ROLLOUT]:.3f} s of {run.rows[-1][STEP]:.3f}"
                tell(f"step {step} of {num_steps}, {run.drafter}, {run.slots} slots: rollouts {seconds}")
            if is_same:
                check_same(runs)


def check_same(runs: Sequence[TrainingRun]) -> None:
    """Check that the last step of each run has the metrics of the first run's, timing apart.

    Raises:
        ValueError: A run has not.
    """
    first, *others = [
        {name: value for name, value in run.rows[-1].items() if not name.startswith(TIMING)} for run in runs
    ]
    for run, row in zip(runs[1:], others, strict=True):
        if row != first:
            different = ", ".join(sorted(name for name in row | first if row.get(name) != first.get(name)))
            raise ValueError(
                f"step {first['step']:.0f}: {run.drafter} at {run.slots} slots learned something else than "
                f"{runs[0].drafter} at {runs[0].slots}, so their times cannot be compared ({different}); does a reward "
                "or a loss of your own draw random numbers or keep a state?"
            )


def seconds_grid(runs: Sequence[TrainingRun], *, by_epoch: bool) -> Grid:
    """One row per epoch (or one in all), number of slots and drafter; ratios are those of pairs of steps.

    The first step, in which kernels compile, is left out.
    """
    cells = []
    for slots in dict.fromkeys(run.slots for run in runs):
        of_slots = [run for run in runs if run.slots == slots]
        epochs = sorted({int(row["data/epoch"]) for row in runs[0].rows[1:]}) if by_epoch else [None]
        for epoch in epochs:
            first = _rows_of(of_slots[0], epoch)
            for run in of_slots:
                rows = _rows_of(run, epoch)
                rollout = sum(row[ROLLOUT] for row in rows)
                decodes = [row["engine/tokens"] / row["engine/tokens_per_decode_step"] for row in rows]
                verified = [row["engine/verified_per_decode_step"] for row in rows]
                num_verified = sum(a * b for a, b in zip(decodes, verified, strict=True))
                ratios = [paired_ratio([a[of] for a in first], [b[of] for b in rows]) for of in (ROLLOUT, STEP)]
                cells.append(
                    (
                        str(slots),
                        *(() if epoch is None else (str(epoch + 1),)),
                        run.drafter,
                        str(len(rows)),
                        f"{rollout:.2f}",
                        f"{sum(row[STEP] for row in rows):.2f}",
                        f"{1000 * rollout / sum(row['tokens/response'] for row in rows):.3f}",
                        f"{sum(row['engine/tokens'] for row in rows) / sum(decodes):.2f}",
                        f"{num_verified / sum(decodes):.2f}",
                        *(("", "") if run is of_slots[0] else map(str, ratios)),
                    )
                )
    return Grid(
        caption="Epoch by epoch, without the first step" if by_epoch else "All steps but the first",
        columns=(
            *(("slots", "epoch") if by_epoch else ("slots",)),
            "drafter",
            "steps",
            "rollout seconds",
            "step seconds",
            "ms/token",
            "tokens/decode step",
            "verified/decode step",
            f"rollouts against {runs[0].drafter}",
            f"steps against {runs[0].drafter}",
        ),
        rows=tuple(cells),
    )


def _rows_of(run: TrainingRun, epoch: int | None) -> list[MetricRow]:
    """Its steps of an epoch, or all, without the first."""
    return [row for row in run.rows[1:] if epoch is None or int(row["data/epoch"]) == epoch]


def _notes(recipe: Recipe, *, is_same: bool) -> tuple[str, ...]:
    checked = " All runs had the same rewards, losses and lengths in every step (checked with `==`)." if is_same else ""
    return (
        f"{recipe.train.num_steps} steps of {recipe.rollout.num_prompts} prompts x {recipe.rollout.num_samples} "
        f"samples, with real updates, from the same weights; whole steps in turns, whose order changes each "
        f"time.{checked}",
        "Rollout seconds are those of decoding until the last sample has ended; step seconds add grading, log-probs, "
        "advantages and the update. Sums over the steps; ratios are medians over pairs of the same step, with a 95% "
        "interval (how steps differ is in it, too).",
    )
