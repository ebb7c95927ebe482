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
from torch.autograd.function import once_differentiable
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

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """Attend in one layer, with scale E**-0.5.

        Args:
            layer: Index of the layer (plans with a KV cache keep one cache a layer).
            q: Rotated queries, [T, H, E]; like `k` and `v` possibly a view with strides.
            k: Rotated keys, [T, K, E].
            v: Values, [T, K, E].
            window: A token sees the last `window` positions, its own included; None: all.

        Returns:
            Attention output, [T, H, E], in the dtype of `v`.
        """


class PackedPlan:
    """Whole sequences end to end, each causal within itself; differentiable (the update).

    A sequence may begin as the one before it does: the tokens that it shares are not there again, and it adds only the
    rest. Its path has the packed row of each of its tokens. Queries are the rows that it adds, keys those of its path.
    The gradient of a shared row is the sum over all sequences that share it: that of as many copies.

    On CUDA bfloat16 and float16 go through FlashAttention for packed sequences, without any padding
    (`varlen_attention`). Elsewhere sequences of similar size go through one `scaled_dot_product_attention` together,
    the shorter ones padded on the right, where causality alone keeps the padding out of what real tokens see.
    What either way needs is made once, for all layers.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str, shared: Sequence[int] | None = None) -> None:
        """Plan sequences of `lengths` tokens, in this order in the packed tensors.

        Args:
            lengths: Tokens of each sequence, with those that it shares.
            device: Of the packed tensors.
            shared: Tokens that each sequence shares with the one before it, fewer than its own; by default none.
        """
        shared = [0] * len(lengths) if shared is None else shared
        assert lengths, "no sequence"
        assert all(0 <= common < length for common, length in zip(shared, lengths, strict=True)), "nothing is added"
        self.lengths = tuple(lengths)
        self.num_added = [length - common for length, common in zip(lengths, shared, strict=True)]
        self.num_positions = max(lengths)
        self.device = torch.device(device)
        self.paths: list[Tensor] = []
        """Packed rows of each sequence, [L] int64, on the host."""
        rows = torch.arange(sum(self.num_added)).split_with_sizes(self.num_added)
        for common, added in zip(shared, rows, strict=True):
            self.paths.append(torch.cat((self.paths[-1][:common], added)) if common else added)
        positions = [torch.arange(common, length) for common, length in zip(shared, lengths, strict=True)]
        self.positions = copy_to_device(torch.cat(positions), device)
        self.query_starts, self.key_starts = (
            copy_to_device(torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32), device)
            for counts in (self.num_added, self.lengths)
        )
        """Start of each sequence in the packed rows and in the joined paths, then their number: [B + 1] int32."""
        self._buckets: dict[int | None, PaddedBuckets] = {}
        """By window."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """Causal attention within each sequence; see `AttentionPlan.attend`."""
        if v.device.type != "cuda" or v.dtype not in HALF_DTYPES:
            return self._padded(window).attend(q, k, v)
        starts, longest = (self.query_starts, self.key_starts), (max(self.num_added), self.num_positions)
        return varlen_attention(q, self._keys(k), self._keys(v), starts, longest, window)

    @functools.cached_property
    def _keys(self) -> "Gather":
        return Gather(copy_to_device(torch.cat(self.paths), self.device), len(self.positions))

    def _padded(self, window: int | None) -> "PaddedBuckets":
        if window not in self._buckets:
            with torch.inference_mode(False):  # the plan may serve an update after a pass in inference mode
                self._buckets[window] = PaddedBuckets(self.paths, self.num_added, self.device, window)
        return self._buckets[window]


class Gather:
    """`rows[index]`; the gradient of a row is the sum over its uses, in a fixed order, in float32 for half types.

    That of torch's own indexing would be summed by atomics on CUDA, in the type of the rows.
    """

    def __init__(self, index: Tensor, num_rows: int) -> None:
        """Take the rows `index`, int64, of `num_rows`."""
        self.index = index
        self.num_rows = num_rows

    def __call__(self, rows: Tensor) -> Tensor:
        """The chosen rows."""
        return _Gather.apply(rows, self)  # type: ignore[no-any-return, no-untyped-call]

    @functools.cached_property
    def uses(self) -> tuple[Tensor, Tensor]:
        """Places of `index` by the rows that they take, and where those of each row begin; for gradients alone."""
        in_order, places = self.index.sort(stable=True)
        return places, torch.searchsorted(in_order, torch.arange(self.num_rows, device=self.index.device))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return rows.index_select(0, gather.index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        places, starts = ctx.gather.uses
        sums = functional.embedding_bag(places, gradient.reshape(len(gradient), -1), starts, mode="sum")
        return sums.reshape(-1, *gradient.shape[1:]), None


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    window: int | None = None,
) -> Tensor:
    """Causal FlashAttention within each packed sequence, with scale E**-0.5; differentiable.

    A sequence may have fewer queries than keys: those of its last tokens.

    Args:
        q: [T, H, E], bfloat16 or float16, like `k` and `v`.
        k: [S, K, E].
        v: [S, K, E].
        starts: where each sequence's queries and its keys begin, then their number: [B + 1] int32 each, on the device.
        longest: maximum number of queries and of keys of a sequence.
        window: see `AttentionPlan.attend`.

    Returns:
        [T, H, E], in the dtype of `v`.

    Raises:
        ValueError: see `check_packed_attention`.
    """
    from torch.nn.attention import varlen  # it brings torch's compiler: seconds

    check_packed_attention(v.device, v.dtype, v.shape[-1])
    if not _takes_shared_heads(varlen.varlen_attn):
        k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))  # [S, H, E]
    options: dict[str, Any] = {"enable_gqa": True} if k.shape[1] < q.shape[1] else {}
    out = varlen.varlen_attn(q, k, v, *starts, *longest, window_size=((window or 0) - 1, 0), **options)
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

    def __init__(
        self, paths: Sequence[Tensor], num_added: Sequence[int], device: torch.device, window: int | None = None
    ) -> None:
        counts, added = torch.tensor([len(path) for path in paths]), torch.tensor(num_added)  # [B]
        starts, path = counts.cumsum(0) - counts, torch.cat(list(paths))  # [B], [S]
        self._counts: list[int] = []  # B of each bucket
        self._masks: list[Tensor | None] = []  # [B, 1, Q, L]; None: plain causality
        queries, keys, real = [], [], []
        for run in bucket_by_length(num_added):
            for places in bucket_by_length([len(paths[index]) for index in run]):
                bucket = torch.tensor(run)[places, None]  # [B, 1]
                first, last = (counts - added)[bucket], counts[bucket] - 1
                steps = first + torch.arange(int(added[bucket].max()))  # [B, Q]
                real.append((steps <= last).flatten())
                steps, key_steps = torch.minimum(steps, last), torch.arange(int(last.max()) + 1)  # [B, Q], [L]
                queries.append(path[starts[bucket] + steps].flatten())  # padding repeats the last token
                keys.append(path[starts[bucket] + torch.minimum(key_steps, last)].flatten())
                is_narrow = window is not None and window < len(key_steps)
                distances = steps[..., None] - key_steps  # [B, Q, L]
                mask = ((distances >= 0) & (distances < (window or len(key_steps))))[:, None]
                self._masks.append(copy_to_device(mask, device) if first.any() or is_narrow else None)
                self._counts.append(len(bucket))
        self._sizes = [[len(rows) for rows in buckets] for buckets in (queries, keys, keys)]
        num_rows = int(added.sum())
        is_real = torch.cat(real)  # [P]
        to_packed = torch.empty(num_rows, dtype=torch.int64)
        to_packed[torch.cat(queries)[is_real]] = is_real.nonzero().squeeze(1)
        self._queries, self._keys = (  # packed row of each padded query, of each padded key
            Gather(copy_to_device(torch.cat(rows), device), num_rows) for rows in (queries, keys)
        )
        self._to_packed = copy_to_device(to_packed, device)  # [T]: padded query of each packed row

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of q [T, H, E] over k and v [T, K, E]: [T, H, E]."""
        padded = zip((self._queries(q), self._keys(k), self._keys(v)), self._sizes, strict=True)  # [P, ., E]
        buckets = [heads.split_with_sizes(sizes) for heads, sizes in padded]
        outputs = []
        for count, mask, *blocks in zip(self._counts, self._masks, *buckets, strict=True):
            q_block, k_block, v_block = (block.unflatten(0, (count, -1)).transpose(1, 2) for block in blocks)
            is_cuda = q.device.type == "cuda"
            if is_cuda:  # with shared heads float32 would take the backend that keeps [B, H, Q, L]
                group = q.shape[1] // k.shape[1]
                k_block, v_block = (block.repeat_interleave(group, dim=1) for block in (k_block, v_block))
            out = functional.scaled_dot_product_attention(
                q_block, k_block, v_block, attn_mask=mask, is_causal=mask is None, enable_gqa=not is_cuda
            )  # [B, H, Q, E]
            outputs.append(out.transpose(1, 2).flatten(0, 1))  # [B Q, H, E]
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
