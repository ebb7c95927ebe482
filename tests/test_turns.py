"""Samples of several turns, some with a prefix: how they are decoded, and a tool's time, change no token."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np
import pytest
import torch
from engine_cases import Completions, FakeDrafter, Letters, options, outputs, requests_for, tiny_policy
from environment_cases import PROMPTS, TOKENIZER, Digits, collector_of, grader_of, section_of
from hypothesis import given, settings
from hypothesis import strategies as st
from page_cases import check_pages

from srtrl.drafters.base import DrafterBase, Int64Array
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.drafters.texts import START_TOKEN
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.environments.turns import EnvironmentTurns
from srtrl.model.transformer import Transformer
from srtrl.types import Completion, Request, Response

MAX_TURNS = 4


def turn_requests(num_samples: int = 2, max_new_tokens: int = 60) -> list[Request]:
    """Turns end at token 0 and at some texts, one of which an observation may hold as well."""
    return [
        replace(one, has_turns=True, sampling=replace(one.sampling, end_token_ids=(0, 5), stop_strings=("B", "CD")))
        for one in requests_for(num_samples=num_samples, max_new_tokens=max_new_tokens)
    ]


def begun(request: Request, whole: Response, random: np.random.Generator) -> Request:
    """The request with a part of its response as prefix, or none; it ends in a turn, or after an observation."""
    ends = [stop for _, stop in whole.extensions] if request.sample_index == 0 else []
    length = int(random.choice([0, *(ends or whole.sampled)]))
    return replace(request, prefix=whole.cut(length) if length else None)


def prompt_of(completion: Completion) -> tuple[int, ...]:
    return completion.request.prompt_token_ids


def observation(completion: Completion) -> list[int]:
    """A tool's answer: a function of the turn; up to 13 tokens, stop strings among them."""
    extensions = completion.response.extensions
    turn = completion.response.token_ids[extensions[-1][1] if extensions else 0 :].tolist()
    return [(sum(turn) * (i + 1) + len(turn)) % 60 + 1 for i in range(1 + sum(turn) % 13)]


def converse(engine: Engine, requests: list[Request], delays: np.random.Generator | None = None) -> Completions:
    """Decode all turns; with `delays` a tool takes a random number of decode steps, and tools end in any order."""
    calls: list[tuple[int, Completion]] = []
    found: Completions = {}
    num_steps = 0

    def go_on(completion: Completion) -> None:
        tokens = observation(completion)
        request, response = completion.request, completion.response
        room = request.sampling.max_new_tokens - len(response.token_ids) - 1
        if response.finish_reason == "length" or len(response.extensions) == MAX_TURNS - 1 or len(tokens) > room:
            engine.end(completion)
            found[request.draw_index, request.sample_index] = completion
        else:
            engine.extend(completion, tokens)

    with engine.rollout("train"):
        for request in requests:
            engine.add(request)
        while engine.has_work or calls:
            num_steps += 1
            check_pages(engine.scheduler)
            calls.sort(key=itemgetter(0))
            while calls and (not engine.has_work or calls[0][0] <= num_steps):
                go_on(calls.pop(0)[1])
            for completion in engine.step() if engine.has_work else ():
                delay = 0 if delays is None else int(delays.integers(0, 12))
                calls.append((num_steps + delay, completion))
    assert len(found) == len(requests)
    assert not engine.scheduler.paused
    assert engine.pool.num_used == 0
    return found


@pytest.fixture(scope="module")
def cases() -> list[tuple[Transformer, Completions]]:
    policies = [tiny_policy(torch.float32), tiny_policy(torch.bfloat16)]
    engines = [Engine(policy, turn_options(slots=1), tokenizer=Letters()) for policy in policies]
    found = [(policy, converse(engine, turn_requests())) for policy, engine in zip(policies, engines, strict=True)]
    for _, truth in found:
        assert MAX_TURNS - 1 in {len(completion.response.extensions) for completion in truth.values()}
        assert {completion.response.finish_reason for completion in truth.values()} == {"stop", "length"}
    return found


def turn_options(**changes: object) -> EngineOptions:
    return options(**({"max_sequence_tokens": 96} | changes))


class TurnDrafter(FakeDrafter):
    """Drafts around the truth, across the end of turns: such drafts must be of no effect."""

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        super().start(slots, requests)
        assert self.truth is not None
        for slot, request in zip(slots.tolist(), requests, strict=True):
            known = self.truth[request.draw_index, request.sample_index]
            self.committed[slot] = known.response.token_ids.tolist()[: request.text_start]


@pytest.mark.parametrize("drafter_class", [None, SrtDrafter, TurnDrafter])
@settings(deadline=None, max_examples=settings().max_examples // 12)  # each decodes twice, in all ways at once
@given(data=st.data())
def test_turns_do_not_depend_on_how_they_are_decoded(
    cases: list[tuple[Transformer, Completions]], drafter_class: Callable[..., DrafterBase] | None, data: st.DataObject
) -> None:
    """The first example has the first value of each choice."""
    policy, truth = data.draw(st.sampled_from(cases), "dtype")
    page_size = data.draw(st.sampled_from([4, 1, 16]), "page size")
    spare_pages = data.draw(st.integers(0, 200), "spare pages") // page_size
    changes = {
        "slots": data.draw(st.sampled_from([7, 1, 64]), "slots"),
        "page_size": page_size,
        "num_pages": -(-90 // page_size) + spare_pages,
        "prefill_chunk_tokens": data.draw(st.sampled_from([7, 1, 40]), "chunk"),
    }
    known = {"truth": truth, "accuracy": 0.7} if drafter_class is TurnDrafter else {}
    drafter = drafter_class(**known) if drafter_class else None
    engine = Engine(policy, turn_options(**changes), tokenizer=Letters(), drafter=drafter)
    requests = data.draw(st.permutations(turn_requests()), "order")[:5]
    if data.draw(st.sampled_from([True, False]), "prefixes"):
        random = np.random.default_rng(data.draw(st.integers(0, 9), "seed"))
        requests = [begun(one, truth[one.draw_index, one.sample_index].response, random) for one in requests]
    for seed in (1, 2):  # the second time drafters know all, and nothing of the first time is left in the engine
        delays = np.random.default_rng(seed) if data.draw(st.sampled_from([True, False]), "delays") else None
        found = converse(engine, requests, delays)
        assert outputs(found) == outputs({key: truth[key] for key in found})
        assert all(one.response.extensions == truth[key].response.extensions for key, one in found.items())
        num_sampled = sum((one.response.sampled >= one.request.num_reused).sum() for one in found.values())
        assert engine.take_metrics()["engine/tokens"] == num_sampled, "sampled twice"
        engine.end_step(has_new_weights=True)
        requests = requests[::-1]


class NoiseDrafter(SrtDrafter):
    """Checks that it knows the noise of the tokens that come next, in every turn."""

    engine: Engine

    def propose(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
        batch = self.engine.batch
        assert (self._noise.rng_keys[slots] == batch.rng_keys[slots]).all()
        assert (self._noise.positions[slots] == batch.num_tokens[slots] - batch.num_prompt_tokens[slots]).all()
        return super().propose(slots, max_nodes, min_score)


def test_srt_drafts_within_turns_and_never_across_one(cases: list[tuple[Transformer, Completions]]) -> None:
    policy, truth = cases[0]
    drafter = NoiseDrafter()
    engine = Engine(policy, turn_options(num_pages=30), tokenizer=Letters(), drafter=drafter)
    drafter.engine = engine
    speeds = []
    for _ in range(2):
        converse(engine, turn_requests())
        speeds.append(engine.take_metrics()["engine/tokens_per_decode_step"])
        engine.end_step(has_new_weights=True)
    assert speeds[1] > 1.3 * speeds[0]
    for one in truth.values():
        starts = [start for start, _ in one.response.extensions]
        text = np.insert(one.response.token_ids, starts, START_TOKEN).tolist()
        assert text in [rollout.tokens.tolist() for rollout in drafter.caches["train"].rollouts(prompt_of(one))]


def test_few_pages_evict_what_paused_samples_keep(cases: list[tuple[Transformer, Completions]]) -> None:
    policy, truth = cases[0]
    num_prefill = []
    for num_pages in (25, 400):  # a longest sequence needs 20 pages
        engine = Engine(policy, turn_options(num_pages=num_pages), tokenizer=Letters())
        assert outputs(converse(engine, turn_requests(), np.random.default_rng(0))) == outputs(truth)
        metrics = engine.take_metrics()
        assert (metrics["engine/preemptions"] > 0) == (num_pages == 25)
        num_prefill.append(metrics["engine/prefill_tokens"])
    num_extended = sum(stop - start for one in truth.values() for start, stop in one.response.extensions)
    size, prompts = turn_options().page_size, [prompt_of(one) for one in truth.values()]
    num_shared = sum((len(prompt) - 1) // size * size for prompt in set(prompts))
    num_own = sum((len(prompt) - 1) % size for prompt in prompts)
    assert num_prefill[1] == num_extended + num_shared + num_own  # no full page is computed twice where there is room
    assert num_prefill[0] > num_prefill[1]


def test_what_cannot_be_extended_or_continued_is_refused(cases: list[tuple[Transformer, Completions]]) -> None:
    policy, truth = cases[0]
    engine = Engine(policy, turn_options(), tokenizer=Letters())
    whole = next(one for one in truth.values() if one.response.extensions)
    length = len(whole.response.token_ids)
    limited = replace(whole.request.sampling, max_new_tokens=length)
    with pytest.raises(ValueError, match=f"found {length}$"):
        engine.check_request(replace(whole.request, sampling=limited, prefix=whole.response))
    foreign = replace(whole.response, token_ids=whole.response.token_ids + 40)
    with pytest.raises(ValueError, match="is not in the vocabulary"):
        engine.check_request(replace(whole.request, prefix=foreign))
    generated = engine.generate(turn_requests()[:1])
    completion = next(generated)
    room = 60 - len(completion.response.token_ids) - 1
    for tokens in ([], [61], [1] * (room + 1)):
        with pytest.raises(ValueError, match=f"expected 1 to {room} tokens of a vocabulary of 61"):
            engine.extend(completion, tokens)
    engine.extend(completion, [1] * room)
    assert len(list(generated)) == 1
    assert engine.pool.num_used == 0


def test_a_sample_given_up_in_the_middle_leaves_nothing() -> None:
    engine = Engine(tiny_policy(vocab_size=290, scale=5.0), options(max_sequence_tokens=128), tokenizer=TOKENIZER)
    with EnvironmentTurns(section_of(Digits), TOKENIZER) as conversations, grader_of() as grader:
        collector = collector_of(grader, conversations, 100)
        requests = [request for draw in range(3) for request in collector.open(draw, PROMPTS[draw])]
        for number, completion in enumerate(engine.generate(requests)):
            collector.receive(engine, [completion])
            if number == 3:
                break
        assert engine.pool.num_used == 0
        assert not engine.scheduler.paused
    assert not conversations.futures()
