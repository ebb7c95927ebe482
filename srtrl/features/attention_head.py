"""A pretrained attention drafter, EAGLE-3: one decoder layer over pairs of a state and the token after it.

The entry of position t is made of the state s(t) and the embedding of token t + 1. The layer attends from it to the
entries before it, and its output gives logits of token t + 2. s(t) is fc[the policy's residual stream after some
layers]; after a token that is only a guess it is the head's own output for the entry before (arXiv 2503.01840).
EAGLE-3.1 (arXiv 2605.09992) has further norms: of each stream before `fc`, and of the output that becomes a state.

Read are the folders that EAGLE and SpecForge write, and those of speculators. Their weights stay as they are.

Letters: N entries, D model width, A layers that are read, L listed tokens; others as in `transformer.py`.
"""

from collections.abc import Callable, Iterator, Mapping
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
from srtrl.model.weights import check_shape, fused_projections
from srtrl.resolve import Caught

LAYER_FIELDS = frozenset(
    {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"}
    | {"head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling"}
    | {"rope_parameters", "attention_bias", "mlp_bias"}
)
"""Fields of a head's config that describe its layer."""
LEFT_OUT = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of a folder that drafting does not need: which tokens are listed, and copies of the policy's own."""
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

    def __init__(self, config: HeadConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        """A head with uninitialised weights."""
        super().__init__()
        width = config.layer.hidden_size

        def vector(length: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(length, dtype=dtype, device=device))

        self.config = config
        self.layer = Layer(config.layer, dtype, torch.device(device), input_width=2 * width)
        self.fc = Linear(len(config.reads) * width, width, bias=False, dtype=dtype, device=device)
        self.input_norm = vector(self.fc.in_features) if config.norm_before_fc else None
        self.fc_norm = nn.ParameterList(vector(width) for _ in config.reads) if config.fc_norm else None
        self.hidden_norm, self.norm = vector(width), vector(width)
        self.output = nn.Parameter(torch.empty(config.num_listed, width, dtype=dtype, device=device))
        self.own_embedding: Tensor | None = None
        """[V, D], where the head does not use the policy's."""
        self.embedding: Tensor | None = None
        """[V, D], from `refresh` on."""
        self.token_ids: Tensor
        """[L] int64, the token of each row of `output`."""
        self.register_buffer("token_ids", torch.arange(config.num_listed, device=device), persistent=False)
        [kind] = config.layer.layer_kinds
        self.rotary = RotaryTable(kind.rope, config.layer.head_dim, config.layer.style)
        self.requires_grad_(False)

    def refresh(self, policy: Transformer) -> None:
        """Take over the policy's current embedding, unless the head has its own."""
        self.embedding = policy.embedding.detach() if self.own_embedding is None else self.own_embedding

    def take(self, name: str, tensor: Tensor) -> None:
        """Use offsets of the listed tokens (`d2t`), or an embedding of the head's own."""
        if name == "d2t":
            self.token_ids += tensor.to(self.token_ids)
        else:
            self.own_embedding = tensor.to(self.fc.weight)

    def fuse(self, streams: Tensor) -> Tensor:
        """States of positions, [N, D], from the policy's streams [N, A D]."""
        if self.input_norm is not None:
            streams = self._normed(streams, self.input_norm)
        if self.fc_norm is not None:
            parts = zip(streams.chunk(len(self.fc_norm), dim=-1), self.fc_norm, strict=True)
            streams = torch.cat([self._normed(stream, weight) for stream, weight in parts], dim=-1)
        return self.fc(streams)  # type: ignore[no-any-return]

    def keys_values(self, states: Tensor, token_ids: Tensor, plan: "RotaryPositions") -> tuple[Tensor, Tensor]:
        """Rotated keys and values of entries, [N, K, E] each, from states [N, D] and the tokens after them [N]."""
        _, keys, values = self.layer.project(self._inputs(states, token_ids)[0], *self._rotations(plan))
        return keys, values

    def forward(self, states: Tensor, token_ids: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """The next states [N, D] and logits of the listed tokens [N, L] of entries, which attend as `plan` says."""
        inputs, residual = self._inputs(states, token_ids)
        output = self.layer.attend(inputs, residual, *self._rotations(plan), plan, 0)
        normed = self._normed(output, self.norm)
        return normed if self.config.norm_output else output, functional.linear(normed, self.output)

    def _inputs(self, states: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer's attention reads, [N, 2 D], and where the residual stream begins, [N, D]."""
        assert self.embedding is not None, "`refresh` comes first"
        assert self.layer.attention_norm is not None
        embedded = self._normed(functional.embedding(token_ids, self.embedding), self.layer.attention_norm)
        normed = self._normed(states, self.hidden_norm)
        return torch.cat((embedded, normed), dim=-1), normed if self.config.norm_before_residual else states

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(hidden, weight, self.layer.eps, self.layer.style)

    def _rotations(self, plan: "RotaryPositions | AttentionPlan") -> tuple[Tensor, Tensor]:
        return self.rotary.rows(plan.positions, plan.num_positions, self.norm.dtype)


class RotaryPositions(NamedTuple):
    """Positions of entries that attend to nothing; see `AttentionPlan`."""

    positions: Tensor
    num_positions: int


def load_eagle3(path: str, policy: Transformer) -> AttentionHead:
    """The EAGLE-3 head in a folder or on the hub, in the policy's type.

    Raises:
        ValueError: No such folder, or the head is for another policy, or its files are damaged; names file and tensor.
    """
    folder = locate(path)
    head = AttentionHead(read_head_config(folder, policy.config), policy.dtype, policy.device)
    source, places = f"{folder / 'config.json'}", named_places(head)
    vocabulary, found = (policy.config.vocab_size, policy.config.hidden_size), set[str]()
    for file, stored, tensor in stored_tensors(folder):
        name = stored.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        if name in LEFT_OUT or name.endswith("rotary_emb.inv_freq"):
            continue
        expected = {"d2t": head.token_ids.shape, "embed_tokens.weight": vocabulary}.get(name)
        if name in places:
            expected = places[name].shape
        if expected is None:
            raise ValueError(f"{file}: unexpected tensor {stored} (the EAGLE-3 head of {source} has none of this name)")
        check_shape(file, stored, tensor.shape, expected, source)
        found.add(name)
        if name in places:
            places[name].copy_(tensor)
        else:
            head.take(name, tensor)
        if not 0 <= int(head.token_ids.min()) <= int(head.token_ids.max()) < policy.config.vocab_size:
            raise ValueError(f"{file}: {stored} leads to tokens that are not in the vocabulary; expected offsets")
    needed = places.keys() | ({"d2t"} if head.config.num_listed < policy.config.vocab_size else set())
    if missing := sorted(needed - found):
        raise ValueError(f"{folder}: the EAGLE-3 head lacks {len(missing)} tensors: {', '.join(missing[:5])}")
    return head


def named_places(head: AttentionHead) -> dict[str, Tensor]:
    """Each weight by its name in a folder, as a view into the head's own (fused) one."""
    layer, places = head.layer, {"fc.weight": head.fc.weight, "norm.weight": head.norm, "lm_head.weight": head.output}
    norms: dict[str, Tensor | None] = {
        "layers.0.input_layernorm": layer.attention_norm,
        "layers.0.hidden_norm": head.hidden_norm,
        "layers.0.post_attention_layernorm": layer.mlp_norm,
        "layers.0.self_attn.q_norm": layer.q_norm,
        "layers.0.self_attn.k_norm": layer.k_norm,
        "input_norm": head.input_norm,
        **{f"fc_norm.{index}": weight for index, weight in enumerate(head.fc_norm or ())},
    }
    places |= {f"{name}.weight": weight for name, weight in norms.items() if weight is not None}
    return {name: tensor.detach() for name, tensor in places.items()} | layer_places(layer, head.config.layer)


def layer_places(layer: Layer, config: ModelConfig) -> dict[str, Tensor]:
    """Matrices and biases of a head's layer by name, as `named_places`."""
    places: dict[str, Tensor] = {}
    for linear, parts in fused_projections(config, layer, 0):
        for kind, fused in linear.named_parameters():
            views = fused.detach().split_with_sizes(list(parts.values()))
            places |= {f"{part.removeprefix('model.')}.{kind}": view for part, view in zip(parts, views, strict=True)}
    return places


def read_head_config(folder: Path, policy: ModelConfig) -> HeadConfig:
    """Shape of the EAGLE-3 head in a folder; ValueError, which names the field, where it is not for this policy."""
    fields: Mapping[str, Any] = read_json(file := folder / "config.json")
    layer = fields.get("transformer_layer_config")
    if layer is None:  # EAGLE and SpecForge: the number of the layer whose output is read
        layer, first = fields, 1
        numbers = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    else:  # speculators and vLLM: the number of layers before it
        first, numbers = 0, fields.get("eagle_aux_hidden_state_layer_ids")
    num_layers = policy.num_hidden_layers
    reads = default_reads(num_layers) if numbers is None else tuple(number + first for number in numbers)
    if not reads or not all(0 <= number <= num_layers for number in reads):
        raise ValueError(f"{file}: it reads layers that a policy of {num_layers} layers has not: {numbers or reads}")
    for name, expected in {
        "hidden_size": policy.hidden_size,
        "vocab_size": policy.vocab_size,
        "target_hidden_size": policy.hidden_size,
        "num_hidden_layers": 1,
    }.items():
        value = layer.get(name, expected) if fields.get(name) is None else fields[name]
        if value != expected:
            raise ValueError(f"{file}: {name} is {value!r}; expected {expected}, for this policy")
    shape = {name: value for name, value in layer.items() if name in LAYER_FIELDS}
    if shape.get("model_type", "llama") not in ("llama", "qwen3"):
        raise ValueError(f"{file}: model_type is {shape['model_type']!r}; supported: llama, qwen3")
    fixed = {"num_hidden_layers": 1, "tie_word_embeddings": False}
    flags = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
    return HeadConfig(
        config_from_hf({"model_type": "llama", **shape, **fixed}, str(file)),
        reads,
        fields.get("draft_vocab_size") or policy.vocab_size,
        **{name: bool(fields.get(name)) for name in flags},
    )


def usual_config(policy: ModelConfig) -> HeadConfig:
    """Shape of most published heads for such a policy, for plans of memory: its own shape, and 32,000 tokens."""
    num_listed = min(32_000, policy.vocab_size)
    return HeadConfig(replace(policy, num_hidden_layers=1), default_reads(policy.num_hidden_layers), num_listed)


def default_reads(num_layers: int) -> tuple[int, int, int]:
    """What heads read whose config does not say it, as EAGLE and SpecForge document it; of a policy of `num_layers`."""
    return 2, num_layers // 2, num_layers - 3


def stored_tensors(folder: Path) -> Iterator[tuple[Path, str, Tensor]]:
    """The tensors of a folder with their files and names: those of safetensors files, else of `pytorch_model.bin`."""
    if (file := folder / PICKLED).is_file() and not any(folder.glob("*.safetensors")):
        load: Callable[..., dict[str, Tensor]] = torch.load
        with Caught() as caught:  # damaged files raise anything
            tensors = load(file, map_location="cpu", weights_only=True)
        if caught.error is not None:
            raise ValueError(f"{file}: no readable weights ({caught.error}); is the download complete?")
        yield from ((file, name, tensor) for name, tensor in tensors.items())
        return
    for file in weight_files(folder):
        with opened(file) as tensors:
            yield from ((file, name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118 - no mapping
