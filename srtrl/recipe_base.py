"""What every part of a recipe is made of, and how a combination of values is refused."""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

Schedule = Literal["constant", "linear", "cosine"]
"""A learning rate after its warm-up."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """A combination of values that cannot run."""

    key: tuple[str | int, ...]
    """The value to change first; its line is shown."""
    message: str


class RecipeConflictsError(ValueError):
    """All combinations in a recipe that cannot run."""

    def __init__(self, conflicts: list[Conflict]) -> None:
        self.conflicts = conflicts
        super().__init__("; ".join(f"{'.'.join(map(str, conflict.key))} {conflict.message}" for conflict in conflicts))


@dataclass(kw_only=True, frozen=True, slots=True)
class UpdatePlan:
    """How many optimizer steps one model takes, on how much and how large; every default is filled in."""

    mini_batch_prompts: int
    """Prompts of one optimizer step."""
    num_epochs: int
    """Passes over each rollout batch."""
    steps_per_batch: int
    """Optimizer steps of one training step whose batch is full."""
    num_skipped: int
    """Training steps, from the first, in which this model does not learn."""
    num_steps: int
    """Optimizer steps of the whole run."""
    learning_rate: float
    """The peak."""
    warmup_steps: int
    """Optimizer steps of linear warm-up."""
    schedule: Schedule


class Section(BaseModel):
    """A strict part of a recipe: unknown keys are errors, values are not coerced between types."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
