"""srtrl from Python: `from srtrl import load_recipe, train, generate`; the same checks as on the command line."""

from collections.abc import Sequence
from pathlib import Path

from srtrl.checks import build_checked
from srtrl.generation import Generated, generate
from srtrl.recipe.file import read_source
from srtrl.recipe.schema import Recipe
from srtrl.trainer.trainer import TrainingResult
from srtrl.trainer.trainer import run_training as train

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
