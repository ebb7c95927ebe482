"""Training runs that differ in drafter and slots alone, in turns: rollouts, updates, and what each step took."""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path

from rich.console import Console

from srtrl.bench.comparison import RunTeller
from srtrl.bench.drafter_tables import aligned, merge_metrics
from srtrl.bench.drafters_setup import control_name, drafter_maker
from srtrl.bench.environment import read_environment
from srtrl.bench.side_by_side import SLICE_TOKENS, side_by_side
from srtrl.bench.statistics import paired_ratio
from srtrl.bench.tables import Document, Grid
from srtrl.engine.speculation import Speculation
from srtrl.metrics import MetricRow, read_metrics
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.recipe import Recipe
from srtrl.recipe_file import load_recipe
from srtrl.trainer.build import choose_device, is_deterministic
from srtrl.trainer.run_folder import RunProgress
from srtrl.trainer.trainer import Trainer, long_lived_objects_left_alone, open_trainer

ROLLOUT, STEP = "time/rollout", "time/step"
TOKENS, PER_DECODE_STEP = "engine/tokens", ("engine/tokens_per_decode_step", "engine/verified_per_decode_step")
TIMING = ("engine/", "memory/", "time/")
"""Metrics that may differ between runs that learn the same."""
_QUIET = (
    *("eval.before_and_after=false", "eval.every_steps=null", "log.trackers=[]", "log.save_rollouts=false"),
    "name=bench",
)
"""Nothing is evaluated or kept."""


@dataclass(slots=True)
class TrainingRun:
    """One of the runs."""

    name: str
    """What tables call its drafter."""
    recipe: Recipe
    rows: list[MetricRow] = field(default_factory=list)
    """Metrics, a row a step."""

    @property
    def slots(self) -> int:
        """Its decode slots."""
        return self.recipe.rollout.slots


def measure(
    path: Path, overrides: Sequence[str], *, drafters: Sequence[str], slots: Sequence[int] | None, control: bool
) -> Document:
    """Train in turns.

    Raises:
        ValueError: The recipe or a drafter is wrong.
    """
    for name in drafters:
        drafter_maker(name)
    _check_overrides(overrides, with_slots=slots is not None)
    recipe = load_recipe(path, overrides)
    set_cpu_threads(recipe.num_threads)
    environment = read_environment(choose_device(recipe))
    contenders = {name: name for name in drafters} | ({control_name(drafters[0]): drafters[0]} if control else {})
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            TrainingRun(name, _recipe_of(path, overrides, drafter, count, Path(folder) / f"{count}-{number}"))
            for count in slots or (recipe.rollout.slots,)
            for number, (name, drafter) in enumerate(contenders.items())
        ]
        warm_ups = [
            TrainingRun(run.name, _one_step(run.recipe, Path(run.recipe.output_dir) / "warm-up")) for run in runs
        ]
        is_same = is_deterministic(recipe, choose_device(recipe))
        with RunTeller(len(runs) * (1 + recipe.train.num_steps), title="bench train") as teller:
            train_in_turns(warm_ups, teller, is_same=is_same)
            with long_lived_objects_left_alone():
                train_in_turns(runs, teller, is_same=is_same)
    return Document(
        title=f"Training with drafters: {path.name}, {', '.join(str(count) for count in slots or ('its own',))} slots, "
        f"{', '.join(contenders)}",
        environment=environment,
        notes=tuple(describe(recipe, path, runs, is_same=is_same)),
        grids=(
            seconds_grid(runs, "Epoch by epoch", by_epoch=True),
            seconds_grid(runs, "All steps together", by_epoch=False),
        ),
        values={
            "runs": [{"drafter": run.name, "slots": run.slots, "rows": [dict(row) for row in run.rows]} for run in runs]
        },
    )


def _check_overrides(overrides: Sequence[str], *, with_slots: bool) -> None:
    """Raise ValueError for one that would be replaced: whoever gives it must not believe that it counts."""
    replaced = {setting.partition("=")[0]: "bench train sets that itself" for setting in (*_QUIET, "output_dir")}
    replaced["rollout.drafter"] = "the drafters are those of --drafters"
    replaced["train.checkpoint_every"] = "bench train keeps no checkpoint"
    if with_slots:
        replaced["rollout.slots"] = "the slots are those of --slots"
    for override in overrides:
        key = override.partition("=")[0]
        if key in replaced:
            raise ValueError(f"override `{override}`: {replaced[key]}; leave it out")


def _recipe_of(path: Path, overrides: Sequence[str], drafter: str, slots: int, folder: Path) -> Recipe:
    """The recipe with this drafter and so many slots, which trains into `folder`."""
    mine = (f"rollout.drafter={drafter}", f"rollout.slots={slots}", f"output_dir={folder}")
    recipe = load_recipe(path, [*overrides, *_QUIET, *mine])
    return recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"checkpoint_every": recipe.train.num_steps})}
    )


def _one_step(recipe: Recipe, folder: Path) -> Recipe:
    """The same for one step: kernels compile and memory is touched where it does not count."""
    train = recipe.train.model_copy(update={"num_steps": 1, "checkpoint_every": 1})
    return recipe.model_copy(update={"output_dir": str(folder), "train": train})


def train_in_turns(runs: Sequence[TrainingRun], teller: RunTeller, *, is_same: bool) -> None:
    """Take all steps, the runs of equal slots side by side, and fill the runs' rows; who is first changes.

    Raises:
        ValueError: Two runs learned different things where they must not (`is_same`).
    """
    with ExitStack() as stack:
        trainers = [stack.enter_context(open_trainer(run.recipe, progress=_silent(run.recipe))) for run in runs]
        speculations = [trainer.parts.engine.speculation for trainer in trainers]
        for step in range(1, runs[0].recipe.train.num_steps + 1):
            pairs = list(zip(runs, trainers, strict=True))
            if is_same:
                pairs = change_places(runs, trainers, speculations, step)
            if step % 2 == 0:
                pairs.reverse()
            for _, of_equal_slots in groupby(pairs, key=lambda pair: pair[0].slots):
                _steps(list(of_equal_slots), step)
            for run, _ in pairs:
                seconds = f"{run.rows[-1][ROLLOUT]:.3f} s of {run.rows[-1][STEP]:.3f}"
                teller.tell(f"{run.name}, {run.slots} slots, step {step}: rollouts {seconds}")
            if is_same:
                check_same(runs)


def change_places(
    runs: Sequence[TrainingRun], trainers: Sequence[Trainer], speculations: Sequence[Speculation], step: int
) -> list[tuple[TrainingRun, Trainer]]:
    """Every other step, let the runs of equal slots change trainers; each takes its drafter and budget along.

    Trainers that have learned the same differ in one thing only, where their memory lies; and runs without drafts that
    differed in nothing else were up to 4% slower or faster than each other, step after step (docs/LOG.md).
    """
    pairs = []
    for _, equal_slots in groupby(range(len(runs)), key=lambda index: runs[index].slots):
        places = list(equal_slots)
        shift = (step - 1) // 2 % len(places)
        for index, place in zip(places, places[shift:] + places[:shift], strict=True):
            trainers[place].parts.engine.speculation = speculations[index]
            pairs.append((runs[index], trainers[place]))
    return pairs


def _steps(pairs: Sequence[tuple[TrainingRun, Trainer]], step: int) -> None:
    """One step of each trainer: their rollouts take turns, then come the updates one by one."""
    engines = [trainer.parts.engine for _, trainer in pairs]
    works = [partial(trainer.train_step, step) for _, trainer in pairs]
    num_threads = pairs[0][0].recipe.num_threads
    waited = side_by_side(engines, works, set_threads=lambda: set_cpu_threads(num_threads))
    for (run, trainer), seconds in zip(pairs, waited, strict=True):
        row = dict(read_metrics(trainer.run.path / "metrics.jsonl")[-1])
        for name in (ROLLOUT, STEP):
            row[name] -= seconds
        run.rows.append(row)


def _silent(recipe: Recipe) -> RunProgress:
    return RunProgress(recipe.name, recipe.train.num_steps, console=Console(quiet=True))


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
                f"step {first['step']:.0f}: {run.name} at {run.slots} slots learned something else than {runs[0].name} "
                f"at {runs[0].slots}, so their times cannot be compared ({different}); does a reward or a loss of your "
                "own draw random numbers or keep a state?"
            )


def seconds_grid(runs: Sequence[TrainingRun], caption: str, *, by_epoch: bool) -> Grid:
    """One row an epoch (or one in all), number of slots and drafter; ratios are those of pairs of steps."""
    baselines = {run.slots: run for run in reversed(runs)}  # the first of each number of slots
    baseline = runs[0].name
    cells = []
    for slots, first in sorted(baselines.items()):
        for epoch in sorted({_epoch(row) for row in first.rows}) if by_epoch else [None]:
            of_first = _rows_of(first, epoch)
            for run in runs:
                if run.slots != slots:
                    continue
                rows = _rows_of(run, epoch)
                tokens = sum(row["tokens/response"] for row in rows)
                rollout = sum(row[ROLLOUT] for row in rows)
                decoded = merge_metrics([{name: row[name] for name in (TOKENS, *PER_DECODE_STEP)} for row in rows])
                cells.append(
                    (
                        str(slots),
                        *(() if epoch is None else (str(epoch + 1),)),
                        run.name,
                        str(len(rows)),
                        f"{rollout:.2f}",
                        f"{sum(row[STEP] for row in rows):.2f}",
                        f"{1000 * rollout / tokens:.3f}",
                        *(f"{decoded[name]:.2f}" for name in PER_DECODE_STEP),
                        "" if run is first else _ratio(of_first, rows, ROLLOUT),
                        "" if run is first else _ratio(of_first, rows, STEP),
                    )
                )
    labels = ("slots", "epoch") if by_epoch else ("slots",)
    return Grid(
        caption=caption,
        columns=(
            *labels,
            "drafter",
            "steps",
            "rollout seconds",
            "step seconds",
            "ms/token",
            "tokens/decode step",
            "verified/decode step",
            f"rollouts against {baseline}",
            f"steps against {baseline}",
        ),
        alignments=aligned(len(labels), 6, 2),
        rows=tuple(cells),
        group_by=len(labels),
    )


def _epoch(row: Mapping[str, float]) -> int:
    return int(row["data/epoch"])


def _rows_of(run: TrainingRun, epoch: int | None) -> list[MetricRow]:
    return [row for row in run.rows if epoch is None or _epoch(row) == epoch]


def _ratio(of_first: Sequence[Mapping[str, float]], rows: Sequence[Mapping[str, float]], name: str) -> str:
    return str(paired_ratio([row[name] for row in of_first], [row[name] for row in rows]))


def describe(recipe: Recipe, path: Path, runs: Sequence[TrainingRun], *, is_same: bool) -> list[str]:
    """What was trained and how the columns are to be read, in sentences."""
    rows = runs[0].rows
    rollout = recipe.rollout
    lengths = statistics.fmean(row["length/mean"] for row in rows)
    notes = [
        f"`{path.name}`: {recipe.train.num_steps} steps of {rollout.num_prompts} prompts x {rollout.num_samples} "
        f"samples of {lengths:.0f} tokens on average; real updates, so that the policy changes as it learns. A "
        "warm-up step of each run, then all runs from the same weights, step by step. The rollouts of one step go on "
        f"side by side: who is {SLICE_TOKENS} tokens ahead waits, and the wait does not count. Then come the updates, "
        "one by one, in an order that changes each time.",
        "Rollout seconds are those of decoding until the last sample has ended; step seconds add grading, log-probs, "
        "advantages and the update. Sums over the steps; the ratios are geometric means over pairs of the same step, "
        "with a 95% interval (how steps differ is in it, too).",
    ]
    if is_same:
        notes.append(
            "Every step of all runs had the same rewards, losses and lengths (checked with `==`). So runs of equal "
            "slots change places every other step, and each decodes and learns in the memory of each other: where "
            "weights and pages lie makes identical runs differ by percents."
        )
    if len({run.slots for run in runs}) > 1:
        of_baseline = {run.slots: sum(row[ROLLOUT] for row in run.rows) for run in runs if run.name == runs[0].name}
        fastest = min(of_baseline, key=lambda slots: of_baseline[slots])
        notes.append(f"`{runs[0].name}` is fastest at {fastest} slots, by the rollout seconds of all steps.")
    return notes
