"""What every part of a recipe is made of, and how a combination of values is refused."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict


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


class Section(BaseModel):
    """A strict part of a recipe: unknown keys are errors, values are not coerced between types."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
