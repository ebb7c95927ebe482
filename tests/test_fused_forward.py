"""The fused forward pass against `Transformer.forward`, both over one paged cache and one step with draft trees."""

from pathlib import Path

import pytest
import torch
from attention_cases import TreeStep, make_cache, make_step
from kernel_cases import KERNEL_DEVICE
from model_cases import CASES, ModelCase, load_ours, make_hf_model
from torch import Tensor

from srtrl.model.hf_config import config_from_hf
from srtrl.model.paged_attention import KVCache, ReferencePlan
from srtrl.model.transformer import Transformer
from srtrl.model.tree_attention import AttentionScratch
from srtrl.model.triton_layers import fused_forward
from srtrl.model.weights import init_model

NUM_POSITIONS = 40


def step_of() -> TreeStep:
    """Three sequences, two of them with trees, a prompt chunk and padding."""
    return make_step(0, contexts=[10, 7, 4], sizes=[4, 0, 1], chunks=[(0, 5)], rows_per_tile=2, padding=3)


def cache_for(model: Transformer, step: TreeStep) -> KVCache:
    config = model.config
    return make_cache(
        step.num_pages, 4, config.num_key_value_heads, config.head_dim, model.dtype, num_layers=len(model.layers)
    )


def run(model: Transformer, cache: KVCache, step: TreeStep) -> Tensor:
    """Hidden states of the real rows."""
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    out = torch.zeros(len(step.rows.positions), config.hidden_size, dtype=model.dtype, device=KERNEL_DEVICE)
    fused_forward(
        model,
        cache,
        step.rows,
        rotary=model.rotary.build(NUM_POSITIONS, model.dtype, model.device),
        block_m=max(16, 1 << (2 * group - 1).bit_length()),
        num_splits=1,
        scratch=AttentionScratch(num_lanes=0, head_dim=config.head_dim, device=KERNEL_DEVICE),
        out=out,
    )
    assert out.isfinite().all(), "padding rows must not spoil anything"
    return out[: step.num_real]


@torch.inference_mode()
def expected_of(model: Transformer, cache: KVCache, step: TreeStep) -> Tensor:
    hidden: Tensor = model(step.rows.token_ids.long(), ReferencePlan(cache, step.rows))
    return hidden[: step.num_real]


# Llama with biases everywhere, Qwen2 (biases of the projection), Qwen3 (norms of queries and keys).
@pytest.mark.parametrize("case", [CASES[2], CASES[8], CASES[13]], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_states_are_those_of_the_eager_model(case: ModelCase, dtype: torch.dtype, tmp_path: Path) -> None:
    shallow = ModelCase(case.name, case.family, case.fields | {"num_hidden_layers": 2})
    model = load_ours(make_hf_model(shallow, torch.float32), tmp_path, dtype).to(KERNEL_DEVICE)
    step = step_of()
    cache, eager_cache = cache_for(model, step), cache_for(model, step)
    hidden, expected = run(model, cache, step), expected_of(model, eager_cache, step)
    assert float(expected.float().std()) > 0.1
    # Sums of the norms differ in their order, and the kernel rounds the weights of the attention to bfloat16; a number
    # that rounds the other way is carried through layers.
    tolerance = 2e-5 if dtype == torch.float32 else 0.12
    torch.testing.assert_close(hidden, expected, rtol=0, atol=tolerance)
    if dtype == torch.bfloat16:
        assert float((hidden - expected).float().pow(2).mean().sqrt()) < 0.02
    torch.testing.assert_close(cache.key_pages, eager_cache.key_pages, rtol=0, atol=tolerance)
    torch.testing.assert_close(cache.value_pages, eager_cache.value_pages, rtol=0, atol=tolerance)


@pytest.mark.gpu
def test_hidden_states_are_those_of_the_eager_model_at_real_widths() -> None:
    """Three layers of Qwen2.5-1.5B."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128}
    sizes = {"vocab_size": 1024, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 3}
    model = init_model(config_from_hf(CASES[8].fields | heads | sizes), 0, torch.bfloat16, "cpu").to("cuda")
    step = step_of()
    hidden, expected = run(model, cache_for(model, step), step), expected_of(model, cache_for(model, step), step)
    error = (hidden - expected).float()
    assert float(error.pow(2).mean().sqrt()) < 0.02 * float(expected.float().std())
