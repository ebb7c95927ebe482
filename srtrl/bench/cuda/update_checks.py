"""The update's parts and one whole training step on the device, against the CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from srtrl.bench.cuda.kernel_checks import distance
from srtrl.bench.cuda.plan import GpuBench, random_policy
from srtrl.bench.cuda.report import SectionReport
from srtrl.bench.cuda.update import accelerator_of, optimizer_for, random_sequences, update_recipe
from srtrl.model.attention import PackedPlan, packed_attention_reference
from srtrl.model.logprobs import token_logprobs, token_logprobs_reference
from srtrl.model.transformer import Transformer
from srtrl.recipe import Recipe
from srtrl.trainer.update import update_policy
from srtrl.types import TrainSequence


def check_packed_attention(bench: GpuBench, report: SectionReport) -> None:
    """`PackedPlan` in bfloat16, forward and backward."""
    config = bench.policy.config
    lengths = (1, 7, 33, 20) if bench.smoke else (1, 7, 130, 64, 500)
    generator = torch.Generator().manual_seed(3)

    def heads(count: int) -> Tensor:
        return torch.randn(sum(lengths), count, config.head_dim, generator=generator).to(torch.bfloat16)

    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    given = [heads(num_heads), heads(num_kv_heads), heads(num_kv_heads)]
    slope = heads(num_heads)
    wide = [tensor.double().requires_grad_() for tensor in given]
    expected = packed_attention_reference(lengths, *wide)
    expected_slopes = torch.autograd.grad(expected, wide, slope.double())
    on_device = [tensor.to(bench.device).requires_grad_() for tensor in given]
    found = PackedPlan.from_lengths(lengths, bench.device).attend(0, *on_device)
    slopes = torch.autograd.grad(found, on_device, slope.to(bench.device))
    report.check("packed attention, bf16, forward", distance(found, expected), 1e-2)
    errors = [distance(one, other) for one, other in zip(slopes, expected_slopes, strict=True)]
    report.check("packed attention, bf16, backward", max(errors), 2e-2)


def check_logprobs(bench: GpuBench, report: SectionReport) -> None:
    """`token_logprobs` in float32, beyond what it keeps for the backward pass."""
    config = bench.policy.config
    num_tokens = 40 if bench.smoke else 160
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(num_tokens, config.hidden_size, generator=generator)
    weight = 0.05 * torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    targets = torch.randint(config.vocab_size, (num_tokens,), generator=generator)
    wide = hidden.double().requires_grad_()
    expected, entropy = token_logprobs_reference(wide, weight.double(), targets, temperature=0.9)
    (expected_slope,) = torch.autograd.grad(expected.sum() + entropy.sum(), wide)
    on_device = hidden.to(bench.device).requires_grad_()
    found, found_entropy = token_logprobs(
        on_device, weight.to(bench.device), targets.to(bench.device), temperature=0.9, chunk_size=64
    )
    (slope,) = torch.autograd.grad(found.sum() + found_entropy.sum(), on_device)
    report.check("log-probs, fp32", float((found.detach().cpu().double() - expected.detach()).abs().max()), 1e-4)
    report.check("log-probs, fp32, gradient", distance(slope, expected_slope), 1e-4)


def check_training_step(bench: GpuBench, report: SectionReport) -> None:
    """One `update_policy` of a small policy in float32, on the CPU and on the device."""
    start = random_policy("tiny", torch.float32, torch.device("cpu"))
    sequences = random_sequences(start.config, 6, 24 if bench.smoke else 90)
    # With an epsilon this large AdamW's step is in proportion to the gradient, not to its sign, which rounding decides
    # where the gradient is zero.
    recipe = update_recipe(len(sequences) // 2, 200, learning_rate=1e-3, eps=1e-2)
    cpu, cpu_metrics = _updated(start, torch.device("cpu"), sequences, recipe)
    device, device_metrics = _updated(start, bench.device, sequences, recipe)
    for name in ("loss", "grad_norm"):
        error = abs(device_metrics[name] - cpu_metrics[name]) / max(abs(cpu_metrics[name]), 1e-3)
        report.check(f"training step, fp32, {name}", error, 1e-3)
    changes = [
        torch.cat(
            [
                (new.detach().cpu() - old).flatten()
                for new, old in zip(model.parameters(), start.parameters(), strict=True)
            ]
        )
        for model in (device, cpu)
    ]
    report.check("training step, fp32, change of the weights", distance(*changes), 1e-2)


def _updated(
    start: Transformer, device: torch.device, sequences: Sequence[TrainSequence], recipe: Recipe
) -> tuple[Transformer, dict[str, float]]:
    """A copy of `start` on the device after one update, and the update's metrics."""
    policy = Transformer(start.config, start.dtype, device)
    policy.load_state_dict(start.state_dict())
    optimizer = optimizer_for(policy, recipe)
    with accelerator_of("no", device) as accelerator:
        metrics = update_policy(policy, optimizer, accelerator, sequences, recipe=recipe, step=1, kl_coefficient=0.0)
    return policy, metrics
