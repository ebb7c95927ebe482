"""The place of a run, and whether it may begin there: checked before anything is loaded, so nothing imports torch."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

from srtrl.files import is_temporary
from srtrl.metrics import MetricRow, read_metrics
from srtrl.recipe.schema import Recipe


class StartFlags(TypedDict, total=False):
    """How a run begins; without any, in a new folder."""

    resume: bool
    """Continue from the last checkpoint of the run's folder; a run that is not there is begun."""
    overwrite: bool
    """Rename a folder that is in the way to `NAME.1` (or the next free number), and begin in a new one."""
    from_step: int | None
    """With `resume`, continue from the checkpoint of this step, and delete later ones."""


def check_place(recipe: Recipe, **flags: Unpack[StartFlags]) -> None:
    """Refuse a folder in which the run cannot begin.

    Raises:
        ValueError: flags that exclude each other; a folder that exists without any, or is a link; a model in it.
    """
    folder, shown = recipe.folder, Path(recipe.output_dir, recipe.name)
    resume, overwrite = flags.get("resume", False), flags.get("overwrite", False)
    try:
        is_free = is_empty(folder)
    except OSError as error:  # the path is too long, or may not be read
        raise ValueError(f"output_dir: {error}") from error
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other: continue the run, or begin it again")
    if not resume and flags.get("from_step") is not None:
        raise ValueError("--checkpoint needs --resume; to begin a new run from it: name=OTHER model.path=CHECKPOINT")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        kind = "a link" if folder.is_symlink() else "a file"
        raise ValueError(f"{shown} is {kind}; the run's folder would be there: change `name` or `output_dir`")
    for option, path in recipe.model_paths.items():
        if Path(path).exists() and Path(path).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{option}: {path} is in the run's own folder, which changes: take another `name`")
    if not (is_free or overwrite or resume):
        raise ValueError(
            f"{shown} exists: --resume continues that run, --overwrite renames it to {folder.name}.1 and begins "
            "again, name=OTHER starts a run of its own"
        )


def is_empty(folder: Path) -> bool:
    """Whether a folder is not there, or has at most rows and the files of a run that was killed at its start."""
    if folder.is_symlink() or not folder.is_dir():
        return not os.path.lexists(folder)
    return all(
        is_temporary(path) or is_rows(path) or (path.name == ".lock" and path.lstat().st_size == 0)
        for path in folder.iterdir()
    )


def is_rows(path: Path) -> bool:
    """Whether a file has rows that were given from Python: it is there before its run."""
    return re.fullmatch(r"rows_[0-9a-f]{16}\.jsonl", path.name) is not None


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainingResult:
    """The end of a run; its figures are read from `metrics.jsonl` when they are used."""

    folder: Path
    num_steps: int
    """Training steps done, in total."""
    interrupted: bool
    """An interrupt ended the run before its last step; `resume` continues it."""

    @property
    def history(self) -> list[MetricRow]:
        """The metrics of all steps (docs/metrics.md); row 0 is the evaluation before training, if there was one."""
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def metrics(self) -> MetricRow:
        """The metrics of the last step; empty if there is none."""
        return (self.history or [{}])[-1]

    @property
    def before(self) -> MetricRow:
        """The `eval/...` metrics before training; empty where nothing was evaluated."""
        return _held_out((self.history or [{}])[0])

    @property
    def after(self) -> MetricRow:
        """The `eval/...` metrics after the last step; empty where nothing was evaluated."""
        return _held_out(self.metrics)


def _held_out(row: MetricRow) -> MetricRow:
    return {name: value for name, value in row.items() if name.startswith("eval/")}
