"""The host's work per decode step, with a device whose steps cost nothing; needs no GPU, no weights, but Triton.

    python docs/host_time.py [--slots 64,256] [--drafters none,srt] [--trace FILE --tokenizer DIR] [--busy]

The real engine with its CUDA runner, all stages; the device's step takes no time and the recorded (or generated) tokens
are taken in place of sampled ones. What the driver itself takes to queue copies and to launch a graph is not in it.
Half of each prompt's samples are decoded, two for each slot where there are as many; the drafter has seen the other
half. Drafters reckon with the samples' noise and get the most likely tokens of each place, as in training, though
neither is that of the recorded tokens: these get `CHANCES`. Drafts are budgeted by `H200_CURVE`: so each run does the
same work, step by step, and of each step and stage the minimum of alternating runs counts, after one to warm up.

The stages are milliseconds of the host per decode step in which all slots decode: `serial` is the sum of those between
a step's results and the next launch, `hidden` what is learned and counted while a device computes. `times as fast` is
about whole rollouts on a device whose steps take the time of `H200_CURVE` for the rows that are launched, padding
included: of the device alone, and with the host's time, where a step takes the serial part and the longer of the
device's time and the hidden part. `--busy`: means in place of minima, beside 8 threads of tools and a coroutine, as
environments and judges run.
"""

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

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
from srtrl.cuda.shapes import padded_rows
from srtrl.drafters.base import DrafterBase
from srtrl.engine.draft_budget import MAX_ROWS, StepCost
from srtrl.engine.runner import EngineOptions, Runner, SampledRows
from srtrl.engine.stats import STAGES
from srtrl.engine.step_inputs import StepInputs, StepSize
from srtrl.features.draft_head import DraftHead
from srtrl.features.draft_head_cuda import CudaGuesses
from srtrl.features.head_drafter import HeadDrafter
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.hf_config import config_from_hf
from srtrl.model.published_shapes import SHAPES
from srtrl.model.transformer import Transformer
from srtrl.run.interrupt import freeze_gc
from srtrl.types import TopTokens

SHAPE = "qwen2.5-1.5b"
"""Its vocabulary, context length and head counts; weights are not made."""
CHANCES = np.array([0.7, 0.1, 0.05, 0.03, 0.02, 0.01, 0.01, 0.005])
"""Probabilities of the recorded token of a position, and of others in its stead."""

HEAD_VOCABULARY, HEAD_TOKENS = 16_384, 3
"""Tokens that the head of the drafter `srt+head` lists, and those that it guesses in a row. Its time on a device is
not counted."""
COLUMNS = [*(stage for stage in STAGES if stage != "wait"), "other"]
"""Stages of the serial part."""


class Run(NamedTuple):
    """Times of a rollout, step by step."""

    seconds: npt.NDArray[np.float64]
    """[steps, stages]: those of `COLUMNS`, then the hidden part."""
    device: npt.NDArray[np.float64]
    """[steps], stated, not measured."""
    captured: float
    """Share of the steps that a device would replay."""
    num_full: int
    """The first steps, in which all slots decode."""
    metrics: dict[str, float]
    """Metrics of these steps."""


class HostRunner(CudaRunner):
    """`CudaRunner` on the device `meta`: steps take no time, and their results are zeros, for `TraceRunner` to replace.

    What it does on the host is that of a real one, but for the driver's own time to queue copies and a graph.
    """

    def __init__(self, policy: Transformer, options: EngineOptions, max_sequence_tokens: int) -> None:
        """No step is launched yet."""
        super().__init__(policy, options, max_sequence_tokens)
        self._results = PinnedCopy(self._results.host.numel(), torch.device("cpu"))  # what can be copied back
        self._known = set(self.planner.graph_shapes())
        self.launched: list[tuple[int, bool]] = []
        """Rows of each step, with padding, and whether it is a captured one on a device."""
        self.compute = lambda step: None

    def inputs_for(self, size: StepSize) -> StepInputs:
        """See `Runner`."""
        inputs = super().inputs_for(size)
        assert self._step is not None
        shape = self._step.shape
        self.launched.append((shape.step.num_rows, shape in self._known))
        return inputs

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


class HostGuesses(CudaGuesses):
    """`CudaGuesses` that take no time on the device: of each row token 0, by a margin of 0."""

    def __init__(self, head: DraftHead, runner: CudaRunner, *, k: int, slots: int) -> None:
        """See `CudaGuesses`."""
        super().__init__(head, runner, k=k, slots=slots)
        self._guesses = PinnedCopy(self._guesses.host.numel(), torch.device("cpu"))

    def _compute(self, num: int) -> None:
        """Nothing is launched."""


class Timed:
    """A method of an object, and the seconds of its calls since they were last taken."""

    def __init__(self, owner: Any, name: str) -> None:
        self._function, self._seconds = getattr(owner, name), 0.0
        setattr(owner, name, self)

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        started = time.perf_counter()
        try:
            return self._function(*args)
        finally:
            self._seconds += time.perf_counter() - started

    def take(self) -> float:
        """Their seconds."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def decode(policy: Transformer, num_slots: int, drafter: str, workload: Trace) -> Run:
    """One rollout of the whole workload by a new engine, timed step by step."""
    host = HostRunner(policy, EngineOptions(slots=num_slots), workload.max_sequence_tokens)
    priced = StepCost(points=H200_CURVE)
    cost = StepCost(points=[(rows, priced.seconds(padded_rows(rows))) for rows in range(1, MAX_ROWS + 1)])
    engine = make_engine(policy, num_slots, workload.max_sequence_tokens, runner=host, cost=cost)
    name, _, head_name = drafter.partition("+")
    prepare(engine, name, workload)
    if head_name:
        head = DraftHead(policy, policy.dtype, vocabulary=HEAD_VOCABULARY, seed=0)
        with_head = HeadDrafter(engine.drafter, head, host, k=HEAD_TOKENS, slots=num_slots)
        with_head._guesses = HostGuesses(head, host, k=HEAD_TOKENS, slots=num_slots)
        engine.drafter = cast(DrafterBase, with_head)
    runner = LikelyTokens(host, workload.responses)
    engine.runner = cast(Runner, runner)
    engine.drafter.knows_noise = True
    hidden = [Timed(engine.drafter, "learn_deferred"), Timed(engine.drafter, "foresee"), Timed(engine, "_record_last")]
    looked_up = Timed(runner, "top_tokens")
    completions, steps, num_full, metrics = [], list[list[float]](), 0, dict[str, float]()
    engine.warm_up()
    host.launched.clear()
    with engine.rollout("train"):
        for request in workload.requests:
            engine.add(request)
        while engine.has_work:
            if not num_full and not engine.scheduler.num_waiting and engine.batch.num_free:
                num_full, metrics = len(steps), engine.stats.metrics()
            started = time.perf_counter()
            completions += engine.step()
            seconds, stages = time.perf_counter() - started, {**dict.fromkeys(STAGES, 0.0), **engine.clock.seconds}
            by_stage = [stages[stage] for stage in COLUMNS[:-1]]
            by_stage[COLUMNS.index("observe")] -= looked_up.take()  # on a device they come with the sampled tokens
            steps.append([*by_stage, seconds - sum(stages.values()), sum(part.take() for part in hidden)])
    check_completions(completions, workload)
    device = [priced.seconds(num_rows) for num_rows, _ in host.launched]
    captured = np.mean([is_captured for _, is_captured in host.launched])
    return Run(np.array(steps), np.array(device), float(captured), num_full, metrics)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="64,256", help="sequences decoded at a time")
    parser.add_argument("--drafters", default="none,srt", help="the first is the baseline; srt+head: with a draft head")
    parser.add_argument("--trace", type=Path, help="recorded rollouts, as of docs/bench_rollout.py")
    parser.add_argument("--tokenizer", help="of their texts")
    parser.add_argument("--max-tokens", type=int, default=512, help="maximum number of tokens of each sample")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="with threads of tools and a coroutine beside it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    set_cpu_threads(1)
    policy = Transformer(config_from_hf(SHAPES[SHAPE], SHAPE), torch.bfloat16, torch.device("meta"))
    prompts = load_prompts(
        options.trace, policy.config.vocab_size, tokenizer=options.tokenizer, max_tokens=options.max_tokens
    )
    ends = list(accumulate(len(prompt.split(0.5)[1].samples) for prompt in prompts))
    rows: list[Row] = []
    for num_slots in map(int, options.slots.split(",")):
        if ends[-1] < num_slots:
            parser.error(f"--slots: {num_slots}, but there are {ends[-1]} samples to decode")
        workload = share_out(prompts[: 1 + sum(end < 2 * num_slots for end in ends)], history=0.5)
        names = options.drafters.split(",")
        candidates = {name: partial(decode, policy, num_slots, name, workload) for name in names}
        with freeze_gc(), other_threads(options.busy):
            runs = alternate(candidates, options.repeats)
        rows += rows_of(runs, num_slots, is_busy=options.busy)
    source = f"{options.trace.name}, samples truncated to {options.max_tokens} tokens" if options.trace else "generated"
    about = (__doc__ or "").partition("[--busy]")[2]
    title = f"Host work per decode step: {source}, 1 thread"
    publish(title, rows, about, torch.device("cpu"), as_json=options.json)


def rows_of(runs: dict[str, list[Run]], num_slots: int, *, is_busy: bool) -> list[dict[str, Any]]:
    """A row for each drafter: minima (or means) of its runs, and rollouts in relation to those of the first drafter."""
    rows: list[dict[str, Any]] = []
    whole: dict[str, npt.NDArray[np.float64]] = {}
    for name, of_name in runs.items():
        first = of_name[0]
        assert all(np.array_equal(run.device, first.device) for run in of_name), "runs did not do the same work"
        seconds = (np.mean if is_busy else np.min)([run.seconds for run in of_name], axis=0)
        serial, hidden = seconds[:, :-1].sum(1), seconds[:, -1]
        full = slice(first.num_full)
        with_host = serial + np.maximum(first.device, hidden)
        whole[name] = np.array([first.device.sum(), with_host.sum()])
        ratios = whole[next(iter(whole))] / whole[name]
        rows.append(
            {
                "slots": num_slots,
                "drafter": name,
                "serial_ms_per_step": round(1000 * serial[full].mean(), 3),
                "hidden_ms_per_step": round(1000 * hidden[full].mean(), 3),
                **dict(zip(COLUMNS, (1000 * seconds[full, :-1].mean(0)).round(3).tolist(), strict=True)),
                "tokens_per_step": first.metrics["engine/tokens_per_decode_step"],
                "verified_per_step": first.metrics["engine/verified_per_decode_step"],
                "replayed_share": first.captured,
                "times_as_fast_on_device": float(ratios[0]),
                "times_as_fast_with_host": float(ratios[1]),
            }
        )
    return rows


@contextmanager
def other_threads(is_busy: bool) -> Iterator[None]:
    """Inside it 8 threads and a coroutine work as tools and judges do: 1 ms of Python each 20 ms."""
    is_over = threading.Event()

    def work_a_while() -> None:
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            json.loads(json.dumps(list(range(100))))

    def tool() -> None:
        while not is_over.wait(0.02):
            work_a_while()

    async def judge() -> None:
        while not is_over.is_set():
            await asyncio.sleep(0.02)
            work_a_while()

    targets = [*[tool] * 8, lambda: asyncio.run(judge())] if is_busy else []
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
