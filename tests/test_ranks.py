"""Exchange between ranks: gathered values, sums of tensors, counters, errors; one rank does nothing."""

import time
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rank_cases import FORKED, free_port, run_ranks
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

from srtrl import ranks
from srtrl.ranks import (
    FIRST_REPORTER,
    REPORTED_BY_OTHER,
    RankError,
    note_reporter,
    notes_of,
    open_ranks,
    should_report,
)

pytestmark = FORKED


def exchange() -> dict[str, Any]:
    """Values, sums, counters and errors between all ranks."""
    tensors = [torch.full((3,), 1.0 + ranks.index()), torch.full((2, 2), 10.0), torch.ones(1, dtype=torch.float64)]
    ranks.sum(tensors, "tensors")
    claimed = []
    while (number := ranks.add("next")) < 20:
        claimed.append(number)
        time.sleep(0.001)
    return {
        "identity": (ranks.index(), ranks.count()),
        "squares": ranks.gather(ranks.index() ** 2, "squares"),
        "sums": [float(tensor.sum()) for tensor in tensors],
        "claimed": claimed,
        "choice": ranks.on_main(lambda: f"from {ranks.index()}", "a choice"),
        "errors": [error_of(failing) for failing in range(2 if ranks.count() > 1 else 0)],
    }


def error_of(failing: int) -> str:
    """The error that this rank has if rank `failing` cannot work."""
    try:
        with ranks.synchronized("work"):
            if ranks.index() == failing:
                raise OSError(28, "No space left on device")
    except (OSError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@pytest.mark.parametrize("count", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_ranks_know_the_same_and_an_error_of_one_ends_all(count: int) -> None:
    with ranks.use(store=HashStore()):
        results = run_ranks(count, exchange) if count > 1 else [exchange()]
    full = "[Errno 28] No space left on device"
    for index, result in enumerate(results):
        assert result["identity"] == (index, count)
        assert result["squares"] == [rank**2 for rank in range(count)]
        assert result["sums"] == [3 * count * (count + 1) / 2, 40.0 * count, float(count)]
        assert result["choice"] == "from 0"
        for failing, error in enumerate(result["errors"]):
            expected = f"OSError: {full}" if failing == index else f"RankError: rank {failing} of {count}: {full}"
            assert error == expected
    assert sorted(number for result in results for number in result["claimed"]) == list(range(20))


def test_an_error_that_several_ranks_have_is_told_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for message, num_told in (("no file \udcff", 1), ("rank {} has no disk", 3)):
        store = HashStore()
        errors = [OSError(message.format(rank)) for rank in range(3)]
        for rank, error in enumerate(errors):
            with ranks.use(rank, 3, store):
                note_reporter(error)
        assert sum(FIRST_REPORTER in notes_of(error) for error in errors) == num_told
        assert sum(REPORTED_BY_OTHER in notes_of(error) for error in errors) == 3 - num_told
    plain, told, own = ValueError("not connected yet"), ValueError("by another"), ValueError("of this rank")
    told.add_note(REPORTED_BY_OTHER)
    own.add_note(FIRST_REPORTER)
    for index, expected in (("0", (True, False, True)), ("1", (False, False, True))):
        monkeypatch.setenv("RANK", index)
        assert (should_report(plain), should_report(told), should_report(own)) == expected


def test_an_error_of_a_wait_is_told_from_a_users() -> None:
    waited, late = "rank 0 of 1 waited for the others (them): another rank", "took more than 1800 seconds"
    for reason, what in (
        ("[.../gloo/pair.cc:1] Timed out waiting 40000ms", f"{late} (SRTRL_RANK_TIMEOUT)"),
        ("Application timeout caused pair closure", f"{late} (SRTRL_RANK_TIMEOUT)"),
        ("[.../gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:26026.", "has ended"),
    ):
        with pytest.raises(RankError) as caught, ranks.waiting("them"):
            raise RuntimeError(reason)
        assert str(caught.value) == f"{waited} {what}; see its own message"
    with pytest.raises(RuntimeError, match=r"^ours$"), ranks.waiting("them"):
        raise RuntimeError("ours")


@pytest.fixture
def rank_1_of_2(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of this rank; the first one, which tells of what all ranks have, is not there."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SRTRL_RANK_TIMEOUT": "1"}
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", **address}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.usefixtures("rank_1_of_2")
def test_a_rank_that_waits_for_the_first_one_in_vain_says_so() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 waited for the others \(start\)") as caught, open_ranks():
        pass
    assert should_report(caught.value)


@pytest.mark.parametrize("fails", [False, True])
def test_connections_are_aborted_after_an_error(rank_1_of_2: pytest.MonkeyPatch, fails: bool) -> None:
    """With NCCL `destroy_process_group` would wait for ranks that wait for this one in a collective."""
    calls = {name: Mock() for name in ("init_process_group", "is_initialized", "destroy_process_group")}
    abort = Mock()
    for name, mock in calls.items():
        rank_1_of_2.setattr(torch.distributed, name, mock)
    rank_1_of_2.setattr(distributed_c10d, "_abort_process_group", abort)
    rank_1_of_2.setattr(distributed_c10d, "_get_default_store", HashStore)
    with pytest.raises(ValueError, match="ours") if fails else nullcontext(), open_ranks():
        if fails:
            raise ValueError("ours")
    assert (abort.call_count, calls["destroy_process_group"].call_count) == ((1, 0) if fails else (0, 1))


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with open_ranks():
        assert (ranks.index(), ranks.count(), ranks.is_main()) == (0, 1, True)
        assert ranks.gather("a", "it") == ["a"]
    with ranks.use(store=HashStore()):
        assert [ranks.add("a"), ranks.add("a", 5), ranks.add("a")] == [0, 1, 6]
        assert [ranks.new_scope("rollout"), ranks.new_scope("rollout")] == ["rollout 1", "rollout 2"]
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="WORLD_SIZE must be a whole number, found 'two'"), open_ranks():
        pass
