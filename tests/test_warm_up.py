"""No kernel is compiled after the first rollout has begun, however many samples are live."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from numba import njit

from srtrl.run.progress import reporting_compilation

CHECK = """
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numba.core.dispatcher import Dispatcher

from drafter_cases import OTHER, TEXT, completion, observe, propose, request, run, start
from engine_cases import decode, options, requests_for, tiny_policy
from srtrl.drafters.srt import Drafter
from srtrl.engine.draft_budget import StepCost
from srtrl.engine.engine import Engine
from srtrl.engine.warm_up import compile_kernels
from srtrl.features.run_ahead import RunAhead

torch.set_num_threads(1)

def compiled():
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("srtrl.")]
    kernels = {one for module in modules for one in vars(module).values() if isinstance(one, Dispatcher)}
    return {kernel.py_func.__qualname__: len(kernel.nopython_signatures) for kernel in kernels}

def check():
    assert compiled() == before, {name: count for name, count in compiled().items() if count != before.get(name)}

prompts = [(5,), (1, 2, 3, 4, 5, 6, 7, 8, 9), (3, 3, 3, 3)]
requests = [replace(one, sampling=replace(one.sampling, end_token_ids=())) for one in requests_for(prompts)]
filtered = [replace(one, sampling=replace(one.sampling, top_k=4)) for one in requests[:2]]
ahead = requests_for([(6,), (7, 8)], max_new_tokens=12, seed=1)
chosen, cost = options(draft_budget="auto", num_pages=60), StepCost(points=((1, 1.0), (2000, 1.0)))
policy = tiny_policy(getattr(torch, sys.argv[1]), vocab_size=12)
run_ahead = partial(RunAhead, max_slowdown=0.03)
engine = Engine(
    policy, chosen, drafter=Drafter(), cost=cost, compile_kernels=compile_kernels, run_ahead=run_ahead
)
engine.warm_up()
before = compiled()
assert sum(before.values()) >= 12, before
for several in (requests[:1], requests, requests, filtered):  # one live sample, then many
    assert len(decode(engine, several, run_ahead=ahead)) == len(several)
    engine.end_step(has_new_weights=True)
metrics = engine.take_metrics()
assert metrics["engine/acceptance_depth_1"] > 0.5 and metrics["engine/run_ahead_rows"] > 0, metrics
check()

drafter = Drafter()  # long texts, and what a rollout of a small policy does not do
drafter.learn_texts({("train", (1, 2)): {4: np.array(TEXT[:40] + OTHER[:5], np.int32)}})
drafter.end_step()
run(drafter, request(rng_key=4), TEXT, slot=3)
run(drafter, request((5, 6)), TEXT * 20)
drafter.learn([completion(request((5, 6)), TEXT * 20)])
start(drafter, {0: request((5, 6)), 1: request((5, 7))})
observe(drafter, {0: TEXT, 1: OTHER})
propose(drafter, [0, 1], [200, 3])
check()
"""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_rollout_compiles_nothing(dtype: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", CHECK, dtype]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 0, result.stderr


def test_kernels_are_counted_as_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, also for several types of arguments; functions that are not ours are not."""
    ours = njit(lambda x: x + 1)
    others = njit(lambda x: x + 2)
    second = njit(lambda x: ours(x) + others(x))
    monkeypatch.setitem(sys.modules, "srtrl.own", SimpleNamespace(ours=ours, second=second))
    seen: list[tuple[int, int]] = []
    with reporting_compilation(lambda *numbers: seen.append(numbers)):
        assert (second(1), second(1.5), ours(2)) == (5, 6.0, 3)
        first = list(seen)
        second(1)
    assert [number for number, _ in first] == [1, 2]
    assert seen == first
