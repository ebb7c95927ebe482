"""`srtrl bench gpu`: every section, tiny and on the CPU; its checks, files and errors."""

import json
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from typer.testing import CliRunner, Result

from srtrl.bench import gpu
from srtrl.cli import app


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "gpu", *(str(argument) for argument in arguments)])


def test_every_section_of_the_smoke_test_finds_something(tmp_path: Path) -> None:
    result = bench("--smoke", "--json", tmp_path / "bench.json", "--write-docs", tmp_path / "docs.md")
    assert result.exit_code == 0, result.output
    sections = json.loads((tmp_path / "bench.json").read_text())["sections"]
    assert list(sections) == ["checks", "limits", "decode step", "drafts", "log-probs", "update"]
    assert all(limit["per_second"] > 0 for limit in sections["limits"])
    for step in sections["decode step"]:
        assert step["step"] > 0
        assert step["launch_to_result"] > 0
        assert step["memory_limit"] > 0
        assert step["host"] is None, "nothing is waited for on a CPU"
    assert [one["what"] for one in sections["drafts"]] == ["4 slots, srt to none", "8 slots, srt to none"]
    for one in sections["drafts"]:
        assert one["metrics"]["srt/engine/tokens_per_decode_step"] > 1.1
        assert one["metrics"]["none/engine/tokens_per_decode_step"] == 1
    assert 0 < sections["log-probs"][0]["mean"] < 1e-3
    assert sections["update"][0]["matmul_share"] > 0
    assert "| drafts | 4 slots, srt to none | " in result.stdout
    assert "## The CUDA path: tiny, smoke test on a CPU" in (tmp_path / "docs.md").read_text()


def test_a_section_that_fails_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu, "take_turns", fail)
    result = bench("--smoke")
    assert result.exit_code == 1
    assert "| compare_drafters | all of it | FAILED: OutOfMemoryError: CUDA out of memory |" in result.stdout
    assert "of the matmul rate |" in result.stdout


@pytest.mark.parametrize(("test", "found"), [("pass", "1 passed"), ("assert False", "FAILED: 1 failed")])
def test_the_checks_are_the_repositorys_tests_for_a_gpu(tmp_path: Path, test: str, found: str) -> None:
    tests = tmp_path / "tests"
    assert gpu.run_checks(tests).startswith("not run: ")
    tests.mkdir()
    (tests / "test_it.py").write_text(f"import pytest\n@pytest.mark.gpu\ndef test_it():\n    {test}\n")
    assert gpu.run_checks(tests).startswith(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_mistakes_are_found_before_anything_is_measured() -> None:
    for arguments, error in (((), "measures a CUDA device"), (("--smoke", "--json", "no/file.json"), "no folder no")):
        result = bench(*arguments)
        assert result.exit_code == 2
        assert error in result.stderr


def test_make_has_a_target_that_runs_it() -> None:
    text = (REPOSITORY / "Makefile").read_text()
    assert "bench-gpu: $(STAMP) ## " in text
    assert "srtrl bench gpu " in text
