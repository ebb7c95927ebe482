"""What is wrong with a recipe, in words: the dotted key, what was expected, what was found, the nearest known name."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError

from srtrl.recipe_base import RecipeConflictsError, Section
from srtrl.resolve import suggestion

Key = tuple[str | int, ...]
"""Where a value stands in a recipe: ("rewards", 0, "weight")."""

SectionT = TypeVar("SectionT", bound=Section)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a recipe."""

    key: Key
    """The value concerned; () for the whole recipe."""
    message: str
    where: str | None = None
    """`file:line` or the override's text, once known."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, dotted(self.key), self.message) if part)


class RecipeError(ValueError):
    """What is wrong with a recipe, all of it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in problems]
        super().__init__(
            lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems in the recipe:", *lines])
        )


def validate_section(section: type[SectionT], data: dict[str, Any], prefix: Key = ()) -> SectionT:
    """Check plain data against one section (a task's `Options`, say) that stands at `prefix` in the recipe.

    Raises:
        RecipeError: listing every problem by its dotted key; `RecipeSource.located` adds the lines.
    """
    try:
        return section.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = [problem for detail in details for problem in _problems_of(section, detail, prefix)]
        raise RecipeError(_merge_alternatives(section, problems, prefix)) from error


def dotted(key: Key) -> str:
    """("rewards", 0, "weight") -> "rewards.0.weight"."""
    return ".".join(str(part) for part in key)


def describe(value: object) -> str:
    """A value as an error message shows it: what kind it is and how it reads."""
    if value is None:
        return "nothing (null)"
    kinds: dict[type, str] = {bool: "the boolean", int: "the integer", float: "the number", str: "the text"}
    kinds |= {list: "the list", dict: "the section"}
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"{kinds.get(type(value), 'the value')} {text if len(text) <= 80 else text[:77] + '...'}"


_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text (quote it if it looks like a number)",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a section (key: value)",
    "model_type": "a section (key: value)",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "string_too_short": "a text of at least {min_length} characters",
    "too_short": "at least {min_length} items",
    "too_long": "at most {max_length} items",
}
"""Type of a pydantic error -> what was expected; the fields in braces are from the error's context."""


REMOVED = {
    "rollout.attention": "decoding on CUDA has one attention kernel now: leave the key out",
    "rollout.admission": "admission is always breadth-first now: leave the key out",
    "rollout.long_first": "samples that are expected to be long are always admitted early now: leave the key out",
    "rollout.run_ahead_coupled": "run-aheads always use the noise of their samples now: leave the key out",
}
"""Keys of earlier versions -> what to do about them."""


def _problems_of(section: type[Section], detail: Any, prefix: Key) -> list[Problem]:
    """Word one of pydantic's errors."""
    location: Key = detail["loc"]
    key = (*prefix, *location)
    context = detail.get("ctx", {})
    kind = detail["type"]
    if kind == "extra_forbidden":
        return [Problem(key, REMOVED.get(dotted(key)) or _unknown_key(section, location))]
    if kind == "missing":
        return [Problem(key, f"is missing{_documentation(section, location)}")]
    if isinstance(context.get("error"), RecipeConflictsError):
        conflicts = context["error"].conflicts
        return [Problem((*key, *conflict.key), conflict.message) for conflict in conflicts]
    if kind == "value_error":
        return [Problem(key, str(context["error"]))]
    if kind not in _EXPECTED:
        return [Problem(key, f"{detail['msg']}, found {describe(detail['input'])}")]
    choices = re.findall(r"'([^']*)'", context.get("expected", ""))
    hint = suggestion(detail["input"], choices) if isinstance(detail["input"], str) else ""
    return [Problem(key, f"expected {_EXPECTED[kind].format(**context)}, found {describe(detail['input'])}{hint}")]


def _merge_alternatives(section: type[Section], problems: Sequence[Problem], prefix: Key) -> list[Problem]:
    """Make one problem of those that pydantic lists for each alternative of `A | B`, whose name it adds to the key."""
    merged: list[Problem] = []
    for problem in problems:
        key = problem.key[:-1]
        location = key[len(prefix) :]
        info = _section_at(section, location[:-1]).model_fields.get(str(location[-1])) if location else None
        if info is None or get_origin(info.annotation) not in (Union, UnionType) or section_in(info.annotation):
            merged.append(problem)
        elif merged and merged[-1].key == key:
            first, _, found = merged[-1].message.partition(", found ")
            second = problem.message.removeprefix("expected ").partition(", found ")[0]
            merged[-1] = Problem(key, f"{first} or {second}, found {found}")
        else:
            merged.append(Problem(key, problem.message))
    return merged


def _unknown_key(section: type[Section], location: Key) -> str:
    """Name the nearest key of the same section, or the section that does have this key."""
    name = str(location[-1])
    known = list(_section_at(section, location[:-1]).model_fields)
    hint = suggestion(name, known)
    if not hint:
        elsewhere = [
            f"{top}.{name}"
            for top, info in section.model_fields.items()
            if (inner := section_in(info.annotation)) and name in inner.model_fields
        ]
        hint = f", did you mean `{elsewhere[0]}`?" if elsewhere else ""
    if not known:
        return "unknown key; there are no options here"
    return f"unknown key{hint or '; known here: ' + ', '.join(known)}"


def _documentation(section: type[Section], location: Key) -> str:
    """First line of a field's documentation, in brackets; nothing for an item of a list."""
    info = _section_at(section, location[:-1]).model_fields.get(str(location[-1]))
    return f" ({info.description.splitlines()[0]})" if info and info.description else ""


def _section_at(section: type[Section], location: Key) -> type[Section]:
    """The section class at a place; the deepest one known where the place is not of the schema."""
    for part in location:
        info = section.model_fields.get(str(part))
        inner = section_in(info.annotation) if info else None
        section = inner or section
    return section


def section_in(annotation: Any) -> type[Section] | None:
    """The section class that an annotation is or holds: `X`, `X | None`, `list[X]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((inner for item in get_args(annotation) if (inner := section_in(item))), None)
