"""`srtrl eval --output FILE`: one row a sample, as JSON lines or as Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from srtrl.tasks.final_answer import extractor

if TYPE_CHECKING:
    from srtrl.trainer.evaluate import EvalOutcome

SUFFIXES = (".jsonl", ".parquet")


def check_output(path: Path) -> None:
    """Raise ValueError where the rows could not be written, or would replace a file."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--output: expected a {' or '.join(SUFFIXES)} file, found {path}")
    if path.exists():
        raise ValueError(f"--output: {path} exists; name another file, or remove that one")
    if not path.parent.is_dir():
        raise ValueError(f"--output: there is no folder {path.parent}")


def sample_rows(outcome: EvalOutcome) -> Iterator[dict[str, Any]]:
    """The rows of one benchmark, by problem and sample."""
    extract = extractor(outcome.task.verifier)
    for group in outcome.groups:
        for rollout in group.rollouts:
            yield {
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


class SampleWriter:
    """Writes the rows of each benchmark once it is done: what was measured before an interrupt is not lost."""

    def __init__(self, path: Path) -> None:
        """Open the file; it must not exist (`check_output`)."""
        self._path = path
        self._lines: IO[str] | None = None
        self._parquet: Any = None
        if path.suffix == ".jsonl":
            self._lines = path.open("x", encoding="utf-8", errors="backslashreplace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._lines, self._parquet):
            if file is not None:
                file.close()

    def write(self, outcome: EvalOutcome) -> None:
        """Add the rows of one benchmark; lines are on disk when this returns."""
        if self._lines is not None:
            self._lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in sample_rows(outcome))
            self._lines.flush()
        else:
            self._write_table(list(sample_rows(outcome)))

    def _write_table(self, rows: list[dict[str, Any]]) -> None:
        import pyarrow
        import pyarrow.parquet

        kinds = {
            "sample_index": pyarrow.int32(),
            "correct": pyarrow.bool_(),
            "num_tokens": pyarrow.int32(),
        }
        schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in rows[0]])
        if self._parquet is None:
            self._parquet = pyarrow.parquet.ParquetWriter(self._path, schema)
        self._parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
