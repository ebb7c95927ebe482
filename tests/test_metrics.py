"""The metric log survives kills, and files are whole or not there."""

import errno
import math
from pathlib import Path

import numpy as np
import pytest

from srtrl.files import write_atomic
from srtrl.metrics import MetricLog, read_metrics


def test_finite_rows_come_back_as_written_and_others_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricLog(path) as log:
        for value in (math.nan, -math.inf, "3"):
            with pytest.raises(ValueError, match="kl/ref must be a finite number"):
                log.write(1, {"loss": 1.0, "kl/ref": value})  # type: ignore[dict-item]
        assert path.read_text() == ""
        log.write(1, {"reward/mean": 0.1 + 0.2, "tokens/response": 7, "entropy": float(np.float32(0.3))})
        log.write(2, {"loss": np.float64(1e-30)})
        assert len(read_metrics(path)) == 2  # on disk before the log is closed
    assert read_metrics(path) == [
        {"step": 1, "reward/mean": 0.1 + 0.2, "tokens/response": 7, "entropy": float(np.float32(0.3))},
        {"step": 2, "loss": 1e-30},
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"step": ', "not JSON"),
        (b'{"step": 2, "loss": "\xff"}', "not JSON .*utf-8"),
        (b'{"loss": 3}', "expected an object with the key `step`"),
        (b'{"step": 2, "loss": null}', "expected an object with the key `step` and numbers, found .*None"),
    ],
)
def test_a_damaged_row_is_named_by_line(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=rf"metrics.jsonl:2: {message}"):
        read_metrics(path)


def test_write_atomic_leaves_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, "old")

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match=rf"disk full: '{path}'"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
