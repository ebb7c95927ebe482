"""A request that begins with a part of its response: the tokens of one decode, wherever the break is."""

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import Letters, decode, options, outputs, requests_for, tiny_policy
from test_turns import converse, turn_options, turn_requests

from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.engine import Engine


@pytest.mark.parametrize("sizes", [{}, {"slots": 3, "prefill_chunk_tokens": 3}, {"num_pages": 14}])
@pytest.mark.parametrize("drafts", [False, True])
def test_own_earlier_text_as_prefix_changes_nothing(sizes: dict[str, int], drafts: bool) -> None:
    """Also where pages run out, and samples with a prefix are preempted."""
    policy, requests, random = tiny_policy(), requests_for(), np.random.default_rng(3)
    once = decode(Engine(policy, options()), requests)
    begun = []
    for request in requests:
        whole = once[request.draw_index, request.sample_index].response
        length = int(random.integers(0, len(whole.token_ids)))
        begun.append(replace(request, prefix=whole.cut(length) if length else None))
    assert sum(request.prefix is not None for request in begun) > len(begun) / 2
    engine = Engine(policy, options(**sizes), drafter=SrtDrafter() if drafts else None)
    assert outputs(decode(engine, begun)) == outputs(once)
    num_tokens = sum(len(completion.response.token_ids) for completion in once.values())
    num_reused = sum(request.num_reused for request in begun)
    assert engine.take_metrics()["engine/tokens"] == num_tokens - num_reused, "nothing is sampled twice"


@pytest.mark.parametrize("drafts", [False, True])
def test_turns_as_prefix_change_nothing(drafts: bool) -> None:
    """The prefix ends in a turn, or after the observation that follows it."""
    policy, random = tiny_policy(), np.random.default_rng(3)
    once = converse(Engine(policy, turn_options(), tokenizer=Letters()), turn_requests())
    begun = []
    for request in turn_requests():
        whole = once[request.draw_index, request.sample_index].response
        ends = [stop for _, stop in whole.extensions] if request.sample_index == 0 else []
        length = int(random.choice(ends or whole.sampled))
        begun.append(replace(request, prefix=whole.cut(length) if length else None))
    prefixes = [request.prefix for request in begun if request.prefix]
    assert {any(stop == len(p.token_ids) for _, stop in p.extensions) for p in prefixes} == {False, True}
    engine = Engine(policy, turn_options(), tokenizer=Letters(), drafter=SrtDrafter() if drafts else None)
    found = converse(engine, begun)
    assert outputs(found) == outputs(once)
    assert [found[key].response.extensions for key in once] == [whole.response.extensions for whole in once.values()]
    num_sampled = sum(len(completion.newly_sampled) for completion in found.values())
    assert engine.take_metrics()["engine/tokens"] == num_sampled, "nothing is sampled twice"


def test_a_prefix_that_leaves_nothing_to_sample_is_refused() -> None:
    engine, request = Engine(tiny_policy(), options()), requests_for()[0]
    endless = replace(request, sampling=replace(request.sampling, end_token_ids=()))
    whole = replace(decode(engine, [endless])[0, 0].response, finish_reason=None)
    with pytest.raises(ValueError, match="prefix of 1 to 9 tokens, fewer than max_new_tokens, found 24"):
        engine.check_request(replace(request, sampling=replace(request.sampling, max_new_tokens=10), prefix=whole))
    whole.token_ids[3] = 999
    with pytest.raises(ValueError, match="token id 999 is not in the vocabulary"):
        engine.check_request(replace(request, prefix=whole))
