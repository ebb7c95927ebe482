"""Which sequences a look asks for: some prompts with all their samples, kept from ask to ask."""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import Literal

import pytest
from engine_cases import decode, options, outputs, requests_for, tiny_policy
from scheduler_cases import request

from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.engine import Engine
from srtrl.engine.look_sample import LOOK_SEQUENCES, LookSample
from srtrl.engine.sequence import PromptPages, Sequence
from srtrl.recipe_base import Section


def sequences(num_prompts: int, num_samples: int) -> list[Sequence]:
    """In the order of admission: a sample of each prompt, then the second ones."""
    prompts = [PromptPages([1]) for _ in range(num_prompts)]
    return [
        Sequence(
            token_ids=[1], sequence_id=sample * num_prompts + place, request=request(place, sample, 1, 9), prompt=prompt
        )
        for sample in range(num_samples)
        for place, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(("num_prompts", "num_samples"), [(32, 8), (16, 16), (200, 1), (2, 100), (1, 300)])
def test_whole_prompts_are_chosen_from_all_over(num_prompts: int, num_samples: int) -> None:
    all_of_them = sequences(num_prompts, num_samples)
    places = LookSample().of(all_of_them)
    assert places == sorted(set(places))
    chosen = Counter(id(all_of_them[place].prompt) for place in places)
    assert set(chosen.values()) == {num_samples}
    assert LOOK_SEQUENCES <= len(places) < LOOK_SEQUENCES + num_samples
    if num_prompts == 200:
        assert max(places) > 150


def test_the_same_prompts_stay_until_few_of_their_samples_are_left() -> None:
    sample = LookSample()
    running = sequences(32, 8)
    first = {running[place].sequence_id for place in sample.of(running)}
    for most_left in (24, LOOK_SEQUENCES // 2):
        gone = sorted(first)[: len(first) - most_left]
        running = [sequence for sequence in running if sequence.sequence_id not in gone]
        assert {running[place].sequence_id for place in sample.of(running)} == first - set(gone)
    running = [sequence for sequence in running if sequence.sequence_id != max(first)]
    others = {running[place].sequence_id for place in sample.of(running)}
    assert len(others) >= LOOK_SEQUENCES
    few = running[: 2 * LOOK_SEQUENCES]
    assert sample.of(few) == list(range(len(few)))


class Counting(SrtDrafter):
    """Notes for how many samples it is asked."""

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        self.asked: list[int] = []

    def propose(self, sequence_ids: SequenceOf[int], max_nodes: SequenceOf[int]) -> DraftTrees:
        self.asked.append(len(sequence_ids))
        return super().propose(sequence_ids, max_nodes)


@pytest.mark.parametrize("draft_budget", ["auto", 4])
def test_looks_ask_for_some_samples_and_change_no_bit(draft_budget: Literal["auto"] | int) -> None:
    policy = tiny_policy()
    prompts = [(1 + number % 7, 2 + number // 7, 3) for number in range(20)]
    requests = requests_for(prompts, num_samples=8, max_new_tokens=90)
    requests = [one for one in requests if one.sampling.max_new_tokens > 20]
    truth = outputs(decode(Engine(policy, options(slots=1, max_sequence_tokens=128)), requests))
    cheap, dear = ((1, 1.0), (512, 1.0)), ((1, 1.0), (512, 512.0))
    for curve in (cheap, dear):
        drafter = Counting()
        engine = Engine(
            policy,
            options(slots=200, max_sequence_tokens=128, draft_budget=draft_budget, cost_points=curve),
            drafter=drafter,
        )
        for _ in range(2):
            assert outputs(decode(engine, requests)) == truth
            engine.end_rollout()
        sampled = [count for count in drafter.asked if LOOK_SEQUENCES <= count < LOOK_SEQUENCES + 8]
        if draft_budget == 4:
            assert max(drafter.asked) > 2 * LOOK_SEQUENCES, "a fixed budget asks for all"
        elif curve is dear:
            assert max(drafter.asked) <= 2 * LOOK_SEQUENCES, "drafts do not pay, and only looks are taken"
            assert sampled
        else:
            assert sampled
            assert max(drafter.asked) > 2 * LOOK_SEQUENCES, "drafts pay"
        metrics = engine.take_metrics()
        assert (metrics["engine/verified_per_decode_step"] > 1.2) == (draft_budget == 4 or curve is cheap)
