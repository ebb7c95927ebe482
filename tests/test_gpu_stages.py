"""The program that `make bench-gpu` runs, without a GPU."""

import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "docs"))
import gpu_stages

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="`make bench-gpu` runs it")

STAGE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("before the end", child.pid, file=sys.stderr, flush=True)
time.sleep(60)
"""


def is_running(pid: int) -> bool:
    """Whether there is such a process, which has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stage_without_time_leaves_no_process_and_shows_what_it_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stage = tmp_path / "stage.py"
    stage.write_text(STAGE)
    monkeypatch.setattr(gpu_stages, "__file__", str(stage))
    assert gpu_stages.run_stage("decode", "cpu", 2) == [{"passed": False, "error": "took more than 2 s"}]
    child = int(capfd.readouterr().err.split("before the end")[1].split()[0])
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


SLOW = [stage for stage in gpu_stages.STAGES if stage not in {"tests", "rollouts", "training"}]


@pytest.mark.parametrize("stage", ["training", *(pytest.param(stage, marks=pytest.mark.slow) for stage in SLOW)])
def test_a_stage_takes_its_path_on_a_cpu(stage: str) -> None:
    rows = gpu_stages.run_stage(stage, "cpu", 100)
    assert rows
    assert not any("error" in row or row.get("passed") is False for row in rows), rows


def test_a_stage_names_the_tests_that_failed_and_the_first_line_of_each_error(tmp_path: Path) -> None:
    file = tmp_path / "test_broken.py"
    file.write_text("def test_right():\n    pass\n\n\ndef test_wrong():\n    assert 1 + 1 == 3, 'the sum'\n")
    row = gpu_stages.run_pytest("cpu", str(file))
    assert not row["passed"]
    assert row["summary"].startswith("1 failed, 1 passed")
    (failed,) = row["failed"]
    assert failed.endswith("test_broken.py::test_wrong - AssertionError: the sum")
