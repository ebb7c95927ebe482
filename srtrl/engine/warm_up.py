"""All Numba kernels of a decode step are called once before the first rollout, so that none is compiled in it."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
from numba.core import event
from numba.core.registry import CPUDispatcher

from srtrl.drafters.draft_tree import ROOT, DraftTrees, check_trees
from srtrl.engine.batch import Batch
from srtrl.engine.draft_budget import MAX_ROWS, Calibration, choose_nodes
from srtrl.engine.page_pool import PagePool
from srtrl.engine.rows import StepInputs, StepShape, fill_inputs
from srtrl.engine.runner import SampledRows
from srtrl.engine.verify import plan_moves, verify


def warm_up_kernels() -> None:
    """Call every kernel of a step once, on arrays of the types that it will get: they are compiled or loaded."""
    batch, slots = Batch(1, 8, PagePool(1, 4), 1), np.zeros(1, np.int64)
    batch.num_tokens[:], batch.num_prompt_tokens[:], batch.max_tokens[:] = 2, 1, 6
    tree = np.zeros(1, np.int32)
    trees = DraftTrees(
        token_ids=tree, parents=tree + ROOT, scores=np.ones(1, np.float32), offsets=np.array([0, 1], np.int64)
    )
    shape = StepShape(num_rows=8, num_sampled=8, num_words=1, num_tiles=8, table_width=2, num_tables=1)
    inputs = StepInputs.of(np.zeros(shape.num_elements, np.int32), shape)
    fill_inputs(inputs, batch.arrays, slots, trees, [], 4)
    check_trees(trees, np.ones(1, np.int64), 1, "the warm-up")
    choose_nodes(trees, Calibration(), np.ones(MAX_ROWS + 1), num_other_rows=0, draft_seconds=0.0)
    sampled = SampledRows(token_ids=np.zeros(2, np.int32), logprobs=np.zeros(2, np.float32))
    plan_moves(batch, verify(batch, slots, trees, sampled), 4)


COMPILE_MESSAGE = "compiling CPU kernels: once for this installation, half a minute to two minutes"


def reporting_compilation(on_compile: Callable[[int, int], None]) -> AbstractContextManager[None]:
    """Call `on_compile` with the number of srtrl's kernels compiled so far, and of all, whenever Numba begins another.

    Not at all where Numba's cache on the disk has all of them.
    """
    installed: AbstractContextManager[None] = event.install_listener("numba:compile", _CompileListener(on_compile))
    return installed


class _CompileListener(event.Listener):
    def __init__(self, on_compile: Callable[[int, int], None]) -> None:
        self._on_compile = on_compile
        modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("srtrl.")]
        self._kernels = {value for names in modules for value in names.values() if isinstance(value, CPUDispatcher)}
        self._begun: set[CPUDispatcher] = set()

    def on_start(self, event: event.Event) -> None:
        """A function is to be compiled: one of ours, or one of Numba's own that ours need."""
        kernel = event.data["dispatcher"]
        if kernel in self._kernels and kernel not in self._begun:
            self._begun.add(kernel)
            self._on_compile(len(self._begun), len(self._kernels))

    def on_end(self, event: event.Event) -> None:
        """Nothing to do."""
