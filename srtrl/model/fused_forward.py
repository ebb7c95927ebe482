"""The decoder's forward pass on a CUDA device: `Transformer.forward` with fused kernels between the matrix products.

Nine launches a layer: four matrix products, two residual adds with their norms, rotation and store, attention, and the
gated activation. All that is read lies at fixed addresses, so a CUDA graph can hold it. Letters: see `srtrl/types.py`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from srtrl.model.device_plan import DevicePlan
from srtrl.model.transformer import Layer, Transformer


def rotary_table(model: Transformer, num_positions: int) -> Tensor:
    """Cosines and signed sines of the first positions, [`num_positions`, 2 E], in the dtype of the weights.

    The decoder keeps a table of its own: the update may replace the model's at any step, and a captured graph would
    then read memory that is freed.
    """
    return model.rotary.build(num_positions, model.dtype, model.device)


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, rows_at_once: int | None) -> Tensor:
    """`hidden` [N, in] times the transposed `weight` [out, in], plus `bias` [out]: [N, out].

    With `rows_at_once` the product is done in chunks of exactly so many rows, which must divide N: libraries choose
    their kernel, and with it the order of each sum, by the shape. One shape means one kernel, and bits of a row that do
    not depend on N (deterministic mode). Each chunk reads the weight again, so this costs time from two chunks on.
    """
    if rows_at_once is None:
        return functional.linear(hidden, weight, bias)
    num_rows = len(hidden)
    assert num_rows % rows_at_once == 0, f"{num_rows} rows are no multiple of {rows_at_once}"
    out = hidden.new_empty(num_rows, len(weight))
    for first in range(0, num_rows, rows_at_once):
        rows = slice(first, first + rows_at_once)
        if bias is None:
            torch.mm(hidden[rows], weight.t(), out=out[rows])
        else:
            torch.addmm(bias, hidden[rows], weight.t(), out=out[rows])
    return out


@torch.inference_mode()
def fused_forward(
    model: Transformer, token_ids: Tensor, plan: DevicePlan, *, rotary: Tensor, out: Tensor | None = None
) -> Tensor:
    """Hidden states behind the final norm, [N, D], of `token_ids` [N], int32 or int64.

    Args:
        model: Its weights are float32 or bfloat16, as is the cache of `plan`.
        token_ids: On the device; those of padding rows too must be tokens of the vocabulary.
        plan: Of the decode step.
        rotary: `rotary_table` of at least `plan.num_positions`.
        out: [N, D], where the hidden states are wanted.
    """
    from srtrl.model.triton_layers import add_rms_norm

    assert len(rotary) >= plan.num_positions
    eps = model.config.rms_norm_eps
    hidden = functional.embedding(token_ids, model.embedding)  # [N, D], from here on the residual stream
    update = None
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        normed = add_rms_norm(hidden, update, layer.attention_norm, eps)
        update = _attention(layer, normed, plan, index, rotary)
        normed = add_rms_norm(hidden, update, layer.mlp_norm, eps)
        update = _mlp(layer, normed, plan.rows_at_once)
    return add_rms_norm(hidden, update, model.final_norm, eps, out=out)


def _attention(layer: Layer, hidden: Tensor, plan: DevicePlan, index: int, rotary: Tensor) -> Tensor:
    """What attention adds to the residual stream: [N, D] -> [N, D]."""
    from srtrl.model.triton_layers import rope_and_store

    at_once = plan.rows_at_once
    qkv = linear(hidden, layer.qkv_proj.weight, layer.qkv_proj.bias, at_once)  # [N, (H + 2 K) E]
    norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
    keys, values = plan.cache.kernel_keys(index), plan.cache.kernel_values(index)
    q = rope_and_store(qkv, rotary, plan.positions, plan.rows.write_slots, keys, values, norms, layer.eps)
    attended = plan.attend_stored(index, q)  # [N, H, E]
    return linear(attended.flatten(1), layer.o_proj.weight, layer.o_proj.bias, at_once)


def _mlp(layer: Layer, hidden: Tensor, rows_at_once: int | None) -> Tensor:
    """What the gated MLP adds to the residual stream: [N, D] -> [N, D]."""
    from srtrl.model.triton_layers import silu_and_mul

    gate_up = linear(hidden, layer.gate_up_proj.weight, layer.gate_up_proj.bias, rows_at_once)  # [N, 2 I]
    return linear(silu_and_mul(gate_up), layer.down_proj.weight, layer.down_proj.bias, rows_at_once)
