"""The update of a tiny float64 policy against one padded batch in plain PyTorch (`padded_update.py`), and by hand.

Padding, order and micro-batch size do not change the gradient: packed in any way, it is that of one padded batch. What
stops an update does so before the weights change, with a message that says what helps.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tiny_run
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from padded_update import LOSSES, RATIO_CAP, REDUCTIONS, naive_batches, padded_step
from torch import Tensor
from update_cases import (
    CALLS,
    RecordingSGD,
    distance,
    flawed,
    make_policy,
    make_recipe,
    make_sequences,
    update,
)

from srtrl import build
from srtrl.model.transformer import Transformer
from srtrl.recipe.schema import Recipe
from srtrl.rollout.packing import PackedBatch, pack, sharing_order
from srtrl.run.interrupt import UpdateMemoryError, explain_out_of_memory, how_to_resume
from srtrl.trainer.learner import mini_batches
from srtrl.trainer.objective import LogprobDifferenceError, PolicyLearner, logprob_difference, response_logprobs
from srtrl.trainer.passes import NonFiniteError
from srtrl.types import TrainSequence

LOW, HIGH = 0.1, 0.15
SCALE = 8
"""Of the weights: at the tests' usual 20 the network itself makes 1e-6 of the rounding of a rare token."""

# --- Mini-batches -----------------------------------------------------------------------------------------------------


PLAN = make_recipe().policy_updates


def make_draws(sizes: dict[int, int]) -> list[TrainSequence]:
    """`sizes[draw_index]` sequences of each draw; each is known by its token ids 0, 1, 2, ..."""
    draws = [draw_index for draw_index, size in sizes.items() for _ in range(size)]
    blank = np.zeros(1, np.float32)
    return [
        TrainSequence(
            token_ids=np.full(2, token_id),
            targets=np.ones(1, np.int64),
            draw_index=draw_index,
            rollout_logprobs=blank,
            advantages=blank,
        )
        for token_id, draw_index in enumerate(draws)
    ]


@settings(deadline=None)  # the machine may be busy
@given(
    sizes=st.dictionaries(st.integers(0, 1000), st.integers(1, 4), min_size=1, max_size=12),
    size=st.integers(1, 14),
    num_epochs=st.integers(1, 4),
    seed=st.integers(0, 3),
    step=st.integers(1, 3),
)
def test_every_epoch_has_every_draw_once_and_whole_in_a_seeded_order(
    sizes: dict[int, int], size: int, num_epochs: int, seed: int, step: int
) -> None:
    """Draws may have gaps (filters dropped some) and different sizes (overlong filtering)."""
    sequences = make_draws(dict(sorted(sizes.items())))
    plan = replace(PLAN, mini_batch_prompts=size, num_epochs=num_epochs)
    names, batches = zip(*mini_batches(sequences, plan, seed=seed, step=step), strict=True)
    ids, expected = (
        [[int(one.token_ids[0]) for one in batch] for batch in some]
        for some in (batches, naive_batches(sequences, plan, seed, step))
    )
    assert ids == expected
    per_epoch = -(-len(sizes) // size)
    assert list(names) == [f"epoch {e + 1}, mini-batch {n + 1}" for e in range(num_epochs) for n in range(per_epoch)]
    for start in range(0, len(ids), per_epoch):
        flat = list(chain.from_iterable(ids[start : start + per_epoch]))
        assert sorted(flat) == list(range(len(sequences)))
        assert start or flat == sorted(flat), "the first epoch is in data order"


# --- Losses, reductions and KL against one padded batch -------------------------------------------------------------


def random_case(policy: Transformer, seed: int) -> list[TrainSequence]:
    """Ragged groups whose tokens have advantages of their own."""
    rng = np.random.default_rng(seed)
    sequences = make_sequences(policy, noise=0.5, num_groups=5, seed=seed)
    kept = [sequences[index] for index in sorted(rng.choice(len(sequences), size=7, replace=False))]
    return [
        replace(sequence, advantages=rng.normal(-0.5, size=len(sequence.advantages)).astype(np.float32))
        for sequence in kept
    ]


def recipe_of(num_prompts: int, algorithm: dict[str, Any], micro_batch_tokens: int = 1000) -> Recipe:
    options = {"clip_low": LOW, "clip_high": HIGH, "kl": {"coefficient": 0.05}} | algorithm
    if algorithm.get("loss") == "dual_clip":
        options["loss_options"] = {"ratio_cap": RATIO_CAP}
    return make_recipe(
        rollout__num_prompts=num_prompts, algorithm=options, train__micro_batch_tokens=micro_batch_tokens
    )


def packed_gradient(
    recipe: Recipe, sequences: Sequence[TrainSequence], dtype: torch.dtype = torch.float64, tied: bool = False
) -> tuple[list[Tensor], dict[str, float]]:
    """By our update, in the given order: every sequence is a draw of its own, and all are one mini-batch."""
    policy = make_policy(dtype=dtype, scale=SCALE, tied=tied)
    optimizer = RecordingSGD(policy)
    ordered = [replace(sequence, draw_index=index) for index, sequence in enumerate(sequences)]
    metrics = update(policy, optimizer, ordered, recipe)
    (gradient,) = optimizer.gradients
    return gradient, metrics


OPTIONS: list[dict[str, Any]] = [
    {"kl": {"coefficient": 0.05, "estimator": "k3"}, "entropy_coefficient": 0.3},
    {"kl": {"coefficient": 0.1, "estimator": "k2"}},
    {"kl": {"coefficient": 0.1, "estimator": "k1", "placement": "reward"}},  # measured, but not in the loss
    {"kl": {}},
]
"""For each reduction."""


@pytest.mark.parametrize(("reduction", "options"), [*zip(REDUCTIONS, OPTIONS, strict=True)])
@pytest.mark.parametrize("loss", LOSSES)
def test_any_packing_has_the_gradient_of_one_padded_batch(loss: str, reduction: str, options: dict[str, Any]) -> None:
    """Float64: to 1e-12 of the padded batch's. Float32: among each other to 1e-6 (about 1e-7 is found)."""
    tied = LOSSES.index(loss) % 2 == 0
    rng = np.random.default_rng((LOSSES.index(loss), REDUCTIONS.index(reduction)))
    sequences = random_case(make_policy(scale=SCALE, tied=tied), seed=11 + REDUCTIONS.index(reduction))
    algorithm = {"loss": loss, "reduction": reduction, **options}
    whole = recipe_of(len(sequences), algorithm)
    expected, (gradient,) = padded_step(make_policy(scale=SCALE, tied=tied), sequences, whole)
    clips = [share for name, share in expected.items() if name.startswith("clip_share/")]
    assert len(clips) == {"dual_clip": 3, "policy_gradient": 0}.get(loss, 2)
    assert all(0 < share < 1 for share in clips), "or the comparison would show less than it seems to"
    in_float32: list[list[Tensor]] = []
    for budget in (int(rng.integers(16, 60)), 1000):
        recipe = recipe_of(len(sequences), algorithm, budget)
        reordered = [sequences[index] for index in rng.permutation(len(sequences))]
        found, metrics = packed_gradient(recipe, reordered, tied=tied)
        assert distance(found, gradient) < 1e-12
        assert {name for name in metrics if name.startswith(("kl/", "clip_share/", "importance/"))} <= expected.keys()
        for name, value in expected.items():  # log-probs are compared in float32
            exact = name in ("loss", "kl/ref") or name.startswith("clip_share/")
            assert metrics[name] == pytest.approx(value, rel=1e-12 if exact else 1e-5, abs=0 if exact else 1e-7), name
        rounded, _ = packed_gradient(recipe, reordered, torch.float32, tied)
        in_float32.append(rounded)
        assert distance(in_float32[-1], in_float32[0]) < 1e-6
        assert distance(in_float32[-1], gradient) < 1e-5, "the weights alone are rounded by 6e-8"


# --- Whole steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "num_epochs"),
    [
        ({"loss": "ppo_clip", "old_logprobs": "recompute", "importance_cap": 1.2}, 2),
        ({"loss": "gspo", "old_logprobs": "recompute", "importance_cap": 1.2}, 1),
        ({"loss": "ppo_clip", "clip_high": 0.3, "old_logprobs": "rollout"}, 2),
    ],
    ids=str,
)
def test_two_steps_have_the_metrics_and_weights_of_padded_batches(algorithm: dict[str, Any], num_epochs: int) -> None:
    """Of three mini-batches an epoch. Metrics are means over all tokens of all mini-batches.

    Log-probs of decoder and trainer are compared in the first mini-batch alone, or as they are recomputed.
    """
    recipe = make_recipe(
        algorithm={"clip_high": 0.2, **algorithm, "kl": {"coefficient": 0.05}},
        train__mini_batch_prompts=1,
        train__num_epochs=num_epochs,
        train__micro_batch_tokens=20,
    )
    ours, naive = make_policy(), make_policy()
    optimizer = RecordingSGD(ours)
    for step in (1, 2):
        sequences = make_sequences(naive, noise=0.5, seed=step)
        metrics = update(ours, optimizer, sequences, recipe, step=step)
        expected, _ = padded_step(naive, sequences, recipe, step)
        for name, value in expected.items():
            rel = 1e-4 if name.startswith("logprob_difference") else 1e-6  # these are float32, and so are the weights
            assert metrics[name] == pytest.approx(value, rel=rel), name
        if recipe.algorithm.importance_cap:
            assert 0 < metrics["importance/capped_share"] < 1
        else:
            assert min(metrics["clip_share/low"], metrics["clip_share/high"]) > 0
        for found, wanted in zip(ours.parameters(), naive.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


def test_learning_rate_follows_the_schedule_over_steps_epochs_and_mini_batches() -> None:
    recipe = make_recipe(
        train__mini_batch_prompts=1, train__num_epochs=2, train__warmup_steps=3, train__schedule="linear"
    )  # 2 steps of 2 epochs of 3 mini-batches: 12 optimizer steps
    policy = make_policy()
    optimizer = RecordingSGD(policy)
    for step in (1, 2):
        metrics = update(policy, optimizer, make_sequences(policy), recipe, step=step)
        assert metrics["learning_rate"] == optimizer.rates[-1]
    falling = [(12 - index) / 9 for index in range(3, 12)]
    assert optimizer.rates == pytest.approx([1e-3 * f for f in (1 / 4, 2 / 4, 3 / 4, *falling)], rel=1e-12)


@pytest.mark.parametrize(
    ("options", "is_skipped"),
    [
        ({}, True),
        ({"loss": "gspo"}, True),
        ({"loss": "cispo", "importance_cap": 1.1, "old_logprobs": "recompute"}, True),
        ({"kl": {"coefficient": 0.05, "estimator": "k1", "placement": "reward"}}, False),  # for the metric
        ({"kl": {"coefficient": 0.05}}, False),
        ({"entropy_coefficient": 0.1}, False),
        ({"loss": "padded_update:own_loss"}, False),
    ],
)
def test_samples_without_advantage_are_not_computed_and_gradient_and_metrics_are_the_same(
    options: dict[str, Any], is_skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three, then all of them: one sample is computed then, for an optimizer step with a gradient of zeros."""
    sequences = random_case(make_policy(scale=SCALE), seed=3)
    for num_zero in (2 * len(sequences) // 3, len(sequences)):
        cases = [
            replace(one, advantages=0 * one.advantages) if index < num_zero else one
            for index, one in enumerate(sequences)
        ]
        computed = [recorded_packs(cases, options, monkeypatch)]
        monkeypatch.setattr(PolicyLearner, "needs_pass", lambda *_: True)
        computed.append(recorded_packs(cases, options, monkeypatch))
        monkeypatch.undo()
        (found, means, num_found), (expected, expected_means, num_expected) = computed
        assert num_expected == len(cases)
        assert num_found == (max(1, len(cases) - num_zero) if is_skipped else len(cases))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)
        assert means == pytest.approx(expected_means, rel=1e-12)
        assert {"entropy", *(["importance/weight"] if "importance_cap" in options else [])} <= means.keys()


def recorded_packs(
    sequences: list[TrainSequence],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[Tensor], dict[str, float], int]:
    """The gradient, the metrics but those of what was computed, and the number of sequences computed for them."""
    num_computed = 0

    def recording(model: Transformer, packed: PackedBatch, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        nonlocal num_computed
        num_computed += len(packed.plan.lengths) * torch.is_grad_enabled()  # not for recomputed log-probs
        return response_logprobs(model, packed, *arguments, **options)

    with monkeypatch.context() as context:
        context.setattr("srtrl.trainer.objective.response_logprobs", recording)
        gradient, metrics = packed_gradient(recipe_of(len(sequences), {"kl": {}} | options, 30), sequences)
    means = {name: mean for name, mean in metrics.items() if not name.startswith(("tokens/", "logprob_difference/"))}
    return gradient, means, num_computed


# --- What stops an update --------------------------------------------------------------------------------------------


def is_unchanged(policy: Transformer, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


@pytest.mark.parametrize("old_logprobs", ["rollout", "recompute"])
def test_a_large_logprob_difference_stops_before_any_change(old_logprobs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token that is off by 2 nats stops no run by itself: the mean over all tokens counts."""
    policy = make_policy()
    sequences = make_sequences(policy)
    sequences[4].rollout_logprobs[1] -= 2.0
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    expected = 2.0 / sum(len(sequence.rollout_logprobs) for sequence in sequences)

    def limited(limit: float) -> Recipe:
        algorithm = {"old_logprobs": old_logprobs}
        return make_recipe(algorithm=algorithm, train__micro_batch_tokens=16, train__max_logprob_difference=limit)

    message = (
        r"step 7.*: the mean absolute difference .* is (\S+) nats per token, more than train\.max_logprob_difference "
        ".*; the policy's weights were not changed by this step"
    )
    assert update(policy, RecordingSGD(policy), sequences, limited(0.99 * expected), step=7)["grad_norm"] > 0
    policy.load_state_dict(before)  # those were too few tokens to stop a run
    monkeypatch.setattr("srtrl.trainer.objective.MIN_COMPARED_TOKENS", 1)
    with pytest.raises(LogprobDifferenceError, match=message) as caught:
        update(policy, RecordingSGD(policy), sequences, limited(0.99 * expected), step=7)
    found = re.search(message, str(caught.value))
    assert found is not None
    assert float(found.group(1)) == pytest.approx(expected, rel=1e-4)
    assert is_unchanged(policy, before)
    metrics = update(policy, RecordingSGD(policy), sequences, limited(1.01 * expected), step=7)
    assert metrics["logprob_difference/max"] == pytest.approx(2.0, abs=1e-5)


def test_logprob_difference_of_a_nan_is_non_finite() -> None:
    sequences = make_sequences(make_policy())
    trainer = [sequence.rollout_logprobs.copy() for sequence in sequences]
    trainer[2][0] = np.nan
    with pytest.raises(NonFiniteError, match="step 3: a log-prob by the trainer is not a finite number"):
        logprob_difference(sequences, np.concatenate(trainer), limit=0.1, where="step 3")


def loss_with_metrics(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *_: Tensor, **__: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """One metric that has the name of srtrl's, and one for micro-batches with a positive advantage alone."""
    ones = torch.ones_like(advantages)
    return -logprobs, {"entropy": 3 * ones, **({"rare": ones} if bool((advantages > 0).any()) else {})}


def test_a_users_metrics_are_logged_under_loss_and_count_as_zero_where_they_are_absent() -> None:
    policy = make_policy()
    sequences = make_sequences(policy)
    recipe = make_recipe(algorithm__loss=f"{__name__}:loss_with_metrics", train__micro_batch_tokens=16)
    packs = list(pack([sequences[index] for index in sharing_order(sequences)], 16, "cpu"))
    lengths = [len(packed.advantages) for packed in packs]
    metrics = update(policy, RecordingSGD(policy), sequences, recipe)
    assert metrics["loss/entropy"] == 3
    assert metrics["entropy"] != 3
    positive = sum(len(packed.advantages) for packed in packs if bool((packed.advantages > 0).any()))
    assert 0 < positive < sum(lengths)
    assert metrics["loss/rare"] == pytest.approx(positive / sum(lengths))


WHERE = "step 4, epoch 1, mini-batch 1: the"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (flawed("nan"), NonFiniteError, rf"{WHERE} loss \(algorithm\.loss update_cases:incorrect_loss\) is nan"),
        (flawed("infinite slope"), NonFiniteError, f"{WHERE} gradient norm is (nan|inf)"),
        (flawed("no memory", at_call=3), torch.OutOfMemoryError, "out of memory"),
        (
            {"loss": "ppo_clipp"},
            ValueError,
            "`ppo_clipp` is not in srtrl/algorithms/losses.py, did you mean `ppo_clip`",
        ),
        ({"reduction": "mean"}, ValueError, "`mean` is not in srtrl/algorithms/reductions.py"),
    ],
)
def test_an_incorrect_function_stops_before_any_change(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """In an update of several micro-batches."""
    CALLS.clear()
    policy = make_policy()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    recipe = make_recipe(algorithm=options, train__micro_batch_tokens=16)
    with pytest.raises(error, match=message):
        update(policy, RecordingSGD(policy), make_sequences(policy), recipe, step=4)
    assert is_unchanged(policy, before)


# --- Messages when memory runs out ------------------------------------------------------------------------------------

TORCHS_WORDS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.50 GiB is "
    "free. Of the allocated memory 70.00 GiB is allocated by PyTorch. If reserved but unallocated memory is large try "
    "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
)


def test_the_message_names_the_stage_and_options_that_help(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UpdateMemoryError) as caught, explain_out_of_memory("step 3, update"):
        raise torch.OutOfMemoryError(TORCHS_WORDS)
    text = str(caught.value)
    assert text.startswith("step 3, update: the device's memory is too small. CUDA out of memory. Tried to allocate")
    assert "70.00 GiB is allocated by PyTorch." in text
    assert "PYTORCH_CUDA_ALLOC_CONF" not in text
    assert "train.micro_batch_tokens (the same gradient), model.gradient_checkpointing=true" in text
    monkeypatch.setattr(build, "make_policy_optimizer", Mock(side_effect=torch.OutOfMemoryError(TORCHS_WORDS)))
    with pytest.raises(UpdateMemoryError, match=r"(?s)^loading the models: the device's memory is too small.*--check"):
        build.build_parts(tiny_run.make_recipe(policy, tmp_path))
    assert "start again with --overwrite" in how_to_resume(tmp_path / "empty")
