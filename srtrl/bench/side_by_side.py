"""Several training steps at once, one of them at work at a time: their rollouts take turns, their updates follow."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from srtrl.engine.engine import Engine

SLICE_TOKENS = 256
"""A rollout goes on until it is so many tokens ahead: a smaller lead cancels more of what slows the machine down for a
moment, and each change of turns finds the processor's caches full of another rollout."""


class Turns:
    """Lets one of several threads work at a time.

    While they decode, who has the fewest tokens works, so that all are at the same place of the same rollout: what
    slows the machine down for a second slows the same share of each. Who has ended its rollout waits for the others.
    """

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._num_tokens = [0] * count
        self._is_decoding = [True] * count
        self._is_over = [False] * count
        self._at_work = 0
        self.waited = [0.0] * count
        """Seconds of each thread's rollout in which others were at work."""

    def begin(self, index: int) -> None:
        """Wait for the first turn; called first of all by each thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._at_work == index)

    def after_decode_step(self, index: int, *, num_tokens: int, is_done: bool) -> None:
        """Let others work, if it is their turn, and wait for the next one.

        Args:
            index: Who calls.
            num_tokens: What its rollout has generated so far.
            is_done: Whether that was its last decode step.
        """
        started = time.perf_counter()
        with self._changed:
            self._num_tokens[index] = num_tokens
            self._is_decoding[index] = not is_done
            self._pass_on(index)
            self._changed.wait_for(lambda: self._at_work == index)
        self.waited[index] += time.perf_counter() - started

    def end(self, index: int) -> None:
        """The thread's work is over."""
        with self._changed:
            self._is_decoding[index], self._is_over[index] = False, True
            self._pass_on(index)

    def _pass_on(self, index: int) -> None:
        decoding = [other for other, is_decoding in enumerate(self._is_decoding) if is_decoding]
        if decoding:
            behind = min(decoding, key=lambda other: self._num_tokens[other])
            lead = self._num_tokens[index] - self._num_tokens[behind]
            if index not in decoding or lead >= SLICE_TOKENS:
                self._at_work = behind
        elif self._is_over[index]:
            self._at_work = next((other for other, is_over in enumerate(self._is_over) if not is_over), index)
        self._changed.notify_all()


def side_by_side(
    engines: Sequence[Engine], works: Sequence[Callable[[], Any]], *, set_threads: Callable[[], None]
) -> list[float]:
    """Do all works, each of which decodes one rollout with its engine and then does something else.

    Args:
        engines: One a work.
        works: Called in threads of their own, of which one runs at a time; the first of them begins.
        set_threads: Called in each thread: what torch and Numba use is said thread by thread.

    Returns:
        The seconds that each rollout had to wait for the others, which are in any time that a work takes itself.
    """
    turns = Turns(len(works))

    def run(index: int) -> None:
        turns.begin(index)
        try:
            set_threads()
            works[index]()
        finally:
            turns.end(index)

    def passer(index: int, engine: Engine) -> Callable[[], None]:
        return lambda: turns.after_decode_step(index, num_tokens=engine.stats.num_tokens, is_done=not engine.has_work)

    for index, engine in enumerate(engines):
        engine.after_step = passer(index, engine)
    try:
        with ThreadPoolExecutor(len(works)) as pool:
            futures = [pool.submit(run, index) for index in range(len(works))]
        for future in futures:
            future.result()
    finally:
        for engine in engines:
            engine.after_step = None
    return turns.waited
