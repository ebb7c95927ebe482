"""FlashAttention of the update: what its kernel is given and cannot compute, which version is taken, what is refused.

With stand-ins for the kernel, and for the packages of versions 3 and 4 in PyTorch's own registry, on the fake device;
`test_gpu_update.py` runs PyTorch's kernel itself.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import attend_varlen, fake_cuda, varlen_attn
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_kernels import packed_attention_reference
from tiny_run import make_policy, make_recipe
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import _registry, varlen
from update_cases import random_shares

from srtrl.build_models import build_policy, make_policy_optimizer
from srtrl.cuda import flash
from srtrl.cuda.flash import choose_flash, use_flash
from srtrl.model.attention import PackedPlan, check_packed_attention, varlen_attention
from srtrl.model.transformer import LayerKind, ModelConfig
from srtrl.model.weights import read_config
from srtrl.planner import describe_plan
from srtrl.run.machine import describe_machine

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
BOTH = ("flash-attn-3", "flash-attn-4")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")


def attend_varlen_2_11(*inputs: Any, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    """The kernel of torch 2.11, which had no `enable_gqa`."""
    return attend_varlen(*inputs, window_size=window_size)


@settings(deadline=None)
@given(
    kernel=st.sampled_from([attend_varlen, attend_varlen_2_11]),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    counts=st.sampled_from([(4, 2), (2, 2), (3, 1)]),
)
def test_the_kernel_is_given_what_it_needs(kernel: Any, lengths: list[int], counts: tuple[int, int]) -> None:
    plan = PackedPlan(lengths, "cpu", random_shares(lengths, seed=sum(lengths)))
    num_tokens = sum(plan.num_added)
    generator = torch.Generator().manual_seed(num_tokens)
    qk = torch.randn(num_tokens, sum(counts), 8, generator=generator, dtype=torch.float64)
    v = torch.randn(num_tokens, counts[1], 8, generator=generator, dtype=torch.float64).requires_grad_()
    # q and k are views, as those of a model are.
    q, k = (part.detach().requires_grad_() for part in qk.split_with_sizes(counts, dim=1))
    starts, longest = (plan.query_starts, plan.key_starts), (max(plan.num_added), plan.num_positions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", kernel)
        found = varlen_attention(q, plan._keys(k), plan._keys(v), starts, longest)
    path = torch.cat(plan.paths)
    expected = packed_attention_reference(lengths, q, k[path], v[path], plan.num_added)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    slope = torch.randn(found.shape, generator=torch.Generator().manual_seed(0), dtype=found.dtype)
    gradients = torch.autograd.grad(found, (q, k, v), slope)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (q, k, v), slope), rtol=1e-11, atol=1e-11)


def test_what_the_kernel_cannot_compute_is_refused() -> None:
    old = pytest.raises(ValueError, match=r"compute capability 8.0, and fake has less")
    with fake_cuda(capability=(7, 5)), old:
        check_packed_attention(CUDA, torch.float16, 64)
    with fake_cuda():
        for device, dtype, width in (("cpu", BF16, 20), ("cuda", torch.float32, 20), ("cuda", BF16, 128)):
            check_packed_attention(torch.device(device), dtype, width)
        for width in (20, 320):
            message = rf"attention in bfloat16 takes heads.*{width} wide.*model.dtype: float32"
            with pytest.raises(ValueError, match=message):
                check_packed_attention(CUDA, BF16, width)


def install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Packages are there, and what PyTorch does with them does nothing."""
    monkeypatch.setattr(flash, "distributions", lambda name: [SimpleNamespace()] * (name in packages))
    for name in ("FA3", "FA4"):
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, lambda: SimpleNamespace(remove=lambda: None))


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device of compute capability 9.0, FlashAttention 3 and 4; PyTorch's own is back afterwards."""
    install(monkeypatch, *BOTH)
    with fake_cuda():
        yield
    attention.restore_flash_attention_impl(_raise_warn=False)


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return read_config(str(make_policy(tmp_path / "policy", num_hidden_layers=1)))


@pytest.mark.parametrize(
    ("capability", "packages", "expected"),
    [
        ((9, 0), BOTH, "FA3"),
        ((9, 0), BOTH[1:], "FA4"),
        ((9, 0), ("flash-attn", "torch"), "FA2"),
        ((10, 0), BOTH, "FA4"),
        ((10, 3), BOTH[:1], "FA2"),
        ((8, 0), BOTH, "FA2"),
        ((12, 0), BOTH, "FA2"),
    ],
)
def test_the_device_and_what_is_installed_decide(
    capability: tuple[int, int], packages: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *packages)
    with fake_cuda(capability=capability):
        assert choose_flash("auto", CUDA, 128) == expected
        assert choose_flash("fa2", CUDA, 128) == choose_flash("auto", CUDA, 192) == "FA2"
        monkeypatch.delitem(_registry._FLASH_ATTENTION_IMPLS, "FA3")  # an older PyTorch
        assert choose_flash("auto", CUDA, 128) == ("FA2" if packages == BOTH[:1] else expected.replace("3", "4"))


def test_installed_packages_are_found_beside_what_an_interrupted_installation_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, metadata in (("flash_attn_3", "Name: flash_attn_3\nVersion: 3.0.0\n"), ("broken", "")):
        folder = tmp_path / f"{name}-3.0.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(metadata, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with fake_cuda():
        assert choose_flash("auto", CUDA, 128) == "FA3"


@pytest.mark.usefixtures("_installed")
def test_it_is_tried_with_the_models_windows_and_taken_until_a_run_wants_another(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = []

    def logged(*args: Any, **options: Any) -> Tensor:
        windows.append(options["window_size"][0])
        return varlen_attn(*args, **options)

    monkeypatch.setattr(varlen, "varlen_attn", logged)
    kind = config.layers[0]
    config = replace(config, layers=(kind, LayerKind(kind.rope, window=4096)))
    wide = replace(config, head_dim=256)
    for setting, device, dtype, model, expected in (
        ("auto", CUDA, torch.float32, config, None),
        ("auto", torch.device("cpu"), BF16, config, None),
        ("auto", CUDA, BF16, config, "FA3"),
        ("auto", CUDA, BF16, config, "FA3"),
        ("fa2", CUDA, BF16, config, None),
        ("auto", CUDA, BF16, wide, None),
    ):
        use_flash(setting, device, dtype, model)
        assert attention.current_flash_attention_impl() == expected
    assert sorted(windows) == [-1, flash.TRIAL_WINDOW - 1], "once"


def is_not_causal(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
    return varlen_attn(q, k.flip(0), v.flip(0), *rest, **options)


def loses_gradients(q: Tensor, *rest: Any, **options: Any) -> Tensor:
    return varlen_attn((q + q.detach()) / 2, *rest, **options)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (is_not_causal, r"values and gradients of q, k and v are off by \d\d"),
        (loses_gradients, r"are off by 0\.\d%, 49\.\d%, 0\.\d%, 0\.\d%"),
    ],
)
def test_one_that_computes_something_else_is_refused(
    kernel: Any, reason: str, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions of these packages change, and a fallback without a word would hide it."""
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    message = rf"train\.attention: FA3 .* flash-attn-3 is installed, but .*{reason}.*train\.attention=fa2"
    with pytest.raises(ValueError, match=message):
        use_flash("auto", CUDA, BF16, config)
    assert attention.current_flash_attention_impl() is None
    use_flash("fa2", CUDA, BF16, config)


def test_one_that_cannot_be_imported_is_refused(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own functions import them; here there are none."""
    monkeypatch.setattr(flash, "distributions", lambda name: [SimpleNamespace()] * (name == "flash-attn-4"))
    with fake_cuda(), pytest.raises(ValueError, match=r"FA4 .* it fails: ModuleNotFoundError: .*flash_attn.*=fa2"):
        use_flash("auto", CUDA, BF16, config)
    assert attention.current_flash_attention_impl() is None


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(("setting", "expected"), [("auto", "FA3"), ("fa2", "FA2")])
def test_a_run_takes_it_and_its_record_and_check_name_it(setting: str, expected: str, tmp_path: Path) -> None:
    policy = make_policy(tmp_path / "policy", num_hidden_layers=1)
    recipe = make_recipe(policy, tmp_path, device="cuda", model__dtype="bfloat16", train__attention=setting)
    lines = "\n".join(describe_plan(recipe, None, None))
    assert f"attention of the update: {expected}\n" in lines
    make_policy_optimizer(build_policy(recipe, str(policy), CUDA), recipe)
    assert f"fake, attention {expected}, torch " in describe_machine(CUDA, "bfloat16")
    assert describe_machine(CUDA).startswith("fake, torch ")
