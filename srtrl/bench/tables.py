"""Measurements as text: Markdown for people, JSON for programs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from srtrl.bench.environment import Environment
from srtrl.metrics import write_atomic

_INTRODUCTION = """\
# Benchmarks

Each section was written by the command it quotes (`--write-docs`), not by hand; running the command again replaces it.
"""


@dataclass(kw_only=True, slots=True, frozen=True)
class Grid:
    """One table of a document."""

    caption: str = ""
    """A line above it."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_markdown(self) -> list[str]:
        """Lines of Markdown; columns of numbers are aligned to the right."""
        cells = zip(*self.rows, strict=True) if self.rows else [()] * len(self.columns)
        rules = ["--:" if all(_is_number(cell) for cell in column) else "---" for column in cells]
        before = [f"{self.caption}:", ""] if self.caption else []
        return [*before, *(_markdown_row(row) for row in (self.columns, rules, *self.rows))]


@dataclass(kw_only=True, slots=True, frozen=True)
class Document:
    """All that one benchmark has to say."""

    title: str
    """Heading of the section in a file: sections of the same title replace each other."""
    environment: Environment
    notes: tuple[str, ...]
    """What was measured, and how."""
    grids: tuple[Grid, ...]
    values: Mapping[str, Any]
    """What programs get beside title, environment and notes."""

    def to_markdown(self) -> str:
        """The section of a file, its heading included."""
        lines = [f"## {self.title}", "", f"`{self.environment.command}`", "", f"{self.environment}.", ""]
        lines += [f"- {note}" for note in self.notes]
        for grid in self.grids:
            lines += ["", *grid.to_markdown()]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """Everything, with each run."""
        values = {"title": self.title, "environment": asdict(self.environment), "notes": self.notes}
        return json.dumps(values | dict(self.values), indent=2) + "\n"


def publish(document: Document, json_file: Path | None, write_docs: Path | None) -> None:
    """Print it, and write it where the options say."""
    print(document.to_markdown(), end="")
    if json_file is not None:
        write_atomic(json_file, document.to_json())
    if write_docs is not None:
        put_section(write_docs, document.to_markdown())


def put_section(path: Path, section: str) -> None:
    """Replace the section of the same heading in a Markdown file, or append it; makes the file where there is none."""
    heading = section.splitlines()[0]
    text = path.read_text(encoding="utf-8") if path.exists() else _INTRODUCTION
    before, *sections = ("\n" + text).split("\n## ")
    parts = [before.strip("\n"), *(f"## {part}".strip("\n") for part in sections)]
    new = section.strip("\n")
    indices = [i for i, part in enumerate(parts) if part.splitlines()[:1] == [heading]]
    if indices:
        parts[indices[0]] = new
    else:
        parts.append(new)
    write_atomic(path, "\n\n".join(part for part in parts if part) + "\n")


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").rstrip("%").isdecimal() or cell in ("", "-")


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
