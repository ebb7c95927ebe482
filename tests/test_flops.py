"""The update's work: operations counted by torch against the formula, and the speeds that are logged from it."""

from dataclasses import replace

import pytest
import torch
from plain_kernels import token_logprobs_reference
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from update_cases import make_policy, make_recipe, make_sequences

from srtrl.model.attention import PackedPlan
from srtrl.rollout.packing import shared_tokens, sharing_order
from srtrl.run.step_metrics import model_flops, time_metrics, update_flops

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
