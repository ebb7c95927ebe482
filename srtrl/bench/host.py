"""`srtrl bench host`: the host's work per decode step, with a device whose steps cost nothing.

The real engine with its CUDA runner, all stages; the device's step takes no time and the recorded tokens are taken in
place of sampled ones. What the driver itself takes to queue copies and to launch a graph is not in it. Half of each
prompt's samples are decoded, two for each slot where there are as many; the drafter has seen the other half. Medians of
alternating runs, after one to warm up. The stages are milliseconds of the host per decode step in which all slots
decode. `times as fast` is about whole rollouts on a device whose steps take the time of `H200_CURVE` (by which drafts
are budgeted): of the device alone, and with the host's time.
"""

import time
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

import torch
import typer

from srtrl.bench import measure
from srtrl.bench.measure import Row, alternate, median_of, publish, read_environment
from srtrl.bench.workload import Trace, check_completions, load_workload, make_engine, prepare
from srtrl.engine.draft_budget import StepCost
from srtrl.engine.engine import Engine
from srtrl.engine.runner import EngineOptions
from srtrl.engine.stats import STAGES
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.hf_config import config_from_hf
from srtrl.model.shapes import SHAPES
from srtrl.model.transformer import Transformer
from srtrl.run.interrupt import freeze_gc

H200_CURVE = ((1, 0.0020), (129, 0.0020), (2048, 0.0139))
"""(rows, seconds of a decode step), stated and not measured: memory-bound and level, then compute-bound and linear.
These are 1.54 thousand million parameters in bfloat16 on one H200, by its data sheet: 1.2 ms + max(0.8 ms, 6.2 us
per row). The fixed 1.2 ms are launches, attention and sampling; reading 3.1 GB at 80% of 4.8 TB/s takes 0.8 ms;
2 x 1.54e9 operations per row at half of the peak of 989 TFLOP/s take 6.2 us, which is more from 129 rows on."""
SHAPE = "qwen2.5-1.5b"
"""Its vocabulary, context length and head counts; weights are not made."""


def command(
    *,
    slots: measure.Slots = "64,256",
    drafters: measure.Drafters = "none,srt",
    threads: Annotated[int, typer.Option(min=1, max=1024, help="CPU threads.")] = 1,
    trace: measure.TraceFile = None,
    tokenizer: measure.TokenizerFolder = None,
    max_tokens: Annotated[int, typer.Option(min=8, help="Maximum number of tokens of each sample.")] = 512,
    repeats: measure.Repeats = 5,
    json_file: measure.JsonFile = None,
    force: measure.Force = False,
) -> None:
    """Measure the host's work per decode step: the real engine, recorded tokens, and a device whose steps take no time.

    The drafter has already seen half of each prompt's samples. Without --trace the samples are generated.
    """
    if find_spec("triton") is None:
        raise ValueError(
            "srtrl bench host runs the CUDA decoder's side of the host, which needs Triton: pip install triton"
        )
    from srtrl.bench.host_runner import HostRunner

    counts, names = measure.parse_counts("--slots", slots), measure.parse_drafters(drafters)
    set_cpu_threads(threads)
    environment = read_environment(torch.device("cpu"), json_file, force=force)
    policy = Transformer(config_from_hf(SHAPES[SHAPE], SHAPE), torch.bfloat16, torch.device("meta"))
    whole = load_workload(trace, policy.config, tokenizer=tokenizer, max_tokens=max_tokens, history=0.5)
    if len(whole.requests) < max(counts):
        raise ValueError(f"--slots: {max(counts)}, but there are {len(whole.requests)} samples to decode")
    rows: list[Row] = []
    cost = StepCost(points=H200_CURVE)
    for num_slots in counts:
        workload = whole.first_samples(2 * num_slots)
        candidates = {}
        for name in names:
            row_counts: list[int] = []
            runner = HostRunner(policy, EngineOptions(slots=num_slots), workload.max_sequence_tokens, row_counts)
            engine = make_engine(policy, num_slots, workload.max_sequence_tokens, runner=runner, cost=cost)
            candidates[name] = partial(decode, engine, row_counts, name, workload)
        with freeze_gc():
            runs = alternate(candidates, repeats)
        medians = {name: median_of(of_one) for name, of_one in runs.items()}
        baseline = medians[names[0]]["rollout_seconds"]
        for name, median in medians.items():
            seconds = median.pop("rollout_seconds")
            ratios = {f"times_as_fast_{part}": baseline[part] / value for part, value in seconds.items()}
            rows.append({"slots": num_slots, "drafter": name, **median, **ratios, "runs": runs[name]})
    source = f"{trace.name}, samples truncated to {max_tokens} tokens" if trace else "generated tokens"
    title = f"Host work per decode step: {source}, {threads} thread{'s' if threads > 1 else ''}"
    publish(title, {"rows": rows}, __doc__, environment, json_file)


def decode(engine: Engine, row_counts: list[int], drafter: str, workload: Trace) -> dict[str, Any]:
    """One rollout of the whole workload: what its full steps took of the host, and the seconds of all its steps.

    The stage `other` is what no stage has: queueing samples, the loop. The device's seconds are stated, not measured.
    """
    prepare(engine, drafter, workload)
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
        "by_stage": by_stage | {"other": ms_per_step - sum(by_stage.values())},
        "tokens_per_step": metrics["engine/tokens_per_decode_step"],
        "verified_per_step": metrics["engine/verified_per_decode_step"],
        "rollout_seconds": {"on_device": device, "with_host": device + host},
    }
