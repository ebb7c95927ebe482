"""`srtrl bench gpu` on a CUDA device: each section measures something."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from srtrl.cli import app

pytestmark = pytest.mark.gpu


def test_the_limits_of_the_device_are_measured(tmp_path: Path) -> None:
    options = ["--only", "limits", "--max-minutes", "5", "--json", str(tmp_path / "bench.json")]
    result = CliRunner().invoke(app, ["bench", "gpu", *options])
    assert result.exit_code == 0, result.output
    (limits,) = json.loads((tmp_path / "bench.json").read_text())["sections"]
    assert limits["values"]["limits"]["matmul_rate"] > 1e12
    assert limits["values"]["limits"]["copy_bandwidth"] > 1e11


def test_decode_steps_are_measured_beside_their_limits(tmp_path: Path) -> None:
    options = ["--only", "decode,logprobs", "--max-minutes", "4", "--json", str(tmp_path / "bench.json")]
    result = CliRunner().invoke(app, ["bench", "gpu", *options])
    assert result.exit_code == 0, result.output
    _, decode, logprobs = json.loads((tmp_path / "bench.json").read_text())["sections"]
    for step in decode["values"]["steps"]:
        assert step["seconds"] >= max(step["limits"].values())
        assert step["host_seconds"] < step["seconds"]
    assert logprobs["values"]["difference"]["mean"] < 0.1
