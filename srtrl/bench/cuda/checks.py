"""Is the CUDA path right? Every check of it, each with its worst error and the bound."""

from collections.abc import Callable

from srtrl.bench.cuda.identity import check_identity
from srtrl.bench.cuda.kernel_checks import check_attention, check_forward, check_sampling
from srtrl.bench.cuda.plan import GpuBench, section_errors
from srtrl.bench.cuda.report import SectionReport
from srtrl.bench.cuda.update_checks import check_logprobs, check_packed_attention, check_training_step

Check = Callable[[GpuBench, SectionReport], None]
"""Adds its rows to the report."""

CHECKS: dict[str, Check] = {
    "tree attention": check_attention,
    "sampling": check_sampling,
    "forward pass": check_forward,
    "packed attention": check_packed_attention,
    "log-probs": check_logprobs,
    "training step": check_training_step,
    "identical tokens": check_identity,
}


def run_checks(bench: GpuBench, report: SectionReport) -> None:
    """The section: every check, also behind one that fails or breaks off."""
    for name, check in CHECKS.items():
        if bench.time_left() < 0:
            report.add(name, "not run: time")
            continue
        bench.tell(f"check: {name}")
        try:
            check(bench, report)
        except section_errors() as error:
            report.fail(name, f"{type(error).__name__}: {error}")
    report.notes.append(
        "References compute in float64 on the CPU, from the same bfloat16 or float32 numbers. Errors of tensors are "
        "norms of the difference over norms of the reference; where tokens and log-probs must be equal, they are the "
        "number of samples that are not."
    )
