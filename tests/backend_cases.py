"""Stand-ins for the attention of other libraries: what they compute, in plain PyTorch, and what they refuse."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from srtrl.engine.attention_probe import HostStopwatch
from srtrl.engine.buckets import ROWS_AT_ONCE, BucketPlanner
from srtrl.model.device_rows import DeviceRows

CPU = torch.device("cpu")
OUR_SECONDS = 1.0
"""Of a layer, by `FakeStopwatch`."""


def attend_pages(q: Tensor, keys: Tensor, values: Tensor, page_tables: Tensor, lengths: Tensor) -> Tensor:
    """[N, H, E]: row i over the first `lengths[i]` positions of page table i; zeros where there are none."""
    assert page_tables.dtype == lengths.dtype == torch.int32
    assert len(q) == len(page_tables) == len(lengths)
    page_size, num_kv_heads = keys.shape[1:3]
    out = torch.zeros(q.shape, dtype=q.dtype)
    for row, length in enumerate(lengths.tolist()):
        if length:
            index = torch.arange(length)
            slots = page_tables[row, index // page_size].long() * page_size + index % page_size
            row_keys, row_values = (pages.flatten(0, 1)[slots].float() for pages in (keys, values))  # [n, K, E]
            grouped = q[row].float().view(num_kv_heads, -1, q.shape[2])
            weights = (torch.einsum("kge,nke->kgn", grouped, row_keys) * q.shape[2] ** -0.5).softmax(-1)
            out[row] = torch.einsum("kgn,nke->kge", weights, row_values).flatten(0, 1).to(q.dtype)
    return out


class FakeBackend:
    """Attends as it should, and counts."""

    def __init__(self, name: str = "varlen", seconds: Callable[[int], float] = lambda num_rows: OUR_SECONDS) -> None:
        self.name = name
        self.num_calls = 0
        self.rows: list[int] = []
        """Rows of each call."""
        self.spent = 0.0
        self._seconds = seconds

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows) -> Tensor:
        self.num_calls += 1
        self.rows.append(len(q))
        self.spent += self._seconds(len(q))
        return self.compute(q, keys, values, rows)

    def compute(self, q: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows) -> Tensor:
        return attend_pages(q.cpu(), keys.cpu(), values.cpu(), rows.page_tables.cpu(), rows.context_lengths.cpu()).to(
            q.device
        )


class RaisingBackend(FakeBackend):
    """Refuses as libraries do."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def compute(self, *_: Any) -> Tensor:
        raise self._error


class ShiftedBackend(FakeBackend):
    """Sees some keys too few or too many of every sequence."""

    def __init__(self, shift: int, name: str = "varlen") -> None:
        super().__init__(name)
        self._shift = shift

    def compute(self, q: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows) -> Tensor:
        real = rows.context_lengths > 0
        most_keys = rows.page_tables.shape[1] * keys.shape[1]
        lengths = ((rows.context_lengths + self._shift) * real).clamp(0, most_keys).int()
        return attend_pages(q, keys, values, rows.page_tables, lengths)


class NanPaddingBackend(FakeBackend):
    """Divides by the weights of rows that see nothing."""

    def compute(self, q: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows) -> Tensor:
        out = super().compute(q, keys, values, rows)
        out[rows.context_lengths == 0] = torch.nan
        return out


class FrozenBackend(FakeBackend):
    """Keeps the lengths of its first call on a step: what a number on the host does once it is in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self._lengths: dict[int, Tensor] = {}

    def compute(self, q: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows) -> Tensor:
        lengths = self._lengths.setdefault(rows.context_lengths.data_ptr(), rows.context_lengths.clone())
        return attend_pages(q, keys, values, rows.page_tables, lengths)


class FakeStopwatch(HostStopwatch):
    """What the backends say they took; our kernel, which says nothing, takes `OUR_SECONDS` a layer."""

    def __init__(self, *backends: FakeBackend, num_layers: int) -> None:
        self._backends = backends
        self._num_layers = num_layers

    def seconds(self, work: Callable[[], None]) -> float:
        before = sum(backend.spent for backend in self._backends)
        work()
        return sum(backend.spent for backend in self._backends) - before or OUR_SECONDS * self._num_layers


def small_planner(*, page_size: int = 4, deterministic: bool = False, max_positions: int = 64) -> BucketPlanner:
    return BucketPlanner(
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        page_size=page_size,
        max_positions=max_positions,
        max_draft_nodes=40,
        num_multiprocessors=4,
        deterministic=deterministic,
        rows_at_once=ROWS_AT_ONCE,
    )
