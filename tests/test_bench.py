"""Measurements and output of the benchmark, on tiny models: same work for all, the recorded tokens, the figures."""

import json
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from bench_cases import REPEATER, write_rows

from srtrl.model.hf_config import config_from_hf
from srtrl.model.published_shapes import SHAPES
from srtrl.model.transformer import Transformer

sys.path.append(str(Path(__file__).resolve().parents[1] / "docs"))
import bench_rollout
from bench_rollout import (
    alternate,
    compare_pairs,
)

NAMES = ("none", REPEATER)


def test_shapes_have_the_published_number_of_parameters() -> None:
    billions = {"qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.544, "qwen3-4b": 4.022, "qwen3-8b": 8.191}
    for shape, expected in billions.items():
        model = Transformer(config_from_hf(SHAPES[shape]), torch.float32, "meta")
        assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(expected, abs=5e-4)


def test_the_script_compares_drafters_on_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt_token_ids": [1, 2, prompt], "token_ids": [10 * prompt + sample] * 12}
        for prompt, sample in product(range(3), range(4))
    ]
    trace = write_rows(tmp_path / "trace.jsonl", *rows)
    settings = "--slots 1,4 --prompts-used 2 --history 0.5 --max-tokens 9 --repeats 2 --model-shape tiny --threads 1"
    command = ["bench_rollout.py", "--trace", str(trace), "--drafters", ",".join(NAMES), *settings.split(), "--json"]
    monkeypatch.setattr(sys, "argv", command)
    bench_rollout.main()
    values = json.loads(capsys.readouterr().out)
    found = [(row["slots"], row["sequences"], row["drafter"]) for row in values["rows"]]
    assert found == [(slots, 4, name) for slots in (1, 4) for name in NAMES]
    for none, repeater in (values["rows"][:2], values["rows"][2:]):
        assert none["tokens_per_step"] == none["verified_per_step"] == 1
        assert [one["engine/tokens"] for one in repeater["runs"]] == [36, 36]
        assert repeater["lowest"] <= repeater["times_as_fast"] <= repeater["highest"]
        assert repeater["tokens_per_second"] == 36 / repeater["seconds"]
    assert values["title"] == "Drafters on a trace: trace.jsonl, 0.5 as history, tiny, float32, cpu, 1 threads"
    generated = [
        "bench_rollout.py",
        "--model-shape",
        "tiny",
        "--max-tokens",
        "8",
        "--repeats",
        "1",
        "--drafters",
        "none",
    ]
    monkeypatch.setattr(sys, "argv", generated)
    bench_rollout.main()
    shown = capsys.readouterr().out
    assert shown.startswith("## Rollouts: generated, 0 as history, tiny")
    assert "|    16 |        16 |    none |" in shown, "one prompt, all samples at a time"
    monkeypatch.setattr(sys, "argv", [*generated, "--history", "1"])
    with pytest.raises(ValueError, match="--history: expected a share of at least 0 and below 1, found 1"):
        bench_rollout.main()


def test_candidates_alternate_in_reversed_order_and_the_first_turn_does_not_count() -> None:
    journal: list[str] = []
    results = alternate({name: lambda name=name: journal.append(name) or len(journal) for name in "ab"}, 2)  # type: ignore[misc, func-returns-value]
    assert "".join(journal) == "abbaab"
    assert results == {"a": [4, 5], "b": [3, 6]}
    assert compare_pairs([3.0, 4.0, 3.6], [2.0, 2.0, 2.0]) == {"times_as_fast": 1.8, "lowest": 1.5, "highest": 2.0}
