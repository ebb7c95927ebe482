"""The decoder's forward pass on a CUDA device: `Transformer.forward` with fused kernels between the matrix products.

Nine launches per layer: four matrix products, two residual adds with their norms, rotation and store, attention, and
the gated activation. All that is read lies at fixed addresses, so a CUDA graph can hold it. Letters: `srtrl/types.py`.
"""

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from srtrl.model.paged_attention import KVCache, TreeRows
from srtrl.model.transformer import Layer, Transformer
from srtrl.model.tree_attention import AttentionScratch
from srtrl.model.triton_attention import attend_tree
from srtrl.model.triton_layers import add_rms_norm, rope_and_store, silu_and_mul


@torch.inference_mode()
def fused_forward(
    model: Transformer,
    cache: KVCache,
    rows: TreeRows,
    *,
    rotary: Tensor,
    block_m: int,
    num_splits: int,
    scratch: AttentionScratch,
    out: Tensor,
) -> None:
    """Write the hidden states after the final norm into `out` [N, D]; those of padding rows are anything finite.

    Args:
        model: Its weights are float32 or bfloat16, as is the cache.
        cache: Token-major; the rows' keys and values are written.
        rows: On the device; token ids of padding rows too must be tokens of the vocabulary.
        rotary: [more than every position, 2 E], `RotaryTable.build`: a table of the decoder's own, for the update may
            replace the model's at any step, and a captured graph would then read memory that is freed.
        block_m: See `attend_tree`; the tiles of `rows` were made for it.
        num_splits: See `attend_tree`.
        scratch: Partial results of the attention.
        out: [N, D].
    """
    eps = model.config.rms_norm_eps
    hidden = functional.embedding(rows.token_ids, model.embedding)  # [N, D], from here on the residual stream
    # Zeros, for the kernel leaves padding rows out, and 0 * NaN is NaN.
    attended = hidden.new_zeros(len(hidden), model.config.num_attention_heads, model.config.head_dim)
    update = None
    for index, module in enumerate(model.layers):
        layer = cast(Layer, module)
        keys, values = cache.kernel_keys(index), cache.kernel_values(index)
        normed = add_rms_norm(hidden, update, layer.attention_norm, eps)
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        qkv = layer.qkv_proj(normed)  # [N, (H + 2 K) E]
        q = rope_and_store(qkv, rotary, rows.positions, rows.kv_indices, keys, values, norms, layer.eps)
        attend_tree(q, keys, values, rows, attended, scratch=scratch, block_m=block_m, num_splits=num_splits)
        update = layer.o_proj(attended.flatten(1))
        normed = add_rms_norm(hidden, update, layer.mlp_norm, eps)
        update = layer.down_proj(silu_and_mul(layer.gate_up_proj(normed)))
    add_rms_norm(hidden, update, model.final_norm, eps, out=out)
