"""The folder of a run: who may write into it, and what a resume finds there."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from srtrl.engine.kv_memory import CPU_GIB
from srtrl.metrics import MetricLog, sync_folder, write_atomic
from srtrl.recipe import Recipe
from srtrl.recipe_file import dump_recipe, load_recipe
from srtrl.trainer.build import choose_device, is_deterministic
from srtrl.trainer.checkpoint import clean_unfinished, latest_checkpoint

NAMES_BEFORE_RECIPE = frozenset({".lock", "rollouts", "timeline", "checkpoints"})
"""What a run that was killed at its very start may have left: the recipe is written after these."""
FREE_KEYS = (
    "output_dir",
    "log.",
    "grading.num_workers",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.peak_tflops",
)
"""Options that a resumed run may change: they do not touch what is learned."""

FREE_KEYS_IF_DETERMINISTIC = (
    "rollout.slots",
    "rollout.max_open_prompts",
    "rollout.num_pages",
    "rollout.kv_memory_gib",
    "rollout.kv_memory_share",
    "rollout.kv_across_update",
    "rollout.cuda_graphs",
    "rollout.prefill_chunk_tokens",
    "rollout.drafter",
    "rollout.drafter_options",
    "rollout.drafter_options.",
    "rollout.draft_budget",
    "rollout.admission",
    "rollout.long_first",
    "rollout.run_ahead",
    "rollout.run_ahead_coupled",
    "rollout.run_ahead_max_slowdown",
)
"""Options that change nothing learned in the decoder's deterministic mode (`rollout.deterministic`)."""

FREE_KEYS_ON_CUDA = (
    "model.gradient_checkpointing",
    "train.micro_batch_tokens",
    "rollout.kv_memory_gib",
    "rollout.kv_memory_share",
    "rollout.kv_across_update",
)
"""What a run that ran out of memory may change to go on. It changes what is learned by rounding alone, and the backward
pass of attention on CUDA adds up in no fixed order anyway."""


@dataclass(kw_only=True, slots=True)
class RunFolder:
    """An open run folder, locked for this process until closed."""

    path: Path
    checkpoint: Path | None
    """What to go on from; None starts from the recipe's model."""
    log: MetricLog
    _lock: int
    """File descriptor of `.lock`."""

    @property
    def rollouts(self) -> Path:
        """Folder of the Parquet files."""
        return self.path / "rollouts"

    @property
    def timeline(self) -> Path:
        """Folder of the decode steps' Parquet files."""
        return self.path / "timeline"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def close(self) -> None:
        """Close the log and give up the lock."""
        self.log.close()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_path(recipe: Recipe) -> Path:
    """Where the run of this recipe lives."""
    return Path(recipe.output_dir) / recipe.name


def check_run_folder(recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
    """Refuse what `open_run_folder` would refuse; changes nothing, so that it can run before anything else.

    Raises:
        ValueError: both flags; a folder that exists without either; `overwrite` of a folder that is not a run; `resume`
            with a recipe that would learn something else.
    """
    folder = run_path(recipe)
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other: go on with the run, or begin it again")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; the run's folder would be there: change `name` or `output_dir`")
    if not (resume or overwrite) and any(folder.iterdir()):
        raise ValueError(
            f"{folder} exists: --resume goes on with that run, --overwrite deletes it and begins again, "
            "name=OTHER starts a run of its own"
        )
    if not (folder / "recipe.yaml").is_file() and {path.name for path in folder.iterdir()} - NAMES_BEFORE_RECIPE:
        flag = "--overwrite" if overwrite else "--resume"
        raise ValueError(f"{flag}: {folder} holds no recipe.yaml, so it is not a run of srtrl; take another name")
    if resume and (folder / "recipe.yaml").is_file():
        _check_same_run(load_recipe(folder / "recipe.yaml"), recipe, folder)


def open_run_folder(recipe: Recipe, *, resume: bool = False, overwrite: bool = False) -> RunFolder:
    """Make the run's folder, or take the one that is there back to its last checkpoint.

    With `resume`, rows and rollouts later than the checkpoint are dropped (the steps will be done again, with the same
    numbers); without any checkpoint the run starts from step 0, and without a folder it is a new run.

    Raises:
        ValueError: as `check_run_folder`, or another process holds the folder.
    """
    check_run_folder(recipe, resume=resume, overwrite=overwrite)
    folder = run_path(recipe)
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder)
    if overwrite:
        _empty(folder)
    for name in ("rollouts", "timeline", "checkpoints"):
        (folder / name).mkdir(exist_ok=True)
    clean_unfinished(folder / "checkpoints")
    checkpoint = latest_checkpoint(folder / "checkpoints")
    step = step_of(checkpoint) if checkpoint is not None else -1
    write_atomic(folder / "recipe.yaml", dump_recipe(recipe))
    log = MetricLog(folder / "metrics.jsonl")
    log.truncate(step)
    _drop_later_files(folder, step)
    return RunFolder(path=folder, checkpoint=checkpoint, log=log, _lock=lock)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint or a rollout file, `step_000010...`."""
    return int(path.name.removeprefix("step_").split(".")[0])


def _lock(folder: Path) -> int:
    """Hold the folder for this process; the system lets go when the process ends, however it ends."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a POSIX lock: forked graders do not inherit it
    except OSError as error:
        os.close(descriptor)
        raise ValueError(f"{folder} is in use by another srtrl process") from error
    return descriptor


def _empty(folder: Path) -> None:
    """Delete everything but the lock; `recipe.yaml` last, so that a kill leaves what --overwrite accepts again."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name == "recipe.yaml"):
        if entry.name == ".lock":
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _drop_later_files(folder: Path, step: int) -> None:
    """Delete what the steps after `step` wrote, and the end-of-run files."""
    for file in [*(folder / "rollouts").glob("step_*.parquet"), *(folder / "timeline").glob("step_*.parquet")]:
        if step_of(file) > step:
            file.unlink()
    for name in ("summary.json", "report.html"):
        (folder / name).unlink(missing_ok=True)
    sync_folder(folder)


def _check_same_run(old: Recipe, new: Recipe, folder: Path) -> None:
    """Refuse to go on with a recipe that would not have learned what the run has learned so far."""
    device = choose_device(old)
    free = FREE_KEYS + (FREE_KEYS_IF_DETERMINISTIC if is_deterministic(old, device) else ())
    free += FREE_KEYS_ON_CUDA if device.type == "cuda" else ()
    old_values, new_values = dict(_flatten(old.model_dump())), dict(_flatten(new.model_dump()))
    changed = []
    for key in sorted(old_values.keys() | new_values.keys()):
        before, after = old_values.get(key), new_values.get(key)
        if before == after or any(key == one or (one.endswith(".") and key.startswith(one)) for one in free):
            continue
        if key == "train.num_steps" and new.train.schedule == "constant" and new.train.num_steps > old.train.num_steps:
            continue
        if key == "rollout.kv_memory_gib" and device.type == "cpu" and {before, after} == {"auto", CPU_GIB}:
            continue  # the same memory there; the option's default was a number once
        changed.append(f"  {key}: the run has {before!r}, now {after!r}")
    if changed:
        raise ValueError(
            f"--resume: the recipe differs from that of {folder / 'recipe.yaml'}, so the run would not go on as it "
            "began:\n" + "\n".join(changed) + "\nUndo the change, or start a run of its own with name=OTHER"
        )


def _flatten(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys and leaf values; a list is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
