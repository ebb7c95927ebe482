"""Every kernel compiles for Ampere to Blackwell, without a GPU: what it needs, how often it is compiled and launched.

The tests' own process interprets kernels where there is no CUDA device; so `docs/kernels.py` compiles them in another
one. By default that is one engine on one architecture; `slow`, and part of `make check-gpu-static`: all models and
architectures.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from srtrl.cuda.tiles import MAX_NUM_SPLITS

sys.path.append(str(Path(__file__).resolve().parents[1] / "docs"))
from kernels import FIRST, HOPPER, KERNELS, SHARED_MEMORY, STEP, targets

ROOT = Path(__file__).resolve().parent.parent


def run_without_interpreter(*options: str, timeout: int) -> str:
    """Output of `docs/kernels.py`, in a process that compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "docs" / "kernels.py"), *options]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=timeout)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.fixture(
    scope="module",
    params=["one engine", pytest.param("everything", marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
)
def compiled(request: pytest.FixtureRequest) -> dict[str, Any]:
    everything = request.param == "everything"
    options = ["--everything"] if everything else []
    printed = run_without_interpreter(*options, timeout=280 if everything else 110)
    found: dict[str, Any] = json.loads(printed)
    return found | {"targets": targets(everything)}


def test_kernels_need_no_more_than_the_planner_counts_on(compiled: dict[str, Any]) -> None:
    kernels: dict[tuple[str, int], set[str]] = {}
    for row in compiled["kernels"]:
        model, capability, kernel = row["model"], row["capability"], row["kernel"]
        kernels.setdefault((model, capability), set()).add(kernel)
        assert row["shared"] <= 1024 * SHARED_MEMORY[capability][0], row
        assert row["programs"] >= row["planned"], row
        assert row["fetches_ahead"] or kernel not in {"attend_tiles", "softmax_rows"}, row
        assert row["fuses"], f"a later Triton has another default: {row}"
        if model != "qwen2.5-0.5b, float32":
            limit = 72 if row["lanes"] == 64 else 8 if kernel == "finish_rows" else 0  # it is launched once per step
            assert row["spilled"] <= (0 if capability == HOPPER else limit), row
    assert kernels == dict.fromkeys(compiled["targets"], KERNELS)


def test_one_engine_compiles_few_variants(compiled: dict[str, Any]) -> None:
    """Numbers that differ from step to step make no other kernels, but for block heights and numbers of splits."""
    rows = [row for row in compiled["kernels"] if (row["model"], row["capability"]) == (FIRST, HOPPER)]
    counts = Counter(row["kernel"] for row in rows)
    heights = len({row["lanes"] for row in rows if row["kernel"] == "attend_tiles"})
    assert counts.pop("attend_tiles") <= 2 * heights
    assert counts.pop("combine_splits") <= MAX_NUM_SPLITS.bit_length() - 1
    assert counts.pop("add_rms_norm_rows") == 2
    assert counts.pop("rotate_heads") == 2, "forward and backward"
    assert counts.pop("softmax_rows") == counts.pop("softmax_gradient_rows") == 3, "with a temperature and entropies"
    assert set(counts.values()) == {1}


def test_a_step_launches_what_it_did(compiled: dict[str, Any]) -> None:
    per_layer = {name: count for name, count in compiled["step"].items() if STEP[name] >= 28}
    found = {name: count * 28 for name, count in per_layer.items() if name != "add_rms_norm_rows"}
    found["add_rms_norm_rows"] = (per_layer["add_rms_norm_rows"] - 1) * 28 + 1  # the last one is of no layer
    assert compiled["step"] | found == STEP
