"""Advantages and whitening against the papers' formulas in loops (`algorithm_reference.py`), on ragged batches."""

import math

import algorithm_reference as reference
import numpy as np
import pytest
import torch
from algorithm_reference import Ragged, padded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from srtrl.algorithms import advantages
from srtrl.algorithms.advantages import is_token_level, needs_critic, whiten
from srtrl.resolve import list_parts

F64 = torch.float64
GROUP_FUNCTIONS = ["group_relative", "group_centered", "leave_one_out"]

numbers = st.floats(-3, 3).map(lambda number: round(number, 3))
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@st.composite
def ragged_rows(draw: st.DrawFn) -> tuple[Ragged, Ragged]:
    """Rewards and values of 1 to 5 responses of 1 to 6 tokens."""
    rows = [st.lists(numbers, min_size=length, max_size=length) for length in draw(lengths)]
    return [np.array(draw(row)) for row in rows], [np.array(draw(row)) for row in rows]


def group_formula(name: str, rewards: list[float]) -> list[float]:
    """One group by the paper: GRPO section 4.1.2 (divisor S - 1, 1e-6), Dr. GRPO, RLOO."""
    mean = sum(rewards) / len(rewards)
    if name == "leave_one_out":
        others = [[r for j, r in enumerate(rewards) if j != i] for i in range(len(rewards))]
        return [r - sum(rest) / len(rest) for r, rest in zip(rewards, others, strict=True)]
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (deviation + 1e-6 if name == "group_relative" else 1) for r in rewards]


@pytest.mark.parametrize("name", GROUP_FUNCTIONS)
@pytest.mark.parametrize("shape", [(1, 2), (3, 5), (40, 8)])
def test_group_advantages_equal_the_formula(name: str, shape: tuple[int, int]) -> None:
    rewards = np.random.default_rng(shape[0]).standard_normal(shape)
    found = getattr(advantages, name)(torch.from_numpy(rewards))
    expected = torch.tensor([group_formula(name, list(map(float, row))) for row in rewards], dtype=F64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.sum(dim=1), torch.zeros(shape[0], dtype=F64), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("name", GROUP_FUNCTIONS)
@pytest.mark.parametrize("reward", [0.1, -3.3, 1e-8, 1e8, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_equal_rewards_has_exactly_zero_advantages(name: str, reward: float, dtype: torch.dtype) -> None:
    found = getattr(advantages, name)(torch.full((1, 5), reward, dtype=dtype))
    assert found.dtype == dtype
    assert torch.equal(found, torch.zeros(1, 5, dtype=dtype))


def token_advantages(
    name: str, rewards: Ragged, values: Ragged, gamma: float, lam: float, padding: float = 0.0
) -> Tensor:
    """Of one of our functions: [B, L], with `padding` behind the ends of its inputs."""
    rows, mask = padded(rewards, padding)
    baseline, _ = padded(values, padding)
    given = rows.clone()
    found = getattr(advantages, name)(
        rows, baseline, mask, group_index=torch.arange(len(rewards)), gamma=gamma, lam=lam
    )
    assert torch.equal(rows.nan_to_num(), given.nan_to_num()), "the caller's rewards were changed"
    assert isinstance(found, Tensor)
    assert found.dtype == F64
    assert bool((found[~mask] == 0).all())
    return found


paddings = st.sampled_from([0.0, 1e6, math.nan, math.inf])


@settings(max_examples=60, deadline=None)
@given(
    rows=ragged_rows(),
    gamma=st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.3, 0.0]),
    padding=paddings,
)
def test_the_gae_recursion_equals_the_closed_form(
    rows: tuple[Ragged, Ragged], gamma: float, lam: float, padding: float
) -> None:
    rewards, values = rows
    found = token_advantages("gae", rewards, values, gamma, lam, padding)
    expected, _ = padded(reference.gae(rewards, values, gamma, lam))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(rows=ragged_rows(), gamma=st.sampled_from([1.0, 0.9, 0.0]), padding=paddings)
def test_reinforce_plus_plus_is_the_whitened_return(rows: tuple[Ragged, Ragged], gamma: float, padding: float) -> None:
    rewards, values = rows
    returns = reference.returns_to_go(rewards, gamma)
    found = token_advantages("reinforce_plus_plus", rewards, values, gamma, 1.0, padding)
    tokens = np.concatenate(returns)
    if (tokens == tokens[0]).all():
        assert torch.equal(found, torch.zeros_like(found))
    elif np.ptp(tokens) > 1e-9:  # below it the sums differ by rounding alone
        torch.testing.assert_close(found, padded(reference.whiten(returns))[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("number", [0.1, -7.7, 1e8, 0.0])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_equal_numbers_become_exactly_zero(number: float, num_tokens: int) -> None:
    """A single token among them: it has no standard deviation."""
    values, mask = padded([np.full(num_tokens, number), np.array([number])][: 1 if num_tokens == 1 else 2])
    assert torch.equal(whiten(values, mask), torch.zeros_like(values))
    assert whiten(values.float(), mask).dtype == torch.float32


def test_marks_say_how_an_advantage_is_called() -> None:
    marks = {name: is_token_level(getattr(advantages, name)) for name in list_parts("algorithm.advantage")}
    assert marks == dict.fromkeys(GROUP_FUNCTIONS, False) | {"gae": True, "reinforce_plus_plus": True}
    assert [name for name in marks if needs_critic(getattr(advantages, name))] == ["gae"]
