"""The engine on a CUDA device: the tokens of the CPU path, with any drafts; memory that comes and goes.

Without a GPU that is the fake device, on which kernels run under Triton's interpreter, as whole steps, captured and
replayed; with one all tests run on it, as part of `pytest -m gpu`. The slow ones are part of `make check-gpu-static`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_head_cases import SPECFORGE, make_folder
from engine_cases import Completions, FakeDrafter, Letters, decode, options, outputs, requests_for
from fake_cuda import FakeCuda
from kernel_cases import KERNEL_DEVICE
from runner_cases import runner_policy
from test_draft_head import head_engine, make_head
from test_turns import converse, turn_requests

from srtrl.build import add_head, build_runner
from srtrl.cuda.runner import CudaRunner
from srtrl.cuda.shapes import LaunchShape
from srtrl.drafters.base import DrafterBase
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.draft_budget import StepCost
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.engine.runner import SampledRows, page_bytes_of
from srtrl.engine.step_inputs import Int32Array
from srtrl.features.attention_head import load_eagle3
from srtrl.features.draft_head import Float32Array
from srtrl.features.head_drafter import HeadDrafter
from srtrl.types import Request

PROMPTS = ((5,), (1, 2, 3, 4, 5, 6, 7), (3, 3, 3, 3))


def engines(
    make_drafter: Callable[[], DrafterBase] = NoDrafter, head: str | None = None, **changes: Any
) -> tuple[Engine, Engine]:
    """One with the runner of a device, and one of the CPU; `head`: see `make_head`."""
    chosen = options(**({"max_sequence_tokens": 32, "slots": 4, "draft_budget": 4} | changes))

    def engine(device: str) -> Engine:
        policy = runner_policy().to(device)
        runner = build_runner(policy, chosen) if device == "cuda" else CpuRunner(policy, chosen)
        if head is None:
            return Engine(policy, chosen, tokenizer=Letters(), drafter=make_drafter(), runner=runner)
        return head_engine(policy, chosen, make_head(policy, head), drafter=make_drafter(), runner=runner)

    return engine("cuda"), engine("cpu")


def cuda_requests(prompts: tuple[tuple[int, ...], ...] = PROMPTS, **changes: Any) -> list[Request]:
    return requests_for(prompts, **({"num_samples": 2, "max_new_tokens": 9, "temperature": 0.6} | changes))


def runner_of(engine: Engine) -> CudaRunner:
    assert isinstance(engine.runner, CudaRunner)
    return engine.runner


def assert_same(found: Completions, expected: Completions) -> None:
    """Equal tokens, and log-probs that differ by rounding only."""
    texts, others = outputs(found), outputs(expected)
    assert {key: (one[0], one[2]) for key, one in texts.items()} == {key: (o[0], o[2]) for key, o in others.items()}
    for key, (_, logprobs, _) in texts.items():
        np.testing.assert_allclose(logprobs, others[key][1], atol=2e-4, rtol=0)


def record_guesses(engine: Engine) -> list[tuple[Int32Array, Float32Array]]:
    """The list that gets the tokens and margins of all guesses of an engine's head."""
    assert isinstance(engine.drafter, HeadDrafter)
    guesses, found = engine.drafter._guesses, []
    wait = guesses.wait

    def recorded() -> tuple[Int32Array, Float32Array]:
        tokens, margins = wait()
        found.append((tokens.copy(), margins.copy()))
        return tokens, margins

    guesses.wait = recorded  # type: ignore[method-assign]
    return found


def check_rollouts(
    device: FakeCuda, pair: tuple[Engine, Engine], requests: list[Request], *, times: int = 2
) -> list[dict[str, float]]:
    """Each rollout gives the CPU's tokens, the later ones with replayed graphs; the metrics of both."""
    for _ in range(times):
        found, expected = (decode(engine, requests) for engine in pair)
        assert_same(found, expected)
        for engine in pair:
            engine.end_step(has_new_weights=True)
    assert times == 1 or device.num_replays > device.num_captures > 0 or KERNEL_DEVICE == "cuda"
    assert not device.findings
    return [engine.take_metrics() for engine in pair]


def test_an_engine_without_drafts(device: FakeCuda) -> None:
    """In a step the host waits for what it has sent and for what comes back, and for nothing else.

    Small products are summed in float32.
    """
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = True
    pair = engines()
    assert not matmul.allow_bf16_reduced_precision_reduction
    device.waits.clear()
    metrics, _ = check_rollouts(device, pair, cuda_requests(num_samples=1, temperature=0.8))
    assert {wait.split(" at ")[0] for wait in device.waits} <= {"event.synchronize"}
    assert 0 < metrics["engine/host_share"] <= 1


@pytest.mark.parametrize(
    ("slots", "chunk", "num_pages", "accuracy"),
    [
        (2, 2, None, None),
        (9, 7, 8, None),
        (9, 7, 8, 0.7),
        pytest.param(1, 7, None, 1.0, marks=pytest.mark.slow),
        pytest.param(9, 7, None, 0.0, marks=pytest.mark.slow),
    ],
)
def test_prompts_in_parts_preempted_samples_and_drafts_of_any_kind(
    device: FakeCuda, slots: int, chunk: int, num_pages: int | None, accuracy: float | None
) -> None:
    requests = cuda_requests(temperature=0.8)
    truth = decode(engines()[1], requests)
    pair = engines(
        lambda: NoDrafter() if accuracy is None else FakeDrafter(truth, accuracy=accuracy),
        slots=slots,
        prefill_chunk_tokens=chunk,
        num_pages=num_pages,
        draft_budget=16,
    )
    metrics, _ = check_rollouts(device, pair, requests, times=1)
    assert (metrics["engine/preemptions"] > 0) == (num_pages is not None)
    assert (metrics["engine/verified_per_decode_step"] > 1.2) == (accuracy is not None)
    assert (metrics["engine/tokens_per_decode_step"] > 1.2) == ((accuracy or 0.0) > 0.5)


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy, of the interpreter
@pytest.mark.parametrize(
    ("drafter", "head", "changes"),
    [
        pytest.param(SrtDrafter, None, {}, marks=pytest.mark.slow, id="srt"),
        pytest.param(SrtDrafter, "random", {}, marks=pytest.mark.slow, id="srt and head"),
        pytest.param(NoDrafter, "random", {"slots": 9, "num_pages": 6}, id="head, few pages"),
        pytest.param(NoDrafter, "garbage", {"slots": 2}, marks=pytest.mark.slow, id="head of garbage"),
        pytest.param(SrtDrafter, "garbage", {"slots": 9, "num_pages": 6}, marks=pytest.mark.slow, id="all of it"),
    ],
)
def test_drafters_have_the_guesses_of_the_cpu_path(
    device: FakeCuda, drafter: type[DrafterBase], head: str | None, changes: Any
) -> None:
    """Graphs of a head are made for few numbers of sequences, and kept."""
    pair = engines(drafter, head, **changes)
    metrics, others = check_rollouts(device, pair, cuda_requests(), times=3 if drafter is SrtDrafter else 2)
    if drafter is NoDrafter:  # `srt` learns from the most likely tokens, of which a block of the kernel gives two
        for name in (name for name in metrics if "acceptance_depth" in name or name == "engine/head_steps_share"):
            assert metrics[name] == pytest.approx(others[name], rel=0.2 if KERNEL_DEVICE == "cuda" else 0), name
    assert (metrics.get("engine/head_acceptance_depth_1", 0) > 0) == (head == "random")
    assert (metrics["engine/preemptions"] > 0) == ("num_pages" in changes)
    graphs = [key for key in runner_of(pair[0])._graphs._graphs if not isinstance(key, LaunchShape)]
    assert (1 if head else 0) <= len(graphs) <= pair[0].options.slots


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy, of the interpreter
@pytest.mark.parametrize("num_pages", [None, pytest.param(6, marks=pytest.mark.slow)])
def test_an_attention_head_has_the_guesses_of_the_cpu_path(
    device: FakeCuda, num_pages: int | None, tmp_path: Path
) -> None:
    """It has graphs beside those of the steps, which keep the states that it reads."""
    read = {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}
    folder = make_folder(tmp_path, runner_policy(), SPECFORGE, eagle_config=read)

    def engine(place: str) -> Engine:
        policy = runner_policy().to(place)
        head = load_eagle3(str(folder), policy)
        chosen = options(
            max_sequence_tokens=32, slots=9, draft_budget=4, num_pages=num_pages, state_layers=head.config.reads
        )
        runner = build_runner(policy, chosen) if place == "cuda" else CpuRunner(policy, chosen)
        drafter = add_head(3, NoDrafter(), head, runner, chosen, StepCost(points=((8, 1.0), (64, 1.0))))
        return Engine(policy, chosen, tokenizer=Letters(), drafter=drafter, runner=runner)

    requests = cuda_requests() if num_pages else cuda_requests(PROMPTS[1:2], max_new_tokens=7)
    pair = engine("cuda"), engine("cpu")
    guesses, of_cpu = record_guesses(pair[0]), record_guesses(pair[1])
    metrics, others = check_rollouts(device, pair, requests, times=2 if num_pages else 1)
    assert len(guesses) == len(of_cpu) > 5
    for (tokens, margins), (expected, of_expected) in zip(guesses, of_cpu, strict=True):
        assert tokens.tolist() == expected.tolist()
        np.testing.assert_allclose(margins, of_expected, rtol=0, atol=1e-3)
    assert any(not isinstance(key, LaunchShape) for key in runner_of(pair[0])._graphs._graphs)
    names = [name for name in metrics if "acceptance_depth" in name or name == "engine/head_steps_share"]
    assert {name: metrics[name] for name in names} == {name: others[name] for name in names}
    assert metrics["engine/head_acceptance_depth_1"] > 0
    assert (metrics["engine/preemptions"] > 0) == (num_pages is not None)


def test_weights_that_change_in_place_and_weights_that_move(device: FakeCuda) -> None:
    """Only the latter need new graphs, which are counted."""
    pair = engines()
    for change in ("none", "in place", "moved"):
        for engine in pair:
            for parameter in engine.runner.model.parameters():
                with torch.no_grad():
                    parameter.mul_(1.0 if change == "none" else 1.2)
                parameter.data = parameter.data.clone() if change == "moved" else parameter.data
            engine.end_step(has_new_weights=True)
        requests = cuda_requests(PROMPTS[:1], num_samples=1, max_new_tokens=6)
        metrics, others = check_rollouts(device, pair, requests)
        assert (metrics["engine/graphs_dropped"] > 0) == (change == "moved")
        assert "engine/graphs_dropped" not in others


@pytest.mark.slow
def test_turns_and_stop_strings(device: FakeCuda) -> None:
    pair = engines(SrtDrafter, max_sequence_tokens=64, draft_budget=3)
    requests = [
        replace(one, prompt_token_ids=one.prompt_token_ids[:4])
        for one in turn_requests(num_samples=1, max_new_tokens=24)
    ]
    found, expected = (converse(engine, requests) for engine in pair)
    assert_same(found, expected)
    assert any(completion.response.extensions for completion in found.values())
    assert not device.findings


@pytest.mark.skipif(KERNEL_DEVICE == "cuda", reason="the fake device knows what was compiled")
def test_the_devices_kernels_are_compiled_before_the_first_rollout(device: FakeCuda) -> None:
    chosen = options(max_sequence_tokens=32, slots=4, draft_budget=0)
    policy = runner_policy().to("cuda")
    engine = Engine(policy, chosen, runner=build_runner(policy, chosen), compile_kernels=lambda _: None)
    assert not device.kernels
    engine.warm_up()
    known = {name for name, *_ in device.kernels}
    assert known >= {"attend_tiles", "add_rms_norm_rows", "rank_blocks", "finish_rows"}
    decode(engine, requests_for(PROMPTS[:2], num_samples=2, max_new_tokens=4))
    assert {name for name, *_ in device.kernels} <= known | {"combine_splits"}


def test_prompts_are_not_waited_for_and_spoil_no_measurement(device: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engines(slots=1, prefill_chunk_tokens=2)
    requests = cuda_requests(PROMPTS[1:2], num_samples=1, max_new_tokens=4)
    for _ in range(2):
        first = decode(engine, requests)
    calls: list[tuple[bool, bool]] = []
    wait = CudaRunner.wait

    def logged(self: CudaRunner, num_sampled: int) -> SampledRows:
        calls.append((num_sampled == 0, self.was_prepared))
        return wait(self, num_sampled)

    monkeypatch.setattr(CudaRunner, "wait", logged)
    assert outputs(decode(engine, requests)) == outputs(first)
    prompts_alone, was_prepared = map(list, zip(*calls, strict=True))
    assert prompts_alone == [True] * 2 + [False] * (len(calls) - 2), "the last chunk comes with its root"
    assert was_prepared == [True, *(not alone for alone in prompts_alone[:-1])], "the rest of a prompt comes after it"
    assert not device.findings, "the next step is written when the device has read the last one"


@pytest.mark.gpu
def test_graphs_and_single_launches_give_the_same_text() -> None:
    """In float32; libraries may choose other matrix products in a graph, which hardly ever changes a token."""
    requests = cuda_requests(num_samples=8, max_new_tokens=14)
    expected = decode(engines(cuda_graphs=False)[0], requests)
    engine, _ = engines(lambda: FakeDrafter(expected, accuracy=0.7), draft_budget=16)
    found = decode(engine, requests)
    texts = [{key: one.response.token_ids.tolist() for key, one in some.items()} for some in (found, expected)]
    assert sum(texts[0][key] == texts[1][key] for key in expected) >= len(expected) - 1
    assert len(runner_of(engine)._graphs) > 2


@pytest.mark.gpu
def test_pages_take_their_share_of_the_memory() -> None:
    policy = runner_policy().bfloat16()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    large = 16_384  # tokens of a page: so few slots can use all memory

    def engine(**changes: Any) -> Engine:
        chosen = EngineOptions(max_sequence_tokens=32, page_size=large, **changes)
        return Engine(policy, chosen, runner=build_runner(policy, chosen))

    made = engine(kv_memory_gib="auto", slots=50_000)
    assert 0.4 * free < made.runner.num_pages * page_bytes_of(policy, large) < 0.51 * free
    del made
    with pytest.raises(ValueError, match=r"rollout\.kv_memory_gib"):
        engine(num_pages=int(1.2 * free) // page_bytes_of(policy, large))
