"""What ranks tell each other: gathered values, sums of tensors, counters; one rank does nothing."""

import time

import pytest
import torch
from rank_cases import free_port, identity, run_ranks

from srtrl.ranks.processes import TOLD_BY_OTHER, TOLD_HERE, RankError, Ranks, is_told_here, open_ranks


def exchange(ranks: Ranks) -> tuple[list[int], list[float], list[int]]:
    tensors = [torch.full((3,), 1.0 + ranks.index), torch.full((2, 2), 10.0), torch.ones(1, dtype=torch.float64)]
    ranks.sum(tensors, "tensors")
    claimed = []
    while (number := ranks.add("next")) < 20:
        claimed.append(number)
        time.sleep(0.001)
    return ranks.gather(ranks.index**2, "squares"), [float(tensor.sum()) for tensor in tensors], claimed


@pytest.mark.parametrize("count", [1, 2, 3])
def test_all_ranks_know_the_same(count: int) -> None:
    found = run_ranks(count, exchange)
    for squares, sums, _ in found:
        assert squares == [index**2 for index in range(count)]
        assert sums == [3 * count * (count + 1) / 2, 40.0 * count, float(count)]
    assert sorted(number for _, _, claimed in found for number in claimed) == list(range(20))
    assert run_ranks(count, identity, "a") == [(index, count, "a") for index in range(count)]


def end_early(ranks: Ranks) -> str:
    if ranks.index == 1:
        return "ended"
    try:
        with ranks.together("what would come after it"):
            ranks.gather(1, "what never comes")
    except RankError as error:
        return str(error)
    return "no error"


def test_a_rank_that_has_ended_is_an_error_that_says_what_was_waited_for() -> None:
    message, _ = run_ranks(2, end_early)
    assert message.startswith(
        "rank 0 of 2 waited for what never comes: another rank has ended, or took more than 1800 s"
    )


def test_an_error_of_a_wait_is_told_from_a_users() -> None:
    for reason in ("[.../gloo/pair.cc:1] Timed out", "Application timeout caused pair closure"):
        with pytest.raises(RankError, match="waited for them: another"), Ranks().waiting("them"):
            raise RuntimeError(reason)
    with pytest.raises(RuntimeError, match=r"^ours$"), Ranks().waiting("them"):
        raise RuntimeError("ours")


def test_a_rank_that_waits_for_the_first_one_in_vain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, which tells of what all ranks have, is not there."""
    address = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {**address, "SRTRL_RANK_TIMEOUT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match="rank 1 of 2 waited for the other ranks to start") as caught, open_ranks():
        pass
    assert is_told_here(caught.value)


def fail(ranks: Ranks, message: str) -> None:
    raise FloatingPointError(message.format(ranks.index))


def test_an_error_that_several_ranks_have_is_told_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for message, num_told in (("the loss is nan", 1), ("no file \udcff", 1), ("rank {} has no disk", 3)):
        with pytest.raises(AssertionError) as caught:
            run_ranks(3, fail, message)
        text = str(caught.value)
        assert (text.count(TOLD_HERE), text.count(TOLD_BY_OTHER)) == (num_told, 3 - num_told)
    monkeypatch.setenv("RANK", "0")
    plain, told = ValueError("not connected yet"), ValueError("by another")
    told.add_note(TOLD_BY_OTHER)
    assert (is_told_here(plain), is_told_here(told)) == (True, False)
    monkeypatch.setenv("RANK", "1")
    own = ValueError("of this rank")
    own.add_note(TOLD_HERE)
    assert (is_told_here(plain), is_told_here(own)) == (False, True)


def decide_on_main(ranks: Ranks) -> list[str]:
    """What rank 0 gives, and its error; then what each adds."""
    found = [ranks.on_main(lambda: f"from {ranks.index}", "a choice")]
    with pytest.raises(ValueError, match="no choice") as caught:
        ranks.on_main(lambda: int("no choice"), "a choice")
    with ranks.together("work") as shared:
        shared.append(str(ranks.index))
    return [*found, str(caught.value), *shared]


def test_what_rank_0_decides_is_known_to_all() -> None:
    error = "invalid literal for int() with base 10: 'no choice'"
    assert run_ranks(2, decide_on_main) == [["from 0", error, "0", "1"]] * 2


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
