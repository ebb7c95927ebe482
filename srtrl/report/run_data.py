"""What a report reads from a run's folder: the recipe, the metric rows, and a few steps' rollouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srtrl.engine.stats import DecodeStep
from srtrl.metrics import MetricRow, read_metrics
from srtrl.recipe import Recipe
from srtrl.recipe_file import load_recipe
from srtrl.trainer.run_folder import read_timeline

SAMPLE_COLUMNS = ("prompt_id", "prompt", "text", "reward", "outcome", "finish_reason", "sample_index", "token_ids")


@dataclass(kw_only=True, slots=True, frozen=True)
class Sample:
    """One rollout as the report shows it."""

    prompt_id: str
    prompt: str
    text: str
    reward: float
    outcome: str
    finish_reason: str
    sample_index: int
    length: int
    """Response tokens."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StepRollouts:
    """All rollouts of one step."""

    step: int
    samples: Sequence[Sample]


@dataclass(kw_only=True, slots=True, frozen=True)
class StepTimeline:
    """The decode steps of one training step's rollouts."""

    step: int
    decode_steps: Sequence[DecodeStep]


@dataclass(kw_only=True, slots=True, frozen=True)
class RunData:
    """A run, finished or not."""

    folder: Path
    recipe: Recipe
    recipe_text: str
    """`recipe.yaml` as it stands."""
    rows: Sequence[MetricRow]
    """All rows of `metrics.jsonl`; row 0, where there is one, is the evaluation before training."""
    rollouts: Sequence[StepRollouts]
    """Those of the first, the middle and the last step that are on disk; fewer in a short run, none if not saved."""
    timelines: Sequence[StepTimeline]
    """Those of the first and the last step that are on disk."""

    @property
    def steps(self) -> list[MetricRow]:
        """The rows of training steps."""
        return [row for row in self.rows if row["step"] > 0]

    @property
    def speculates(self) -> bool:
        """Whether any draft was verified."""
        return any(row.get("engine/verified_per_decode_step", 1.0) > 1 for row in self.steps)


def require_run(folder: Path) -> None:
    """Raise ValueError where `folder` is not the folder of a run."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; expected the folder of a run, such as runs/quickstart")
    missing = [name for name in ("recipe.yaml", "metrics.jsonl") if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} is not the folder of a run: it has no {' and no '.join(missing)}")


def read_run(folder: Path) -> RunData:
    """Read a run's folder.

    Raises:
        ValueError: it is not a run's folder, or the run has not logged anything yet.
    """
    require_run(folder)
    recipe_file, metrics_file = folder / "recipe.yaml", folder / "metrics.jsonl"
    rows = read_metrics(metrics_file)
    if not rows:
        raise ValueError(
            f"{metrics_file} has no complete row yet: there is nothing to report before the first step ends"
        )
    rollouts, timelines = _step_files(folder / "rollouts"), _step_files(folder / "timeline")
    return RunData(
        folder=folder,
        recipe=load_recipe(recipe_file),
        recipe_text=recipe_file.read_text(encoding="utf-8"),
        rows=rows,
        rollouts=[_read_rollouts(file) for file in _pick(rollouts, (0, len(rollouts) // 2, -1))],
        timelines=[
            StepTimeline(step=_step_of(file), decode_steps=read_timeline(file)) for file in _pick(timelines, (0, -1))
        ],
    )


def choose_samples(rollouts: StepRollouts, most: int = 2) -> list[Sample]:
    """A few samples of a step, right and wrong ones by turns, each of another prompt where there are enough."""
    by_correctness: dict[bool, list[Sample]] = {True: [], False: []}
    for sample in rollouts.samples:
        by_correctness[sample.outcome == "correct"].append(sample)
    chosen: list[Sample] = []
    for turn in range(most):
        wanted = by_correctness[turn % 2 == 0] or by_correctness[turn % 2 == 1]
        seen = {sample.prompt_id for sample in chosen}
        fresh = next((sample for sample in wanted if sample.prompt_id not in seen), wanted[0] if wanted else None)
        if fresh is not None:
            chosen.append(fresh)
            wanted.remove(fresh)
    return chosen


def _step_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("step_*.parquet"))


def _pick(files: Sequence[Path], places: Sequence[int]) -> list[Path]:
    """The files at these places, each once, in order; none where there is no file."""
    return sorted({files[place] for place in places}) if files else []


def _step_of(file: Path) -> int:
    return int(file.stem.removeprefix("step_"))


def _read_rollouts(file: Path) -> StepRollouts:
    import pyarrow.parquet as pq

    rows = pq.read_table(file, columns=list(SAMPLE_COLUMNS)).to_pylist()
    return StepRollouts(step=_step_of(file), samples=[_sample(row) for row in rows])


def _sample(row: Mapping[str, Any]) -> Sample:
    values = {name: row[name] for name in SAMPLE_COLUMNS if name != "token_ids"}
    return Sample(**values, length=len(row["token_ids"]))
