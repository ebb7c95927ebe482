"""Estimators of the KL, its control, filters, and the signatures of everything that a recipe can name."""

import inspect

import pytest
import torch
from torch import Tensor

from srtrl.algorithms import reductions
from srtrl.algorithms.advantages import is_token_level
from srtrl.resolve import list_parts, resolve_part

F64 = torch.float64


def test_k3_keeps_small_differences() -> None:
    """In float32 exp(x) - 1 - x of x = 1e-3 would be off by a tenth."""
    found = reductions.k3(torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-10])).item()
    assert found == pytest.approx(2**-21, rel=1e-3)


def exact_kl(logits: Tensor, other: Tensor) -> Tensor:
    logprobs, other_logprobs = logits.log_softmax(-1), other.log_softmax(-1)
    return (logprobs.exp() * (logprobs - other_logprobs)).sum()


def test_what_the_estimators_and_their_gradients_estimate() -> None:
    """Expectations over all tokens of a small vocabulary, exactly: what `reductions.py` says of bias and gradients."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, generator=generator, dtype=F64).requires_grad_()
    reference = torch.randn(7, generator=generator, dtype=F64)
    probs = logits.detach().softmax(-1)
    forward = torch.autograd.grad(exact_kl(logits, reference), logits)[0]
    backward = torch.autograd.grad(exact_kl(reference, logits), logits)[0]
    true_kl = exact_kl(logits, reference).item()
    for estimator, gradient in (
        (reductions.k1, torch.zeros(7, dtype=F64)),
        (reductions.k2, forward),
        (reductions.k3, backward),
    ):
        mean = (probs * estimator(logits.log_softmax(-1), reference.log_softmax(-1))).sum()
        torch.testing.assert_close(torch.autograd.grad(mean, logits)[0], gradient, rtol=1e-12, atol=1e-14)
        assert (mean.item() == pytest.approx(true_kl, rel=1e-12)) == (estimator is not reductions.k2)


@pytest.mark.parametrize("name", list_parts("algorithm.filters"))
def test_a_filter_sees_each_group_alone(name: str) -> None:
    """Dynamic sampling calls it on one group at a time, in the order in which grades come in."""
    generator = torch.Generator().manual_seed(0)
    correct = torch.rand(30, 3, generator=generator) < 0.5
    keep = resolve_part("algorithm.filters", name)
    together = keep(correct.double(), correct)
    alone = [keep(correct[row : row + 1].double(), correct[row : row + 1]) for row in range(30)]
    assert together.dtype == torch.bool
    assert torch.equal(torch.cat(alone), together)
    assert 0 < together.sum() < 30


@pytest.mark.parametrize(
    "option",
    ["algorithm.advantage", "algorithm.filters", "algorithm.kl.estimator", "algorithm.loss", "algorithm.reduction"],
)
def test_public_functions_of_a_kind_have_one_signature(option: str) -> None:
    """Each is a legal name in a recipe, so the trainer calls each in the same way; further arguments are optional."""
    functions = [resolve_part(option, name) for name in list_parts(option)]
    for kind in (True, False):  # advantages of whole samples and of tokens are called differently
        signatures = [
            list(inspect.signature(function).parameters.values())
            for function in functions
            if is_token_level(function) == kind
        ]
        if not signatures:
            continue
        expected = min(signatures, key=len)
        for parameters in signatures:
            assert parameters[: len(expected)] == expected
            assert all(parameter.default is not parameter.empty for parameter in parameters[len(expected) :])
