"""What all benchmarks share: their options, runs by turns, and measurements as one table.

What slows the machine down for a while slows all candidates of a turn down, and cancels in ratios. The table is for the
terminal and Markdown (the same text); programs read JSON.
"""

import datetime
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer

from srtrl import __version__
from srtrl.drafters.base import resolve_drafter
from srtrl.metrics import check_output, write_atomic
from srtrl.recipe.schema import MAX_WIDTH
from srtrl.run.machine import cpu_name, num_cores

# --- Options ----------------------------------------------------------------------------------------------------------

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


# --- Turns ------------------------------------------------------------------------------------------------------------

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


def alternate(candidates: Mapping[Key, Callable[[], Result]], repeats: int) -> dict[Key, list[Result]]:
    """Run each candidate once to warm up, then `repeats` times, one after the other; each turn in reversed order."""
    results: dict[Key, list[Result]] = {name: [] for name in candidates}
    for turn in range(repeats + 1):
        for name in list(candidates)[:: 1 if turn % 2 == 0 else -1]:
            started = time.perf_counter()
            result = candidates[name]()
            label = f"{name}, {f'run {turn} of {repeats}' if turn else 'warm-up'}"
            print(f"{label}: {time.perf_counter() - started:.3f} s", file=sys.stderr, flush=True)
            results[name] += [result] if turn else []
    return results


def median_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median of each number of the runs, within mappings too."""
    return {
        name: median_of([run[name] for run in runs])
        if isinstance(value, Mapping)
        else statistics.median(run[name] for run in runs)
        for name, value in runs[0].items()
    }


@dataclass(kw_only=True, slots=True, frozen=True)
class Ratio:
    """How many times as fast, with an interval."""

    value: float
    """Median over pairs of runs."""
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def paired_ratio(numerators: Iterable[float], denominators: Iterable[float]) -> Ratio:
    """Median ratio of the seconds of two candidates whose i-th runs were of the same turn.

    The interval covers the median of all runs there could be about 95% of the time: it is between the sorted ratios
    at 0.98 sqrt(n) places (1.96 standard deviations of a binomial count) before and after the middle, or between the
    lowest and the highest where there are few.
    """
    ratios = sorted(float(a / b) for a, b in zip(numerators, denominators, strict=True))
    middle, reach = (len(ratios) - 1) / 2, 0.98 * math.sqrt(len(ratios))
    first = max(0, math.floor(middle - reach))
    return Ratio(value=statistics.median(ratios), low=ratios[first], high=ratios[len(ratios) - 1 - first])


# --- The table --------------------------------------------------------------------------------------------------------

JSON_MARK = '"srtrl": "bench"'
"""In each JSON file of a benchmark."""
Row = Mapping[str, Any]
"""Column -> value. A mapping in a row is columns of its own; a list is for programs alone and has no column."""


def read_environment(device: torch.device, json_file: Path | None, *, force: bool) -> dict[str, Any]:
    """What a figure depends on besides the code: the command, the machine, its load, threads and versions.

    Called before anything is measured. `load` is the average of the last minute: on a quiet machine well below 1.

    Raises:
        ValueError: `json_file` may not be written (see `check_output`).
    """
    check_output("--json", json_file, JSON_MARK, force=force)
    libraries = ("torch", "transformers", "numba", *(("triton",) if device.type == "cuda" else ()))
    gpu = f" and {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return {
        "command": shlex.join(["srtrl", *sys.argv[1:]]),
        "processor": f"{cpu_name()}{gpu}",
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "srtrl": __version__,
        **{name: version(name) for name in libraries},
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def publish(
    title: str,
    tables: Mapping[str, Sequence[Row]],
    about: str | None,
    environment: Mapping[str, Any],
    json_file: Path | None,
) -> None:
    """Print the figures of one benchmark as a section of Markdown, and write them as JSON where `--json` is given.

    Args:
        title: Heading of the section.
        tables: Key in the JSON file -> rows; where there are several tables, the key is also the caption.
        about: What was measured, and how: the docstring of the benchmark's module, whose first line is left out.
        environment: Of `read_environment`, before anything was measured.
        json_file: Of `--json`.
    """
    machine = ", ".join(f"{name} {value}" for name, value in environment.items() if name != "command")
    notes = (about or "").partition("\n")[2].strip()
    lines = [f"## {title}", "", f"`{environment['command']}`", "", f"{machine}.", "", notes]
    for caption, rows in tables.items():
        lines += ["", *([f"{caption.replace('_', ' ')}:", ""] if len(tables) > 1 else []), format_table(rows)]
    print("\n".join(lines))
    if json_file is not None:
        values = {"srtrl": "bench", "title": title, "environment": environment, **tables}
        write_atomic(json_file, json.dumps(values, indent=2, default=asdict) + "\n")


def format_table(rows: Sequence[Row]) -> str:
    """A Markdown table whose cells are aligned, so that it is one on a terminal, too."""
    flat = [_flat(row) for row in rows]
    columns = []
    for name in dict.fromkeys(name for row in flat for name in row):
        values = [row.get(name) for row in flat]
        cells = [name.replace("_", " "), *map(format_cell, values)]
        width, is_text = max(map(len, cells)), any(isinstance(value, str) for value in values)
        cells.insert(1, "-" * width if is_text else "-" * (width - 1) + ":")
        columns.append([cell.ljust(width) if is_text else cell.rjust(width) for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def _flat(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if not isinstance(value, list):
            flat |= _flat(value) if isinstance(value, Mapping) else {name: value}
    return flat


def format_cell(value: object) -> str:
    """Three significant digits, but no figure before the point is lost; nothing for None."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
