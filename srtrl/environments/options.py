"""Options of `srtrl generate` and `srtrl eval`: which environment answers the policy between two turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from srtrl.checks import import_foreign
from srtrl.recipe import EnvironmentSection
from srtrl.recipe_file import RecipeError, RecipeSource, read_source, validate_section

KEY = ("rollout", "environment")
NONE = "none"
"""In place of a name: a single turn."""

Name = Annotated[
    str | None,
    typer.Option(
        "--environment",
        metavar="NAME",
        help="What answers between turns, such as `calculator`, instead of the run's own; `none`: a single turn. "
        "[default: that of the run's recipe; for a model none]",
    ),
]
FormatName = Annotated[
    str | None, typer.Option("--format", metavar="NAME", help="How the policy writes calls: `code_tags`, `hermes`, ...")
]
Options = Annotated[
    list[str] | None,
    typer.Option("--environment-option", metavar="KEY=VALUE", help="An option of the environment; may be repeated."),
]
MaxTurns = Annotated[int | None, typer.Option("--max-turns", min=1, help="Maximum number of turns of a sample.")]


@dataclass(kw_only=True, slots=True, frozen=True)
class EnvironmentFlags:
    """The command line's values; None where it has none."""

    name: str | None = None
    format: str | None = None
    options: Sequence[str] = ()
    """Each as KEY=VALUE."""
    max_turns: int | None = None

    def put(self, source: RecipeSource) -> None:
        """Put them into `rollout.environment` of a recipe's data.

        Raises:
            ValueError: an option of no environment, or one that is not of the form KEY=VALUE.
        """
        if self.name is not None:
            source.put(KEY, None if self.name == NONE else {"name": self.name}, "--environment")
        given = {"--format": self.format, "--environment-option": self.options, "--max-turns": self.max_turns}
        if not (source.data.get("rollout") or {}).get("environment"):
            for flag, value in given.items():
                if value:
                    raise ValueError(f"{flag}: there is no environment; name one with --environment")
        for key, value in (("format", self.format), ("max_turns", self.max_turns)):
            if value is not None:
                source.put((*KEY, key), value, f"--{key.replace('_', '-')}")
        source.override([f"{'.'.join(KEY)}.options.{option}" for option in self.options])


def read_environment(
    recipe: Path | None, flags: EnvironmentFlags, *, import_from_here: bool = False
) -> EnvironmentSection | None:
    """The environment of a run's recipe, if there is one, with what the flags say; None: a single turn.

    Raises:
        ValueError: the recipe cannot be read, or a value is wrong.
    """
    is_given = recipe is None or flags.name is not None
    source = RecipeSource(Path("--environment")) if is_given or recipe is None else read_source(recipe)
    flags.put(source)
    data = (source.data.get("rollout") or {}).get("environment")
    if not data:
        return None
    try:
        section = validate_section(EnvironmentSection, data, ".".join(KEY))
    except RecipeError as error:
        raise source.located(error) from error
    if not (is_given or import_from_here):
        import_foreign({"rollout.environment.name": section.name, "rollout.environment.format": section.format}, source)
    return section
