"""Measurements as one table: for the terminal and Markdown (the same text), and for programs as JSON."""

import datetime
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from srtrl import __version__
from srtrl.metrics import write_atomic

JSON_MARK = '"srtrl": "bench"'
"""In each JSON file of a benchmark."""
Row = Mapping[str, Any]
"""Column -> value. A mapping in a row is columns of its own; a list is for programs alone and has no column."""


def read_environment(device: torch.device) -> dict[str, Any]:
    """What a figure depends on besides the code: the command, the machine, its load, threads and versions.

    `load` is the average of the last minute: on a quiet machine well below 1.
    """
    libraries = ("torch", "transformers", "numba", *(("triton",) if device.type == "cuda" else ()))
    gpu = f" and {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return {
        "command": shlex.join(["srtrl", *sys.argv[1:]]),
        "processor": f"{cpu_name()}{gpu}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "srtrl": __version__,
        **{name: version(name) for name in libraries},
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def cpu_name(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Model name of the processor: that of Linux where there is one, else what Python knows."""
    name = re.search(r"^model name\s*: (.+)$", cpu_info.read_text(), re.MULTILINE) if cpu_info.is_file() else None
    return name[1] if name else platform.processor() or platform.machine()


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
