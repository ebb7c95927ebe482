"""Options that several benchmarks have, and how they are read. Nothing heavy."""

from pathlib import Path
from typing import Annotated

import typer

from srtrl.drafters.base import resolve_drafter
from srtrl.recipe.schema import MAX_WIDTH

JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file, as JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Let --json replace a file that no benchmark wrote.")]
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


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """Read `8,32,128`.

    Raises:
        ValueError: It is something else, or a number is below 1.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part) < 10 and 0 < int(part) <= MAX_WIDTH for part in parts):
        raise ValueError(f"{option}: expected counts like 8,32,128, at most {MAX_WIDTH}, found {text[:80]!r}")
    return tuple(int(part) for part in parts)


def parse_drafters(text: str) -> tuple[str, ...]:
    """Read `none,srt`: drafters of srtrl, or your own as package.module:Class.

    Raises:
        ValueError: An unknown name.
    """
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        resolve_drafter("--drafters", name)
    return names
