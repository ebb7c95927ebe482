"""A tiny float64 policy, its training sequences and naive log-probs: what the tests of the update share."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tiny_run
import torch
from engine_cases import init_policy
from torch import Tensor

from srtrl.model.attention import PackedPlan
from srtrl.model.transformer import Transformer
from srtrl.recipe.schema import Recipe
from srtrl.trainer.objective import PolicyLearner, logprobs_column
from srtrl.trainer.optimizer import MasterAdamW
from srtrl.trainer.passes import UpdateContext, fill
from srtrl.types import TrainSequence

NUM_GROUPS, NUM_SAMPLES = 3, 2
TEMPERATURE = 0.8
NO_LIMIT = 1e9


def make_recipe(**options: Any) -> Recipe:
    """A recipe for three groups of two; options are `section__key=value`."""
    lengths = {"max_prompt_tokens": 6, "max_new_tokens": 10, "temperature": TEMPERATURE}
    limits = {"max_grad_norm": NO_LIMIT, "max_logprob_difference": NO_LIMIT}
    sections: dict[str, Any] = {
        "rollout": {"num_prompts": NUM_GROUPS, "num_samples": NUM_SAMPLES} | lengths,
        "algorithm": {"clip_high": 0.3, "kl": {}},
        "train": {"num_steps": 2, "micro_batch_tokens": 1000, "learning_rate": 1e-3} | limits,
    }
    return tiny_run.make_recipe(Path("unused"), Path("unused"), **(sections | options))


def make_policy(
    seed: int = 0, dtype: torch.dtype = torch.float64, tied: bool = False, scale: float = 20, hidden_size: int = 8
) -> Transformer:
    """A policy with 19 tokens."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    return init_policy(seed, dtype, scale=scale, vocab_size=19, hidden_size=hidden_size, intermediate_size=12, **heads)


@torch.no_grad()
def naive_logprobs(policy: Transformer, sequence: TrainSequence) -> list[float]:
    """Log-probs of the sampled tokens, one sequence alone."""
    token_ids = torch.from_numpy(sequence.token_ids)
    hidden = policy(token_ids, PackedPlan([len(token_ids)], "cpu"))
    logits = policy.logits(hidden)[torch.from_numpy(sequence.targets) - 1]
    rows = torch.log_softmax(logits.double() / TEMPERATURE, dim=-1)  # [R, V]
    return [float(row[token]) for row, token in zip(rows, sequence.token_ids[sequence.targets], strict=True)]


def make_sequences(
    policy: Transformer, noise: float = 0.0, num_groups: int = NUM_GROUPS, seed: int = 5
) -> list[TrainSequence]:
    """Random sequences; `rollout_logprobs` are the policy's, off by noise of this deviation, `ref_logprobs` by 0.5.

    In every second one an environment has put in two tokens, in one or two places. Most begin as the one before does,
    with prompt, response or wholly.
    """
    rng = np.random.default_rng(seed)
    sequences: list[TrainSequence] = []
    for index in range(num_groups * NUM_SAMPLES):
        num_prompt, num_response = int(rng.integers(1, 6)), int(rng.integers(1, 10))
        blank = np.zeros(num_response, np.float32)
        token_ids = rng.integers(19, size=num_prompt + num_response)
        others = np.random.default_rng(index)
        num_places = 2 if index % 2 and num_response > 1 else 0
        places = np.sort(others.integers(1, max(2, num_response), size=num_places))
        is_inserted = np.insert(np.zeros(num_response, bool), places, True)
        token_ids = np.insert(token_ids, num_prompt + places, others.integers(19, size=len(places)))
        if sequences:
            before = sequences[-1].token_ids
            common = others.integers(min(len(before), len(token_ids)) + 1)
            token_ids[:common] = before[:common]
        sequence = TrainSequence(
            token_ids=token_ids,
            targets=num_prompt + np.flatnonzero(~is_inserted),
            draw_index=index // NUM_SAMPLES,
            rollout_logprobs=blank,
            advantages=np.full(num_response, rng.standard_normal(), np.float32),
        )
        logprobs = np.array(naive_logprobs(policy, sequence))
        noises = rng.standard_normal((2, num_response))
        sequences.append(
            replace(
                sequence,
                rollout_logprobs=(logprobs + noise * noises[0]).astype(np.float32),
                ref_logprobs=(logprobs + 0.5 * noises[1]).astype(np.float32),
            )
        )
    return sequences


def random_shares(lengths: Sequence[int], seed: int) -> list[int]:
    """Tokens that each sequence shares with the one before it, for a `PackedPlan`: any number that is possible."""
    rng = np.random.default_rng(seed)
    return [0, *(int(rng.integers(min(before, length - 1) + 1)) for before, length in pairwise(lengths))]


def update(
    policy: Transformer, optimizer: MasterAdamW, sequences: Sequence[TrainSequence], recipe: Recipe, *, step: int = 1
) -> dict[str, float]:
    """The policy's update, as the trainer calls it."""
    context = UpdateContext(recipe=recipe, step=step)
    if recipe.algorithm.old_logprobs == "recompute":
        column = logprobs_column("old_logprobs", "old_logprobs", policy, recipe.rollout.temperature)
        sequences = fill(column, sequences, context)
    return PolicyLearner(policy, optimizer, recipe).learn(sequences, context)


class RecordingSGD(MasterAdamW):
    """Plain gradient descent that keeps the gradients and learning rates it was given."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__([{"params": list(model.named_parameters())}], lr=0.0)
        self.gradients: list[list[Tensor]] = []
        self.rates: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Record, then descend."""
        parameters = self.param_groups[0]["params"]
        assert all(parameter.grad is not None for parameter in parameters), "every weight learns"
        self.gradients.append([parameter.grad.clone() for parameter in parameters])
        self.rates.append(self.param_groups[0]["lr"])
        torch._foreach_add_(parameters, self.gradients[-1], alpha=-self.rates[-1])


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of the expected gradient."""
    difference = sum(float((f.double() - e.double()).square().sum()) for f, e in zip(found, expected, strict=True))
    return math.sqrt(difference / sum(float(e.double().square().sum()) for e in expected))


CALLS: list[str] = []
"""Calls of `incorrect_loss`."""


def incorrect_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *_: Tensor, flaw: str, at_call: int = 1, **options: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of a user's own; see `flawed`."""
    CALLS.append(flaw)
    match flaw if len(CALLS) == at_call else "none":
        case "nan":
            return logprobs * math.nan, {}
        case "infinite slope":
            return (logprobs - logprobs.detach()).sqrt(), {}
        case "no memory":
            raise torch.OutOfMemoryError("CUDA out of memory.")
    return -logprobs, {}


def flawed(flaw: str, at_call: int = 1) -> dict[str, Any]:
    """Values of `algorithm` with a loss that has this flaw at one call, counted from where `CALLS` was cleared."""
    return {"loss": f"{__name__}:incorrect_loss", "loss_options": {"flaw": flaw, "at_call": at_call}}
