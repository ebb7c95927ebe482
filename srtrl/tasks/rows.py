"""Rows of a data set, from JSON or Parquet files or from the hub, each with the place it came from."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from srtrl.recipe.schema import Section
from srtrl.resolve import regular_file, suggestion

PARQUET_BATCH_ROWS = 1024
ENDINGS = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
"""File name extensions of files of rows."""


class RowSource(Section):
    """The source of rows: `{files: [a.jsonl, b.parquet]}` or `{hub: openai/gsm8k, config: main, split: train}`."""

    files: list[str] = Field(default_factory=list)
    """Files, read in this order: `.jsonl` (one object per line), `.json` (the same, or an array of objects), both also
    with `.gz`, and `.parquet`."""
    hub: str | None = None
    """Name of a data set on the Hugging Face hub, or the folder of one."""
    config: str | None = None
    """Configuration of the hub data set."""
    split: str | None = None
    """Split of the hub data set, such as `train` or `train[:1000]`."""

    @model_validator(mode="after")
    def check_one_source(self) -> Self:
        """Files or hub, not both."""
        if bool(self.files) == (self.hub is not None):
            raise ValueError("give either `files` (a list) or `hub` (with its `split`)")
        if self.hub is None and (self.config is not None or self.split is not None):
            raise ValueError("`config` and `split` belong to `hub`, not to `files`")
        if self.hub is not None and self.split is None:
            raise ValueError(f"`split` is missing: which split of {self.hub}, such as `train` or `test`?")
        return self


class RowError(ValueError):
    """The reason why a row cannot be used; the caller adds the place."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Row:
    """One row, or the reason why it is none."""

    place: str
    """`path:line`, for messages."""
    name: str
    """`file:line`, unique within its source."""
    fields: Mapping[str, Any] | RowError


def read_rows(source: RowSource) -> Iterator[Row]:
    """Rows in order; a malformed one carries its error, so that the caller decides whether to continue.

    Raises:
        ValueError: a file as a whole or the hub's data set cannot be read, or a Parquet file is damaged.
    """
    if source.hub is not None:
        yield from _read_hub(source)
        return
    paths = [Path(name) for name in source.files]
    names = [path.name for path in paths]
    for path in paths:
        label = path.name if names.count(path.name) == 1 else str(path)
        reader = _read_parquet if path.suffix == ".parquet" else _read_json
        try:
            yield from reader(regular_file(path), label)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise ValueError(f"cannot read {path}: {reason}") from error


def check_source(source: RowSource, option: str) -> None:
    """Raise ValueError, naming the recipe's option, if a file is missing or of an unknown kind."""
    for index, name in enumerate(source.files):
        path = Path(name)
        if not name.endswith(ENDINGS):
            raise ValueError(f"{option}.files.{index}: expected a file {' or '.join(ENDINGS)}, found {name}")
        try:
            regular_file(path)
        except ValueError as error:
            raise ValueError(f"{option}.files.{index}: {error}") from error
        if not path.is_file():
            near = suggestion(name, map(str, path.parent.glob("*.*")))
            raise ValueError(f"{option}.files.{index}: no file {name} (in {Path.cwd()}){near}")
        if name in source.files[:index]:
            raise ValueError(f"{option}.files.{index}: {name} is listed twice")


def get_field(fields: Mapping[str, Any], name: str) -> Any:
    """The field `name`; if there is none of that name, `a.b` is the field `b`, or item `b` from 0, of the field `a`.

    Raises:
        RowError: there is no such field.
    """
    if name in fields:
        return fields[name]
    outer, dot, inner = name.partition(".")
    value = fields.get(outer)
    if isinstance(value, list):
        value = {str(index): item for index, item in enumerate(value)}
    if dot and isinstance(value, Mapping):
        return get_field(value, inner)
    raise RowError(f"no field `{name}`{suggestion(name, fields)}; its fields are {', '.join(fields)}")


def _read_json(path: Path, label: str) -> Iterator[Row]:
    """One row for each line that is not blank, or for each item of an array."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        is_array = ".jsonl" not in path.suffixes and file.peek(64).lstrip().startswith(b"[")
        for number, item in enumerate(_items(file.read(), path) if is_array else file, start=1):
            if is_array or item.strip():
                fields = _fields(item) if is_array else parse_row(item)
                yield Row(place=f"{path}:{number}", name=f"{label}:{number}", fields=fields)


def _items(text: bytes, path: Path) -> list[Any]:
    """The items of an array in JSON."""
    try:
        items: list[Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no array in JSON: {error}") from error
    return items


def parse_row(line: bytes | str) -> Mapping[str, Any] | RowError:
    """The fields of a row in JSON, or the reason why it has none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return RowError(f"not JSON: {error}")
    return _fields(value)


def _fields(value: Any) -> Mapping[str, Any] | RowError:
    """A row that is an object, or the reason why it is none."""
    return (
        value if isinstance(value, dict) else RowError(f"expected an object with fields, found {type(value).__name__}")
    )


def _read_parquet(path: Path, label: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(place=f"{path}:{number}", name=f"{label}:{number}", fields=fields)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot read this Parquet file after row {number}: {reason}") from error


def _read_hub(source: RowSource) -> Iterator[Row]:
    import datasets

    try:
        dataset = datasets.load_dataset(source.hub, source.config, split=source.split)
    except (OSError, ValueError) as error:
        raise ValueError(f"hub data set {source.hub} ({source.config}, {source.split}): {error}") from error
    for number, fields in enumerate(dataset, start=1):
        name = f"{source.hub}/{source.split}:{number}"
        yield Row(place=name, name=name, fields=fields)
