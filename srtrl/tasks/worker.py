"""A process that grades one sample at a time and dies if the sample takes too long.

The limit is CPU time, kept by the kernel: `ITIMER_PROF` ends the process wherever it is, in C code too, and a loaded
machine does not turn a right answer into a timeout.

This module is what a worker imports, and it must stay light: nothing here may import torch.
"""

import json
import os
import pickle
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Real
from pathlib import Path
from typing import IO, Any, Literal

from srtrl.resolve import Caught, describe_error
from srtrl.tasks.final_answer import as_judged
from srtrl.tasks.reward_input import RewardInput

MEMORY_LIMIT_BYTES = 4 * 1024**3
"""Maximum memory of a worker, so that one sample cannot take all of the machine's."""
MEMORY_EXIT_CODE = 70
"""Exit code of a worker in which a sample exhausted the memory."""
READY = "ready"
"""Message of a worker that waits for a sample."""
TOKEN_TEXTS = "token texts"
"""Message of a worker whose reward reads `RewardInput.token_texts`: the next thing that it reads is their pickle."""
RewardValue = float | list[float]
"""One number, or one for each sampled token."""
MAX_REWARD = 1e15
"""Maximum of the absolute value: sums and squares of such numbers, with weights, are finite."""
TIMER_RESOLUTION = 1e-3
"""Smallest CPU limit, in seconds: zero microseconds would mean none."""


@dataclass(kw_only=True, slots=True, frozen=True)
class IsolatedFunctions:
    """The functions that a worker runs on each sample."""

    verifier: Callable[[str, str], bool] | None
    """None if the verifier runs in the training process; then `RewardInput.correct` is already filled in."""
    rewards: tuple[tuple[str, Callable[[RewardInput], RewardValue]], ...]

    @property
    def modules(self) -> list[str]:
        """Names of the modules that a worker imports for them."""
        functions = [*([self.verifier] if self.verifier is not None else []), *(reward for _, reward in self.rewards)]
        return sorted({getattr(function, "func", function).__module__ for function in functions})  # of a `partial`


@dataclass(kw_only=True, slots=True, frozen=True)
class Graded:
    """The verdict and the rewards of one sample."""

    correct: bool | None
    parts: dict[str, RewardValue] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True, frozen=True)
class Failure:
    """Why a sample could not be graded."""

    outcome: Literal["timeout", "crash", "error"]
    """As in `Grade.outcome`."""
    detail: str


def check_reward(name: str, value: object) -> float:
    """The value of a reward as a float; ValueError if it is no finite number, or one beyond `MAX_REWARD`."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # of NumPy or torch
        value = value.item()
    with suppress(OverflowError):  # of an integer beyond the range of floats
        if isinstance(value, Real) and abs(number := float(value)) <= MAX_REWARD:
            return number
    hint = " (0.0 where it does not apply)" if value is None else ""
    limit = f" (the limit is {MAX_REWARD:g} either way)" if isinstance(value, Real) else ""
    raise ValueError(f"reward `{name}` must return a finite number{hint}, it returned {value!r:.100}{limit}")


def check_rewards(name: str, value: Any, sample: RewardInput) -> RewardValue:
    """Value of a reward for a sample: a number, as in `check_reward`, or one for each sampled token.

    Raises:
        ValueError: it is neither; of a list, the message names the reward, the prompt, its length and the expected one.
    """
    if getattr(value, "ndim", None) == 1:  # of NumPy or torch
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return check_reward(name, value)
    if len(value) != sample.num_tokens:
        expected = f"one number, or one for each of the {sample.num_tokens} sampled tokens"
        where = f"of a sample of prompt `{sample.prompt.prompt_id}`"
        raise ValueError(f"reward `{name}` must return {expected} {where}; it returned {len(value)} numbers")
    where = f"of {len(value)} sampled tokens of a sample of prompt `{sample.prompt.prompt_id}`"
    return [
        float(number)
        if type(number) in (float, int) and abs(number) <= MAX_REWARD
        else check_reward(f"{name}` at index {index} {where}: `{name}`", number)
        for index, number in enumerate(value)
    ]


def serve() -> None:
    """Body of a worker process: grade what comes through the socket that is its stdin, until the other end is closed.

    First come, as a pickle, the `IsolatedFunctions` by label and the limit of CPU seconds. Then a request is a pickle
    of (number, label, sample), and a reply a line of JSON with that number: data, because the functions may run
    anything here.
    `READY` stands before each request, `TOKEN_TEXTS` at most once before a reply.

    The process leads a session of its own, which `Worker` kills as a whole: what a reward starts does not outlive it.
    """
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # for rewards that read their stdin
    requests = connection.makefile("rb")
    functions, cpu_seconds = pickle.load(requests)
    own_pid = os.getpid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the trainer finishes its step
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _limit_memory()
    with suppress(EOFError, OSError):  # the trainer closes its end, or is gone
        while True:
            _send(connection, READY)
            number, label, sample = pickle.load(requests)
            sample = replace(sample, texts_of=_texts_on_demand(connection, requests))
            signal.setitimer(signal.ITIMER_PROF, max(cpu_seconds, TIMER_RESOLUTION))
            reply = _grade(functions[label], sample)
            if os.getpid() != own_pid:  # a reward forked, and its child came back too: only one may answer
                os._exit(0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(connection, {"number": number} | reply)


def _send(connection: socket.socket, message: object) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _texts_on_demand(connection: socket.socket, requests: IO[bytes]) -> Callable[[RewardInput], list[str]]:
    """A `RewardInput.texts_of` that has the training process make the texts, which has the tokenizer."""

    @cache
    def receive() -> list[str]:
        _send(connection, TOKEN_TEXTS)
        return list(pickle.load(requests))

    return lambda _: receive()


def _limit_memory() -> None:
    """Lower the limits of data and of the address space (shared mappings are no data), unless they are lower."""
    mapped = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    for kind, limit in ((resource.RLIMIT_DATA, MEMORY_LIMIT_BYTES), (resource.RLIMIT_AS, mapped + MEMORY_LIMIT_BYTES)):
        _, hard_limit = resource.getrlimit(kind)
        if hard_limit == resource.RLIM_INFINITY or hard_limit > limit:
            resource.setrlimit(kind, (limit, hard_limit))


def _grade(functions: IsolatedFunctions, sample: RewardInput) -> dict[str, Any]:
    """The fields of a `Graded` or a `Failure`."""
    with Caught() as caught:
        if functions.verifier is not None:
            text = as_judged(sample.prompt, sample.text)
            sample = replace(sample, correct=bool(functions.verifier(text, sample.prompt.answer)))
        parts = {name: check_rewards(name, reward(sample), sample) for name, reward in functions.rewards}
        return {"correct": sample.correct, "parts": parts}
    assert caught.error is not None
    if isinstance(caught.error, MemoryError):
        os._exit(MEMORY_EXIT_CODE)  # what is left of this process cannot be relied upon
    return {"outcome": "error", "detail": describe_error(caught.error)}
