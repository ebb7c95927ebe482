"""Python's garbage collector, kept away from what lives as long as the process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def long_lived_objects_left_alone() -> Iterator[None]:
    """Let the collector look through none of the objects that are there by now.

    Importing torch and its like leaves half a million of them, and looking through all takes 0.2 to 0.5 seconds, now
    and then, in the middle of a rollout. What comes later is collected as ever, and at the end all is as before.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
