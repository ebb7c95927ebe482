"""Mode `partial`: what ends in a step is decided on a virtual clock, and nothing is lost or sampled twice."""

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from engine_cases import options, tiny_policy
from environment_cases import TOKENIZER, Ledger, section_of
from rank_cases import FORKED, run_ranks
from scipy.stats import chisquare
from test_rank_rollouts import grader_of

from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.engine import Engine
from srtrl.environments.conversations import Conversations
from srtrl.ranks.processes import ONE_RANK, Ranks
from srtrl.rollout.collect import Collector, collect_rollouts
from srtrl.rollout.partial import PartialDraws
from srtrl.types import Prefix, Prompt, Rollout, SampleKey, SamplingParams

NUM_OPEN, NUM_COMPLETE, NUM_SAMPLES, MAX_AGE = 8, 5, 3, 2
SAMPLING = SamplingParams(max_new_tokens=100, end_token_ids=tuple(range(12)))
"""Of a policy that is nearly uniform over 290 tokens: lengths are nearly geometric, with a long tail."""
Sampled = dict[SampleKey, tuple[list[int], list[float], list[int], list[int], Any]]
"""Tokens, log-probs and policy versions of each sample, indices of those sampled, and what does not depend on them."""


def step_through(
    ranks: Ranks,
    num_steps: int,
    has_tools: bool = False,
    *,
    num_open: int = NUM_OPEN,
    drafts: bool = False,
    scale: float = 1.0,
    **sizes: Any,
) -> list[Sampled]:
    """The samples that each step learns from, with unchanged weights that count as new ones.

    The last step is waited for, so that all that have begun are seen.
    """
    sizes = {"max_sequence_tokens": 128, "run_ahead_max_slowdown": None, **sizes}
    policy = tiny_policy(vocab_size=290, scale=scale)
    engine = Engine(policy, options(**sizes), drafter=SrtDrafter() if drafts else None)
    conversations = Conversations(section_of(Ledger, max_turns=4), TOKENIZER) if has_tools else None
    shared: dict[str, Any] = {"num_samples": NUM_SAMPLES, "sampling": SAMPLING, "seed": 5, "purpose": "train"}
    earlier: dict[SampleKey, Prefix] = {}
    steps: list[Sampled] = []
    new = count()
    with grader_of("test_rank_rollouts:half_tokens") as grader, conversations or nullcontext():
        shared["conversations"] = conversations
        for step in range(num_steps):
            going_on = sorted({draw for draw, _ in earlier})
            numbers = [*going_on, *(next(new) for _ in range(num_open - len(going_on)))]
            draws = [(n, Prompt(prompt_id=str(n), text="", token_ids=(1 + n % 7, 2), answer="")) for n in numbers]
            due = {draw for (draw, _), prefix in earlier.items() if prefix.policy_versions[0] <= step - MAX_AGE}
            part = PartialDraws(draws, num_complete=NUM_COMPLETE if step + 1 < num_steps else num_open, due=due)
            collector = Collector(grader, TOKENIZER, ranks=ranks, prefixes=earlier, **shared)
            rollouts = [rollout for group in collect_rollouts(engine, collector, part) for rollout in group.rollouts]
            steps.append({(r.draw_index, r.sample_index): contents_of(r) for r in rollouts})
            assert engine.pool.num_used == 0
            engine.end_step(has_new_weights=True)
            earlier = part.carried
    assert not earlier
    return steps


def contents_of(rollout: Rollout) -> tuple[list[int], list[float], list[int], list[int], Any]:
    arrays = rollout.token_ids, rollout.rollout_logprobs, rollout.policy_versions, rollout.sampled
    token_ids, logprobs, versions, sampled = (array.tolist() for array in arrays)
    talk = rollout.conversation and replace(rollout.conversation, tool_seconds=(), answers={})
    return token_ids, logprobs, versions, sampled, (talk, rollout.grade, rollout.finish_reason)


def simulate(lengths: dict[SampleKey, int], num_steps: int) -> Iterator[list[int]]:
    """The draws that each step completes, from the lengths of all samples, tick by tick."""
    tokens: dict[SampleKey, int] = {}
    begun: dict[int, int] = {}
    for step in range(num_steps):
        num_new = NUM_OPEN - len({draw for draw, _ in tokens})
        for draw in range(len(begun), len(begun) + num_new):
            begun[draw] = step
            tokens |= {(draw, sample): 0 for sample in range(NUM_SAMPLES)}
        num_wanted = NUM_OPEN if step + 1 == num_steps else NUM_COMPLETE
        is_due = {draw for draw, _ in tokens if begun[draw] <= step - MAX_AGE}
        done: set[int] = set()
        while len(done) < num_wanted or not is_due <= done:
            tokens = {key: min(number + 1, lengths[key]) for key, number in tokens.items()}
            done = {d for d, _ in tokens if all(tokens[d, s] == lengths[d, s] for s in range(NUM_SAMPLES))}
        tokens = {key: number for key, number in tokens.items() if key[0] not in done}
        yield sorted(done)


@pytest.fixture(scope="module")
def once() -> Sampled:
    """Each sample by one decode."""
    return step_through(ONE_RANK, 1, num_open=80, slots=64)[0]


def check(steps: list[Sampled], once: Sampled, max_age: int = MAX_AGE) -> None:
    lengths = {key: len(sampled) for key, (*_, sampled, _) in once.items()}
    assert [sorted({draw for draw, _ in step}) for step in steps] == list(simulate(lengths, len(steps)))
    first_ages = set()
    for version, step in enumerate(steps):
        assert step.keys() == {(draw, sample) for draw, _ in step for sample in range(NUM_SAMPLES)}
        for key, (tokens, logprobs, versions, *others) in step.items():
            assert (tokens, logprobs, *others) == (*once[key][:2], *once[key][3:]), "not the tokens of one decode"
            ages = version - np.array(versions)
            assert ages[-1] >= 0
            assert (np.diff(ages) <= 0).all(), "a token is older than the one before it"
            first_ages.add(int(ages[0]))
    assert first_ages == {*range(max_age + 1)}, "each age up to `max_age`, none above"
    done = [key for step in steps for key in step]
    assert len(done) == len(set(done)) == NUM_SAMPLES * (max(done)[0] + 1), "a sample is lost, or learned from twice"


@pytest.mark.parametrize(
    ("sizes", "drafts"), [({"slots": 24}, False), ({"slots": 7}, True), ({"slots": 24, "num_pages": 60}, True)]
)
def test_what_ends_is_decided_by_a_clock_of_tokens(sizes: dict[str, Any], drafts: bool, once: Sampled) -> None:
    """Whatever decodes: the groups of a simulation, and the tokens of one decode. So no distribution changes."""
    check(step_through(ONE_RANK, 9, drafts=drafts, **sizes), once)


@pytest.fixture(scope="module")
def once_with_tools() -> tuple[Sampled, Counter[Any]]:
    Ledger.num_steps.clear()
    return step_through(ONE_RANK, 1, has_tools=True, num_open=80, slots=64)[0], Counter(Ledger.num_steps)


@pytest.mark.parametrize(
    ("slots", "drafts"),
    [(16, True), pytest.param(5, False, marks=pytest.mark.slow), pytest.param(24, True, marks=pytest.mark.slow)],
)
def test_tools_take_no_time_and_are_not_called_twice(
    slots: int, drafts: bool, once_with_tools: tuple[Sampled, Counter[Any]]
) -> None:
    """Tools of random latency that remember all turns; whole samples are carried over, and turns cut by the clock."""
    once, num_steps = once_with_tools
    assert {talk.stop_reason for *_, (talk, *_) in once.values()} >= {"done", "turns", "observation"}
    Ledger.num_steps.clear()
    check(step_through(ONE_RANK, 7, has_tools=True, drafts=drafts, slots=slots), once, max_age=1)
    assert not Ledger.num_steps - num_steps, "a tool was called twice"


@FORKED
@pytest.mark.parametrize("has_tools", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_several_ranks_end_at_the_same_tick(has_tools: bool, once: Sampled, request: pytest.FixtureRequest) -> None:
    """With fewer slots than samples, so that ranks take what waits on others and are apart in time."""
    first, second = run_ranks(2, partial(step_through, slots=12), 7 if has_tools else 5, has_tools)
    assert first == second
    if has_tools:
        check(first, request.getfixturevalue("once_with_tools")[0], 1)
    else:
        check(first, once)


def test_lengths_and_tokens_keep_their_distribution() -> None:
    """Chi-square over what was learned from, against the geometric lengths of a policy that is exactly uniform.

    Without the last step, which is waited for, and the draws that were open then: a mode that dropped what is slow
    would see short samples alone.
    """
    *steps, last = step_through(ONE_RANK, 60, slots=24, scale=0.0)
    samples = [(key, version, *part[:3]) for version, step in enumerate(steps) for key, part in step.items()]
    learned = [(tokens, now - versions[0]) for key, now, tokens, _, versions in samples if key < min(last)]
    assert len(learned) > 700
    end = len(SAMPLING.end_token_ids) / 290
    edges = [1, 5, 10, 17, 25, 35, 50, 70, 100]  # the last class: ended by the limit, or at it
    survival = np.array([(1 - end) ** (edge - 1) for edge in edges])

    def p_value_of_lengths(max_age: int) -> float:
        counts = np.histogram([len(tokens) for tokens, age in learned if age <= max_age], [*edges, 1000])[0]
        shares = np.append(survival[:-1] - survival[1:], survival[-1])
        return float(chisquare(counts, counts.sum() * shares).pvalue)

    assert p_value_of_lengths(MAX_AGE) > 0.001
    assert p_value_of_lengths(0) < 1e-6, "without the groups that went on, the bias is seen"
    ends = [tokens[-1] for tokens, _ in learned if len(tokens) < SAMPLING.max_new_tokens]
    others = [token - len(SAMPLING.end_token_ids) for tokens, _ in learned for token in tokens[:-1]]
    assert min(chisquare(np.bincount(values)).pvalue for values in (ends, others)) > 0.001
