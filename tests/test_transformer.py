"""The transformer and the packed plan against `transformers` and against written-out references."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import torch
from engine_cases import init_policy
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import CASES, ModelCase, hf_logits, load_ours, make_hf_model, random_sequences
from plain_kernels import packed_attention_reference
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from update_cases import random_shares

from srtrl.model.attention import Gather, PackedPlan
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import LLAMA, RotaryTable, Style, Transformer, layer_states, rms_norm, rotate
from srtrl.model.weights import init_model, named_tensors, read_config, save_model

LENGTHS = (5, 1, 41, 23, 5, 64, 1)
WIDE = Style(wide_norms=True)


class RowPlan:
    """A plan in which no token sees another: what is left of the model must be a function of each row."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self.num_positions = int(positions.max()) + 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        num_shared = q.shape[1] // k.shape[1]
        return q + k.repeat_interleave(num_shared, 1) * v.repeat_interleave(num_shared, 1) * (layer + 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_gradients_and_saved_files_are_those_of_transformers(case: ModelCase, tmp_path: Path) -> None:
    hf_model = make_hf_model(case, torch.float64)
    is_sharded = "-bias" in case.name
    model = load_ours(hf_model, tmp_path / "hf", torch.float64, 3000 if is_sharded else 10**9)
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == is_sharded
    save_model(model, tmp_path / "ours")
    loading: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    loaded, info = loading
    assert not any(info.values()), info  # no missing, unexpected or mismatched keys
    for (name, tensor), (other, same) in zip(loaded.named_parameters(), hf_model.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(tensor, same)
    assert read_config(tmp_path / "ours") == model.config

    sequences = random_sequences(case.fields["vocab_size"], LENGTHS)
    targets = torch.cat(random_sequences(case.fields["vocab_size"], LENGTHS, seed=1))
    expected = hf_logits(hf_model, sequences)
    logits = model.logits(model(torch.cat(sequences), PackedPlan(LENGTHS, "cpu")))
    assert expected.std() > 0.1  # else nearness would say little
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    for one in (expected, logits):
        torch.autograd.backward(functional.cross_entropy(one, targets))
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    gradients = named_tensors(model)
    for name, parameter in hf_model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-10, msg=name)


def test_bfloat16_is_as_near_to_float32_as_transformers(tmp_path: Path) -> None:
    case = CASES[-1]
    exact, rounded = make_hf_model(case, torch.float32), make_hf_model(case, torch.bfloat16)
    model = load_ours(rounded, tmp_path, torch.bfloat16)
    sequences = random_sequences(case.fields["vocab_size"], LENGTHS)
    with torch.no_grad():
        expected = hf_logits(exact, sequences)
        hf_error = (hf_logits(rounded, sequences) - expected).pow(2).mean().sqrt()
        logits = model.logits(model(torch.cat(sequences), PackedPlan(LENGTHS, "cpu")))
    assert logits.dtype == torch.bfloat16
    assert (logits - expected).pow(2).mean().sqrt() < 1.2 * hf_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_round_as_transformers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(50, 6, 12, generator=generator).to(dtype)
    weight = torch.randn(12, generator=generator).to(dtype)
    styles = {LlamaRMSNorm: LLAMA, Olmo2RMSNorm: WIDE, Gemma3RMSNorm: WIDE._replace(norm_offset=1.0)}
    for make_norm, style in styles.items():
        norm = make_norm(12, eps=1e-5).to(dtype)
        norm.load_state_dict({"weight": weight})
        assert torch.equal(rms_norm(heads, weight, 1e-5, style), norm(heads))


LLAMA3_FACTORS = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1000000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 8192, **LLAMA3_FACTORS},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotation_equals_transformers_at_real_sizes(rope: dict[str, float | str], dtype: torch.dtype) -> None:
    hf_config = LlamaConfig(head_dim=64, max_position_embeddings=131072, rope_parameters=rope)
    rope_config = config_from_hf(hf_config.to_dict()).layers[0].rope
    rotary = LlamaRotaryEmbedding(hf_config)
    assert rope_config.frequencies == tuple(rotary.inv_freq.tolist())
    table = RotaryTable(rope_config, 64, LLAMA)
    for positions in (torch.arange(40), torch.arange(9000), torch.arange(300, 500)):  # grows once, then is reused
        heads = torch.randn(len(positions), 2, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        cosines, sines = table.rows(positions, int(positions[-1]) + 1, dtype)
        hf_cosines, hf_sines = rotary(heads, positions[None])
        expected, _ = apply_rotary_pos_emb(heads, heads, hf_cosines[0], hf_sines[0])
        assert torch.equal(rotate(heads, cosines, sines, 64), expected)


def _small_model(dtype: torch.dtype = torch.float32, activation: Literal["silu", "gelu_tanh"] = "silu") -> Transformer:
    fields = CASES[3].fields | {"intermediate_size": 61, "num_hidden_layers": 2, "model_type": "llama"}
    config = replace(config_from_hf(fields), style=LLAMA._replace(activation=activation))
    model = init_model(config, 0, dtype, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():  # the start is too tame: norms of one, no biases, small weights
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.2, generator=torch.Generator().manual_seed(1)))
    return model


def test_gradient_checkpointing_changes_no_gradient_and_decoding_first_spoils_no_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _small_model()
    token_ids = torch.cat(random_sequences(97, LENGTHS))
    with torch.inference_mode():
        decoded = model(token_ids, PackedPlan(LENGTHS, "cpu"))
    attend = Mock(side_effect=PackedPlan(LENGTHS, "cpu").attend)
    monkeypatch.setattr(PackedPlan, "attend", attend)
    gradients = []
    modes: dict[bool | Literal["half"], list[int]] = {False: [0, 1], True: [0, 1, 1, 0], "half": [0, 1, 0]}
    for recompute, layers in modes.items():
        model.gradient_checkpointing = recompute
        model.zero_grad()
        attend.reset_mock()
        hidden = model(token_ids, PackedPlan(LENGTHS, "cpu"))
        torch.autograd.backward(hidden.pow(2).sum())
        torch.testing.assert_close(hidden.detach(), decoded.clone())
        assert [call.args[0] for call in attend.call_args_list] == layers
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    for kept, *others in zip(*gradients, strict=True):
        assert all(torch.equal(kept, again) for again in others)


def test_states_of_layers_are_those_of_shorter_models_and_change_nothing() -> None:
    policy = init_policy(num_hidden_layers=3)
    tokens, plan = torch.arange(7), PackedPlan([3, 4], "cpu")
    with torch.no_grad():
        states = torch.empty(7, 4 * policy.config.hidden_size)
        hidden = policy(tokens, plan, layer_states((2, 0, 3, 2), states))
    assert torch.equal(hidden, policy(tokens, plan))
    after_2, embedded, last, again = states.chunk(4, dim=-1)
    assert torch.equal(again, after_2)
    assert torch.equal(embedded, policy.embed(tokens))
    del policy.layers[2]
    for state, expected in ((after_2, policy(tokens, plan)), (last, hidden)):
        assert torch.equal(rms_norm(state, policy.final_norm, 1e-6), expected)


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_bits_of_a_row_do_not_depend_on_the_batch(
    activation: Literal["silu", "gelu_tanh"], dtype: torch.dtype, threads: int
) -> None:
    model = _small_model(dtype, activation)  # odd widths
    token_ids = torch.cat(random_sequences(97, [2048]))
    positions = torch.arange(2048) % 200
    with torch.inference_mode():
        whole = model(token_ids, RowPlan(positions))
        for start, size in ((0, 16), (16, 48), (112, 1024), (528, 112)):
            part = slice(start, start + size)
            assert torch.equal(model(token_ids[part], RowPlan(positions[part])), whole[part])


@settings(deadline=None)  # the machine may be busy
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    window=st.none() | st.integers(1, 45),
    heads=st.sampled_from([(1, 1, 2), (2, 1, 5), (3, 3, 8), (6, 2, 8), (9, 3, 5)]),
    seed=st.integers(0, 99),
    shares=st.booleans(),
)
def test_packed_attention_equals_the_reference(
    lengths: list[int], heads: tuple[int, int, int], window: int | None, seed: int, shares: bool
) -> None:
    """Sequences are whole, or begin as the one before does."""
    num_heads, num_kv_heads, head_dim = heads
    counts = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    generator = torch.Generator().manual_seed(seed)
    shared = random_shares(lengths, seed) if shares else [0] * len(lengths)
    plan = PackedPlan(lengths, "cpu", shared)
    num_rows, path = sum(lengths) - sum(shared), torch.cat(plan.paths)
    states = torch.randn(num_rows, sum(counts), head_dim, dtype=torch.float64, generator=generator)
    q, k, v, slope = (part.requires_grad_() for part in states.split_with_sizes(counts, dim=1))
    out = plan.attend(0, q, k, v, window)
    expected = packed_attention_reference(lengths, q, k[path], v[path], plan.num_added, window)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(out, (q, k, v), slope)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (q, k, v), slope), rtol=0, atol=1e-11)
    assert plan.positions[path].tolist() == [position for length in lengths for position in range(length)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_gradient_of_a_gathered_row_is_the_rounded_sum_over_its_uses(dtype: torch.dtype) -> None:
    """A sum in bfloat16 would stop at 256, where adding a number below 1 changes nothing."""
    rows = torch.randn(4, 2, 3, dtype=dtype, requires_grad=True)
    index = torch.tensor([3, *[1] * 2000, 3, 0])
    slopes = torch.rand(len(index), 2, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = Gather(index, len(rows))(rows)
    assert torch.equal(found, rows[index])
    (gradient,) = torch.autograd.grad(found, rows, slopes)
    expected = torch.zeros(rows.shape, dtype=torch.float64).index_add_(0, index, slopes.double())
    torch.testing.assert_close(gradient.double(), expected, rtol=max(torch.finfo(dtype).eps, 1e-5), atol=0)
