"""`timeline/step_000001.parquet`: the decode steps of a training step's rollouts, one row each."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from srtrl.engine.stats import DecodeStep
from srtrl.metrics import write_atomic

COLUMNS = pa.schema(
    [
        ("seconds", pa.float32()),
        ("num_primaries", pa.int32()),
        ("num_run_ahead", pa.int32()),
        ("num_waiting", pa.int32()),
        ("num_rows", pa.int32()),
        ("num_prefill", pa.int32()),
        ("num_tokens", pa.int32()),
    ]
)
"""The columns of every file: the fields of `DecodeStep`."""


def timeline_file_name(step: int) -> str:
    """File name of the timeline of training step `step`."""
    return f"step_{step:06d}.parquet"


def write_timeline(path: Path, steps: Sequence[DecodeStep]) -> None:
    """Write the decode steps of a training step, in order; the file is whole or not there."""
    columns = {name: [getattr(step, name) for step in steps] for name in COLUMNS.names}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=COLUMNS), sink, compression="zstd")
    write_atomic(path, sink.getvalue().to_pybytes())


def read_timeline(path: Path) -> list[DecodeStep]:
    """Read the decode steps of a training step, in order.

    Raises:
        ValueError: It is not a timeline file; the message names it.
    """
    try:
        rows = pq.read_table(path, columns=COLUMNS.names).to_pylist()
    except pa.ArrowException as error:
        raise ValueError(f"{path}: cannot read this timeline: {error}") from error
    if rows and len(rows[0]) < len(COLUMNS):
        missing = [name for name in COLUMNS.names if name not in rows[0]]
        raise ValueError(f"{path}: no column `{missing[0]}`; expected a file of a run's timeline/")
    return [DecodeStep(**row) for row in rows]
