"""Models in and out, in the Hugging Face layout; `transformers` loads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import huggingface_hub
import torch
from torch import Tensor, nn

from srtrl.model.files import INDEX_FILE, full_disk_as_os_error, opened, read_index, read_tensors, weight_files
from srtrl.model.folders import find_adapter, locate, read_json
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Layer, ModelConfig, Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Layout(NamedTuple):
    """Names in a Hugging Face checkpoint of a family; those of modules within a layer."""

    architecture: str
    """The class of `transformers`."""
    norms: Sequence[str] = ("input_layernorm", "", "post_attention_layernorm", "")
    """Before attention, after it, before the MLP and after it, where the family has them."""
    qkv: Sequence[str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """One name where queries, keys and values are one matrix."""
    gate_up: Sequence[str] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    qk_norms: Sequence[str] = ("self_attn.q_norm", "self_attn.k_norm")


_POST_NORMS = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_GLM_4_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_GEMMA_NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_FUSED_MLP = ("mlp.gate_up_proj",)
_LAYOUTS = {
    "llama": Layout("LlamaForCausalLM"),
    "qwen2": Layout("Qwen2ForCausalLM"),
    "qwen3": Layout("Qwen3ForCausalLM"),
    "mistral": Layout("MistralForCausalLM"),
    "ministral3": Layout("Ministral3ForCausalLM"),
    "smollm3": Layout("SmolLM3ForCausalLM"),
    "olmo2": Layout("Olmo2ForCausalLM", _POST_NORMS),
    "olmo3": Layout("Olmo3ForCausalLM", _POST_NORMS),
    "exaone4": Layout("Exaone4ForCausalLM", _POST_NORMS),
    "granite": Layout("GraniteForCausalLM"),
    "granitemoehybrid": Layout(
        "GraniteMoeHybridForCausalLM", gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"
    ),
    "phi3": Layout("Phi3ForCausalLM", qkv=("self_attn.qkv_proj",), gate_up=_FUSED_MLP),
    "glm": Layout("GlmForCausalLM", gate_up=_FUSED_MLP),
    "glm4": Layout("Glm4ForCausalLM", _GLM_4_NORMS, gate_up=_FUSED_MLP),
    "gemma3_text": Layout("Gemma3ForCausalLM", _GEMMA_NORMS),
    "seed_oss": Layout("SeedOssForCausalLM"),
    "internlm3": Layout("InternLM3ForCausalLM"),
    "hunyuan_v1_dense": Layout(
        "HunYuanDenseV1ForCausalLM", qk_norms=("self_attn.query_layernorm", "self_attn.key_layernorm")
    ),
}
"""By `model_type`."""
_TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
"""Prefixes of names in a model that reads images too (transformers 4 and 5) -> those in a model of text alone."""
_IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
MTP_LAYERS = "model.mtp_layers."
"""Prefix of the layers of MiMo that predict the token after the next one; they are carried along."""
_LEFT_OUT = (*_IMAGES, MTP_LAYERS)
"""Tensors that are not the model's: of the part for images, which are not read, and those that are carried along."""
_INIT_STD = 0.02


def read_config(path: str | Path) -> ModelConfig:
    """Shape of the model at `path` (see `locate`), without loading weights.

    Raises:
        ValueError: No such model, no readable `config.json`, or a model that is not supported.
    """
    folder = locate(path)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ValueError(f"{folder}: no config.json; expected a model folder in Hugging Face layout")
    config = config_from_hf(read_json(config_file), str(config_file))
    generation_file = folder / "generation_config.json"
    return replace(config, hf_generation_config=read_json(generation_file) if generation_file.is_file() else None)


def init_model(
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    drawn_on: torch.device | str = "cpu",
) -> Transformer:
    """Random model: weights N(0, 0.02), those that write to the residual stream divided by sqrt(2 layers) (GPT-2).

    Norms are one and biases zero. The same seed gives the same model on every device, rounded to `dtype`; the global
    random state is neither read nor moved. Drawn on a GPU they are other numbers, and of a large model there at once.
    """
    model = Transformer(config, dtype, device)
    generator = torch.Generator(drawn_on).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm"):
                parameter.fill_(1 - config.style.norm_offset)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = _INIT_STD / (2 * config.num_hidden_layers) ** 0.5 if residual else _INIT_STD
                parameter.copy_(torch.empty(parameter.shape, device=drawn_on).normal_(0, std, generator=generator))
    return model


def load_model(path: str | Path, *, dtype: torch.dtype, device: torch.device | str) -> Transformer:
    """The model at `path` (see `locate`), its weights rounded to `dtype`; no adapter.

    Tensors are copied one at a time into their place, so that the weights are in memory once.

    Raises:
        ValueError: The model is not supported, or a tensor is missing, unexpected, of another shape than the config
            says, or not a floating-point tensor; the message names tensor and file.
    """
    assert find_adapter(path) is None, "load_policy merges adapters"
    folder = locate(path)
    config = read_config(folder)
    files = check_weights(folder, config)
    model = Transformer(config, dtype, device)
    places = named_tensors(model)
    heads: list[tuple[Path, Tensor]] = []  # in the files, though tied to the embedding
    for file in files:
        for stored_name, tensor in read_tensors(file):
            name = _text_name(stored_name)
            if name in places:
                places[name].copy_(tensor)
            elif name == "lm_head.weight":
                heads.append((file, tensor))
    model.carried = carried_tensors(files)
    for file, head in heads:
        if not torch.equal(head.to(model.dtype), model.embedding.detach().cpu()):  # which of the two was trained?
            raise ValueError(
                f"{file}: tensor lm_head.weight differs from model.embed_tokens.weight, but the config has "
                "tie_word_embeddings true; set it to false if the head was trained apart"
            )
    return model


def carried_tensors(files: Sequence[Path]) -> dict[str, Tensor]:
    """The tensors of `Transformer.carried` in the files of a model."""
    carried: dict[str, Tensor] = {}
    for file in files:
        with opened(file) as tensors:
            names = [name for name in tensors.keys() if name.startswith(MTP_LAYERS)]  # noqa: SIM118 - no mapping
            carried |= {name: tensors.get_tensor(name) for name in names}
    return carried


def check_weights(folder: Path, config: ModelConfig) -> Sequence[Path]:
    """The files of `weight_files`; from their headers alone, whether they hold the tensors of `config`, each once.

    Raises:
        ValueError: as `weight_files`, or a tensor is missing, unexpected, there twice, of another shape than the config
            says, or not in the file that the index names; the message names tensor and file.
    """
    files, indexed = weight_files(folder), {_text_name(name): file for name, file in read_index(folder).items()}
    shapes = {name: tensor.shape for name, tensor in named_tensors(Transformer(config, torch.bfloat16, "meta")).items()}
    tied_head = {"lm_head.weight": shapes["model.embed_tokens.weight"]}  # in some files, though it need not be
    found: dict[str, Path] = {}
    for file in files:
        with opened(file) as tensors:
            for stored_name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                name = _text_name(stored_name)
                if name.endswith("rotary_emb.inv_freq") or name.startswith(_LEFT_OUT):  # inv_freq: in old Llama files
                    continue
                if name in found:
                    raise ValueError(f"{file}: tensor {name} is there twice, for {found[name].name} holds it too")
                if (expected := (tied_head | shapes).get(name)) is None:
                    raise ValueError(f"{file}: unexpected tensor {name} (a {config.model_type} has none of this name)")
                shape = tensors.get_slice(stored_name).get_shape()
                check_shape(file, stored_name, shape, expected, f"{folder / 'config.json'}")
                found[name] = file
    for name in shapes.keys() & indexed.keys():
        if indexed[name] in files and found.get(name) != indexed[name]:
            raise ValueError(f"{indexed[name]}: lacks tensor {name}, which {folder / INDEX_FILE} says is in it")
    if missing := [name for name in shapes if name not in found]:
        names = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(f"{folder}: its safetensors files lack {len(missing)} of {len(shapes)} tensors: {names}")
    return files


def check_shape(file: Path, name: str, found: Sequence[int], expected: Sequence[int], source: str) -> None:
    """Raise ValueError where a tensor of a file has another shape than `source` says."""
    if tuple(found) != tuple(expected):
        raise ValueError(f"{file}: tensor {name} has shape {list(found)}; by {source} it should be {list(expected)}")


def named_tensors(model: Transformer) -> dict[str, Tensor]:
    """Each tensor by its name in a Hugging Face checkpoint, as a view into the model's own (fused) parameter."""
    tensors: dict[str, Tensor] = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.final_norm}
    if model.head is not None:
        tensors["lm_head.weight"] = model.head
    for index, module in enumerate(model.layers):
        tensors |= layer_tensors(model.config, cast(Layer, module), index)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def layer_tensors(config: ModelConfig, layer: Layer, index: int) -> dict[str, Tensor]:
    """Those of `named_tensors` that belong to one layer."""
    norms = (layer.attention_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm)
    layout = _LAYOUTS[config.model_type]
    named_norms = dict(zip((*layout.norms, *layout.qk_norms), (*norms, layer.q_norm, layer.k_norm), strict=True))
    tensors = {
        f"model.layers.{index}.{name}.weight": weight.detach()
        for name, weight in named_norms.items()
        if weight is not None
    }
    for linear, parts in fused_projections(config, layer, index):
        for kind, fused in linear.named_parameters():  # weight [out, in], and bias [out] where there is one
            views = fused.detach().split_with_sizes(list(parts.values()))
            tensors |= {f"{part}.{kind}": view for part, view in zip(parts, views, strict=True)}
    return tensors


def fused_projections(config: ModelConfig, layer: Layer, index: int) -> list[tuple[nn.Linear, dict[str, int]]]:
    """The matrices of a layer, each with the Hugging Face modules whose rows it holds and their numbers of rows."""
    layout = _LAYOUTS[config.model_type]
    q_width, kv_width = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    qkv_rows = (q_width, kv_width, kv_width) if len(layout.qkv) == 3 else (q_width + 2 * kv_width,)
    num_mlp_parts = len(layout.gate_up)
    parts = [
        (layer.qkv_proj, layout.qkv, qkv_rows),
        (layer.o_proj, ("self_attn.o_proj",), (config.hidden_size,)),
        (layer.gate_up_proj, layout.gate_up, (2 * config.intermediate_size // num_mlp_parts,) * num_mlp_parts),
        (layer.down_proj, (layout.down,), (config.hidden_size,)),
    ]
    return [
        (linear, {f"model.layers.{index}.{name}": size for name, size in zip(names, sizes, strict=True)})
        for linear, names, sizes in parts
    ]


def _text_name(name: str) -> str:
    """The name of a tensor of a file, in a model of text alone."""
    prefix = next((prefix for prefix in _TEXT_PREFIXES if name.startswith(prefix)), None)
    return name if prefix is None else _TEXT_PREFIXES[prefix] + name.removeprefix(prefix)


def save_model(
    model: Transformer,
    folder: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a folder in Hugging Face layout: weights, config and, if given, the tokenizer.

    A caller that must never leave half a model writes to a new folder and renames it. While files are written the host
    holds one copy of all weights.

    Args:
        model: The model.
        folder: Made if it does not exist.
        tokenizer: Saved beside the weights.
        dtype: Type of the saved weights; by default the model's.

    Raises:
        ValueError: The folder already holds weights: files of two models must not mix.
    """
    folder = Path(folder)
    if folder.is_dir() and any(folder.glob("*.safetensors*")):
        raise ValueError(f"{folder}: already holds weights; save to a new folder, or delete it first")
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or model.dtype
    tensors = named_tensors(model) | model.carried
    copies = {name: tensor.to(device="cpu", dtype=dtype, copy=True) for name, tensor in tensors.items()}
    with full_disk_as_os_error(folder):
        huggingface_hub.save_torch_state_dict(copies, folder)  # in several files where they are many
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors makes it readable for its owner only
    config = model.config
    fields = dict(config.hf_config) | {"architectures": [_LAYOUTS[config.model_type].architecture]}
    fields["dtype"] = str(dtype).removeprefix("torch.")
    for key in ("torch_dtype", "auto_map"):  # the type's name before transformers 5; code that is not saved
        fields.pop(key, None)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            fields.setdefault(key, getattr(tokenizer, key))  # an absent one would be read as the family's default
    write_json(folder / "config.json", fields)
    if config.hf_generation_config is not None:
        write_json(folder / "generation_config.json", config.hf_generation_config)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write a file of JSON, its keys sorted."""
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
