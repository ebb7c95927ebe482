"""The inputs and results of a decode step on a CUDA device, at fixed addresses.

The host writes everything that a step needs into one pinned array and copies it in one go; kernels read views of its
twin on the device. What they sample comes back in one copy, too. A captured graph finds all of it where it was when it
was captured, as long as the buffers live. Letters: see `srtrl/types.py`; L rows with logits, padding included.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.engine.buckets import StepShape
from srtrl.engine.row_sampling import Int32Array, Int64Array, RowSampling
from srtrl.model.device_rows import ALIGNMENT, Array, DeviceRows, fill_row_arrays, row_arrays, view_rows
from srtrl.model.paged_attention import PagedRows

NO_TOKEN = -1
"""In `StepInputs.forced`: the sampled token counts."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StepInputs:
    """What a step reads, as views of one int32 buffer, on the host or on the device."""

    rng_keys: Tensor
    """[L] int64, the bits of the unsigned rng_keys; 0 for padding, as the other fields of L rows unless they say so."""
    places: Tensor
    """[L] int32, index of each row's token within the response."""
    temperatures: Tensor
    """[L] float32. Padding is greedy, which costs least."""
    forced: Tensor
    """[L] int32, tokens to take whatever is sampled; `NO_TOKEN` elsewhere."""
    token_ids: Tensor
    """[N] int32; 0 for padding."""
    rows: DeviceRows


@dataclass(kw_only=True, slots=True, frozen=True)
class HostInputs:
    """`StepInputs` on the host, as arrays."""

    rng_keys: Array
    places: Array
    temperatures: Array
    forced: Array
    token_ids: Array
    rows: Mapping[str, Array]

    @staticmethod
    def of(inputs: StepInputs) -> "HostInputs":
        """The same memory."""
        return HostInputs(
            rng_keys=inputs.rng_keys.numpy(),
            places=inputs.places.numpy(),
            temperatures=inputs.temperatures.numpy(),
            forced=inputs.forced.numpy(),
            token_ids=inputs.token_ids.numpy(),
            rows=row_arrays(inputs.rows),
        )


def num_elements(shape: StepShape, num_tables: int) -> int:
    """Length of the buffer of a step with so many page tables, in int32 elements."""
    return sum(map(_aligned, _lengths(shape))) + shape.sizes(num_tables).num_elements


def view_inputs(buffer: Tensor, shape: StepShape, num_tables: int) -> StepInputs:
    """The inputs as views of `buffer` [at least `num_elements`] int32, each at a multiple of 128 bytes.

    Only the page tables depend on `num_tables`, and they come last.
    """
    parts = []
    offset = 0
    for length in _lengths(shape):
        parts.append(buffer[offset : offset + length])
        offset += _aligned(length)
    rng_keys, places, temperatures, forced, token_ids = parts
    return StepInputs(
        rng_keys=rng_keys.view(torch.int64),
        places=places,
        temperatures=temperatures.view(torch.float32),
        forced=forced,
        token_ids=token_ids,
        rows=view_rows(buffer[offset:], shape.sizes(num_tables)),
    )


def _lengths(shape: StepShape) -> tuple[int, ...]:
    """Elements of rng_keys, places, temperatures, forced tokens and token ids."""
    num_logits = shape.num_logits
    return 2 * num_logits, num_logits, num_logits, num_logits, shape.num_rows


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def fill_inputs(
    host: HostInputs,
    token_ids: Int32Array,
    rows: PagedRows,
    sampling: RowSampling,
    forced: Int32Array | None,
    *,
    rows_per_tile: int,
    split_keys: int,
) -> None:
    """Write a step into `host`, padding included.

    Args:
        host: Views of a buffer.
        token_ids: [N real].
        rows: What they see and where they write.
        sampling: [L real], how the first rows are sampled.
        forced: [L real]; None: no token is given.
        rows_per_tile: See `device_rows.fill_rows`.
        split_keys: See `device_rows.fill_rows`.
    """
    num_sampled = len(sampling.rng_keys)
    for array, values, padding in (
        (host.rng_keys, sampling.rng_keys.view(np.int64), 0),
        (host.places, sampling.positions, 0),
        (host.temperatures, sampling.temperatures, 0),
        (host.forced, NO_TOKEN if forced is None else forced, NO_TOKEN),
    ):
        array[:num_sampled] = values
        array[num_sampled:] = padding
    host.token_ids[: len(token_ids)] = token_ids
    host.token_ids[len(token_ids) :] = 0
    fill_row_arrays(host.rows, rows, rows_per_tile=rows_per_tile, split_keys=split_keys)


class StagingBuffer:
    """An int32 array on the host, pinned where the device is a CUDA device, and its twin there."""

    def __init__(self, length: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.host = torch.zeros(length, dtype=torch.int32, pin_memory=is_cuda)
        self.device = torch.zeros(length, dtype=torch.int32, device=device)
        self._uploaded = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        """Elements."""
        return len(self.host)

    def wait_until_free(self) -> None:
        """Return when the last upload has read the host's array, so that it may be written again."""
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def upload(self, length: int) -> None:
        """Copy the first `length` elements to the device; does not wait."""
        self.device[:length].copy_(self.host[:length], non_blocking=True)
        if self._uploaded is not None:
            self._uploaded.record()


class ResultBuffer:
    """Tokens and log-probs of a step's rows: written on the device, fetched in one copy."""

    def __init__(self, most_rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._device = torch.zeros(2 * most_rows, dtype=torch.int32, device=device)
        self._host = torch.zeros(2 * most_rows, dtype=torch.int32, pin_memory=is_cuda)
        self._arrived = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def views(self, num_logits: int) -> tuple[Tensor, Tensor]:
        """Tokens [L] int32 and log-probs [L] float32, on the device."""
        pair = self._device[: 2 * num_logits].view(2, num_logits)
        return pair[0], pair[1].view(torch.float32)

    def start_fetch(self, num_logits: int) -> None:
        """Queue the copy of `num_logits` rows behind the step that is computing them; does not wait."""
        if num_logits == 0:
            return
        self._host[: 2 * num_logits].copy_(self._device[: 2 * num_logits], non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def wait(self, num_logits: int, num_real: int) -> tuple[Int64Array, npt.NDArray[np.float32]]:
        """Wait for the copy; returns tokens and log-probs of the first `num_real` of the `num_logits` rows.

        Where none is wanted it does not wait.
        """
        if num_real and self._arrived is not None:
            self._arrived.synchronize()
        host = self._host[: 2 * num_logits].numpy().reshape(2, num_logits)[:, :num_real]
        return host[0].astype(np.int64), host[1].view(np.float32).copy()
