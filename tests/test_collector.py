"""The collector leaves alone what was there, and nothing else, for as long as it is told to."""

import gc
import weakref

import pytest

from srtrl.trainer.trainer import long_lived_objects_left_alone


class Node:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def test_what_was_there_is_left_alone_and_what_comes_is_collected() -> None:
    old = weakref.ref(Node())
    with long_lived_objects_left_alone():
        assert gc.get_freeze_count() > 1000
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None
        assert old() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


def test_an_error_ends_it_too() -> None:
    with pytest.raises(KeyError), long_lived_objects_left_alone():
        raise KeyError
    assert gc.get_freeze_count() == 0
