"""The decoder's attention: rows of many sequences against the pages of the KV cache, under draft-tree masks.

A *KV index*, a place in the cache, is `page * page_size + offset`. A row sees the committed positions of its sequence
(through the page table) and the draft nodes on its own branch, itself included (as bits); a prompt token or a root sees
committed positions only. One token and one tree are the same code path. Letters: see `srtrl/types.py`; W words of
ancestor bits.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]


class KVCache:
    """Keys and values of all layers in pages.

    Two layouts in memory, one way to index. On a CPU keys lie dimension by dimension within a head's page, values token
    by token: what the Numba kernel's vector loops want. *Token-major* (other devices): all heads of a token together,
    as attention kernels with page tables want it (`kernel_keys`); `key_pages` and `value_pages` are permuted views.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        token_major: bool | None = None,
    ) -> None:
        """Allocate; `token_major` chooses the layout, None the one of the device (see the class)."""
        self.page_size = page_size
        self.token_major = torch.device(device).type != "cpu" if token_major is None else token_major

        # Zeros, for masked keys have weight 0 and 0 * NaN is NaN.
        def allocate(*page_shape: int) -> Tensor:
            return torch.zeros((num_layers, num_pages, *page_shape), dtype=dtype, device=device)

        if self.token_major:
            token_shape = (page_size, num_kv_heads, head_dim)
            key_pages = allocate(*token_shape).permute(0, 1, 3, 4, 2)
            value_pages = allocate(*token_shape).transpose(2, 3)
        else:
            key_pages = allocate(num_kv_heads, head_dim, page_size)
            value_pages = allocate(num_kv_heads, page_size, head_dim)
        self.key_pages = key_pages
        """[num_layers, num_pages, K, E, page_size]."""
        self.value_pages = value_pages
        """[num_layers, num_pages, K, page_size, E]."""

    def kernel_keys(self, layer: int) -> Tensor:
        """Keys of one layer as they lie in a token-major cache: [num_pages, page_size, K, E], contiguous."""
        assert self.token_major
        return self.key_pages[layer].permute(0, 3, 1, 2)

    def kernel_values(self, layer: int) -> Tensor:
        """Values of one layer as they lie in a token-major cache: [num_pages, page_size, K, E], contiguous."""
        assert self.token_major
        return self.value_pages[layer].transpose(1, 2)

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole pages in all layers; every source is read before any target is written."""
        device = self.key_pages.device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        self.key_pages[:, target] = self.key_pages[:, source]
        self.value_pages[:, target] = self.value_pages[:, source]

    def move_indices(self, sources: Int32Array, targets: Int32Array) -> None:
        """Copy single KV indices in all layers, [M] each; every source is read before any target is written."""
        moves = torch.from_numpy(np.stack([sources, targets]).astype(np.int64)).to(self.key_pages.device)
        source, target = moves  # [M] each
        if self.token_major:
            for pages in (self.key_pages.permute(0, 1, 4, 2, 3), self.value_pages.transpose(2, 3)):
                flat = pages.flatten(1, 2)  # [num_layers, KV indices, K, E], a view
                flat.index_copy_(1, target, flat.index_select(1, source))
            return
        size = self.page_size
        keys = self.key_pages[:, source // size, :, :, source % size]  # [M, num_layers, K, E]
        values = self.value_pages[:, source // size, :, source % size]
        self.key_pages[:, target // size, :, :, target % size] = keys
        self.value_pages[:, target // size, :, target % size] = values


@dataclass(kw_only=True, slots=True, frozen=True)
class PagedRows:
    """Where the rows of one decode step write and what they see; arrays on the host, N rows, padding included."""

    positions: Int32Array
    """[N], rotary positions."""
    kv_indices: Int32Array
    """[N], where the row's own key and value go; -1 for padding."""
    context_lengths: Int32Array
    """[N], committed positions the row sees (its own included where it is no draft node); 0 for padding."""
    ancestors: Int32Array
    """[N, W], bits of the draft nodes the row sees, itself included: bit i % 32 of word i // 32 for node i of its tree,
    whose key lies at position context_length + i of the sequence."""
    row_tables: Int32Array
    """[N], row of `page_tables`."""
    page_tables: Int32Array
    """[B, P], pages of each sequence in order of position; entries after its last page are never read."""


class PagedPlan:
    """Plan of one decode step (`srtrl.model.attention.AttentionPlan`).

    On a CPU one Numba kernel attends; elsewhere, and for float64, the plain PyTorch reference does.
    """

    def __init__(self, cache: KVCache, rows: PagedRows, num_rows: int | None = None) -> None:
        """`num_rows`: rows without padding, which come first; by default all."""
        self.cache = cache
        self.rows = rows
        self.num_rows = len(rows.positions) if num_rows is None else num_rows
        device = cache.key_pages.device
        self.num_positions = int(rows.positions.max(initial=0)) + 1
        self.positions = torch.from_numpy(rows.positions.astype(np.int64)).to(device)  # [N]
        dtype = cache.key_pages.dtype
        use_kernel = device.type == "cpu" and not cache.token_major and dtype in (torch.float32, torch.bfloat16)
        self._reference = None if use_kernel else ReferenceRows(cache, rows, self.num_rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the rows' keys and values, then attend; see `AttentionPlan.attend`. Padding rows come out as zeros."""
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        if self._reference is not None:
            num = self.num_rows
            out[:num] = self._reference.attend(layer, q[:num], k[:num], v[:num])
            return out
        self._attend_on_cpu(layer, q, k, v, out)
        return out

    def _attend_on_cpu(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        from srtrl.model.cpu_threads import use_kernel_threads
        from srtrl.model.paged_kernel import attend_paged, write_kv

        rows, num_rows = self.rows, self.num_rows
        keys, values = _as_array(self.cache.key_pages[layer]), _as_array(self.cache.value_pages[layer])
        # Contiguous whatever the number of rows: a slice of one row would be another type, and compile once more.
        write_kv(
            _as_array(k[:num_rows].contiguous()),
            _as_array(v[:num_rows].contiguous()),
            rows.kv_indices[:num_rows],
            keys,
            values,
        )
        num_keys = int(rows.context_lengths[:num_rows].sum())
        use_kernel_threads(2 * num_keys * q.shape[1] * q.shape[2])
        wide_out = out if out.dtype == torch.float32 else out.float()
        attend_paged(
            q[:num_rows].float().contiguous().numpy(),
            keys,
            values,
            rows.page_tables,
            rows.row_tables[:num_rows],
            rows.context_lengths[:num_rows],
            rows.ancestors[:num_rows],
            np.float32(q.shape[-1] ** -0.5),
            wide_out.numpy(),
        )
        if wide_out is not out:
            out.copy_(wide_out)


class ReferenceRows:
    """The slow twin of the kernels: gather every key a row sees, masked softmax. Any device, any dtype."""

    num_rows_at_once = 64
    """Bounds the gathered keys: rows x keys x heads."""

    def __init__(self, cache: KVCache, rows: PagedRows, num_rows: int | None = None) -> None:
        self.cache = cache
        num_rows = len(rows.positions) if num_rows is None else num_rows
        device, size = cache.key_pages.device, cache.page_size
        seen_positions = [_seen_positions(rows, row) for row in range(num_rows)]
        num_keys = max(map(len, seen_positions), default=1)
        indices = np.zeros((num_rows, num_keys), dtype=np.int64)  # [N, M]
        for row, positions in enumerate(seen_positions):
            pages = rows.page_tables[rows.row_tables[row], positions // size]
            indices[row, : len(positions)] = pages * size + positions % size
        counts = np.array([len(positions) for positions in seen_positions])
        self.indices = torch.from_numpy(indices).to(device)
        self.seen = torch.from_numpy(np.arange(num_keys) < counts[:, None]).to(device)  # [N, M]
        self.kv_indices = torch.from_numpy(rows.kv_indices[:num_rows].astype(np.int64)).to(device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[N, H, E] for real rows only; softmax in at least float32."""
        size = self.cache.page_size
        key_pages, value_pages = self.cache.key_pages[layer], self.cache.value_pages[layer]
        key_pages[self.kv_indices // size, :, :, self.kv_indices % size] = k
        value_pages[self.kv_indices // size, :, self.kv_indices % size] = v
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        outputs = []
        for first in range(0, len(q), self.num_rows_at_once):
            rows = slice(first, first + self.num_rows_at_once)
            indices = self.indices[rows]  # [N, M]
            keys = key_pages[indices // size, :, :, indices % size].to(wide)  # [N, M, K, E]
            values = value_pages[indices // size, :, indices % size].to(wide)  # [N, M, K, E]
            grouped = q[rows].to(wide).reshape(len(indices), keys.shape[2], -1, q.shape[-1])  # [N, K, H / K, E]
            scores = torch.einsum("nkge,nmke->nkgm", grouped, keys) * q.shape[-1] ** -0.5
            scores = scores.masked_fill(~self.seen[rows][:, None, None], -torch.inf)
            outputs.append(torch.einsum("nkgm,nmke->nkge", scores.softmax(-1), values).flatten(1, 2).to(q.dtype))
        return torch.cat(outputs)


def _seen_positions(rows: PagedRows, row: int) -> npt.NDArray[np.int64]:
    """Positions of its sequence, in order, that a row sees: the committed ones, then its branch of the draft tree."""
    context = int(rows.context_lengths[row])
    bits = np.unpackbits(rows.ancestors[row].view(np.uint8), bitorder="little")
    return np.concatenate([np.arange(context), context + np.flatnonzero(bits)])


def _as_array(tensor: Tensor) -> npt.NDArray[np.float32] | npt.NDArray[np.uint16]:
    """A NumPy view of the tensor's memory; bfloat16, which NumPy lacks, as uint16."""
    array: npt.NDArray[np.float32] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
