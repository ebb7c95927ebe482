"""What deterministic mode takes for granted on a CUDA device, and how it is checked before the first step."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from srtrl.model.fused_forward import linear
from srtrl.model.transformer import Linear, Transformer

Multiply = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]
"""`fused_forward.linear`, or what stands for it."""


def ensure_deterministic_products(model: Transformer, rows_at_once: int) -> None:
    """Have the CUDA libraries sum in float32, in this process from now on, and check all products of `model`.

    By default a library may add up parts of a bfloat16 product in bfloat16, which rounds a row by how it was cut up.

    Raises:
        ValueError: See `check_row_places`.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    check_row_places(model, rows_at_once, linear)


@torch.inference_mode()
def check_row_places(model: Transformer, rows_at_once: int, multiply: Multiply) -> None:
    """Check that a row of a product has the same bits wherever it stands among `rows_at_once` rows.

    Equal rows are multiplied by a weight of each shape: some kernels cut the work up such that rows of one product are
    summed in different orders (rng_key-K), and equal shapes alone would then not mean equal bits.

    Raises:
        ValueError: They have not.
    """
    shapes = set()
    for weight, bias in _products(model):
        shape = (*weight.shape, bias is not None)
        if shape in shapes:
            continue
        shapes.add(shape)
        row = torch.randn(1, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
        product = multiply(row.repeat(rows_at_once, 1), weight, bias, rows_at_once)
        bits = product.view(torch.uint8)  # of NaNs, too
        num_other = int((bits != bits[0]).any(dim=1).sum())
        if num_other:
            raise ValueError(
                f"rollout.deterministic: of {rows_at_once} equal rows times a weight of {tuple(weight.shape)} in "
                f"{weight.dtype}, {num_other} came out with other bits than the first: this device's matrix library "
                f"(CUDA {torch.version.cuda}) sums a row by its place, so drafts and batches would change bits. Leave "
                "rollout.deterministic out of the recipe; without it speculation is exact in distribution all the same"
            )


def _products(model: Transformer) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Weights [out, in] and biases [out] of all matrix products."""
    for module in model.modules():
        if isinstance(module, Linear):
            yield module.weight, module.bias
    yield model.head_weight, None
