"""How many pages the KV cache has: from a given memory, or from what is free on the device; and fewer where that fails.

The arithmetic takes bytes as arguments and knows no device.
"""

import math
import warnings
from collections.abc import Callable
from typing import Literal

import torch

from srtrl.engine.options import EngineOptions
from srtrl.engine.runner import Runner

GIB = 1 << 30
CPU_GIB = 4.0
"""`kv_memory_gib: auto` on a CPU."""
EXPECTED_SHARE = 0.25
"""Of its maximum length, what a decoding sequence is assumed to hold on average (for `slots: auto`): the average
response is half as long as the longest, and half of it is decoded. If sequences hold more, some are preempted."""
MAX_AUTO_SLOTS = 1024
"""With as many rows a decode step takes as long as its arithmetic: more slots would not make it more efficient."""
FEWER = 0.85
"""Where pages cannot be allocated, this share of their number is tried next."""


def allocate_pages(
    runner: Runner, options: EngineOptions, max_sequence_tokens: int, *, num_pages: int | None = None
) -> int:
    """Give the runner its pages; returns how many.

    Args:
        runner: Its weights are on the device already.
        options: How many, or how much memory.
        max_sequence_tokens: Of the longest sequence.
        num_pages: This number of pages, in place of what the options give.

    Raises:
        ValueError: The memory does not hold one sequence.
    """
    num_pages = num_pages or options.num_pages
    if num_pages is None:
        num_bytes, source = kv_bytes(
            options.kv_memory_gib,
            free_bytes(runner.model.device),
            share=options.kv_memory_share,
            reserved_bytes=options.kv_reserved_bytes,
        )
        num_pages = choose_num_pages(
            num_bytes,
            page_bytes=runner.page_bytes,
            page_size=options.page_size,
            slots=options.slots,
            max_sequence_tokens=max_sequence_tokens,
            source=source,
        )
    of_one = -(-max_sequence_tokens // options.page_size)
    return allocate_or_fewer(runner.allocate_pages, num_pages, fewest=of_one, page_bytes=runner.page_bytes)


def free_bytes(device: torch.device) -> int | None:
    """Memory of a CUDA device that new tensors could take: free, or kept by PyTorch's allocator; None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def kv_bytes(
    kv_memory_gib: float | Literal["auto"], free: int | None, *, share: float, reserved_bytes: int
) -> tuple[int, str]:
    """Return how many bytes the pages may take, and a text for errors: the options that said so.

    Args:
        kv_memory_gib: The option.
        free: See `free_bytes`.
        share: Of what is free less `reserved_bytes`, the part that is for pages.
        reserved_bytes: What others will take later and keep, or need beside the rest.
    """
    if kv_memory_gib != "auto":
        return int(kv_memory_gib * GIB), f"rollout.kv_memory_gib ({kv_memory_gib})"
    if free is None:
        return int(CPU_GIB * GIB), f"rollout.kv_memory_gib (auto: {CPU_GIB})"
    left = max(free - reserved_bytes, 0)
    reserved = f" less the update's {reserved_bytes / GIB:.2f}" if reserved_bytes else ""
    return int(share * left), f"rollout.kv_memory_share ({share} of {free / GIB:.2f} GiB{reserved})"


def choose_num_pages(
    num_bytes: int, *, page_bytes: int, page_size: int, slots: int, max_sequence_tokens: int, source: str
) -> int:
    """Pages for all slots at full length (and one more each, for prompts), as far as `num_bytes` go.

    Raises:
        ValueError: That memory does not hold one sequence; `source` names the options.
    """
    of_one = -(-max_sequence_tokens // page_size)
    affordable = num_bytes // page_bytes
    if affordable < of_one:
        raise ValueError(
            f"{source} holds {affordable} pages, but one sequence of {max_sequence_tokens} tokens needs {of_one}: at "
            f"least {of_one * page_bytes / GIB:.3g} GiB. Raise it, or lower rollout.max_new_tokens"
        )
    return min(affordable, slots * (of_one + 1))


def choose_slots(num_bytes: int, *, page_bytes: int, page_size: int, max_sequence_tokens: int, num_samples: int) -> int:
    """Slots for which `num_bytes` of pages hold sequences of the expected length; at most `num_samples`."""
    expected_pages = math.ceil(EXPECTED_SHARE * max_sequence_tokens / page_size)
    return max(1, min(num_samples, MAX_AUTO_SLOTS, num_bytes // (expected_pages * page_bytes)))


def allocate_or_fewer(allocate: Callable[[int], None], num_pages: int, *, fewest: int, page_bytes: int) -> int:
    """Allocate `num_pages`, or fewer where memory runs out, with a warning; returns how many.

    Args:
        allocate: Allocates this number of pages, or raises `torch.OutOfMemoryError` and holds nothing.
        num_pages: Pages wanted.
        fewest: Pages of one sequence of full length.
        page_bytes: Memory of one.

    Raises:
        ValueError: Not even `fewest` pages can be had.
    """
    fewest = min(fewest, num_pages)
    wanted = num_pages
    while True:
        try:
            allocate(num_pages)
        except torch.OutOfMemoryError as error:
            if num_pages == fewest:
                raise ValueError(
                    f"the KV cache needs at least {fewest * page_bytes / GIB:.2f} GiB, for one sequence of full "
                    "length, and the device has not as much left: lower rollout.max_new_tokens, "
                    "rollout.max_prompt_tokens or train.micro_batch_tokens, or free the device of other programs"
                ) from error
            num_pages = max(fewest, int(FEWER * num_pages))
        else:
            break
    if num_pages < wanted:
        warnings.warn(
            f"the KV cache got {num_pages} pages ({num_pages * page_bytes / GIB:.2f} GiB) where {wanted} "
            f"({wanted * page_bytes / GIB:.2f} GiB) were wanted, for the device's memory ran out. Tokens are the same; "
            "if samples are preempted (engine/preemptions), time is lost. Lower rollout.kv_memory_share (or "
            "rollout.kv_memory_gib) to be sure of what you get",
            stacklevel=2,
        )
    return num_pages
