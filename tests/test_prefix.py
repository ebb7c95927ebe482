"""A request that begins with a part of its response: the tokens of one decode, wherever the break is."""

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import decode, options, outputs, requests_for, tiny_policy

from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.engine import Engine
from srtrl.types import Completion, Prefix


def prefix_of(completion: Completion, length: int) -> Prefix:
    """The first tokens of a completion."""
    return Prefix(
        token_ids=np.array(completion.token_ids[:length], np.int32),
        rollout_logprobs=np.array(completion.rollout_logprobs[:length], np.float32),
        policy_versions=np.full(length, completion.policy_version, np.int32),
    )


@pytest.mark.parametrize("sizes", [{}, {"slots": 3, "prefill_chunk_tokens": 3}, {"num_pages": 14}])
@pytest.mark.parametrize("drafts", [False, True])
def test_own_earlier_text_as_prefix_changes_nothing(sizes: dict[str, int], drafts: bool) -> None:
    """Also where pages run out and samples with a prefix are preempted; `interrupt` makes the prefixes of one case."""
    policy = tiny_policy()
    requests = requests_for()
    once = decode(Engine(policy, options()), requests)
    random = np.random.default_rng(3)
    begun = []
    for request in requests:
        whole = once[request.draw_index, request.sample_index]
        length = int(random.integers(0, len(whole.token_ids)))
        begun.append(replace(request, prefix=prefix_of(whole, length) if length else None))
    assert sum(request.prefix is not None for request in begun) > len(begun) / 2
    engine = Engine(policy, options(**sizes), drafter=SrtDrafter() if drafts else None)
    again = decode(engine, begun)
    assert outputs(again) == outputs(once)
    num_reused = sum(request.num_reused for request in begun)
    num_tokens = sum(len(completion.token_ids) for completion in once.values())
    assert engine.take_metrics()["engine/tokens"] == num_tokens - num_reused, "nothing is sampled twice"
    assert engine.num_free_slots == engine.options.slots


def test_interrupted_samples_go_on_to_the_same_tokens() -> None:
    """After some steps those with 5 new tokens are ended; each goes on from what it had, twice."""
    policy = tiny_policy()
    requests = requests_for(max_new_tokens=30)
    once = outputs(decode(Engine(policy, options()), requests))
    engine = Engine(policy, options(slots=4), drafter=SrtDrafter())
    finished: dict[tuple[int, int], Completion] = {}
    waiting = {(request.draw_index, request.sample_index): request for request in requests}
    for num_tokens in (5, 3, 1000):
        with engine.rollout("train"):
            for request in waiting.values():
                engine.add(request)
            while engine.has_work:
                for completion in engine.step():
                    finished[completion.request.draw_index, completion.request.sample_index] = completion
                for part in engine.interrupt(num_tokens):
                    assert len(part.token_ids) - part.request.num_reused >= num_tokens
                    key = part.request.draw_index, part.request.sample_index
                    waiting[key] = replace(part.request, prefix=prefix_of(part, len(part.token_ids)))
        waiting = {key: request for key, request in waiting.items() if key not in finished}
        engine.end_step(has_new_weights=True)
    assert not waiting
    assert outputs(finished) == once
    assert engine.policy_version == 3


def test_a_prefix_that_leaves_nothing_to_sample_is_refused() -> None:
    engine = Engine(tiny_policy(), options())
    request = requests_for()[0]
    whole = prefix_of(
        decode(engine, [replace(request, sampling=replace(request.sampling, end_token_ids=()))])[0, 0], 24
    )
    with pytest.raises(ValueError, match="prefix of 1 to 9 tokens, fewer than max_new_tokens, found 24"):
        engine.check_request(replace(request, sampling=replace(request.sampling, max_new_tokens=10), prefix=whole))
    whole.token_ids[3] = 999
    with pytest.raises(ValueError, match="token id 999 is not in the vocabulary"):
        engine.check_request(replace(request, prefix=whole))
