"""LoRA adapters as PEFT writes them: read, merged into a base model, written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from srtrl.model.files import full_disk_as_os_error, read_tensors
from srtrl.model.folders import ADAPTER_CONFIG, base_of, find_adapter, locate, read_json
from srtrl.model.transformer import Transformer
from srtrl.model.weights import check_shape, load_model, named_tensors, write_json

ADAPTER_FOLDER = "adapter"
"""In a checkpoint."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PEFT_NAME = "base_model.model.{}.weight"
_MATRICES = ("_proj.lora_A", "_linear.lora_A")
_PLAIN_LORA: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "use_rslora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Values of an adapter's config that decide what it computes: the only ones that are supported."""


@dataclass(kw_only=True, frozen=True, slots=True)
class Adapter:
    """LoRA: to matrices W [out, in] of a base model, (alpha / rank) B A is added (Hu et al. 2021, arXiv 2106.09685)."""

    base: str
    """The base model: a path as in `locate`."""
    rank: int
    alpha: float
    tensors: dict[str, Tensor]
    """A [rank, in] as `model.layers.0.self_attn.q_proj.lora_A`, and B [out, rank] as `... .lora_B`."""


def load_policy(path: str | Path, *, dtype: torch.dtype, device: torch.device | str) -> Transformer:
    """The model at `path` (see `folders.locate`); an adapter there is merged into its base model.

    Raises:
        ValueError: as `weights.load_model`, `read_adapter` and `merge_adapter`.
    """
    model = load_model(locate(path), dtype=dtype, device=device)
    if folder := find_adapter(path):
        merge_adapter(model, read_adapter(folder), folder)
    return model


def write_merged(weight: Tensor, base: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> None:
    """Write base + scale B A into `weight` [out, in], in place: computed in the type of A and B, then rounded."""
    weight.copy_((lora_b @ lora_a).mul_(scale).add_(base))


@torch.no_grad()
def merge_adapter(model: Transformer, adapter: Adapter, folder: Path) -> None:
    """Add an adapter to the weights of its base model; `folder` names it in errors.

    Raises:
        ValueError: it has a tensor that fits no matrix of the layers, or one without the other.
    """
    places, tensors = named_tensors(model), dict(adapter.tensors)
    for name in [name.removesuffix(".lora_A") for name in tensors if name.endswith(_MATRICES)]:
        weight, lora_a = places.get(f"{name}.weight"), tensors.pop(f"{name}.lora_A")
        lora_b = tensors.pop(f"{name}.lora_B", None)
        if weight is None or lora_b is None:
            raise ValueError(f"{folder}: its {name}.lora_A and lora_B fit no matrix of {adapter.base}")
        (num_out, num_in), rank = weight.shape, adapter.rank
        for kind, tensor, shape in (("A", lora_a, (rank, num_in)), ("B", lora_b, (num_out, rank))):
            check_shape(folder, f"{name}.lora_{kind}", tensor.shape, shape, f"rank {rank} and {adapter.base}")
        lora_a, lora_b = (matrix.to(weight.device) for matrix in (lora_a, lora_b))
        write_merged(weight, weight.clone(), lora_a, lora_b, adapter.alpha / adapter.rank)
    if tensors:
        raise ValueError(f"{folder}: unexpected tensors {', '.join(list(tensors)[:5])}; supported: LoRA of the layers")


def read_adapter(folder: Path) -> Adapter:
    """The adapter in a folder that PEFT or `save_adapter` has written, its tensors in float32.

    Raises:
        ValueError: it is not readable, or no plain LoRA (DoRA, biases, ranks that differ between matrices, ...).
    """
    config = _adapter_config(folder)
    before, after = _PEFT_NAME.split("{}")
    tensors = {
        name.removeprefix(before).removesuffix(after): tensor.float()
        for name, tensor in read_tensors(folder / ADAPTER_WEIGHTS)
    }
    return Adapter(base=base_of(folder), rank=config["r"], alpha=config["lora_alpha"], tensors=tensors)


def _adapter_config(folder: Path) -> dict[str, Any]:
    """The config of the adapter in a folder; ValueError where it is not supported."""
    config = read_json(file := folder / ADAPTER_CONFIG)
    for key, value in _PLAIN_LORA.items():
        if (found := config.get(key) or value) != value:
            raise ValueError(f"{file}: {key} is {found!r}, supported: {value!r}")
    for key, kinds in (("r", int), ("lora_alpha", int | float)):
        value = config.get(key)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"{file}: {key} is {value!r}; expected a number above 0")
    return config


def save_adapter(adapter: Adapter, folder: Path) -> None:
    """Write an adapter as PEFT does: `adapter_config.json` and `adapter_model.safetensors`."""
    folder.mkdir(parents=True)
    tensors = {_PEFT_NAME.format(name): tensor.detach().cpu() for name, tensor in adapter.tensors.items()}
    with full_disk_as_os_error(file := folder / ADAPTER_WEIGHTS):
        save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors makes it readable for its owner only
    fields = _PLAIN_LORA | {
        "base_model_name_or_path": adapter.base,
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-2] for name in adapter.tensors}),
        "inference_mode": True,
    }
    write_json(folder / ADAPTER_CONFIG, fields)
