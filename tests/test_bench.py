"""What the benchmarks measure and write, on tiny models: same work for all, the recorded tokens, the figures."""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_cases import REPEATER, Repeater, run, write_trace
from tiny_run import make_recipe

from srtrl.bench.measure import alternate, median_of, paired_ratio
from srtrl.bench.recorded import RecordedPrompt
from srtrl.bench.train import check_same
from srtrl.bench.workload import check_completions, make_engine, prepare, share_out
from srtrl.model.hf_config import config_from_hf
from srtrl.model.shapes import SHAPES
from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model
from srtrl.recipe.file import dump_yaml

NAMES = ("none", REPEATER)

# --- What is decoded, and how -----------------------------------------------------------------------------------------


def test_shapes_have_the_published_number_of_parameters() -> None:
    billions = {"qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.544, "qwen3-4b": 4.022, "qwen3-8b": 8.191}
    for shape, expected in billions.items():
        model = Transformer(config_from_hf(SHAPES[shape]), torch.float32, "meta")
        assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(expected, abs=5e-4)


def test_the_engine_gives_the_trace_with_a_drafter_that_has_seen_the_history(policy: Path) -> None:
    model = load_model(policy, dtype=torch.float32, device="cpu")
    samples = [np.array(sample, np.int32) for sample in ([5, 6], [9] * 6, [8, 8, 1])]
    trace = share_out([RecordedPrompt(prompt_id="3", prompt_token_ids=(3, 7), samples=samples)], history=1 / 3)
    engine = make_engine(model, 2, trace.max_sequence_tokens, draft_budget=4)
    for _ in range(2):
        prepare(engine, REPEATER, trace)
        assert isinstance(engine.drafter, Repeater)
        assert engine.drafter.log == ["learn 3: [5, 6]", "update"]
        completions = list(engine.generate(trace.requests))
        check_completions(completions, trace)
        metrics = engine.take_metrics()
        assert metrics["engine/tokens"] == trace.num_tokens == 9
        assert metrics["engine/tokens_per_decode_step"] > 1
    completions[0].token_ids[0] += 1
    with pytest.raises(AssertionError, match="not those of the trace"):
        check_completions(completions, trace)


# --- The commands -----------------------------------------------------------------------------------------------------


def bench(path: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    """What `srtrl bench` writes with `--json`, to a file at `path`, and what it prints."""
    result = run("bench", *arguments, "--json", path)
    assert result.exit_code == 0, result.stderr
    return json.loads(path.read_text()), result.stdout


def test_bench_rollout_compares_drafters_on_a_trace(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 3)
    sizes = ("--slots", "1,4", "--prompts-used", 2, "--history", 0.5, "--max-tokens", 9, "--repeats", 2)
    settings = ("--trace", trace, "--drafters", ",".join(NAMES), "--model-shape", "tiny", "--threads", 1)
    values, shown = bench(tmp_path / "bench.json", "rollout", *settings, *sizes)
    found = [(row["slots"], row["sequences"], row["drafter"]) for row in values["rows"]]
    assert found == [(slots, 4, name) for slots in (1, 4) for name in NAMES]
    for none, repeater in (values["rows"][:2], values["rows"][2:]):
        assert none["tokens_per_step"] == none["verified_per_step"] == 1
        assert [run["engine/tokens"] for run in repeater["runs"]] == [36, 36]
        assert repeater["times_as_fast"].keys() == {"value", "low", "high"}
        assert repeater["tokens_per_second"] == 36 / repeater["seconds"]
    title = "## Drafters on a trace: trace.jsonl, 0.5 as history, tiny, float32, cpu, 1 threads, 1, 4 slots"
    assert shown.startswith(title)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_bench_host_measures_each_stage_of_full_steps(tmp_path: Path, is_recorded: bool) -> None:
    path = write_trace(tmp_path / "trace.jsonl", 4, num_samples=8, length=60)
    source = ("--trace", path) if is_recorded else ("--max-tokens", 60)
    settings = ("--slots", "4,8", "--drafters", ",".join(NAMES), "--repeats", 2)
    values, shown = bench(tmp_path / "bench.json", "host", *settings, *source)
    rows = values["rows"]
    assert [(row["slots"], row["drafter"]) for row in rows] == [*product((4, 8), NAMES)]
    for row in rows:
        for one in row["runs"]:
            assert sum(one["by_stage"].values()) == pytest.approx(one["host_ms_per_step"])
            assert one["by_stage"]["other"] >= 0
            assert 0 < one["rollout_seconds"]["on_device"] < one["rollout_seconds"]["with_host"]
        assert min(one["host_ms_per_step"] for one in row["runs"]) <= row["host_ms_per_step"]
        if row["drafter"] == "none":
            assert row["tokens_per_step"] == row["verified_per_step"] == row["times_as_fast_with_host"] == 1
            assert row["by_stage"]["propose"] == row["by_stage"]["choose"] == 0
    if is_recorded:  # samples that say one token all the time: the drafts are right
        assert min(rows[1]["tokens_per_step"], rows[1]["times_as_fast_on_device"]) > 1.5
    assert "|     4 | none" in shown


def test_bench_train_takes_turns_learns_the_same_and_leaves_nothing_behind(policy: Path, tmp_path: Path) -> None:
    """Five steps of 4 prompts from a pool of 8: three epochs, the last a part."""
    recipe = make_recipe(
        policy,
        tmp_path / "runs",
        train__num_steps=5,
        train__num_epochs=1,
        rollout__num_samples=2,
        task__options__num_train=8,
        rewards=[{"name": "bench_cases:digit_share"}],
    )
    (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe.model_dump(mode="json")))
    drafters = ("--drafters", ",".join(NAMES))
    values, _ = bench(tmp_path / "bench.json", "train", tmp_path / "recipe.yaml", *drafters)
    rows = values["rows"]
    assert values["srtrl"] == "bench"
    assert [row["drafter"] for row in rows] == [*NAMES] * 4
    assert [(row["epoch"], row["steps"]) for row in rows[::2]] == [("1", 1), ("2", 2), ("3", 1), ("all", 4)]
    assert all(0 < row["rollout_seconds"] < row["step_seconds"] for row in rows)
    assert not (tmp_path / "runs").exists()


def test_benchmarks_are_listed() -> None:
    lines = run("bench", "--help").stdout.partition("Names:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == ["host", "rollout", "train"]


# --- What is said -----------------------------------------------------------------------------------------------------


def test_candidates_alternate_in_reversed_order_and_the_first_turn_does_not_count() -> None:
    journal: list[str] = []
    results = alternate({name: lambda name=name: journal.append(name) or len(journal) for name in "ab"}, 2)  # type: ignore[misc, func-returns-value]
    assert "".join(journal) == "abbaab"
    assert results == {"a": [4, 5], "b": [3, 6]}
    assert median_of([{"x": 1, "y": {"z": 4}}, {"x": 2, "y": {"z": 5}}]) == {"x": 1.5, "y": {"z": 4.5}}


def test_runs_that_learn_different_things_are_named() -> None:
    learned: dict[int, dict[str, float]] = {}
    check_same("none", {"step": 1, "loss": 1.0, "time/step": 5.0}, learned)
    check_same("srt", {"step": 1, "loss": 1.0, "time/step": 3.0}, learned)
    with pytest.raises(ValueError, match=r"step 1: srt did not learn what the first run did, .*\(loss\)"):
        check_same("srt", {"step": 1, "loss": 2.0}, learned)


def test_a_ratio_is_the_median_of_pairs_and_its_interval_covers_as_often_as_it_says() -> None:
    assert str(paired_ratio([3.0, 3.6], [2.0, 2.0])) == "1.65 (1.5 to 1.8)"
    generator = np.random.default_rng(1)
    for num_pairs in (6, 9, 20, 31):
        noise = generator.lognormal(0, 0.1, (2000, num_pairs))
        ratios = [paired_ratio(one.tolist(), [1.0] * num_pairs) for one in noise]
        covered = np.mean([ratio.low <= 1 <= ratio.high for ratio in ratios])
        assert covered > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 2000)
        assert all(ratio.low <= ratio.value <= ratio.high for ratio in ratios)
    assert paired_ratio(sorted(noise[0]), [1.0] * 31).low > min(noise[0])
