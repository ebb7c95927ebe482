"""Recipe files: YAML with line numbers, `section.key=value` overrides, and errors that name the place.

Each value of the file is known by its dotted key (`rewards.0.weight`), and so is the line that it came from. pydantic
checks the plain data; each of its errors becomes a sentence with that line, what was expected and what was found.
"""

import copy
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from yaml.composer import ComposerError

from srtrl.recipe import Recipe, Section
from srtrl.recipe_conflicts import RecipeConflictsError
from srtrl.recipe_fields import fields_of
from srtrl.resolve import suggestion

SectionT = TypeVar("SectionT", bound=Section)

REMOVED = {
    "rollout.attention": "was removed (CUDA has one attention kernel): delete the key",
    "rollout.admission": "was removed (admission is always breadth-first): delete the key",
    "rollout.long_first": "was removed (samples expected to be long are always admitted early): delete the key",
    "rollout.run_ahead_coupled": "was removed (run-aheads always use the RNG keys of their samples): delete the key",
}
"""Keys of earlier versions -> what to do about them."""

EXPECTED = {
    "string_type": "should be a text (quote it if it looks like a number)",
    "dict_type": "should be a section (key: value)",
    "model_type": "should be a section (key: value)",
}
"""Types of pydantic errors whose own message is in terms of Python -> what was expected."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a recipe."""

    key: str
    """Dotted key of the value concerned; empty for the whole recipe."""
    message: str
    where: str | None = None
    """`file:line` or the override's text, once known."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


class RecipeError(ValueError):
    """What is wrong with a recipe, all of it."""

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        lines = [str(problem) for problem in problems]
        heading = [f"{len(lines)} problems in the recipe:"] if len(lines) > 1 else []
        super().__init__("\n  ".join([*heading, *lines]))


@dataclass(slots=True)
class RecipeSource:
    """A recipe's plain data, before any check, and where each value came from."""

    path: Path
    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted key -> `file:line`, or the override's text."""

    def locate(self, key: str) -> str:
        """Where a value stands, or else the nearest section around it that the file has."""
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return self.origins.get(key, str(self.path))

    def located(self, error: RecipeError) -> RecipeError:
        """The same problems with their places filled in."""
        return RecipeError(*(replace(one, where=one.where or self.locate(one.key)) for one in error.problems))

    def put(self, names: Sequence[str], value: object, where: str) -> None:
        """Set the value at `names`, making the sections around it as needed; a list is entered by index.

        Args:
            names: ("rewards", "0", "weight").
            value: Plain data.
            where: How errors name the origin of this value.

        Raises:
            RecipeError: there is no such place.
        """
        target: Any = self.data
        for depth, name in enumerate(names):
            key = ".".join(names[:depth])
            step: str | int = int(name) if isinstance(target, list) and name.isdecimal() else name
            has_place = step < len(target) if isinstance(step, int) else isinstance(target, dict)
            if not has_place:
                raise RecipeError(Problem(key, f"is {_show(target)}, which has no item `{name}`", where))
            if depth == len(names) - 1:
                target[step] = value
            elif isinstance(target, dict) and target.get(step) is None:
                target[step] = {}
                self.origins[".".join(names[: depth + 1])] = where
            target = target[step]
        key = ".".join(names)
        self.origins = {old: origin for old, origin in self.origins.items() if not f"{old}.".startswith(f"{key}.")}
        self.origins[key] = where

    def override(self, overrides: Sequence[str]) -> None:
        """Apply `section.key=value` overrides in order; values are YAML.

        Raises:
            RecipeError: an override is not of that form or has no place.
        """
        for override in overrides:
            where = f"override `{override}`"
            name, equals, text = override.partition("=")
            names = name.strip().split(".")
            if not equals or not all(names):
                raise RecipeError(Problem("", "expected section.key=value", where))
            if not text.strip():
                hint = f"no value; write {name}=null for none or {name}=\"''\" for an empty text"
                raise RecipeError(Problem("", hint, where))
            self.put(names, _read_yaml(text, where)[0], where)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: The YAML file.
        overrides: `section.key=value`, applied in order; values are YAML, list items are named by index.

    Raises:
        RecipeError: the file cannot be read, or is no valid recipe; all problems are listed, each with `file:line` or
            the text of the override it comes from.
    """
    return build_recipe(read_source(path, overrides))


def read_source(path: Path, overrides: Sequence[str] = ()) -> RecipeSource:
    """Read the plain data of a recipe file and apply overrides; nothing is checked against the schema yet."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 ({error})"
        raise RecipeError(Problem("", f"cannot read the recipe: {reason}", str(path))) from error
    data, lines = _read_yaml(text, str(path), is_file=True)
    if not isinstance(data, dict):
        raise RecipeError(Problem("", f"expected a mapping of sections, found {_show(data)}", str(path)))
    source = RecipeSource(path, data, {key: f"{path}:{line}" for key, line in lines.items()})
    source.override(overrides)
    return source


def build_recipe(source: RecipeSource) -> Recipe:
    """Check the data of `source` against the schema; `RecipeError` lists what is wrong."""
    try:
        return validate_section(Recipe, source.data)
    except RecipeError as error:
        raise source.located(error) from error


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, defaults written out; `load_recipe` reads the same recipe from it."""
    return yaml.dump(recipe.model_dump(), Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=120)


# --- Errors -----------------------------------------------------------------------------------------------------------


def validate_section(section: type[SectionT], data: dict[str, Any], prefix: str = "") -> SectionT:
    """Check plain data against one section (a task's `Options`, say).

    Args:
        section: The schema.
        data: What the recipe has for it.
        prefix: Dotted key of the section in the recipe.

    Raises:
        RecipeError: listing every problem by its dotted key; `RecipeSource.located` adds the lines.
    """
    try:
        return section.model_validate(data)
    except ValidationError as error:
        problems = _problems_of(section, data, error)
        raise RecipeError(*(replace(one, key=".".join(filter(None, (prefix, one.key)))) for one in problems)) from error


def _problems_of(section: type[Section], data: object, error: ValidationError) -> Iterator[Problem]:
    """Each of pydantic's errors in words; those of the alternatives of `A | B` are one problem."""
    fields = fields_of(section)
    mismatches: dict[str, list[str]] = {}
    found: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        key, cause = ".".join(map(str, detail["loc"])), detail.get("ctx", {}).get("error")
        field_key = re.sub(r"\.\d+(?=\.|$)", ".N", key)
        if isinstance(cause, RecipeConflictsError):
            yield from (Problem(*conflict) for conflict in cause.conflicts)
        elif cause is not None:
            yield Problem(key, str(cause))
        elif detail["type"] == "extra_forbidden":
            yield Problem(key, REMOVED.get(key) or _unknown_key(field_key, fields))
        elif detail["type"] == "missing":
            meaning = fields[field_key].description if field_key in fields else None
            yield Problem(key, f"is missing ({meaning.splitlines()[0]})" if meaning else "is missing")
        else:
            key = _key_in(data, detail["loc"])
            expected = EXPECTED.get(detail["type"]) or re.sub(r"^\w+ (?=should )", "", detail["msg"])
            mismatches.setdefault(key, []).append(expected)
            found[key] = _show(detail["input"])
    for key, alternatives in mismatches.items():
        yield Problem(key, f"{' or '.join(alternatives)}, found {found[key]}")


def _key_in(data: Any, location: Sequence[Any]) -> str:
    """The dotted key of a value in `data`; pydantic's location may end in the name of an alternative of `A | B`."""
    parts = []
    for part in location:
        if not isinstance(data, dict | list):
            break
        parts.append(str(part))
        data = data[part]
    return ".".join(parts)


def _unknown_key(key: str, fields: Iterable[str]) -> str:
    """Name the nearest key of the same section, or the section that does have this key."""
    section, _, name = key.rpartition(".")
    known = [inner for outer, _, inner in (field_key.rpartition(".") for field_key in fields) if outer == section]
    elsewhere = [field_key for field_key in fields if field_key.rpartition(".")[2] == name]
    if near := suggestion(name, known):
        return f"unknown key{near}"
    if elsewhere:
        return f"unknown key, did you mean `{elsewhere[0]}`?"
    return f"unknown key; known here: {', '.join(known) or 'none'}"


def _show(value: object) -> str:
    """A value as an error message shows it: as JSON, where a text has quotes, and not too long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


# --- YAML -------------------------------------------------------------------------------------------------------------

SCALARS = {
    "bool": r"true|True|TRUE|false|False|FALSE",
    "null": r"~|null|Null|NULL|",
    "int": r"[-+]?(?:0|[1-9][0-9]*)",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "merge": r"<<",
}
"""Scalars of YAML 1.2: `1e-6` is a number and `no` is a text (PyYAML's own YAML 1.1 has both the other way)."""


class _RecipeLoader(yaml.SafeLoader):
    """Keys are texts, each given once; aliases (`*name`) and merges (`<<: *name`) become copies of what they name."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML's interface)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if is_alias and node is not None and node.end_mark is None:  # it is not complete yet
            problem = "an alias (*name) inside the value that it names"
            raise ComposerError(None, None, problem, node.start_mark)
        return copy.deepcopy(node) if is_alias else node

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise ComposerError(None, None, f"a key must be a text, found {key.value}", key.start_mark)
            if key.value in lines:
                problem = f"`{key.value}` is given twice, first in line {lines[key.value]}"
                raise ComposerError(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        self.flatten_mapping(node)
        node.value = list({key.value: (key, value) for key, value in node.value}.values())
        return node


class _RecipeDumper(yaml.SafeDumper):
    """Quotes what either YAML version would read as something else; short lists on one line."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        plain = all(not isinstance(item, (dict, list, tuple)) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=plain)

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Line breaks are escaped: Unicode's own would be read as a plain newline."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_RecipeDumper.add_representer(str, _RecipeDumper.represent_text)
for _name, _pattern in SCALARS.items():
    _RecipeLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), None)
    _RecipeDumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), None)


def _read_yaml(text: str, where: str, *, is_file: bool = False) -> tuple[Any, dict[str, int]]:
    """Read one YAML document: its value, and the line of every value inside it by dotted key.

    Raises:
        RecipeError: it is not valid YAML; of a file, with line and column.
    """
    loader = _RecipeLoader(text)
    try:
        node = loader.get_single_node()
        return loader.construct_document(node) if node else None, dict(_lines(node))
    except yaml.YAMLError as error:
        reason, mark = str(error), None
        if isinstance(error, yaml.MarkedYAMLError):
            mark = error.problem_mark or error.context_mark
            reason = ", ".join(part for part in (error.context, error.problem) if part)
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark and is_file else where
        raise RecipeError(Problem("", f"not valid YAML: {reason}", place)) from error


def _lines(node: yaml.Node | None, key: str = "") -> Iterator[tuple[str, int]]:
    children: list[tuple[object, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(name.value, name, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, value, value) for index, value in enumerate(node.value)]
    for name, start, value in children:
        inner = f"{key}.{name}" if key else str(name)
        yield inner, start.start_mark.line + 1
        yield from _lines(value, inner)
