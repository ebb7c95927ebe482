"""The metric log of a run (JSON lines, one row per step), seconds by stage, and files that are whole or not there."""

import json
import math
import os
import re
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Self

MetricRow = dict[str, float]
"""One line of `metrics.jsonl`: `step` and the metrics of that step."""


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
    """Read the rows of a metric log, in file order; a last line without its newline (a killed run) is left out.

    Raises:
        ValueError: a line is not a JSON object of numbers with a `step`; the message names file and line.
    """
    rows = []
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
        rows.append(row)
    return rows


def _is_number(value: object) -> bool:
    """Whether a value is a number that may be added to others: finite, and not huge."""
    return isinstance(value, int | float) and abs(value) < 1e300


def temporary_beside(path: Path) -> Path:
    """A new name beside `path` for what is being written or deleted; see `is_temporary`."""
    return path.with_name(f".srtrl_{secrets.token_hex(8)}")  # `tempfile` would make it readable for its owner only


def is_temporary(path: Path) -> bool:
    """Whether a name is one of `temporary_beside`: a resume deletes what a killed run has left."""
    return re.fullmatch(r"\.srtrl_[0-9a-f]{16}", path.name) is not None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file beside `path`, then rename it: a reader, or a kill at any time, sees the old file or the new one."""
    temporary = temporary_beside(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        with named_in_errors(path):
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def check_output(option: str, path: Path | None, mark: str | None, *, force: bool | None = None) -> None:
    """Refuse, before anything is measured, to write over a file that srtrl did not write for the same purpose.

    Args:
        option: Named in the message.
        path: What will be written; None: nothing.
        mark: A text in the first 4,096 bytes of each file of this purpose; None: replace no file.
        force: Of `--force`: replace any file. None: the command has no such option.

    Raises:
        ValueError: a folder is there, the folder around it is missing, or a file is there without the mark.
    """
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        problem = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(f"{option}: {problem}; expected the name of a file")
    if force or not os.path.lexists(path):
        return
    if path.is_file() and mark is not None:
        with path.open("rb") as file:
            if mark.encode() in file.read(4096):
                return
    other = "rename it" if force is None else "rename it, name another file, or replace it with --force"
    raise ValueError(f"{option}: {path} exists, and is {'kept' if mark is None else 'not from this command'}: {other}")


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder to write into, which is durable and has the name `final` when the block succeeds, and is gone if not.

    It has a name of its own until then, beside `final`, which must not exist or be an empty folder.
    """
    temporary = temporary_beside(final)
    with named_in_errors(final):
        temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync_folder(path)  # files as well
        temporary.rename(final)
        sync_folder(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """An OSError of a write (a full disk, say) names no file, or the temporary one: let it name `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
