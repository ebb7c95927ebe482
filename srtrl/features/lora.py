"""LoRA without adapters in any forward pass: the model keeps merged weights W = W0 + (alpha / rank) B A, rounded.

Decoder and update read W alone, so that they cannot differ by the adapter. The gradient dW is projected onto A and B:
with s = alpha / rank, dA = s B' dW and dB = s dW A', the chain rule. AdamW moves A and B; then W is written anew from
W0, so that no rounding adds up. Hu et al., "LoRA" (2021), arXiv 2106.09685; A and B start as in PEFT.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from srtrl import ranks
from srtrl.features.adapters import ADAPTER_FOLDER, Adapter, save_adapter, write_merged
from srtrl.model.attention import HALF_DTYPES
from srtrl.model.transformer import Layer, ModelConfig, Transformer
from srtrl.model.weights import fused_projections
from srtrl.ranks.sharding import is_sharded, local_rows, resharded
from srtrl.recipe.schema import LoraSection
from srtrl.trainer.optimizer import MasterAdamW


@dataclass(kw_only=True, slots=True, frozen=True)
class AdaptedMatrix:
    """A matrix [out, in] of a Hugging Face module, which may be a part of one of the model's."""

    name: str
    """`model.layers.0.self_attn.q_proj`."""
    weight: Tensor
    """W: the rows of the model's own tensor; of a sharded one those that this rank has."""
    rows: slice
    """Their place in it, or in this rank's part of it."""
    held: slice
    """Their place in the matrix: all of it, but where the model is sharded."""
    base: Tensor
    """W0 of these rows, in the type in which passes read W; on the host where the recipe says so."""
    lora_a: nn.Parameter
    """[rank, in], float32 (float64 for a float64 model)."""
    lora_b: nn.Parameter
    """[out, rank], in the same type."""


class LoraAdamW(MasterAdamW):
    """Fused AdamW over A and B of all matrices of layers; after each step these are W0 + (alpha / rank) B A, rounded.

    Everything else in the model is frozen. A micro-batch's gradient of a matrix is projected as soon as `backward` has
    it, and freed; those of A and B add up in their type. One optimizer for a model, as for masters.
    """

    def __init__(
        self,
        model: Transformer,
        section: LoraSection,
        *,
        seed: int,
        base: str = "",
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        """Freeze the model and copy W0.

        Args:
            model: The base model. If it is sharded, A and B are whole on each rank, and their gradients parts of sums.
            section: Rank, alpha, and where W0 is.
            base: Names the model, in the adapter of a checkpoint.
            dtype: In which passes read the weights, where it is not the model's own: its parts are float32.
            seed: Of A, which is uniform as in PEFT, +-1 / sqrt(in). B is 0, so that the model does not change yet.
            options: Of `torch.optim.AdamW`; A and B both have the weight decay.
        """
        check_rank(section, model.config)
        self.section = section
        self.base = base
        self.scale = section.alpha / section.rank
        self.matrices: list[AdaptedMatrix] = []
        self._num_changed = torch.zeros((), dtype=torch.int64, device=model.device)
        self._model, self._dtype = model, dtype or model.dtype
        generator = torch.Generator().manual_seed(seed)
        model.requires_grad_(False)
        hooked: list[tuple[Tensor, list[AdaptedMatrix]]] = []
        for index, layer in enumerate(model.layers):
            for linear, modules in fused_projections(model.config, cast(Layer, layer), index):
                parts = list(self._adapt(linear.weight, modules, generator))
                self.matrices += parts
                hooked.append((linear.weight.requires_grad_(), parts))
        named = [
            pair
            for part in self.matrices
            for pair in ((f"{part.name}.lora_A", part.lora_a), (f"{part.name}.lora_B", part.lora_b))
        ]
        super().__init__([{"params": named}], **options)
        for weight, parts in hooked:  # the hook holds no optimizer, as that of masters
            handle = weight.register_post_accumulate_grad_hook(partial(_project, parts, self.scale))  # type: ignore[no-untyped-call]
            weakref.finalize(self, handle.remove).atexit = False

    def holders(self, model: nn.Module) -> list[Tensor]:
        """A and B of each matrix."""
        return [tensor for part in self.matrices for tensor in (part.lora_a, part.lora_b)]

    @torch.no_grad()
    def write_weights(self) -> None:
        """Write the merged weights, matrix by matrix."""
        self._num_changed.zero_()
        for part in self.matrices:
            base = part.base.to(part.weight.device, non_blocking=True)
            write_merged(part.weight, base, part.lora_a, part.lora_b[part.held], self.scale)
            self._num_changed += (part.weight.to(base.dtype) != base).sum()

    @contextmanager
    def base_weights(self) -> Iterator[None]:
        """Inside the `with` block the model has the weights W0; after it, the same bits as before."""
        with resharded(self._model):
            for part in self.matrices:
                part.weight.copy_(part.base, non_blocking=True)
            try:
                yield
            finally:
                self.write_weights()

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """`lora/norm`, of (alpha / rank) B A over all matrices; `lora/changed_share`, of their weights with W != W0."""
        # |B A|^2 is the sum of (B' B) * (A A'), which are [rank, rank].
        squares = [
            ((part.lora_b.T @ part.lora_b).double() * (part.lora_a @ part.lora_a.T)).sum() for part in self.matrices
        ]
        num_changed = self._num_changed.clone()
        if is_sharded(self._model):
            ranks.sum([num_changed], "the changed weights")
        num_weights = sum(part.lora_a.shape[1] * len(part.lora_b) for part in self.matrices)
        return {
            "lora/norm": self.scale * math.sqrt(max(0.0, float(torch.stack(squares).sum()))),
            "lora/changed_share": int(num_changed) / num_weights,
        }

    def save(self, folder: Path) -> None:
        """Write the adapter, as PEFT does."""
        save_adapter(self.adapter(self.base), folder / ADAPTER_FOLDER)

    def adapter(self, base: str) -> Adapter:
        """A and B as they are; `base` names the model whose weights are W0."""
        tensors = {
            name: tensor
            for group in self.param_groups
            for name, tensor in zip(group["param_names"], group["params"], strict=True)
        }
        return Adapter(base=base, rank=self.section.rank, alpha=self.section.alpha, tensors=tensors)

    @torch.no_grad()
    def start_from(self, adapter: Adapter) -> None:
        """Take the values of A and B from an adapter.

        Raises:
            ValueError: its rank, its alpha or its matrices are not those of the recipe.
        """
        mine = self.adapter(adapter.base)
        shapes, found = ({name: [*tensor.shape] for name, tensor in side.tensors.items()} for side in (mine, adapter))
        if (mine.rank, mine.alpha, shapes) != (adapter.rank, adapter.alpha, found):
            first = next((name for name in shapes | found if shapes.get(name) != found.get(name)), "")
            differs = f"; {first} is {shapes.get(first)} here and {found.get(first)} there" if first else ""
            raise ValueError(
                f"model.lora: rank {mine.rank}, alpha {mine.alpha:g} and {len(shapes)} tensors; "
                f"the adapter at model.path has rank {adapter.rank}, alpha {adapter.alpha:g} and {len(found)}{differs}"
            )
        for name, tensor in mine.tensors.items():
            tensor.copy_(adapter.tensors[name])
        self.write_weights()

    def _has_own_values(self, dtype: torch.dtype) -> bool:
        return True

    def _adapt(self, fused: Tensor, modules: dict[str, int], generator: torch.Generator) -> Iterator[AdaptedMatrix]:
        """The parts of a matrix of the model."""
        start, (local, first) = 0, local_rows(fused.detach())
        for name, num_rows in modules.items():
            begin, end = (min(max(row - first, 0), len(local)) for row in (start, start + num_rows))
            held = slice(begin + first - start, end + first - start) if end > begin else slice(0)
            start, weight, width = start + num_rows, local[begin:end], local.shape[1]
            lora_a = torch.empty(self.section.rank, width)  # on the CPU: the same on any device
            lora_a.uniform_(-1 / math.sqrt(width), 1 / math.sqrt(width), generator=generator)
            kind: dict[str, Any] = {"dtype": torch.promote_types(weight.dtype, torch.float32), "device": weight.device}
            yield AdaptedMatrix(
                name=name,
                weight=weight,
                rows=slice(begin, end),
                held=held,
                base=_copy_base(weight.to(self._dtype, copy=True), self.section.base),
                lora_a=nn.Parameter(lora_a.to(**kind)),
                lora_b=nn.Parameter(torch.zeros(num_rows, self.section.rank, **kind)),
            )


def check_rank(section: LoraSection, config: ModelConfig) -> None:
    """Raise ValueError if the rank is larger than a side of a matrix, where it could add nothing."""
    limit = min(
        min(num_rows, linear.in_features)
        for linear, modules in fused_projections(config, Layer(config, torch.bfloat16, torch.device("meta")), 0)
        for num_rows in modules.values()
    )
    if section.rank > limit:
        reason = "the smallest side of the matrices of a layer"
        raise ValueError(f"model.lora.rank: expected at most {limit}, {reason}; found {section.rank}")


def _copy_base(weight: Tensor, place: str) -> Tensor:
    """A copied matrix, moved into pinned memory of the host where that is its place and the model's is a GPU.

    PyTorch's own pinned memory is rounded up to a power of two, which would take 1.9 times what a model of 7B needs.
    """
    if place != "host" or weight.device.type != "cuda":
        return weight
    base = torch.empty_like(weight, device="cpu")
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostRegister(base.data_ptr(), base.nbytes, 0))
    weakref.finalize(base.untyped_storage(), cudart.cudaHostUnregister, base.data_ptr()).atexit = False
    return base.copy_(weight)


@torch.no_grad()
def _project(parts: Sequence[AdaptedMatrix], scale: float, parameter: Tensor) -> None:
    """Move the gradient of a tensor of the model to A and B of its parts, adding in their type.

    On CUDA a gradient of a half type is multiplied as it is, by B and A in that type: tensor cores add in float32.
    """
    if parameter.grad is None:
        return
    whole, _ = local_rows(parameter.grad)
    for part in parts:
        dtype = part.lora_a.dtype
        options: dict[str, Any] = {}
        if parameter.device.type == "cuda" and parameter.dtype in HALF_DTYPES:
            dtype, options = parameter.dtype, {"out_dtype": dtype}
        gradient, lora_a, lora_b = (
            tensor.to(dtype) for tensor in (whole[part.rows], part.lora_a, part.lora_b[part.held])
        )
        for holder, rows, added in (
            (part.lora_a, slice(None), torch.mm(lora_b.T, gradient, **options)),
            (part.lora_b, part.held, torch.mm(gradient, lora_a.T, **options)),
        ):
            if holder.grad is None:
                holder.grad = torch.zeros_like(holder)
            holder.grad[rows] += added.mul_(scale)
    parameter.grad = None
