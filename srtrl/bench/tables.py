"""Measurements as text: a table for a terminal, Markdown for files, JSON for programs."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from srtrl.bench.comparison import Comparison
from srtrl.bench.environment import Environment
from srtrl.metrics import write_atomic

_INTRODUCTION = """\
# Benchmarks

Each section was written by the command it quotes (`--write-docs`), not by hand; running the command again replaces it.
"""


@dataclass(kw_only=True, slots=True, frozen=True)
class Document:
    """All that one benchmark has to say."""

    title: str
    """Heading of the section in a file: sections of the same title replace each other."""
    environment: Environment
    notes: tuple[str, ...]
    """What was measured, and what each contender does."""
    baseline: str
    """The contender whose advantage over the others is shown."""
    comparisons: tuple[Comparison, ...]

    def header(self) -> list[str]:
        """Names of the columns."""
        return ["sequences", "lengths", "decoder", "seconds", "tokens/s", f"{self.baseline} is"]

    def rows(self) -> list[list[str]]:
        """One row a workload and contender; seconds are the median of the runs."""
        return [
            self._row(comparison, name, statistics.median(seconds))
            for comparison in self.comparisons
            for name, seconds in comparison.seconds.items()
        ]

    def _row(self, comparison: Comparison, name: str, median: float) -> list[str]:
        advantage = "" if name == self.baseline else str(comparison.ratio(self.baseline, to=name))
        speed = f"{comparison.num_tokens / median:,.0f}"
        return [str(comparison.num_sequences), comparison.lengths, name, f"{median:.3f}", speed, advantage]

    def to_table(self) -> Table:
        """For a terminal."""
        table = Table(title=self.title, caption=str(self.environment), caption_justify="left")
        for name, justify in zip(self.header(), ("right", "left", "left", "right", "right", "left"), strict=True):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        rows = self.rows()
        for row, following in zip(rows, [*rows[1:], None], strict=True):
            table.add_row(*row, end_section=following is not None and following[:2] != row[:2])
        return table

    def to_markdown(self) -> str:
        """The section of a file, its heading included."""
        lines = [f"## {self.title}", "", f"`{self.environment.command}`", "", f"{self.environment}.", ""]
        lines += [f"- {note}" for note in self.notes]
        lines += ["", _markdown_row(self.header()), _markdown_row(["--:", "---", "---", "--:", "--:", "---"])]
        lines += [_markdown_row(row) for row in self.rows()]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """Everything, with the seconds of each run."""
        values = asdict(self)
        for row, comparison in zip(values["comparisons"], self.comparisons, strict=True):
            row["ratios"] = {
                name: asdict(comparison.ratio(self.baseline, to=name))
                for name in comparison.seconds
                if name != self.baseline
            }
        return json.dumps(values, indent=2) + "\n"


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
