"""Our decoder without drafts against `transformers`: `generate`, and its continuous batching."""

import statistics
import time
from dataclasses import replace

from srtrl.bench.comparison import Comparison, compare
from srtrl.bench.contender import Contender, OurDecoder
from srtrl.bench.cuda.plan import GpuBench
from srtrl.bench.cuda.report import SectionReport
from srtrl.bench.peer_continuous import NAME as CONTINUOUS
from srtrl.bench.peer_continuous import ContinuousBatching, NotAvailableError
from srtrl.bench.peer_hf import HuggingFaceGenerate
from srtrl.bench.run_plan import RunPlan
from srtrl.bench.tables import comparison_values, peer_grid
from srtrl.bench.workload import Lengths, Workload, draw_lengths, make_workload, random_prompts

OURS = "srtrl"
GOALS = {HuggingFaceGenerate.name: 8.0, CONTINUOUS: 1.5}
CACHE: dict[str, float] = {"max_memory_percent": 0.25}
"""Of continuous batching: a share of the free memory."""
SMALL_CACHE: dict[str, float] = {"num_blocks": 16, "max_batch_tokens": 64}


def measure_peers(bench: GpuBench, report: SectionReport) -> None:
    """The section: sequences of equal length, which the goals are for, then long-tailed ones as time allows."""
    sizes = bench.sizes
    longest = max(sizes.peer_prompt_tokens) + sizes.peer_tokens
    options = bench.engine_options(slots=sizes.peer_sequences, max_sequence_tokens=longest)
    dtype, device = sizes.dtype, bench.device
    ours = OurDecoder(OURS, bench.policy, options, keeps_engine=True)
    contenders: list[Contender] = [ours, HuggingFaceGenerate(bench.policy_folder, dtype=dtype, device=device)]
    continuous: ContinuousBatching | None = None
    comparisons: list[Comparison] = []
    kinds: tuple[Lengths, ...] = ("equal", "long-tailed")
    workloads = {lengths: peer_workload(bench, lengths) for lengths in kinds}
    for workload in workloads.values():
        ours.run(workload)  # captures its graphs, before continuous batching has a thread that uses the device
    try:
        continuous = ContinuousBatching(
            bench.policy_folder, dtype=dtype, device=device, **(SMALL_CACHE if bench.smoke else CACHE)
        )
        bench.tell("continuous batching of transformers is ready")
    except NotAvailableError as error:
        report.add(CONTINUOUS, f"not available: {error}")
    try:
        for index, lengths in enumerate(kinds):
            if index and bench.time_left() < 0:
                report.add(f"{lengths} lengths", "not run: time")
                continue
            workload = workloads[lengths]
            share = bench.time_left() / (len(kinds) - index)
            until = time.perf_counter() + share
            all_of_them = [*contenders, *([continuous] if continuous else [])]
            plan = RunPlan(repeats=sizes.most_rounds, until=until)
            try:
                comparison = compare(all_of_them, workload, plan=plan, on_run=bench.tell)
            except NotAvailableError as error:
                report.add(CONTINUOUS, f"not available: {error}")
                continuous = None
                comparison = compare(contenders, workload, plan=replace(plan, until=until + share), on_run=bench.tell)
            comparisons.append(comparison)
            _add_rows(bench, report, comparison)
            report.grids[:] = [replace(peer_grid(OURS, comparisons), caption="Our decoder and transformers")]
    finally:
        if continuous is not None:
            continuous.close()
    least, most = sizes.peer_prompt_tokens
    report.notes.append(
        f"Whole rollouts of {sizes.peer_sequences} sequences, random prompts of {least} to {most} tokens, "
        f"{sizes.peer_tokens} new ones each or, long-tailed, up to {sizes.peer_tokens}; the same random weights. "
        "`srtrl` is not deterministic here and computes every log-prob. `generate` has one padded batch, SDPA, "
        "and a dynamic cache; continuous batching a paged cache and its own choice of attention and graphs. A round to "
        "warm up, then rounds in turns; medians."
    )


def peer_workload(bench: GpuBench, lengths: Lengths) -> Workload:
    """Random prompts, one sequence of each."""
    sizes = bench.sizes
    least, most = sizes.peer_prompt_tokens
    count = sizes.peer_sequences
    prompts = random_prompts(count, shortest=least, longest=most, vocab_size=bench.policy.config.vocab_size, seed=0)
    new_tokens = draw_lengths(lengths, count, equal=sizes.peer_tokens, longest=sizes.peer_tokens, seed=0)
    return make_workload(lengths, new_tokens, prompts, num_samples=1, seed=0)


def _add_rows(bench: GpuBench, report: SectionReport, comparison: Comparison) -> None:
    what = f"{comparison.num_sequences} sequences, {comparison.lengths}"
    ours = statistics.median(comparison.seconds[OURS])
    report.add(f"{what}: {OURS}", f"{ours:.2f} s, {comparison.num_tokens / ours:,.0f} tokens/s")
    ratios = {name: comparison.ratio(OURS, to=name) for name in comparison.seconds if name != OURS}
    for name, ratio in ratios.items():
        seconds = statistics.median(comparison.seconds[name])
        goal = GOALS[name] if comparison.lengths == "equal" else None
        report.add(
            f"{what}: against {name}",
            f"{ratio}; it takes {seconds:.2f} s",
            f"at least {goal}x" if goal else "",
            bench.judge(ratio.value >= goal) if goal else "",
        )
    report.values.setdefault("comparisons", []).append(comparison_values(comparison, ratios))
