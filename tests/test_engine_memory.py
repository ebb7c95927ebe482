"""The number of pages of the KV cache: arithmetic of bytes, and one error where the device has too few."""

from functools import partial

import pytest
import torch
from engine_cases import options, tiny_policy

from srtrl.engine import kv_memory
from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.engine import Engine
from srtrl.engine.kv_memory import GIB, choose_num_pages, free_bytes, kv_bytes

PAGE = GIB // 64


def test_memory_is_as_given_or_a_share_of_what_is_free_after_what_the_update_takes() -> None:
    for free in (80 * GIB, None):
        assert kv_bytes(2.5, free, reserved_bytes=GIB) == int(2.5 * GIB)
    assert kv_bytes("auto", free_bytes(torch.device("cpu")), reserved_bytes=0) == 4 * GIB
    for reserved, expected in ((0, 40), (20, 30), (100, 0)):
        assert kv_bytes("auto", 80 * GIB, reserved_bytes=reserved * GIB) == expected * GIB


def test_pages_are_as_many_as_are_of_use_or_as_fit() -> None:
    pages = partial(choose_num_pages, page_bytes=PAGE, page_size=16, slots=4, max_sequence_tokens=100)
    assert pages(GIB) == 4 * 8  # 7 pages a sequence and one more
    assert pages(20 * PAGE + 1) == 20
    assert pages(7 * PAGE) == 7
    with pytest.raises(ValueError, match=r"hold 6 pages, but one sequence of 100 tokens needs 7, 0.109 GiB: allow it"):
        pages(7 * PAGE - 1)


def test_a_full_device_says_what_would_lower_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "free_bytes", lambda _: 5 * GIB)
    with pytest.raises(ValueError, match=r"0 GiB hold 0 .*5.0 GiB of the device are free, .* 6.0\. `srtrl show-config"):
        Engine(tiny_policy(), options(num_pages=None, kv_memory_gib="auto", kv_reserved_bytes=6 * GIB))


def test_a_device_without_the_memory_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(runner: CpuRunner, num_pages: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CpuRunner, "allocate_pages", fail)
    with pytest.raises(ValueError, match=r"is to have 0.00 GiB, and the device has not as much.*rollout.kv_memory_gib"):
        Engine(tiny_policy(), options(num_pages=3))
