"""The decoder: threads, windows, updates, arrivals, errors, metrics. That its tokens are right: test_reference.py."""

import re
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from engine_cases import (
    PROMPTS,
    Completions,
    FakeDrafter,
    Outputs,
    decode,
    make_request,
    options,
    outputs,
    requests_for,
    tiny_policy,
)
from page_cases import check_pages
from torch import Tensor
from torch.nn import functional

from srtrl.drafters.base import Int32Array, Int64Array
from srtrl.engine import cpu_runner, kv_memory
from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.engine import Engine
from srtrl.engine.kv_memory import GIB, choose_num_pages, free_bytes, kv_bytes
from srtrl.features.run_ahead import RunAhead
from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model
from srtrl.types import Completion, Request, TopTokens


def sequential(policy: Transformer, requests: list[Request]) -> Completions:
    """The reference: one slot, so one sample after the other and one token at a time."""
    return decode(Engine(policy, options(slots=1)), requests)


def by_name(completions: list[Completion]) -> Completions:
    return {(c.request.draw_index, c.request.sample_index): c for c in completions}


@pytest.fixture(scope="module")
def policy() -> Transformer:
    return tiny_policy()


@pytest.fixture(scope="module")
def expected(policy: Transformer) -> Outputs:
    """Expected outputs of `requests_for()`."""
    return outputs(sequential(policy, requests_for()))


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_threads_give_the_bits_of_one_sample_at_a_time(dtype: torch.dtype, threads: int) -> None:
    """With few tokens: threads are slow for matrices as small as these. `test_engine_property.py` has one thread."""
    policy = tiny_policy(dtype)
    requests = requests_for([PROMPTS[1], PROMPTS[3]], num_samples=2, max_new_tokens=6)
    truth = sequential(policy, requests)
    assert len({tuple(c.response.token_ids.tolist()) for c in truth.values()}) > len(truth) // 2
    engine = Engine(policy, options(slots=4, num_pages=5), drafter=FakeDrafter(truth, accuracy=0.7))
    assert outputs(decode(engine, requests[::-1])) == outputs(truth)
    metrics = engine.take_metrics()
    assert metrics["engine/preemptions"] > 0
    assert metrics["engine/verified_per_decode_step"] > 1.3


class TopDrafter(FakeDrafter):
    """Notes the log-probs of new tokens that are among the most likely of their rows."""

    num_top = 3

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.likely: Counter[tuple[int, float]] = Counter()

    def observe_top(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array, top: TopTokens) -> None:
        tokens, places = np.nonzero(top.token_ids == token_ids[:, None])
        self.likely.update(zip(token_ids[tokens].tolist(), top.logprobs[tokens, places].tolist(), strict=True))
        self.observe(slots, token_ids, offsets)


def test_drafters_get_what_was_likely_in_place_of_each_token(policy: Transformer) -> None:
    truth = sequential(policy, requests_for(temperature=0.7))
    drafter = TopDrafter(truth, accuracy=0.7)
    decode(Engine(policy, options(slots=4, num_pages=20), drafter=drafter), requests_for(temperature=0.7))
    sampled = Counter(
        pair
        for c in truth.values()
        for pair in zip(c.response.token_ids.tolist(), c.response.rollout_logprobs.tolist(), strict=True)
    )
    assert drafter.likely <= sampled
    assert drafter.likely.total() > 0.2 * sampled.total()


def test_a_drafter_learns_while_a_device_would_compute(policy: Transformer) -> None:
    requests, calls = requests_for([PROMPTS[0]], num_samples=1), Mock()
    engine = Engine(policy, options(), drafter=FakeDrafter(sequential(policy, requests), accuracy=0.0))
    runner, drafter = engine.runner, engine.drafter
    for owner, name in ((runner, "launch"), (drafter, "learn_deferred"), (runner, "wait"), (drafter, "observe")):
        calls.attach_mock(Mock(wraps=getattr(owner, name)), name)
        setattr(owner, name, getattr(calls, name))
    decode(engine, requests)
    names = [call[0] for call in calls.mock_calls]
    decodes = names.count("observe")
    assert decodes > 1
    assert names[-4 * decodes - 1 :] == ["launch", "learn_deferred", "wait", "observe"] * decodes + ["learn_deferred"]


@pytest.mark.parametrize("window", [1, 3, 7])
def test_drafts_change_nothing_under_a_window(window: int) -> None:
    """It is shorter than draft trees are deep; with few pages, so that samples are preempted."""
    policy = tiny_policy(model_type="mistral", sliding_window=window)
    requests = requests_for()
    truth = sequential(policy, requests)
    assert outputs(truth) != outputs(sequential(tiny_policy(model_type="mistral", sliding_window=window + 1), requests))
    engine = Engine(policy, options(num_pages=14), drafter=FakeDrafter(truth, accuracy=0.7))
    assert outputs(decode(engine, requests[::-1])) == outputs(truth)
    metrics = engine.take_metrics()
    assert metrics["engine/preemptions"] > 0
    assert metrics["engine/verified_per_decode_step"] > 1.3


def test_impossible_requests_are_refused_by_name(policy: Transformer, expected: Outputs) -> None:
    """Before the rollout, and in the middle of it; the engine is usable afterwards."""
    engine = Engine(policy, options())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": (1, 61)}, "token id 61 is not in the vocabulary of 61"),
        ({"prompt": (-1,)}, "token id -1"),
        ({"max_new_tokens": 63}, "2 prompt tokens and max_new_tokens 63 exceed the limit of 64"),
    ]
    for changes, message in cases:
        bad = make_request(3, 1, **({"max_new_tokens": 4} | changes))
        with pytest.raises(ValueError, match="prompt '3', sample 1: .*" + message):
            list(engine.generate([*requests_for(), bad]))
        with pytest.raises(ValueError, match="prompt '3', sample 1: .*" + message):
            decode(engine, requests_for(), before_step=partial(engine.add, bad))
    assert outputs(decode(engine, requests_for())) == expected
    with pytest.raises(ValueError, match="max_position_embeddings"):
        Engine(policy, options(max_sequence_tokens=257))


def test_consumers_may_stop_early_add_late_and_not_generate_twice(policy: Transformer, expected: Outputs) -> None:
    engine = Engine(policy, options(slots=4), drafter=(drafter := FakeDrafter()))
    stopping = engine.generate(requests_for())
    next(stopping)
    stopping.close()  # type: ignore[attr-defined]
    check_pages(engine.scheduler)
    assert engine.pool.num_used == 0
    assert not drafter.live

    late = requests_for()
    found: list[Completion] = []
    for completion in engine.generate([late.pop()]):
        found.append(completion)
        if late:  # each time nothing else is decoding: this completion was the last
            assert not engine.has_work
            engine.add(late.pop())
    assert outputs(by_name(found)) == expected

    running = engine.generate(requests_for())
    found = [next(running)]
    for _ in range(2):
        with pytest.raises(ValueError, match="this engine is decoding already"):
            next(engine.generate(requests_for()))
        found.append(next(running))
    assert outputs(by_name([*found, *running])) == expected
    assert outputs(decode(engine, requests_for())) == expected


def test_the_cost_is_measured_where_something_depends_on_it(policy: Transformer) -> None:
    for budget, run_ahead, is_known in (
        ("auto", None, True),
        (0, None, False),
        (8, None, False),
        (8, partial(RunAhead, max_slowdown=0.03), True),
    ):
        engine = Engine(policy, options(slots=4, draft_budget=budget), drafter=FakeDrafter(), run_ahead=run_ahead)
        engine.warm_up()
        assert engine.control.cost.is_known == is_known


def test_metrics_count_what_was_done(policy: Transformer) -> None:
    engine = Engine(policy, options(slots=100))
    completions = decode(engine, requests_for(num_samples=2))
    metrics = engine.take_metrics()
    assert metrics["engine/tokens"] == sum(len(c.response.token_ids) for c in completions.values())
    # Two samples: the second shares the full pages of the prompt's tokens but the last, and computes the rest.
    rest = sum((len(prompt) - 1) % engine.options.page_size for prompt in PROMPTS)
    assert metrics["engine/prefill_tokens"] == sum(len(prompt) - 1 for prompt in PROMPTS) + rest
    assert metrics["engine/tokens_per_decode_step"] == 1
    assert engine.take_metrics()["engine/tokens"] == 0


def test_one_sequence_alone_has_the_bits_of_many_in_matrices_of_a_real_policys_width() -> None:
    """On some processors sums of 384 products are taken in other pieces with 8 rows: see `CpuRunner.min_rows`."""
    bundled = load_model("bundled:tiny", dtype=torch.float32, device="cpu")
    requests = requests_for(PROMPTS[:2], num_samples=8, max_new_tokens=12)
    found = [decode(Engine(bundled, options(slots=slots, max_sequence_tokens=64)), requests) for slots in (16, 1, 3)]
    assert [outputs(completions) for completions in found] == [outputs(found[0])] * 3


@pytest.mark.parametrize(
    ("num_other", "dtype", "min_rows", "row_counts"),
    [
        (0, torch.float32, 8, None),
        (8, torch.float32, 16, None),
        (24, torch.float32, 8, "16, 24"),
        (24, torch.bfloat16, 8, "16, 24"),
        (200, torch.bfloat16, 8, "16, 24, 32, 40, 48, 64, 96, 128, 192"),
        (1000, torch.bfloat16, 8, None),
    ],
)
def test_products_that_depend_on_the_number_of_rows_are_named_once(
    num_other: int,
    dtype: torch.dtype,
    min_rows: int,
    row_counts: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in bfloat16 on processors with AMX; here products of up to `num_other` rows are others."""

    def linear(rows: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(rows, weight) + float(len(rows) <= num_other)

    monkeypatch.setattr(cpu_runner, "functional", SimpleNamespace(linear=linear))
    cpu_runner.warn_of_rounding.cache_clear()
    policy = tiny_policy(dtype)
    for _ in range(2):
        engine = Engine(policy, options(draft_budget=0))
        engine.warm_up()
        assert isinstance(engine.runner, CpuRunner)
        assert engine.runner.min_rows == min_rows
    found = [re.sub(" are rounded otherwise here than .*", "", record.getMessage()) for record in caplog.records]
    name = str(dtype).removeprefix("torch.")
    assert found == ([] if row_counts is None else [f"model.dtype: {name} products of {row_counts} rows"])
    cpu_runner.warn_of_rounding.cache_clear()


# --- Memory of the KV cache -------------------------------------------------------------------------------------------


PAGE = GIB // 64


def test_memory_is_as_given_or_a_share_of_what_is_free_after_what_the_update_takes() -> None:
    for free in (80 * GIB, None):
        assert kv_bytes(2.5, free, reserved_bytes=GIB) == int(2.5 * GIB)
    assert kv_bytes("auto", free_bytes(torch.device("cpu")), reserved_bytes=0) == 4 * GIB
    for reserved, expected in ((0, 40), (20, 30), (100, 0)):
        assert kv_bytes("auto", 80 * GIB, reserved_bytes=reserved * GIB) == expected * GIB


def test_pages_are_as_many_as_are_of_use_or_as_fit() -> None:
    pages = partial(choose_num_pages, page_bytes=PAGE, page_size=16, slots=4, max_sequence_tokens=100)
    assert pages(GIB) == 4 * 8  # 7 pages a sequence and one more
    assert pages(20 * PAGE + 1) == 20
    assert pages(7 * PAGE) == 7
    with pytest.raises(ValueError, match=r"hold 6 pages, but one sequence of 100 tokens needs 7, 0.109 GiB: allow it"):
        pages(7 * PAGE - 1)


def test_a_full_device_says_what_would_lower_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "free_bytes", lambda _: 5 * GIB)
    with pytest.raises(ValueError, match=r"0 GiB hold 0 .*5.0 GiB of the device are free, .* 6.0\. `srtrl show-config"):
        Engine(tiny_policy(), options(num_pages=None, kv_memory_gib="auto", kv_reserved_bytes=6 * GIB))


def test_a_device_without_the_memory_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(runner: CpuRunner, num_pages: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CpuRunner, "allocate_pages", fail)
    with pytest.raises(ValueError, match=r"is to have 0.00 GiB, and the device has not as much.*rollout.kv_memory_gib"):
        Engine(tiny_policy(), options(num_pages=3))
