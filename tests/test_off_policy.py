"""Whole runs of the modes `partial` and `spec_rl`: their limits are `on_policy`, and nothing depends on timing."""

import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from engine_cases import make_request, tiny_policy
from environment_cases import LEDGER
from scipy.stats import chisquare
from test_rank_training import assert_close_runs, train
from test_resume import die_at_call, finish, start
from tiny_run import assert_same_run, learned_rows, make_recipe
from transformers import AutoModelForCausalLM

from srtrl.engine.sampling import make_rng_key
from srtrl.metrics import read_metrics
from srtrl.recipe.schema import Recipe
from srtrl.run.checkpoint import list_checkpoints
from srtrl.trainer.off_policy import accept_prefixes, load_earlier
from srtrl.trainer.passes import UpdateContext
from srtrl.trainer.trainer import Trainer, run_training
from srtrl.types import Prefix

TOOLS = {"environment": LEDGER}
MODES: dict[str, dict[str, Any]] = {
    "partial": {"mode": "partial", "min_complete": 0.5},
    "spec_rl": {"mode": "spec_rl", "lenience": 1.0},
}
MODES |= {f"{name} with tools": {**mode, **TOOLS} for name, mode in MODES.items()}
LIMITS: list[dict[str, Any]] = [{"mode": "partial", "min_complete": 1.0}, {"mode": "spec_rl", "lenience": 0.0}]
RECOMPUTE: dict[str, Any] = {"old_logprobs": "recompute", "importance_cap": 2.0}


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


def is_kept(rewards: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A filter that drops some groups by a hash of their rewards."""
    return (rewards.sum(dim=1) * 7).round() % 3 > 0


@pytest.mark.parametrize(("is_dynamic", "tools"), [(False, {}), (True, {}), (True, TOOLS)])
def test_at_their_limits_the_modes_are_on_policy(
    policy: Path, tmp_path: Path, is_dynamic: bool, tools: dict[str, Any]
) -> None:
    def run(name: str, rollout: dict[str, Any]) -> tuple[Any, ...]:
        algorithm = RECOMPUTE | ({"filters": [f"{__name__}:is_kept"]} if is_dynamic else {})
        rollout = rollout | tools | {"dynamic_sampling": is_dynamic}
        folder = run_training(recipe_of(policy, tmp_path / name, rollout, algorithm=algorithm)).folder
        tables = [pq.read_table(file) for file in sorted((folder / "rollouts").iterdir())]
        return learned_rows(folder, beside=("off_policy/",)), tables

    expected = run("on_policy", {})
    assert {row["groups/dropped"] > 0 for row in expected[0]} >= {is_dynamic}
    assert [run(limit["mode"], limit) for limit in LIMITS] == [expected, expected]


@pytest.mark.parametrize(
    "sizes",
    [{"slots": 3}, {"slots": 16, "drafter": "none"}, {"slots": 40, "run_ahead_max_slowdown": 1e9, "draft_budget": 8}],
)
def test_neither_slots_nor_drafts_change_what_is_learned(
    sizes: dict[str, Any], policy: Path, plain: tuple[str, Path], tmp_path: Path
) -> None:
    folder = run_training(recipe_of(policy, tmp_path, MODES[plain[0]] | sizes)).folder
    assert_same_run(folder, plain[1])


def test_killed_and_resumed_equals_uninterrupted(policy: Path, plain: tuple[str, Path], tmp_path: Path) -> None:
    """In step 5; the checkpoint after step 4 has samples that go on, or begin others."""
    mode, expected = plain
    recipe = recipe_of(policy, tmp_path, MODES[mode])
    kill = partial(die_at_call, Trainer, "assign_credit", 5)
    assert finish(start(recipe, prepare=kill)) == -signal.SIGKILL
    assert (tmp_path / "run" / "checkpoints" / "step_000004" / "earlier_samples.safetensors").is_file()
    assert finish(start(recipe, resume=True)) == 0
    assert_same_run(tmp_path / "run", expected)


def test_answers_do_not_pile_up(plain: tuple[str, Path]) -> None:
    """Each prompt has come two or three times; an earlier response keeps the answers to its own turns alone."""
    mode, folder = plain
    earlier = load_earlier(list_checkpoints(folder / "checkpoints")[-1]).values()
    if mode.startswith("spec_rl"):
        turns = [len(prefix.extensions) + 1 if "tools" in mode else 0 for prefix in earlier]
        assert [len(prefix.answers) for prefix in earlier] == turns


def test_a_lower_limit_ends_what_is_longer(policy: Path, plain: tuple[str, Path], tmp_path: Path) -> None:
    """On a resume: what goes on or is reused is truncated there, and never ends with an observation."""
    run = Path(shutil.copytree(plain[1], tmp_path / "run"))
    recipe = recipe_of(policy, tmp_path, MODES[plain[0]] | {"max_new_tokens": 9})
    run_training(recipe, resume=True, from_step=4)
    rows = [row for step in (5, 6) for row in pq.read_table(run / "rollouts" / f"step_00000{step}.parquet").to_pylist()]
    old = [row for row in rows if (row["policy_versions"] or [9])[-1] < 4 and row["finish_reason"] == "length"]
    assert old
    assert {len(row["token_ids"]) <= 9 for row in rows} == {True}
    assert {len(row["token_ids"]) for row in old if row.get("stop_reason") != "observation"} <= {9}
    assert {(row.get("segment_kinds") or ["model"])[-1] for row in rows} == {"model"}


@pytest.mark.parametrize("mode", MODES)
def test_several_ranks_learn_what_one_learns(mode: str, policy: Path, tmp_path: Path) -> None:
    """In the second step samples go on, and prompts come again."""
    changes = {"train__num_steps": 2, "train__learning_rate": 1e-4, "task__options__num_train": 4}
    one, two = (recipe_of(policy, tmp_path / name, MODES[mode], **changes) for name in ("one", "two"))
    run_training(one)
    assert [process.exitcode for process in train(two, 2)] == [0, 0]
    assert_close_runs(tmp_path / "two" / "run", tmp_path / "one" / "run", tolerance=1e-5)
    assert learned_rows(tmp_path / "two" / "run")[-1]["off_policy/stale_share"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_log_probs_weights_and_loss_by_an_independent_computation(mode: str, policy: Path, tmp_path: Path) -> None:
    """Token by token with `transformers`, on the weights of each version; some samples have tokens of two versions.

    There is one optimizer step in a step, so that all ratios are 1, and the loss is that of weights and advantages.
    """
    changes = {"train__mini_batch_prompts": 4, "train__num_epochs": 1, "train__learning_rate": 0.01}
    changes |= {"train__checkpoint_every": 1, "train__keep_checkpoints": 9, "train__warmup_steps": 0}
    cap = 2.0 if "partial" in mode else 1.1
    algorithm = {"old_logprobs": "recompute", "importance_cap": None if "partial" in mode else cap}
    run = run_training(recipe_of(policy, tmp_path, MODES[mode], **changes, algorithm=algorithm)).folder
    folders = [policy, *list_checkpoints(run / "checkpoints")]
    models = [AutoModelForCausalLM.from_pretrained(folder).double() for folder in folders]
    num_mixed = num_capped = 0
    for now, row in enumerate(read_metrics(run / "metrics.jsonl")):
        losses, weights, computed, ages = [], np.empty(0), list[float](), list[int]()
        for sample in pq.read_table(run / "rollouts" / f"step_{now + 1:06d}.parquet").to_pylist():
            prompt, response = sample["prompt_token_ids"], sample["token_ids"]
            versions = sample.get("policy_versions") or [now] * len(response)
            num_mixed += len(set(versions)) > 1
            tokens = torch.tensor([prompt + response])
            rows = np.arange(len(response))
            logprobs = np.stack(  # [versions, L]
                [
                    model(tokens).logits[0, len(prompt) - 1 :].log_softmax(-1).detach()[rows, response]
                    for model in models
                ]
            )
            kinds, lengths = sample.get("segment_kinds", ["model"]), sample.get("segment_lengths", [len(rows)])
            segments = zip(kinds, lengths, strict=True)
            rows = rows[[kind == "model" for kind, length in segments for _ in range(length)]]
            versions = np.array(versions)[rows]
            logprobs = logprobs[:, rows]
            sampled = np.arange(len(rows))
            said = np.array(sample["rollout_logprobs"])[rows]
            np.testing.assert_allclose(said, logprobs[versions, sampled], rtol=0, atol=2e-4)
            own = np.exp(logprobs[now] - logprobs[versions, sampled])
            losses.append(-sample["advantage"] * np.minimum(own, cap).mean())
            weights, ages = np.append(weights, own), [*ages, *(now - version for version in versions)]
            computed += np.minimum(own, cap).tolist() if sample["advantage"] else []  # without one there is no pass
        expected = {
            "loss": np.mean(losses),
            "off_policy/weight_mean": weights.mean(),
            "off_policy/weight_max": weights.max(),
            "importance/weight": np.mean(computed),
            "off_policy/stale_share": np.mean([age > 0 for age in ages]),
            "off_policy/age_2": np.mean([age in (2, 3) for age in ages]),
        }
        assert {name: row.get(name, 0) for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-4)
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
    prefix = Prefix(
        token_ids=np.arange(5, dtype=np.int32),
        rollout_logprobs=np.log(1 / 61 / ratios).astype(np.float32),
        policy_versions=np.zeros(5, np.int32),
        finish_reason="stop",
    )
    recipe = recipe_of(policy, tmp_path, {"lenience": lenience}, train__micro_batch_tokens=8192)
    context = UpdateContext(recipe=recipe, step=1)
    requests = [
        make_request(draw, sample, rng_key=make_rng_key(3, "train", draw, sample), max_new_tokens=8)
        for draw in range(1000)
        for sample in range(4)
    ]
    accepted = accept_prefixes(requests, [prefix] * len(requests), tiny_policy(scale=0.0), context)
    parts = [accepted.get((request.draw_index, request.sample_index)) for request in requests]
    lengths = [len(part.token_ids) if part else 0 for part in parts]
    chances = np.minimum(1, lenience * ratios)
    reached = np.cumprod([1, *chances])
    shares = np.append(reached[:-1] * (1 - chances), reached[-1])
    counts, is_possible = np.bincount(lengths, minlength=6), shares > 0
    assert not counts[~is_possible].any()
    assert chisquare(counts[is_possible], len(lengths) * shares[is_possible]).pvalue > 0.001 or is_possible.sum() == 1
    assert [part and part.finish_reason for part in parts] == [{0: None, 5: "stop"}.get(length) for length in lengths]
    assert len(accept_prefixes(requests[9:10], [prefix], tiny_policy(scale=0.0), context)[2, 1].token_ids) == lengths[9]
