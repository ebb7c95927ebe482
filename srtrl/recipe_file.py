"""Recipe files: YAML with line numbers, `section.key=value` overrides, and errors that name the place.

The file is composed into YAML nodes first, so that every value keeps the line it came from; pydantic then checks the
plain data, and each of its complaints is worded anew (`recipe_errors.py`) and given that line.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from srtrl.recipe import Recipe
from srtrl.recipe_errors import Key, Problem, RecipeError, describe, dotted, validate_section


@dataclass(slots=True)
class RecipeSource:
    """A recipe's plain data, before any check, and where each value came from."""

    path: Path
    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)
    """Key -> `file:line`, or the override's text."""

    def locate(self, key: Key) -> str:
        """Where a value stands, or else the nearest section around it that the file has."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.origins:
                return self.origins[key[:length]]
        return str(self.path)

    def located(self, problem: Problem) -> Problem:
        """The same problem with its place filled in."""
        return problem if problem.where else replace(problem, where=self.locate(problem.key))

    def put(self, names: Sequence[str], value: object, where: str, origins: Mapping[Key, str] | None = None) -> None:
        """Set the value at `names`, making the sections around it as needed; a list is entered by index.

        Args:
            names: ("rewards", "0", "weight").
            value: Plain data.
            where: What errors shall call this value.
            origins: Names for the values inside `value`; by default `where` for all.

        Raises:
            RecipeError: there is no such place.
        """
        target: Any = self.data
        key: Key = ()
        for depth, name in enumerate(names):
            step = _step_into(target, name, key, where)
            key = (*key, step)
            if depth == len(names) - 1:
                target[step] = value
            else:
                if isinstance(target, dict) and target.get(step) is None:
                    target[step] = {}
                    self.origins[key] = where
                target = target[step]
        self.origins = {old: origin for old, origin in self.origins.items() if old[: len(key)] != key}
        self.origins[key] = where
        self.origins |= {(*key, *inner): origin for inner, origin in (origins or {}).items()}

    def override(self, overrides: Sequence[str]) -> None:
        """Apply `section.key=value` overrides in order; values are YAML.

        Raises:
            RecipeError: listing the overrides that are not of that form or have no place.
        """
        problems: list[Problem] = []
        for override in overrides:
            try:
                _apply_override(self, override)
            except RecipeError as error:
                problems.extend(error.problems)
        if problems:
            raise RecipeError(problems)


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
    source = RecipeSource(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError([Problem((), f"cannot read the recipe: {error.strerror}", str(path))]) from error
    except UnicodeDecodeError as error:
        raise RecipeError([Problem((), f"cannot read the recipe: not UTF-8 ({error})", str(path))]) from error
    data = _parse_yaml(text, str(path), source.origins)
    if not isinstance(data, dict):
        raise RecipeError([Problem((), f"expected a mapping of sections, found {describe(data)}", str(path))])
    source.data = data
    source.override(overrides)
    return source


def build_recipe(source: RecipeSource) -> Recipe:
    """Check the data of `source` against the schema; `RecipeError` lists what is wrong."""
    try:
        return validate_section(Recipe, source.data)
    except RecipeError as error:
        raise RecipeError([source.located(problem) for problem in error.problems]) from error


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, defaults written out; `load_recipe` reads the same recipe from it."""
    return yaml.dump(recipe.model_dump(), Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=120)


# --- YAML -------------------------------------------------------------------------------------------------------------


class _RecipeLoader(yaml.SafeLoader):
    """YAML 1.2 scalars: `1e-6` is a number and `no` is a text (PyYAML's own YAML 1.1 has both the other way)."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML's interface)


_INTEGER = re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]
)
_RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:int", _INTEGER, list("-+0123456789"))
_RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])


class _RecipeDumper(yaml.SafeDumper):
    """Quotes what either YAML version would read as something else; short lists on one line."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        plain = all(not isinstance(item, (dict, list, tuple)) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=plain)

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Escape Unicode's line breaks, which would be read as a plain newline; write long texts as a block."""
        style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_RecipeDumper.add_representer(str, _RecipeDumper.represent_text)
_RecipeDumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _parse_yaml(text: str, where: str, origins: dict[Key, str], *, lines: bool = True) -> Any:
    """Read one YAML document, adding the origin of each value to `origins`: `where:line`, or `where` of an override."""
    problems: list[Problem] = []

    def origin(node: yaml.Node) -> str:
        return f"{where}:{node.start_mark.line + 1}" if lines else where

    def construct(node: yaml.Node, key: Key, parents: tuple[yaml.Node, ...]) -> Any:
        origins.setdefault(key, origin(node))
        if node in parents:
            problems.append(Problem(key, "an alias (*name) inside the value that it names", origin(node)))
            return None
        if isinstance(node, yaml.SequenceNode):
            return [construct(item, (*key, index), (*parents, node)) for index, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node)
        problems.extend(_duplicate_keys(node, key, origin))
        loader.flatten_mapping(node)  # `<<: *name` becomes plain entries, before the section's own
        section = {}
        for name_node, value_node in node.value:
            name = name_node.value
            origins[(*key, name)] = origin(name_node)
            section[name] = construct(value_node, (*key, name), (*parents, node))
        return section

    loader = _RecipeLoader(text)
    try:
        node = loader.get_single_node()
        value = None if node is None else construct(node, (), ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark and lines else where
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise RecipeError([Problem((), f"not valid YAML: {reason}", place)]) from error
    except yaml.YAMLError as error:
        raise RecipeError([Problem((), f"not valid YAML: {error}", where)]) from error
    finally:
        loader.dispose()
    if problems:
        raise RecipeError(problems)
    return value


def _duplicate_keys(node: yaml.MappingNode, key: Key, origin: Callable[[yaml.Node], str]) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for name_node, _ in node.value:
        name = name_node.value if isinstance(name_node, yaml.ScalarNode) else None
        if name is None or name_node.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
            yield Problem(key, f"a key must be a text, found {name or name_node.tag}", origin(name_node))
        elif name in first:
            yield Problem((*key, name), f"is given twice, first at {first[name]}", origin(name_node))
        else:
            first[name] = origin(name_node)


# --- Overrides --------------------------------------------------------------------------------------------------------


def _apply_override(source: RecipeSource, override: str) -> None:
    """Put the value of `section.key=value` into the data; `RecipeError` where that has no place."""
    where = f"override `{override}`"
    name, equals, text = override.partition("=")
    names = name.strip().split(".")
    if not equals or not all(names):
        raise RecipeError([Problem((), "expected section.key=value", where)])
    if not text.strip():
        hint = f"no value; write {name}=null for none or {name}=\"''\" for an empty text"
        raise RecipeError([Problem((), hint, where)])
    origins: dict[Key, str] = {}
    value = _parse_yaml(text, where, origins, lines=False)
    source.put(names, value, where, origins)


def _step_into(target: object, part: str, key: Key, where: str) -> str | int:
    """The dictionary key or list index that `part` means inside `target`, which stands at `key`."""
    if isinstance(target, list):
        if part.isdecimal() and int(part) < len(target):
            return int(part)
        message = f"{dotted(key)} is a list of {len(target)} items; expected an index below that, found `{part}`"
    elif not isinstance(target, dict):
        message = f"{dotted(key)} is {describe(target)}, not a section"
    elif part.isdecimal():
        message = f"the recipe file has no list `{dotted(key)}`; give it whole: {dotted(key)}=[...]"
    else:
        return part
    raise RecipeError([Problem((), message, where)])
