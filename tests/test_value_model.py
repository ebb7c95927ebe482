"""The value model: zero at first, float32 whatever the body, and the same bits back from its folder."""

from pathlib import Path

import pytest
import torch
from critic_cases import make_value_model, untied_body
from safetensors.torch import save_file
from update_cases import make_policy

from srtrl.model.attention import PackedPlan
from srtrl.model.value_model import HEAD_FILE, ValueModel, load_value_model, save_value_model
from srtrl.model.weights import load_model, save_model

TOKEN_IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
LENGTHS = (5, 3)


def values_of(model: ValueModel) -> torch.Tensor:
    values: torch.Tensor = model(TOKEN_IDS, PackedPlan(LENGTHS, "cpu"))
    return values


def test_a_fresh_critic_says_zero_and_learns_in_its_first_step_and_its_body_in_the_next() -> None:
    """Zero is no place to be stuck in: only the first gradient of the body is zero."""
    body = untied_body(torch.float64)
    before = torch.get_rng_state()
    model = ValueModel(body)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(values_of(model), torch.zeros(len(TOKEN_IDS), dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    body_gradients = []
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.backward((values_of(model) - 1).square().mean())
        gradient = model.body.layers[0].get_parameter("qkv_proj.weight").grad
        assert gradient is not None
        body_gradients.append(float(gradient.norm()))
        optimizer.step()
    assert body_gradients[0] == 0
    assert body_gradients[1] > 0


def test_values_are_float32_for_a_bfloat16_body() -> None:
    model = make_value_model(dtype=torch.bfloat16)
    hidden, values = model.body(TOKEN_IDS, PackedPlan(LENGTHS, "cpu")), values_of(model)
    assert model.value_head.dtype == values.dtype == torch.float32
    expected = (hidden.double() @ model.value_head[0].double()).float()
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)  # bfloat16 would be off by 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded_has_the_same_bits(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    model = ValueModel(make_policy(dtype=dtype, tied=tied))
    with torch.no_grad():
        model.value_head.copy_(torch.linspace(-1, 1 / 3, model.value_head.numel())[None])
    save_value_model(model, tmp_path / "critic")
    loaded = load_value_model(tmp_path / "critic", dtype=dtype, device="cpu")
    assert [name for name, _ in loaded.named_parameters()] == [name for name, _ in model.named_parameters()]
    for (name, mine), other in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other), name
    assert torch.equal(values_of(loaded), values_of(model))
    body = load_model(tmp_path / "critic", dtype=dtype, device="cpu")  # is a model folder
    assert torch.equal(body.embedding, model.body.embedding)


def test_a_policy_becomes_a_critic_with_its_body_and_without_its_output_head(tmp_path: Path) -> None:
    policy = untied_body()
    save_model(policy, tmp_path / "policy")
    model = load_value_model(tmp_path / "policy", dtype=torch.float32, device="cpu")
    assert not model.value_head.any()
    assert model.body.head is None
    assert torch.equal(model.body.embedding, policy.embedding)
    plan = PackedPlan(LENGTHS, "cpu")
    assert torch.equal(model.body(TOKEN_IDS, plan), policy(TOKEN_IDS, plan))


def test_a_wrong_value_head_is_refused(tmp_path: Path) -> None:
    save_value_model(make_value_model(dtype=torch.float32), tmp_path)
    for name, width in (("value_head.weight", 9), ("score.weight", 8)):
        save_file({name: torch.zeros(1, width)}, tmp_path / HEAD_FILE)
        with pytest.raises(ValueError, match=rf"{name}': \[1, {width}\].* expected {{'value_head.weight': \[1, 8\]}}"):
            load_value_model(tmp_path, dtype=torch.float32, device="cpu")
    (tmp_path / HEAD_FILE).write_bytes(b"half a file")
    with pytest.raises(ValueError, match="no readable safetensors file"):
        load_value_model(tmp_path, dtype=torch.float32, device="cpu")
