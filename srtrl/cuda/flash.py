"""Which FlashAttention the update runs on a CUDA device: PyTorch's own, version 2, or a newer one that is installed.

Versions 3 and 4 are packages, which `torch.nn.attention.activate_flash_attention_impl` puts in the place of PyTorch's
kernels, for the whole process. It calls functions within them that change from one version to the next, so they are
tried before a run depends on them.
"""

from importlib.metadata import distributions

import torch
from torch.nn import attention

from srtrl.model.attention import HALF_DTYPES, PackedPlan
from srtrl.model.transformer import ModelConfig
from srtrl.resolve import Caught, describe_error

OWN = "FA2"
PACKAGES = {"FA3": "flash-attn-3", "FA4": "flash-attn-4"}
NEWER = {9: ("FA3", "FA4"), 10: ("FA4",)}
"""By the major compute capability: what PyTorch takes there, the best first."""
MAX_HEAD_DIM = 128
"""Wider heads stay with PyTorch's own: the newer ones do not have all of them, with gradients, on all devices."""
LENGTHS, SHARED = (48, 200), (0, 40)
"""Tokens of the trial's two sequences, and those that each begins with of the one before."""
TRIAL_WINDOW = 32
MAX_ERROR = 0.02
"""Maximum error of the trial, as a share of the norm; bfloat16 alone makes about 0.005."""


def choose_flash(setting: str, device: torch.device, head_dim: int) -> str:
    """`FA2`, `FA3` or `FA4`: the best that is installed for the device.

    Args:
        setting: `train.attention`.
        device: A CUDA device.
        head_dim: Width of the model's heads.
    """
    if setting == "fa2" or head_dim > MAX_HEAD_DIM:
        return OWN
    known = attention.list_flash_attention_impls()
    major, _ = torch.cuda.get_device_capability(device)
    newer = (name for name in NEWER.get(major, ()) if name in known and any(distributions(name=PACKAGES[name])))
    return next(newer, OWN)


def use_flash(setting: str, device: torch.device, dtype: torch.dtype, config: ModelConfig) -> None:
    """Let packed attention in half types on a CUDA device be that of `choose_flash`, from here on.

    Args:
        setting: `train.attention`.
        device: Of the model.
        dtype: Of its passes.
        config: Its heads and windows.

    Raises:
        ValueError: what is installed does not run, or computes something else than attention.
    """
    if device.type != "cuda" or dtype not in HALF_DTYPES:
        return
    name, current = choose_flash(setting, device, config.head_dim), attention.current_flash_attention_impl()
    if current is not None and name != current:
        attention.restore_flash_attention_impl()
    if name in {OWN, current}:
        return
    with Caught() as caught:
        attention.activate_flash_attention_impl(name)
        for window in {kind.window and TRIAL_WINDOW for kind in config.layers}:
            _try(device, dtype, config, window)
    if caught.error is not None:
        if attention.current_flash_attention_impl() is not None:
            attention.restore_flash_attention_impl()
        raise ValueError(
            f"train.attention: {name} is what `auto` takes here, because {PACKAGES[name]} is installed, but with "
            f"PyTorch {torch.__version__} it fails: {describe_error(caught.error)}; install a version that goes with "
            "this PyTorch (docs/performance.md#flashattention-3-and-4), or set train.attention=fa2"
        ) from caught.error


def _try(device: torch.device, dtype: torch.dtype, config: ModelConfig, window: int | None) -> None:
    """Compare the attention of two packed sequences, and its gradients, with the plain one in float32."""
    generator = torch.Generator().manual_seed(0)
    plan = PackedPlan(LENGTHS, device, SHARED)
    q, k, v, weights = (
        torch.randn(len(plan.positions), count, config.head_dim, generator=generator).to(device, dtype).requires_grad_()
        for count in (config.num_attention_heads, *[config.num_key_value_heads] * 2, config.num_attention_heads)
    )
    found, expected = (plan.attend(0, *heads, window) for heads in ((q, k, v), (q.float(), k.float(), v.float())))
    results = [[out.detach(), *torch.autograd.grad(out, (q, k, v), weights.to(out.dtype))] for out in (found, expected)]
    errors = [float((one.float() - other).norm() / other.norm()) for one, other in zip(*results, strict=True)]
    if not all(error < MAX_ERROR for error in errors):
        raise ValueError(f"values and gradients of q, k and v are off by {', '.join(f'{one:.1%}' for one in errors)}")
