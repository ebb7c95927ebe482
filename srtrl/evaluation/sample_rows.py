"""`srtrl eval --output FILE`: one row a sample, as JSON lines or as Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from srtrl.metrics import write_atomic
from srtrl.tasks.final_answer import extractor

if TYPE_CHECKING:
    from srtrl.trainer.evaluate import EvalOutcome


def check_output(path: Path) -> None:
    """Raise ValueError where the rows could not be written, or would replace a file."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"--output: expected a .jsonl or .parquet file, found {path}")
    if path.exists():
        raise ValueError(f"--output: {path} exists; name another file, or remove that one")
    if not path.parent.is_dir():
        raise ValueError(f"--output: there is no folder {path.parent}")


def append_rows(path: Path, outcome: EvalOutcome) -> None:
    """Add the rows of one benchmark, by problem and sample: what was measured before an interrupt is not lost."""
    extract = extractor(outcome.task.verifier)
    rows = [
        {
            "benchmark": outcome.job.name,
            "problem_id": rollout.prompt.prompt_id,
            "sample_index": rollout.sample_index,
            "prompt": rollout.prompt.text,
            "text": rollout.text,
            "extracted": None if extract is None else extract(rollout.text),
            "answer": rollout.prompt.answer,
            "correct": rollout.grade.outcome == "correct",
            "outcome": rollout.grade.outcome,
            "detail": rollout.grade.detail,
            "num_tokens": len(rollout.token_ids),
            "finish_reason": rollout.finish_reason,
        }
        for group in outcome.groups
        for rollout in group.rollouts
    ]
    if path.suffix == ".jsonl":
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows)
    if path.exists():  # rows of the benchmarks before; a column without a value has no type yet
        table = pyarrow.concat_tables([pyarrow.parquet.read_table(path), table], promote_options="permissive")
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    write_atomic(path, sink.getvalue().to_pybytes())
