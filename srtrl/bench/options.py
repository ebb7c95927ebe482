"""Options that several benchmarks have: how they are read, and what is said where they cannot be. Nothing heavy."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import typer

from srtrl.resolve import suggestion

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file, too.")]
WriteDocs = Annotated[
    Path | None, typer.Option(help="Put the result into this Markdown file, in place of an older one.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; by default torch's own choice.")]
TraceFile = Annotated[
    Path | None, typer.Option(help="Recorded rollouts to decode once more: JSONL, or Parquet of a run of srtrl.")
]
TokenizerFolder = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="DIR", help="Folder or hub name of the tokenizer, for a trace of texts."),
]


@dataclass(kw_only=True, slots=True, frozen=True)
class StatedCost:
    """Seconds of a decode step by its rows: an assumption, not a measurement."""

    points: tuple[tuple[int, float], ...]
    """(rows, seconds), rows rising."""
    note: str
    """Where it comes from."""


CURVES = {
    "h200-1.5b": StatedCost(
        points=(
            (1, 0.0020),
            (256, 0.0020),
            (320, 0.0020),
            (384, 0.0024),
            (512, 0.0032),
            (1024, 0.0064),
            (2048, 0.0127),
        ),
        note="1.54 thousand million parameters in bfloat16 on one H200, by its data sheet: reading 3.1 GB at 80% of "
        "4.8 TB/s takes 0.8 ms, and a fixed 1.2 ms is added for launches; 2 x 1.54e9 operations per row at half of the "
        "peak of 989 TFLOP/s take 6.2 us, which is more from 320 rows on",
    )
}
"""Named curves: memory-bound and level, then compute-bound and linear."""


def parse_curve(option: str, text: str) -> StatedCost:
    """Read the name of a curve, or `ROWS:SECONDS,ROWS:SECONDS,...`.

    Raises:
        ValueError: Neither of the two, rows that do not rise, or a cost that is not above 0 or falls.
    """
    if text in CURVES:
        return CURVES[text]
    if ":" not in text:
        raise ValueError(
            f"{option}: no curve {text!r}{suggestion(text, CURVES) or ';'} known: {', '.join(CURVES)}; or one of "
            "your own as ROWS:SECONDS,ROWS:SECONDS,..."
        )
    points = []
    for part in text.split(","):
        rows, _, seconds = part.partition(":")
        try:
            points.append((int(rows), float(seconds)))
        except ValueError as error:
            raise ValueError(f"{option}: expected ROWS:SECONDS like 64:0.002, found {part!r}") from error
    for (before, cost_before), (after, cost_after) in pairwise(points):
        if after <= before or cost_after < cost_before:
            raise ValueError(
                f"{option}: {after}:{cost_after} follows {before}:{cost_before}; rows must rise and a step with more "
                "rows cannot cost less"
            )
    if points[0][0] < 1 or not all(0 < seconds < float("inf") for _, seconds in points):
        raise ValueError(f"{option}: expected at least 1 row and seconds above 0, found {text!r}")
    return StatedCost(points=tuple(points), note=f"rows:seconds {text}, given on the command line")


def parse_counts(option: str, text: str, least: int = 1) -> tuple[int, ...]:
    """Read `8,32,128`.

    Raises:
        ValueError: It is something else, or a number is below `least`.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise ValueError(f"{option}: expected counts like 8,32,128, found {text!r}")
    return tuple(int(part) for part in parts)


def parse_names(option: str, text: str, known: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Read `a,b,c`, each name once, each one of `known` where that is given.

    Raises:
        ValueError: An empty list, an unknown name, or one that comes twice.
    """
    names = tuple(part.strip() for part in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"{option}: expected names, each once, like none,srt; found {text!r}")
    unknown = [name for name in names if known is not None and name not in known]
    if unknown:
        raise ValueError(f"{option}: {unknown[0]!r} is none of {', '.join(known or ())}")
    return names


def parse_draft_budget(text: str) -> Literal["auto"] | int:
    """Read `auto` or a number.

    Raises:
        ValueError: It is neither.
    """
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ValueError(f"--draft-budget: expected auto or a number of nodes, found {text!r}")
    return int(text)


def check_output(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written before anything is measured, not after.

    Raises:
        ValueError: It is a folder, or in none.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option}: {path} is a folder; expected a file to write")
    if not path.parent.is_dir():
        raise ValueError(f"{option}: there is no folder {path.parent} to write {path.name} into; make it first")
