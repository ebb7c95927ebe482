"""The fused forward pass on a CUDA device: at the widths of a real model, in a captured graph, row by row."""

import pytest
import torch
from model_cases import CASES
from test_fused_forward import MAX_POSITIONS, make_plan, num_real_rows, run, tokens_for

from srtrl.model.device_plan import DevicePlan
from srtrl.model.fused_forward import fused_forward, linear, rotary_table
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Transformer
from srtrl.model.weights import init_model

pytestmark = pytest.mark.gpu

WIDE = {  # the layers of Qwen2.5-1.5B, three of them
    "model_type": "qwen2",
    "vocab_size": 1024,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def wide_model() -> Transformer:
    return init_model(config_from_hf(CASES[8].fields | WIDE), 0, torch.bfloat16, "cpu").to("cuda")


def with_kernels(plan: DevicePlan) -> DevicePlan:
    plan.use_kernels = True
    return plan


def test_hidden_states_are_those_of_the_eager_model_at_real_widths() -> None:
    model = wide_model()
    hidden = run(model, with_kernels(make_plan(model, False, 16)))
    with torch.inference_mode():
        expected = model(tokens_for(model, 16), make_plan(model, False, 16))[: num_real_rows()]
    error = (hidden - expected).float()
    assert float(error.pow(2).mean().sqrt()) < 0.02 * float(expected.float().std())


def test_bits_of_a_row_do_not_depend_on_how_many_there_are() -> None:
    model = wide_model()
    few, many = (run(model, with_kernels(make_plan(model, True, count, rows_at_once=64))) for count in (64, 256))
    assert torch.equal(few, many)


def test_a_product_in_chunks_does_not_depend_on_the_row_of_the_chunk() -> None:
    weight = torch.randn(4096, 1536, device="cuda").bfloat16()
    hidden = torch.randn(256, 1536, device="cuda").bfloat16()
    whole = linear(hidden, weight, None, 64)
    shifted = linear(hidden.roll(37, dims=0), weight, None, 64)
    assert torch.equal(whole.roll(37, dims=0), shifted)


def test_a_captured_graph_gives_the_bits_of_the_eager_call() -> None:
    model = wide_model()
    tokens, rotary = tokens_for(model, 16).int(), rotary_table(model, MAX_POSITIONS)
    plan = with_kernels(make_plan(model, False, 16))
    expected = fused_forward(model, tokens, plan, rotary=rotary).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = fused_forward(model, tokens, plan, rotary=rotary)
    graph.replay()
    assert torch.equal(hidden[: num_real_rows()], expected[: num_real_rows()])
    kept = tokens.clone()
    tokens.copy_((tokens + 1) % model.config.vocab_size)
    graph.replay()
    assert not torch.equal(hidden[: num_real_rows()], expected[: num_real_rows()])
    tokens.copy_(kept)
    graph.replay()
    assert torch.equal(hidden[: num_real_rows()], expected[: num_real_rows()])
