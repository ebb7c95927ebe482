"""Whole runs of the modes `partial` and `spec_rl`: their log-probs, weights and loss.

That nothing depends on timing, kills or ranks, and that they are `on_policy` at their limits, is in `test_promises.py`.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from engine_cases import make_request, make_response, tiny_policy
from scipy.stats import chisquare
from test_promises import RECIPES
from tiny_run import make_recipe, train
from transformers import AutoModelForCausalLM

from srtrl.features.off_policy import accept_prefixes
from srtrl.metrics import read_metrics
from srtrl.model.noise import make_rng_key
from srtrl.run.steps import list_checkpoints
from srtrl.trainer.passes import UpdateContext

MODES = ("partial", "spec_rl")


@pytest.mark.parametrize("mode", MODES)
def test_a_lower_limit_ends_what_is_longer(
    mode: str, policy: Path, finished: Callable[..., Path], tmp_path: Path
) -> None:
    """After a resume with a lower limit, what goes on or is reused is truncated there; some prompts have come twice."""
    whole = finished(**RECIPES[mode])
    assert read_metrics(whole / "metrics.jsonl")[-1]["off_policy/stale_share"] > 0
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    changes = {"rollout__max_new_tokens": 9, "rollout__draft_budget": 3, "rollout__run_ahead_max_slowdown": 0.5}
    train(make_recipe(policy, tmp_path, **RECIPES[mode] | changes), resume=True, from_step=2)
    rows = [row for step in (3, 4) for row in pq.read_table(run / "rollouts" / f"step_00000{step}.parquet").to_pylist()]
    old = [row for row in rows if (row.get("policy_versions") or [9])[-1] < 2 and row["finish_reason"] == "length"]
    assert old
    assert {len(row["token_ids"]) <= 9 for row in rows} == {True}
    assert {len(row["token_ids"]) for row in old} == {9}


@pytest.mark.parametrize("mode", MODES)
def test_log_probs_weights_and_loss_by_an_independent_computation(mode: str, policy: Path, tmp_path: Path) -> None:
    """Token by token with `transformers`, on the weights of each version; some samples have tokens of two versions.

    There is one optimizer step in a step, so that all ratios are 1, and the loss is that of weights and advantages.
    """
    changes = RECIPES[mode] | {"train__num_steps": 6, "train__mini_batch_prompts": 4, "train__num_epochs": 1}
    changes |= {"train__learning_rate": 0.01, "eval": {"before_and_after": False}}
    changes |= {"train__checkpoint_every": 1, "train__keep_checkpoints": 9, "train__warmup_steps": 0}
    low, high = (0.5, 5.0) if "partial" in mode else (0.9, 1.1)
    importance = {} if "partial" in mode else {"mode": "token_mask", "min": low, "max": high}
    algorithm = {"old_logprobs": "recompute", "importance": importance}
    run = train(make_recipe(policy, tmp_path, **changes | {"algorithm": algorithm})).folder
    folders = [policy, *list_checkpoints(run / "checkpoints")]
    models = [AutoModelForCausalLM.from_pretrained(folder).double() for folder in folders]
    num_mixed = num_outside = 0
    for now, row in enumerate(read_metrics(run / "metrics.jsonl")):
        losses, weights, kept, ages = [], np.empty(0), list[float](), list[int]()
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
            said = np.array(sample["rollout_logprobs"])
            np.testing.assert_allclose(said, logprobs[versions, rows], rtol=0, atol=2e-4)
            own = np.exp(logprobs[now] - logprobs[versions, rows])
            masked = np.where((own < low) | (own > high), 0, own)
            losses.append(-sample["advantage"] * masked.mean())
            weights, ages = np.append(weights, own), [*ages, *(now - version for version in versions)]
            kept += masked.tolist()
        expected = {
            "loss": np.mean(losses),
            "off_policy/weight_mean": weights.mean(),
            "off_policy/weight_max": weights.max(),
            "importance/weight": np.mean(kept),
            "off_policy/stale_share": np.mean([age > 0 for age in ages]),
            "off_policy/age_2": np.mean([age in (2, 3) for age in ages]),
        }
        assert {name: row.get(name, 0) for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert row["logprob_difference/max"] < 1e-4, "of tokens of this step alone"
        num_outside += row["importance/outside_share"] > 0
    assert num_mixed > 5
    assert num_outside


@pytest.mark.parametrize(
    "lenience", [0.3, pytest.param(1.0, marks=pytest.mark.slow), 1.5, pytest.param(1e6, marks=pytest.mark.slow)]
)
def test_acceptance_is_that_of_its_formula(lenience: float, policy: Path, tmp_path: Path) -> None:
    """On a policy that is exactly uniform over 61 tokens, with earlier probabilities that are given.

    The number of accepted tokens is k with probability prod_{i<k} a_i (1 - a_k), a_i = min(1, lenience p_new / p_old).
    """
    ratios = np.array([1.0, 0.9, 1.3, 0.7, 0.95])
    prefix = make_response(range(5), np.log(1 / 61 / ratios).tolist())
    recipe = make_recipe(policy, tmp_path, rollout__lenience=lenience, train__micro_batch_tokens=8192)
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
