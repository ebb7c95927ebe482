"""The update of a tiny float64 policy against one padded batch in plain PyTorch (`padded_update.py`), and by hand.

Padding, order and micro-batch size do not change the gradient: packed in any way, it is that of one padded batch. What
stops an update does so before the weights change, with a message that says what helps.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tiny_run
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from padded_update import LOSSES, RATIO_CAP, REDUCTIONS, naive_batches, padded_step
from plain_kernels import token_logprobs_reference
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from update_cases import CALLS, RecordingSGD, distance, flawed, make_policy, make_recipe, make_sequences, update

from srtrl import build, build_models
from srtrl.model.attention import PackedPlan
from srtrl.model.transformer import Transformer
from srtrl.rollout.packing import pack, shared_tokens, sharing_order
from srtrl.run.interrupt import UpdateMemoryError, explain_out_of_memory, how_to_resume
from srtrl.run.step_metrics import model_flops, time_metrics, update_flops
from srtrl.trainer.learner import mini_batches
from srtrl.trainer.objective import LogprobDifferenceError, logprob_difference
from srtrl.trainer.passes import NonFiniteError
from srtrl.types import TrainSequence

SCALE = 8
"""Scale of the weights: at the tests' usual 20 the network itself makes 1e-6 of the rounding of a rare token."""


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
    sequences: list[Any] = [
        SimpleNamespace(draw_index=draw, sample=sample) for draw in sorted(sizes) for sample in range(sizes[draw])
    ]
    plan = replace(make_recipe().policy_updates, mini_batch_prompts=size, num_epochs=num_epochs)
    names, batches = zip(*mini_batches(sequences, plan, seed=seed, step=step), strict=True)
    assert list(batches) == list(naive_batches(sequences, plan, seed, step))
    per_epoch = -(-len(sizes) // size)
    assert list(names) == [f"epoch {e + 1}, mini-batch {n + 1}" for e in range(num_epochs) for n in range(per_epoch)]


# --- Losses, reductions and KL against one padded batch -------------------------------------------------------------


def random_case(policy: Transformer, seed: int) -> list[TrainSequence]:
    """Ragged groups whose tokens have advantages of their own."""
    rng = np.random.default_rng(seed)
    sequences = make_sequences(policy, noise=0.6, num_groups=5, seed=seed)
    return [
        replace(sequences[index], advantages=rng.normal(-0.5, size=len(sequences[index].targets)).astype(np.float32))
        for index in rng.choice(len(sequences), size=10, replace=False)
    ]


def weighed(mode: str, maximum: float) -> dict[str, Any]:
    """Options of importance weights."""
    return {"old_logprobs": "recompute", "importance": {"mode": mode, "max": maximum}}


OPTIONS: list[tuple[str, bool, dict[str, Any]]] = [
    ("token_mean", False, {"kl": {"coefficient": 0.1, "estimator": "k1"}, "entropy_coefficient": 0.3}),
    ("token_mean", True, {"kl": {}, **weighed("token_truncate", 1.2), "opsm": 0.05}),
    ("token_mean", False, {"kl": {}, **weighed("token_mask", 1.2), "drift": 0.5}),
    ("sequence_mean_token_mean", True, {"kl": {}, **weighed("sequence_truncate", 1.2)}),
    ("sequence_mean_token_mean", True, {"kl": {}, **weighed("sequence_mask", 1.2)}),
    ("token_mean", True, {"kl": {}, **weighed("sequence_mean_mask", 1.2)}),
    ("sequence_mean_token_mean", False, {"kl": {"coefficient": 0.1, "estimator": "k2"}}),
    ("sequence_mean_token_sum", False, {"kl": {"coefficient": 0.1, "placement": "reward"}}),  # measured alone
    ("sequence_mean_token_sum_norm", True, {"kl": {}}),
]
"""Reduction, whether samples without advantage need no pass, and more values of `algorithm`."""


@pytest.mark.parametrize(("reduction", "is_skipped", "options"), OPTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_any_packing_has_the_gradient_of_one_padded_batch(
    loss: str, reduction: str, is_skipped: bool, options: dict[str, Any]
) -> None:
    """Two epochs of mini-batches of two draws. Metrics are means over all tokens of all mini-batches.

    Log-probs of decoder and trainer are compared in the first mini-batch alone, or as they are recomputed. Samples
    without advantage are not computed where they have no gradient; one is where a mini-batch has no other.
    """
    tied = LOSSES.index(loss) % 2 == 0
    rng = np.random.default_rng((LOSSES.index(loss), REDUCTIONS.index(reduction)))
    case = random_case(make_policy(scale=SCALE, tied=tied), seed=11 + REDUCTIONS.index(reduction))
    scale = 0.02 if loss == "dppo" else 1  # it clips probabilities, which are small here
    algorithm = {"loss": loss, "reduction": reduction, "clip_low": 0.1 * scale, "clip_high": 0.15 * scale} | options
    is_weighed = "importance" in options
    tolerance = 1e-6 if is_weighed else 1e-12  # importance weights are float32
    shares = []
    for micro_batch_tokens in (int(rng.integers(16, 60)), 1000):
        capped = {"loss_options": {"ratio_cap": RATIO_CAP}} if loss in ("dual_clip", "dppo") else {}
        recipe = make_recipe(
            algorithm=algorithm | capped,
            train__micro_batch_tokens=micro_batch_tokens,
            train__mini_batch_prompts=2,
            train__num_epochs=2,
        )
        draws = [*np.sort(rng.integers(4, size=8)).tolist(), 8, 9]
        order = zip(rng.permutation(10), draws, [1] * 8 + [0] * 2, strict=True)
        sequences = [replace(case[n], draw_index=d, advantages=case[n].advantages * has) for n, d, has in order]
        expected, gradients = padded_step(make_policy(scale=SCALE, tied=tied), sequences, recipe, step=3)
        policy = make_policy(scale=SCALE, tied=tied)
        optimizer = RecordingSGD(policy)
        metrics = update(policy, optimizer, sequences, recipe, step=3)
        for found, gradient in zip(optimizer.gradients, gradients, strict=True):
            is_zero = not any(part.any() for part in gradient)
            error = float(any(part.any() for part in found)) if is_zero else distance(found, gradient)
            assert error < tolerance
        computed = sequences[:8] if is_skipped else sequences
        assert metrics["tokens/update"] == 2 * sum(len(sequence.token_ids) for sequence in computed)
        assert {
            name for name in metrics if name.startswith(("kl/", "clip_share/", "importance/", "opsm/", "drift"))
        } <= expected.keys()
        for name, value in expected.items():  # log-probs are compared in float32
            exact = name in ("loss", "kl/ref") or name.startswith("clip_share/")
            rel, at_least = (1e-12, 0) if exact and not is_weighed else (1e-5, 1e-7)
            assert metrics[name] == pytest.approx(value, rel=rel, abs=at_least), name
        clips = [share for name, share in expected.items() if name.startswith("clip_share/")]
        assert len(clips) == {"dual_clip": 3, "policy_gradient": 0}.get(loss, 2)
        shares.append(
            [share for name, share in expected.items() if name.endswith(("outside_share", "dropped_share"))] or clips
        )
    for both in zip(*shares, strict=True):
        assert any(0 < share < 1 for share in both), "or the comparison would show less than it seems to"


@pytest.mark.parametrize(
    ("schedule", "warmup", "share"),
    [
        ("constant", 3, lambda done: 1.0),
        ("linear", 3, lambda done: 1 - done),
        ("cosine", 0, lambda done: (1 + math.cos(math.pi * done)) / 2),
    ],
)
def test_learning_rate_follows_the_schedule_over_steps_epochs_and_mini_batches(
    schedule: str, warmup: int, share: Callable[[float], float]
) -> None:
    recipe = make_recipe(
        train__mini_batch_prompts=1, train__num_epochs=2, train__warmup_steps=warmup, train__schedule=schedule
    )  # 2 steps of 2 epochs of 3 mini-batches: 12 optimizer steps
    policy = make_policy()
    optimizer = RecordingSGD(policy)
    for step in (1, 2):
        metrics = update(policy, optimizer, make_sequences(policy), recipe, step=step)
        assert metrics["learning_rate"] == optimizer.rates[-1]
    rising = [(index + 1) / (warmup + 1) for index in range(warmup)]
    falling = [share(index / (12 - warmup)) for index in range(12 - warmup)]
    assert optimizer.rates == pytest.approx([1e-3 * f for f in (*rising, *falling)], rel=1e-12)


def test_a_micro_batch_is_made_when_it_is_asked_for() -> None:
    """The device holds one at a time; what is wrong with a later sequence is said before the first is made."""

    def sequence(num_tokens: int) -> TrainSequence:
        zeros = np.zeros(num_tokens - 1, np.float32)
        return TrainSequence(
            token_ids=np.arange(num_tokens),
            targets=np.arange(1, num_tokens),
            draw_index=next(draws),
            rollout_logprobs=zeros,
            advantages=zeros,
        )

    draws = count()
    sequences = [sequence(3) for _ in range(5)]
    batches = pack(sequences, 4, "cpu")
    assert isinstance(batches, Iterator)
    assert len(list(batches)) == 3
    assert list(pack([], 8, "cpu")) == []
    with pytest.raises(ValueError, match=r"sequence 5 has 7 tokens, more than the 6 .*_tokens to at least 7"):
        pack([*sequences, sequence(7)], 6, "cpu")


# --- Metrics, and what stops an update --------------------------------------------------------------------------------


def is_unchanged(policy: Transformer, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


@pytest.mark.parametrize("old_logprobs", ["rollout", "recompute"])
def test_a_large_logprob_difference_stops_before_any_change(old_logprobs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over all tokens counts, and stops no run if they are few."""
    policy = make_policy()
    sequences = make_sequences(policy)
    sequences[4].rollout_logprobs[1] -= 2.0
    trainer = np.concatenate([sequence.rollout_logprobs for sequence in sequences])
    before = copy.deepcopy(policy.state_dict())
    above, below = (
        make_recipe(
            algorithm__old_logprobs=old_logprobs,
            train__micro_batch_tokens=16,
            train__max_logprob_difference=share * 2.0 / len(trainer),
        )
        for share in (1.01, 0.99)
    )
    metrics = update(policy, RecordingSGD(policy), sequences, below)
    assert metrics["logprob_difference/max"] == pytest.approx(2.0, abs=1e-5)
    policy.load_state_dict(before)
    monkeypatch.setattr("srtrl.trainer.objective.MIN_COMPARED_TOKENS", 1)
    with pytest.raises(LogprobDifferenceError, match=r"^step 7.* more than train\.max_logprob_difference"):
        update(policy, RecordingSGD(policy), sequences, below, step=7)
    assert is_unchanged(policy, before)
    update(policy, RecordingSGD(policy), sequences, above)
    trainer[2] = np.nan
    with pytest.raises(NonFiniteError, match="step 3: a log-prob by the trainer is not a finite number"):
        logprob_difference(sequences, trainer, limit=0.1, where="step 3")


def loss_with_metrics(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *_: Tensor, **__: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """One metric that has the name of srtrl's, and one for micro-batches with a positive advantage alone."""
    ones = torch.ones_like(advantages)
    return -logprobs, {"entropy": 3 * ones, **({"rare": ones} if bool((advantages > 0).any()) else {})}


def test_a_users_metrics_are_logged_under_loss_and_count_as_zero_where_they_are_absent() -> None:
    policy = make_policy()
    sequences = make_sequences(policy)
    for sequence in sequences:
        sequence.advantages[:] = sequence.draw_index % 2
    recipe = make_recipe(algorithm__loss=f"{__name__}:loss_with_metrics", train__mini_batch_prompts=1)
    metrics = update(policy, RecordingSGD(policy), sequences, recipe)
    sizes = [len(sequence.targets) for sequence in sequences]
    assert metrics["loss/rare"] == pytest.approx(sum(sizes[2:4]) / sum(sizes))
    assert metrics["loss/entropy"] == 3
    assert metrics["entropy"] != 3
    assert metrics["tokens/update"] == sum(len(sequence.token_ids) for sequence in sequences), (
        "each may have a gradient"
    )


WHERE = "step 4, epoch 1, mini-batch 1: the"


@pytest.mark.parametrize(
    ("flaw", "at_call", "error", "message"),
    [
        ("nan", 1, NonFiniteError, rf"{WHERE} loss \(algorithm\.loss update_cases:incorrect_loss\) is nan"),
        ("infinite slope", 1, NonFiniteError, f"{WHERE} gradient norm is (nan|inf)"),
        ("no memory", 3, torch.OutOfMemoryError, "out of memory"),
    ],
)
def test_an_incorrect_function_stops_before_any_change(
    flaw: str, at_call: int, error: type[Exception], message: str
) -> None:
    """In an update of several micro-batches."""
    CALLS.clear()
    policy = make_policy()
    before = copy.deepcopy(policy.state_dict())
    recipe = make_recipe(algorithm=flawed(flaw, at_call), train__micro_batch_tokens=16)
    with pytest.raises(error, match=message):
        update(policy, RecordingSGD(policy), make_sequences(policy), recipe, step=4)
    assert is_unchanged(policy, before)


def test_the_message_names_the_stage_and_options_that_help(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. If reserved but unallocated memory is large try X.")
    words = r"(?s)^step 3, update: .* too small. CUDA out of memory.\n.*train\.micro_batch_tokens \(the same gradient\)"
    with pytest.raises(UpdateMemoryError, match=words), explain_out_of_memory("step 3, update"):
        raise error
    monkeypatch.setattr(build_models, "make_policy_optimizer", Mock(side_effect=error))
    with pytest.raises(UpdateMemoryError, match=r"(?s)^loading the models: the device's memory is too small.*--check"):
        build.build_parts(tiny_run.make_recipe(policy, tmp_path))
    assert "start again with --overwrite" in how_to_resume(tmp_path / "empty")


# --- Its work: operations counted by torch against the formula, and the speeds that are logged from it ----------------


LENGTHS = [5, 1, 8]


class WithoutAttention(PackedPlan):
    """Each token takes its own values: no products that torch would count."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1) + 0 * q


def counted(num_targets: int) -> int:
    policy = make_policy()
    token_ids = torch.randint(19, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False) as counter:
        hidden = policy(token_ids, WithoutAttention(LENGTHS, "cpu"))[:num_targets]
        targets = token_ids[:num_targets]
        logprobs, _ = token_logprobs_reference(hidden, policy.head_weight, targets, temperature=1.0)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def test_products_are_those_that_torch_counts() -> None:
    config = make_policy().config
    seen = sum(1 for length in LENGTHS for token in range(length) for _ in range(token + 1))
    attention = 3 * seen * 2 * 2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    for num_targets in (6, sum(LENGTHS)):
        assert model_flops(config, LENGTHS, num_targets=num_targets) == counted(num_targets) + attention
    assert model_flops(config, LENGTHS) == counted(sum(LENGTHS)) + attention, "by default every token's"
    begun = model_flops(config, LENGTHS[2:], shared=[3])  # 3 of 8 tokens are computed elsewhere
    assert begun == model_flops(config, LENGTHS[2:]) - model_flops(config, [3])
    kinds = (config.layers[0]._replace(window=3), config.layers[0])
    config = replace(config, num_hidden_layers=2)
    lost = sum(max(0, token + 1 - 3) for length in LENGTHS for token in range(length))
    outside = 3 * 4 * lost * config.num_attention_heads * config.head_dim
    assert model_flops(replace(config, layers=kinds), LENGTHS) == model_flops(config, LENGTHS) - outside


def test_flops_of_an_update_are_those_of_its_epochs() -> None:
    policy, recipe = make_policy(), make_recipe(train__num_epochs=3)
    sequences = make_sequences(policy)
    sequences = [sequences[index] for index in sharing_order(sequences)]
    lengths, shared = [len(sequence.token_ids) for sequence in sequences], shared_tokens(sequences)
    num_targets = sum(len(sequence.targets) for sequence in sequences)
    once = model_flops(policy.config, lengths, num_targets=num_targets, shared=shared)
    assert update_flops(recipe, policy.config, sequences) == pytest.approx(3 * once, rel=1e-12)


def test_speeds_are_logged_where_there_was_an_update() -> None:
    seconds, row = {"rollout": 2.0, "update": 4.0}, {"engine/tokens": 10.0}
    assert time_metrics(seconds, row, 2e12).keys() == {
        f"time/{name}" for name in (*seconds, "step", "tokens_per_second")
    }
    row["tokens/update"] = 100.0
    found = time_metrics(seconds, row, 2e12)
    assert (found["time/update_tflops"], found["time/tokens_per_second"]) == (0.5, 5.0)
