"""The processes of a run, one for each device: the index of this one, and the exchange of values and errors.

`torchrun` or `accelerate launch` starts them. Like torch.distributed this is one for the whole process: `open_ranks`
connects them when a run starts. With one process nothing here does anything, and torch.distributed is not even
imported. Every wait has a time limit and says what it waited for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

BUCKET_BYTES = 64 * 2**20
"""Approximate size of the tensors that are summed in one message."""
TIMEOUT_VARIABLE = "SRTRL_RANK_TIMEOUT"
"""Environment variable: seconds that a rank waits for the others, by default half an hour."""

FAILURES = (ValueError, RuntimeError, OSError, FloatingPointError)
"""Errors that a rank reports to the others; any other error ends its process, which they notice."""
GLOO_WORDS = ("gloo", "pair closure")
"""One of them is in the message of each error of gloo, which has no class of errors."""

TIMEOUT_WORDS = ("timed out", "timeout")
"""One of them is in the message of an error of a wait that took too long; in others a connection was lost."""

FIRST_REPORTER = "this rank reports this error"
REPORTED_BY_OTHER = "another rank reports this error"
"""Notes of errors. Those from before the ranks begin to connect have none: all ranks raise them."""


class RankError(RuntimeError):
    """Another rank has failed, has ended, or did not come in time."""


@dataclass(slots=True)
class _Process:
    index: int
    count: int
    store: Store | None
    timeout_seconds: float
    num_scopes: int = 0


_processes = [_Process(0, 1, None, 1800.0)]
"""The last one is this process, as everything here sees it."""


@contextmanager
def use(index: int = 0, count: int = 1, store: Store | None = None, timeout_seconds: float = 1800.0) -> Iterator[None]:
    """Inside the `with` block this process is number `index` of `count`.

    Args:
        index: Its number, from 0 on.
        count: Number of processes.
        store: Has the counters that all share.
        timeout_seconds: How long it waits for the others.
    """
    _processes.append(_Process(index, count, store, timeout_seconds))
    try:
        yield
    finally:
        _processes.pop()


def index() -> int:
    """The number of this process, from 0 on."""
    return _processes[-1].index


def count() -> int:
    """Number of processes."""
    return _processes[-1].count


def timeout_seconds() -> float:
    """How long this process waits for the others."""
    return _processes[-1].timeout_seconds


def is_main() -> bool:
    """Whether this one writes the files and talks to the user."""
    return index() == 0


def gather(value: T, what: str) -> list[T]:
    """The values of all ranks, in their order, on each of them; `what` names it in an error."""
    if count() == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * count()
    with waiting(what):
        dist.all_gather_object(values, value)
    return values


def join(values: Mapping[int, T], what: str) -> list[T]:
    """The values of all ranks, each rank's of other numbers, in the order of the numbers, on each of them."""
    joined = {number: value for part in gather(dict(values), what) for number, value in part.items()}
    return [joined[number] for number in sorted(joined)]


@contextmanager
def synchronized(what: str) -> Iterator[None]:
    """Work that each rank does alone: an error of one rank ends all of them, so that none waits for it.

    Raises:
        ValueError, RuntimeError, OSError, FloatingPointError: on the first rank that failed, its own error.
        RankError: on the other ranks, with the message of that one; at once if this rank has waited in vain.
    """
    if count() == 1:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except FAILURES as error:
        if isinstance(error, RankError) or FIRST_REPORTER in notes_of(error):
            raise  # all ranks end already: from an inner `synchronized`
        failure = error
    for rank, message in enumerate(gather(failure and str(failure), what)):
        if message is None:
            continue
        if rank == index() and failure is not None:
            failure.add_note(FIRST_REPORTER)
            raise failure
        reported = RankError(f"rank {rank} of {count()}: {message}")
        reported.add_note(REPORTED_BY_OTHER)
        raise reported from failure


def on_main(function: Callable[[], T], what: str) -> T:
    """The result of `function` on rank 0, on all ranks; an error of it ends all of them."""
    with synchronized(what):
        result = function() if is_main() else None
    return cast(T, gather(result, what)[0])


def sum(tensors: Sequence[Tensor], what: str) -> None:
    """Replace tensors, of the same shapes on all ranks, by their sums over the ranks, many in one message."""
    if count() == 1:
        return
    import torch
    import torch.distributed as dist

    buckets: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    sums = accumulate(tensor.nbytes for tensor in tensors)
    for tensor, total in zip(tensors, sums, strict=True):
        buckets.setdefault((tensor.dtype, total // BUCKET_BYTES), []).append(tensor)
    for bucket in buckets.values():
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        with waiting(what):
            dist.all_reduce(flat)
        for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def add(counter: str, amount: int = 1) -> int:
    """Add to a counter that several ranks share; returns its value before that. Takes no collective."""
    store = _processes[-1].store
    assert store is not None, "one rank has no counters"
    with waiting(f"the counter {counter}"):
        return int(store.add(counter, amount)) - amount


def new_scope(what: str) -> str:
    """Prefix of the names of counters, never the same twice; all ranks ask for it in the same order."""
    _processes[-1].num_scopes += 1
    return f"{what} {_processes[-1].num_scopes}"


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Raise an error of a wait as `RankError`, which names `what`; this rank's own errors stay as they are.

    Raises:
        RankError: see there.
    """
    try:
        yield
    except RuntimeError as error:
        from torch.distributed import DistError

        if not isinstance(error, DistError) and not any(word in str(error) for word in GLOO_WORDS):
            raise
        is_late = any(word in str(error).lower() for word in TIMEOUT_WORDS)
        reason = f"took more than {timeout_seconds():g} seconds ({TIMEOUT_VARIABLE})" if is_late else "has ended"
        raise RankError(
            f"rank {index()} of {count()} waited for the others ({what}): another rank {reason}; see its own message"
        ) from error


@contextmanager
def open_ranks() -> Iterator[None]:
    """Inside the `with` block the processes that the launcher has started, if it has, are connected.

    Raises:
        ValueError: the launcher's environment variables are no numbers.
        RankError: the others did not come.
    """
    num_ranks = _number("WORLD_SIZE", 1)
    if num_ranks == 1:
        yield
        return
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(
            f"WORLD_SIZE is {num_ranks}, but {missing[0]} is not set: start several processes with `torchrun` or "
            "`accelerate launch`, or unset WORLD_SIZE"
        )
    seconds = _number(TIMEOUT_VARIABLE, 1800)
    with use(_number("RANK", 0), num_ranks, timeout_seconds=seconds):
        try:
            backend, device = "gloo", None
            if torch.cuda.is_available():
                backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", _number("LOCAL_RANK", 0))
                torch.cuda.set_device(device)
            with waiting("start"):  # with a device NCCL connects now, and what it lacks is seen here
                dist.init_process_group(backend, timeout=timedelta(seconds=seconds), device_id=device)
            _processes[-1].store = c10d.PrefixStore("srtrl", c10d._get_default_store())
            yield
        except BaseException as error:
            note_reporter(error)
            if dist.is_initialized():
                c10d._abort_process_group()  # `destroy_process_group` would wait for ranks that wait for this one
            raise
        dist.destroy_process_group()


def note_reporter(error: BaseException) -> None:
    """Note in an error whether this rank reports it: the first one of those that have it."""
    if not notes_of(error) & {FIRST_REPORTER, REPORTED_BY_OTHER}:
        num_reports = 0
        if _processes[-1].store is not None:
            with suppress(RankError):  # the process that counts has ended
                num_reports = add(ascii(f"{type(error).__name__}: {error}"))
        error.add_note(REPORTED_BY_OTHER if num_reports else FIRST_REPORTER)


def refuse_ranks(command: str) -> None:
    """Raise ValueError if a launcher has started several processes of a command that is for one."""
    if _number("WORLD_SIZE", 1) > 1:
        raise ValueError(f"{command} is for one process: start it without `torchrun` and `accelerate launch`")


def is_main_process() -> bool:
    """Whether this process is the one that talks to the user."""
    return os.environ.get("RANK", "0") == "0"


def interrupt_exit_code() -> int:
    """Exit code of an interrupted command: 130 as in a shell, 0 for a rank, which a launcher could start again."""
    return 0 if "WORLD_SIZE" in os.environ else 130


def should_report(error: BaseException) -> bool:
    """Whether this process prints an error: the first rank does of those that have the same."""
    notes = notes_of(error)
    return FIRST_REPORTER in notes or (is_main_process() and REPORTED_BY_OTHER not in notes)


def notes_of(error: BaseException) -> set[str]:
    """The notes that were added to an error."""
    return set(getattr(error, "__notes__", ()))


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal() or (variable == "WORLD_SIZE" and int(text) < 1):
        raise ValueError(f"the environment variable {variable} must be a whole number, found {text!r}")
    return int(text)
