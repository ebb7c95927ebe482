"""Sampling: the fast kernel against its definition, the right frequencies, and noise that does not repeat itself."""

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_kernels import sample_rows_reference, to_uniform, uniform_noise
from scipy import stats

from srtrl.engine.sampling import filter_top_k_top_p, row_logprobs, sample_rows_on_cpu
from srtrl.model.noise import hash_row, make_rng_key, uniform_of
from srtrl.types import Purpose


def to_signed(rng_keys: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(rng_keys.view(np.int64))


@numba.njit
def noise_of_tokens(rng_keys: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    found = np.empty(len(tokens))
    for n in range(len(tokens)):
        found[n] = uniform_of(hash_row(rng_keys[n], positions[n]), tokens[n])
    return found


@given(seed=st.integers(0, 2**32))
def test_a_drafter_computes_the_noise_of_one_token_as_the_definition_does(seed: int) -> None:
    random = np.random.default_rng(seed)
    rng_keys = random.integers(0, 2**64, 9, dtype=np.uint64)
    positions, tokens = random.integers(0, 2**31, 9), random.integers(0, 5000, 9).astype(np.int32)
    expected = uniform_noise(to_signed(rng_keys), torch.from_numpy(positions), 5000)[np.arange(9), tokens.tolist()]
    assert noise_of_tokens(rng_keys, positions, tokens).tolist() == expected.tolist()


@given(
    vocab_size=st.integers(1, 700),
    spread=st.sampled_from([0.0, 0.1, 1.0, 5.0, 60.0, 300.0]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    excluded=st.sampled_from([0.0, 0.5, 0.95]),
    seed=st.integers(0, 10**6),
)
def test_kernel_gives_the_tokens_and_logprobs_of_the_definition(
    vocab_size: int, spread: float, temperature: float, excluded: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(size=(5, vocab_size)).astype(np.float32)) * spread
    mask = torch.from_numpy(random.random((5, vocab_size)) < excluded)
    mask[:, random.integers(vocab_size)] = False
    logits = logits.masked_fill(mask, -torch.inf)
    temperatures = np.full(5, temperature, np.float32)
    rng_keys = random.integers(0, 2**64, 5, dtype=np.uint64)
    positions = random.integers(0, 10_000, 5)
    token_ids, logprobs = sample_rows_on_cpu(logits, temperatures, rng_keys, positions)
    expected = sample_rows_reference(
        logits, torch.from_numpy(temperatures), to_signed(rng_keys), torch.from_numpy(positions)
    )
    assert token_ids.tolist() == expected.tolist()
    assert not mask[torch.arange(5), expected].any()
    reference = row_logprobs(logits.double(), torch.from_numpy(temperatures), expected)
    assert np.allclose(logprobs, reference.numpy(), atol=1e-5, rtol=1e-6)


def test_the_kernel_draws_the_tokens_of_the_definition_in_20_000_rows() -> None:
    """A sampler that is slightly biased differs in less than one row of a hundred."""
    random = np.random.default_rng(0)
    logits = torch.from_numpy(2 * random.normal(size=(20_000, 61)).astype(np.float32))
    temperatures = np.full(len(logits), 1.0, np.float32)
    rng_keys, positions = random.integers(0, 2**64, len(logits), dtype=np.uint64), np.arange(len(logits))
    token_ids, _ = sample_rows_on_cpu(logits, temperatures, rng_keys, positions)
    rows = torch.from_numpy(temperatures), to_signed(rng_keys), torch.from_numpy(positions)
    assert token_ids.tolist() == sample_rows_reference(logits, *rows).tolist()


def test_frequencies_of_one_distribution() -> None:
    """A correct sampler would fail with one seed in 1,000, one at a temperature of 0.85 with all but one in 20,000."""
    num_draws = 50_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0, 1.5, -5.0])  # four of the last token are expected
    temperatures, rng_keys = (
        np.full(num_draws, 0.8, np.float32),
        np.full(num_draws, make_rng_key(1, "train", 3, 4), np.uint64),
    )
    token_ids, _ = sample_rows_on_cpu(logits.repeat(num_draws, 1), temperatures, rng_keys, np.arange(num_draws))
    for temperature, is_right in ((0.8, True), (0.85, False)):
        probs = torch.softmax(logits / temperature, 0).double().numpy()
        counts = np.bincount(token_ids, minlength=len(probs))
        pvalue = stats.chisquare(counts, probs * num_draws / probs.sum()).pvalue
        assert pvalue > 1e-3 if is_right else pvalue < 1e-6


def noise_of(rng_keys: list[int], num_positions: int = 64, vocab_size: int = 128) -> np.ndarray:
    """[len(rng_keys), num_positions * vocab_size] standard normal scores of the noise."""
    signed = to_signed(np.repeat(np.array(rng_keys, np.uint64), num_positions))
    uniform = uniform_noise(signed, torch.arange(num_positions).repeat(len(rng_keys)), vocab_size)
    scores: np.ndarray = stats.norm.ppf(uniform.numpy()).reshape(len(rng_keys), -1)
    return scores


def assert_uncorrelated(a: np.ndarray, b: np.ndarray) -> None:
    correlation = float(np.corrcoef(a, b)[0, 1])
    assert abs(correlation) < 4.5 / np.sqrt(len(a)), correlation


def test_noise_is_uniform_and_uncorrelated_over_keys_positions_and_tokens() -> None:
    of_train = [make_rng_key(seed, "train", *of) for seed, *of in ((7, 3, 2), (7, 3, 3), (7, 4, 2), (8, 3, 2))]
    noise = noise_of([*of_train, make_rng_key(7, "eval", 3, 2), make_rng_key(7, "generate", 3, 2)])
    for row in noise[1:]:
        assert_uncorrelated(noise[0], row)
        assert_uncorrelated(noise[0][:-128], row[128:])  # nor is it the same noise a position later
    with pytest.raises(AssertionError):
        assert_uncorrelated(noise[0], noise[0] + 10 * noise[1])
    longer = noise_of([make_rng_key(0, "train", 0, 0)], num_positions=400, vocab_size=500)[0]
    assert_uncorrelated(longer[:-500], longer[500:])
    assert_uncorrelated(longer[:-1], longer[1:])
    assert stats.kstest(longer, "norm").pvalue > 1e-3


def test_noise_is_strictly_between_zero_and_one() -> None:
    lowest, highest = to_uniform(torch.tensor([0, -1])).tolist()  # no bit, and all bits
    assert 0 < lowest < 1e-15
    assert 1 - 1e-15 < highest < 1
    uniform = uniform_noise(torch.tensor([0, -1, 1 << 62]), torch.tensor([0, 1, 2]), 100_000)
    assert float(uniform.min()) > 0
    assert float(uniform.max()) < 1


def test_top_k_and_top_p_keep_exactly_the_right_tokens() -> None:
    cases: list[tuple[list[float], int, float, list[int]]] = [
        ([0.4, 0.3, 0.2, 0.1], 2, 1.0, [0, 1]),
        ([0.1, 0.2, 0.3, 0.4], 0, 0.65, [2, 3]),
        ([0.25, 0.25, 0.25, 0.25], 3, 1.0, [0, 1, 2]),  # a tie at the border: the first tokens
        ([0.4, 0.3, 0.2, 0.1], 3, 0.5, [0, 1]),  # top-p of what top-k left: 4/9 is below one half, 7/9 is not
        ([0.1, 0.7, 0.1, 0.1], 0, 1e-9, [1]),  # never none
    ]
    probs, top_k, top_p = (torch.tensor([case[column] for case in cases]) for column in range(3))
    kept = filter_top_k_top_p(probs.log(), torch.ones(len(cases)), top_k, top_p).isfinite()
    assert [row.nonzero().flatten().tolist() for row in kept] == [case[3] for case in cases]
    # All tokens stay also where a sum in float32 reaches one early.
    logits = 8 * torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))
    kept = filter_top_k_top_p(logits, torch.ones(4), torch.tensor([0, 3, 0, 0]), torch.tensor([1.0, 1.0, 0.5, 1.0]))
    assert kept.isfinite().sum(1)[[0, 1, 3]].tolist() == [5000, 3, 5000]


def test_rng_keys_are_64_bits_and_distinct() -> None:
    purposes: tuple[Purpose, ...] = ("train", "eval", "generate")
    rng_keys = {
        make_rng_key(seed, purpose, draw, sample)
        for seed in (0, 11)  # 1/11/... and 11/1/... must not be written alike
        for purpose in purposes
        for draw in range(120)
        for sample in range(20)
    }
    assert len(rng_keys) == 2 * 3 * 120 * 20
    assert all(0 <= rng_key < 2**64 for rng_key in rng_keys)
    assert max(rng_keys) > 2**63  # the high bit is used
