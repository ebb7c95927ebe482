"""How many pages the KV cache gets: arithmetic of bytes, and what happens when memory is short."""

import warnings

import pytest
import torch

from srtrl.engine.kv_memory import FEWER, GIB, allocate_or_fewer, choose_num_pages, free_bytes, kv_bytes

PAGE = GIB // 64


def test_memory_is_as_given_or_a_share_of_what_is_free_after_what_the_update_takes() -> None:
    for free in (80 * GIB, None):
        assert kv_bytes(2.5, free, share=0.5, reserved_bytes=GIB)[0] == int(2.5 * GIB)
    assert kv_bytes("auto", free_bytes(torch.device("cpu")), share=0.5, reserved_bytes=0)[0] == 4 * GIB
    assert kv_bytes("auto", 80 * GIB, share=0.5, reserved_bytes=0)[0] == 40 * GIB
    assert kv_bytes("auto", 80 * GIB, share=0.75, reserved_bytes=20 * GIB) == (
        45 * GIB,
        "rollout.kv_memory_share (0.75 of 80.00 GiB less the update's 20.00)",
    )
    assert kv_bytes("auto", GIB, share=0.75, reserved_bytes=20 * GIB)[0] == 0


def pages(num_bytes: int, slots: int = 4) -> int:
    return choose_num_pages(
        num_bytes, page_bytes=PAGE, page_size=16, slots=slots, max_sequence_tokens=100, source="the memory"
    )


def test_pages_are_as_many_as_are_of_use_or_as_fit() -> None:
    assert pages(GIB) == 4 * 8  # 7 pages a sequence and one more
    assert pages(20 * PAGE + 1) == 20
    assert pages(7 * PAGE) == 7
    with pytest.raises(
        ValueError, match=r"the memory holds 6 pages, but one sequence of 100 tokens needs 7: .* 0.109 GiB"
    ):
        pages(7 * PAGE - 1)


class Device:
    """Has memory for a number of pages."""

    def __init__(self, num_pages: int) -> None:
        self.room = num_pages
        self.asked: list[int] = []

    def allocate(self, num_pages: int) -> None:
        self.asked.append(num_pages)
        if num_pages > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("room", [999, 500, 11, 10])
def test_short_memory_gives_fewer_pages_and_says_so(room: int) -> None:
    device = Device(room)
    with pytest.warns(UserWarning, match=r"where 1000 \(15.62 GiB\) were wanted.*rollout.kv_memory_share"):
        found = allocate_or_fewer(device.allocate, 1000, fewest=10, page_bytes=PAGE)
    assert max(10, int(FEWER * room)) - 1 <= found <= room
    assert device.asked[-1] == found
    assert len(device.asked) < 40


def test_enough_memory_gives_what_was_asked_for_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert allocate_or_fewer(Device(1000).allocate, 1000, fewest=10, page_bytes=PAGE) == 1000


def test_memory_for_less_than_one_sequence_says_how_much_is_needed() -> None:
    device = Device(9)
    with pytest.raises(ValueError, match=r"at least 0.16 GiB, for one sequence .* lower rollout.max_new_tokens"):
        allocate_or_fewer(device.allocate, 1000, fewest=10, page_bytes=PAGE)
    assert device.asked[-1] == 10


def test_other_errors_are_not_taken_for_short_memory() -> None:
    def broken(num_pages: int) -> None:
        raise RuntimeError(f"an illegal memory access, {num_pages}")

    with pytest.raises(RuntimeError, match="illegal"):
        allocate_or_fewer(broken, 1000, fewest=10, page_bytes=PAGE)
