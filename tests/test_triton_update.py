"""The kernels of the update against plain PyTorch: values, gradients, and what may be done twice."""

from functools import partial

import pytest
import torch
from kernel_cases import KERNEL_DEVICE
from plain_kernels import token_logprobs_reference
from torch import Tensor
from torch.nn import functional

from srtrl.cuda import update
from srtrl.cuda.update import FusedSoftmax, fused_gated, fused_rotate
from srtrl.model.logprobs import PLAIN_SOFTMAX, Slopes, token_logprobs
from srtrl.model.transformer import LLAMA, RopeConfig, RotaryTable, Style, gated, rotate

FUSED = FusedSoftmax()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several for each row, of which the last one is not full."""
    monkeypatch.setattr(update, "_READ_AT_ONCE", 16)
    monkeypatch.setattr(update, "_WRITTEN_AT_ONCE", 32)
    monkeypatch.setattr(update, "_GATES_AT_ONCE", 32)


def softmax_inputs(num_tokens: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and targets; distributions of all kinds, from nearly uniform to nearly certain."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(num_tokens, 8, generator=generator) * torch.logspace(-1, 1, num_tokens)[:, None]
    weight = torch.randn(vocab_size, 8, generator=generator)
    targets = torch.randint(vocab_size, (num_tokens,), generator=generator)
    targets[-1] = (weight @ hidden[-1]).argmax()
    targets = torch.stack([targets, torch.zeros_like(targets)], dim=1)[:, 0]  # not contiguous
    hidden, weight = (one.to(KERNEL_DEVICE, dtype).requires_grad_() for one in (hidden, weight))
    return hidden, weight, targets.to(KERNEL_DEVICE)


def combined(outputs: tuple[Tensor, Tensor], kinds: str) -> Tensor:
    """A sum of the chosen outputs, with factors of both signs."""
    total = torch.zeros((), device=KERNEL_DEVICE, dtype=outputs[0].dtype)
    for kind, output in zip(("logprobs", "entropy"), outputs, strict=True):
        if kind in kinds:
            total = total + (output * torch.linspace(-1.5, 1, len(output), device=KERNEL_DEVICE)).sum()
    return total


@pytest.mark.parametrize("kinds", ["logprobs", "entropy", "logprobs and entropy"])
@pytest.mark.parametrize(
    ("num_tokens", "vocab_size", "temperature"), [(7, 1, 1.0), (7, 53, 0.6), (5, 64, 1.0), (9, 300, 1.3)]
)
@DTYPES
def test_log_probs_and_gradients_are_those_of_plain_pytorch(
    dtype: torch.dtype, num_tokens: int, vocab_size: int, temperature: float, kinds: str
) -> None:
    """In float32 those of float64; in bfloat16 those of the same logits but for elements that round the other way.

    Log-probs here go down to -130: by their rounding in float32, 8e-6, the probabilities of the backward pass are off.
    """
    hidden, weight, targets = softmax_inputs(num_tokens, vocab_size, dtype)
    found = token_logprobs(hidden, weight, targets, temperature=temperature, chunk_size=4, softmax=FUSED)
    exact = (hidden, weight) if dtype == torch.bfloat16 else (hidden.double(), weight.double())
    reference = token_logprobs_reference(*exact, targets, temperature=temperature)
    torch.testing.assert_close(found, reference, rtol=1e-6, atol=1e-5, check_dtype=False)
    gradients, expected = (torch.autograd.grad(combined(one, kinds), (hidden, weight)) for one in (found, reference))
    tolerance = 3e-5 if dtype == torch.float32 else 2**-7
    for gradient, right in zip(gradients, expected, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, right, rtol=tolerance, atol=tolerance * (float(right.abs().max()) + 1e-3))


def test_a_nearly_certain_token_has_its_small_gradient() -> None:
    """1 - p of the target is the gradient of its logit, 2e-6 here: less than the rounding of a log-sum-exp of 40."""
    hidden = torch.tensor([[40.0, 0.0]], device=KERNEL_DEVICE)
    weight = torch.tensor([[1.0, 0.0]] + [[0.628, 0.0]] * 5, device=KERNEL_DEVICE, requires_grad=True)
    targets = torch.zeros(1, dtype=torch.int64, device=KERNEL_DEVICE)
    run = partial(token_logprobs, hidden, weight, targets, temperature=1.0, has_entropy=False)
    gradients = [torch.autograd.grad(run(softmax=one)[0].sum(), weight)[0] for one in (FUSED, PLAIN_SOFTMAX)]
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0)
    assert 0 < float(gradients[0][0, 0]) < 1e-4


@DTYPES
def test_a_backward_pass_may_run_twice_and_changes_nothing_that_is_kept(dtype: torch.dtype) -> None:
    """The logits that its gradient overwrites are its own."""
    hidden, weight, targets = softmax_inputs(6, 70, dtype)
    before = hidden.detach().clone(), weight.detach().clone()
    total = combined(token_logprobs(hidden, weight, targets, temperature=0.7, softmax=FUSED), "logprobs and entropy")
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(total, (hidden, weight))
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, (hidden, weight), before))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, (hidden, weight))


def test_entropies_are_computed_where_they_are_wanted() -> None:
    hidden, weight, targets = softmax_inputs(6, 70, torch.float32)
    run = partial(token_logprobs, hidden, weight, targets, temperature=0.7, softmax=FUSED)
    logprobs, entropy = run()
    assert entropy.shape == (6,)
    with torch.no_grad():
        alone, none = run(has_entropy=False)
    assert torch.equal(alone, logprobs)
    assert none.shape == (0,)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_excluded_tokens_and_rows_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of -inf have no probability and no gradient; NaN, inf and a row without a token are seen in log-probs."""
    logits = torch.arange(60.0).remainder(3).repeat(4, 1)
    for row, value in zip(logits, (-torch.inf, torch.nan, torch.inf), strict=False):
        row[:20] = value
    logits[3] = -torch.inf
    logits = logits.to(KERNEL_DEVICE)
    monkeypatch.setattr(functional, "linear", lambda *_: logits.clone())
    targets = torch.full((4,), 59, device=KERNEL_DEVICE)
    logprobs, entropy = FUSED.forward(logits, logits, targets, 1.0, has_entropy=True)
    assert entropy is not None
    kept = torch.log_softmax(logits[0, 20:], dim=0)
    torch.testing.assert_close(logprobs[0], kept[-1])
    torch.testing.assert_close(entropy[0], -(kept.exp() * kept).sum())
    assert logprobs.isfinite().tolist() == entropy.isfinite().tolist() == [True, False, False, False]
    ones = torch.ones_like(logprobs)
    gradient = FUSED.gradient(logits, logits, targets, 1.0, Slopes(logprobs, ones, -ones - entropy, ones))
    assert not gradient[0, :20].any()
    torch.testing.assert_close(gradient[0].sum(), gradient.new_zeros(()), rtol=0, atol=1e-5)
    assert gradient[0, 20:].all()
    assert not gradient[1:].isfinite().all()


@pytest.mark.filterwarnings("ignore:overflow")
@DTYPES
@pytest.mark.parametrize("style", [LLAMA, Style(activation="gelu_tanh")], ids=lambda style: style.activation)
@pytest.mark.parametrize("width", [1, 32, 77])
def test_the_gated_activation_and_its_gradient_round_as_plain_pytorch(
    width: int, style: Style, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(3)
    gate_up = (4 * torch.randn(9, 2 * width, generator=generator)).to(KERNEL_DEVICE, dtype)
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = 200, -200, 0
    slopes = torch.randn(width, 9, generator=generator).to(KERNEL_DEVICE, dtype).T  # not contiguous
    before = gate_up.clone()
    gate_up.requires_grad_()
    outputs = [compute(gate_up, style) for compute in (fused_gated, gated)]
    gradients = [torch.autograd.grad(one, gate_up, slopes, retain_graph=True)[0] for one in outputs]
    assert torch.equal(torch.autograd.grad(outputs[0], gate_up, slopes)[0], gradients[0]), "a second time"
    assert torch.equal(gate_up, before)
    # 1 - sigmoid, and torch's 1 + tanh, cancel: a few units in the last place of float32, of numbers up to 20.
    rtol = 1e-6 if dtype == torch.float32 else 2**-7
    for found, expected in (outputs, gradients):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=rtol, atol=2e-5)
        if dtype == torch.bfloat16 and style == LLAMA:
            assert float((found == expected).float().mean()) > 0.98


@DTYPES
@pytest.mark.parametrize("num_heads", [2, 18])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (20, 20), (20, 8)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_rotation_and_its_gradient_have_the_bits_of_plain_pytorch(
    interleaved: bool, head_dim: int, rotary_dim: int, num_heads: int, dtype: torch.dtype
) -> None:
    """The heads are a part of wider rows, in the update those of the fused projection; the table is scaled."""
    style = Style(interleaved=interleaved, attention_scale=0.7)
    rope = RopeConfig(tuple(torch.linspace(1, 0.01, rotary_dim // 2).tolist()), factor=1.1)
    positions = torch.tensor([0, 3, 200, 77, 5], device=KERNEL_DEVICE)
    rotations = RotaryTable(rope, head_dim, style).rows(positions, 201, dtype)
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(5, num_heads + 2, head_dim, generator=generator).to(KERNEL_DEVICE, dtype).requires_grad_()
    slopes = torch.randn(num_heads, 5, head_dim, generator=generator).to(KERNEL_DEVICE, dtype).transpose(0, 1)
    outputs = [compute(wide[:, :num_heads], *rotations, rotary_dim, style) for compute in (fused_rotate, rotate)]
    gradients = [torch.autograd.grad(one, wide, slopes, retain_graph=True)[0] for one in outputs]
    for found, expected in (outputs, gradients):
        assert found.dtype == dtype
        assert torch.equal(found, expected)
