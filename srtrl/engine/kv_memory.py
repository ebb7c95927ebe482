"""The number of pages of the KV cache: from a given memory, or from what is free on the device.

The arithmetic takes bytes as arguments and knows no device.
"""

import math
from typing import Literal

import torch

from srtrl.engine.runner import EngineOptions, Runner, page_bytes_of

GIB = 1 << 30
CPU_SLOTS = 64
"""`slots: auto` on a CPU: more sequences make its decode steps no more efficient."""
CPU_GIB = 4.0
"""`kv_memory_gib: auto` on a CPU."""
EXPECTED_SHARE = 0.25
"""Share of its maximum length that a decoding sequence is assumed to hold on average (for `slots: auto`): the average
response is half as long as the longest, and half of it is decoded. If sequences hold more, some are preempted."""
MAX_AUTO_SLOTS = 1024
"""With as many rows a decode step takes as long as its arithmetic: more slots would not make it more efficient."""
KV_SHARE = 0.5
"""`kv_memory_gib: auto` on CUDA: share of the free memory for pages; the rest is for the update's activations."""

GRAPH_BYTES = GIB // 5
"""Memory of captured decode steps: about 1 MiB each, and what they share. On an H200, 84 of them took 0.8 GiB with the
memory that libraries load for them, which is not counted here."""

GIVE_MORE = "allow it more, or lower rollout.max_new_tokens"
"""Advice if the option's own memory is too little."""


def allocate_pages(runner: Runner, options: EngineOptions, max_sequence_tokens: int) -> int:
    """Give the runner its pages; returns their number.

    Args:
        runner: Its weights are on the device already.
        options: Their number, or the memory for them.
        max_sequence_tokens: Of the longest sequence.

    Raises:
        ValueError: The memory does not hold one sequence, or the device does not have as much.
    """
    num_pages = options.num_pages
    page_bytes = page_bytes_of(runner.model, options.page_size) + options.drafter_page_bytes
    if num_pages is None:
        free, reserved = free_bytes(runner.model.device), options.kv_reserved_bytes
        is_share = options.kv_memory_gib == "auto" and free is not None
        num_pages = choose_num_pages(
            kv_bytes(options.kv_memory_gib, free, reserved_bytes=reserved),
            page_bytes=page_bytes,
            page_size=options.page_size,
            slots=options.slots,
            max_sequence_tokens=max_sequence_tokens,
            advice=_what_is_left(free or 0, reserved) if is_share else GIVE_MORE,
        )
    try:
        runner.allocate_pages(num_pages)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the KV cache is to have {num_pages * page_bytes / GIB:.2f} GiB, and the device has not as much "
            "left: lower rollout.kv_memory_gib, or free the device of other programs"
        ) from error
    return num_pages


def free_bytes(device: torch.device) -> int | None:
    """Memory of a CUDA device that new tensors could take: free, or kept by PyTorch's allocator; None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def kv_bytes(kv_memory_gib: float | Literal["auto"], free: int | None, *, reserved_bytes: int) -> int:
    """Return how many bytes the pages may take.

    Args:
        kv_memory_gib: The option.
        free: See `free_bytes`.
        reserved_bytes: What others will take later and keep, or need beside the rest.
    """
    if kv_memory_gib != "auto":
        return int(kv_memory_gib * GIB)
    return int(CPU_GIB * GIB) if free is None else int(KV_SHARE * max(free - reserved_bytes, 0))


def _what_is_left(free: int, reserved: int) -> str:
    """Advice if a share of what is left on the device is too little."""
    taken = f", and the update's gradients will take {reserved / GIB:.1f}" if reserved else ""
    return (
        f"{free / GIB:.1f} GiB of the device are free{taken}. `srtrl show-config RECIPE --check` shows what takes its "
        "memory, and what would lower it"
    )


def choose_num_pages(
    num_bytes: int,
    *,
    page_bytes: int,
    page_size: int,
    slots: int,
    max_sequence_tokens: int,
    advice: str = GIVE_MORE,
) -> int:
    """Pages for all slots at full length (and one more each, for prompts), as far as `num_bytes` go.

    Raises:
        ValueError: That memory does not hold one sequence; the message ends with `advice`.
    """
    max_pages = -(-max_sequence_tokens // page_size)
    affordable = num_bytes // page_bytes
    if affordable < max_pages:
        raise ValueError(
            f"rollout.kv_memory_gib: {num_bytes / GIB:.3g} GiB hold {affordable} pages, but one sequence of "
            f"{max_sequence_tokens} tokens needs {max_pages}, {max_pages * page_bytes / GIB:.3g} GiB: {advice}"
        )
    return min(affordable, slots * (max_pages + 1))


def choose_slots(num_bytes: int, *, page_bytes: int, page_size: int, max_sequence_tokens: int, num_samples: int) -> int:
    """Slots for which `num_bytes` of pages hold sequences of the expected length; at most `num_samples`."""
    expected_pages = math.ceil(EXPECTED_SHARE * max_sequence_tokens / page_size)
    return max(1, min(num_samples, MAX_AUTO_SLOTS, num_bytes // (expected_pages * page_bytes)))
