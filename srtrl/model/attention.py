"""Attention among the tokens of one forward pass: the protocol, and the plan of the policy update.

A plan is built once for a forward pass and reused by each layer. `PackedPlan` lays whole sequences end to end (the
update); `paged_attention.py` has the decoder's plan. Dimension letters: see `srtrl/types.py`.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

HALF_DTYPES = (torch.bfloat16, torch.float16)


class AttentionPlan(Protocol):
    """Positions and attention of the tokens in one forward pass, for a `Transformer`."""

    @property
    def positions(self) -> Tensor:
        """Rotary position of each token, [T] int64."""

    @property
    def num_positions(self) -> int:
        """Greater than every position; a number on the host, so that growing the rotary table needs no device copy."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend in one layer, with scale E**-0.5.

        Args:
            layer: Index of the layer (plans with a KV cache keep one cache a layer).
            q: Rotated queries, [T, H, E]; like `k` and `v` possibly a view with strides.
            k: Rotated keys, [T, K, E].
            v: Values, [T, K, E].

        Returns:
            Attention output, [T, H, E], in the dtype of `v`.
        """


class PackedPlan:
    """Whole sequences end to end, each causal within itself; differentiable (the update).

    On CUDA bfloat16 and float16 go through FlashAttention for packed sequences, without any padding
    (`varlen_attention`). Elsewhere sequences of similar length go through one causal `scaled_dot_product_attention`
    together, the shorter ones padded on the right, where causality alone keeps the padding out of what real tokens see.
    What either way needs is made once, for all layers.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        """Plan sequences of `lengths` tokens, in this order in the packed tensors."""
        assert lengths, "no sequence"
        assert min(lengths) > 0, "an empty sequence"
        self.lengths = tuple(lengths)
        self.num_positions = max(lengths)
        self.device = torch.device(device)
        counts = torch.tensor(lengths)  # [B]
        starts = counts.cumsum(0) - counts  # [B]
        positions = torch.arange(sum(lengths)) - starts.repeat_interleave(counts)  # [T]
        self.positions = copy_to_device(positions, device)
        self.starts = copy_to_device(torch.tensor((*starts, sum(lengths)), dtype=torch.int32), device)
        """Packed position of each sequence's first token, then T: [B + 1] int32."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention within each sequence; see `AttentionPlan.attend`."""
        if v.device.type == "cuda" and v.dtype in HALF_DTYPES:
            return varlen_attention(q, k, v, self.starts, self.num_positions)
        return self._padded.attend(q, k, v)

    @functools.cached_property
    def _padded(self) -> "PaddedBuckets":
        with torch.inference_mode(False):  # the plan may serve an update after a pass in inference mode
            return PaddedBuckets(self.lengths, self.device)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Causal FlashAttention within each packed sequence, with scale E**-0.5; differentiable.

    Args:
        q: [T, H, E], bfloat16 or float16, like `k` and `v`.
        k: [T, K, E].
        v: [T, K, E].
        starts: packed position of each sequence's first token, then T: [B + 1] int32, on the device.
        longest: tokens of the longest sequence.

    Returns:
        [T, H, E], in the dtype of `v`.

    Raises:
        ValueError: see `check_packed_attention`.
    """
    from torch.nn.attention import varlen  # it brings torch's compiler: seconds

    check_packed_attention(v.device, v.dtype, v.shape[-1])
    if not _takes_shared_heads(varlen.varlen_attn):
        k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))  # [T, H, E]
    options: dict[str, Any] = {"enable_gqa": True} if k.shape[1] < q.shape[1] else {}
    out = varlen.varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0), **options)
    assert isinstance(out, Tensor)
    return out


@functools.cache
def _takes_shared_heads(function: Callable[..., Any]) -> bool:
    """Whether query heads may share key-value heads: torch 2.12 and later."""
    return "enable_gqa" in inspect.signature(function).parameters


def check_packed_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Refuse a model whose update FlashAttention cannot compute on a CUDA device in a half type.

    Raises:
        ValueError: heads of another width than it takes, or a device that is too old for it.
    """
    if device.type != "cuda" or dtype not in HALF_DTYPES:
        return
    reason = None
    if head_dim > 256 or head_dim % 8 != 0:
        reason = f"takes heads of a multiple of 8 up to 256, and those of this model are {head_dim} wide"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        reason = f"needs a device of compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    if reason is not None:
        raise ValueError(
            f"the update's attention in {str(dtype).removeprefix('torch.')} {reason}: train in float32 "
            "(model.dtype: float32)"
        )


def copy_to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor`, of the host, on `device`; on CUDA the host does not wait for the work queued there.

    A plain copy waits for all of it, so that the device idles while the host prepares the next micro-batch. The pinned
    memory in between is reused once the copy is done.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class PaddedBuckets:
    """Packed sequences laid out in a few padded batches; gathers lay the tokens out and back."""

    def __init__(self, lengths: tuple[int, ...], device: torch.device) -> None:
        counts = torch.tensor(lengths)  # [B]
        starts = counts.cumsum(0) - counts  # [B]
        buckets = bucket_by_length(lengths)
        self._shapes = [(len(bucket), lengths[bucket[0]]) for bucket in buckets]
        """(B, L) of each bucket."""
        self._sizes = [count * width for count, width in self._shapes]
        rows, real = [], []
        for bucket in buckets:
            steps, last = torch.arange(lengths[bucket[0]]), counts[bucket, None] - 1  # [L], [B, 1]
            rows.append((starts[bucket, None] + torch.minimum(steps, last)).flatten())  # padding repeats the last token
            real.append((steps <= last).flatten())
        to_padded, is_real = torch.cat(rows), torch.cat(real)  # [P]
        to_packed = torch.empty(sum(lengths), dtype=torch.int64)
        to_packed[to_padded[is_real]] = is_real.nonzero().squeeze(1)
        self._to_padded = copy_to_device(to_padded, device)  # [P]: packed row of each padded row
        self._to_packed = copy_to_device(to_packed, device)  # [T]: padded row of each packed row

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of q [T, H, E] over k and v [T, K, E]: [T, H, E]."""
        padded = (heads.index_select(0, self._to_padded) for heads in (q, k, v))  # [P, H | K, E]
        outputs = []
        for shape, *blocks in zip(
            self._shapes, *(heads.split_with_sizes(self._sizes) for heads in padded), strict=True
        ):
            q_block, k_block, v_block = (block.unflatten(0, shape).transpose(1, 2) for block in blocks)  # [B, ., L, E]
            out = functional.scaled_dot_product_attention(q_block, k_block, v_block, is_causal=True, enable_gqa=True)
            outputs.append(out.transpose(1, 2).flatten(0, 1))  # [B L, H, E]
        return torch.cat(outputs).index_select(0, self._to_packed)


def bucket_by_length(lengths: Sequence[int], shortest_share: float = 0.875) -> list[list[int]]:
    """Group sequences for padding: indices into `lengths`, longest first, in each bucket and among buckets.

    A bucket takes sequences down to `shortest_share` of its longest, so padding never adds more than an eighth.
    Measured on CPU, 200 sequences of 20-120 tokens: shares of 0.85 to 0.95 are equally fast, one of 0.5 takes 1.4-1.8
    times and a single bucket 1.8-2.2 times as long.
    """
    buckets: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if buckets and lengths[index] >= shortest_share * lengths[buckets[-1][0]]:
            buckets[-1].append(index)
        else:
            buckets.append([index])
    return buckets


def packed_attention_reference(lengths: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The result of `PackedPlan.attend`, written out: a sequence and an explicit softmax at a time.

    q [T, H, E], k and v [T, K, E] -> [T, H, E].
    """
    num_shared = q.shape[1] // k.shape[1]  # query heads on one key-value head
    outputs = []
    for q_one, k_one, v_one in zip(*(heads.split_with_sizes(list(lengths)) for heads in (q, k, v)), strict=True):
        keys, values = (heads.repeat_interleave(num_shared, dim=1) for heads in (k_one, v_one))  # [L, H, E]
        scores = torch.einsum("ihe,jhe->hij", q_one, keys) * q.shape[-1] ** -0.5  # [H, L, L]
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        outputs.append(torch.einsum("hij,jhe->ihe", weights, values))
    return torch.cat(outputs)
