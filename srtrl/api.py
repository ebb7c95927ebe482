"""srtrl from Python: `from srtrl import load_recipe, train, generate`; the same checks as on the command line."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from srtrl.checks import build_checked
from srtrl.generation import Generated, generate
from srtrl.recipe.file import read_source
from srtrl.recipe.schema import Recipe
from srtrl.trainer.trainer import TrainingResult, run_training

__all__ = ["Generated", "TrainingResult", "generate", "load_recipe", "train"]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and check every name, option and local path in it; no weights are loaded.

    Args:
        path: A YAML file.
        overrides: As on the command line: `["train.num_steps=20", "rollout.slots=32"]`.

    Raises:
        ValueError: naming file, line and option, what was expected and what to do.
    """
    return build_checked(read_source(Path(path), overrides))


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    from_step: int | None = None,
    on_step: Callable[[int, Mapping[str, float]], None] = lambda *_: None,
) -> TrainingResult:
    """Train as the recipe says, into the folder `<output_dir>/<name>`.

    Args:
        recipe: From `load_recipe`.
        resume: Continue from the last checkpoint of the run's folder; options of `recipe` that differ from the run's
            hold from there on, except those that cannot change within a run.
        overwrite: Rename a folder that is in the way to `NAME.1` (or the next free number) and begin again.
        from_step: With `resume`, the step whose checkpoint to continue from; later checkpoints are deleted (the option
            `--checkpoint`).
        on_step: Called after each training step with its number and its metrics (docs/metrics.md), which are on disk
            then. What it raises ends the run; `resume` continues it from its last checkpoint.

    Raises:
        ValueError: a mistake in the recipe, its data or the flags.
        TrainingStoppedError: the numbers went wrong, or the device is too small; see the message.
    """
    return run_training(recipe, resume=resume, overwrite=overwrite, from_step=from_step, on_step=on_step)
