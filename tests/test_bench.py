"""The benchmarks: that contenders do the same work, what the statistics say, and what is written."""

import json
import math
import statistics
from collections import Counter
from pathlib import Path

import pytest
import scipy.stats
import torch
import yaml
from conftest import REPOSITORY
from tiny_run import VOCAB_SIZE, make_policy
from typer.testing import CliRunner, Result

from srtrl.bench.comparison import Comparison
from srtrl.bench.contender import OurDecoder
from srtrl.bench.environment import Environment, cpu_name
from srtrl.bench.peer_hf import PAD_TOKEN_ID, HuggingFaceGenerate
from srtrl.bench.shapes import SHAPES, write_random_model
from srtrl.bench.tables import Document, comparison_values, peer_grid, put_section
from srtrl.bench.workload import Workload, draw_lengths, make_workload, random_prompts
from srtrl.cli import app
from srtrl.engine.engine import EngineOptions
from srtrl.model.attention import PackedPlan
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model, load_tokenizer, read_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose `generation_config.json` asks for what a benchmark must not heed."""
    folder = make_policy(tmp_path_factory.mktemp("models") / "tiny")
    settings = {"do_sample": False, "top_k": 1, "repetition_penalty": 1.5, "eos_token_id": list(range(VOCAB_SIZE))}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def workload_of(new_tokens: list[int], *, num_samples: int = 1) -> Workload:
    prompts = random_prompts(len(new_tokens), shortest=2, longest=9, vocab_size=VOCAB_SIZE, seed=3)
    return make_workload("long-tailed", new_tokens, prompts, num_samples=num_samples, seed=5)


# --- What is measured -------------------------------------------------------------------------------------------------


def test_long_tailed_lengths_have_their_median_their_spread_and_their_limit() -> None:
    lengths = draw_lengths("long-tailed", 20_000, equal=5, longest=800, seed=1)
    assert max(lengths) == 800
    assert min(lengths) >= 1
    assert statistics.median(lengths) == pytest.approx(100, rel=0.03)
    logs = [math.log(length) for length in lengths if length < 800]
    assert statistics.stdev(logs) == pytest.approx(0.8, rel=0.05)
    assert lengths[:50] == draw_lengths("long-tailed", 50, equal=5, longest=800, seed=1)
    assert lengths[:50] != draw_lengths("long-tailed", 50, equal=5, longest=800, seed=2)
    assert draw_lengths("equal", 3, equal=5, longest=800, seed=1) == [5, 5, 5]


def test_random_prompts_are_of_all_lengths_between_the_two() -> None:
    prompts = random_prompts(500, shortest=3, longest=6, vocab_size=11, seed=0)
    assert Counter(map(len, prompts)).keys() == {3, 4, 5, 6}
    assert {token for prompt in prompts for token in prompt} == set(range(11))


def test_samples_of_a_prompt_share_it_and_have_streams_of_their_own() -> None:
    workload = workload_of([4, 5, 6, 7, 8], num_samples=2)
    prompts = [request.prompt_token_ids for request in workload.requests]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3] != prompts[4]
    assert len({request.rng_key for request in workload.requests}) == 5
    assert (workload.num_tokens, workload.longest) == (30, 8)
    assert workload.max_sequence_tokens == max(
        len(prompt) + new for prompt, new in zip(prompts, [4, 5, 6, 7, 8], strict=True)
    )


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


# --- Who takes part ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [True, False])
def test_our_decoder_makes_each_sequence_as_long_as_it_should_be(folder: Path, deterministic: bool) -> None:
    model = load_model(folder, dtype=torch.float32, device="cpu")
    decoder = OurDecoder("ours", model, EngineOptions(slots=0, kv_memory_gib=0.1, deterministic=deterministic))
    for new_tokens in ([3, 9, 1], [2, 2]):  # another workload needs another engine
        run = decoder.run(workload_of(new_tokens))
        assert run.num_tokens == sum(new_tokens)
        assert run.seconds > 0


def test_our_decoder_has_a_slot_for_every_sequence_unless_told(folder: Path) -> None:
    model = load_model(folder, dtype=torch.float32, device="cpu")
    workload = workload_of([20] * 6)
    for slots, num_steps in ((0, 21), (2, 63)):  # a step of prefill and twenty of decoding, once or for each pair
        decoder = OurDecoder("ours", model, EngineOptions(slots=slots, kv_memory_gib=0.1))
        assert decoder.run(workload).metrics["engine/decode_steps"] == num_steps


def test_the_peer_ends_each_row_at_its_length_and_pads_it_until_the_last(folder: Path) -> None:
    new_tokens = [3, 9, 1, 6]
    peer = HuggingFaceGenerate(folder, dtype=torch.float32, device=CPU)
    workload = workload_of(new_tokens)
    assert peer.run(workload).num_tokens == 19
    torch.manual_seed(0)
    tokens = peer.generate(workload)
    assert tokens.shape == (4, 9)
    for row, length in zip(tokens.tolist(), new_tokens, strict=True):
        assert row[length:] == [PAD_TOKEN_ID] * (9 - length)
    drawn = {token for row, length in zip(tokens.tolist(), new_tokens, strict=True) for token in row[:length]}
    assert drawn != {PAD_TOKEN_ID}


def test_the_peer_samples_from_the_whole_distribution_of_the_same_weights(folder: Path) -> None:
    """Frequencies of the first token against our own model's probabilities, whatever generation_config.json says."""
    peer = HuggingFaceGenerate(folder, dtype=torch.float32, device=CPU)
    num_draws = 4000
    workload = make_workload("equal", [1] * num_draws, [(5, 6, 7)], num_samples=num_draws, seed=0)
    torch.manual_seed(0)
    counts = torch.bincount(peer.generate(workload).flatten(), minlength=VOCAB_SIZE)
    model = load_model(folder, dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        hidden = model(torch.tensor([5, 6, 7]), PackedPlan.from_lengths([3], "cpu"))
        probs = model.logits(hidden[-1]).double().softmax(-1)
    rare = probs * num_draws < 5  # too few expected for chi-square: counted as one
    observed = [*counts[~rare].tolist(), int(counts[rare].sum())]
    expected = torch.cat((probs[~rare], probs[rare].sum()[None])) * num_draws
    assert len(observed) > 10
    assert scipy.stats.chisquare(observed, expected.numpy()).pvalue > 1e-4


# --- What is written --------------------------------------------------------------------------------------------------


def document(**seconds: list[float]) -> Document:
    environment = Environment(
        command="srtrl bench rollout",
        date="2026-01-02",
        processor="A CPU",
        num_cores=4,
        num_threads=2,
        load=0.1,
        versions={"torch": "2.11"},
    )
    comparison = Comparison(lengths="equal", num_sequences=8, num_tokens=1000, longest=125, seconds=seconds)
    ratios = {name: comparison.ratio("ours", to=name) for name in seconds if name != "ours"}
    return Document(
        title="Rollouts: x",
        environment=environment,
        notes=("A note.",),
        grids=(peer_grid("ours", [comparison]),),
        values={"comparisons": [comparison_values(comparison, ratios)]},
    )


def test_markdown_has_the_medians_the_speeds_the_ratio_and_where_it_was_measured() -> None:
    text = document(ours=[1.0, 2.0, 1.2], peer=[2.0, 4.0, 2.4]).to_markdown()
    assert text.startswith(
        "## Rollouts: x\n\n`srtrl bench rollout`\n\nA CPU, 4 cores, 2 threads; load 0.1 at the start;"
    )
    assert "- A note.\n" in text
    assert "| 8 | equal | ours | 1.200 | 833 |  |\n" in text
    assert "| 8 | equal | peer | 2.400 | 417 | 2.000x as fast (2.000 to 2.000) |\n" in text


def test_json_has_every_run() -> None:
    values = json.loads(document(ours=[1.0], peer=[3.0]).to_json())
    assert values["comparisons"][0]["seconds"] == {"ours": [1.0], "peer": [3.0]}
    assert values["comparisons"][0]["ratios"] == {"peer": {"value": pytest.approx(3.0), "low": None, "high": None}}
    assert values["environment"]["versions"] == {"torch": "2.11"}


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
    path.write_text("## One\n\nonly a section\n")
    put_section(path, "## One\n\nnew\n")
    assert path.read_text() == "## One\n\nnew\n"


def test_cpu_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz: 2\n")
    assert cpu_name(info) == "Some CPU @ 3 GHz: 2"
    assert cpu_name(tmp_path / "none")


# --- The command ------------------------------------------------------------------------------------------------------


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "rollout", *(str(argument) for argument in arguments)])


def test_the_command_measures_all_and_writes_what_it_prints(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "2 + 3 ="}\n{"token_ids": [1, 2, 3]}\n')
    settings = ("--sequences", "2,3", "--samples", 2, "--equal-tokens", 3, "--longest-tokens", 8, "--repeats", 2)
    files = ("--json", tmp_path / "bench.json", "--write-docs", tmp_path / "docs.md")
    result = bench("--model", folder, "--prompts", tmp_path / "prompts.jsonl", "--threads", 1, *settings, *files)
    assert result.exit_code == 0, result.stderr
    values = json.loads((tmp_path / "bench.json").read_text())
    cells = [(row["num_sequences"], row["lengths"]) for row in values["comparisons"]]
    assert cells == [(2, "equal"), (3, "equal"), (2, "long-tailed"), (3, "long-tailed")]
    for row in values["comparisons"]:
        assert list(row["seconds"]) == ["srtrl", "transformers", "srtrl, not deterministic"]
        assert all(len(runs) == 2 for runs in row["seconds"].values())
        assert row["ratios"].keys() == {"transformers", "srtrl, not deterministic"}
    assert [row["num_tokens"] for row in values["comparisons"][:2]] == [6, 9]
    assert result.stdout.startswith(f"## Rollouts: {folder}, float32, cpu, ")
    assert (tmp_path / "docs.md").read_text().endswith(result.stdout)
    assert "bench rollout step 36/36  3 sequences, long-tailed: srtrl, not deterministic, run 2 of 2" in result.stderr


def test_one_peer_and_one_spread_of_lengths_of_a_random_model(tmp_path: Path) -> None:
    settings = ("--sequences", 2, "--lengths", "equal", "--equal-tokens", 2, "--repeats", 1, "--prompt-tokens", 2, 4)
    result = bench(
        "--model-shape", "tiny", "--peer", "hf", "--threads", 1, *settings, "--json", tmp_path / "bench.json"
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("## Rollouts: tiny, float32, cpu, 1 thread\n")
    (row,) = json.loads((tmp_path / "bench.json").read_text())["comparisons"]
    assert list(row["seconds"]) == ["srtrl", "transformers"]
    assert "random ids, 2 to 4 tokens; 1 sequence of each" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--sequences", "8,0"), "--sequences: expected counts like 8,32,128, found '8,0'"),
        (("--prompt-tokens", 9, 3), "--prompt-tokens: expected 1 <= LEAST <= MOST, found 9 3"),
        (("--kv-memory-gib", 0), "--kv-memory-gib: expected a number above 0"),
        (("--longest-tokens", 200), "but the model was made for 128; lower them"),
        (("--prompts", "PROMPTS", "--sequences", 4), "has 3 rows, but 4 different prompts are needed"),
        (("--prompts", "PROMPTS", "--sequences", 3), ":3: the prompt is empty"),
        (("--prompts", "PROMPTS", "--sequences", 2), ":2: expected one of `prompt`"),
        (("--model", "./nowhere"), "./nowhere: no local folder"),
        (("--precision", 0.02, "--repeats", 2), "--precision: expected a share like 0.02 and --repeats of at least 3"),
        (("--precision", 2), "--precision: expected a share like 0.02"),
        (("--max-minutes", 2), "--max-minutes: expected a number above 0, beside --precision; found 2"),
        (("--control",), "--control has no meaning here: it is for --trace; or --drafters on a live policy"),
        (("--slots", "4,8"), "--slots: one number here, found 2; several are for --drafters"),
    ],
)
def test_mistakes_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], error: str
) -> None:
    monkeypatch.setattr("srtrl.bench.peers_run.compare_all", lambda *_: pytest.fail("must not be reached"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n{"prompt": ""}\n')
    if arguments[:2] == ("--prompts", "PROMPTS") and arguments[3] == 3:
        path.write_text('{"prompt": "a"}\n{"token_ids": [1]}\n{"prompt": ""}\n')
    given = [path if argument == "PROMPTS" else argument for argument in arguments]
    result = bench("--model", folder, *given)
    assert result.exit_code == 2
    assert error in result.stderr


def test_an_unknown_shape_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--model-shape: no shape 'tinny', did you mean `tiny`"):
        write_random_model("tinny", tmp_path, torch.float32)
    write_random_model("tiny", tmp_path / "tiny", torch.float32)
    assert read_config(tmp_path / "tiny").hidden_size == SHAPES["tiny"]["hidden_size"]
    with pytest.raises(ValueError, match="no tokenizer"):
        load_tokenizer(tmp_path / "tiny")
