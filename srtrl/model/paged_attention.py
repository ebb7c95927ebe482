"""The decoder's attention: rows of many sequences against the pages of the KV cache, under draft-tree masks.

A *slot* of the cache is `page * page_size + offset`. A row sees the committed positions of its sequence (through the
page table) and the draft nodes on its own branch, itself included (as a list of slots by depth); a prompt token or a
root sees committed positions only. One token and one tree are the same code path. Letters: see `srtrl/types.py`.
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

    @staticmethod
    def bytes_per_page(*, num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Memory of one page over all layers, keys and values."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole pages in all layers; every source is read before any target is written."""
        device = self.key_pages.device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        self.key_pages[:, target] = self.key_pages[:, source]
        self.value_pages[:, target] = self.value_pages[:, source]

    def move_slots(self, sources: Int32Array, targets: Int32Array) -> None:
        """Copy single positions in all layers, [M] each; every source is read before any target is written."""
        device = self.key_pages.device
        source = torch.from_numpy(sources.astype(np.int64)).to(device)
        target = torch.from_numpy(targets.astype(np.int64)).to(device)
        size = self.page_size
        keys = self.key_pages[:, source // size, :, :, source % size]  # [M, num_layers, K, E]
        values = self.value_pages[:, source // size, :, source % size]
        self.key_pages[:, target // size, :, :, target % size] = keys
        self.value_pages[:, target // size, :, target % size] = values


@dataclass(kw_only=True, slots=True, frozen=True)
class PagedRows:
    """Where the rows of one decode step write and what they see; arrays on the host, N real rows."""

    positions: npt.NDArray[np.int64]
    """[N], rotary positions."""
    write_slots: Int32Array
    """[N], where the row's own key and value go."""
    page_tables: Int32Array
    """[B, P], pages of each sequence in order of position; what lies behind its last page is never read."""
    row_tables: Int32Array
    """[N], row of `page_tables`."""
    context_lengths: Int32Array
    """[N], committed positions the row sees (its own included where it is no draft node)."""
    path_slots: Int32Array
    """[N, depth], slots of the draft nodes the row sees, itself last; padding behind `path_lengths`."""
    path_lengths: Int32Array
    """[N], 0 for a row that is no draft node."""


class PagedPlan:
    """Plan of one decode step (`srtrl.model.attention.AttentionPlan`). Rows beyond the real ones are padding.

    On a CPU one Numba kernel attends; elsewhere, and for float64, the plain PyTorch reference does.
    """

    def __init__(self, cache: KVCache, rows: PagedRows, *, num_padded_rows: int | None = None) -> None:
        self.cache = cache
        self.rows = rows
        self.num_rows = len(rows.positions)
        num_all = self.num_rows if num_padded_rows is None else num_padded_rows
        assert num_all >= self.num_rows
        device = cache.key_pages.device
        positions = np.zeros(num_all, dtype=np.int64)
        positions[: self.num_rows] = rows.positions
        self.num_positions = int(positions.max(initial=0)) + 1
        self.positions = torch.from_numpy(positions).to(device)  # [N padded]
        self._num_keys = int(rows.context_lengths.sum() + rows.path_lengths.sum())
        dtype = cache.key_pages.dtype
        use_kernel = device.type == "cpu" and not cache.token_major and dtype in (torch.float32, torch.bfloat16)
        self._reference = None if use_kernel else ReferenceRows(cache, rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the rows' keys and values, then attend; see `AttentionPlan.attend`. Padding rows come out as zeros."""
        num_rows = self.num_rows
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        if self._reference is not None:
            out[:num_rows] = self._reference.attend(layer, q[:num_rows], k[:num_rows], v[:num_rows])
            return out
        self._attend_on_cpu(layer, q, k, v, out)
        return out

    def _attend_on_cpu(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        from srtrl.model.cpu_threads import use_kernel_threads
        from srtrl.model.paged_kernel import attend_paged, write_kv

        rows = self.rows
        num_rows = self.num_rows
        keys, values = _as_array(self.cache.key_pages[layer]), _as_array(self.cache.value_pages[layer])
        write_kv(_as_array(k[:num_rows]), _as_array(v[:num_rows]), rows.write_slots, keys, values)
        use_kernel_threads(2 * self._num_keys * q.shape[1] * q.shape[2])
        wide_out = out[:num_rows] if out.dtype == torch.float32 else out[:num_rows].float()
        attend_paged(
            q[:num_rows].float().numpy(),
            keys,
            values,
            rows.page_tables,
            rows.row_tables,
            rows.context_lengths,
            rows.path_slots,
            rows.path_lengths,
            np.float32(q.shape[-1] ** -0.5),
            wide_out.numpy(),
        )
        if wide_out.dtype != out.dtype:
            out[:num_rows] = wide_out


class ReferenceRows:
    """The slow twin of the kernels: gather every key a row sees, masked softmax. Any device, any dtype."""

    num_rows_at_once = 64
    """Bounds the gathered keys: rows x keys x heads."""

    def __init__(self, cache: KVCache, rows: PagedRows) -> None:
        self.cache = cache
        device = cache.key_pages.device
        num_keys = int((rows.context_lengths + rows.path_lengths).max(initial=1))
        index = np.arange(num_keys)
        slots = np.zeros((len(rows.positions), num_keys), dtype=np.int64)  # [N, M]
        size = cache.page_size
        for n, (table, context, depth) in enumerate(
            zip(rows.row_tables, rows.context_lengths, rows.path_lengths, strict=True)
        ):
            slots[n, :context] = rows.page_tables[table, index[:context] // size] * size + index[:context] % size
            slots[n, context : context + depth] = rows.path_slots[n, :depth]
        seen = index < (rows.context_lengths + rows.path_lengths)[:, None]  # [N, M]
        self.slots = torch.from_numpy(slots).to(device)
        self.seen = torch.from_numpy(seen).to(device)
        self.write_slots = torch.from_numpy(rows.write_slots.astype(np.int64)).to(device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[N, H, E] for real rows only; softmax in at least float32."""
        size = self.cache.page_size
        key_pages, value_pages = self.cache.key_pages[layer], self.cache.value_pages[layer]
        key_pages[self.write_slots // size, :, :, self.write_slots % size] = k
        value_pages[self.write_slots // size, :, self.write_slots % size] = v
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        outputs = []
        for first in range(0, len(q), self.num_rows_at_once):
            rows = slice(first, first + self.num_rows_at_once)
            slots = self.slots[rows]  # [N, M]
            keys = key_pages[slots // size, :, :, slots % size].to(wide)  # [N, M, K, E]
            values = value_pages[slots // size, :, slots % size].to(wide)  # [N, M, K, E]
            grouped = q[rows].to(wide).reshape(len(slots), keys.shape[2], -1, q.shape[-1])  # [N, K, H / K, E]
            scores = torch.einsum("nkge,nmke->nkgm", grouped, keys) * q.shape[-1] ** -0.5
            scores = scores.masked_fill(~self.seen[rows][:, None, None], -torch.inf)
            outputs.append(torch.einsum("nkgm,nmke->nkge", scores.softmax(-1), values).flatten(1, 2).to(q.dtype))
        return torch.cat(outputs)


def _as_array(tensor: Tensor) -> npt.NDArray[np.float32] | npt.NDArray[np.uint16]:
    """A NumPy view of the tensor's memory; bfloat16, which NumPy lacks, as uint16."""
    array: npt.NDArray[np.float32] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
