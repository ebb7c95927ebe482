"""The update on a CUDA device: attention, log-probs, masters, compilation and memory against their references."""

from collections.abc import Sequence

import pytest
import torch
from plain_kernels import packed_attention_reference, token_logprobs_reference
from torch import Tensor
from update_cases import make_policy as make_tiny_policy
from update_cases import make_recipe, make_sequences, update

from srtrl.cuda.update import FusedSoftmax, fuse_update
from srtrl.model.attention import PackedPlan
from srtrl.model.logprobs import MAX_CHUNK_BYTES, token_logprobs
from srtrl.trainer.optimizer import build_optimizer

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
LENGTHS = [300, 1, 17, 129, 64]


def distance(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((found.double().cpu() - expected.double().cpu()).norm() / expected.double().cpu().norm())


@pytest.mark.parametrize("shared", [[0, 0, 0, 0, 0], [0, 0, 1, 16, 63]], ids=str)
@pytest.mark.parametrize(
    ("dtype", "counts", "head_dim"),
    [(torch.bfloat16, (12, 2), 64), (torch.bfloat16, (8, 8), 128), (torch.float16, (16, 8), 128)],
    ids=str,
)
def test_packed_attention_equals_the_reference(
    dtype: torch.dtype, counts: tuple[int, int], head_dim: int, shared: list[int]
) -> None:
    """If a sequence has fewer queries than keys, the kernel aligns its causal mask at the end."""
    generator = torch.Generator().manual_seed(0)
    num_tokens, (num_heads, num_kv_heads) = sum(LENGTHS) - sum(shared), counts
    qk = torch.randn(num_tokens, num_heads + num_kv_heads, head_dim, generator=generator)
    v = torch.randn(num_tokens, num_kv_heads, head_dim, generator=generator)
    slope = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(CUDA, dtype)
    leaves = [tensor.to(CUDA, dtype).requires_grad_() for tensor in (qk, v)]
    q, k = leaves[0].split_with_sizes(counts, dim=1)
    plan = PackedPlan(LENGTHS, CUDA, shared)
    path = torch.cat(plan.paths).to(CUDA)
    found = plan.attend(0, q, k, leaves[1])
    gradients = torch.autograd.grad(found, leaves, slope)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_q, exact_k = exact_leaves[0].split_with_sizes(counts, dim=1)
    keys, values = exact_k[path], exact_leaves[1][path]
    expected = packed_attention_reference(LENGTHS, exact_q, keys, values, plan.num_added)
    exact_gradients = torch.autograd.grad(expected, exact_leaves, slope.double())
    assert found.dtype == dtype
    for mine, exact in zip((found, *gradients), (expected, *exact_gradients), strict=True):
        assert distance(mine, exact) < 0.01
    assert "_padded" not in vars(plan), "the kernel was not used"


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_step_changes_the_weights_as_on_the_cpu(dtype: torch.dtype, recomputes: bool) -> None:
    recipe = make_recipe(train__micro_batch_tokens=24, train__mini_batch_prompts=1)
    masters: list[Sequence[Tensor]] = []
    for device in ("cpu", CUDA):
        policy = make_tiny_policy(dtype=torch.float32, scale=4, hidden_size=16).to(device, dtype)  # heads of 8
        policy.gradient_checkpointing = recomputes and device == CUDA
        if device == CUDA:
            fuse_update(policy)
        optimizer = build_optimizer(policy, learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-3)
        learned = optimizer.holders(policy)
        before = [one.detach().cpu().clone() for one in learned]
        update(policy, optimizer, make_sequences(make_tiny_policy()), recipe)
        after = [one.detach().cpu() for one in learned]
        masters.append([new - old for new, old in zip(after, before, strict=True)])
        assert all(parameter.dtype == dtype for parameter in policy.parameters())
    tolerance = 1e-3 if dtype == torch.float32 else 0.2
    for cpu, cuda in zip(*masters, strict=True):
        assert distance(cuda, cpu) < tolerance


def test_the_logits_of_a_large_vocabulary_take_bounded_memory() -> None:
    num_tokens, vocab_size, width = 4096, 151_936, 64
    generator = torch.Generator(CUDA).manual_seed(0)
    hidden = torch.randn(num_tokens, width, generator=generator, device=CUDA, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocab_size, width, generator=generator, device=CUDA, dtype=torch.bfloat16)
    weight = (0.1 * weight).requires_grad_()
    targets = torch.randint(vocab_size, (num_tokens,), generator=generator, device=CUDA)
    torch.cuda.reset_peak_memory_stats(CUDA)
    before = torch.cuda.memory_allocated(CUDA)
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=0.7, softmax=FusedSoftmax())
    (logprobs.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    peak = torch.cuda.max_memory_allocated(CUDA) - before
    gradients = 2 * (hidden.numel() + weight.numel()) * 2
    assert peak < 0.7 * MAX_CHUNK_BYTES + gradients, "a chunk in bfloat16 and cuBLAS' workspace"
    expected, expected_entropy = token_logprobs_reference(
        hidden[:64].double(), weight.double(), targets[:64], temperature=0.7
    )
    assert float((logprobs[:64] - expected).abs().mean()) < 0.05
    assert float((entropy[:64] - expected_entropy).abs().mean()) < 0.05
