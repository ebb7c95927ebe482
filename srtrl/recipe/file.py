"""Recipe files: YAML with line numbers, `section.key=value` overrides, and errors that name the place.

Each value of the file is known by its dotted key (`rewards.0.weight`), and so is the line that it came from. pydantic
checks the plain data; each of its errors becomes a sentence with that line, the expectation and the value.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter

from srtrl.recipe.conflicts import find_conflicts
from srtrl.recipe.fields import fields_of
from srtrl.recipe.schema import Recipe, Section
from srtrl.resolve import cut, first_lines, regular_file, suggestion

SectionT = TypeVar("SectionT", bound=Section)
Overrides = Mapping[str, Any] | Sequence[str]

BUNDLED = Path(__file__).with_name("bundled")
"""The recipes that are named without a path: a link to the repository's folder `recipes`, whose files a wheel has."""
FOREIGN_NAMES = Path(__file__).with_name("foreign_names.yaml")
"""Name of an option in TRL, verl or OpenRLHF -> the key that does the same here, or a sentence."""
MIN_LIKENESS = 0.75
"""Least likeness of an unknown key and the known one that a message suggests."""
MEANT = r"did you mean `([\w.]+)`"
"""The suggestion in a message about an unknown key; no second line says that the suggested key is missing."""
MAX_PROBLEMS = 20
"""That a message lists."""
OTHER_MODELS = ("critic.", "eval.", "rollout.draft_head.", "warm_start.")
"""Sections whose keys are suggested last: the same name is the policy's in another section."""
ABSENT = {
    "algorithm.importance_cap": "is now algorithm.importance: {mode: token_truncate, max: (the cap), min: 0}",
    "critic.lora": "a critic always learns all its weights; model.lora is the policy's",
    "model.lora.targets": "is no option any more: LoRA learns all matrices of a layer; remove it",
    "rollout.draft_head.hidden": "is no option any more: the width is 8/3 of the policy's; remove it",
}
"""Keys that are not there on purpose, or were once."""
HINTS = {
    "rollout.temperature": "; greedy samples are those of evaluations, eval.temperature=0",
    "model": "; the name or the folder is model.path",
    "rewards": '; write [{name: "my_rewards:brief"}]',
}
"""Further words where a value has another type, or is out of its range."""

EXPECTED = {
    "invalid_key": "should be a text (quote it if it looks like a number)",
    "string_type": "should be a text (quote it if it looks like a number)",
    "dict_type": "should be a section (key: value)",
    "model_type": "should be a section (key: value)",
    "list_type": "should be a list",
    "int_parsing": "should be a whole number",
    "float_parsing": "should be a number",
}
"""Types of pydantic errors with messages in terms of Python -> the expectation."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake in a recipe."""

    key: str
    """Dotted key of the value concerned; empty for the whole recipe."""
    message: str
    where: str | None = None
    """`file:line` or the override's text, once known."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


class RecipeError(ValueError):
    """All mistakes in a recipe."""

    subject = "recipe"

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        heading = [f"{len(problems)} problems in the {self.subject}:"] if len(problems) > 1 else []
        super().__init__("\n  ".join([*heading, *first_lines(list(map(str, problems)), MAX_PROBLEMS)]))


@dataclass(slots=True)
class RecipeSource:
    """A recipe's plain data, before any check, and where each value came from."""

    path: Path
    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted key -> `file:line`, or the override's text."""

    def locate(self, key: str) -> str:
        """The place of a value, or of the nearest section around it that the file has."""
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return self.origins.get(key, str(self.path))

    def located(self, error: RecipeError) -> RecipeError:
        """The same problems with their places filled in, and the keys of several tasks as in the file."""
        is_list = isinstance(self.data.get("task"), list)
        keys = [re.sub(r"^task\.options\.tasks", "task", item.key) if is_list else item.key for item in error.problems]
        items = zip(error.problems, keys, strict=True)
        return RecipeError(*(replace(item, key=key, where=item.where or self.locate(key)) for item, key in items))

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

    def override(self, overrides: Overrides) -> None:
        """Apply overrides in order: of a list, `section.key=value`, where values are YAML; of a mapping, plain values.

        Raises:
            RecipeError: an override is not of that form or has no place.
        """
        if isinstance(overrides, Mapping):
            for key, value in overrides.items():
                self.put(str(key).split("."), value, f"override `{key}`")
            return
        for override in overrides:
            where = f"override `{override}`"
            if not isinstance(override, str):
                raise RecipeError(Problem("", "expected a text, section.key=value", where))
            name, equals, text = override.partition("=")
            names = name.strip().split(".")
            if not equals or not all(names):
                raise RecipeError(Problem("", "expected section.key=value", where))
            if not text.strip():
                hint = f"no value; write {name}=null for none or {name}=\"''\" for an empty text"
                raise RecipeError(Problem("", hint, where))
            self.put(names, read_yaml(text, where)[0], where)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: The YAML file, or the name of a recipe that comes with srtrl (`quickstart`).
        overrides: `section.key=value`, applied in order; values are YAML, list items are named by index.

    Raises:
        RecipeError: the file cannot be read, or is no valid recipe; all problems are listed, each with `file:line` or
            the text of the override it comes from.
    """
    return build_recipe(read_source(path, overrides))


def is_recipe(path: Path) -> bool:
    """Whether there is something at this path, or a recipe of this name comes with srtrl."""
    return path.exists() or (BUNDLED / f"{path}.yaml").is_file()


def read_source(path: Path, overrides: Sequence[str] = ()) -> RecipeSource:
    """Read the plain data of a recipe and apply overrides, see `load_recipe`; nothing is checked by the schema yet."""
    bundled = {file.stem: file for file in sorted(BUNDLED.glob("*.yaml"))}
    try:
        path = path if path.is_file() else bundled.get(str(path), path)
        text = regular_file(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = str(error.strerror) if isinstance(error, OSError) else f"not UTF-8 ({error})"
        if runs := [run for run in (path, "runs" / path) if (run / "recipe.yaml").is_file()]:
            reason = f"it is the folder of a run; --resume continues it, and its recipe is {runs[0] / 'recipe.yaml'}"
        elif isinstance(error, FileNotFoundError):
            here = [*Path().glob("*.yaml"), *(file.parent for file in Path().glob("runs/*/recipe.yaml"))]
            reason += suggestion(path.stem, bundled) or suggestion(path.name, [recipe.name for recipe in here])
            reason += "" if len(path.parts) > 1 else f"; recipes that come with srtrl: {', '.join(bundled)}"
        raise RecipeError(Problem("", f"cannot read the recipe: {reason}", str(path))) from None
    data, lines = read_yaml(text, str(path), is_file=True)
    if not isinstance(data, dict):
        raise RecipeError(Problem("", f"expected a mapping of sections, found {_show(data)}", str(path)))
    source = RecipeSource(path, data, {key: f"{path}:{line}" for key, line in lines.items()})
    source.override(overrides)
    return source


def build_recipe(source: RecipeSource) -> Recipe:
    """Check the data of `source` against the schema, then the combinations of its values.

    Raises:
        RecipeError: listing every problem with its place.
    """
    try:
        recipe = validate_section(Recipe, source.data)
        if conflicts := [Problem(*conflict) for conflict in find_conflicts(recipe)]:
            raise RecipeError(*conflicts)
    except RecipeError as error:
        raise source.located(error) from None
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, defaults written out; `load_recipe` reads the same recipe from it."""
    return dump_yaml(recipe.model_dump())


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
        problems = list(_problems_of(section, data, error))
        hints = [(item.key.rpartition(".")[0], re.findall(MEANT, item.message)) for item in problems]
        meant = {key for outer, names in hints for name in names for key in (name, f"{outer}.{name}")}
        problems = [item for item in problems if not (item.key in meant and item.message.startswith("is missing"))]
        located = [replace(problem, key=f"{prefix}.{problem.key}".strip(".")) for problem in problems]
        raise RecipeError(*located) from None


def _problems_of(section: type[Section], data: object, error: ValidationError) -> Iterator[Problem]:
    """Each of pydantic's errors in words; those of the alternatives of `A | B` are one problem."""
    fields = fields_of(section)
    mismatches: dict[str, list[str]] = {}
    shown: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        key, cause = ".".join(map(str, detail["loc"])), detail.get("ctx", {}).get("error")
        field_key = re.sub(r"\.\d+(?=\.|$)", ".N", key)
        if cause is not None:
            yield Problem(key, str(cause))
        elif detail["type"] == "extra_forbidden":
            yield Problem(key, unknown_key(field_key, fields))
        elif detail["type"] == "missing":
            meaning = fields[field_key].description if field_key in fields else None
            yield Problem(key, f"is missing ({meaning.splitlines()[0]})" if meaning else "is missing")
        else:
            key = _key_in(data, detail["loc"])
            mismatches.setdefault(key, []).append(expectation(detail))
            shown[key] = _show(detail["input"])
    for key, alternatives in mismatches.items():
        yield Problem(key, f"{' or '.join(dict.fromkeys(alternatives))}, found {shown[key]}{HINTS.get(key, '')}")


def expectation(detail: ErrorDetails) -> str:
    """What pydantic (or typer, of a choice) expects of a value: the words of `EXPECTED`, or its own from "should"."""
    own = re.sub(r"^Value error, .* is not (?=one of )", "should be ", detail["msg"]).rstrip(".")
    return EXPECTED.get(detail["type"]) or re.sub(r"^\w+ (?=should )", "", own)


def _key_in(data: Any, location: Sequence[Any]) -> str:
    """The dotted key of a value in `data`; pydantic's location may end in the name of an alternative of `A | B`."""
    parts = []
    for part in location:
        if part not in (data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()):
            break
        parts.append(str(part))
        data = data[part]
    return ".".join(parts)


@cache
def _foreign_names() -> dict[str, str]:
    """Name of an option in another trainer -> the key that does the same here, or a sentence."""
    names: dict[str, str] = read_yaml(FOREIGN_NAMES.read_text(encoding="utf-8"), str(FOREIGN_NAMES))[0]
    return names


def keys_named(name: str) -> list[str]:
    """Up to two keys of a recipe that end in this name, or do the same as another trainer's option of this name."""
    meant = _foreign_names().get(name, "")
    named = [key for key in fields_of(Recipe) if key.rpartition(".")[2] == name or key == meant]
    return sorted(named, key=lambda key: key.startswith(OTHER_MODELS))[:2]


def unknown_key(key: str, fields: Mapping[str, FieldInfo]) -> str:
    """Name the key that replaces another trainer's, the nearest key of the section, or the section with this key."""
    if key in ABSENT:
        return ABSENT[key]
    section, _, name = key.rpartition(".")
    meant = _foreign_names().get(name, "")
    if meant in fields:
        return f"unknown key, did you mean `{meant}`: {(fields[meant].description or '').splitlines()[0]}"
    if meant:
        return f"unknown key, of another trainer: {meant}"
    known = [inner for outer, _, inner in (field_key.rpartition(".") for field_key in fields) if outer == section]
    home = key.partition(".")[0] if f"{section}.options" in fields else ""  # else it is meant for these options
    elsewhere = [other for other in fields if other.rpartition(".")[2] == name and other.startswith(home)]
    if elsewhere:
        return f"unknown key, did you mean `{min(elsewhere, key=lambda other: other.startswith(OTHER_MODELS))}`?"
    if near := suggestion(name, known, cutoff=MIN_LIKENESS):
        return f"unknown key{near}"
    return f"unknown key; known here: {', '.join(known) or 'none'}"


def _show(value: object) -> str:
    """A value as an error message shows it: as JSON, where a text has quotes, and not too long."""
    return cut(json.dumps(value, ensure_ascii=False, default=str), 80)


# --- YAML -------------------------------------------------------------------------------------------------------------


class _Representer(SafeRepresenter):
    """Keys in their order, short lists on one line.

    Texts with a line break of Unicode, which would be read as a newline, are quoted, and so are those that begin with
    `?` or `:`: in a list, ruamel reads `?0` as a key.
    """

    def represent_dict(self, data: Any) -> MappingNode:
        return self.represent_mapping("tag:yaml.org,2002:map", list(data.items()))

    def represent_sequence(self, tag: Any, sequence: Any, flow_style: bool | None = None) -> SequenceNode:
        is_flat = all(not isinstance(item, dict | list | tuple) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=is_flat)

    def represent_str(self, data: str) -> ScalarNode:
        is_plain = data.isprintable() and not data.startswith(("?", ":"))
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if is_plain else '"')


_Representer.add_representer(dict, _Representer.represent_dict)
_Representer.add_representer(str, _Representer.represent_str)


def dump_yaml(data: object) -> str:
    """Plain data as YAML 1.2."""
    writer, text = YAML(typ="safe", pure=True), StringIO()
    writer.Representer = _Representer
    writer.default_flow_style, writer.width = False, 120
    writer.dump(data, text)
    return text.getvalue()


def read_yaml(text: str, where: str, *, is_file: bool = False) -> tuple[Any, dict[str, int]]:
    """Read one document of YAML 1.2: its value, and the line of every value inside it by dotted key.

    Raises:
        RecipeError: it is not valid YAML; of a file, with line and column.
    """
    reader, place = YAML(typ="safe", pure=True), where
    try:
        node = reader.compose(text)
        lines = dict(_lines(node))
        return None if node is None else reader.constructor.construct_document(node), lines
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark and is_file else where
    except (YAMLError, ValueError, RecursionError) as error:  # of a character, a number or a date, of nested brackets
        reason = str(error).partition("\n")[0]
    raise RecipeError(Problem("", f"not valid YAML: {reason}", place))


def _lines(node: Node | None, key: str = "") -> Iterator[tuple[str, int]]:
    """Dotted key and line of every value inside a node."""
    children: list[tuple[object, Node, Node]] = []
    if isinstance(node, MappingNode):
        children = [(name.value, name, value) for name, value in node.value]
    elif isinstance(node, SequenceNode):
        children = [(index, value, value) for index, value in enumerate(node.value)]
    for name, start, value in children:
        if value.anchor is not None:
            problem = f"an anchor (&{value.anchor}) is not supported: write the value out"
            raise MarkedYAMLError(problem=problem, problem_mark=value.start_mark)
        inner = f"{key}.{name}" if key else str(name)
        yield inner, start.start_mark.line + 1
        yield from _lines(value, inner)
