"""Contenders take turns on the same workloads, in one process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from srtrl.bench.contender import Contender
from srtrl.bench.statistics import Ratio, paired_ratio
from srtrl.bench.workload import Lengths, Workload
from srtrl.trainer.progress import RunProgress


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
    """Contender -> seconds of each of its runs; the i-th runs of all were made one after the other."""
    metrics: dict[str, list[Mapping[str, float]]] = field(default_factory=dict)
    """Contender -> what the engine counted in each of its runs; nothing where it was not our engine."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What tells this comparison from its neighbours: column of a table -> cell."""

    def ratio(self, contender: str, to: str) -> Ratio:
        """How many times as fast as `to` the contender is."""
        return paired_ratio(self.seconds[to], self.seconds[contender])


def compare(
    contenders: Sequence[Contender], workload: Workload, *, repeats: int, on_run: Callable[[str], None]
) -> Comparison:
    """Run A, B, A, B, ...: one turn each to warm up (kernels compile, memory is touched), then `repeats` that count.

    Args:
        contenders: With different names.
        workload: What each run decodes.
        repeats: Runs that count, of each contender.
        on_run: Told after each run what it was.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    metrics: dict[str, list[Mapping[str, float]]] = {contender.name: [] for contender in contenders}
    assert len(seconds) == len(contenders)
    for turn in range(repeats + 1):
        for contender in contenders:
            run = contender.run(workload)
            on_run(f"{contender.name}, {f'run {turn} of {repeats}' if turn else 'warm-up'}: {run.seconds:.3f} s")
            assert run.num_tokens == workload.num_tokens, f"{contender.name} made {run.num_tokens} tokens"
            if turn:
                seconds[contender.name].append(run.seconds)
                metrics[contender.name].append(run.metrics)
    return Comparison(
        lengths=workload.lengths,
        num_sequences=len(workload.requests),
        num_tokens=workload.num_tokens,
        longest=workload.longest,
        seconds=seconds,
        metrics=metrics,
        labels=workload.labels,
    )


def compare_all(contenders: Sequence[Contender], workloads: Sequence[Workload], repeats: int) -> list[Comparison]:
    """One comparison a workload, with progress on standard error."""
    comparisons = []
    num_runs = len(workloads) * len(contenders) * (repeats + 1)
    numbers = iter(range(1, num_runs + 1))
    with RunProgress("bench rollout", num_runs, console=Console(stderr=True)) as progress:
        for workload in workloads:

            def tell(text: str, what: str = str(workload)) -> None:
                progress.step(next(numbers), f"{what}: {text}")

            comparisons.append(compare(contenders, workload, repeats=repeats, on_run=tell))
    return comparisons
