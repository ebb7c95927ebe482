"""Attention alone, in decode steps of one row a sequence: our kernel, and what libraries bring for paged caches.

The steps are like those by which an engine chooses (`srtrl.engine.attention_choice`), and are timed in the same way.
"""

from dataclasses import asdict

import torch

from srtrl.bench.cuda.limits import kv_bytes
from srtrl.bench.cuda.plan import GpuBench, Limits
from srtrl.bench.cuda.report import SectionReport
from srtrl.engine.attention_choice import MARGIN
from srtrl.engine.attention_probe import CudaStopwatch, HostStopwatch, Probe, Timing, probe_backends
from srtrl.engine.buckets import MAX_GRAPH_ROWS, ROWS_AT_ONCE, BucketPlanner
from srtrl.engine.options import EngineOptions
from srtrl.model.attention_backends import NAMES, OURS, find_backends

PAGE_SIZES = (16, 256)
"""The default of `rollout.page_size`, and the least that FlashAttention 2 takes."""


def measure_attention(bench: GpuBench, report: SectionReport) -> None:
    """The section: each backend at each page size, or why it cannot run there."""
    assert bench.limits is not None, "the section `limits` comes first"
    for page_size in PAGE_SIZES:
        if bench.time_left() < 0:
            report.add(f"pages of {page_size}", "not run: time")
            continue
        bench.tell(f"attention alone: pages of {page_size}")
        probe = _probe(bench, page_size)
        for timing in probe.timings:
            what = f"{timing.num_sequences} x {timing.most_keys}, pages of {page_size}"
            report.add(what, _figure(timing, bench, bench.limits))
            report.values.setdefault("timings", []).append({"page_size": page_size, **asdict(timing)})
        for name, reason in probe.reasons.items():
            report.add(f"{name}, pages of {page_size}", f"cannot: {reason}")
            report.values.setdefault("reasons", []).append({"page_size": page_size, "name": name, "reason": reason})
    report.notes.append(
        "One layer's attention: sequences x most keys (the others have half as many or more), one row each, in "
        "captured graphs, no keys in the device's cache before; medians of alternating turns. Our kernel's time stands "
        "beside its bandwidth limit (keys and values read once), the others' is given as a multiple of ours. With "
        f"rollout.attention auto an engine takes what needs at most {1 - MARGIN:.2f}x at every length."
    )


def _probe(bench: GpuBench, page_size: int) -> Probe:
    config, sizes, device = bench.policy.config, bench.sizes, bench.device
    is_cuda = device.type == "cuda"
    planner = BucketPlanner(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        max_positions=2 * max(sizes.attention_lengths),
        max_draft_nodes=EngineOptions().max_draft_nodes,
        num_multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 1,
        deterministic=False,
        rows_at_once=ROWS_AT_ONCE,
    )
    return probe_backends(
        planner,
        find_backends(NAMES, device=device, dtype=sizes.dtype, head_dim=config.head_dim, most_rows=MAX_GRAPH_ROWS),
        dtype=sizes.dtype,
        device=device,
        watch=CudaStopwatch(device) if is_cuda else HostStopwatch(),
        sizes=sizes.attention_sizes,
        lengths=sizes.attention_lengths,
        with_ours_alone=True,
        use_kernels=not bench.smoke,  # interpreted they would take minutes; `checks` runs them
    )


def _figure(timing: Timing, bench: GpuBench, limits: Limits) -> str:
    """Our milliseconds and limit, and the others' share."""
    config = bench.policy.config
    num_bytes = kv_bytes(config, timing.num_keys, bench.sizes.dtype) / config.num_hidden_layers
    parts = [f"{1e3 * timing.seconds[OURS]:.4f} ms; limit {1e3 * num_bytes / limits.bandwidth:.4f}"]
    parts += [f"{name} {timing.ratio(name):.2f}x" for name in timing.seconds if name != OURS]
    return "; ".join(parts)
