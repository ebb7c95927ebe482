"""The fused forward pass and its kernels against the eager model, where each rounds.

Inputs of the norms are small whole numbers, whose squares any order sums exactly: then every bit must be equal.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_cases import TreeStep, make_cache, make_step
from family_cases import make_checkpoint
from kernel_cases import KERNEL_DEVICE
from model_cases import CASES, ModelCase, load_ours, make_hf_model
from plain_kernels import ReferencePlan
from torch import Tensor

from srtrl.cuda.layers import add_rms_norm, fused_forward, gated, move_kv, rope_and_store
from srtrl.cuda.tiles import AttentionScratch
from srtrl.model.hf_config import config_from_hf
from srtrl.model.paged_attention import KVCache
from srtrl.model.transformer import (
    LLAMA,
    RopeConfig,
    RotaryTable,
    Style,
    Transformer,
    activate,
    inverse_frequencies,
    layer_states,
    rms_norm,
    rotate,
)
from srtrl.model.weights import init_model, load_model

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
EPS = 1e-6
ULP = {torch.float32: 3e-7, torch.bfloat16: 2**-7}
"""Relative: about two units in the last place."""


def whole_numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).to(KERNEL_DEVICE, dtype)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(KERNEL_DEVICE, dtype)


def assert_same(actual: Tensor, expected: Tensor, exact: bool = True) -> None:
    """Equal bits under the interpreter; on a device its reciprocal square root may differ by a bit.

    A rotation is a difference, and a bit of what it takes away is more of a small result.
    """
    if exact and KERNEL_DEVICE == "cpu":
        assert torch.equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, rtol=ULP[actual.dtype], atol=1e-7)


@DTYPES
@pytest.mark.parametrize(("is_whole", "width"), [(True, 1), (True, 100), (False, 5)])
def test_norm_of_the_sum_rounds_as_the_eager_model(is_whole: bool, width: int, dtype: torch.dtype) -> None:
    make = whole_numbers if is_whole else normal
    hidden, update = (make(4, width, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = normal(width, dtype=dtype, seed=2)
    expected_hidden = hidden + update
    normed = add_rms_norm(hidden, update, weight, EPS)
    assert torch.equal(hidden, expected_hidden)
    assert_same(normed, rms_norm(expected_hidden, weight, EPS), exact=is_whole)
    out = torch.empty_like(hidden)
    assert add_rms_norm(hidden, None, weight, EPS, out=out) is out
    assert_same(out, normed)
    assert torch.equal(hidden, expected_hidden)


@DTYPES
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "qk_norm"),
    [
        (6, 3, 10, "head"),
        (6, 3, 10, "rotated"),
        (6, 3, 10, ""),
        (1, 1, 2, "head"),
        (4, 2, 64, "rotated"),
        (4, 2, 64, ""),
    ],
)
def test_rotation_and_store_round_as_the_eager_model(
    num_heads: int, num_kv_heads: int, head_dim: int, qk_norm: str, dtype: torch.dtype
) -> None:
    make = whole_numbers if qk_norm else normal
    qkv = make(4, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    positions = torch.tensor([0, 19, 7, 0], dtype=torch.int32, device=KERNEL_DEVICE)
    indices = torch.tensor([5, 0, 11, -1], dtype=torch.int32, device=KERNEL_DEVICE)
    weights = (normal(head_dim, dtype=dtype, seed=3), normal(head_dim, dtype=dtype, seed=4)) if qk_norm else None
    rope = RopeConfig(tuple(inverse_frequencies(100.0, head_dim).tolist()))
    table = RotaryTable(rope, head_dim, LLAMA).build(20, dtype, torch.device(KERNEL_DEVICE))
    keys, values = (normal(3, 4, num_kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (5, 6))

    q, k, v = qkv.view(4, -1, head_dim).split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cosines, sines = table[positions].unsqueeze(1).chunk(2, dim=-1)

    def turned(heads: torch.Tensor, index: int) -> torch.Tensor:
        normed = rms_norm(heads, weights[index], EPS) if weights and qk_norm == "head" else heads
        rotated = rotate(normed, cosines, sines, head_dim)
        return rms_norm(rotated, weights[index], EPS) if weights and qk_norm == "rotated" else rotated

    expected_keys, expected_values = keys.clone(), values.clone()
    expected_keys.flatten(0, 1)[indices[:3].long()] = turned(k, 1)[:3]
    expected_values.flatten(0, 1)[indices[:3].long()] = v[:3]

    style = LLAMA._replace(qk_norm="rotated") if qk_norm == "rotated" else LLAMA
    found = rope_and_store(qkv, table, positions, indices, keys, values, weights, EPS, head_dim, style)
    is_exact = qk_norm != "rotated"  # sums of squares of numbers that are not whole
    assert_same(found, turned(q, 0), is_exact)
    assert_same(keys, expected_keys, is_exact)
    assert torch.equal(values, expected_values)


@DTYPES
@pytest.mark.parametrize("style", [LLAMA, Style(activation="gelu_tanh")], ids=lambda style: style.activation)
def test_gated_activation_rounds_as_the_eager_model(style: Style, dtype: torch.dtype) -> None:
    gate_up = 8 * normal(3, 2 * 1500, dtype=dtype)
    gate_up[0, 0], gate_up[1, 0] = 80, -80
    gate, up = gate_up.chunk(2, dim=-1)
    found, expected = gated(gate_up, style), activate(gate, style.activation) * up
    # The exponentials of both are good to a few units in the last place of float32; Triton's on a device, an
    # approximation of 2**x, to one of its argument, some 20 here.
    atol = 1e-30 if style == LLAMA else 1e-5  # torch's 1 + tanh cancels for large negative gates
    rtol = 2e-6 if KERNEL_DEVICE == "cuda" and dtype == torch.float32 else 2 * ULP[dtype]
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    if dtype == torch.bfloat16:
        assert float((found == expected)[gate > -1].float().mean()) > 0.99


def test_moves_go_path_by_path_in_their_order() -> None:
    """More paths than are moved at a time, of up to four moves, each onto the place that the move before has left."""
    num_layers, page_size, shape = 2, 4, (2, 6)
    random = np.random.default_rng(0)
    lengths = random.integers(0, 5, 80)
    cache = make_cache(5 * len(lengths), page_size, *shape, torch.float32, num_layers=num_layers)
    moves, expected = [], [cache.key_pages.clone(), cache.value_pages.clone()]
    for path, length in enumerate(lengths.tolist()):
        nodes = np.sort(random.choice(np.arange(1, 20), length, replace=False))
        for level, node in enumerate(nodes.tolist()):
            moves.append([20 * path + node, 20 * path + level, 0 if level else length])
            (page, offset), (to_page, to_offset) = divmod(20 * path + node, page_size), divmod(moves[-1][1], page_size)
            expected[0][:, to_page, :, :, to_offset] = cache.key_pages[:, page, :, :, offset]
            expected[1][:, to_page, :, to_offset] = cache.value_pages[:, page, :, offset]
    assert len(moves) > 2 * 32
    room = torch.full((len(moves) + 3, 3), 10**6, dtype=torch.int32, device=KERNEL_DEVICE)  # what is not read
    room[: len(moves)] = torch.tensor(moves, dtype=torch.int32)
    move_kv(cache, torch.tensor([len(moves)], dtype=torch.int32, device=KERNEL_DEVICE), room)
    assert torch.equal(cache.key_pages, expected[0])
    assert torch.equal(cache.value_pages, expected[1])


def step_of() -> TreeStep:
    """Three sequences, two of them with trees, a prompt chunk and padding."""
    return make_step(0, contexts=[10, 7, 4], sizes=[4, 0, 1], chunks=[(0, 5)], rows_per_tile=2, padding=3)


def forward_both(model: Transformer, step: TreeStep) -> tuple[tuple[Tensor, KVCache], tuple[Tensor, KVCache]]:
    """Hidden states of the real rows and the cache after the step: of the fused pass, and of the eager model.

    Beside the hidden states is the residual stream after 0 layers and after all.
    """
    config = model.config
    numbers = (config.num_hidden_layers, 0, 0)
    num_kv_heads = config.num_key_value_heads
    fused_cache, eager_cache = (
        make_cache(step.num_pages, 4, num_kv_heads, config.head_dim, model.dtype, num_layers=config.num_hidden_layers)
        for _ in range(2)
    )
    out = torch.zeros(len(step.rows.positions), config.hidden_size, dtype=model.dtype, device=KERNEL_DEVICE)
    fused_forward(
        model,
        fused_cache,
        step.rows,
        rotary=[table.build(40, model.dtype, model.device) for table in model.rotary],
        block_m=max(16, 1 << (2 * config.num_attention_heads // num_kv_heads - 1).bit_length()),
        num_splits=1,
        scratch=AttentionScratch(config.head_dim, KERNEL_DEVICE),
        out=out,
        states=layer_states(numbers, copies := out.new_zeros(len(out), 3 * config.hidden_size)),
    )
    assert out.isfinite().all(), "padding rows must not spoil anything"
    with torch.inference_mode():
        plan, states = ReferencePlan(eager_cache, step.rows), torch.zeros_like(copies)
        hidden = model(step.rows.token_ids.long(), plan, layer_states(numbers, states))
    expected, hidden = torch.cat((hidden, states), dim=-1), torch.cat((out, copies), dim=-1)
    return (hidden[: step.num_real], fused_cache), (expected[: step.num_real], eager_cache)


def check_hidden_states(model: Transformer) -> None:
    """Hidden states and cache of the fused pass are the eager model's, but for rounding: a share of their deviation.

    Sums of the norms differ in their order, and the kernel rounds the weights of the attention to bfloat16; a number
    that rounds the other way is carried through layers.
    """
    (hidden, cache), (expected, eager_cache) = forward_both(model, step_of())
    assert float(expected.float().std()) > 0.1
    parts = zip(hidden.chunk(4, dim=-1), expected.chunk(4, dim=-1), strict=True)
    pairs = (*parts, (cache.key_pages, eager_cache.key_pages), (cache.value_pages, eager_cache.value_pages))
    for found, right in pairs:
        share = float((found - right).float().pow(2).mean().sqrt() / right.float().std())
        assert share < (1e-5 if model.dtype == torch.float32 else 0.04)


OF_FAMILIES = ("SmolLM3", "OLMo 2", "Granite 3", "Phi-4-mini", "GLM-4-9B-0414", "Gemma 3 1B")


# Llama with biases everywhere, Qwen2 (biases of the projection), Qwen3 (norms of queries and keys), and families.
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(CASES[2], torch.float32, id="llama"),
        pytest.param(CASES[8], torch.bfloat16, id="qwen2"),
        pytest.param(CASES[13], torch.bfloat16, id="qwen3"),
        *((name, torch.float32) for name in OF_FAMILIES),
        *(pytest.param(name, torch.bfloat16, marks=pytest.mark.slow) for name in OF_FAMILIES),
    ],
)
def test_hidden_states_are_those_of_the_eager_model(case: ModelCase | str, dtype: torch.dtype, tmp_path: Path) -> None:
    if isinstance(case, str):
        make_checkpoint(case, tmp_path, dtype)
        model = load_model(tmp_path, dtype=dtype, device=KERNEL_DEVICE)
    else:
        shallow = replace(case, fields=case.fields | {"num_hidden_layers": 2})
        model = load_ours(make_hf_model(shallow, torch.float32), tmp_path, dtype).to(KERNEL_DEVICE)
    check_hidden_states(model)


@pytest.mark.gpu
def test_hidden_states_are_those_of_the_eager_model_at_real_widths() -> None:
    """Three layers of Qwen2.5-1.5B."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "model_type": "qwen2"}
    sizes = {"vocab_size": 1024, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 3}
    model = init_model(config_from_hf(CASES[8].fields | heads | sizes), 0, torch.bfloat16, "cpu")
    check_hidden_states(model.to("cuda"))
