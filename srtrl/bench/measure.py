"""What benchmarks share: runs by turns, and measurements as one table.

What slows the machine down for a while slows all candidates of a turn down, and cancels in ratios. The table is for the
terminal and Markdown (the same text); programs read JSON.
"""

import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from srtrl.run.machine import describe_machine

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


def compare_pairs(baseline: Sequence[float], seconds: Sequence[float]) -> dict[str, float]:
    """How many times as fast the second candidate is as the first, whose i-th runs were of the same turn.

    Returns:
        The median over the pairs of runs, and the lowest and the highest pair.
    """
    ratios = [first / second for first, second in zip(baseline, seconds, strict=True)]
    return {"times_as_fast": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


# --- The table --------------------------------------------------------------------------------------------------------

Row = Mapping[str, Any]
"""Column -> value. A list is for programs alone and has no column."""


def publish(
    title: str, rows: Sequence[Row], about: str | None, device: torch.device, *, as_json: bool, program: str = "srtrl"
) -> None:
    """Print the figures of one benchmark: as a section of Markdown, or as JSON.

    Args:
        title: Heading of the section.
        rows: Of the table.
        about: What was measured, and how: the docstring of the benchmark's module, whose first line is left out.
        device: On which it was measured.
        as_json: Print JSON.
        program: What was called.
    """
    command, machine = f"{program} {shlex.join(sys.argv[1:])}", describe_machine(device)
    if as_json:
        print(json.dumps({"title": title, "command": command, "machine": machine, "rows": rows}))
        return
    notes = (about or "").partition("\n")[2].strip()
    print("\n\n".join([f"## {title}", f"`{command}`", f"{machine}.", notes, format_table(rows)]))


def format_table(rows: Sequence[Row]) -> str:
    """A Markdown table whose cells are aligned, so that it is one on a terminal, too."""
    columns = []
    for name in dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list)):
        values = [row.get(name) for row in rows]
        cells = [name.replace("_", " "), *map(format_cell, values)]
        width, is_text = max(map(len, cells)), any(isinstance(value, str) for value in values)
        cells.insert(1, "-" * width if is_text else "-" * (width - 1) + ":")
        columns.append([cell.ljust(width) if is_text else cell.rjust(width) for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def format_cell(value: object) -> str:
    """Three significant digits, but no figure before the point is lost; nothing for None."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
