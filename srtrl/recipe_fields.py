"""The documentation of a recipe's fields, as text: the docstrings of the schema, with types and defaults."""

import json
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from srtrl.recipe_base import Section
from srtrl.recipe_errors import section_in

NAMES = {str: "text", int: "integer", float: "number", bool: "true | false", type(None): "null", Any: "anything"}


def describe_fields(section: type[Section], prefix: str = "") -> str:
    """Every field of a section and of those inside it: dotted key, type, default and meaning."""
    return "\n".join(_lines(section, prefix))


def _lines(section: type[Section], prefix: str) -> Iterator[str]:
    for name, info in section.model_fields.items():
        key = f"{prefix}{name}"
        inner = section_in(info.annotation)
        meaning = " ".join((info.description or "").split())
        if inner is None:
            yield f"{key}: {_type_name(info.annotation)}{_default(info)}"
            yield f"    {meaning}"
        else:
            is_list = get_origin(info.annotation) is list
            yield f"\n{key}{' (a list)' if is_list else ''}: {meaning}"
            yield from _lines(inner, f"{key}.N." if is_list else f"{key}.")


def _type_name(annotation: Any) -> str:
    """The type as a writer of YAML thinks of it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(argument) for argument in arguments)
    if origin in (list, tuple):
        return f"[{', '.join(_type_name(argument) for argument in arguments)}{', ...' if origin is list else ''}]"
    if origin is dict:
        return "section"
    return NAMES.get(annotation, str(annotation))


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return " (required)"
    value = info.get_default(call_default_factory=True, validated_data={})
    return "" if value is PydanticUndefined else f" = {json.dumps(value, ensure_ascii=False)}"
