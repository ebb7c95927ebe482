"""The chunked log-probs against the plain reference: values, gradients, memory and types; decoder against trainer."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import Letters, decode, options, requests_for, tiny_policy
from plain_kernels import token_logprobs_reference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.engine import Engine
from srtrl.engine.runner import RowFilters
from srtrl.engine.step_inputs import StepInputs
from srtrl.model.attention import PackedPlan
from srtrl.model.logprobs import token_logprobs

R, V, D = 37, 53, 11


def make_inputs(
    num_tokens: int = R, dtype: torch.dtype = torch.float64, vocab_size: int = V, width: int = D
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab_size, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    target_ids = torch.randint(vocab_size, (num_tokens,), generator=generator)
    return hidden, weight, target_ids


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], kinds: str) -> tuple[Tensor, ...]:
    """Gradient of a fixed random combination of the chosen outputs."""
    generator = torch.Generator().manual_seed(6)
    total = torch.zeros((), dtype=outputs[0].dtype)
    for kind, output in zip(("logprobs", "entropy"), outputs, strict=True):
        factors = torch.randn(len(output), generator=generator, dtype=torch.float64).to(output.dtype)
        if kind in kinds:
            total = total + (output * factors).sum()
    return torch.autograd.grad(total, inputs)


@pytest.mark.parametrize("kinds", ["logprobs", "entropy", "logprobs and entropy"])
@pytest.mark.parametrize(
    ("num_tokens", "chunk_size", "temperature"), [(R, 8, 1.0), (R, 37, 0.6), (R, 1024, 0.6), (1, 8, 0.6), (0, 8, 1.0)]
)
def test_values_and_gradients_equal_the_reference(
    num_tokens: int, chunk_size: int, temperature: float, kinds: str
) -> None:
    hidden, weight, target_ids = make_inputs(num_tokens)
    ours = token_logprobs(hidden, weight, target_ids, temperature=temperature, chunk_size=chunk_size)
    reference = token_logprobs_reference(hidden, weight, target_ids, temperature=temperature)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
    our_gradients = gradients(ours, (hidden, weight), kinds)
    torch.testing.assert_close(our_gradients, gradients(reference, (hidden, weight), kinds), rtol=1e-12, atol=1e-12)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that the results of operators held at one time, each storage counted once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[weakref.ref[Tensor]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        values = result if isinstance(result, tuple | list) else (result,)
        self.tensors += [weakref.ref(value) for value in values if isinstance(value, Tensor)]
        live = [tensor for tensor in (reference() for reference in self.tensors) if tensor is not None]
        self.tensors = [weakref.ref(tensor) for tensor in live]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in live}
        self.peak = max(self.peak, sum(storages.values()))
        return result


@pytest.mark.parametrize("kinds", ["logprobs", "logprobs and entropy"])
def test_two_chunks_of_logits_are_the_most_that_is_held(kinds: str) -> None:
    num_tokens, chunk_size, vocab_size = 300, 32, 4096
    hidden, weight, target_ids = make_inputs(num_tokens, torch.float32, vocab_size, width=2)
    with LiveBytes() as live:
        outputs = token_logprobs(hidden, weight, target_ids, temperature=0.7, chunk_size=chunk_size)
        gradients(outputs, (hidden, weight), kinds)
    chunk, rest = 4 * chunk_size * vocab_size, 4 * (4 * weight.numel() + 4 * hidden.numel() + 20 * num_tokens)
    assert 2 * chunk <= live.peak < 2 * chunk + rest < 3 * chunk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_have_the_type_of_the_weights_and_the_rest_is_float32(dtype: torch.dtype) -> None:
    hidden, weight, target_ids = make_inputs(dtype=dtype)
    logprobs, entropy = token_logprobs(hidden, weight, target_ids, temperature=0.8)
    expected = torch.log_softmax((hidden @ weight.T).float() / 0.8, dim=-1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert torch.equal(logprobs, expected[torch.arange(R), target_ids])
    grad_hidden, grad_weight = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert grad_hidden.dtype == grad_weight.dtype == dtype
    frozen, _ = token_logprobs(hidden, weight.detach(), target_ids, temperature=0.8)
    assert torch.equal(torch.autograd.grad(frozen.sum(), hidden)[0], grad_hidden), "a frozen head changes nothing else"
    exact = token_logprobs_reference(hidden.double(), weight.double(), target_ids, temperature=0.8)[0]
    exact_gradients = torch.autograd.grad(exact.sum(), (hidden, weight))
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close((grad_hidden, grad_weight), exact_gradients, rtol=tolerance, atol=10 * tolerance)


class RecordingRunner(CpuRunner):
    """Keeps the logits of each sampled row by the noise of its sample and the place in its response."""

    seen: dict[tuple[int, int], Tensor]

    def launch(self, inputs: StepInputs, filters: RowFilters | None) -> None:
        super().launch(inputs, filters)
        assert self._last is not None
        keys = zip(inputs.rng_keys.view(np.uint64).tolist(), inputs.sample_positions.tolist(), strict=True)
        self.seen |= dict(zip(keys, self._last[0], strict=True))


def test_decoder_and_trainer_have_the_same_distributions() -> None:
    """All next tokens' log-probs, not the sampled ones' alone: samples hide a difference where few of them fall."""
    policy, temperature = tiny_policy(scale=3.0), 0.8
    runner = RecordingRunner(policy, options())
    runner.seen = {}
    engine = Engine(policy, options(draft_budget=0), tokenizer=Letters(), runner=runner)
    requests = requests_for([(1, 2, 3), (4,), tuple(range(5, 25))], num_samples=6, temperature=temperature)
    differences = []
    for completion in decode(engine, requests).values():
        prompt = list(completion.request.prompt_token_ids)
        token_ids = torch.tensor([*prompt, *completion.response.token_ids.tolist()])
        logits = policy.logits(policy(token_ids, PackedPlan([len(token_ids)], "cpu"))).detach()
        for position in range(len(prompt), len(token_ids)):
            rows = [logits[position - 1], runner.seen[completion.request.rng_key, position - len(prompt)]]
            trainer, decoder = (torch.log_softmax(row / temperature, dim=-1) for row in rows)
            differences.append(float((trainer - decoder).abs().max()))
    assert len(differences) >= 200
    assert max(differences) < 1e-5
    assert max(differences) > 0, "or the rows compared are the same"
