"""The processes of a run, one for each device: which one this is, and what they tell each other.

`torchrun` or `accelerate launch` starts them. With one process nothing here does anything, and torch.distributed is not
even imported. Every wait has a time limit and says what it waited for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

TIMEOUT_VARIABLE = "SRTRL_RANK_TIMEOUT"
"""Environment variable: seconds that a rank waits for the others, by default half an hour."""

FAILURES = (ValueError, RuntimeError, OSError)
"""Errors of one rank that it tells the others; by any other one its process ends, which they notice."""
GLOO_WORDS = ("gloo", "pair closure")
"""One of them is in the message of each error of gloo, which has no class of errors."""

TOLD_HERE = "this rank is the first with this message"
TOLD_BY_OTHER = "another rank was the first with this message"
"""Notes of errors. Those from before the ranks begin to connect have none: all ranks raise them."""


class RankError(RuntimeError):
    """Another rank has ended, or did not come in time."""


@dataclass(slots=True)
class Ranks:
    """One process of `count`."""

    index: int = 0
    count: int = 1
    store: Store | None = None
    """Counters that all ranks share, without a collective; None where there is one rank."""
    timeout_seconds: float = 1800.0
    _local: dict[str, int] = field(default_factory=dict)
    _num_scopes: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this one writes the files and talks to the user."""
        return self.index == 0

    def gather(self, value: T, what: str) -> list[T]:
        """The values of all ranks, in their order, on each of them; `what` names it in an error."""
        if self.count == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.count
        with self.waiting(what):
            dist.all_gather_object(values, value)
        return values

    def join(self, values: Mapping[int, T], what: str) -> list[T]:
        """The values of all ranks, each rank's of other numbers, in the order of the numbers, on each of them."""
        joined = {number: value for part in self.gather(dict(values), what) for number, value in part.items()}
        return [joined[number] for number in sorted(joined)]

    @contextmanager
    def together(self, what: str) -> Iterator[list[Any]]:
        """Work that each rank does alone: an error of one is raised on all of them, so that none waits for it.

        Yields:
            A list: what a rank appends to it, all have there afterwards, in the order of the ranks.

        Raises:
            ValueError, RuntimeError, torch.OutOfMemoryError, OSError: as the first rank that failed, which the message
                names.
            RankError: at once, on the rank that has waited in vain: a second wait would be as long.
        """
        shared: list[Any] = []
        if self.count == 1:
            yield shared
            return
        cause: Exception | None = None
        failure: Exception | None = None
        try:
            yield shared
        except RankError:
            raise
        except FAILURES as error:
            import torch

            cause = error
            place = "" if self.is_main else f"rank {self.index} of {self.count}: "
            if isinstance(error, OSError) and error.strerror is not None:
                failure = OSError(error.errno, place + error.strerror, error.filename)
            else:  # not its own class: others must unpickle it
                kinds = (torch.OutOfMemoryError, ValueError, RuntimeError, OSError)
                failure = next(kind for kind in kinds if isinstance(error, kind))(f"{place}{error}")
        found = self.gather((failure, shared), what)
        for agreed, _ in found:
            if agreed is not None:
                raise agreed from cause
        shared[:] = chain.from_iterable(values for _, values in found)

    def on_main(self, function: Callable[[], T], what: str) -> T:
        """What `function` gives on rank 0, on all ranks; an error of it is raised on all of them."""
        with self.together(what) as shared:
            if self.is_main:
                shared.append(function())
        return cast(T, shared[0])

    def sum(self, tensors: Sequence[Tensor], what: str) -> None:
        """Replace tensors, of the same shapes on all ranks, by their sums over the ranks."""
        if self.count == 1:
            return
        import torch.distributed as dist

        for tensor in tensors:
            with self.waiting(what):
                dist.all_reduce(tensor)

    def add(self, counter: str, amount: int = 1) -> int:
        """Add to a counter that all ranks share; returns its value before that. Takes no collective."""
        if self.store is None:
            before = self._local.get(counter, 0)
            self._local[counter] = before + amount
            return before
        with self.waiting(f"the counter {counter}"):
            return int(self.store.add(counter, amount)) - amount

    def new_scope(self, what: str) -> str:
        """What the names of counters begin with, never the same twice; all ranks ask for it in the same order."""
        self._num_scopes += 1
        return f"{what} {self._num_scopes}"

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Turn an error of a wait into one that says who waited for what; this rank's own errors stay as they are.

        Raises:
            RankError: see there.
        """
        try:
            yield
        except RuntimeError as error:
            from torch.distributed import DistError

            if not isinstance(error, DistError) and not any(word in str(error) for word in GLOO_WORDS):
                raise
            raise RankError(
                f"rank {self.index} of {self.count} waited for {what}: another rank has ended, or took more than "
                f"{self.timeout_seconds:g} seconds ({TIMEOUT_VARIABLE}); its own message says why ({str(error)[:200]})"
            ) from error


ONE_RANK = Ranks()


@contextmanager
def open_ranks() -> Iterator[Ranks]:
    """The ranks that the launcher has started; for the time of the `with` block they are connected.

    Raises:
        ValueError: the launcher's environment variables are no numbers.
        RankError: the others did not come.
    """
    count = _number("WORLD_SIZE", 1)
    if count == 1:
        yield Ranks()
        return
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(
            f"WORLD_SIZE is {count}, but {missing[0]} is not set: start several processes with `torchrun` or "
            "`accelerate launch`, or unset WORLD_SIZE"
        )
    seconds = _number(TIMEOUT_VARIABLE, 1800)
    ranks = Ranks(index=_number("RANK", 0), count=count, timeout_seconds=seconds)
    backend = "gloo"
    try:
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(_number("LOCAL_RANK", 0))
        with ranks.waiting("the other ranks to start"):
            dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
        ranks.store = c10d.PrefixStore("srtrl", c10d._get_default_store())
        yield ranks
    except BaseException as error:
        num_told = 0
        with suppress(RankError):  # the process that counts has ended
            num_told = ranks.add(ascii(f"{type(error).__name__}: {error}"))
        error.add_note(TOLD_BY_OTHER if num_told else TOLD_HERE)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def refuse_ranks(command: str) -> None:
    """Raise ValueError where a launcher has started several processes of a command that is for one."""
    if _number("WORLD_SIZE", 1) > 1:
        raise ValueError(f"{command} is for one process: start it without `torchrun` and `accelerate launch`")


def is_main_process() -> bool:
    """Whether this process is the one that talks to the user."""
    return os.environ.get("RANK", "0") == "0"


def is_told_here(error: BaseException) -> bool:
    """Whether this process tells the user of an error: of those that have the same, the first does."""
    notes = getattr(error, "__notes__", ())
    return TOLD_HERE in notes or (is_main_process() and TOLD_BY_OTHER not in notes)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal() or (variable == "WORLD_SIZE" and int(text) < 1):
        raise ValueError(f"the environment variable {variable} must be a whole number, found {text!r}")
    return int(text)
