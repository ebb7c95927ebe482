"""Mode `partial`: what ends in a step is decided on a virtual clock, and nothing is lost or sampled twice."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from engine_cases import make_response, options, tiny_policy
from environment_cases import TOKENIZER, grader_of
from hypothesis import example, given
from hypothesis import strategies as st
from rank_cases import FORKED, run_ranks
from rollout_cases import make_group
from tiny_run import make_recipe

from srtrl import build
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.engine import Engine
from srtrl.engine.no_run_ahead import NoRunAhead
from srtrl.features.off_policy import PartialDraws, PartialSampler
from srtrl.rollout.collect import Collector, collect_rollouts
from srtrl.rollout.one_turn import OneTurn
from srtrl.tasks.order import DataOrder
from srtrl.trainer.credit import CreditAssigner
from srtrl.types import Prompt, Response, Rollout, RolloutGroup, SampleKey, SamplingParams

NUM_OPEN, NUM_COMPLETE, NUM_SAMPLES, MAX_AGE = 8, 5, 3, 2
SAMPLING = SamplingParams(max_new_tokens=100, end_token_ids=tuple(range(12)))
"""Sampling of a policy that is nearly uniform over 290 tokens: lengths are nearly geometric, with a long tail."""
Sampled = dict[SampleKey, tuple[list[int], list[float], list[int], Any]]
"""Tokens, log-probs and policy versions of each sample, and what does not depend on them."""


def step_through(
    num_steps: int,
    *,
    num_open: int = NUM_OPEN,
    drafts: bool = False,
    scale: float = 1.0,
    **sizes: Any,
) -> list[Sampled]:
    """The samples that each step learns from, with unchanged weights that count as new ones.

    The last step is waited for, so that all that have begun are seen.
    """
    sizes = {"max_sequence_tokens": 128, **sizes}
    policy = tiny_policy(vocab_size=290, scale=scale)
    engine = Engine(policy, options(**sizes), drafter=SrtDrafter() if drafts else None)
    turns = OneTurn(TOKENIZER)
    shared: dict[str, Any] = {"num_samples": NUM_SAMPLES, "sampling": SAMPLING, "seed": 5, "purpose": "train"}
    earlier: dict[SampleKey, Response] = {}
    steps: list[Sampled] = []
    new = count()
    with grader_of("test_rank_rollouts:half_tokens") as grader:
        for step in range(num_steps):
            going_on = sorted({draw for draw, _ in earlier})
            numbers = [*going_on, *(next(new) for _ in range(num_open - len(going_on)))]
            draws = [(n, Prompt(prompt_id=str(n), text="", token_ids=(1 + n % 7, 2), answer="")) for n in numbers]
            due = {draw for (draw, _), prefix in earlier.items() if prefix.policy_versions[0] <= step - MAX_AGE}
            part = PartialDraws(draws, num_complete=NUM_COMPLETE if step + 1 < num_steps else num_open, due=due)
            collector = Collector(
                grader, turns, prefixes=earlier, policy_version=step, ranks=build.choose_ranks(), **shared
            )
            rollouts = [rollout for group in collect_rollouts(engine, collector, part) for rollout in group.rollouts]
            steps.append({(r.draw_index, r.sample_index): contents_of(r) for r in rollouts})
            assert engine.pool.num_used == 0
            engine.end_step(has_new_weights=True)
            earlier = part.carried
    assert not earlier
    return steps


def contents_of(rollout: Rollout) -> tuple[list[int], list[float], list[int], Any]:
    response = rollout.response
    arrays = response.token_ids, response.rollout_logprobs, response.policy_versions
    token_ids, logprobs, versions = (array.tolist() for array in arrays)
    return token_ids, logprobs, versions, (rollout.grade, response.finish_reason)


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
    return step_through(1, num_open=80, slots=64)[0]


def check(steps: list[Sampled], once: Sampled) -> None:
    lengths = {key: len(tokens) for key, (tokens, *_) in once.items()}
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
    assert first_ages == {*range(MAX_AGE + 1)}, "each age up to `max_age`, none above"
    done = [key for step in steps for key in step]
    assert len(done) == len(set(done)) == NUM_SAMPLES * (max(done)[0] + 1), "a sample is lost, or learned from twice"


@pytest.mark.parametrize(
    ("sizes", "drafts"), [({"slots": 24}, False), ({"slots": 7}, True), ({"slots": 24, "num_pages": 60}, True)]
)
def test_what_ends_is_decided_by_a_clock_of_tokens(sizes: dict[str, Any], drafts: bool, once: Sampled) -> None:
    """Whatever decodes: the groups of a simulation, and the tokens of one decode. So no distribution changes."""
    check(step_through(9, drafts=drafts, **sizes), once)


@FORKED
def test_several_ranks_end_at_the_same_tick(once: Sampled) -> None:
    """With fewer slots than samples, so that ranks take what waits on others and are apart in time."""
    first, second = run_ranks(2, partial(step_through, slots=12), 5)
    assert first == second
    check(first, once)


@dataclass
class Counting:
    """A collector of which only the prefixes are used."""

    prefixes: Mapping[SampleKey, Response] = field(default_factory=dict)


RESUMED = st.tuples(st.integers(1, 9), st.sampled_from([0.1, 0.5, 1.0]), st.integers(1, 3), st.booleans())
"""Options of a step: `num_prompts`, `min_complete`, `max_age`, and whether sampling is dynamic."""


@given(st.lists(RESUMED, min_size=2, max_size=7), st.integers(0, 2**32))
@example([(8, 0.5, 3, False), (2, 0.5, 3, False), (1, 0.3, 3, False)], 0)
def test_each_draw_is_learned_from_once_whatever_a_resume_changes(changes: list[Any], seed: int) -> None:
    """Any groups end in a step; each sampler resumes from the one before."""
    random = np.random.default_rng(seed)

    def collect(_: object, collector: Counting, some: PartialDraws) -> list[RolloutGroup]:
        known = [draw for draw, _ in some.draws]
        ends = {*random.choice(known, some.num_complete, replace=False).tolist()} | some.due
        new = make_response([1], version=step, finish_reason=None)
        some.carried = {(draw, 0): collector.prefixes.get((draw, 0), new) for draw in known if draw not in ends}
        return [make_group(draw, [random.choice(["correct", "incorrect"])]) for draw in sorted(ends)]

    learned: list[int] = []
    num_draws, earlier = 0, dict[SampleKey, Response]()
    for step, (num_prompts, min_complete, max_age, is_dynamic) in enumerate(changes, start=1):
        rollout = {"mode": "partial", "min_complete": min_complete, "max_age": max_age}
        values: dict[str, Any] = {f"rollout__{name}": value for name, value in rollout.items()}
        algorithm = {
            "filters": ["test_partial:is_correct"],
            "importance": {"mode": "token_truncate", "max": 2.0},
            "old_logprobs": "recompute",
        }
        values |= {"rollout__num_prompts": num_prompts, "rollout__dynamic_sampling": is_dynamic}
        recipe = make_recipe(Path(), Path(), **values, algorithm=algorithm, train__mini_batch_prompts=1)
        engine: Any = SimpleNamespace(run_ahead=NoRunAhead(), policy_version=step)
        context: Any = SimpleNamespace(recipe=recipe, engine=engine, end_ids=(2,), started=lambda prompt: prompt)
        task: Any = SimpleNamespace(train_prompts=[make_group(draw, ["correct"]).prompt for draw in range(5)])
        sampler = PartialSampler(context, task, CreditAssigner(recipe), DataOrder(5, recipe.seed))
        sampler.num_draws, sampler.earlier = num_draws, earlier
        with mock.patch("srtrl.features.off_policy.collect_rollouts", collect):
            collected = sampler.collect(step, cast(Any, Counting()))
        learned += [group.draw_index for group in collected.groups]
        num_draws, earlier = sampler.num_draws, sampler.earlier
        assert sorted([*learned, *(draw for draw, _ in earlier)]) == [*range(num_draws)], "twice, or lost"


def is_correct(_: torch.Tensor, correct: torch.Tensor) -> torch.Tensor:
    """A filter that drops about half of the groups."""
    return correct[:, 0]
