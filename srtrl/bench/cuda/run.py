"""`srtrl bench gpu`, from its options to its table: one section after the other, each with its share of the time."""

import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from srtrl.bench.cuda.decode import measure_decode
from srtrl.bench.cuda.limits import measure_limits
from srtrl.bench.cuda.peers import measure_peers
from srtrl.bench.cuda.plan import (
    FULL,
    HARD_FACTOR,
    HARD_SECONDS,
    RESERVE_SECONDS,
    SMOKE,
    GpuBench,
    OutOfTimeError,
    section_errors,
    time_limit,
)
from srtrl.bench.cuda.report import SectionReport, gpu_document
from srtrl.bench.cuda.trace import measure_trace_decoding
from srtrl.bench.cuda.update import measure_logprobs, measure_update
from srtrl.bench.environment import Environment, read_environment
from srtrl.bench.gpu import SECTIONS
from srtrl.bench.tables import Document, put_section
from srtrl.metrics import write_atomic
from srtrl.model.cpu_threads import set_cpu_threads


@dataclass(kw_only=True, slots=True, frozen=True)
class Section:
    """One part of the benchmark."""

    title: str
    share: float
    """Of the time: its seconds where the whole has nine minutes."""
    measure: Callable[[GpuBench, SectionReport], None]


PLAN: dict[str, Section] = {
    "limits": Section(title="What the device can do", share=12, measure=measure_limits),
    "decode": Section(title="Decode steps and their limits", share=70, measure=measure_decode),
    "trace": Section(title="Speculation on a trace", share=140, measure=measure_trace_decoding),
    "peers": Section(title="Against transformers", share=80, measure=measure_peers),
    "update": Section(title="The update", share=75, measure=measure_update),
    "logprobs": Section(title="Decoder against trainer", share=13, measure=measure_logprobs),
}
assert tuple(PLAN) == SECTIONS


@dataclass(kw_only=True, slots=True)
class GpuRun:
    """One run of the benchmark."""

    sections: tuple[str, ...]
    """Of `SECTIONS`; `limits` comes first where one of them needs it."""
    ends: float
    """`time.perf_counter()` when everything should be over."""
    smoke: bool
    trace: Path | None
    tokenizer: str | None
    json_file: Path | None
    write_docs: Path | None
    reports: list[SectionReport] = field(default_factory=list)

    def measure(self) -> bool:
        """Run the sections, print the table; returns whether a section or a check failed."""
        device = torch.device("cpu") if self.smoke else torch.device("cuda", torch.cuda.current_device())
        if self.smoke:
            set_cpu_threads(None)
        environment = read_environment(device)
        with tempfile.TemporaryDirectory() as temporary:
            bench = GpuBench(
                device=device,
                sizes=SMOKE if self.smoke else FULL,
                smoke=self.smoke,
                trace=self.trace,
                tokenizer=self.tokenizer,
                folder=Path(temporary),
            )
            for index, name in enumerate(self.sections):
                self._run_section(name, self._seconds_for(index), bench)
                self._write(environment)
        print_summary(self._document(environment))
        return any(report.has_failed for report in self.reports)

    def _seconds_for(self, index: int) -> float:
        """Of what is left, the section's share of the shares that are left."""
        left = self.ends - RESERVE_SECONDS - time.perf_counter()
        shares = [PLAN[name].share for name in self.sections[index:]]
        return left * shares[0] / sum(shares)

    def _run_section(self, name: str, seconds: float, bench: GpuBench) -> None:
        section = PLAN[name]
        report = SectionReport(name=name, title=section.title)
        self.reports.append(report)
        if seconds <= 0:
            report.skip("time")
            return
        print(f"{name}: {section.title} (about {seconds:.0f} s)", file=sys.stderr, flush=True)
        started = time.perf_counter()
        bench.section_ends = started + seconds
        hard_limit = min(HARD_FACTOR * seconds + HARD_SECONDS, self.ends - RESERVE_SECONDS - started)
        try:
            with time_limit(hard_limit):
                section.measure(bench, report)
        except OutOfTimeError as error:
            report.problem = str(error)
        except section_errors() as error:
            traceback.print_exc()
            report.problem, report.is_error = f"{type(error).__name__}: {error}", True
        report.seconds = time.perf_counter() - started
        try:
            bench.free_memory()
        except RuntimeError as error:  # a fault on the device is raised by every call that follows
            report.problem, report.is_error = report.problem or f"{type(error).__name__}: {error}", True

    def _document(self, environment: Environment) -> Document:
        where = "smoke test on a CPU: the figures say nothing"
        if not self.smoke:
            where = f"{FULL.shape} on {torch.cuda.get_device_name()}"
        return gpu_document(f"The CUDA path: {where}", environment, self.reports)

    def _write(self, environment: Environment) -> None:
        document = self._document(environment)
        if self.json_file is not None:
            write_atomic(self.json_file, document.to_json())
        if self.write_docs is not None:
            put_section(self.write_docs, document.to_markdown())


def print_summary(document: Document) -> None:
    """The table, and what it was measured on, to standard output."""
    print(f"\n{document.title}\n{document.environment}\n{document.notes[0]}\n", flush=True)
    print("\n".join(document.grids[0].to_markdown()), flush=True)
