"""How contenders take turns, how many runs there are, and what their statistics say."""

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from tiny_run import VOCAB_SIZE, make_policy

from srtrl.bench.comparison import compare, step_by_step
from srtrl.bench.contender import OurDecoder
from srtrl.bench.engine_run import EngineRun, RunTime
from srtrl.bench.run_plan import RunPlan
from srtrl.bench.statistics import paired_ratio, runs_needed
from srtrl.bench.workload import Workload, make_workload, random_prompts
from srtrl.engine.engine import EngineOptions
from srtrl.model.weights import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("models") / "tiny")


def workload_of(new_tokens: list[int]) -> Workload:
    prompts = random_prompts(len(new_tokens), shortest=2, longest=9, vocab_size=VOCAB_SIZE, seed=3)
    return make_workload("long-tailed", new_tokens, prompts, num_samples=1, seed=5)


# --- How they are compared --------------------------------------------------------------------------------------------


@dataclass
class FakeContender:
    """Takes the seconds it is told to, and notes when it ran."""

    name: str
    seconds: list[float]
    journal: list[str]
    num_tokens: int | None = None
    turns: list[float] = field(default_factory=list)

    def run(self, workload: Workload) -> RunTime:
        self.journal.append(self.name)
        self.turns.append(self.seconds[len(self.turns)])
        return RunTime(seconds=self.turns[-1], num_tokens=self.num_tokens or workload.num_tokens)


def test_contenders_take_turns_and_the_warm_up_does_not_count() -> None:
    journal: list[str] = []
    told: list[str] = []
    contenders = [FakeContender("a", [9.0, 1.0, 2.0], journal), FakeContender("b", [8.0, 3.0, 5.0], journal)]
    result = compare(contenders, workload_of([2, 3]), plan=RunPlan(repeats=2), on_run=told.append)
    assert journal == ["a", "b", "b", "a", "a", "b"]
    assert result.seconds == {"a": [1.0, 2.0], "b": [3.0, 5.0]}
    assert (result.num_sequences, result.num_tokens, result.longest) == (2, 5, 3)
    assert told[:3] == ["a, warm-up: 9.000 s", "b, warm-up: 8.000 s", "a, run 1 of 2: 1.000 s"]
    assert result.ratio("a", to="b").value == pytest.approx(math.sqrt(3.0 * 2.5))


def test_a_contender_that_does_less_work_is_caught() -> None:
    contenders = [FakeContender("a", [1.0] * 2, []), FakeContender("b", [1.0] * 2, [], num_tokens=4)]
    with pytest.raises(AssertionError, match="b made 4 tokens"):
        compare(contenders, workload_of([2, 3]), plan=RunPlan(repeats=1), on_run=lambda _: None)


def test_our_decoders_take_turns_at_every_step_and_the_one_that_is_behind_is_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences at a time against one: neither is more than a step ahead."""
    model = load_model(folder, dtype=torch.float32, device="cpu")
    options = {name: EngineOptions(slots=slots, kv_memory_gib=0.1) for name, slots in (("a", 2), ("b", 1))}
    decoders = [OurDecoder(name, model, of_one) for name, of_one in options.items()]
    journal: list[tuple[int, int, int]] = []
    runs: list[EngineRun] = []
    original = EngineRun.step

    def step(self: EngineRun) -> None:
        if self not in runs:
            runs.append(self)
        before = [run.num_tokens for run in runs]
        original(self)
        journal.append((runs.index(self), self.num_tokens, before[1 - runs.index(self)] if len(runs) > 1 else 0))

    monkeypatch.setattr(EngineRun, "step", step)
    times = step_by_step(decoders, workload_of([20] * 4))
    assert list(times) == ["a", "b"]
    assert [run.num_tokens for run in times.values()] == [80, 80]
    assert all(run.seconds > 0 for run in times.values())
    assert Counter(which for which, _, _ in journal) == {0: 42, 1: 84}
    most_a_step = (2, 1)
    assert all(mine - most_a_step[which] <= other for which, mine, other in journal)


# --- How many runs ----------------------------------------------------------------------------------------------------


def test_a_pilot_decides_once_how_many_runs_there_are() -> None:
    slow = [1.0, 1.02, 0.99, 1.01, 1.0]
    needed = runs_needed(slow, [1.0] * 5, precision=0.005)
    margin = scipy.stats.t.ppf(0.975, 4) * statistics.stdev(map(math.log, slow))
    assert needed == math.ceil((margin / math.log(1.005)) ** 2)
    assert runs_needed(slow, [1.0] * 5, precision=0.1) == 5
    journal: list[str] = []
    seconds = [9.0, *slow, *[1.0] * 200]
    contenders = [FakeContender("a", seconds, journal), FakeContender("b", [1.0] * 206, journal)]
    plan = RunPlan(repeats=5, precision=0.005)
    result = compare(contenders, workload_of([2, 3]), plan=plan, on_run=lambda _: None)
    assert len(result.seconds["a"]) == len(result.seconds["b"]) == needed > 5
    ratio = result.ratio("b", to="a")
    assert ratio.low is not None
    assert ratio.value / ratio.low == pytest.approx(math.exp(margin / math.sqrt(needed)), rel=1e-3)
    assert ratio.value / ratio.low <= 1.005


def test_time_bounds_what_a_pilot_may_ask_for() -> None:
    pilot = {"a": [1.0, 1.2, 0.9, 1.1], "b": [1.0] * 4}
    plan = RunPlan(repeats=4, precision=0.01, max_seconds=60)
    assert plan.num_runs([pilot], pilot_seconds=24) == 10
    assert plan.num_runs([pilot], pilot_seconds=240) == 4
    assert RunPlan(repeats=4, precision=0.5).num_runs([pilot], pilot_seconds=240) == 4
    assert RunPlan(repeats=4).num_runs([pilot], pilot_seconds=0.001) == 4
    steady = {"a": [1.0] * 4, "b": [1.0] * 4}
    whole = RunPlan(repeats=4, precision=0.01)
    assert whole.num_runs([steady, pilot], pilot_seconds=1) == whole.num_runs([pilot], pilot_seconds=1) > 10


def test_the_interval_of_two_stages_covers_as_often_as_it_says() -> None:
    """4,000 comparisons of two equal contenders: 95% of the intervals hold 1, and they are as narrow as asked."""
    generator = np.random.default_rng(1)
    num_trials, pilot, num_covered = 4000, 5, 0
    for _ in range(num_trials):
        noise = np.exp(0.03 * generator.standard_normal(pilot)).tolist()
        needed = runs_needed(noise, [1.0] * pilot, precision=0.02)
        noise += np.exp(0.03 * generator.standard_normal(needed - pilot)).tolist()
        ratio = paired_ratio(noise, [1.0] * needed, num_pilot=pilot)
        assert ratio.low is not None
        assert ratio.high is not None
        assert ratio.high <= 1.02001 * ratio.value
        num_covered += ratio.low <= 1 <= ratio.high
    share = num_covered / num_trials
    assert abs(share - 0.95) < 4 * math.sqrt(0.95 * 0.05 / num_trials)


@pytest.mark.parametrize("num_pairs", [2, 3, 5, 31])
def test_the_interval_is_that_of_students_t(num_pairs: int) -> None:
    slow = [3.0 + 0.1 * (i % 3) + 0.01 * i for i in range(num_pairs)]
    fast = [2.0 - 0.05 * (i % 2) for i in range(num_pairs)]
    logs = [math.log(a / b) for a, b in zip(slow, fast, strict=True)]
    expected = scipy.stats.t.interval(0.95, num_pairs - 1, statistics.fmean(logs), scipy.stats.sem(logs))
    ratio = paired_ratio(slow, fast)
    assert ratio.value == pytest.approx(statistics.geometric_mean(slow) / statistics.geometric_mean(fast))
    assert ratio.low is not None
    assert ratio.high is not None
    assert [math.log(ratio.low), math.log(ratio.high)] == pytest.approx(expected, rel=1e-3)


def test_one_pair_has_no_interval_and_many_have_one_that_is_not_too_narrow() -> None:
    assert str(paired_ratio([3.0], [2.0])) == "1.50x as fast"
    assert str(paired_ratio([3.0, 3.6], [2.0, 2.0])) == "1.64x as fast (0.52 to 5.23)"
    assert str(paired_ratio([1.0, 1.002], [1.0, 1.0])) == "1.001x as fast (0.988 to 1.014)"
    logs = [0.1 * (i % 7) for i in range(60)]
    ratio = paired_ratio([math.exp(value) for value in logs], [1.0] * 60)
    exact = scipy.stats.t.interval(0.95, 59, statistics.fmean(logs), scipy.stats.sem(logs))
    assert ratio.high is not None
    assert 0 <= math.log(ratio.high) - exact[1] < 0.04 * (exact[1] - statistics.fmean(logs))
