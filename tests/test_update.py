"""The update of a tiny float64 policy against one padded batch in plain PyTorch (`padded_update.py`), and by hand.

Padding, order and micro-batch size do not change the gradient: packed in any way, it is that of one padded batch.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from padded_update import LOSSES, RATIO_CAP, REDUCTIONS, padded_step
from torch import Tensor
from update_cases import RecordingSGD, make_policy, make_recipe, make_sequences, naive_logprobs, update

from srtrl.model.transformer import Transformer
from srtrl.recipe.schema import Recipe
from srtrl.rollout.packing import PackedBatch
from srtrl.trainer.objective import PolicyObjective, response_logprobs
from srtrl.trainer.passes import UpdateContext
from srtrl.trainer.update import mini_batches, with_logprobs
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
)
def test_every_epoch_has_every_draw_once_and_whole(
    sizes: dict[int, int], size: int, num_epochs: int, seed: int
) -> None:
    """Draws may have gaps (filters dropped some) and different sizes (overlong filtering)."""
    sizes = dict(sorted(sizes.items()))
    plan = replace(PLAN, mini_batch_prompts=size, num_epochs=num_epochs)
    found = list(mini_batches(make_draws(sizes), plan, seed=seed, step=1))
    per_epoch = -(-len(sizes) // size)
    names = [f"epoch {epoch + 1}, mini-batch {n + 1}" for epoch in range(num_epochs) for n in range(per_epoch)]
    assert [name for name, _ in found] == names
    for start in range(0, len(found), per_epoch):
        batches = [batch for _, batch in found[start : start + per_epoch]]
        ids = [[int(one.token_ids[0]) for one in batch] for batch in batches]
        flat = list(chain.from_iterable(ids))
        assert sorted(flat) == list(range(sum(sizes.values())))
        assert all(row == sorted(row) for row in ids), "packing would depend on the draw"
        draws = [{one.draw_index for one in batch} for batch in batches]
        assert [len(row) for row in draws[:-1]] == [size] * (per_epoch - 1)
        assert [len(row) for row in ids] == [sum(sizes[draw] for draw in row) for row in draws], "a draw was cut"
        if start == 0:
            assert flat == sorted(flat), "the first epoch is in data order"


def test_later_epochs_have_a_seeded_order_of_their_own() -> None:
    sequences = make_draws(dict.fromkeys(range(100, 120), 3))
    plan = replace(PLAN, mini_batch_prompts=4, num_epochs=3)

    def orders(seed: int, step: int) -> list[str]:
        found = [batch for _, batch in mini_batches(sequences, plan, seed=seed, step=step)]
        return [str([[int(one.token_ids[0]) for one in batch] for batch in found[i : i + 5]]) for i in (0, 5, 10)]

    assert orders(0, 5) == orders(0, 5)
    assert orders(0, 5)[0] == orders(1, 6)[0]
    distinct = {*orders(0, 5), orders(0, 6)[1], orders(1, 5)[1]}
    assert len(distinct) == 5, "epochs, steps and seeds must have orders of their own"


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


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of the expected gradient."""
    difference = sum(float((f.double() - e.double()).square().sum()) for f, e in zip(found, expected, strict=True))
    return math.sqrt(difference / sum(float(e.double().square().sum()) for e in expected))


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
    sequences = random_case(make_policy(scale=SCALE, tied=tied), seed=int(rng.integers(1000)))
    algorithm = {"loss": loss, "reduction": reduction, **options}
    whole = recipe_of(len(sequences), algorithm)
    expected, (gradient,) = padded_step(make_policy(scale=SCALE, tied=tied), sequences, whole)
    in_float32: list[list[Tensor]] = []
    for budget in (16, int(rng.integers(17, 60)), 1000):
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


@pytest.mark.parametrize("loss", ["ppo_clip", "dual_clip", "gspo", "cispo"])
def test_the_cases_meet_every_clip(loss: str) -> None:
    """Or the comparison above would show less than it seems to."""
    sequences = random_case(make_policy(scale=SCALE), seed=0)
    _, metrics = packed_gradient(recipe_of(len(sequences), {"loss": loss}), sequences)
    clips = {name: share for name, share in metrics.items() if name.startswith("clip_share/")}
    assert len(clips) == (3 if loss == "dual_clip" else 2)
    assert all(0 < share < 1 for share in clips.values()), clips


def test_logprobs_equal_one_sequence_at_a_time() -> None:
    policy = make_policy()
    sequences = make_sequences(policy)
    context = UpdateContext(recipe=make_recipe(train__micro_batch_tokens=20), step=1)
    for filled, sequence in zip(with_logprobs("old_logprobs", policy, sequences, context), sequences, strict=True):
        assert filled.old_logprobs is not None
        assert filled.old_logprobs.dtype == np.float32
        np.testing.assert_allclose(filled.old_logprobs, naive_logprobs(policy, sequence), rtol=1e-6)
        assert replace(filled, old_logprobs=None) == sequence


# --- Whole steps ------------------------------------------------------------------------------------------------------

KL = {"coefficient": 0.05}


@pytest.mark.parametrize("num_epochs", [1, 2])
@pytest.mark.parametrize(
    "algorithm",
    [
        *({"loss": loss, "old_logprobs": "recompute", "importance_cap": 1.2} for loss in ("ppo_clip", "gspo")),
        {"loss": "ppo_clip", "clip_high": 0.3, "old_logprobs": "rollout"},
    ],
    ids=str,
)
def test_two_steps_have_the_metrics_and_weights_of_padded_batches(algorithm: dict[str, Any], num_epochs: int) -> None:
    """Of three mini-batches an epoch. Metrics are means over all tokens of all mini-batches."""
    recipe = make_recipe(
        algorithm={"clip_high": 0.2, **algorithm, "kl": KL},
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
        ({"kl": {"coefficient": 0.05, "estimator": "k1", "placement": "reward"}}, True),
        ({"kl": {"coefficient": 0.05}}, False),
        ({"entropy_coefficient": 0.1}, False),
        ({"loss": "padded_update:own_loss"}, False),
    ],
)
def test_samples_without_advantage_are_not_computed_and_the_gradient_is_the_same(
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
        monkeypatch.setattr(PolicyObjective, "needs_pass", lambda *_: True)
        computed.append(recorded_packs(cases, options, monkeypatch))
        monkeypatch.undo()
        (found, num_found), (expected, num_expected) = computed
        assert num_expected == len(cases)
        assert num_found == (max(1, len(cases) - num_zero) if is_skipped else len(cases))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def recorded_packs(
    sequences: list[TrainSequence],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[Tensor], int]:
    """The gradient, and the number of sequences that were computed for it."""
    num_computed = 0

    def recording(model: Transformer, packed: PackedBatch, *arguments: Any) -> tuple[Tensor, Tensor]:
        nonlocal num_computed
        num_computed += len(packed.lengths)
        return response_logprobs(model, packed, *arguments)

    with monkeypatch.context() as context:
        context.setattr("srtrl.trainer.objective.response_logprobs", recording)
        gradient, _ = packed_gradient(recipe_of(len(sequences), {"kl": {}} | options, 30), sequences)
    return gradient, num_computed
