"""Options of `srtrl generate` and `srtrl eval`: which environment answers the policy between two turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from srtrl.recipe.file import RecipeSource

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


@dataclass(kw_only=True, slots=True, frozen=True)
class EnvironmentFlags:
    """What the user has chosen; None where nothing."""

    name: str | Mapping[str, Any] | None = None
    """Or, from Python, all fields of `rollout.environment`."""
    format: str | None = None
    options: Sequence[str] = ()
    """Each as KEY=VALUE."""

    def put(self, source: RecipeSource) -> None:
        """Put them into `rollout.environment` of a recipe's data.

        Raises:
            ValueError: an option of no environment, or one that is not of the form KEY=VALUE.
        """
        if self.name is not None:
            given = {"name": self.name} if isinstance(self.name, str) else dict(self.name)
            source.put(KEY, None if self.name == NONE else given, "--environment")
        if not (source.data.get("rollout") or {}).get("environment"):
            for flag, value in (("--format", self.format), ("--environment-option", self.options)):
                if value:
                    raise ValueError(f"{flag}: there is no environment; name one with --environment")
        if self.format is not None:
            source.put((*KEY, "format"), self.format, "--format")
        source.override([f"{'.'.join(KEY)}.options.{option}" for option in self.options])
