"""The metric log of a run (JSON lines, one row per step), and seconds by stage."""

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Self

from srtrl.files import named_in_errors

MetricRow = dict[str, float]
"""`step` and the metrics of that step."""


class MetricLog:
    """Appends rows to `metrics.jsonl`. A row is on disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row.

        Raises:
            ValueError: a value is not a finite number; the message names the metric.
        """
        assert "step" not in metrics, "a metric named `step` would replace the row's"
        row: MetricRow = {"step": step}
        row |= {name: _number(name, value) for name, value in metrics.items()}
        with named_in_errors(self._path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def truncate(self, num_bytes: int) -> None:
        """Drop the rows after the first `num_bytes`: those after the checkpoint that a resume starts from."""
        self._file.truncate(num_bytes)
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; `write` must not be called after."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[MetricRow]:
    """Read the rows of a metric log, in file order; those of the same step, one after the other, as one.

    A last line without its newline (a killed run) is left out.

    Raises:
        ValueError: a line is not a JSON object of numbers with a `step`; the message names file and line.
    """
    rows: list[MetricRow] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
            raise ValueError(f"{path}:{number}: not JSON ({error}); expected one row of metrics a line") from error
        if not (isinstance(row, dict) and "step" in row and all(map(_is_number, row.values()))):
            raise ValueError(
                f"{path}:{number}: expected an object with the key `step` and numbers, found {str(row)[:80]}"
            )
        if rows and rows[-1]["step"] == row["step"]:
            rows[-1] |= row
        else:
            rows.append(row)
    return rows


def _is_number(value: object) -> bool:
    """Whether a value is a number that may be added to others: finite, and not huge."""
    return isinstance(value, int | float) and abs(value) < 1e300


def _number(name: str, value: float) -> int | float:
    """A plain int or float, from a NumPy scalar too."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"metric {name} must be a finite number, found {value!r}")
    return int(value) if isinstance(value, Integral) else float(value)


class StageTimer:
    """Adds up wall-clock seconds by stage name (`time/<name>`); stages may repeat. A stage inside another pauses it.

    So no second is counted twice, and the sum is the step's time.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._inside = 0.0
        """Seconds of the stages inside the one that is open."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the seconds inside the `with` block as `name`; also where the block raises."""
        start, outside, self._inside = time.perf_counter(), self._inside, 0.0
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._seconds[name] += seconds - self._inside
            self._inside = outside + seconds

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call, no stage being open; starts again from nothing."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
