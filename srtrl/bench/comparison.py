"""Contenders take turns on the same workloads, in one process."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

from rich.console import Console

from srtrl.bench.contender import Contender, OurDecoder
from srtrl.bench.engine_run import RunTime, take_turns
from srtrl.bench.run_plan import RunPlan
from srtrl.bench.statistics import Ratio, paired_ratio
from srtrl.bench.workload import Lengths, Workload
from srtrl.trainer.run_folder import RunProgress

ContenderT = TypeVar("ContenderT", bound=Contender)
RunAll = Callable[[Sequence[ContenderT], Workload], Mapping[str, RunTime]]
"""Makes one run of each contender, in this order or side by side."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Comparison:
    """What one workload took."""

    lengths: Lengths
    num_sequences: int
    num_tokens: int
    """Generated tokens of one run, the same for every contender."""
    longest: int
    """Generated tokens of the longest sequence."""
    seconds: dict[str, list[float]]
    """Contender -> seconds of each of its runs; the i-th runs of all were made side by side."""
    metrics: dict[str, list[Mapping[str, float]]] = field(default_factory=dict)
    """Contender -> what the engine counted in each of its runs; nothing where it was not our engine."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What tells this comparison from its neighbours: column of a table -> cell."""
    num_pilot: int | None = None
    """The first so many runs decided how many there are; None: that was fixed beforehand."""

    def ratio(self, contender: str, to: str) -> Ratio:
        """How many times as fast as `to` the contender is."""
        return paired_ratio(self.seconds[to], self.seconds[contender], num_pilot=self.num_pilot)


def one_by_one(contenders: Sequence[Contender], workload: Workload) -> dict[str, RunTime]:
    """A whole run of each, in this order."""
    return {contender.name: contender.run(workload) for contender in contenders}


def step_by_step(contenders: Sequence[OurDecoder], workload: Workload) -> dict[str, RunTime]:
    """A run of each, side by side: see `take_turns`."""
    runs = take_turns([contender.start(workload) for contender in contenders])
    for contender, (_, completions) in zip(contenders, runs, strict=True):
        contender.check(completions)
    return {contender.name: run for contender, (run, _) in zip(contenders, runs, strict=True)}


def compare(
    contenders: Sequence[ContenderT],
    workload: Workload,
    *,
    plan: RunPlan,
    on_run: Callable[[str], None],
    run_all: RunAll[ContenderT] = one_by_one,
) -> Comparison:
    """Run A, B, B, A, A, B, ...: one round to warm up (kernels compile, memory is touched), then those that count.

    Args:
        contenders: With different names; the others are compared with the first.
        workload: What each run decodes.
        plan: How many runs count.
        on_run: Told after each run what it was.
        run_all: Makes one run of each contender, whose order is another one in the next round.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    metrics: dict[str, list[Mapping[str, float]]] = {contender.name: [] for contender in contenders}
    assert len(seconds) == len(contenders)
    turn, num_runs, started = 0, plan.repeats, 0.0
    latest = 0.0  # seconds of the latest turn
    while turn <= num_runs and (turn < 2 or time.perf_counter() + latest < plan.until):
        turn_started = time.perf_counter()
        runs = run_all(contenders if turn % 2 == 0 else contenders[::-1], workload)
        for name, seconds_of_one in seconds.items():
            run = runs[name]
            on_run(f"{name}, {f'run {turn} of {num_runs}' if turn else 'warm-up'}: {run.seconds:.3f} s")
            assert run.num_tokens == workload.num_tokens, f"{name} made {run.num_tokens} tokens"
            if turn:
                seconds_of_one.append(run.seconds)
                metrics[name].append(run.metrics)
        if turn == 0:
            started = time.perf_counter()
        elif turn == plan.repeats:
            num_runs = plan.num_runs([seconds], time.perf_counter() - started)
        turn += 1
        latest = time.perf_counter() - turn_started
    return Comparison(
        lengths=workload.lengths,
        num_sequences=len(workload.requests),
        num_tokens=workload.num_tokens,
        longest=workload.longest,
        seconds=seconds,
        metrics=metrics,
        labels=workload.labels,
        num_pilot=plan.num_pilot,
    )


def compare_all(
    contenders: Sequence[ContenderT],
    workloads: Sequence[Workload],
    plan: RunPlan,
    run_all: RunAll[ContenderT] = one_by_one,
) -> list[Comparison]:
    """One comparison a workload, with progress on standard error."""
    comparisons = []
    with RunTeller(len(workloads) * len(contenders) * (plan.repeats + 1)) as teller:
        for workload in workloads:

            def tell(text: str, what: str = str(workload)) -> None:
                teller.tell(f"{what}: {text}")

            comparison = compare(contenders, workload, plan=plan, on_run=tell, run_all=run_all)
            comparisons.append(comparison)
    return comparisons


class RunTeller:
    """Says on standard error which run is over."""

    def __init__(self, num_runs: int, *, title: str = "bench rollout") -> None:
        """Expect so many runs; more are told, too, for a pilot may ask for them."""
        self._num_runs = num_runs
        self._num_done = 0
        self._progress = RunProgress(title, num_runs, console=Console(stderr=True))

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def tell(self, text: str) -> None:
        """One more run is over."""
        self._num_done += 1
        if self._num_done > self._num_runs:
            self._num_runs = self._num_done
            self._progress.expect(self._num_runs)
        self._progress.step(self._num_done, text)
