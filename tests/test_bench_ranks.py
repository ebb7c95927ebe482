"""The simulation of ranks: the real engine's schedule, claims, and the figures that it prints."""

import json
from dataclasses import replace
from pathlib import Path

import engine_cases
import numpy as np
import pytest
import torch
from bench_cases import run, write_trace

from srtrl.bench.host import HostRunner
from srtrl.bench.ranks import Lengths, SimulatedRank, Simulation, decode
from srtrl.bench.shapes import SHAPES
from srtrl.engine.batch import ScheduledStep
from srtrl.engine.draft_budget import StepCost
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Transformer
from srtrl.ranks.processes import Ranks
from srtrl.ranks.sharing import round_robin
from srtrl.rollout.collect import run_ahead_order

FLAT = ((1, 0.002), (2048, 0.002))
STAIRS = ((1, 0.001), (5, 0.001), (6, 0.002), (600, 0.003))
"""Run-aheads have up to 5 rows."""


def make_lengths(seed: int, *, num_prompts: int = 5, longest: int = 90, longest_prompt: int = 700) -> Lengths:
    generator = np.random.default_rng(seed)
    prompts = [
        (int(generator.integers(1, longest_prompt)), generator.integers(1, longest, 6).tolist())
        for _ in range(num_prompts)
    ]
    return Lengths(prompts, 6, 0, longest)


def simulation(seed: int, *, num_slots: int = 4, **changes: int) -> Simulation:
    lengths = make_lengths(seed, **changes)
    return Simulation(lengths=lengths, curve=STAIRS, num_slots=num_slots, num_prompts=2)


def one_rank(simulated: Simulation, num_pages: int | None) -> SimulatedRank:
    """Its step and run-aheads for the next one, decoded."""
    requests, expected = simulated.lengths.requests(range(3))
    ahead = run_ahead_order(simulated.lengths.requests(range(3, 5))[0])
    rank = simulated.make_rank(requests, None, expected, round_robin(ahead, Ranks()))
    if num_pages is not None:
        pool = rank.scheduler.pool
        pool.allocate(pool.num_pages - num_pages)  # so that the others are all there are
    decode([rank])
    return rank


def log_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(sampling primaries, run-aheads, prompt rows) of each decode step from now on."""
    steps: list[tuple[int, int, int]] = []
    schedule = engine.scheduler.schedule

    def logged(max_run_ahead: int) -> ScheduledStep:
        step = schedule(max_run_ahead)
        steps.append((step.num_primaries, len(step.slots) - step.num_primaries, step.num_prompt_rows))
        return step

    monkeypatch.setattr(engine.scheduler, "schedule", logged)
    return steps


@pytest.mark.parametrize(("num_slots", "num_pages"), [(1, None), (4, None), (32, None), (4, 60), (4, 85), (32, 75)])
def test_one_rank_has_the_schedule_of_the_real_engine(
    num_slots: int, num_pages: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_preemptions = 0
    for seed in range(4):
        simulated = simulation(seed, num_slots=num_slots)
        rank = one_rank(simulated, num_pages)
        used = EngineOptions(
            slots=num_slots,
            num_pages=num_pages or rank.scheduler.pool.num_pages,
            max_sequence_tokens=simulated.lengths.max_sequence_tokens,
        )
        policy = Transformer(config_from_hf(SHAPES["tiny"]), torch.float32, torch.device("meta"))
        runner, cost = HostRunner(policy, used, simulated.lengths.max_sequence_tokens), StepCost(points=STAIRS)
        engine = Engine(policy, used, runner=runner, cost=cost)
        requests, _ = simulated.lengths.requests(range(3))
        ahead = run_ahead_order(simulated.lengths.requests(range(3, 5))[0])
        found = log_steps(engine, monkeypatch)
        completions = list(engine_cases.decode(engine, requests, run_ahead=ahead).values())
        assert rank.steps == found
        assert sum(one[1] for one in found) == rank.ahead_tokens.total()
        assert rank.now == pytest.approx(sum(map(cost.seconds, runner.row_counts)))
        assert rank.num_tokens == sum(len(one.token_ids) for one in completions)
        num_preemptions += rank.scheduler.num_preemptions
        rank.scheduler.clear()
        assert rank.scheduler.pool.num_free == engine.pool.num_pages
    assert (num_preemptions > 0) == (num_pages is not None)


def test_claims_never_lengthen_the_step() -> None:
    saved = []
    for seed in range(12):
        simulated = simulation(seed, num_prompts=12, longest_prompt=9)
        row = replace(simulated, curve=FLAT, num_prompts=3).row(1 + seed % 6)
        assert row["claims_save"] > -0.02  # a rank that claims a sample computes its prompt once more
        assert row["idle_share"] <= row["idle_share_without_claims"] + 0.03  # that is a step or two
        saved.append(row["claims_save"])
    assert max(saved) > 0.1


def test_the_figures_are_those_of_the_lengths() -> None:
    """Two ranks with a slot each: 10 + 10 tokens and 40 + 40; the first one claims one of the long ones."""
    lengths = Lengths([(1, [10, 10]), (1, [40, 40])], 2, 0, 40)
    simulated = Simulation(lengths=lengths, curve=((1, 0.5), (9, 0.5)), num_slots=1, num_prompts=1)
    one, two = simulated.row(1), simulated.row(2)
    assert (one["samples"], one["step_seconds"], one["idle_share"]) == (2, 10, 0)
    assert one["tokens_per_second_and_rank"] == 2
    assert (two["samples"], two["step_seconds"]) == (4, 30)
    assert two["claims_save"] == 1 - 30 / 40
    assert two["idle_share_without_claims"] == pytest.approx(1 - 25 / 40)
    assert two["claimed_samples_per_rank"] == 0.5


def test_the_command_reads_lengths_of_recordings(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "lengths.jsonl", 2, num_samples=3)
    arguments = ("bench", "ranks", "--ranks", "1,2", "--lengths", path, "--prompts", 1, "--history", 1)
    result = run(*arguments, "--json", tmp_path / "a.json")
    assert [row["samples"] for row in json.loads((tmp_path / "a.json").read_text())["rows"]] == [2, 4]
    assert "Simulation of ranks: lengths of lengths.jsonl, 1 earlier samples, 1 prompts of 2 samples" in result.stdout


def test_drawn_lengths_depend_on_the_draw_alone() -> None:
    drawn = Lengths((), 4, 2, 300)
    few, expected = drawn.requests(range(3))
    many, _ = drawn.requests(range(30))
    assert many[: len(few)] == few
    sizes = [one.sampling.max_new_tokens for one in many]
    assert max(sizes) == 300
    assert len(set(sizes)) > 3
    assert all(1 <= (expected[draw] or 0) <= 300 for draw in range(3))
