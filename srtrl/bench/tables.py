"""Measurements as text: a table for a terminal, Markdown for files, JSON for programs."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.table import Table

from srtrl.bench.comparison import Comparison
from srtrl.bench.environment import Environment
from srtrl.bench.statistics import Ratio
from srtrl.metrics import write_atomic

_INTRODUCTION = """\
# Benchmarks

Each section was written by the command it quotes (`--write-docs`), not by hand; running the command again replaces it.
"""


Align = Literal["left", "right"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Grid:
    """One table of a document."""

    caption: str = ""
    """A line above it."""
    columns: tuple[str, ...]
    alignments: tuple[Align, ...]
    """Of each column."""
    rows: tuple[tuple[str, ...], ...]
    group_by: int
    """Rows that agree in the first so many cells stand together."""

    def to_table(self) -> Table:
        """For a terminal."""
        table = Table(title=self.caption, caption_justify="left", title_justify="left")
        for name, justify in zip(self.columns, self.alignments, strict=True):
            table.add_column(name, justify=justify)
        for row, following in zip(self.rows, [*self.rows[1:], None], strict=True):
            ends = following is not None and following[: self.group_by] != row[: self.group_by]
            table.add_row(*row, end_section=ends)
        return table

    def to_markdown(self) -> list[str]:
        """Lines of Markdown."""
        rules = ["--:" if align == "right" else "---" for align in self.alignments]
        before = [f"{self.caption}:", ""] if self.caption else []
        return [*before, *(_markdown_row(row) for row in (self.columns, rules, *self.rows))]


@dataclass(kw_only=True, slots=True, frozen=True)
class Document:
    """All that one benchmark has to say."""

    title: str
    """Heading of the section in a file: sections of the same title replace each other."""
    environment: Environment
    notes: tuple[str, ...]
    """What was measured, and what each contender does."""
    grids: tuple[Grid, ...]
    values: Mapping[str, Any]
    """What programs get beside title, environment and notes: every run."""

    def to_table(self) -> Group:
        """For a terminal."""
        tables = [grid.to_table() for grid in self.grids]
        tables[0].title = self.title
        tables[-1].caption = str(self.environment)
        return Group(*tables)

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


def peer_grid(baseline: str, comparisons: Sequence[Comparison]) -> Grid:
    """One row a workload and contender; seconds are the median of the runs, the ratios those of `baseline`."""
    rows = []
    for comparison in comparisons:
        for name, seconds in comparison.seconds.items():
            median = statistics.median(seconds)
            rows.append(
                (
                    str(comparison.num_sequences),
                    comparison.lengths,
                    name,
                    f"{median:.3f}",
                    f"{comparison.num_tokens / median:,.0f}",
                    "" if name == baseline else str(comparison.ratio(baseline, to=name)),
                )
            )
    return Grid(
        columns=("sequences", "lengths", "decoder", "seconds", "tokens/s", f"{baseline} is"),
        alignments=("right", "left", "left", "right", "right", "left"),
        rows=tuple(rows),
        group_by=2,
    )


def comparison_values(comparison: Comparison, ratios: Mapping[str, Ratio]) -> dict[str, Any]:
    """A comparison for programs, with the ratios that its table shows."""
    return asdict(comparison) | {"ratios": {name: asdict(ratio) for name, ratio in ratios.items()}}


def put_section(path: Path, section: str) -> None:
    """Replace the section of the same heading in a Markdown file, or append it; makes the file where there is none."""
    heading = section.splitlines()[0]
    text = path.read_text(encoding="utf-8") if path.exists() else _INTRODUCTION
    before, *sections = ("\n" + text).split("\n## ")
    parts = [before.strip("\n"), *(f"## {part}".strip("\n") for part in sections)]
    new = section.strip("\n")
    places = [i for i, part in enumerate(parts) if part.splitlines()[:1] == [heading]]
    if places:
        parts[places[0]] = new
    else:
        parts.append(new)
    write_atomic(path, "\n\n".join(part for part in parts if part) + "\n")


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def print_document(document: Document) -> None:
    """Write to standard output: a table on a terminal, Markdown elsewhere."""
    console = Console()
    if console.is_terminal:
        console.print(document.to_table())
    else:
        print(document.to_markdown(), end="")
