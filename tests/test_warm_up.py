"""No kernel is compiled after the first rollout has begun, however many samples are live."""

import subprocess
import sys
from pathlib import Path

CHECK = """
import importlib, pkgutil
from dataclasses import replace

import numpy as np
import torch
from numba.core.dispatcher import Dispatcher

import srtrl.engine
from engine_cases import options, requests_for, tiny_policy
from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_tree import DraftTree, DraftTrees
from srtrl.engine.engine import Engine

torch.set_num_threads(1)
names = [found.name for found in pkgutil.iter_modules(srtrl.engine.__path__)]
names = ["srtrl.engine." + name for name in names if "triton" not in name and "cuda" not in name]
names += ["srtrl.model.paged_attention", "srtrl.drafters.draft_tree"]
modules = [importlib.import_module(name) for name in names]

def compiled():
    kernels = {one for module in modules for one in vars(module).values() if isinstance(one, Dispatcher)}
    return {kernel.py_func.__qualname__: len(kernel.nopython_signatures) for kernel in kernels}

class EveryToken(DrafterBase):
    uses_run_aheads = True

    def propose(self, slots, max_nodes):
        tokens = np.arange(12, dtype=np.int32)
        tree = DraftTree(token_ids=tokens, parents=tokens * 0 - 1, scores=np.full(12, 0.5, np.float32))
        return DraftTrees.of(tree.first(most) for most in max_nodes)

requests = requests_for([(5,), (1, 2, 3, 4, 5, 6, 7, 8, 9), (3, 3, 3, 3)])
ahead = [replace(one, is_run_ahead=True) for one in requests_for([(6,), (7, 8)], seed=1)]
requests = [replace(one, sampling=replace(one.sampling, end_token_ids=())) for one in requests]
filtered = [replace(one, sampling=replace(one.sampling, top_k=4)) for one in requests[:2]]
chosen = options(draft_budget="auto", cost_points=((1, 1.0), (2000, 1.0)), num_pages=60)
for dtype in (torch.float32, torch.bfloat16):
    engine = Engine(tiny_policy(dtype, vocab_size=12), chosen, drafter=EveryToken())
    engine.begin_rollout("train")
    before = compiled()
    assert sum(before.values()) >= 8, before
    for several in (requests[:1], requests, requests[-1:], filtered):  # one live sample, then many
        assert len(list(engine.generate(several, run_ahead=ahead))) == len(several)
        engine.on_policy_update()
    metrics = engine.take_metrics()
    assert metrics["engine/accepted_per_draft"] > 0.5 and metrics["engine/run_ahead_rows"] > 0, metrics
    assert compiled() == before, {name: count for name, count in compiled().items() if count != before.get(name)}
"""


def test_a_rollout_compiles_nothing() -> None:
    folder = Path(__file__).parent
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder.parent)!r})\n{CHECK}"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
