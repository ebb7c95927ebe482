"""The sampling kernels of a CUDA device against the definition, under Triton's interpreter where there is no device.

The definition's frequencies are tested in `test_sampling.py`; tokens that are equal to its own have them too.
"""

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import KERNEL_DEVICE
from plain_kernels import sample_rows_reference, to_uniform
from torch import Tensor

from srtrl.cuda.jit import jit
from srtrl.cuda.sampling import MARGIN, SamplingScratch, rough_gumbel, sample_rows_triton
from srtrl.features.draft_head import REFUSED, _take_best
from srtrl.features.draft_head_cuda import rank_listed_triton


class Rows:
    """Random rows on the device: logits of some shape, and the noise that names them."""

    def __init__(self, logits: Tensor, temperatures: Tensor | float, seed: int = 0) -> None:
        num_rows = len(logits)
        generator = torch.Generator().manual_seed(seed)
        self.logits = logits.to(KERNEL_DEVICE)
        self.temperatures = torch.ones(num_rows, device=KERNEL_DEVICE) * torch.as_tensor(temperatures).to(KERNEL_DEVICE)
        rng_keys = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
        self.rng_keys = rng_keys.to(KERNEL_DEVICE)
        self.positions = torch.randint(10_000, (num_rows,), generator=generator).int().to(KERNEL_DEVICE)

    def sample(
        self, *, block: int = 1024, rows: slice = slice(None), out_top: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        logits = self.logits[rows]
        num_rows, vocab_size = logits.shape
        tokens = torch.full((num_rows,), -7, dtype=torch.int32, device=KERNEL_DEVICE)
        logprobs = torch.full((num_rows,), torch.nan, device=KERNEL_DEVICE)
        scratch = SamplingScratch(num_rows + 2, vocab_size, KERNEL_DEVICE, block=block)
        noise = (self.temperatures[rows], self.rng_keys[rows], self.positions[rows])
        sample_rows_triton(logits, *noise, tokens, logprobs, scratch, out_top)
        return tokens.long(), logprobs

    def expected(self) -> Tensor:
        return sample_rows_reference(self.logits, self.temperatures, self.rng_keys, self.positions.long())

    def expected_logprobs(self, tokens: Tensor) -> Tensor:
        """`row_logprobs`, summed in float64."""
        scaled = self.logits.float() / torch.where(self.temperatures > 0, self.temperatures, 1.0)[:, None]
        return scaled.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)


def random_logits(num_rows: int, vocab_size: int, kind: str = "random", seed: int = 0) -> Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    if kind == "tied":
        logits = logits.round()
    elif kind == "equal":
        logits = torch.zeros_like(logits)
    elif kind == "excluded":
        excluded = torch.rand(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed + 1)) < 0.9
        excluded[:, : vocab_size // 3] = True  # whole blocks of nothing
        excluded[:, vocab_size // 2] = False
        logits = logits.masked_fill(excluded, -torch.inf)
    return logits


@settings(deadline=None)
@given(
    vocab_size=st.sampled_from([1, 7, 320, 1500]) | st.integers(1, 700),
    kind=st.sampled_from(["random", "tied", "equal", "excluded"]),
    spread=st.sampled_from([1e-3, 0.1, 1.0, 5.0, 60.0, 1e6]),
    temperatures=st.lists(st.sampled_from([0.0, 1e-3, 0.3, 1.0, 2.0, 50.0]), min_size=3, max_size=3),
    block=st.sampled_from([4, 16, 128, 1024]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
)
def test_tokens_and_logprobs_are_those_of_the_definition(
    vocab_size: int, kind: str, spread: float, temperatures: list[float], block: int, dtype: torch.dtype, seed: int
) -> None:
    if KERNEL_DEVICE == "cpu":  # each block takes the interpreter long
        block = max(block, 1 << (vocab_size // 6).bit_length())
    rows = Rows((spread * random_logits(3, vocab_size, kind, seed)).to(dtype), torch.tensor(temperatures), seed)
    tokens, logprobs = rows.sample(block=block)
    expected = rows.expected()
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(logprobs.double(), rows.expected_logprobs(expected), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize(("vocab_size", "block"), [(300, 64), (300, 512), (1, 16), (5, 4)])
def test_the_most_likely_tokens_are_the_best_of_each_blocks_two(vocab_size: int, block: int) -> None:
    rows, num_rows = Rows(random_logits(3, vocab_size), torch.tensor([0.0, 0.7, 1.0])), 3
    tokens, logprobs = (torch.full((num_rows, 4), -7, dtype=dtype) for dtype in (torch.int32, torch.float32))
    out = tokens.to(KERNEL_DEVICE), logprobs.to(KERNEL_DEVICE)
    sampled, _ = rows.sample(block=block, out_top=out)
    assert sampled.tolist() == rows.expected().tolist()
    temperatures = torch.where(rows.temperatures > 0, rows.temperatures, 1.0)[:, None]
    expected = (rows.logits / temperatures).log_softmax(-1).cpu()
    for row in range(num_rows):
        of_blocks = [part.topk(min(2, len(part))) for part in torch.split(expected[row], block)]
        best = torch.cat([top.values for top in of_blocks]).sort(descending=True).values[:4]
        torch.testing.assert_close(out[1][row, : len(best)].cpu(), best, atol=2e-6, rtol=1e-6)
        assert out[1][row, len(best) :].isneginf().all()
        torch.testing.assert_close(expected[row][out[0][row, : len(best)].long().cpu()], best, atol=2e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")  # NumPy, of the interpreter
def test_a_row_that_is_not_finite_has_a_logprob_that_is_not() -> None:
    logits = random_logits(4, 300)
    logits[1, 250], logits[2, 250], logits[3] = torch.nan, torch.inf, -torch.inf
    tokens, logprobs = Rows(logits, 1.0).sample(block=128)
    assert logprobs.isfinite().tolist() == [True, False, False, False]
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 300


def test_bits_of_a_row_depend_on_no_other_row_and_not_on_where_it_lies() -> None:
    wide = random_logits(3, 800).bfloat16().to(KERNEL_DEVICE)
    part, whole = Rows(wide[:, :700], 1.3), Rows(wide[:, :700].contiguous(), 1.3)
    part.logits = wide[:, :700]
    assert part.logits.stride(0) == 800
    found = torch.stack(whole.sample(block=256))
    assert torch.equal(torch.stack(part.sample(block=256)), found)
    for row in range(3):
        assert torch.equal(torch.stack(whole.sample(block=256, rows=slice(row, row + 1)))[:, 0], found[:, row])


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy, of the interpreter
@pytest.mark.parametrize(
    ("num_listed", "block", "kind", "dtype"),
    [
        *((1, 16, "random", torch.float32), (7, 64, "tied", torch.bfloat16)),
        *((300, 64, "tied", torch.bfloat16), (300, 64, "random", torch.float32), (300, 512, "random", torch.float32)),
    ],
)
def test_guesses_of_a_draft_head_are_those_of_the_cpu(
    num_listed: int, block: int, kind: str, dtype: torch.dtype
) -> None:
    temperatures = torch.tensor([0.0, 0.3, 1.0, 2.0, 1.0, 0.0, 1.0])
    logits = 2 * random_logits(7, num_listed, kind).to(dtype)
    for row, broken in ((4, torch.nan), (5, -torch.inf), (6, torch.inf)):
        logits[row, -1] = broken
    rows = Rows(logits, temperatures)
    listed = torch.arange(num_listed, device=KERNEL_DEVICE) * 3 + 1
    expected, expected_margins = np.empty((7, 2), np.int32), np.empty(7, np.float32)
    keys, positions = rows.rng_keys.cpu().numpy().view(np.uint64), rows.positions.cpu().numpy().astype(np.int64)
    noise = (temperatures.numpy(), keys, positions)
    _take_best(logits.float().numpy(), *noise, listed.cpu().numpy(), expected, expected_margins)
    found = torch.full((2, 7), -7, dtype=torch.int32, device=KERNEL_DEVICE)
    margins = torch.zeros(7, device=KERNEL_DEVICE)
    device_noise = (rows.temperatures, rows.rng_keys, rows.positions)
    rank_listed_triton(rows.logits, *device_noise, listed, (found[0], found[1], margins), block=block)
    refused = (expected[:, 0] == REFUSED).tolist()
    assert refused == margins.isnan().tolist() == [False] * 4 + [True] * 3
    assert found[:, :4].T.tolist() == expected[:4].tolist()
    assert set(found[0].tolist()) <= set(listed.tolist()), "the next depth looks them up"
    np.testing.assert_allclose(margins[:4].cpu(), expected_margins[:4], atol=1e-4)


@jit
def _write_rough_gumbel(bits: tl.tensor, out: tl.tensor, LENGTH: tl.constexpr) -> None:
    lanes = tl.arange(0, LENGTH)
    tl.store(out + lanes, rough_gumbel(tl.load(bits + lanes).to(tl.uint64)))


def test_rough_noise_is_far_nearer_to_the_exact_than_the_margin() -> None:
    random = np.random.default_rng(0)
    any_bits = random.integers(0, 2**64, 4096 - 4 * 64, dtype=np.uint64)
    shifts = np.arange(64, dtype=np.uint64)
    small = random.integers(2**63, 2**64, 64, dtype=np.uint64) >> shifts  # u near 0, down to no bit at all
    middle = np.uint64(2**63)
    all_bits = np.concatenate([any_bits, small, ~small, middle + (small >> np.uint64(1)), middle - small // 2])
    bits = torch.from_numpy(all_bits.view(np.int64)).to(KERNEL_DEVICE)
    rough = torch.empty(4096, device=KERNEL_DEVICE)
    _write_rough_gumbel[(1,)](bits, rough, LENGTH=4096)
    exact = -torch.log(-torch.log(to_uniform(bits)))
    assert float((rough.double() - exact).abs().max()) < 0.05 * MARGIN.value


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.01, 3.0, 30.0])
def test_tokens_of_the_definition_at_a_real_vocabulary(spread: float) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = spread * torch.randn(64, 151_936, generator=generator, device="cuda")
    rows = Rows(logits.bfloat16(), 1.0)
    rows.temperatures[::4] = 0.0
    rows.temperatures[1::4] = 0.6
    tokens, logprobs = rows.sample()
    expected = rows.expected()
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(logprobs.double(), rows.expected_logprobs(expected), atol=2e-6, rtol=1e-6)
    for part in (slice(0, 1), slice(7, 24), slice(40, 48)):
        assert torch.equal(torch.stack(rows.sample(rows=part)), torch.stack((tokens, logprobs))[:, part])
