"""The attention of an attention head's entries on a CUDA device, by the decoder's kernel.

Letters as in `attention_drafter.py`.
"""

from dataclasses import fields

import torch
from torch import Tensor

from srtrl.cuda.attention import attend_tree
from srtrl.cuda.tiles import AttentionScratch, TiledRows, choose_split_keys, next_power_of_two
from srtrl.model.paged_attention import KVCache, TreeRows


class EntryPlan:
    """The plan of one entry of each sequence; see `AttentionPlan`. It asks the device nothing: a graph can hold it."""

    def __init__(self, cache: KVCache, rows: TreeRows, *, scratch: AttentionScratch) -> None:
        """Each row is a tile of its own; `scratch`: see `attend_tree`."""
        self._cache, self._scratch, self.positions = cache, scratch, rows.positions.long()
        self.num_positions = rows.page_tables.shape[1] * cache.page_size
        chains, contexts = rows.row_tables, rows.context_lengths
        self._rows = TiledRows(
            **{field.name: getattr(rows, field.name) for field in fields(rows)},
            tiles=torch.stack((chains, torch.ones_like(chains), chains, contexts), dim=1),
            split_keys=torch.full_like(chains[:1], choose_split_keys(max_keys=self.num_positions, num_splits=1)),
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """See `AttentionPlan`."""
        cache = self._cache
        cache.write(layer, self._rows.kv_indices, k, v)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        attend_tree(
            *(q.contiguous(), cache.kernel_keys(layer), cache.kernel_values(layer), self._rows, out),
            scratch=self._scratch,
            block_m=max(16, next_power_of_two(q.shape[1] // k.shape[1])),
            num_splits=1,
            window=window,
        )
        return out
