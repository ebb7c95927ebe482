"""What the benchmarks measure and write, on tiny models: same work for all, the recorded tokens, the figures."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
import yaml
from bench_cases import REPEATER, Repeater, bench, write_trace
from conftest import REPOSITORY
from tiny_run import VOCAB_SIZE, make_policy, make_recipe

from srtrl.bench.alternate import EngineRun, make_engine, paired_ratio, take_turns
from srtrl.bench.environment import Environment, cpu_name
from srtrl.bench.host import HostRun
from srtrl.bench.peer_hf import PAD_TOKEN_ID, HuggingFaceGenerate, draw_lengths
from srtrl.bench.shapes import SHAPES
from srtrl.bench.tables import Document, Grid, put_section
from srtrl.bench.train import TrainingRun, check_same, seconds_grid
from srtrl.bench.workload import (
    check_completions,
    generated_prompts,
    make_request,
    prepare,
    random_prompts,
    share_out,
)
from srtrl.drafters.base import DrafterBase
from srtrl.engine.options import EngineOptions
from srtrl.model.attention import PackedPlan
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model
from srtrl.recipe import Recipe
from srtrl.rollout.recorded import RecordedPrompt
from srtrl.types import Completion, Request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose `generation_config.json` asks for what a benchmark must not heed."""
    folder = make_policy(tmp_path_factory.mktemp("models") / "tiny")
    settings = {"do_sample": False, "top_k": 1, "repetition_penalty": 1.5, "eos_token_id": list(range(VOCAB_SIZE))}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def policy(folder: Path) -> Transformer:
    return load_model(folder, dtype=torch.float32, device="cpu")


def requests_of(new_tokens: list[int]) -> list[Request]:
    prompts = random_prompts(len(new_tokens), shortest=2, longest=9, vocab_size=VOCAB_SIZE, seed=3)
    return [
        make_request(prompt, draw, 0, length)
        for draw, (prompt, length) in enumerate(zip(prompts, new_tokens, strict=True))
    ]


def recorded(prompt_id: str, *samples: list[int]) -> RecordedPrompt:
    return RecordedPrompt(
        prompt_id=prompt_id,
        prompt_token_ids=(int(prompt_id), 7),
        samples=[np.array(sample, np.int32) for sample in samples],
    )


# --- What is decoded --------------------------------------------------------------------------------------------------


def test_long_tailed_lengths_have_their_median_their_spread_and_their_limit() -> None:
    lengths = draw_lengths(20_000, 800, seed=1)
    assert max(lengths) == 800
    assert min(lengths) >= 1
    assert statistics.median(lengths) == pytest.approx(100, rel=0.03)
    logs = [math.log(length) for length in lengths if length < 800]
    assert statistics.stdev(logs) == pytest.approx(0.8, rel=0.05)
    assert lengths != draw_lengths(20_000, 800, seed=2)


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ("llama-3.2-1b", 1.236),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-1.5b", 1.544),
        ("qwen3-4b", 4.022),
        ("qwen3-8b", 8.191),
    ],
)
def test_shapes_have_the_published_number_of_parameters(shape: str, billions: float) -> None:
    model = Transformer(config_from_hf(SHAPES[shape]), torch.float32, "meta")
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=5e-4)


def test_the_tiny_shape_is_that_of_the_warm_start_recipe() -> None:
    recipe = yaml.safe_load((REPOSITORY / "recipes" / "warm_start_tiny.yaml").read_text())["warm_start"]
    expected = recipe["architecture"] | {
        "vocab_size": recipe["train_tokenizer_vocab_size"],
        "max_position_embeddings": SHAPES["tiny"]["max_position_embeddings"],
    }
    assert {key: SHAPES["tiny"][key] for key in expected} == expected


def test_the_first_samples_are_history_and_the_others_are_decoded_on_rng_keys_of_their_own() -> None:
    trace = share_out([recorded("3", [1], [2, 2], [3, 3, 3], [4]), recorded("5", [5, 5], [6])], history=0.5)
    seen = {p.prompt_token_ids: [sample.tolist() for sample in p.samples] for p in trace.history}
    assert seen == {(3, 7): [[1], [2, 2]], (5, 7): [[5, 5]]}
    found = [
        (r.draw_index, r.prompt_token_ids, trace.responses[r.rng_key].tolist(), r.sampling.max_new_tokens)
        for r in trace.requests
    ]
    assert found == [(0, (3, 7), [3, 3, 3], 3), (0, (3, 7), [4], 1), (1, (5, 7), [6], 1)]
    assert len(trace.responses) == 3
    first = trace.first_prompts(1)
    assert (len(first.requests), len(first.history), first.max_sequence_tokens) == (2, 1, 5)


def test_generated_samples_repeat_each_other_and_are_the_same_again() -> None:
    prompts = generated_prompts(3, max_tokens=100, vocab_size=1000)
    assert len({prompt.prompt_token_ids for prompt in prompts}) == 3
    for prompt, again in zip(prompts, generated_prompts(3, max_tokens=100, vocab_size=1000), strict=True):
        assert all((a == b).all() for a, b in zip(prompt.samples, again.samples, strict=True))
        assert all(8 <= len(sample) <= 100 and sample.max() < 1000 for sample in prompt.samples)
        a, b = prompt.samples[:2]
        length = min(len(a), len(b))
        assert 0.1 < np.mean(a[:length] == b[:length]) < 0.9


# --- How it is decoded ------------------------------------------------------------------------------------------------


class Diary(DrafterBase):
    """Notes what it learned."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[object] = []

    def learn(self, completions: list[Completion]) -> None:  # type: ignore[override]
        self.entries += [(c.request.prompt_token_ids, c.token_ids) for c in completions]

    def on_policy_update(self) -> None:
        self.entries.append("update")


def test_the_engine_gives_the_trace_with_a_drafter_that_has_seen_the_history(policy: Transformer) -> None:
    trace = share_out([recorded("3", [5, 6], [9] * 6, [8, 8, 1])], history=1 / 3)
    engine = make_engine(policy, EngineOptions(kv_memory_gib=0.1, draft_budget=4), trace.requests, 2)
    for drafter in (Repeater(), Repeater()):
        prepare(engine, drafter, trace)
        ((run, completions),) = take_turns([EngineRun(engine, trace.requests)])
        check_completions(completions, trace, "x")
        assert engine.drafter is drafter
        assert run.seconds > 0
        assert run.num_tokens == run.metrics["engine/tokens"] == 9
        assert run.metrics["engine/tokens_per_decode_step"] > 1
    completions[0].token_ids[0] += 1
    with pytest.raises(AssertionError, match="x did not sample the trace"):
        check_completions(completions, trace, "x")
    diary = Diary()
    prepare(engine, diary, trace)
    assert diary.entries == [((3, 7), [5, 6]), "update"]


def test_engines_take_turns_at_every_step_and_the_one_with_the_fewest_tokens_is_next(policy: Transformer) -> None:
    """Two sequences at a time against one: neither is more than two steps ahead (the last is counted in the next)."""
    requests = requests_of([20] * 4)
    journal: list[tuple[int, int]] = []

    class Noted(EngineRun):
        def step(self) -> None:
            super().step()
            journal.append((runs[0].num_tokens, runs[1].num_tokens))

    runs = [Noted(make_engine(policy, EngineOptions(kv_memory_gib=0.1), requests, slots), requests) for slots in (2, 1)]
    results = take_turns(runs)
    assert [run.num_tokens for run, _ in results] == [80, 80]
    assert [run.metrics["engine/decode_steps"] for run, _ in results] == [42, 84]
    assert all(abs(a - b) <= 4 for a, b in journal)


def test_transformers_ends_each_row_at_its_length_and_samples_the_whole_distribution(
    folder: Path, policy: Transformer
) -> None:
    """Frequencies of the first token against our own model's probabilities, whatever generation_config.json says."""
    peer = HuggingFaceGenerate(folder, dtype=torch.float32, device=torch.device("cpu"))
    new_tokens = [3, 9, 1, 6]
    assert peer.run(requests_of(new_tokens)).num_tokens == 19
    for row, length in zip(peer.generate(requests_of(new_tokens)).tolist(), new_tokens, strict=True):
        assert row[length:] == [PAD_TOKEN_ID] * (9 - length)
    num_draws = 4000
    torch.manual_seed(0)
    tokens = peer.generate([make_request((5, 6, 7), 0, index, 1) for index in range(num_draws)])
    counts = torch.bincount(tokens.flatten(), minlength=VOCAB_SIZE)
    with torch.inference_mode():
        hidden = policy(torch.tensor([5, 6, 7]), PackedPlan.from_lengths([3], "cpu"))
        probs = policy.logits(hidden[-1]).double().softmax(-1)
    rare = probs * num_draws < 5  # too few expected for chi-square: counted as one
    observed = [*counts[~rare].tolist(), int(counts[rare].sum())]
    expected = torch.cat((probs[~rare], probs[rare].sum()[None])) * num_draws
    assert len(observed) > 10
    assert scipy.stats.chisquare(observed, expected.numpy()).pvalue > 1e-4


# --- The commands -----------------------------------------------------------------------------------------------------


def test_bench_rollout_compares_drafters_on_a_trace(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", 3)
    files = ("--json", tmp_path / "bench.json", "--write-docs", tmp_path / "docs.md")
    settings = ("--slots", "1,4", "--prompts-used", "1,3", "--history", 0.5, "--max-tokens", 9, "--repeats", 2)
    result = bench(
        *("rollout", "--trace", path, "--drafters", f"none,{REPEATER}", "--model-shape", "tiny", "--threads", 1),
        *("--trace-note", "made up", *settings, *files),
    )
    assert result.exit_code == 0, result.stderr
    values = json.loads((tmp_path / "bench.json").read_text())
    assert values["baseline"] == "none"
    found = [(row["labels"], row["num_tokens"]) for row in values["comparisons"]]
    assert found == [({"slots": "1", "sequences": "2"}, 18), ({"slots": "4", "sequences": "6"}, 54)]
    for row in values["comparisons"]:
        assert {name: len(runs) for name, runs in row["seconds"].items()} == {"none": 2, REPEATER: 2}
        assert row["ratios"].keys() == {REPEATER}
        for metrics in row["metrics"]["none"]:
            assert metrics["engine/tokens_per_decode_step"] == metrics["engine/verified_per_decode_step"] == 1
        for metrics in row["metrics"][REPEATER]:
            assert metrics["engine/tokens"] == row["num_tokens"]
    text = result.stdout
    assert text.startswith(
        "## Drafters on a trace: trace.jsonl, 0.5 as history, tiny, float32, cpu, 1 thread, 1, 4 slots"
    )
    assert "What the trace is: made up." in text
    assert "| 1 | 2 | none | " in text
    assert (tmp_path / "docs.md").read_text().endswith(text)


def test_bench_rollout_prices_steps_where_a_cost_is_stated(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", 1, num_samples=2, length=5)
    result = bench(
        *("rollout", "--trace", path, "--drafters", "none", "--model-shape", "tiny", "--threads", 1, "--repeats", 2),
        *("--price-as", "1:0.5,1024:0.5", "--json", tmp_path / "bench.json"),
    )
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads((tmp_path / "bench.json").read_text())["comparisons"]
    num_steps = row["metrics"]["none"][0]["engine/decode_steps"]
    assert row["seconds"]["none"] == [pytest.approx(num_steps / 2)] * 2
    assert "Seconds are priced, not measured" in result.stdout
    assert "priced as 1:0.5,1024:0.5\n" in result.stdout


def test_bench_rollout_compares_with_transformers(folder: Path, tmp_path: Path) -> None:
    settings = ("--sequences", "2,3", "--longest-tokens", 8, "--repeats", 1, "--threads", 1)
    result = bench("rollout", "--model", folder, *settings, "--json", tmp_path / "bench.json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads((tmp_path / "bench.json").read_text())["comparisons"]
    assert [row["labels"] for row in rows] == [{"sequences": "2"}, {"sequences": "3"}]
    assert all(list(row["seconds"]) == ["transformers", "srtrl"] for row in rows)
    assert result.stdout.startswith(f"## Rollouts: {folder}, float32, cpu, 1 thread\n")


@pytest.mark.parametrize("is_recorded", [True, False])
def test_bench_host_measures_each_stage_of_full_steps(tmp_path: Path, is_recorded: bool) -> None:
    path = write_trace(tmp_path / "trace.jsonl", 4, num_samples=8, length=60)
    source = ("--trace", path) if is_recorded else ("--max-tokens", 60)
    result = bench(
        *("host", "--slots", "4,8", "--drafters", f"none,{REPEATER}", "--repeats", 2, *source),
        *("--device-ms", "1:0.5,16:0.5,17:99", "--json", tmp_path / "bench.json"),
    )
    assert result.exit_code == 0, result.stderr
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    names = [(row["slots"], row["drafter"]) for row in rows]
    assert names == [(4, "none"), (4, REPEATER), (8, "none"), (8, REPEATER)]
    for row in rows:
        assert row["host_ms_per_step"] > 0
        for run in row["runs"]:
            assert sum(run["by_stage"].values()) == pytest.approx(run["seconds"])
            assert run["by_stage"]["other"] >= 0
            assert run["seconds"] <= run["host_seconds"]
            assert 0 < run["overlapped_seconds"] < run["host_seconds"]
        if row["drafter"] == "none":
            assert row["tokens_per_step"] == row["verified_per_step"] == 1
            assert row["by_stage"]["propose"] == row["by_stage"]["choose"] == 0
    if is_recorded:  # samples that say one token all the time: the drafts are right
        assert rows[1]["tokens_per_step"] > 1.5
        device_seconds = [row["runs"][0]["device_seconds"] for row in rows]
        assert device_seconds[1] < device_seconds[0]
    assert "| 4 | none | " in result.stdout


def test_host_time_is_added_to_the_devices_but_for_what_is_overlapped() -> None:
    run = HostRun(
        num_steps=1,
        seconds=1.0,
        by_stage={},
        tokens_per_step=1.0,
        verified_per_step=1.0,
        num_tokens=1,
        host_seconds=4.0,
        overlapped_seconds=1.5,
        device_seconds=10.0,
    )
    assert run.rollout_seconds(with_host=False) == 10
    assert run.rollout_seconds(overlap=False) == 14
    assert run.rollout_seconds() == 12.5


def test_bench_train_takes_turns_learns_the_same_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Five steps of 4 prompts from a pool of 8: three epochs, the last a part."""
    values = make_recipe(make_policy(tmp_path / "policy"), tmp_path / "runs", train__num_steps=5).model_dump(
        mode="json"
    )
    values["task"]["options"]["num_train"] = 8
    values["rewards"] = [{"name": "bench_cases:digit_share"}]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    files = ("--json", tmp_path / "bench.json", "--write-docs", tmp_path / "docs.md")
    result = bench("train", tmp_path / "recipe.yaml", "--drafters", f"none,{REPEATER}", "--slots", "4,2", *files)
    assert result.exit_code == 0, result.stderr
    runs = json.loads((tmp_path / "bench.json").read_text())["runs"]
    names = ["none", REPEATER]
    assert [(run["drafter"], run["slots"]) for run in runs] == [(name, slots) for slots in (4, 2) for name in names]
    for run in runs:
        assert [row["step"] for row in run["rows"]] == [1, 2, 3, 4, 5]
        learned = [[row["loss"], row["reward/mean"], row["tokens/response"]] for row in run["rows"]]
        assert learned == [[row["loss"], row["reward/mean"], row["tokens/response"]] for row in runs[0]["rows"]]
        assert all(0 < row["time/rollout"] < row["time/step"] for row in run["rows"])
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "docs.md").read_text().endswith(result.stdout)
    assert [line for line in result.stdout.splitlines() if line.startswith("| 2 | 3 | none | 1 |")]
    steps = [line.partition(":")[0].partition(", ")[2] for line in result.stderr.splitlines() if "step" in line]
    assert steps[4:8] == steps[:4][::-1]


# --- What is said -----------------------------------------------------------------------------------------------------


def run_of(recipe: Recipe, name: str, seconds: list[float], *, loss: float = 1.0) -> TrainingRun:
    counts = {
        "tokens/response": 100,
        "engine/tokens": 100.0,
        "engine/tokens_per_decode_step": 2.0,
        "engine/verified_per_decode_step": 3.0,
    }
    rows = [
        {"step": step, "data/epoch": step / 2, "time/rollout": value, "time/step": value + 1, "loss": loss} | counts
        for step, value in enumerate(seconds)
    ]
    return TrainingRun(name, recipe, rows)


def test_tables_of_training_add_up_seconds_and_compare_pairs_of_steps(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, tmp_path, rollout__slots=8)
    runs = [run_of(recipe, "none", [9.0, 2.0, 4.0, 3.0]), run_of(recipe, "srt", [9.0, 1.0, 2.0, 6.0])]
    assert seconds_grid(runs, by_epoch=True).rows == (
        ("8", "1", "none", "1", "2.00", "3.00", "20.000", "2.00", "3.00", "", ""),
        ("8", "1", "srt", "1", "1.00", "2.00", "10.000", "2.00", "3.00", "2.00x as fast", "1.50x as fast"),
        ("8", "2", "none", "2", "7.00", "9.00", "35.000", "2.00", "3.00", "", ""),
        *(
            ("8", "2", "srt", "2", "8.00", "10.00", "40.000", "2.00", "3.00", ratio, of_steps)
            for ratio, of_steps in [("1.25x as fast (0.50 to 2.00)", "1.12x as fast (0.57 to 1.67)")]
        ),
    )
    assert seconds_grid(runs, by_epoch=False).rows[1][:4] == ("8", "srt", "3", "9.00")
    check_same(runs)
    with pytest.raises(ValueError, match=r"step 0: srt at 8 slots learned something else than none at 8, .*\(loss\)"):
        check_same([run_of(recipe, "none", [2.0]), run_of(recipe, "srt", [1.0], loss=2.0)])


def test_a_ratio_is_the_median_of_pairs_and_its_interval_covers_as_often_as_it_says() -> None:
    assert str(paired_ratio([3.0], [2.0])) == "1.50x as fast"
    assert str(paired_ratio([3.0, 3.6], [2.0, 2.0])) == "1.65x as fast (1.50 to 1.80)"
    assert str(paired_ratio([1.0, 1.002], [1.0, 1.0])) == "1.001x as fast (1.000 to 1.002)"
    generator = np.random.default_rng(1)
    for num_pairs in (6, 9, 20, 31):
        noise = generator.lognormal(0, 0.1, (2000, num_pairs))
        ratios = [paired_ratio(one.tolist(), [1.0] * num_pairs) for one in noise]
        covered = np.mean([ratio.low <= 1 <= ratio.high for ratio in ratios])
        assert covered > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 2000)
        assert all(ratio.low <= ratio.value <= ratio.high for ratio in ratios)
    assert paired_ratio(sorted(noise[0]), [1.0] * 31).low > min(noise[0])


def test_a_document_has_its_table_and_where_it_was_measured() -> None:
    environment = Environment(
        command="srtrl bench x",
        date="2026-01-02",
        processor="A CPU",
        num_cores=4,
        num_threads=2,
        load=0.1,
        versions={"torch": "2.11"},
    )
    grid = Grid(columns=("n", "name", "s"), rows=(("1,000", "a", "1.5"), ("2", "b", "-")))
    document = Document(title="X", environment=environment, notes=("A note.",), grids=(grid,), values={"rows": [1]})
    assert document.to_markdown() == (
        "## X\n\n`srtrl bench x`\n\nA CPU, 4 cores, 2 threads; load 0.1 at the start; torch 2.11; 2026-01-02.\n\n"
        "- A note.\n\n| n | name | s |\n| --: | --- | --: |\n| 1,000 | a | 1.5 |\n| 2 | b | - |\n"
    )
    values = json.loads(document.to_json())
    assert (values["rows"], values["environment"]["num_cores"]) == ([1], 4)


def test_a_section_replaces_its_older_self_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.md"
    put_section(path, "## One\n\nold\n")
    put_section(path, "## Two\n\ntext\n\n### Within two\n\nmore\n")
    put_section(path, "## One\n\nnew\n")
    text = path.read_text()
    assert text.startswith("# Benchmarks\n\n")
    assert text.endswith("\n\n## One\n\nnew\n\n## Two\n\ntext\n\n### Within two\n\nmore\n")
    put_section(path, "## One\n\nnew\n")
    assert path.read_text() == text


def test_cpu_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz: 2\n")
    assert cpu_name(info) == "Some CPU @ 3 GHz: 2"
    assert cpu_name(tmp_path / "none")
