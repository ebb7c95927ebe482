"""Whole runs of the modes `partial` and `spec_rl`: their limits are `on_policy`, and nothing depends on timing."""

import math
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from engine_cases import make_request, tiny_policy
from scipy.stats import chisquare
from test_rank_training import assert_close_runs, train
from test_resume import die_at_call, finish, start
from tiny_run import assert_same_run, learned_rows, make_recipe
from transformers import AutoModelForCausalLM

from srtrl.engine.sampling import make_rng_key
from srtrl.metrics import read_metrics
from srtrl.recipe.schema import Recipe
from srtrl.run.checkpoint import list_checkpoints
from srtrl.trainer.off_policy import accept_prefixes, load_earlier, save_earlier, truncated
from srtrl.trainer.passes import UpdateContext
from srtrl.trainer.trainer import Trainer, run_training
from srtrl.types import FinishReason, Prefix, Request, SampleKey

MODES: dict[str, dict[str, Any]] = {
    "partial": {"mode": "partial", "min_complete": 0.5},
    "spec_rl": {"mode": "spec_rl", "lenience": 1.0},
}
LIMITS: dict[str, dict[str, Any]] = {
    "partial": {"mode": "partial", "min_complete": 1.0},
    "spec_rl": {"mode": "spec_rl", "lenience": 0.0},
}
RECOMPUTE: dict[str, Any] = {"old_logprobs": "recompute", "importance_cap": 2.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "few slots": {"slots": 3},
    "no drafts": {"drafter": "none", "slots": 16},
    "every run-ahead": {"draft_budget": 8, "run_ahead_max_slowdown": 1e9, "slots": 40},
}


def recipe_of(policy: Path, output_dir: Path, rollout: dict[str, Any], **changes: Any) -> Recipe:
    """Ten prompts, 4 in a step: from step 3 on they come again. Stop strings make lengths uneven."""
    rollout = {"max_new_tokens": 40, "stop_strings": list("aeiouxyz012345"), **rollout}
    values: dict[str, Any] = {f"rollout__{key}": value for key, value in rollout.items()}
    values |= {"rewards": [{"name": "test_rank_training:weight"}], "algorithm": RECOMPUTE}
    values |= {"train__num_steps": 6, "train__learning_rate": 1e-3, "eval": {"before_and_after": False}}
    return make_recipe(policy, output_dir, **(values | changes))


@pytest.fixture(scope="module", params=MODES)
def plain(request: pytest.FixtureRequest, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, run_training(recipe_of(policy, folder, MODES[request.param])).folder


DYNAMIC: dict[str, Any] = {"algorithm": {**RECOMPUTE, "filters": ["test_off_policy:keep_even"]}}


def keep_even(rewards: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A filter that drops some groups by a hash of their rewards."""
    return (rewards.sum(dim=1) * 7).round() % 3 > 0


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_at_their_limits_the_modes_are_on_policy(policy: Path, tmp_path: Path, is_dynamic: bool) -> None:
    changes = DYNAMIC if is_dynamic else {}
    more = {"dynamic_sampling": is_dynamic}
    expected = run_training(recipe_of(policy, tmp_path / "on_policy", more, **changes)).folder
    rows = learned_rows(expected)
    assert not is_dynamic or {row["groups/dropped"] for row in rows} > {0}
    for mode, limit in LIMITS.items():
        folder = run_training(recipe_of(policy, tmp_path / mode, limit | more, **changes)).folder
        mine = learned_rows(folder, beside=("off_policy/",))
        assert mine == rows, mode
        for file in sorted((expected / "rollouts").iterdir()):
            assert pq.read_table(folder / "rollouts" / file.name).equals(pq.read_table(file)), (mode, file.name)


@pytest.mark.parametrize("name", SETTINGS)
def test_neither_slots_nor_drafts_change_what_is_learned(
    name: str, policy: Path, plain: tuple[str, Path], tmp_path: Path
) -> None:
    mode, expected = plain
    folder = run_training(recipe_of(policy, tmp_path, MODES[mode] | SETTINGS[name])).folder
    assert_same_run(folder, expected)


def test_killed_and_resumed_equals_uninterrupted(policy: Path, plain: tuple[str, Path], tmp_path: Path) -> None:
    """In step 5; the checkpoint after step 4 has samples that go on, or begin others."""
    mode, expected = plain
    recipe = recipe_of(policy, tmp_path, MODES[mode])
    kill = partial(die_at_call, Trainer, "assign_credit", 5)
    assert finish(start(recipe, prepare=kill)) == -signal.SIGKILL
    assert (tmp_path / "run" / "checkpoints" / "step_000004" / "earlier_samples.safetensors").is_file()
    assert finish(start(recipe, resume=True)) == 0
    assert_same_run(tmp_path / "run", expected)


def test_several_ranks_learn_what_one_learns(policy: Path, tmp_path: Path) -> None:
    """Both modes; in the second step samples go on, and prompts come again."""
    for mode, rollout in MODES.items():
        changes = {"train__num_steps": 2, "train__learning_rate": 1e-4, "task__options__num_train": 4}
        one = recipe_of(policy, tmp_path / f"{mode}1", rollout, **changes)
        two = recipe_of(policy, tmp_path / f"{mode}2", rollout, **changes)
        run_training(one)
        assert [process.exitcode for process in train(two, 2)] == [0, 0]
        assert_close_runs(tmp_path / f"{mode}2" / "run", tmp_path / f"{mode}1" / "run", tolerance=1e-5)
        assert learned_rows(tmp_path / f"{mode}2" / "run")[-1]["off_policy/stale_share"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_log_probs_weights_and_loss_by_an_independent_computation(mode: str, policy: Path, tmp_path: Path) -> None:
    """Token by token with `transformers`, on the weights of each version; some samples have tokens of two versions.

    There is one optimizer step in a step, so that all ratios are 1, and the loss is that of weights and advantages.
    """
    changes = {"train__mini_batch_prompts": 4, "train__num_epochs": 1, "train__learning_rate": 0.01}
    changes |= {"train__checkpoint_every": 1, "train__keep_checkpoints": 9, "train__warmup_steps": 0}
    algorithm = {"old_logprobs": "recompute", "importance_cap": 1.1 if mode == "spec_rl" else None}
    recipe = recipe_of(policy, tmp_path, MODES[mode], **changes, algorithm=algorithm)
    run = run_training(recipe).folder
    versions = [policy, *list_checkpoints(run / "checkpoints")]
    models = [AutoModelForCausalLM.from_pretrained(folder).double() for folder in versions]
    cap = recipe.importance_cap
    assert cap == (1.1 if mode == "spec_rl" else 2.0)
    num_mixed, num_capped = 0, 0
    for row in read_metrics(run / "metrics.jsonl"):
        step = int(row["step"])
        rows = pq.read_table(run / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
        losses, all_weights, computed, ages = [], [], [], []
        for sample in rows:
            num_prompt, own = len(sample["prompt_token_ids"]), sample.get("policy_versions")
            assert sample["policy_version"] == step - 1
            own = own or [step - 1] * len(sample["token_ids"])
            num_mixed += len(set(own)) > 1
            tokens = torch.tensor([*sample["prompt_token_ids"], *sample["token_ids"]])
            logprobs = [model(tokens[None]).logits[0].log_softmax(-1).detach() for model in models[:step]]
            weights = []
            for index, (token, version) in enumerate(zip(sample["token_ids"], own, strict=True)):
                then, now = (float(logprobs[v][num_prompt + index - 1, token]) for v in (version, step - 1))
                assert sample["rollout_logprobs"][index] == pytest.approx(then, abs=2e-4)
                weights.append(math.exp(now - then))
            all_weights += weights
            computed += weights if sample["advantage"] else []  # without one the update makes no pass
            ages += [step - 1 - version for version in own]
            losses.append(-sample["advantage"] * np.mean(np.minimum(weights, cap)))
        assert row["loss"] == pytest.approx(np.mean(losses), abs=1e-4)
        assert row["off_policy/weight_mean"] == pytest.approx(np.mean(all_weights), rel=1e-3)
        assert row["off_policy/weight_max"] == pytest.approx(max(all_weights), rel=1e-3)
        assert row["importance/weight"] == pytest.approx(np.mean(np.minimum(computed, cap)), rel=1e-3)
        assert row["off_policy/stale_share"] == np.mean(np.array(ages) > 0)
        assert row.get("off_policy/age_2", 0) == np.mean([age in (2, 3) for age in ages])
        assert row["logprob_difference/max"] < 1e-4, "of tokens of this step alone"
        num_capped += row["importance/capped_share"] > 0
    assert num_mixed > 5
    assert num_capped


@pytest.mark.parametrize("lenience", [0.3, 1.0, 1.5, 1e6])
def test_acceptance_is_that_of_its_formula(lenience: float, policy: Path, tmp_path: Path) -> None:
    """On a policy that is exactly uniform over 61 tokens, with earlier probabilities that are given.

    The number of accepted tokens is k with probability prod_{i<k} a_i (1 - a_k), a_i = min(1, lenience p_new / p_old).
    """
    ratios = np.array([1.0, 0.9, 1.3, 0.7, 0.95])
    model = tiny_policy(scale=0.0)
    prefix = Prefix(
        token_ids=np.arange(5, dtype=np.int32),
        rollout_logprobs=np.log(1 / 61 / ratios).astype(np.float32),
        policy_versions=np.zeros(5, np.int32),
        finish_reason="stop",
    )
    context = UpdateContext(recipe=recipe_of(policy, tmp_path, {}, train__micro_batch_tokens=8192), step=1)
    requests = [
        make_request(draw, sample, rng_key=make_rng_key(3, "train", draw, sample), max_new_tokens=8)
        for draw in range(1000)
        for sample in range(4)
    ]
    accepted = accept_prefixes([(request, prefix) for request in requests], model, lenience, context)
    lengths = [len(accepted[key].token_ids) if key in accepted else 0 for key in map(key_of, requests)]
    chances = np.minimum(1, lenience * ratios)
    reached = np.cumprod([1, *chances])
    shares = np.append(reached[:-1] * (1 - chances), reached[-1])
    counts, is_possible = np.bincount(lengths, minlength=6), shares > 0
    assert not counts[~is_possible].any()
    assert chisquare(counts[is_possible], len(lengths) * shares[is_possible]).pvalue > 0.001 or is_possible.sum() == 1
    for key, part in accepted.items():
        assert (part.finish_reason == "stop") == (len(part.token_ids) == 5), key
    alone = accept_prefixes([(requests[9], prefix)], model, lenience, context)
    assert len(alone[2, 1].token_ids) == lengths[9], "a sample's key alone decides"


def key_of(request: Request) -> SampleKey:
    return request.draw_index, request.sample_index


def test_earlier_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Also one that reached a limit which is now lower: it is cut there."""
    reasons: tuple[FinishReason | None, ...] = (None, "stop", "length")
    random = np.random.default_rng(0)
    earlier = {
        (7 * number, number): Prefix(
            token_ids=random.integers(0, 99, number + 1, dtype=np.int32),
            rollout_logprobs=-random.random(number + 1, dtype=np.float32),
            policy_versions=random.integers(0, 9, number + 1, dtype=np.int32),
            finish_reason=reason,
        )
        for number, reason in enumerate(reasons)
    }
    save_earlier(tmp_path, {})
    assert load_earlier(tmp_path) == {}
    save_earlier(tmp_path, earlier)
    again = load_earlier(tmp_path)
    assert again.keys() == earlier.keys()
    for key, prefix in earlier.items():
        assert again[key].finish_reason == prefix.finish_reason
        for name in ("token_ids", "rollout_logprobs", "policy_versions"):
            np.testing.assert_array_equal(getattr(again[key], name), getattr(prefix, name), strict=True)
    cases = [(3, 9, "length"), (2, 9, None), (3, 3, "length"), (3, 2, "length"), (2, 2, "length")]
    for length, max_tokens, reason in cases:
        part = truncated(earlier[14, 2], length, max_tokens)
        assert (len(part.token_ids), part.finish_reason) == (min(length, max_tokens), reason)
    assert truncated(earlier[0, 0], 1, 1).finish_reason == "length", "nothing is left to decode"
    file = tmp_path / "earlier_samples.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"earlier_samples\.safetensors is damaged"):
        load_earlier(tmp_path)
