"""The folder of a run, finished or not, as `srtrl report` and `srtrl compare` read it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from srtrl.metrics import MetricRow, read_metrics
from srtrl.recipe.file import load_recipe
from srtrl.recipe.schema import Recipe
from srtrl.resolve import suggestion
from srtrl.run.steps import step_of

if TYPE_CHECKING:
    import pyarrow

SHOWN = {
    *("prompt_id", "draw_index", "sample_index", "prompt", "prompt_token_ids", "token_ids", "text"),
    *("reward", "outcome", "finish_reason"),
}
"""Columns of the rollouts that a reader needs."""
NUM_LISTED = 8
"""How many prompts or steps a message lists."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Run:
    """A run, finished or not."""

    folder: Path
    recipe: Recipe
    rows: Sequence[MetricRow]
    """All rows of `metrics.jsonl`, at least one; row 0, where there is one, is the evaluation before training."""

    @property
    def num_steps(self) -> int:
        """Training steps done."""
        return sum(row["step"] > 0 for row in self.rows)

    @property
    def is_finished(self) -> bool:
        """Whether all of the recipe's steps are done."""
        return self.num_steps >= self.recipe.train.num_steps

    @property
    def rollout_files(self) -> dict[int, Path]:
        """The files of the saved rollouts by step, in order; empty where there are none."""
        files = sorted((self.folder / "rollouts").glob("step_*.parquet"))
        return {step_of(path): path for path in files if "." not in path.stem}  # else it is not srtrl's


def read_run(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
        ValueError: it is not a run's folder, or the run has not logged anything yet.
    """
    if not folder.is_dir():
        meant = Path("runs") / folder
        expected = (
            f"did you mean {meant}?" if meant.is_dir() else "expected the folder of a run, such as runs/quickstart"
        )
        raise ValueError(f"{folder}: no such folder; {expected}")
    recipe_file, metrics_file = folder / "recipe.yaml", folder / "metrics.jsonl"
    missing = [path.name for path in (recipe_file, metrics_file) if not path.is_file()]
    if missing:
        raise ValueError(f"{folder} is not the folder of a run: it has no {' and no '.join(missing)}")
    rows = read_metrics(metrics_file)
    if not rows:
        raise ValueError(f"{metrics_file} has no complete row yet: there is nothing to show before the first step ends")
    return Run(folder=folder, recipe=load_recipe(recipe_file), rows=rows)


def find_rollouts(run: Run, step: int | None = None, prompt_id: str | None = None) -> dict[int, Path]:
    """The run's rollout files by step, in order, at least one: all, or those with samples of a prompt.

    Raises:
        ValueError: there are none, or none of `step`; with those that there are.
    """
    files = run.rollout_files
    if not files:
        raise ValueError(f"{run.folder / 'rollouts'} has no step_*.parquet: no step of the run has ended yet")
    if prompt_id is not None:
        steps_of = steps_by_prompt(files)
        if prompt_id not in steps_of:
            near = suggestion(prompt_id, steps_of)
            raise ValueError(
                f"--prompt: {run.folder} has no rollouts of `{prompt_id}`{near}; it has those of {listing(steps_of)}"
            )
        files = {number: files[number] for number in steps_of[prompt_id]}
    if step is not None and step not in files:
        of = "" if prompt_id is None else f" of prompt {prompt_id}"
        raise ValueError(f"--step {step}: {run.folder} has rollouts{of} of the steps {listing(files)}")
    return files


def steps_by_prompt(files: Mapping[int, Path]) -> dict[str, list[int]]:
    """The steps, of these files, that sampled each prompt."""
    steps_of: dict[str, list[int]] = {}
    for step, path in files.items():
        for prompt_id in dict.fromkeys(read_rollouts(path, ["prompt_id"])["prompt_id"].to_pylist()):
            steps_of.setdefault(prompt_id, []).append(step)
    return steps_of


def listing(names: Iterable[object]) -> str:
    """The first few, and how many there are in total."""
    texts = list(map(str, names))
    more = f", ... ({len(texts)} in total)" if len(texts) > NUM_LISTED else ""
    return ", ".join(texts[:NUM_LISTED]) + more


def read_rollouts(path: Path, columns: Sequence[str] | None = None, *, prompt_id: str | None = None) -> "pyarrow.Table":
    """Rows of a step's rollouts: all of them, or those of one prompt; all columns, or these.

    Raises:
        ValueError: the file cannot be read; the message names it.
    """
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        raise ValueError(f"{path}: expected a Parquet file, found a folder")
    try:  # not `read_table`, which imports pandas where it is installed
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            needed = SHOWN if columns is None else {"prompt_id", *columns}
            if missing := needed - {*file.schema_arrow.names}:
                raise pyarrow.ArrowInvalid(f"no column {', '.join(sorted(missing))}")
            table = file.read(columns=columns)
        if prompt_id is not None:
            table = table.filter(pyarrow.array([name == prompt_id for name in table["prompt_id"].to_pylist()], "bool"))
        return table
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot read these rollouts: {str(error).partition(chr(10))[0]}") from error
