"""All at once: slots, pages, chunks, budgets, drafts, run-aheads and arrivals change no completion."""

from dataclasses import replace
from typing import Any

import pytest
from engine_cases import KnowingDrafter, decode, options, outputs, requests_for, tiny_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from srtrl.engine.engine import Engine
from srtrl.model.transformer import Transformer
from srtrl.types import Completion, Request


class Letters:
    """A tokenizer of one letter for each token."""

    def decode(self, token_ids: list[int], /) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)


def varied_requests() -> list[Request]:
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
        for number, request in enumerate(requests_for())
    ]


@pytest.fixture(scope="module")
def policy() -> Transformer:
    return tiny_policy()


@pytest.fixture(scope="module")
def truth(policy: Transformer) -> dict[tuple[int, int], Completion]:
    return decode(Engine(policy, options(slots=1), tokenizer=Letters()), varied_requests())


class Ahead(KnowingDrafter):
    """Also has run-aheads decoded."""

    uses_run_aheads = True


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_completions_do_not_depend_on_how_they_are_decoded(
    policy: Transformer, truth: dict[tuple[int, int], Completion], data: st.DataObject
) -> None:
    slots = data.draw(st.sampled_from([1, 2, 5, 16, 40]), "slots")
    page_size = data.draw(st.sampled_from([1, 4, 16]), "page size")
    longest = max(len(c.request.prompt_token_ids) + c.request.sampling.max_new_tokens for c in truth.values())
    chosen = options(
        slots=slots,
        page_size=page_size,
        num_pages=-(-longest // page_size) + data.draw(st.integers(0, 80), "spare pages") // page_size,
        prefill_chunk_tokens=data.draw(st.integers(1, 40), "chunk"),
        draft_budget=data.draw(st.sampled_from(["auto", 0, 1, 16]), "budget"),
        max_draft_nodes=data.draw(st.sampled_from([1, 16, 40]), "nodes"),
        cost_points=((8, 1.0), (64, data.draw(st.sampled_from([1.0, 1.5, 8.0]), "cost of 64 rows"))),
        run_ahead_max_slowdown=data.draw(st.sampled_from(["auto", float("inf")]), "slowdown"),
    )
    drafter = Ahead(truth, accuracy=data.draw(st.sampled_from([0.0, 0.6, 1.0]), "accuracy"))
    engine = Engine(policy, chosen, tokenizer=Letters(), drafter=drafter)
    requests = data.draw(st.permutations(varied_requests()), "order")
    num_first = data.draw(st.integers(0, len(requests)), "at once")
    late = requests[num_first:]
    ahead = [replace(one, is_run_ahead=True) for one in data.draw(st.lists(st.sampled_from(requests), max_size=6))]
    pauses = data.draw(st.integers(1, 6), "steps between arrivals")
    num_steps = 0

    def before_step() -> None:
        nonlocal num_steps
        num_steps += 1
        engine.scheduler.check_integrity()
        if late and (num_steps % pauses == 0 or not engine.has_work):
            engine.add(late.pop())

    for _ in range(2):  # the second time with all that the first one left
        late = requests[num_first:]
        found = {
            (completion.request.draw_index, completion.request.sample_index): completion
            for completion in engine.generate(requests[:num_first], run_ahead=ahead, before_step=before_step)
        }
        assert outputs(found) == outputs(truth)
        assert not drafter.requests
        assert engine.pool.num_used == 0
