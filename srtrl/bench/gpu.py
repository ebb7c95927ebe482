"""`srtrl bench gpu`: the CUDA path: whether it is correct (`pytest -m "gpu and not slow"`), then how fast it is.

Whole rollouts with random weights, as `srtrl bench rollout` measures them: a sample for each slot; the drafter has seen
the other half of each prompt's samples. Each run was checked to give exactly the recorded (or generated) tokens; runs
alternate, and `times as fast` is the median over pairs of runs, with the lowest and the highest.
"""

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import typer

from srtrl.bench import options
from srtrl.bench.rollout import compare_rollouts
from srtrl.bench.shapes import SHAPES
from srtrl.bench.tables import Row, publish, read_environment
from srtrl.bench.workload import load_workload
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Transformer
from srtrl.model.weights import init_model

SHAPE = "qwen2.5-1.5b"
SLOTS = (64, 256, 640)
"""Sequences at a time, a comparison for each."""
MAX_TOKENS = 512
"""Of a sample."""
REPEATS = 3
"""Rollouts of each drafter, after one to warm up."""


def command(
    *,
    trace: options.TraceFile = None,
    tokenizer: options.TokenizerFolder = None,
    json_file: options.JsonFile = None,
) -> None:
    """Check the CUDA path with the repository's tests, then measure the speed of its rollouts with and without drafts.

    Drafters are compared on generated rollouts, or on the recorded ones of --trace. Exit code 1: a test failed.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"srtrl bench gpu measures a CUDA device, and torch {torch.__version__} has none")
    device = torch.device("cuda", 0)
    environment = read_environment(device)
    checked = run_checks(Path(__file__).resolve().parents[2] / "tests")
    policy = init_model(config_from_hf(SHAPES[SHAPE], SHAPE), 0, torch.bfloat16, device)
    rows = compare_slots(policy, SLOTS, trace, tokenizer, MAX_TOKENS, prefill_chunk_tokens=8192)
    tables: dict[str, Sequence[Row]] = {"checks": [{"result": checked}], "rollouts": rows}
    publish(f"The CUDA path: {SHAPE}, {environment['processor']}", tables, __doc__, environment, json_file)
    if checked.startswith("FAILED"):
        raise typer.Exit(1)


def run_checks(tests: Path) -> str:
    """Run the repository's fast tests for a GPU; returns their summary, after FAILED where one failed."""
    if not tests.is_dir() or find_spec("pytest") is None:
        return "not run: this needs a checkout of the repository with its tests/, and pytest"
    program = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-q", "-p", "no:cacheprovider", str(tests)]
    result = subprocess.run(program, cwd=tests.parent, capture_output=True, text=True, check=False)
    print(result.stdout, result.stderr, file=sys.stderr, flush=True)
    summary = (result.stdout.strip().splitlines() or ["no output"])[-1]
    return summary if result.returncode == 0 else f"FAILED: {summary}"


def compare_slots(
    policy: Transformer,
    counts: tuple[int, ...],
    trace: Path | None,
    tokenizer: str | None,
    max_tokens: int,
    **changes: Any,
) -> list[Row]:
    """`none` and `srt` at each number of slots, a sample for each slot; `changes` are fields of `EngineOptions`."""
    whole = load_workload(trace, policy.config, tokenizer=tokenizer, max_tokens=max_tokens, history=0.5)
    rows: list[Row] = []
    for slots in counts:
        rows += compare_rollouts(policy, whole.first_samples(slots), ("none", "srt"), slots, REPEATS, **changes)
    return rows
