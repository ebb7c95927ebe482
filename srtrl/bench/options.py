"""Options that several benchmarks have, and how they are read. Nothing heavy."""

from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from srtrl.drafters.base import resolve_drafter
from srtrl.recipe.schema import MAX_WIDTH


def _check_folder(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before anything is measured, not after."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent} to write {path.name} into; make it first")
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", dir_okay=False, callback=_check_folder, help="Also write the figures to this file, as JSON."
    ),
]
WriteDocs = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        callback=_check_folder,
        help="Write the result into this Markdown file, replacing an older result.",
    ),
]
Slots = Annotated[
    str, typer.Option(metavar="N[,N...]", help="Sequences decoded at a time; one comparison for each number.")
]
Drafters = Annotated[str, typer.Option(metavar="NAME,NAME,...", help="Drafters to compare; the first is the baseline.")]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads; by default torch's own choice.")]
Repeats = Annotated[int, typer.Option(min=1, help="Runs of each, alternating, after a warm-up run.")]
TraceFile = Annotated[
    Path | None, typer.Option(help="Recorded rollouts to decode again: JSONL, or Parquet of an srtrl run.")
]
TokenizerFolder = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="DIR", help="Folder or hub name of the tokenizer, if the trace has texts."),
]

CURVES = {"h200-1.5b": "1:0.0020,129:0.0020,2048:0.0139"}
"""Seconds of a decode step by its rows, stated and not measured: memory-bound and level, then compute-bound and linear.
`h200-1.5b` is 1.54 thousand million parameters in bfloat16 on one H200, by its data sheet: 1.2 ms + max(0.8 ms, 6.2 us
per row). The fixed 1.2 ms are launches, attention and sampling; reading 3.1 GB at 80% of 4.8 TB/s takes 0.8 ms;
2 x 1.54e9 operations per row at half of the peak of 989 TFLOP/s take 6.2 us, which is more from 129 rows on."""


def parse_curve(option: str, text: str) -> tuple[tuple[int, float], ...]:
    """Read the name of a curve, or `ROWS:SECONDS,ROWS:SECONDS,...`; returns (rows, seconds), rows rising.

    Raises:
        ValueError: Neither of the two, or rows that do not rise, or a cost that falls.
    """
    expected = f"expected {' or '.join(CURVES)}, or ROWS:SECONDS,ROWS:SECONDS,... like 64:0.002,512:0.003"
    try:
        pairs = [part.split(":") for part in CURVES.get(text, text).split(",")]
        points = tuple((int(rows), float(seconds)) for rows, seconds in pairs)
    except ValueError as error:
        raise ValueError(f"{option}: {expected}; found {text!r}") from error
    rises = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points))
    if not rises or points[0][0] < 1 or not points[0][1] > 0:
        raise ValueError(
            f"{option}: {expected}, rows rising from 1 or more and seconds above 0, never falling; found {text!r}"
        )
    return points


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """Read `8,32,128`.

    Raises:
        ValueError: It is something else, or a number is below 1.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part) < 10 and 0 < int(part) <= MAX_WIDTH for part in parts):
        raise ValueError(f"{option}: expected counts like 8,32,128, at most {MAX_WIDTH}, found {text[:80]!r}")
    return tuple(int(part) for part in parts)


def parse_drafters(text: str, *others: str) -> tuple[str, ...]:
    """Read `none,srt`, each name once: a drafter of ours, one of your own as package.module:Class, or one of `others`.

    Raises:
        ValueError: An unknown name, or one that comes twice.
    """
    names = tuple(part.strip() for part in text.split(","))
    if len(set(names)) < len(names):
        raise ValueError(f"--drafters: expected names, each once, like none,srt; found {text!r}")
    for name in names:
        if name not in others:
            resolve_drafter("--drafters", name)
    return names
