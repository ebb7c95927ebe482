"""What ranks exchange: gathered values, sums of tensors, counters, errors; one rank does nothing."""

import time
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rank_cases import free_port, run_ranks
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

from srtrl.ranks.processes import (
    FIRST_REPORTER,
    REPORTED_BY_OTHER,
    RankError,
    Ranks,
    note_reporter,
    notes_of,
    open_ranks,
    should_report,
)


def exchange(ranks: Ranks) -> dict[str, Any]:
    """Values, sums, counters and errors between two or three ranks; the first rank stays when the others have ended."""
    tensors = [torch.full((3,), 1.0 + ranks.index), torch.full((2, 2), 10.0), torch.ones(1, dtype=torch.float64)]
    ranks.sum(tensors, "tensors")
    claimed = []
    while (number := ranks.add("next")) < 20:
        claimed.append(number)
        time.sleep(0.001)
    with ranks.synchronized("work") as shared:
        shared.append(str(ranks.index))
    result: dict[str, Any] = {
        "identity": (ranks.index, ranks.count),
        "squares": ranks.gather(ranks.index**2, "squares"),
        "sums": [float(tensor.sum()) for tensor in tensors],
        "claimed": claimed,
        "shared": shared,
        "choice": ranks.on_main(lambda: f"from {ranks.index}", "a choice"),
        "errors": [error_of(ranks, failing) for failing in (0, 1)] if ranks.count > 1 else [],
    }
    if ranks.index == 0 and ranks.count > 1:
        try:
            with ranks.synchronized("later work"):
                ranks.gather(1, "end of the others")
        except RankError as error:
            result["wait"] = str(error)
    return result


def error_of(ranks: Ranks, failing: int) -> str:
    """The error that this rank has where rank `failing` cannot work."""
    try:
        with ranks.synchronized("work"):
            if ranks.index == failing:
                raise OSError(28, "No space left on device")
    except (OSError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@pytest.mark.parametrize("count", [1, 3])
def test_all_ranks_know_the_same_and_an_error_of_one_ends_all(count: int) -> None:
    results = run_ranks(count, exchange) if count > 1 else [exchange(Ranks())]
    for index, result in enumerate(results):
        assert result["identity"] == (index, count)
        assert result["squares"] == [rank**2 for rank in range(count)]
        assert result["sums"] == [3 * count * (count + 1) / 2, 40.0 * count, float(count)]
        assert result["shared"] == [str(rank) for rank in range(count)]
        assert result["choice"] == "from 0"
        for failing, error in enumerate(result["errors"]):
            full = "[Errno 28] No space left on device"
            assert error == (
                f"OSError: {full}" if failing == index else f"RankError: rank {failing} of {count}: {full}"
            )
    assert sorted(number for result in results for number in result["claimed"]) == list(range(20))
    if count > 1:
        waited = f"rank 0 of {count} waited for the others (end of the others)"
        assert results[0]["wait"] == f"{waited}: another rank has ended; see its own message"


def test_an_error_of_a_wait_is_told_from_a_users() -> None:
    waited, late = "rank 0 of 1 waited for the others (them): another rank", "took more than 1800 seconds"
    for reason, what in (
        ("[.../gloo/pair.cc:1] Timed out waiting 40000ms", f"{late} (SRTRL_RANK_TIMEOUT)"),
        ("Application timeout caused pair closure", f"{late} (SRTRL_RANK_TIMEOUT)"),
        ("[.../gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:26026.", "has ended"),
    ):
        with pytest.raises(RankError) as caught, Ranks().waiting("them"):
            raise RuntimeError(reason)
        assert str(caught.value) == f"{waited} {what}; see its own message"
    with pytest.raises(RuntimeError, match=r"^ours$"), Ranks().waiting("them"):
        raise RuntimeError("ours")


def test_a_rank_that_waits_for_the_first_one_in_vain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, which tells of what all ranks have, is not there."""
    address = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {**address, "SRTRL_RANK_TIMEOUT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=r"rank 1 of 2 waited for the others \(start\)") as caught, open_ranks():
        pass
    assert should_report(caught.value)


@pytest.mark.parametrize("fails", [False, True])
def test_connections_are_aborted_after_an_error(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """With NCCL `destroy_process_group` would wait for ranks that wait for this one in a collective."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    calls = {name: Mock() for name in ("init_process_group", "is_initialized", "destroy_process_group")}
    abort = Mock()
    for name, mock in calls.items():
        monkeypatch.setattr(torch.distributed, name, mock)
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", abort)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", HashStore)
    with pytest.raises(ValueError, match="ours") if fails else nullcontext(), open_ranks():
        if fails:
            raise ValueError("ours")
    assert (abort.call_count, calls["destroy_process_group"].call_count) == ((1, 0) if fails else (0, 1))


def fail(ranks: Ranks) -> None:
    raise FloatingPointError("the loss is nan")


def test_an_error_that_several_ranks_have_is_told_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, fail)
    assert [str(caught.value).count(note) for note in (FIRST_REPORTER, REPORTED_BY_OTHER)] == [1, 1]
    for message, num_told in (("no file \udcff", 1), ("rank {} has no disk", 3)):
        counters: dict[str, int] = {}
        errors = [OSError(message.format(rank)) for rank in range(3)]
        for rank, error in enumerate(errors):
            note_reporter(error, Ranks(index=rank, count=3, _local=counters))
        assert sum(FIRST_REPORTER in notes_of(error) for error in errors) == num_told
        assert sum(REPORTED_BY_OTHER in notes_of(error) for error in errors) == 3 - num_told
    monkeypatch.setenv("RANK", "0")
    plain, told = ValueError("not connected yet"), ValueError("by another")
    told.add_note(REPORTED_BY_OTHER)
    assert (should_report(plain), should_report(told)) == (True, False)
    monkeypatch.setenv("RANK", "1")
    own = ValueError("of this rank")
    own.add_note(FIRST_REPORTER)
    assert (should_report(plain), should_report(own)) == (False, True)


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with open_ranks() as ranks:
        assert (ranks.index, ranks.count, ranks.is_main) == (0, 1, True)
        assert ranks.gather("a", "it") == ["a"]
        assert [ranks.add("a"), ranks.add("a", 5), ranks.add("a")] == [0, 1, 6]
        assert [ranks.new_scope("rollout"), ranks.new_scope("rollout")] == ["rollout 1", "rollout 2"]
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="WORLD_SIZE must be a whole number, found 'two'"), open_ranks():
        pass
