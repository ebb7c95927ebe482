"""What stops an update: before the weights change, with a message that says what helps."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tiny_run
import torch
from torch import Tensor
from update_cases import RecordingSGD, make_policy, make_recipe, make_sequences, naive_logprobs, update

from srtrl.recipe.schema import Recipe
from srtrl.rollout.packing import pack
from srtrl.run.interrupt import UpdateMemoryError, explain_out_of_memory, how_to_resume
from srtrl.trainer import build
from srtrl.trainer.objective import LogprobDifferenceError, NonFiniteError, logprob_difference
from srtrl.trainer.optimizer import build_optimizer
from srtrl.trainer.trainer import Trainer
from srtrl.types import TrainSequence


def shift_logprob(sequences: list[TrainSequence], index: int, token: int, by: float) -> list[TrainSequence]:
    logprobs = sequences[index].rollout_logprobs.copy()
    logprobs[token] += by
    return [*sequences[:index], replace(sequences[index], rollout_logprobs=logprobs), *sequences[index + 1 :]]


@pytest.mark.parametrize("old_logprobs", ["rollout", "recompute"])
def test_a_large_logprob_difference_stops_before_any_change(old_logprobs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token that is off by 2 nats stops no run by itself: the mean over all tokens counts."""
    policy = make_policy()
    sequences = shift_logprob(make_sequences(policy), 4, 1, by=-2.0)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    state = {key: value.clone() for key, value in policy.state_dict().items()}
    expected = 2.0 / sum(len(sequence.rollout_logprobs) for sequence in sequences)

    def limited(limit: float) -> Recipe:
        algorithm = {"old_logprobs": old_logprobs}
        return make_recipe(algorithm=algorithm, train__micro_batch_tokens=16, train__max_logprob_difference=limit)

    message = (
        r"step 7.*: the mean absolute difference .* is (\S+) nats per token, more than train\.max_logprob_difference "
        ".*; the policy's weights were not changed by this step"
    )
    assert update(policy, RecordingSGD(policy), sequences, limited(0.99 * expected), step=7)["grad_norm"] > 0
    policy.load_state_dict(state)  # those were too few tokens to stop a run
    monkeypatch.setattr("srtrl.trainer.objective.MIN_COMPARED_TOKENS", 1)
    with pytest.raises(LogprobDifferenceError, match=message) as caught:
        update(policy, RecordingSGD(policy), sequences, limited(0.99 * expected), step=7)
    found = re.search(message, str(caught.value))
    assert found is not None
    assert float(found.group(1)) == pytest.approx(expected, rel=1e-4)
    assert all(map(torch.equal, before, policy.parameters()))
    metrics = update(policy, RecordingSGD(policy), sequences, limited(1.01 * expected), step=7)
    assert metrics["logprob_difference/max"] == pytest.approx(2.0, abs=1e-5)


def test_mini_batches_after_the_first_are_not_compared() -> None:
    """Their weights have moved; a difference there says nothing of the decoder."""
    policy = make_policy()
    sequences = make_sequences(policy)
    recipe = make_recipe(train__mini_batch_prompts=1, train__max_logprob_difference=1e-3, train__learning_rate=1e-2)
    metrics = update(policy, RecordingSGD(policy), sequences, recipe)
    assert metrics["logprob_difference/max"] < 1e-5
    moved = [np.abs(naive_logprobs(policy, s) - s.rollout_logprobs).max() for s in sequences]
    assert max(moved) > 1e-2


def test_logprob_difference_of_a_nan_is_non_finite() -> None:
    sequences = make_sequences(make_policy())
    trainer = [sequence.rollout_logprobs.copy() for sequence in sequences]
    trainer[2][0] = np.nan
    with pytest.raises(NonFiniteError, match="step 3: a log-prob by the trainer is not a finite number"):
        logprob_difference(sequences, np.concatenate(trainer), limit=0.1, where="step 3")


# --- Functions of a user's own ----------------------------------------------------------------------------------------


CALLS: list[str] = []


def incorrect_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *_: Tensor, flaw: str, at_call: int = 1, **options: float
) -> tuple[Tensor, dict[str, Tensor]]:
    CALLS.append(flaw)
    match flaw if len(CALLS) == at_call else "none":
        case "nan":
            return logprobs * math.nan, {}
        case "infinite slope":
            return (logprobs - logprobs.detach()).sqrt(), {}
        case "no memory":
            raise torch.OutOfMemoryError("CUDA out of memory.")
    return -logprobs, {}


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
    packs = list(pack(sequences, 16, "cpu"))
    lengths = [len(packed.advantages) for packed in packs]
    metrics = update(policy, RecordingSGD(policy), sequences, recipe)
    assert metrics["loss/entropy"] == 3
    assert metrics["entropy"] != 3
    positive = sum(len(packed.advantages) for packed in packs if bool((packed.advantages > 0).any()))
    assert 0 < positive < sum(lengths)
    assert metrics["loss/rare"] == pytest.approx(positive / sum(lengths))


def flawed(flaw: str, at_call: int = 1) -> dict[str, Any]:
    return {"loss": f"{__name__}:incorrect_loss", "loss_options": {"flaw": flaw, "at_call": at_call}}


WHERE = "step 4, epoch 1, mini-batch 1: the"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (flawed("nan"), NonFiniteError, rf"{WHERE} loss \(algorithm\.loss {__name__}:incorrect_loss\) is nan"),
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
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    recipe = make_recipe(algorithm=options, train__micro_batch_tokens=16)
    with pytest.raises(error, match=message):
        update(policy, RecordingSGD(policy), make_sequences(policy), recipe, step=4)
    assert all(map(torch.equal, before, policy.parameters()))


# --- Messages when memory runs out ------------------------------------------------------------------------------------

TORCHS_WORDS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.50 GiB is "
    "free. Of the allocated memory 70.00 GiB is allocated by PyTorch. If reserved but unallocated memory is large try "
    "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
)


def test_a_step_allocates_nothing_of_its_own() -> None:
    """Or it could run out with one group of weights moved and the other not."""
    policy = make_policy(dtype=torch.bfloat16)
    optimizer = build_optimizer(policy, learning_rate=1e-2, weight_decay=0.0, betas=(0.9, 0.99))
    addresses = {name: tensor.data_ptr() for state in optimizer.state.values() for name, tensor in state.items()}
    assert set(addresses) == {"step", "exp_avg", "exp_avg_sq"}
    for one in policy.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    assert addresses == {
        name: tensor.data_ptr() for state in optimizer.state.values() for name, tensor in state.items()
    }


def test_the_message_names_the_stage_and_options_that_help() -> None:
    with pytest.raises(UpdateMemoryError) as caught, explain_out_of_memory("step 3, update"):
        raise torch.OutOfMemoryError(TORCHS_WORDS)
    text = str(caught.value)
    assert text.startswith("step 3, update: the device's memory is too small. CUDA out of memory. Tried to allocate")
    assert "70.00 GiB is allocated by PyTorch." in text
    assert "PYTORCH_CUDA_ALLOC_CONF" not in text
    assert "train.micro_batch_tokens (the same gradient), model.gradient_checkpointing=true" in text


def test_models_that_the_device_does_not_hold_are_a_message(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "make_policy_optimizer", Mock(side_effect=torch.OutOfMemoryError(TORCHS_WORDS)))
    with pytest.raises(UpdateMemoryError, match=r"(?s)^loading the models: the device's memory is too small.*--check"):
        Trainer(tiny_run.make_recipe(policy, tmp_path))


def test_without_a_checkpoint_the_advice_is_to_start_again(tmp_path: Path) -> None:
    assert "start again with --overwrite" in how_to_resume(tmp_path / "empty")
