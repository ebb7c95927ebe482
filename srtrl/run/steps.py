"""Names of what belongs to a step of a run, and the checkpoints of a run; nothing here imports torch."""

import re
from pathlib import Path

from srtrl.metrics import read_metrics


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint of `step`."""
    return f"step_{step:06d}"


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint or a rollout file, `step_000010...`; ValueError where there is none."""
    digits = path.name.removeprefix("step_").split(".")[0]
    if not digits.isdecimal():
        raise ValueError(f"{path}: no step in this name, such as step_000010: move the file away")
    return int(digits)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in a `checkpoints` folder, or None."""
    return next(reversed(list_checkpoints(folder)), None)


def best_step(run: Path, metric: str, *others: int) -> int | None:
    """The first of a run's steps with a checkpoint, and `others`, where a metric is highest; None if none logged it."""
    steps = {*map(step_of, list_checkpoints(run / "checkpoints")), *others}
    rows = read_metrics(run / "metrics.jsonl")
    values = {int(row["step"]): row[metric] for row in rows if metric in row and row["step"] in steps}
    return max(values, key=values.__getitem__, default=None)


def numbered(folder: Path, suffix: str = "") -> list[Path]:
    """Files that srtrl has named `step_000010` and a suffix (a pattern) in a folder, in the order of the steps."""
    name = re.compile(rf"step_(\d{{6}}|[1-9]\d{{6,}}){suffix}")
    return sorted((path for path in folder.glob("step_*") if name.fullmatch(path.name)), key=step_of)


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first (one being written has a name that begins with a dot)."""
    return [path for path in numbered(folder) if path.is_dir()]
