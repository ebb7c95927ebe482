"""Ends that a drafter hears of late: all at once, or of samples that it has never heard of."""

from collections.abc import Callable

import pytest
from drafter_cases import OTHER, TEXT, completion, decode, propose, request, run

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.history import Drafter as HistoryDrafter
from srtrl.drafters.ngram import Drafter as NgramDrafter
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.drafters.suffix import Drafter as SuffixDrafter


@pytest.mark.parametrize("num_told", [0, 7, 30])
@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter, HistoryDrafter, SrtDrafter])
def test_a_completion_says_the_tokens_that_were_not_observed(make: Callable[[], DrafterBase], num_told: int) -> None:
    """The engine tells of a step's tokens when it next asks; a sample that has ended by then says all at once."""
    last, later = [], []
    for tells_the_rest in (True, False):
        drafter = make()
        run(drafter, 0, request(rng_key=4, is_run_ahead=True), TEXT[:40] + OTHER[:5])
        for sample in (1, 2):
            drafter.start(sample, request(rng_key=3 + sample))
        decode(drafter, 2, OTHER[:10])
        decode(drafter, 1, TEXT[:num_told])
        if tells_the_rest:
            drafter.observe([1], [TEXT[num_told:]])
        drafter.finish(1, completion(request(rng_key=4), TEXT))
        drafter.observe([2], [TEXT[20:25]])
        last.append([tree.token_ids.tolist() for tree in propose(drafter, [2])])
        metrics = drafter.take_metrics()
        drafter.finish(2, None)
        drafter.on_policy_update()
        later.append((metrics, run(drafter, 3, request(rng_key=9), TEXT)))
    assert last[0] == last[1]
    assert later[0] == later[1]


@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter, HistoryDrafter, SrtDrafter])
def test_what_is_learned_of_samples_that_never_drafted_is_the_same(make: Callable[[], DrafterBase]) -> None:
    """Where no drafts are wanted, a sample is made known by its completion alone; siblings may draft meanwhile."""
    drafts, later = [], []
    for is_told in (True, False):
        drafter = make()
        run(drafter, 0, request(rng_key=4, is_run_ahead=True), OTHER[:30])
        drafter.start(2, request(rng_key=5))
        decode(drafter, 2, OTHER[:10])
        if is_told:
            run(drafter, 1, request(rng_key=6), TEXT)
        else:
            drafter.expected_tokens(request(rng_key=6))
            drafter.learn([completion(request(rng_key=6), TEXT)])
        drafter.observe([2], [TEXT[20:25]])
        drafts.append([tree.token_ids.tolist() for tree in propose(drafter, [2])])
        drafter.finish(2, completion(request(rng_key=5), OTHER))
        later.append(drafter.take_metrics() | {"engine/cache_bytes": 0})
        drafter.on_policy_update()
        later[-1] |= {"used": sum(run(drafter, 3, request(rng_key=4), TEXT))}
    assert drafts[0] == drafts[1]
    assert later[0] == later[1]


def test_learning_forgets_the_run_ahead_of_the_sample() -> None:
    drafter = SrtDrafter()
    run(drafter, 0, request(rng_key=4, is_run_ahead=True), OTHER)
    drafter.learn([completion(request(rng_key=4), TEXT)])
    drafter.start(1, request(rng_key=4))
    propose(drafter, [1])
    assert drafter.take_metrics().get("engine/run_ahead_followed", 0) == 0
