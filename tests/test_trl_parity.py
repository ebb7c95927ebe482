"""Losses, reductions, KL and importance weights against the code of TRL: `GRPOTrainer._compute_loss` itself.

TRL's method runs with a stand-in for the trainer, whose log-probs are given numbers; ours gets the same numbers without
padding. Compared are the loss of a mini-batch, its gradient with respect to every log-prob, and the clip shares, in one
piece and in micro-batches. TRL is not needed for anything else (`pip install -e .[dev]` brings it).
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_reference import padded
from torch import Tensor

from srtrl.algorithms.losses import importance_weights, opsm_mask
from srtrl.algorithms.reductions import k3
from srtrl.resolve import resolve_part

MAX_NEW_TOKENS = 11
NUM_SEQUENCES = 8


CAP = 1.1
"""Cap of the importance weights."""
DAPO, CISPO, SEQUENCE = {"loss_type": "dapo"}, {"loss_type": "cispo"}, {"importance_sampling_level": "sequence"}
NARROW = SEQUENCE | {"epsilon_low": 3e-2, "epsilon_high": 4e-2}
CASES: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "grpo": ("ppo_clip", "sequence_mean_token_mean", {"beta": 0.04}, 0.4),
    "dr_grpo": ("ppo_clip", "sequence_mean_token_sum_norm", {"loss_type": "dr_grpo"}, 0.4),
    "dapo": ("ppo_clip", "token_mean", DAPO | {"epsilon_high": 0.28}, 0.4),
    "gspo": ("gspo", "sequence_mean_token_mean", NARROW, 0.4),
    "as published": ("gspo", "sequence_mean_token_mean", SEQUENCE | {"epsilon_low": 3e-4, "epsilon_high": 4e-4}, 1e-3),
    "gspo_token": ("gspo_token", "sequence_mean_token_mean", NARROW, 0.4),
    "cispo": ("cispo", "token_mean", CISPO | {"epsilon_high": 1.5}, 0.4),
    "cispo, ScaleRL": ("cispo", "token_mean", CISPO | {"epsilon_high": 5.0}, 1.5),
    "dual clip": ("dual_clip", "token_mean", DAPO | {"delta": 1.8}, 1.0),
    "KL and importance": ("ppo_clip", "token_mean", DAPO | {"beta": 0.1, "use_vllm": True}, 0.4),
}
"""Our loss and reduction, TRL's settings that mean the same, and how far the policy has moved."""


class Numbers:
    """Log-probs of ragged sequences, which move by `spread`, and one advantage each, [B]."""

    def __init__(self, spread: float) -> None:
        generator = np.random.default_rng(0)
        self.old = [generator.uniform(-4.0, -0.05, length) for length in (5, 1, 9, 3, 7, 2, 8, 4)]
        self.new, self.ref, self.decoder = (
            [row + deviation * generator.standard_normal(len(row)) for row in self.old]
            for deviation in (spread, 0.5, 0.1)
        )
        self.advantages = torch.from_numpy(generator.standard_normal(NUM_SEQUENCES))


def trl_module(name: str) -> Any:
    """TRL's module, imported when a test first needs it."""
    return pytest.importorskip(f"trl.trainer.{name}", reason="TRL is not installed: pip install 'trl>=1.0'")


def stand_in(logprobs: Tensor, num_micro_batches: int, **settings: Any) -> SimpleNamespace:
    """Trainer's fields that `_compute_loss` reads; `logprobs` [B, L] are the model's."""
    fields = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "max_completion_length": MAX_NEW_TOKENS,
        "current_gradient_accumulation_steps": num_micro_batches,
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "_entropy_bonus_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
    }
    args = {"delta": settings.pop("delta", None), "use_bias_correction_kl": False}
    fields["args"] = SimpleNamespace(**args, steps_per_generation=num_micro_batches)
    return SimpleNamespace(**fields | settings)


def trl_tokens(mask: Tensor) -> dict[str, Tensor]:
    """Prompts of two tokens and completions of these lengths, as TRL's inputs name them."""
    prompt = torch.ones(len(mask), 2, dtype=torch.int64)
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    return dict(zip(names, (prompt, prompt, mask.long(), mask.long()), strict=True))


def trl_loss(
    module: Any, settings: dict[str, Any], numbers: Numbers, rows: slice, num_micro_batches: int
) -> tuple[Tensor, Tensor, dict[str, list[float]]]:
    """Loss of a micro-batch by TRL, its gradient [R], and TRL's metrics."""
    new, mask = padded(numbers.new[rows], padding=-1.0)
    new.requires_grad_()
    old = padded(numbers.old[rows], padding=-2.0)[0]
    inputs = trl_tokens(mask) | {
        "old_per_token_logps": old,
        "ref_per_token_logps": padded(numbers.ref[rows], padding=-0.5)[0],
        "importance_sampling_ratio": torch.exp(old - padded(numbers.decoder[rows])[0]).clamp(max=CAP),
        "advantages": numbers.advantages[rows],
        "num_items_in_batch": torch.tensor(float(sum(map(len, numbers.new)))),
    }
    trainer = stand_in(new, num_micro_batches, **settings)
    loss = module.GRPOTrainer._compute_loss(trainer, None, inputs)
    gradient = torch.autograd.grad(loss, new)[0]
    assert bool((gradient[~mask] == 0).all())
    return loss.detach(), gradient[mask], trainer._metrics["train"]


def our_loss(
    loss: str, reduction: str, settings: dict[str, Any], numbers: Numbers, rows: slice
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The same with the functions that a recipe would name; `rows` of the mini-batch are the micro-batch."""
    lengths = torch.tensor([len(row) for row in numbers.new])
    index = torch.arange(len(lengths))[rows].repeat_interleave(lengths[rows])
    new, old, ref, decoder = (
        torch.from_numpy(np.concatenate(values[rows]))
        for values in (numbers.new, numbers.old, numbers.ref, numbers.decoder)
    )
    new.requires_grad_()
    low, high = settings.get("epsilon_low", 0.2), settings.get("epsilon_high", 0.2)
    if loss == "cispo":  # TRL's epsilon_high is the greatest weight itself
        low, high = 1.0, high - 1
    options = {"ratio_cap": settings["delta"]} if "delta" in settings else {}
    function = resolve_part("algorithm.loss", loss)
    token_loss, metrics = function(new, old, numbers.advantages[index], index, clip_low=low, clip_high=high, **options)
    if settings.get("use_vllm"):
        token_loss = token_loss * importance_weights(old, decoder, index, mode="token_truncate", min=0.0, max=CAP)[0]
    if settings.get("beta"):
        token_loss = token_loss + settings["beta"] * k3(new, ref)
    reduced = resolve_part("algorithm.reduction", reduction)(
        token_loss, index, sequence_lengths=lengths, max_new_tokens=MAX_NEW_TOKENS
    )
    return reduced.detach(), torch.autograd.grad(reduced, new)[0], metrics


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_trl(case: str, num_micro_batches: int) -> None:
    loss, reduction, settings, spread = CASES[case]
    numbers, module = Numbers(spread), trl_module("grpo_trainer")
    size = NUM_SEQUENCES // num_micro_batches
    micro_batches = [slice(first, first + size) for first in range(0, NUM_SEQUENCES, size)]
    theirs = [trl_loss(module, settings, numbers, rows, num_micro_batches) for rows in micro_batches]
    ours = [our_loss(loss, reduction, settings, numbers, rows) for rows in micro_batches]
    their_gradient, our_gradient = (torch.cat([gradient for _, gradient, _ in parts]) for parts in (theirs, ours))
    assert their_gradient.abs().max() > 1e-3
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-9, atol=1e-12)
    if loss == "ppo_clip" and num_micro_batches == 1:
        for side in ("low", "high"):
            share = ours[0][2][f"clip_share/{side}"].mean().item()
            assert share > 0
            assert share == pytest.approx(theirs[0][2][f"clip_ratio/{side}_mean"][0], rel=1e-6)
    # TRL's DAPO divides by the tokens of the mini-batch, so its micro-batches add up as ours do; so do the others.
    torch.testing.assert_close(sum(x for x, _, _ in ours), sum(x for x, _, _ in theirs), rtol=1e-9, atol=1e-12)


def test_policy_gradient_is_trls_rloo_at_unchanged_weights() -> None:
    """TRL's RLOO takes the ratio of whole responses; on the policy that sampled its gradient is REINFORCE's."""
    numbers = Numbers(0.0)
    new, mask = padded(numbers.new)
    new.requires_grad_()
    inputs = trl_tokens(mask) | {"old_logps": (new.detach() * mask).sum(1), "advantages": numbers.advantages}
    loss = trl_module("rloo_trainer").RLOOTrainer._compute_loss(stand_in(new, 1), None, inputs)
    _, our_gradient, _ = our_loss("policy_gradient", "sequence_mean_token_sum", {}, numbers, slice(0, NUM_SEQUENCES))
    torch.testing.assert_close(our_gradient, torch.autograd.grad(loss, new)[0][mask], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("threshold", [0.02, 0.1])
def test_opsm_equals_trl(threshold: float) -> None:
    numbers = Numbers(0.4)
    mask = padded(numbers.new)[1]
    rows = [padded(values)[0] for values in (numbers.new, numbers.decoder)]
    given = numbers.advantages[:, None]
    kept = trl_module("grpo_trainer").GRPOTrainer.get_off_policy_mask(given, *rows, mask, threshold)
    index = torch.arange(NUM_SEQUENCES).repeat_interleave(mask.sum(1))
    new, decoder = (row[mask] for row in rows)
    found = opsm_mask(decoder, new, numbers.advantages[index], index, threshold=threshold)
    assert torch.equal(found, (kept == 0).expand_as(mask)[mask])
    assert 0 < found.double().mean() < 0.8
