"""The engine as it decodes on a CUDA device: the tokens of the CPU path, and the same bits with any drafts.

On a CPU most steps are computed in plain PyTorch from the static inputs (`compute_of`); some through the kernels.
"""

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from device_cases import (
    PROMPTS,
    VOCAB_SIZE,
    compute_of,
    device_engine,
    device_policy,
    device_requests,
    runner_of,
    shapes_of,
)
from engine_cases import KnowingDrafter, decode, options, outputs

from srtrl.engine import buckets, device_runner, device_step
from srtrl.engine.buckets import StepShape
from srtrl.engine.device_runner import DeviceRunner
from srtrl.engine.device_step import StepTensors
from srtrl.engine.engine import Engine
from srtrl.engine.graphs import EagerSteps, GraphedSteps
from srtrl.engine.step_buffers import ResultBuffer
from srtrl.types import Completion, Request

Completions = dict[tuple[int, int], Completion]
Results = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic steps of 8 rows instead of 64, for the interpreter is slow."""
    monkeypatch.setattr(device_runner, "ROWS_AT_ONCE", 8)


def sequential(requests: list[Request]) -> Completions:
    """The reference: the CPU path, one sample after the other and one token at a time."""
    return decode(Engine(device_policy("cpu"), options(slots=1, max_sequence_tokens=32)), requests)


def assert_same_text(found: Completions, expected: Completions) -> None:
    """Equal tokens, and log-probs that differ by rounding only."""
    assert {key: c.token_ids for key, c in found.items()} == {key: c.token_ids for key, c in expected.items()}
    assert {key: c.finish_reason for key, c in found.items()} == {key: c.finish_reason for key, c in expected.items()}
    for key, completion in found.items():
        assert np.allclose(completion.rollout_logprobs, expected[key].rollout_logprobs, atol=1e-4, rtol=0)


def drafts_for(requests: list[Request], completions: Completions, accuracy: float) -> KnowingDrafter:
    truth = [(r.prompt_token_ids, completions[r.draw_index, r.sample_index].token_ids) for r in requests]
    return KnowingDrafter(truth, accuracy=accuracy, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("deterministic", [True, False])
def test_tokens_are_those_of_the_cpu_path(deterministic: bool) -> None:
    requests = device_requests(num_samples=3, temperature=0.8)
    expected = sequential(requests)
    assert len({tuple(c.token_ids) for c in expected.values()}) > len(expected) // 2
    policy = device_policy()
    for slots, chunk, num_pages in ((9, 7, None), (2, 2, None), (9, 7, 8)):
        engine = device_engine(
            policy, deterministic=deterministic, slots=slots, prefill_chunk_tokens=chunk, num_pages=num_pages
        )
        assert_same_text(decode(engine, requests), expected)
    assert engine.take_metrics()["engine/preemptions"] > 0


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
def test_drafts_change_no_bit_in_deterministic_mode(accuracy: float) -> None:
    policy = device_policy()
    requests = device_requests(num_samples=3, max_new_tokens=14)
    expected = decode(device_engine(policy, slots=1), requests)
    for slots, num_pages in ((1, None), (9, None), (9, 9)):
        drafter = drafts_for(requests, expected, accuracy)
        engine = device_engine(policy, drafter=drafter, slots=slots, num_pages=num_pages)
        assert outputs(decode(engine, requests)) == outputs(expected)
        metrics = engine.take_metrics()
        assert metrics["engine/verified_per_decode_step"] > 1.2
        assert (metrics["engine/tokens_per_decode_step"] > 1.2) == (accuracy > 0.5)
        row_counts = {shape.num_rows for shape in shapes_of(engine)}
        assert len(row_counts) >= (1 if slots == 1 else 2)


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_drafts_change_no_token_in_free_mode(accuracy: float) -> None:
    requests = device_requests(num_samples=3)
    expected = sequential(requests)
    engine = device_engine(device_policy(), deterministic=False, drafter=drafts_for(requests, expected, accuracy))
    assert_same_text(decode(engine, requests), expected)
    assert len({shape.num_rows for shape in shapes_of(engine)}) > 3


@pytest.mark.usefixtures("few_rows")
def test_kernels_decode_as_the_cpu_path_and_drafts_change_no_bit() -> None:
    policy = device_policy()
    requests = device_requests(((1, 2, 3),), num_samples=2, max_new_tokens=3)
    expected = sequential(requests)
    plain = decode(device_engine(policy, kernels=True), requests)
    assert_same_text(plain, expected)
    drafted = device_engine(policy, kernels=True, drafter=drafts_for(requests, expected, 1.0))
    assert outputs(decode(drafted, requests)) == outputs(plain)
    assert drafted.take_metrics()["engine/tokens_per_decode_step"] > 1.2


def test_kernels_in_free_mode_decode_drafts_as_the_cpu_path() -> None:
    requests = device_requests(((5, 6),), num_samples=2, max_new_tokens=3)
    expected = sequential(requests)
    drafter = drafts_for(requests, expected, 1.0)
    engine = device_engine(device_policy(), kernels=True, deterministic=False, drafter=drafter)
    assert_same_text(decode(engine, requests), expected)


def test_top_k_and_top_p_requests_beside_others() -> None:
    filtered = device_requests(PROMPTS[:2], num_samples=1, max_new_tokens=4, top_k=5, top_p=0.7, temperature=1.3)
    others = device_requests(PROMPTS, num_samples=1, max_new_tokens=4, temperature=1.3)
    requests = [*filtered, *others[2:]]
    expected, unfiltered = sequential(requests), sequential(others)
    assert any(expected[key].token_ids != unfiltered[key].token_ids for key in unfiltered)
    assert_same_text(decode(device_engine(device_policy(), deterministic=False), requests), expected)


def test_stop_strings_and_recorded_tokens() -> None:
    class Letters:
        def decode(self, token_ids: list[int]) -> str:
            return "".join(chr(ord("A") + token) for token in token_ids)

    plain = sequential(device_requests(num_samples=1, max_new_tokens=10))
    whole = max(plain.values(), key=lambda completion: len(completion.token_ids))
    stop = Letters().decode(whole.token_ids[2:4])
    requests = device_requests(num_samples=1, max_new_tokens=10, stop_strings=(stop,))
    policy = device_policy()
    drafter = drafts_for(requests, plain, 1.0)
    stopped = decode(device_engine(policy, tokenizer=Letters(), drafter=drafter), requests)
    for key, completion in stopped.items():
        text = Letters().decode(plain[key].token_ids)
        end = text.index(stop) + len(stop) if stop in text else len(text)
        assert completion.token_ids == plain[key].token_ids[:end]
    engine = device_engine(policy, drafter=drafts_for(device_requests(num_samples=1), plain, 0.5))
    requests = device_requests(num_samples=1)
    engine.trace = {request.rng_key: np.arange(1, 7, dtype=np.int32) for request in requests}
    for completion in decode(engine, requests).values():
        assert completion.token_ids[:6] == [1, 2, 3, 4, 5, 6]


def test_steps_that_exceed_the_fixed_memory_get_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (buckets, device_runner):
        monkeypatch.setattr(module, "MAX_GRAPH_ROWS", 4)
    requests = device_requests(num_samples=3)
    engine = device_engine(device_policy(), deterministic=False, slots=9)
    assert_same_text(decode(engine, requests), sequential(requests))
    large = runner_of(engine)._large_memory
    assert large is not None
    assert large.max_rows > 4


@pytest.mark.parametrize("top_k", [0, 5])
def test_logits_go_through_one_small_buffer(monkeypatch: pytest.MonkeyPatch, top_k: int) -> None:
    monkeypatch.setattr(device_step, "LOGITS_AT_ONCE", 2)
    requests = device_requests(PROMPTS[:2], max_new_tokens=1, top_k=top_k)
    engine = device_engine(device_policy(), kernels=True, deterministic=False)
    assert len(runner_of(engine).device_step.logits) == 2
    assert_same_text(decode(engine, requests), sequential(requests))
    assert max(shape.num_logits for shape in shapes_of(engine)) > 2


def test_a_step_without_memory_names_the_option_that_helps() -> None:
    engine = device_engine(device_policy())

    def fail(step: StepTensors) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner_of(engine).executor = EagerSteps(fail)
    with pytest.raises(ValueError, match=r"decode step of \d+ rows .* rollout.kv_memory_share"):
        decode(engine, device_requests())


def test_prompts_are_not_waited_for_and_spoil_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = device_engine(device_policy(), slots=1, prefill_chunk_tokens=2)
    requests = device_requests(PROMPTS[1:2], num_samples=1, max_new_tokens=4)
    first = decode(engine, requests)
    engine.take_timeline()
    was_prepared = []
    wait = DeviceRunner.wait

    def logged(self: DeviceRunner) -> Results:
        was_prepared.append(self.was_prepared)
        return wait(self)

    monkeypatch.setattr(DeviceRunner, "wait", logged)
    assert outputs(decode(engine, requests)) == outputs(first)
    prompts_alone = [step.num_rows == 0 for step in engine.take_timeline()]
    assert prompts_alone == [True] * 3 + [False] * (len(prompts_alone) - 3)
    assert was_prepared == [True, *(not alone for alone in prompts_alone[:-1])], "what is left of a prompt comes after"


class Recorder:
    """Stands for `CudaCapturer`: a graph calls what was captured, with the views of the step it was captured from."""

    def __init__(self) -> None:
        self.num_captures = self.num_replays = 0

    def start_over(self) -> None:
        pass

    def capture(self, compute: Callable[[], None]) -> "Recording":
        self.num_captures += 1
        return Recording(self, compute)


class Recording:
    """A graph of the `Recorder`."""

    def __init__(self, recorder: Recorder, compute: Callable[[], None]) -> None:
        self.recorder = recorder
        self.compute = compute

    def replay(self) -> None:
        self.recorder.num_replays += 1
        self.compute()


def test_graphs_find_each_step_at_the_addresses_of_the_first() -> None:
    policy = device_policy()
    requests = device_requests(num_samples=3)
    expected = sequential(requests)
    engine = device_engine(policy, deterministic=False, drafter=drafts_for(requests, expected, 0.7))
    runner, recorder = runner_of(engine), Recorder()
    graphs = GraphedSteps(compute_of(runner), recorder, max_graphs=6)
    runner.executor = graphs
    assert_same_text(decode(engine, requests), expected)
    assert 0 < len(graphs) <= 6
    assert recorder.num_replays > recorder.num_captures > 0


def test_graphs_are_dropped_when_weights_or_pages_move_and_only_then() -> None:
    policy = device_policy()
    requests = device_requests(num_samples=2)
    engine = device_engine(policy)
    runner, recorder = runner_of(engine), Recorder()
    graphs = GraphedSteps(compute_of(runner), recorder)
    runner.executor = graphs
    first = decode(engine, requests)
    num_captures = recorder.num_captures
    engine.on_policy_update()
    assert outputs(decode(engine, requests)) == outputs(first)
    assert recorder.num_captures == num_captures
    with torch.no_grad():
        policy.final_norm.data = 2 * policy.final_norm
    engine.on_policy_update()
    assert len(graphs) == 0
    changed = decode(engine, requests)
    assert outputs(changed) != outputs(first)
    with torch.no_grad():
        policy.final_norm.mul_(0.5)  # in place: the same graphs read the new weights
    num_captures = recorder.num_captures
    engine.on_policy_update()
    assert outputs(decode(engine, requests)) == outputs(first)
    assert recorder.num_captures == num_captures


def test_pages_are_released_for_the_update_and_taken_back() -> None:
    policy = device_policy()
    requests = device_requests()
    for kept in (True, False):
        engine = device_engine(policy, kv_across_update="keep" if kept else "release")
        graphs = GraphedSteps(compute_of(runner_of(engine)), Recorder())
        runner_of(engine).executor = graphs
        first = decode(engine, requests)
        held = engine.kv_bytes()
        assert held == engine.pool.num_pages * runner_of(engine).page_bytes > 0
        engine.release_kv()
        assert engine.kv_bytes() == (held if kept else 0)
        engine.on_policy_update()
        assert len(graphs) > 0, "whether pages have moved is known when they are back"
        assert outputs(decode(engine, requests)) == outputs(first)
        assert engine.kv_bytes() == held


def test_graphs_do_not_outlive_fewer_pages_at_the_same_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers lie behind each other: with fewer pages all but the first have moved."""
    monkeypatch.setattr(device_runner, "addresses", lambda tensors: (1, 2, 3))
    engine = device_engine(device_policy(), num_pages=30)
    runner = runner_of(engine)
    graphs = GraphedSteps(compute_of(runner), Recorder())
    runner.executor = graphs
    decode(engine, device_requests())
    for num_pages, is_kept in ((30, True), (12, False)):
        assert len(graphs) > 0
        runner.release_pages()
        runner.allocate_pages(num_pages)
        assert (len(graphs) > 0) == is_kept


def test_memory_that_is_gone_after_the_update_means_fewer_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = device_policy()
    requests = device_requests()
    engine = device_engine(policy, kv_across_update="release", num_pages=30)
    first = decode(engine, requests)
    engine.release_kv()
    allocate = DeviceRunner.allocate_pages

    def short(self: DeviceRunner, num_pages: int) -> None:
        if num_pages > 12:
            raise torch.OutOfMemoryError("CUDA out of memory")
        allocate(self, num_pages)

    monkeypatch.setattr(DeviceRunner, "allocate_pages", short)
    with pytest.warns(UserWarning, match=r"got 1[12] pages .* where 30 .* rollout.kv_memory_share"):
        again = decode(engine, requests)
    assert outputs(again) == outputs(first)
    assert engine.pool.num_pages == runner_of(engine).num_pages <= 12
    assert engine.take_metrics()["engine/pages"] <= 12


def test_metrics_and_timeline_are_complete_though_they_are_kept_late() -> None:
    requests = device_requests(num_samples=3)
    cpu = Engine(device_policy("cpu"), options(slots=4, max_sequence_tokens=32))
    decode(cpu, requests)
    engine = device_engine(device_policy())
    for request in requests:
        engine.add(request)
    for num_steps in (1, 2):
        engine.step()
        assert len(engine.take_timeline()) == 1, num_steps
    decode_rest = [completion for _ in iter(lambda: engine.has_work, False) for completion in engine.step()]
    assert decode_rest
    expected, found = cpu.take_metrics(), engine.take_metrics()
    for name in ("engine/tokens", "engine/decode_steps", "engine/prefill_tokens", "engine/slots_in_use_mean"):
        assert found[name] == expected[name]
    assert len(engine.take_timeline()) == found["engine/decode_steps"] - 2


def test_the_hosts_share_of_a_step_is_told_apart_from_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = device_engine(device_policy())
    wait = ResultBuffer.wait

    def slow(
        self: ResultBuffer, num_logits: int, num_real: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        time.sleep(0.02)  # stands for the device
        return wait(self, num_logits, num_real)

    monkeypatch.setattr(ResultBuffer, "wait", slow)
    decode(engine, device_requests(num_samples=1))
    metrics = engine.take_metrics()
    assert metrics["engine/host_seconds"] < metrics["engine/forward_seconds"] - 0.019 * metrics[
        "engine/decode_steps"
    ] + (metrics["engine/draft_seconds"] + metrics["engine/sample_seconds"] + metrics["engine/commit_seconds"])
    assert 0 < metrics["engine/host_share"] < 1


def test_broken_weights_are_reported_not_sampled() -> None:
    policy = device_policy()
    with torch.no_grad():
        policy.head_weight[3, 3] = torch.nan
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        list(device_engine(policy).generate(device_requests()))


def test_the_cost_of_a_step_is_learned_at_the_edges_of_the_buckets() -> None:
    engine = device_engine(device_policy(), deterministic=False, draft_budget="auto")
    runner = runner_of(engine)
    cost = runner.step_cost(100)
    assert cost.edges.tolist() == runner.planner.row_edges(100)
    calls: list[StepShape] = []
    compute = compute_of(runner)

    def logged(step: StepTensors) -> None:
        calls.append(step.shape)
        compute(step)

    runner.executor = EagerSteps(logged)
    assert runner.time_forward(3, 10, 3) > 0
    assert len(calls) == 2, "a shape's first run may compile and capture: it is not the one that counts"
    assert runner.time_forward(3, 10, 3) > 0
    assert len(calls) == 3
    assert runner.time_forward(20, 10, 20, num_sequences=2) > 0
    assert calls[-1].num_rows == 24
    assert calls[-1].num_tiles < 24
    with pytest.raises(AssertionError, match="18 rows a sequence"):  # a root and 16 draft nodes at most
        runner.time_forward(18, 10, 18, num_sequences=1)
    with pytest.raises(AssertionError):
        runner.time_forward(1, 49, 1)  # the longest sequence, its drafts and one more have 49 positions
