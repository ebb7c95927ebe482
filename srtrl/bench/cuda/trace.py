"""`none` against `srt` on a trace, at a real model's shape (DESIGN: "Trace-driven benchmark")."""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from srtrl.bench.comparison import Comparison, compare
from srtrl.bench.cuda.plan import GpuBench
from srtrl.bench.cuda.report import SectionReport
from srtrl.bench.drafter_tables import mean_metric, ratios_of, speed_grid, time_grid
from srtrl.bench.drafters_setup import drafter_maker
from srtrl.bench.run_plan import RunPlan
from srtrl.bench.tables import comparison_values
from srtrl.bench.trace_run import TracedDecoder
from srtrl.bench.trace_workload import Trace, share_out
from srtrl.bench.workload import Workload
from srtrl.rollout.recorded import RecordedPrompt, load_recorded_tokenizer, read_recorded

NONE, SRT = "none", "srt"
HISTORY = 0.5
GOALS = {64: 2.5, 256: 1.5, 640: 1.0}
"""Sequences -> least ratio of `srt` to `none`, with history."""
NEVER_BELOW = 0.98


def measure_trace_decoding(bench: GpuBench, report: SectionReport) -> None:
    """The section: as many sequences as slots, from the first token to the end of the longest."""
    if bench.trace is None:
        report.skip("no trace (--trace FILE, and --tokenizer DIR where it holds texts)")
        return
    sizes = bench.sizes
    prompts = read_prompts(bench)
    cases = [(count, HISTORY) for count in sizes.trace_sequences]
    cases.insert(2, (sizes.no_history_sequences, 0.0))
    comparisons: list[Comparison] = []
    decoders: list[TracedDecoder] = []
    for index, (num_sequences, history) in enumerate(cases):
        label = f"{num_sequences} sequences, {'half as history' if history else 'no history'}"
        if index and bench.time_left() < 0:
            report.add(label, "not run: time")
            continue
        trace, workload = trace_workload(prompts, num_sequences, history)
        if not decoders:
            longest = max(trace_workload(prompts, count, share)[1].max_sequence_tokens for count, share in cases)
            options = bench.engine_options(slots=max(sizes.trace_sequences), max_sequence_tokens=longest)
            decoders = [
                TracedDecoder(
                    name, bench.policy, options, make_drafter=drafter_maker(name), trace=trace, keeps_engine=True
                )
                for name in (NONE, SRT)
            ]
        for decoder in decoders:
            decoder.trace = trace
        until = time.perf_counter() + bench.time_left() / (len(cases) - index)

        def tell(text: str, label: str = label) -> None:
            bench.tell(f"{label}: {text}")

        plan = RunPlan(repeats=sizes.most_rounds, until=until)
        comparison = compare(decoders, workload, plan=plan, on_run=tell)
        comparisons.append(comparison)
        _add_row(bench, report, label, comparison, history)
        ordered = sorted(comparisons, key=lambda one: (one.labels["history"], one.num_sequences))
        caption = "Drafters on the trace"
        report.grids[:] = [speed_grid(ordered, caption), replace(time_grid(ordered), caption=f"{caption}: the time")]
    _describe(bench, report, prompts)


def read_prompts(bench: GpuBench) -> list[RecordedPrompt]:
    """The trace's prompts; in a smoke test their tokens are folded into the tiny vocabulary.

    Raises:
        ValueError: The file cannot be read, or has too few samples of each prompt.
    """
    assert bench.trace is not None
    tokenizer = load_recorded_tokenizer(bench.tokenizer) if bench.tokenizer is not None else None
    recording = read_recorded(bench.trace, tokenizer=tokenizer, max_tokens=bench.sizes.trace_tokens or sys.maxsize)
    prompts = [prompt for prompt in recording.prompts() if len(prompt.samples) >= 2]
    if not prompts:
        raise ValueError(f"--trace: {bench.trace} has no prompt of two samples or more, one to know and one to decode")
    vocab_size = bench.policy.config.vocab_size
    if bench.smoke:
        return [
            replace(
                prompt,
                prompt_token_ids=tuple(token % vocab_size for token in prompt.prompt_token_ids),
                samples=[sample % vocab_size for sample in prompt.samples],
            )
            for prompt in prompts
        ]
    largest = max(max(*prompt.prompt_token_ids, *(int(s.max()) for s in prompt.samples)) for prompt in prompts)
    if largest >= vocab_size:
        raise ValueError(
            f"--trace: token id {largest} is not in the vocabulary of {vocab_size}; --tokenizer must be one of Qwen2.5"
        )
    return prompts


def trace_workload(prompts: Sequence[RecordedPrompt], num_sequences: int, history: float) -> tuple[Trace, Workload]:
    """The first so many sequences; where the file has too few, prompts come again as others (see `as_another`)."""
    each = min(len(prompt.samples) - round(history * len(prompt.samples)) for prompt in prompts)
    num_copies = math.ceil(num_sequences / (len(prompts) * each))
    many = [as_another(prompt, copy) for copy in range(num_copies) for prompt in prompts]
    trace = share_out(many[: math.ceil(num_sequences / each)], history=history, seed=0)
    requests = trace.requests[:num_sequences]
    assert len(requests) == num_sequences
    workload = Workload(
        lengths="recorded",
        requests=requests,
        labels={"history": f"{history:g}", "sequences": str(num_sequences)},
    )
    return trace, workload


def as_another(prompt: RecordedPrompt, copy: int) -> RecordedPrompt:
    """The prompt with `copy` more first tokens: another prompt for drafter and pages, with rollouts of its own."""
    extra = prompt.prompt_token_ids[:1] * copy
    return replace(
        prompt,
        prompt_id=f"{prompt.prompt_id}#{copy}" if copy else prompt.prompt_id,
        prompt_token_ids=(*extra, *prompt.prompt_token_ids),
    )


def _add_row(bench: GpuBench, report: SectionReport, label: str, comparison: Comparison, history: float) -> None:
    ratio = comparison.ratio(SRT, to=NONE)
    runs = comparison.metrics[SRT]
    goal = GOALS.get(comparison.num_sequences) if history else None
    figure = (
        f"{ratio}; {mean_metric(runs, 'engine/tokens_per_decode_step'):.2f} tokens, "
        f"{mean_metric(runs, 'engine/verified_per_decode_step'):.2f} verified a step"
    )
    least = NEVER_BELOW if goal is None else goal
    report.add(f"{label}: {SRT} to {NONE}", figure, f"at least {least}x", bench.judge(ratio.value >= least))
    report.values.setdefault("comparisons", []).append(comparison_values(comparison, ratios_of(comparison)))


def _describe(bench: GpuBench, report: SectionReport, prompts: Sequence[RecordedPrompt]) -> None:
    assert bench.trace is not None
    lengths = sorted(len(sample) for prompt in prompts for sample in prompt.samples)
    report.notes.append(
        f"Trace-driven: the engine samples as ever but takes the recorded token of each position, from "
        f"`{bench.trace.name}` ({len(prompts)} prompts; samples of {lengths[len(lengths) // 2]} tokens in the median, "
        f"{lengths[-1]} at most, cut at {bench.sizes.trace_tokens}). Of each prompt the drafter has seen half of the "
        "samples, as an epoch that is over, and the others are decoded; where there are fewer samples than sequences, "
        "prompts come again, made different by further first tokens, with their own history. Every sequence has a slot "
        "from the start, and a run ends with the longest. Not deterministic; each run was checked to give exactly the "
        "recorded tokens. Whole runs in turns, a round to warm up; the ratio is the geometric mean over pairs of "
        "neighbouring runs, with a 95% interval."
    )
