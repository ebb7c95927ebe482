"""The guesses of an attention head on a CUDA device: kernels launched one by one after a step, without a graph.

The layer is plain PyTorch; its attention and the choice of the two best tokens are the kernels of the decoder and of
the recurrent head. Letters as in `attention_drafter.py`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.cuda.attention import attend_tree
from srtrl.cuda.tiles import AttentionScratch, TiledRows, choose_split_keys, next_power_of_two
from srtrl.engine.step_inputs import Int32Array
from srtrl.features.attention_drafter import AttentionGuesses, entry_rows
from srtrl.features.draft_head_cuda import rank_listed_triton, read_guesses
from srtrl.model.attention import AttentionPlan, copy_to_device
from srtrl.model.paged_attention import KVCache

Array = npt.NDArray[Any]


class CudaAttentionGuesses(AttentionGuesses):
    """See `AttentionGuesses`; `launch` returns before the device has computed."""

    token_major = True
    _found: Tensor
    """[k, 3, C] int32, see `read_guesses`."""
    _is_warm = False
    """Whether the kernels have been compiled."""
    _scratch: AttentionScratch | None = None

    def launch(self, rows: Array, *noise: Any) -> bool:
        """See `CpuGuesses`."""
        arrays = (array.view(np.int64) if array.dtype == np.uint64 else array for array in noise)
        last, temperatures, rng_keys, positions = (copy_to_device(torch.from_numpy(a), self.device) for a in arrays)
        self._rows = rows
        self._found = torch.empty(self.k, 3, len(rows), dtype=torch.int32, device=self.device)

        def take_best(depth: int, logits: Tensor) -> Tensor:
            best, second, margins = self._found[depth].unbind()
            where = temperatures, rng_keys, (positions + depth).int()
            rank_listed_triton(logits, *where, self.token_ids, (best, second, margins.view(torch.float32)))
            return best.clamp(min=0).long()

        with torch.inference_mode():
            self.unroll(self._streams(rows), last.long(), self.k, take_best)
        was_warm, self._is_warm = self._is_warm, True
        return was_warm

    def wait(self) -> tuple[Int32Array, npt.NDArray[np.float32]]:
        """See `CpuGuesses`."""
        return read_guesses(self._found.cpu().numpy())

    def _plan(self, pages: Int32Array, positions: Int32Array) -> AttentionPlan:
        assert self.cache is not None
        if self._scratch is None:
            self._scratch = AttentionScratch(self.head.config.layer.head_dim, self.device)
        return EntryPlan(self.cache, pages, positions, self.head.layer.num_heads, self._scratch)


class EntryPlan:
    """The plan of one entry of each sequence; see `AttentionGuesses._plan`."""

    def __init__(
        self, cache: KVCache, pages: Int32Array, positions: Int32Array, num_heads: int, scratch: AttentionScratch
    ) -> None:
        """Copy to the device what the kernel reads."""
        device, contexts = cache.key_pages.device, positions + 1
        num_kv_heads = cache.key_pages.shape[2]
        chains = np.arange(len(pages), dtype=np.int32)
        self._cache, self._scratch = cache, scratch
        self._block_m = max(16, next_power_of_two(num_heads // num_kv_heads))
        arrays: dict[str, Array] = entry_rows(pages, positions, cache.page_size) | {
            "tiles": np.stack([chains, np.ones_like(chains), chains, contexts], axis=1),
            "split_keys": np.array([choose_split_keys(max_keys=int(contexts.max()), num_splits=1)], np.int32),
        }
        tensors = {name: copy_to_device(torch.from_numpy(array), device) for name, array in arrays.items()}
        self.rows = TiledRows(**tensors)
        self.positions, self.num_positions = self.rows.positions.long(), int(contexts.max())

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """See `AttentionPlan`."""
        cache, places = self._cache, self.rows.kv_indices.long()
        keys, values = cache.kernel_keys(layer), cache.kernel_values(layer)
        keys.flatten(0, 1)[places], values.flatten(0, 1)[places] = k, v
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        attend_tree(
            *(q.contiguous(), keys, values, self.rows, out),
            scratch=self._scratch,
            block_m=self._block_m,
            num_splits=1,
            window=window,
        )
        return out
