"""Drafters on recorded rollouts: the engine computes at a real model's shape and is made to sample what was recorded.

Time does not depend on the values of the weights and acceptance is that of the recorded text, so the speed-up is
measured without the policy's weights (DESIGN: "Trace-driven benchmark").
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from srtrl.bench.comparison import compare_all, step_by_step
from srtrl.bench.contender import OurDecoder
from srtrl.bench.drafter_tables import ratios_of, speed_grid, time_grid
from srtrl.bench.drafters_setup import describe_drafters, describe_model, drafter_makers, drafter_options
from srtrl.bench.environment import Environment
from srtrl.bench.rollout_options import RolloutBench
from srtrl.bench.tables import Document, comparison_values
from srtrl.bench.trace_workload import Trace, feed_history, share_out, trace_workloads
from srtrl.bench.workload import Workload
from srtrl.drafters.base import DrafterBase
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model, read_config
from srtrl.rollout.recorded import Recording, load_recorded_tokenizer, read_recorded
from srtrl.types import Completion


class TracedDecoder(OurDecoder):
    """Our engine with a drafter, made to sample a trace. Each run has a new drafter, so that runs are equal."""

    def __init__(
        self,
        name: str,
        model: Transformer,
        options: EngineOptions,
        *,
        make_drafter: Callable[[], DrafterBase],
        trace: Trace,
        keeps_engine: bool = False,
    ) -> None:
        """Decode with `model` under `options` what `trace` says; for the others see `OurDecoder`."""
        super().__init__(name, model, options, keeps_engine=keeps_engine)
        self._make_drafter = make_drafter
        self.trace = trace
        """The requests of the next workload must be among its own."""

    def prepare(self, engine: Engine, workload: Workload) -> None:
        """A new drafter that has seen the history and nothing else."""
        engine.speculation.use(self._make_drafter())
        feed_history(engine.drafter, self.trace, workload.requests)
        engine.trace = {request.rng_key: self.trace.responses[request.rng_key] for request in workload.requests}

    def check(self, completions: Sequence[Completion]) -> None:
        """Assert that each completion is the recorded one, token for token."""
        for completion in completions:
            expected = self.trace.responses[completion.request.rng_key].tolist()
            assert completion.token_ids == expected, f"{self.name} did not sample the trace"


def measure_trace(
    bench: RolloutBench, folder: Path, dtype: torch.dtype, device: torch.device, environment: Environment
) -> Document:
    """Drafters on the recorded rollouts of `--trace`, at the shape of the model in `folder`.

    Raises:
        ValueError: The trace cannot be read, does not fit the model, or a drafter is unknown.
    """
    makers = drafter_makers(bench)
    options, curve = drafter_options(bench)
    recording = read_trace(bench)
    num_prompts = None if bench.num_prompts is None else max(bench.num_prompts)
    trace = share_out(recording.prompts()[:num_prompts], history=bench.history, seed=bench.seed)
    workloads = trace_workloads(bench, trace, read_config(folder))
    policy = load_model(folder, dtype=dtype, device=device)
    contenders = [TracedDecoder(name, policy, options, make_drafter=make, trace=trace) for name, make in makers.items()]
    comparisons = compare_all(contenders, workloads, bench.plan, step_by_step)
    slots = ", ".join(dict.fromkeys(comparison.labels["slots"] for comparison in comparisons))
    history = f"{bench.history:g} as history" if bench.history else "no history"
    priced = f", priced as {bench.price_as}" if bench.price_as else ""
    return Document(
        title=f"Drafters on a trace: {recording.path.name}, {history}, {bench.model or bench.shape}, {bench.dtype}, "
        f"{device.type}, {environment.threads}, {slots} slots{priced}",
        environment=environment,
        notes=(
            describe_model(bench, policy),
            describe_trace(bench, recording, trace),
            *describe_drafters(bench, curve, comparisons),
        ),
        grids=(speed_grid(comparisons), time_grid(comparisons)),
        values={
            "baseline": bench.drafters[0],
            "comparisons": [comparison_values(comparison, ratios_of(comparison)) for comparison in comparisons],
        },
    )


def read_trace(bench: RolloutBench) -> Recording:
    """The recorded rollouts of `--trace`, cut to `--max-tokens`.

    Raises:
        ValueError: The file cannot be read, has texts and no tokenizer was given, or has too few prompts.
    """
    assert bench.trace is not None
    try:
        tokenizer = load_recorded_tokenizer(bench.tokenizer) if bench.tokenizer is not None else None
    except ValueError as error:
        raise ValueError(f"--tokenizer: {error}") from error
    recording = read_recorded(bench.trace, tokenizer=tokenizer, max_tokens=bench.max_tokens or sys.maxsize)
    num_prompts = len(recording.prompts())
    if bench.num_prompts is not None and max(bench.num_prompts) > num_prompts:
        raise ValueError(f"--prompts-used: {max(bench.num_prompts)}, but {bench.trace} has {num_prompts} prompts")
    return recording


def describe_trace(bench: RolloutBench, recording: Recording, trace: Trace) -> str:
    """What is decoded, in a few sentences."""
    cut = f", each sample cut to its first {bench.max_tokens} tokens" if bench.max_tokens else ""
    text = " The tokens were made from its text." if recording.is_retokenised else ""
    note = f" What it is: {bench.trace_note.rstrip('.')}." if bench.trace_note else ""
    num_earlier = sum(len(samples) for samples in trace.history.values())
    lengths = sorted(len(response) for response in trace.responses.values())
    seen = (
        f"The drafter has seen {num_earlier} rollouts of the prompts before, as an epoch that is over; feeding them is "
        "not timed."
        if num_earlier
        else "The drafter has seen nothing before."
    )
    most = "" if bench.num_prompts is None else "the first "
    fewer = " (fewer where there are fewer sequences)" if bench.num_prompts and len(bench.num_prompts) > 1 else ""
    return (
        f"Trace-driven: the engine samples as ever but takes the recorded token of each position, from {most}"
        f"{len(trace.history)} prompts of `{recording.path.name}`{fewer}{cut}. Acceptance is that of the recorded "
        f"rollouts, and the values of the weights do not matter.{text}{note} {seen} Decoded are {len(lengths)} samples "
        f"of {lengths[len(lengths) // 2]} tokens in the median and {lengths[-1]} at most; each run was checked to give "
        "exactly these tokens."
    )
