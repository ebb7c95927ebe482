"""Which attention serves decode steps of one row a sequence: what `rollout.attention` says, or what was measured.

With `auto` every library that is at hand is tried and timed when an engine starts (`attention_probe.py`), and serves
the sizes at which it was faster than our kernel at every length by `MARGIN`.
"""

import functools
import logging

import torch

from srtrl.engine.attention_probe import CudaStopwatch, HostStopwatch, Probe, probe_backends
from srtrl.engine.buckets import MAX_GRAPH_ROWS, BucketPlanner
from srtrl.engine.graphs import was_out_of_memory
from srtrl.engine.options import AttentionOption
from srtrl.model.attention_backends import NAMES, OURS, BackendChoice, PlainAttention, find_backends

logger = logging.getLogger(__name__)

SIZES = ((1, 4), (15, 32), (60, 128), (250, MAX_GRAPH_ROWS))
"""(sequences that are timed, most rows of a step for which that decides). All but the first are padded by some rows."""

LENGTHS = (512, 4096)
"""Most keys of a sequence in the steps that are timed; the others have half as many or more."""

MARGIN = 0.05
"""A backend must take less of our kernel's time than all but this share."""


def choose_by_time(probe: Probe) -> BackendChoice:
    """For each size the backend that was faster than our kernel at every length, by `MARGIN`; of two the faster."""
    classes: list[tuple[int, PlainAttention | None]] = []
    for num_sequences, most_rows in SIZES:
        timings = [timing for timing in probe.timings if timing.num_sequences == num_sequences]
        worst = {name: max(timing.ratio(name) for timing in timings) for name in probe.usable}
        fastest = min(worst, key=worst.__getitem__, default=None)
        is_taken = fastest is not None and worst[fastest] <= 1 - MARGIN
        classes.append((most_rows, probe.usable[fastest] if fastest is not None and is_taken else None))
    return BackendChoice(classes=tuple(classes))


def choose_backends(
    option: AttentionOption, planner: BucketPlanner, *, dtype: torch.dtype, device: torch.device
) -> tuple[BackendChoice, str | None]:
    """What attends in plain steps, and that in a sentence, where there was a choice.

    Args:
        option: `rollout.attention`. One that names a library means it for all plain steps of up to
            `MAX_GRAPH_ROWS` rows, fast or not.
        planner: Of the engine.
        dtype: Of the decoder's weights.
        device: Where it decodes.

    Raises:
        ValueError: The option names a library that cannot attend here.
    """
    if option == "triton":
        return BackendChoice(), None
    if planner.deterministic:
        if option == "auto":
            return BackendChoice(), None
        raise ValueError(
            f"rollout.attention: {option} has other bits than the kernel that verifies drafts, and with "
            "rollout.deterministic: true there may be no such difference: set rollout.attention to auto or triton, or "
            "rollout.deterministic to false"
        )
    names = NAMES if option == "auto" else (option,)
    try:
        probe = probe_device(planner, names, dtype, device)
    except RuntimeError as error:
        if not was_out_of_memory(error):
            raise
        reason = "the device had not the memory to try it"
        probe = Probe(usable={}, reasons=dict.fromkeys(names, reason), timings=())
    if option == "auto":
        choice = choose_by_time(probe)
    elif option in probe.reasons:
        raise ValueError(
            f"rollout.attention: {option} cannot attend here: {probe.reasons[option]}. Set it to auto, which takes "
            "what runs and is fastest, or to triton. (flash needs `pip install srtrl[flash]`; FlashAttention 2 takes "
            "no rollout.page_size but multiples of 256, and all of them want weights in bfloat16)"
        )
    else:
        choice = BackendChoice(classes=((MAX_GRAPH_ROWS, probe.usable[option]),))
    note = describe(choice, probe)
    tell(note)
    return choice, note


@functools.cache
def probe_device(planner: BucketPlanner, names: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> Probe:
    """`probe_backends` at the sizes of a rollout; once for all engines of one kind."""
    found = find_backends(names, device=device, dtype=dtype, head_dim=planner.head_dim, most_rows=MAX_GRAPH_ROWS)
    if all(isinstance(backend, str) for backend in found.values()):
        reasons = {name: reason for name, reason in found.items() if isinstance(reason, str)}
        return Probe(usable={}, reasons=reasons, timings=())
    probe = probe_backends(
        planner,
        found,
        dtype=dtype,
        device=device,
        watch=CudaStopwatch(device) if device.type == "cuda" else HostStopwatch(),
        sizes=[num_sequences for num_sequences, _ in SIZES],
        lengths=[most_keys for most_keys in LENGTHS if most_keys <= planner.max_positions] or [planner.max_positions],
    )
    torch.cuda.empty_cache()  # the pages will want the memory in one piece
    return probe


def describe(choice: BackendChoice, probe: Probe) -> str:
    """One sentence: what attends in plain steps, what the libraries' time was, and what was against them."""
    served = [(OURS if backend is None else backend.name, most_rows) for most_rows, backend in choice.classes]
    merged = dict.fromkeys(name for name, _ in served)
    if len(merged) > 1:
        who = ", ".join(f"{name} up to {most_rows} rows" for name, most_rows in served)
    else:
        who = next(iter(merged), OURS)
    parts = [f"decode steps without drafts attend by {who}"]
    for name in probe.usable:
        ratios = [timing.ratio(name) for timing in probe.timings]
        parts.append(f"{name} took {min(ratios):.2f} to {max(ratios):.2f} of the time of {OURS}")
    parts += [f"{name} cannot: {reason}" for name, reason in probe.reasons.items()]
    return "; ".join(parts)


@functools.cache
def tell(note: str) -> None:
    """Log it, once."""
    logger.info(note)
