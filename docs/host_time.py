"""The host's work per decode step, with a device whose steps cost nothing; needs no GPU, no weights, but Triton.

    python docs/host_time.py [--slots 64,256] [--drafters none,srt] [--trace FILE --tokenizer DIR] [--repeats 5]

The real engine with its CUDA runner, all stages; the device's step takes no time and the recorded (or generated) tokens
are taken in place of sampled ones. What the driver itself takes to queue copies and to launch a graph is not in it.
Half of each prompt's samples are decoded, two for each slot where there are as many; the drafter has seen the other
half. Drafters reckon with the samples' noise and get the most likely tokens of each place, as in training, though
neither is that of the recorded tokens: these get `CHANCES`. Medians of alternating runs, after one to warm up. The
stages are milliseconds of the host per decode step in which all slots decode (`wait`: what the drafter learns while a
device would compute). `times as fast` is about whole rollouts on a device whose steps take the time of `H200_CURVE` (by
which drafts are budgeted): of the device alone, and with the host's time.
"""

import argparse
import time
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from bench_rollout import (
    Row,
    Trace,
    TraceRunner,
    alternate,
    check_completions,
    load_prompts,
    make_engine,
    prepare,
    publish,
    share_out,
)
from h200 import H200_CURVE

from srtrl.cuda.runner import CudaRunner, PinnedCopy
from srtrl.engine.draft_budget import StepCost
from srtrl.engine.engine import Engine
from srtrl.engine.rows import StepInputs, StepSize
from srtrl.engine.runner import EngineOptions, Runner, SampledRows
from srtrl.engine.stats import STAGES
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.hf_config import config_from_hf
from srtrl.model.shapes import SHAPES
from srtrl.model.transformer import Transformer
from srtrl.run.interrupt import freeze_gc
from srtrl.types import TopTokens

SHAPE = "qwen2.5-1.5b"
"""Its vocabulary, context length and head counts; weights are not made."""
CHANCES = np.array([0.7, 0.1, 0.05, 0.03, 0.02, 0.01, 0.01, 0.005])
"""Of the recorded token of a place, and of others in its stead."""


class HostRunner(CudaRunner):
    """`CudaRunner` on the device `meta`: steps take no time, and their results are zeros, for `TraceRunner` to replace.

    What it does on the host is that of a real one, but for the driver's own time to queue copies and a graph.
    """

    def __init__(
        self, policy: Transformer, options: EngineOptions, max_sequence_tokens: int, row_counts: list[int]
    ) -> None:
        """The rows of each step are appended to `row_counts`."""
        super().__init__(policy, options, max_sequence_tokens)
        self._results = PinnedCopy(self._results.host.numel(), torch.device("cpu"))  # what can be copied back
        self._row_counts = row_counts
        self.compute = lambda step: None

    def inputs_for(self, size: StepSize) -> StepInputs:
        """See `Runner`."""
        self._row_counts.append(size.num_rows)
        return super().inputs_for(size)

    def time_step(self, num_rows: int, context_tokens: int, num_sequences: int) -> float:
        """See `Runner`."""
        return 0.0


class LikelyTokens(TraceRunner):
    """A `TraceRunner` that reports `CHANCES` of each recorded token and of seven others, which hang on it."""

    def wait(self, num_sampled: int) -> SampledRows:
        """See `Runner`."""
        self._sampled = super().wait(num_sampled)
        return self._sampled

    def top_tokens(self, rows: npt.NDArray[np.int64], num: int) -> TopTokens:
        """See `Runner`."""
        token_ids = self._sampled.token_ids[rows, None] + 7919 * np.arange(num, dtype=np.int32)
        logprobs = np.tile(np.log(CHANCES[:num]), (len(rows), 1))
        return TopTokens(token_ids=token_ids % SHAPES[SHAPE]["vocab_size"], logprobs=logprobs)


def decode(engine: Engine, row_counts: list[int], drafter: str, workload: Trace) -> dict[str, float]:
    """One rollout of the whole workload: what its full steps took of the host, and the seconds of all its steps.

    The stage `other` is what no stage has: queueing samples, the loop. The device's seconds are stated, not measured.
    """
    prepare(engine, drafter, workload)
    inner = engine.runner.runner if isinstance(engine.runner, TraceRunner) else engine.runner
    engine.runner = cast(Runner, LikelyTokens(inner, workload.responses))
    engine.drafter.knows_noise = True
    completions = []
    row_counts.clear()
    started = time.perf_counter()
    with engine.rollout("train"):
        for request in workload.requests:
            engine.add(request)
        while engine.scheduler.num_waiting or not engine.batch.num_free:
            completions += engine.step()
        ms_per_step = 1000 * (time.perf_counter() - started) / engine.stats.num_steps
        by_stage = dict(zip(STAGES, (1000 * engine.stats.seconds / engine.stats.num_steps).tolist(), strict=True))
        metrics = engine.stats.metrics()
        while engine.has_work:
            completions += engine.step()
    host = time.perf_counter() - started
    device = sum(map(engine.control.cost.seconds, row_counts))
    check_completions(completions, workload)
    return {
        "host_ms_per_step": ms_per_step,
        **by_stage,
        "other": ms_per_step - sum(by_stage.values()),
        "tokens_per_step": metrics["engine/tokens_per_decode_step"],
        "verified_per_step": metrics["engine/verified_per_decode_step"],
        "on_device": device,
        "with_host": device + host,
    }


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="64,256", help="sequences decoded at a time")
    parser.add_argument("--drafters", default="none,srt", help="the first is the baseline")
    parser.add_argument("--trace", type=Path, help="recorded rollouts, as of docs/bench_rollout.py")
    parser.add_argument("--tokenizer", help="of their texts")
    parser.add_argument("--max-tokens", type=int, default=512, help="maximum number of tokens of each sample")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    set_cpu_threads(1)
    policy = Transformer(config_from_hf(SHAPES[SHAPE], SHAPE), torch.bfloat16, torch.device("meta"))
    prompts = load_prompts(
        options.trace, policy.config.vocab_size, tokenizer=options.tokenizer, max_tokens=options.max_tokens
    )
    ends = list(accumulate(len(prompt.split(0.5)[1].samples) for prompt in prompts))
    cost = StepCost(points=H200_CURVE)
    rows: list[Row] = []
    for num_slots in map(int, options.slots.split(",")):
        if ends[-1] < num_slots:
            parser.error(f"--slots: {num_slots}, but there are {ends[-1]} samples to decode")
        workload = share_out(prompts[: 1 + sum(end < 2 * num_slots for end in ends)], history=0.5)
        candidates = {}
        for name in options.drafters.split(","):
            row_counts: list[int] = []
            runner = HostRunner(policy, EngineOptions(slots=num_slots), workload.max_sequence_tokens, row_counts)
            engine = make_engine(policy, num_slots, workload.max_sequence_tokens, runner=runner, cost=cost)
            candidates[name] = partial(decode, engine, row_counts, name, workload)
        with freeze_gc():
            runs = alternate(candidates, options.repeats)
        rows += rows_of(runs, num_slots)
    source = f"{options.trace.name}, samples truncated to {options.max_tokens} tokens" if options.trace else "generated"
    about = (__doc__ or "").partition("[--repeats 5]")[2]
    title = f"Host work per decode step: {source}, 1 thread"
    publish(title, rows, about, torch.device("cpu"), as_json=options.json)


def rows_of(runs: dict[str, list[dict[str, float]]], num_slots: int) -> list[dict[str, Any]]:
    """A row for each drafter: medians, and rollouts in relation to those of the first drafter."""
    rows: list[dict[str, Any]] = []
    baseline: dict[str, float] = {}
    for name, of_name in runs.items():
        medians = {figure: median(run[figure] for run in of_name) for figure in of_name[0]}
        baseline = baseline or dict(medians)
        ratios = {f"times_as_fast_{part}": baseline[part] / medians.pop(part) for part in ("on_device", "with_host")}
        rows.append({"slots": num_slots, "drafter": name, **medians, **ratios, "runs": of_name})
    return rows


if __name__ == "__main__":
    main()
