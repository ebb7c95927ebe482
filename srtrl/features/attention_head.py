"""A pretrained attention drafter, EAGLE-3 or MTP: one decoder layer over pairs of a state and the token after it.

The entry of position t is made of the state s(t) and the embedding of token t + 1. The layer attends from it to the
entries before it, and its output gives logits of token t + 2. s(t) is fc[the policy's residual stream after some
layers]; after a token that is only a guess it is the head's own output for the entry before (arXiv 2503.01840).
EAGLE-3.1 (arXiv 2605.09992) has further norms: of each stream before `fc`, and of the output that becomes a state.

Read are the folders that EAGLE and SpecForge write, and those of speculators. Their weights stay as they are.

MTP is a layer of the policy's own folder (MiMo-7B, arXiv 2505.07608): s(t) is the policy's final hidden state, the
layer reads `fc` of both, each after a norm, and the policy's output head makes the logits.

Letters: N entries, D model width, A layers that are read, L listed tokens; others as in `transformer.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from srtrl.model.attention import AttentionPlan
from srtrl.model.files import opened, weight_files
from srtrl.model.folders import locate, read_json
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Layer, Linear, ModelConfig, RotaryTable, Transformer, rms_norm
from srtrl.model.weights import MTP_LAYERS, check_shape, layer_tensors
from srtrl.resolve import Caught

LEFT_OUT = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""Ends of names that drafting does not need: which tokens are listed, copies of the policy's own, and frequencies."""
OFFSETS, EMBEDDING = "d2t", "embed_tokens.weight"
"""Tensors that only some folders have: id - row of the listed tokens, and an embedding of the head's own."""
PICKLED = "pytorch_model.bin"


class HeadConfig(NamedTuple):
    """Shape of a head."""

    layer: ModelConfig
    """A model of its one layer."""
    reads: tuple[int, ...]
    """Numbers of layers after which it reads the policy's residual stream; none: its final hidden states."""
    num_listed: int
    """L."""
    norm_before_fc: bool = False
    """All streams together go through a norm before `fc`."""
    fc_norm: bool = False
    """Each stream goes through a norm of its own before `fc`."""
    norm_before_residual: bool = False
    """The residual stream begins with the state after its norm."""
    norm_output: bool = False
    """The next state is the output after its norm."""


class AttentionHead(nn.Module):
    """The head's weights, which nothing changes; its embedding is the policy's where its folder has none."""

    def __init__(
        self, config: HeadConfig, dtype: torch.dtype, device: torch.device | str, *, has_embedding: bool = False
    ) -> None:
        """A head with uninitialised weights, among them an embedding of its own if it has one."""
        super().__init__()
        width = config.layer.hidden_size

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

        self.config = config
        is_mtp = not config.reads
        [kind], input_width = config.layer.layer_kinds, width if is_mtp else 2 * width
        self.layer = Layer(config.layer, dtype, torch.device(device), kind.window, input_width=input_width)
        self.fc = Linear((2 if is_mtp else len(config.reads)) * width, width, bias=False, dtype=dtype, device=device)
        self.token_norm = weight(width) if is_mtp else None
        self.input_norm = weight(self.fc.in_features) if config.norm_before_fc else None
        self.fc_norm = nn.ParameterList(weight(width) for _ in config.reads) if config.fc_norm else None
        self.hidden_norm, self.norm = weight(width), weight(width)
        self.own_output = None if is_mtp else weight(config.num_listed, width)
        """[L, D], where the head does not use the policy's output head."""
        self.output: Tensor
        """[L, D], from `refresh` on."""
        self.own_embedding = weight(config.layer.vocab_size, width).detach() if has_embedding else None
        """[V, D], where the head does not use the policy's."""
        self.embedding: Tensor
        """[V, D], from `refresh` on."""
        self.token_ids: Tensor
        """[L] int64, the token of each row of `output`."""
        self.register_buffer("token_ids", torch.arange(config.num_listed, device=device), persistent=False)
        self.rotary = RotaryTable(kind.rope, config.layer.head_dim, config.layer.style)
        self.requires_grad_(False)

    def refresh(self, policy: Transformer) -> None:
        """Take over the policy's current embedding and output head, unless the head has its own."""
        self.output = policy.head_weight.detach() if self.own_output is None else self.own_output
        self.embedding = policy.embedding.detach() if self.own_embedding is None else self.own_embedding

    def fuse(self, streams: Tensor) -> Tensor:
        """States of positions, [N, D], from the policy's streams [N, A D], or its final hidden states [N, D]."""
        if not self.config.reads:
            return streams
        if self.input_norm is not None:
            streams = self._normed(streams, self.input_norm)
        if self.fc_norm is not None:
            parts = zip(streams.chunk(len(self.fc_norm), dim=-1), self.fc_norm, strict=True)
            streams = torch.cat([self._normed(stream, weight) for stream, weight in parts], dim=-1)
        return self.fc(streams)  # type: ignore[no-any-return]

    def keys_values(self, states: Tensor, token_ids: Tensor, positions: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of entries, [N, K, E] each.

        Args:
            states: [N, D].
            token_ids: [N], the tokens after them.
            positions: [N] int64.
            limit: Greater than every position.
        """
        rotations = self.rotary.rows(positions, limit, self.norm.dtype)
        _, keys, values = self.layer.project(self._inputs(states, token_ids)[0], *rotations)
        return keys, values

    def forward(self, states: Tensor, token_ids: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """The next states [N, D] and logits of the listed tokens [N, L] of entries, which attend as `plan` says."""
        inputs, residual = self._inputs(states, token_ids)
        rotations = self.rotary.rows(plan.positions, plan.num_positions, self.norm.dtype)
        output = self.layer.attend(inputs, residual, *rotations, plan, 0)
        normed = self._normed(output, self.norm)
        return normed if self.config.norm_output else output, functional.linear(normed, self.output)

    def _inputs(self, states: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the layer's attention, [N, 2 D] (MTP: [N, D]), and where the residual stream begins, [N, D]."""
        assert self.layer.attention_norm is not None
        embedded, normed = functional.embedding(token_ids, self.embedding), self._normed(states, self.hidden_norm)
        if self.token_norm is not None:
            residual = self.fc(torch.cat((normed, self._normed(embedded, self.token_norm)), dim=-1))
            return self._normed(residual, self.layer.attention_norm), residual
        embedded = self._normed(embedded, self.layer.attention_norm)
        return torch.cat((embedded, normed), dim=-1), normed if self.config.norm_before_residual else states

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(hidden, weight, self.layer.eps, self.layer.style)


def load_eagle3(path: str, policy: Transformer) -> AttentionHead:
    """The EAGLE-3 head in a folder or on the hub, in the policy's type.

    Raises:
        ValueError: No such folder, or the head is for another policy, or its files are damaged; names the tensor.
    """
    folder = locate(path)
    config, stored = read_head_config(folder, policy.config), stored_tensors(folder)
    head = AttentionHead(config, policy.dtype, policy.device, has_embedding=EMBEDDING in stored)
    layer = "midlayer" if any(name.startswith("midlayer.") for name in stored) else "layers.0"
    places = named_places(head, layer, {"own_output": "lm_head", "hidden_norm": f"{layer}.hidden_norm"})
    if head.own_embedding is not None:
        places[EMBEDDING] = head.own_embedding
    rows = torch.arange(config.num_listed)
    offsets = torch.zeros_like(rows)
    if OFFSETS in stored or len(rows) < policy.config.vocab_size:
        places[OFFSETS] = offsets
    fill(places, stored, folder, f"the EAGLE-3 head of {folder / 'config.json'}")
    listed = rows + offsets
    if not 0 <= int(listed.min()) <= int(listed.max()) < policy.config.vocab_size:
        raise ValueError(f"{folder}: {OFFSETS} leads to tokens that are not in the vocabulary; expected offsets")
    head.token_ids.copy_(listed)
    return head


def load_mtp(policy: Transformer) -> AttentionHead:
    """The MTP layer that the policy's folder holds; ValueError where it holds none, or one of another shape."""
    head, layer = AttentionHead(mtp_config(policy.config), policy.dtype, policy.device), f"{MTP_LAYERS}0"
    names = {"fc": "input_proj", "token_norm": "token_layernorm", "hidden_norm": "hidden_layernorm"}
    names |= {"norm": "final_layernorm"}
    places = named_places(head, layer, {own: f"{layer}.{name}" for own, name in names.items()})
    stored = {name: tensor for name, tensor in policy.carried.items() if name.startswith(f"{layer}.")}
    fill(places, stored, Path("the policy's folder"), "an MTP layer (kind mtp is for MiMo-7B)")
    return head


def named_places(head: AttentionHead, layer: str, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Each weight by its name in a folder, as a view into the head's own (fused) one.

    Args:
        head: The head.
        layer: What names of its layer begin with.
        names: Other weights -> their names, where these are not those in `AttentionHead`.
    """
    tensors = layer_tensors(head.config.layer, head.layer, 0)
    places = {name.replace("model.layers.0", layer, 1): tensor for name, tensor in tensors.items()}
    own = {name.removesuffix(".weight"): weight.detach() for name, weight in head.named_parameters()}
    others = {names.get(name, name): weight for name, weight in own.items() if not name.startswith("layer.")}
    return places | {f"{name}.weight": weight for name, weight in others.items()}


def fill(places: Mapping[str, Tensor], stored: Mapping[str, Tensor], folder: Path, owner: str) -> None:
    """Copy the tensors of a folder to their places.

    Raises:
        ValueError: one is missing, unexpected, or not of the shape that `owner` has; the message names it.
    """
    for name, tensor in stored.items():
        if name not in places:
            raise ValueError(f"{folder}: unexpected tensor {name} ({owner} has none of this name)")
        check_shape(folder, name, tensor.shape, places[name].shape, owner)
        places[name].copy_(tensor)
    if missing := sorted(places.keys() - stored.keys()):
        raise ValueError(f"{folder} lacks {len(missing)} tensors: {', '.join(missing[:5])}; expected those of {owner}")


def mtp_config(policy: ModelConfig) -> HeadConfig:
    """Shape of a policy's MTP layer."""
    return HeadConfig(replace(policy, num_hidden_layers=1), (), policy.vocab_size, norm_output=True)


def read_head_config(folder: Path, policy: ModelConfig) -> HeadConfig:
    """Shape of the EAGLE-3 head in a folder; ValueError, which names the field, where it is not for this policy."""
    fields: Mapping[str, Any] = read_json(file := folder / "config.json")
    layer = fields.get("transformer_layer_config")
    if layer is None:  # EAGLE and SpecForge: the number of the layer whose output is read
        layer, first = fields, 1
        numbers = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    else:  # speculators and vLLM: the number of layers before it
        first, numbers = 0, fields.get("eagle_aux_hidden_state_layer_ids")
    num_layers, width = policy.num_hidden_layers, policy.hidden_size
    reads = default_reads(num_layers) if numbers is None else tuple(number + first for number in numbers)
    if not reads or not all(0 <= number <= num_layers for number in reads):
        raise ValueError(f"{file}: it reads layers that a policy of {num_layers} layers has not: {numbers or reads}")
    sizes = {"hidden_size": width, "target_hidden_size": width, "vocab_size": policy.vocab_size, "num_hidden_layers": 1}
    for name, expected in sizes.items():
        value = layer.get(name, expected) if fields.get(name) is None else fields[name]
        if value != expected:
            raise ValueError(f"{file}: {name} is {value!r}; expected {expected}, for this policy")
    if layer.get("model_type", "llama") not in ("llama", "qwen3"):
        raise ValueError(f"{file}: model_type is {layer['model_type']!r}; supported: llama, qwen3")
    fixed = {"num_hidden_layers": 1, "tie_word_embeddings": False, "layer_types": None}  # some have the policy's types
    shape = {"model_type": "llama", **layer, **fixed}
    flags = {name: bool(fields.get(name)) for name in HeadConfig._field_defaults}
    num_listed = fields.get("draft_vocab_size") or policy.vocab_size
    return HeadConfig(config_from_hf(shape, str(file)), reads, num_listed, **flags)


def usual_config(policy: ModelConfig) -> HeadConfig:
    """Shape of most published heads for such a policy, for plans of memory: its own shape, and 32,000 tokens."""
    num_listed = min(32_000, policy.vocab_size)
    return HeadConfig(replace(policy, num_hidden_layers=1), default_reads(policy.num_hidden_layers), num_listed)


def default_reads(num_layers: int) -> tuple[int, int, int]:
    """Numbers of layers that heads read whose config names none, as EAGLE and SpecForge document it."""
    return 2, num_layers // 2, num_layers - 3


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a head's folder that drafting needs: of safetensors files, else of `pytorch_model.bin`."""
    tensors: dict[str, Tensor] = {}
    if (file := folder / PICKLED).is_file() and not any(folder.glob("*.safetensors")):
        load: Callable[..., dict[str, Tensor]] = torch.load
        with Caught() as caught:  # damaged files raise anything
            tensors = load(file, map_location="cpu", weights_only=True)
        if caught.error is not None:
            raise ValueError(f"{file}: no readable weights ({caught.error}); is the download complete?")
    else:
        for file in weight_files(folder):
            with opened(file) as found:
                tensors |= {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118 - no mapping
    needed = [name for name in tensors if not name.endswith(LEFT_OUT)]
    return {name.removeprefix("model."): tensors[name] for name in needed}
