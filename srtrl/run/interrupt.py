"""How a run ends early: signals, and advice after an error. Also the garbage collector while it runs."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch

from srtrl.run.steps import latest_checkpoint


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection, until the end of the `with` block.

    Importing torch and other libraries leaves half a million objects, and a full collection takes 0.2 to 0.5 seconds,
    sometimes in the middle of a rollout. Later objects are collected as usual.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


REPEAT_SECONDS = 1.0
"""A signal within this time after the first one is the same one: launchers forward signals that ranks also get."""


class Interrupt:
    """Ctrl-C and SIGTERM: the first signal ends the run after the current step, a later one ends it at once.

    Signals are handled inside the `with` block, and in the main thread only.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._ignores_repeats = False
        self._say = say
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._ignores_repeats:
            return
        if self.requested:
            raise KeyboardInterrupt(f"second {name}")
        self.requested = True
        message = f"{name}: finishing this step, then writing a checkpoint; a second signal stops the run at once"
        if has_launcher := "TORCHELASTIC_RUN_ID" in os.environ:
            message += (
                ". If torchrun got the signal, it kills all ranks after 30 seconds; a longer --shutdown-timeout (or "
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT) leaves time for the checkpoint"
            )
        self._ignores_repeats = has_launcher
        self._say(message)
        if has_launcher:  # it repeats signals; no clock could tell: in a long computation a signal is handled late
            time.sleep(REPEAT_SECONDS)
            self._ignores_repeats = False


def how_to_resume(checkpoints: Path) -> str:
    """Advice after a run had to stop: the last checkpoint, and how to continue from it."""
    checkpoint = latest_checkpoint(checkpoints)
    if checkpoint is None:
        return "There is no checkpoint yet. Change the recipe and start again with --overwrite"
    return (
        f"The last checkpoint is intact: {checkpoint}. --resume alone would stop at the same place; continue from it "
        "with a changed option (--resume train.learning_rate=LOWER, or train.micro_batch_tokens=LOWER where memory is "
        f"short), or start a run of another name with model.path={checkpoint}"
    )


class UpdateMemoryError(RuntimeError):
    """The device has too little memory for a stage of a step; the message names options that lower it."""


@contextmanager
def explain_out_of_memory(where: str) -> Iterator[None]:
    """Raise torch's error inside the `with` block as `UpdateMemoryError`, which begins with `where` ("step 3, update").

    Memory runs out between optimizer steps only: the state of the optimizer is allocated when it is built, and a step
    works in place. So no weight is ever left half changed.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(" If reserved but unallocated")[0].strip()  # without hints for the allocator
        raise UpdateMemoryError(
            f"{where}: the device's memory is too small. {reason}\nNo weight was left half changed. Options that lower "
            "the memory of an update: train.micro_batch_tokens (the same gradient), model.gradient_checkpointing=true, "
            "rollout.kv_memory_gib, rollout.max_new_tokens, model.dtype=bfloat16, model.lora; "
            "`srtrl show-config RECIPE --check` computes the memory of a step"
        ) from error
