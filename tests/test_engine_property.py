"""All at once: slots, pages, chunks, budgets, drafts, run-aheads and arrivals change no completion."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from engine_cases import PROMPTS, Completions, FakeDrafter, Letters, decode, options, outputs, requests_for, tiny_policy
from hypothesis import given
from hypothesis import strategies as st

from srtrl.engine.draft_budget import StepCost
from srtrl.engine.engine import Engine
from srtrl.features.run_ahead import RunAhead
from srtrl.model.transformer import Transformer
from srtrl.types import Request


def varied_requests(seed: int = 0) -> list[Request]:
    """Plain, filtered, greedy and stopping samples, which end in all ways."""
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": 3},
        {"stop_strings": ("B", "CDE")},
        {"temperature": 0.0},
        {"top_p": 0.7, "temperature": 1.5},
        {"end_token_ids": (0, 3, 5, 7)},
    )
    return [
        replace(request, sampling=replace(request.sampling, **changes[number % len(changes)]))
        for number, request in enumerate(requests_for(PROMPTS[:4], max_new_tokens=12, seed=seed))
    ]


Case = tuple[Transformer, Completions, dict[int, list[int]]]
"""A policy, the completions of `varied_requests()`, and tokens by RNG key: of these, and of others to run ahead of."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        policy = tiny_policy(dtype)
        truth, others = (
            decode(Engine(policy, options(slots=1), tokenizer=Letters()), varied_requests(seed)) for seed in (0, 5)
        )
        by_key = {c.request.rng_key: c.response.token_ids.tolist() for c in (*truth.values(), *others.values())}
        found.append((policy, truth, by_key))
    return found


@given(data=st.data())
def test_completions_do_not_depend_on_how_they_are_decoded(cases: list[Case], data: st.DataObject) -> None:
    policy, truth, by_key = data.draw(st.sampled_from(cases), "dtype")
    page_size = data.draw(st.sampled_from([1, 4, 16]), "page size")
    longest = max(len(c.request.prompt_token_ids) + c.request.sampling.max_new_tokens for c in truth.values())
    chosen = options(
        slots=data.draw(st.sampled_from([1, 2, 5, 16, 40]), "slots"),
        page_size=page_size,
        num_pages=-(-longest // page_size) + data.draw(st.integers(0, 80), "spare pages") // page_size,
        prefill_chunk_tokens=data.draw(st.integers(1, 40), "chunk"),
        draft_budget=data.draw(st.sampled_from(["auto", 0, 1, 16]), "budget"),
        max_draft_nodes=data.draw(st.sampled_from([1, 16, 40]), "nodes"),
    )
    cost = StepCost(points=((8, 1.0), (64, data.draw(st.sampled_from([1.0, 1.5, 8.0]), "cost of 64 rows"))))
    drafter = FakeDrafter(truth, accuracy=data.draw(st.sampled_from([0.0, 0.6, 1.0]), "accuracy"))
    slowdown = data.draw(st.sampled_from([None, 0.03, 1e9]), "slowdown")
    run_ahead = None if slowdown is None else partial(RunAhead, max_slowdown=slowdown)
    engine = Engine(policy, chosen, tokenizer=Letters(), drafter=drafter, cost=cost, run_ahead=run_ahead)
    requests = data.draw(st.permutations(varied_requests()), "order")
    num_first = data.draw(st.integers(0, len(requests)), "at once")
    # Of samples that come late, and of such as never come.
    ahead = data.draw(st.sets(st.sampled_from([*requests[num_first:], *varied_requests(5)]), max_size=6), "run-aheads")
    pauses = data.draw(st.integers(1, 6), "steps between arrivals")
    num_steps = 0

    def before_step() -> None:
        nonlocal num_steps
        num_steps += 1
        if late and (num_steps % pauses == 0 or not engine.has_work):
            engine.add(late.pop())

    for _ in range(2):  # the second time with all that the first one left
        late = requests[num_first:]
        found = decode(engine, requests[:num_first], run_ahead=list(ahead), before_step=before_step)
        assert outputs(found) == outputs(truth)
        assert not drafter.live
        for rng_key, said in drafter.said.items():
            assert said == by_key[rng_key][: len(said)]
