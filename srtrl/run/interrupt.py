"""How a run ends early and can be resumed: signals, advice after an error. Beside them, the garbage collector."""

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch

from srtrl.run.checkpoint import CRITIC_FOLDER, latest_checkpoint


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Let the garbage collector look through none of the objects that are there by now.

    Importing torch and its like leaves half a million of them, and looking through all takes 0.2 to 0.5 seconds, now
    and then, in the middle of a rollout. What comes later is collected as ever, and at the end all is as before.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Interrupt:
    """Ctrl-C and SIGTERM: the first asks the run to end after the running step, the second ends it at once.

    Signals are caught while it is entered, in the main thread (elsewhere they are not ours to catch).
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
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
        if self.requested:
            raise KeyboardInterrupt(f"second {name}")
        self.requested = True
        self._say(
            f"{name}: finishing what is under way, then writing a checkpoint (after a step); once more stops at once"
        )


def how_to_resume(checkpoints: Path, error: Exception) -> str:
    """Which checkpoint is the last and what can be done with it after `error`."""
    checkpoint = latest_checkpoint(checkpoints)
    if checkpoint is None:
        return "There is no checkpoint yet. Change the recipe and start again with --overwrite"
    new_run = f"a run of another name with model.path={checkpoint}"
    if (checkpoint / CRITIC_FOLDER).is_dir():
        new_run += " (its critic begins anew)"
    if isinstance(error, UpdateMemoryError):
        advice = (
            "continues from it, on CUDA with other values of these options too; rollout.max_new_tokens and model.dtype "
            f"alone need {new_run}"
        )
    else:
        advice = (
            "would continue from it with the same numbers and stop at the same place; to continue in another way, "
            f"add --change train.learning_rate=LOWER, or start {new_run}"
        )
    return f"The last checkpoint is intact: {checkpoint}. --resume {advice}"


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
            "rollout.kv_memory_share, rollout.max_new_tokens, model.dtype=bfloat16"
        ) from error
