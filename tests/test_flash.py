"""FlashAttention 3 and 4: which one the update takes, what names it, and what is refused.

On the fake device, with stand-ins for the packages in PyTorch's own registry.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import fake_cuda, varlen_attn
from tiny_run import make_policy, make_recipe
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import _registry, varlen

from srtrl.build import build_policy, make_policy_optimizer
from srtrl.cuda import flash
from srtrl.cuda.flash import choose_flash, use_flash
from srtrl.model.transformer import LayerKind, ModelConfig
from srtrl.model.weights import read_config
from srtrl.planner import describe_memory
from srtrl.run.machine import describe_machine

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
BOTH = ("flash-attn-3", "flash-attn-4")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")


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
    use_flash("auto", CUDA, torch.float32, config)
    use_flash("auto", torch.device("cpu"), BF16, config)
    assert attention.current_flash_attention_impl() is None
    use_flash("auto", CUDA, BF16, config)
    use_flash("auto", CUDA, BF16, config)
    assert sorted(windows) == [-1, flash.TRIAL_WINDOW - 1], "once"
    assert attention.current_flash_attention_impl() == "FA3"
    use_flash("fa2", CUDA, BF16, config)
    assert attention.current_flash_attention_impl() is None
    use_flash("auto", CUDA, BF16, replace(config, head_dim=256))
    assert attention.current_flash_attention_impl() is None


class _ForgetsGradients(torch.autograd.Function):
    """Passes values on, and half of their gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 0.5


def raises(*_: Any, **__: Any) -> Tensor:
    raise ValueError("too many values to unpack (expected 2)")


def is_not_causal(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
    return varlen_attn(q, k.flip(0), v.flip(0), *rest, **options)


def loses_gradients(q: Tensor, *rest: Any, **options: Any) -> Tensor:
    return varlen_attn(_ForgetsGradients.apply(q), *rest, **options)  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (raises, r"too many values to unpack"),
        (is_not_causal, r"values and gradients of q, k and v are off by \d\d"),
        (loses_gradients, r"are off by 0\.\d%, 49\.\d%, 0\.\d%, 0\.\d%"),
    ],
)
def test_one_that_fails_or_computes_something_else_is_refused(
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
    lines = "\n".join(describe_memory(recipe, None))
    assert f"attention of the update: {expected}\n" in lines
    make_policy_optimizer(build_policy(recipe, str(policy), CUDA), recipe)
    assert f"fake, attention {expected}, torch " in describe_machine(CUDA, "bfloat16")
    assert describe_machine(CUDA).startswith("fake, torch ")
