"""What `srtrl bench gpu` has found: one table beside the goals, others with details, and numbers for programs."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from srtrl.bench.environment import Environment
from srtrl.bench.tables import Document, Grid

Verdict = Literal["", "ok", "FAILED", "reached", "missed"]
"""`ok` and `FAILED` are of checks, `reached` and `missed` of goals."""

MOST_CELL = 100
"""Characters of a message in the table; the JSON has it whole."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Row:
    """One line of the table."""

    what: str
    figure: str
    goal: str = ""
    verdict: Verdict = ""


@dataclass(kw_only=True, slots=True)
class SectionReport:
    """What one section has found so far: what was added stays, even where the section breaks off."""

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    """Details, for the docs."""
    notes: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """For programs."""
    problem: str = ""
    """Why it broke off, or did not begin."""
    is_error: bool = False
    """Whether `problem` is a failure, and not merely a lack of time or of a trace."""
    seconds: float = 0.0
    """What it took of the clock."""

    def add(self, what: str, figure: str, goal: str = "", verdict: Verdict = "") -> None:
        """One more row."""
        self.rows.append(Row(what=what, figure=figure, goal=goal, verdict=verdict))

    def check(self, what: str, error: float, bound: float, note: str = "") -> None:
        """A row of a check: its worst error must not exceed the bound (NaN does)."""
        is_ok = error <= bound
        figure = f"worst error {error:.2g}{f'; {note}' if note else ''}"
        self.add(what, figure, f"at most {bound:.2g}", "ok" if is_ok else "FAILED")
        self.values.setdefault("checks", []).append(
            {"name": what, "error": error, "bound": bound, "ok": is_ok, "note": note}
        )

    def fail(self, what: str, message: str) -> None:
        """A row of a check that could not be finished."""
        self.add(what, message, "", "FAILED")
        self.values.setdefault("checks", []).append({"name": what, "ok": False, "note": message})

    def skip(self, reason: str) -> None:
        """What is left of the section is not run, which is no failure."""
        self.problem = f"not run: {reason}"

    @property
    def has_failed(self) -> bool:
        """Whether the run must not end with success."""
        return self.is_error or any(row.verdict == "FAILED" for row in self.rows)


def summary_grid(reports: Sequence[SectionReport]) -> Grid:
    """The one table: every row of every section, and what was not run and why."""
    rows = []
    for report in reports:
        lines = list(report.rows)
        if report.problem:
            verdict: Verdict = "FAILED" if report.is_error else ""
            lines.append(Row(what="the rest" if lines else "all of it", figure=report.problem, verdict=verdict))
        rows += [
            (report.name, *(_cell(text) for text in (row.what, row.figure, row.goal, row.verdict))) for row in lines
        ]
    return Grid(
        columns=("section", "what", "figure", "goal or bound", ""),
        alignments=("left",) * 5,
        rows=tuple(rows),
        group_by=1,
    )


def gpu_document(title: str, environment: Environment, reports: Sequence[SectionReport]) -> Document:
    """The section of `docs/benchmarks.md`, and the JSON."""
    verdicts = [row.verdict for report in reports for row in report.rows]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("ok", "FAILED", "reached", "missed"))
    return Document(
        title=title,
        environment=environment,
        notes=(
            f"Checks and goals: {counts}.",
            *(f"`{report.name}` ({report.seconds:.0f} s): {note}" for report in reports for note in report.notes),
        ),
        grids=(summary_grid(reports), *(grid for report in reports for grid in report.grids)),
        values={"sections": [_section_values(report) for report in reports]},
    )


def _section_values(report: SectionReport) -> dict[str, Any]:
    values = asdict(report)
    del values["grids"]
    finite: dict[str, Any] = _without_nan(values)
    return finite


def _without_nan(value: Any) -> Any:
    """None for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(text: str) -> str:
    """One line, and no character that ends a cell in Markdown."""
    line = " ".join(text.replace("|", "/").split())
    return line if len(line) <= MOST_CELL else f"{line[: MOST_CELL - 3]}..."
