"""The benchmark of drafters on a live policy: same tokens for all, run-ahead, changes of the policy, and its tables."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_cases import REPEATER, Repeater, bench
from tiny_run import make_policy

from srtrl.bench.comparison import Comparison
from srtrl.bench.drafter_tables import merge_metrics, merge_steps, run_ahead_grid, speed_grid, time_grid
from srtrl.bench.live_run import LiveDecoder, run_series
from srtrl.bench.live_workload import LiveWorkload, PolicyChanges
from srtrl.bench.run_plan import RunPlan
from srtrl.engine.engine import EngineOptions
from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model
from srtrl.types import Completion, Prompt, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def policy(folder: Path) -> Transformer:
    return load_model(folder, dtype=torch.float32, device="cpu")


def live_workload(*, num_prompts: int = 4, step_prompts: int = 2, num_steps: int = 4) -> LiveWorkload:
    prompts = [
        Prompt(prompt_id=str(index), text="", token_ids=(5, 6, 10 + index), answer="") for index in range(num_prompts)
    ]
    return LiveWorkload(
        prompts=tuple(prompts),
        step_prompts=step_prompts,
        num_steps=num_steps,
        num_samples=2,
        sampling=SamplingParams(max_new_tokens=6),
        seed=3,
    )


def test_steps_visit_the_prompts_in_order_on_new_streams() -> None:
    workload = live_workload()
    ids = [[prompt.prompt_id for _, prompt in workload.draws(step)] for step in range(1, 6)]
    assert ids == [["0", "1"], ["2", "3"], ["0", "1"], ["2", "3"], []]
    rng_keys = {request.rng_key for step in range(1, 5) for request in workload.requests(step)}
    assert len(rng_keys) == 16
    assert [tokens[-1] for tokens in workload.next_uses(2)] == [12, 13, 10, 11]


def test_coupled_run_ahead_has_the_streams_of_the_next_step_and_uncoupled_has_none_of_them() -> None:
    workload = live_workload()
    following = {request.rng_key for request in workload.requests(2)}
    coupled = workload.run_ahead("coupled", 1)
    uncoupled = workload.run_ahead("uncoupled", 1)
    assert {request.rng_key for request in coupled} == following
    assert following.isdisjoint(request.rng_key for request in uncoupled)
    assert {request.prompt_token_ids for request in uncoupled} == {(5, 6, 12), (5, 6, 13)}
    assert all(request.is_run_ahead for request in [*coupled, *uncoupled])
    assert workload.run_ahead("off", 1) == workload.run_ahead("coupled", 4) == []


def test_drawn_lengths_are_those_of_the_stream_and_end_tokens_are_not_heeded() -> None:
    workload = replace(
        live_workload(), lengths="long-tailed", sampling=SamplingParams(max_new_tokens=800, end_token_ids=(3,))
    )
    following = {request.rng_key: request.sampling for request in workload.requests(2)}
    assert {request.rng_key: request.sampling for request in workload.run_ahead("coupled", 1)} == following
    assert all(sampling.end_token_ids == () for sampling in following.values())
    assert len({sampling.max_new_tokens for sampling in following.values()}) > 2
    equal = replace(workload, lengths="equal")
    assert {request.sampling.max_new_tokens for request in equal.requests(1)} == {800}


def test_all_contenders_of_a_series_sample_the_same_and_the_weights_are_restored(policy: Transformer) -> None:
    before = [parameter.clone() for parameter in policy.parameters()]
    options = EngineOptions(slots=3, kv_memory_gib=0.1, max_sequence_tokens=32)
    contenders = [
        LiveDecoder("a", policy, options, make_drafter=Repeater, run_ahead="off"),
        LiveDecoder("b", policy, options, make_drafter=Repeater, run_ahead="coupled"),
    ]
    changes = PolicyChanges(policy, 0.05, seed=1)
    told: list[str] = []
    lengths: list[int] = []
    steps = run_series(contenders, live_workload(), RunPlan(repeats=2), changes, told.append, lengths)
    assert [step.labels for step in steps] == [{"slots": "3", "step": str(number)} for number in range(1, 5)]
    assert lengths == [6] * 16
    assert len(told) == 2 + 2 * 4 * 2
    assert all(len(step.seconds[name]) == 2 for step in steps for name in "ab")
    assert len(changes.kls) == 8
    assert changes.kls[:4] == changes.kls[4:]  # the same changes in each series
    assert all(kl > 0 for kl in changes.kls)
    for parameter, value in zip(policy.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_contenders_that_sample_otherwise_are_caught(policy: Transformer, folder: Path) -> None:
    other = load_model(folder, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    options = EngineOptions(slots=3, kv_memory_gib=0.1, max_sequence_tokens=32)
    contenders = [
        LiveDecoder(name, model, options, make_drafter=Repeater, run_ahead="off")
        for name, model in (("a", policy), ("b", other))
    ]
    with pytest.raises(AssertionError, match="b sampled other tokens"):
        run_series(
            contenders, live_workload(), RunPlan(repeats=1), PolicyChanges(policy, 0, seed=1), lambda _: None, []
        )


def test_the_change_of_the_policy_is_measured(policy: Transformer) -> None:
    """The KL of a small change grows with the square of its size; without a change there is none."""
    kls = []
    for sigma in (0.001, 0.002):
        changes = PolicyChanges(policy, sigma, seed=1)
        request = live_workload().requests(1)[0]
        completion = Completion(
            request=request, token_ids=[1, 2, 3], rollout_logprobs=[0] * 3, finish_reason="length", policy_version=0
        )
        with changes.series() as generator:
            changes.change(generator, [completion])
        kls += changes.kls
    assert kls[1] / kls[0] == pytest.approx(4, rel=0.1)
    still = PolicyChanges(policy, 0.0, seed=1)
    with still.series() as generator:
        still.change(generator, [])
    assert still.kls == []


def test_the_command_compares_drafters_on_a_live_policy(folder: Path, tmp_path: Path) -> None:
    result = bench(
        *("--drafters", f"none,{REPEATER}", "--model", folder, "--slots", "2,8", "--prompts-used", 2, "--samples", 3),
        *("--max-tokens", 8, "--epochs", 2, "--repeats", 2, "--threads", 1, "--run-ahead", "off,coupled"),
        *("--policy-change", 0.01, "--json", tmp_path / "bench.json"),
    )
    assert result.exit_code == 0, result.stderr
    values = json.loads((tmp_path / "bench.json").read_text())
    names = ["none", REPEATER, f"{REPEATER}, coupled"]
    assert [row["labels"] for row in values["steps"]] == [
        {"slots": slots, "epoch": epoch} for slots in ("2", "8") for epoch in ("1", "2")
    ]
    for row in values["steps"]:
        assert list(row["seconds"]) == names
    for whole, first, second in zip(values["comparisons"], values["steps"][::2], values["steps"][1::2], strict=True):
        assert whole["num_tokens"] == first["num_tokens"] + second["num_tokens"]
        for name in names:
            sums = [a + b for a, b in zip(first["seconds"][name], second["seconds"][name], strict=True)]
            assert whole["seconds"][name] == pytest.approx(sums)
    assert len(values["kl_per_token"]) == 2 * 2 * 2
    num_tokens = values["comparisons"][0]["num_tokens"]
    assert num_tokens == values["comparisons"][1]["num_tokens"]  # whatever the slots
    assert f"all contenders sampled the same {2 * num_tokens:,} tokens" in result.stdout
    assert "What run-ahead brought:" in result.stdout


def test_prompts_of_a_file_and_long_tailed_lengths(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "2 + 3 ="}\n{"token_ids": [1, 2, 3]}\n')
    settings = ("--drafters", "none", "--model", folder, "--samples", 1, "--max-tokens", 2, "--repeats", 1)
    result = bench(*settings, "--epochs", 1, "--prompts-used", 2, "--prompts", tmp_path / "prompts.jsonl")
    assert result.exit_code == 0, result.stderr
    assert f"2 prompts of {tmp_path / 'prompts.jsonl'}, 1 samples each, visited 1 time on" in result.stdout
    result = bench(*settings, "--epochs", 2, "--prompts-used", 4, "--lengths", "long-tailed", "--step-prompts", 2)
    assert result.exit_code == 0, result.stderr
    assert "End tokens are not heeded, lengths are log-normal (sigma 0.8), cut at 2:" in result.stdout
    assert "| slots | step | drafter |" in result.stdout


# --- Tables ----------------------------------------------------------------------------------------------------------


def comparison_of(label: str, metrics: list[dict[str, float]], seconds: list[float], num_tokens: int) -> Comparison:
    return Comparison(
        lengths="sampled",
        num_sequences=2,
        num_tokens=num_tokens,
        longest=9,
        seconds={"none": [2 * value for value in seconds], "srt": seconds},
        metrics={"none": [one | {"engine/tokens_per_decode_step": 1.0} for one in metrics], "srt": list(metrics)},
        labels={"slots": "8", "step": label},
    )


def metrics_of(num_tokens: float, per_step: float, **others: float) -> dict[str, float]:
    parts = {f"engine/{part}_seconds": share for part, share in zip(("draft", "forward"), (0.1, 0.3), strict=True)}
    return (
        {"engine/tokens": num_tokens, "engine/tokens_per_decode_step": per_step, "engine/decode_steps": 10.0}
        | {"engine/verified_per_decode_step": 4.0, "engine/sample_seconds": 0.06, "engine/commit_seconds": 0.04}
        | parts
        | {f"engine/{name}": value for name, value in others.items()}
    )


def test_counts_add_up_and_means_count_as_often_as_samples_sampled() -> None:
    merged = merge_metrics([metrics_of(100, 2.0, draft_hit_rate=0.5), metrics_of(300, 2.0), metrics_of(50, 1.0)])
    assert merged["engine/tokens"] == 450
    assert merged["engine/decode_steps"] == 30
    assert merged["engine/tokens_per_decode_step"] == pytest.approx(450 / 250)
    assert merged["engine/draft_hit_rate"] == 0.5
    assert merged["engine/forward_seconds"] == pytest.approx(0.9)
    first = metrics_of(100, 2.0, run_ahead_followed=1.0, run_ahead_first_mismatch=40.0, run_ahead_tokens_used=5.0)
    second = metrics_of(900, 2.0, run_ahead_followed=3.0, run_ahead_first_mismatch=20.0, run_ahead_tokens_used=6.0)
    merged = merge_metrics([metrics_of(100, 2.0), first, second])
    assert merged["engine/run_ahead_first_mismatch"] == 25
    assert merged["engine/run_ahead_tokens_used"] == 11


def test_tables_show_what_was_measured() -> None:
    steps = [
        comparison_of("1", [metrics_of(100, 2.0), metrics_of(100, 4.0)], [1.0, 1.2], 100),
        comparison_of("2", [metrics_of(300, 2.0), metrics_of(300, 4.0)], [3.0, 3.2], 300),
    ]
    whole = merge_steps(steps)
    assert whole.seconds == {"none": [8.0, pytest.approx(8.8)], "srt": [4.0, pytest.approx(4.4)]}
    assert whole.labels == {"slots": "8"}
    lines = speed_grid(steps, caption="Steps").to_markdown()
    assert lines[:2] == ["Steps:", ""]
    assert lines[2] == (
        "| slots | step | drafter | seconds | ms/step | ms/token | tokens/step | verified/step | against none |"
    )
    assert lines[4] == "| 8 | 1 | none | 2.200 | 220.00 | 22.000 | 1.00 | 4.00 |  |"
    assert lines[5] == "| 8 | 1 | srt | 1.100 | 110.00 | 11.000 | 3.00 | 4.00 | 2.000x as fast (2.000 to 2.000) |"
    (_, _, _, _, _, row) = time_grid([whole]).to_markdown()
    assert row == "| 8 | srt | 20.0% | 60.0% | 12.0% | 8.0% | - | - | - - - - |"


def test_what_run_ahead_brought_is_a_share_of_all_tokens() -> None:
    made = metrics_of(
        200, 2.0, run_ahead_tokens_used=50.0, run_ahead_first_mismatch=12.25, run_ahead_tokens_made=1234.0
    )
    (*_, row) = run_ahead_grid([comparison_of("1", [made], [1.0], 300)], [200]).to_markdown()
    assert row == "| 8 | 1 | srt | 1,234 | - | 25.0% | 12.2 | 2.00x as fast |"
    (*_, row) = run_ahead_grid([comparison_of("1", [metrics_of(200, 2.0)], [1.0], 300)], [200]).to_markdown()
    assert row == "| 8 | 1 | srt | - | - | - | - | 2.00x as fast |"
