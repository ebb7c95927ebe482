"""The fields of a recipe: what keys there are, for error messages, and their documentation as text."""

import json
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from srtrl.recipe.schema import Section

NAMES = {str: "text", int: "integer", float: "number", bool: "true | false", type(None): "null", Any: "anything"}


def fields_of(section: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Every field of a section and of those inside it, by dotted key; an item of a list has the key `N`."""
    fields = {}
    for name, info in section.model_fields.items():
        fields[f"{prefix}{name}"] = info
        if inner := section_in(info.annotation):
            item = "N." if get_origin(info.annotation) is list else ""
            fields |= fields_of(inner, f"{prefix}{name}.{item}")
    return fields


def section_in(annotation: Any) -> type[Section] | None:
    """The section class that an annotation is or holds: `X`, `X | None`, `list[X]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((inner for item in get_args(annotation) if (inner := section_in(item))), None)


def describe_fields(section: type[Section], prefix: str = "", within: str = "") -> str:
    """Every field of a section and of those inside it: dotted key, type, default and meaning.

    `within`: a key, or that of a section, whose fields alone are described.
    """
    return "\n".join(_lines(section, prefix, within)).lstrip("\n")


def _lines(section: type[Section], prefix: str, within: str) -> Iterator[str]:
    for key, info in fields_of(section, prefix).items():
        if within and not f"{key}.".startswith(f"{within}."):
            continue
        meaning = " ".join((info.description or "").split())
        if section_in(info.annotation):
            yield f"\n{key}{' (a list)' if get_origin(info.annotation) is list else ''}: {meaning}"
        else:
            yield f"{key}: {_type_name(info.annotation)}{_default(info)}\n    {meaning}"


def _type_name(annotation: Any) -> str:
    """The type as a writer of YAML thinks of it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    names = [_type_name(argument) for argument in arguments]
    if origin in (typing.Union, types.UnionType):
        return " | ".join(names)
    if origin in (list, tuple):
        return f"[{', '.join(names)}{', ...' if origin is list else ''}]"
    return "section" if origin is dict else NAMES.get(annotation, str(annotation))


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return " (required)"
    return f" = {json.dumps(info.get_default(call_default_factory=True, validated_data={}), ensure_ascii=False)}"
