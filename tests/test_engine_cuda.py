"""The engine with the runner of a CUDA device: the tokens of the CPU path, with any drafts; memory that comes and goes.

Without a GPU steps are computed in plain PyTorch from the inputs of the kernels (`compute_by_reference`);
`test_runners.py` compares the kernels. With one all tests run on it, as part of `pytest -m gpu`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import Completions, FakeDrafter, decode, options, outputs, requests_for
from kernel_cases import KERNEL_DEVICE
from runner_cases import runner_policy, use_reference
from test_draft_head import head_engine, make_head

from srtrl.build import build_runner
from srtrl.cuda.graphs import StepGraphs
from srtrl.cuda.runner import CudaRunner
from srtrl.cuda.shapes import LaunchShape
from srtrl.drafters.base import DrafterBase
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.engine.runner import SampledRows, page_bytes_of
from srtrl.model.transformer import Transformer
from srtrl.types import Request

PROMPTS = ((5,), (1, 2, 3, 4, 5, 6, 7), (3, 3, 3, 3))


def cuda_engine(
    policy: Transformer, *, drafter: DrafterBase | None = None, head: str | None = None, **changes: object
) -> Engine:
    """An engine as on a CUDA device; `head`: see `make_head`."""
    wanted = options(**({"max_sequence_tokens": 32, "slots": 4} | changes))
    runner = CudaRunner(policy, wanted, 32)
    if KERNEL_DEVICE == "cpu":
        use_reference(runner)
    if head is not None:
        return head_engine(policy, wanted, make_head(policy, head), drafter=drafter, runner=runner)
    return Engine(policy, wanted, drafter=drafter, runner=runner)


def cuda_requests(prompts: Sequence[tuple[int, ...]] = PROMPTS, **changes: Any) -> list[Request]:
    return requests_for(prompts, **({"num_samples": 2, "max_new_tokens": 14} | changes))


def runner_of(engine: Engine) -> CudaRunner:
    assert isinstance(engine.runner, CudaRunner)
    return engine.runner


def sequential(requests: list[Request]) -> Completions:
    """The reference: the CPU path, one sample after the other and one token at a time."""
    return decode(Engine(runner_policy().cpu(), options(slots=1, max_sequence_tokens=32)), requests)


def assert_same_text(found: Completions, expected: Completions) -> None:
    """Equal tokens, and log-probs that differ by rounding only."""
    assert found.keys() == expected.keys()
    for key, completion in found.items():
        assert completion.response.token_ids.tolist() == expected[key].response.token_ids.tolist()
        assert completion.response.finish_reason == expected[key].response.finish_reason
        logprobs, others = completion.response.rollout_logprobs, expected[key].response.rollout_logprobs
        np.testing.assert_allclose(logprobs, others, atol=2e-4, rtol=0)


def test_tokens_are_those_of_the_cpu_path_with_any_drafts() -> None:
    requests, policy = cuda_requests(temperature=0.8), runner_policy()
    expected = sequential(requests)
    assert len({tuple(c.response.token_ids.tolist()) for c in expected.values()}) > len(expected) // 2
    cases: list[tuple[int, int, int | None, float | None]] = [
        (2, 2, None, None),
        (9, 7, 8, None),
        (9, 7, None, 0.0),
        (1, 7, None, 0.7),
        (9, 7, 12, 0.7),
        (9, 7, None, 1.0),
    ]
    for slots, chunk, num_pages, accuracy in cases:
        drafter = None if accuracy is None else FakeDrafter(expected, accuracy=accuracy)
        engine = cuda_engine(policy, drafter=drafter, slots=slots, prefill_chunk_tokens=chunk, num_pages=num_pages)
        assert_same_text(decode(engine, requests), expected)
        metrics = engine.take_metrics()
        assert metrics["engine/preemptions"] > 0 or num_pages != 8
        assert 0 < metrics["engine/host_share"] <= 1
        assert (metrics["engine/verified_per_decode_step"] > 1.2) == (accuracy is not None)
        assert (metrics["engine/tokens_per_decode_step"] > 1.2) == ((accuracy or 0.0) > 0.5)
        assert len(runner_of(engine)._graphs) > 0 or accuracy, "with drafts few steps come twice"


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy, of the interpreter
@pytest.mark.parametrize("kind", ["random", "garbage"])
def test_tokens_and_guesses_of_a_draft_head_are_those_of_the_cpu_path(kind: str) -> None:
    """Two slots at a time and nine, with preemption; graphs are made for few numbers of sequences, and kept."""
    small = KERNEL_DEVICE == "cpu"  # its kernel takes the interpreter long
    policy, num_pages = runner_policy(), 6 if small else 8
    requests = cuda_requests(num_samples=2 if small else 3, max_new_tokens=10 if small else 14, temperature=0.8)
    expected = sequential(requests)
    for slots, pages in ((2, None), (9, num_pages)):
        wanted: dict[str, Any] = {"slots": slots, "num_pages": pages, "draft_budget": 4, "max_sequence_tokens": 32}
        on_cpu = runner_policy().cpu()
        engines = [
            cuda_engine(policy, head=kind, **wanted),
            head_engine(on_cpu, options(**wanted), make_head(on_cpu, kind)),
        ]
        accepted = []
        for engine in engines:
            for _ in range(2):
                assert_same_text(decode(engine, requests), expected)
                engine.end_step(has_new_weights=True)
            metrics = engine.take_metrics()
            names = (name for name in metrics if "acceptance_depth" in name or name == "engine/head_steps_share")
            accepted.append({name: metrics[name] for name in names})
            assert pages is None or metrics["engine/preemptions"] > 0
        assert accepted[0] == (accepted[1] if small else pytest.approx(accepted[1], rel=0.2))
        assert (accepted[0]["engine/head_acceptance_depth_1"] > 0) == (kind == "random")
        graphs = [key for key in runner_of(engines[0])._graphs._graphs if not isinstance(key, LaunchShape)]
        assert 1 <= len(graphs) <= slots


def test_steps_that_prepare_the_draft_head_spoil_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are compiled, and its graphs captured, in the host's time of the step before its guesses."""
    policy, events = runner_policy(), list[str]()
    engine = cuda_engine(policy, head="random", draft_budget=4)

    def log(owner: object, name: str, event: Callable[[Any], str]) -> None:
        function = getattr(owner, name)

        def logged(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            events.append(event(result))
            return result

        monkeypatch.setattr(owner, name, logged)

    log(engine.runner, "run", lambda is_known: "known" if is_known else "new")
    log(engine.control, "record", lambda _: "recorded")
    log(engine, "step", lambda _: "step")
    decode(engine, cuda_requests())
    steps = " ".join(events).split("step")
    assert any("new" in one for one in steps)
    assert any("known recorded" in one for one in steps)
    assert not any("new recorded" in one for one in steps)


def test_prompts_are_not_waited_for_and_spoil_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = cuda_engine(runner_policy(), slots=1, prefill_chunk_tokens=2)
    requests = cuda_requests(PROMPTS[1:2], num_samples=1, max_new_tokens=4)
    for _ in range(2):
        first = decode(engine, requests)
    calls: list[tuple[int, bool]] = []
    wait = CudaRunner.wait

    def logged(self: CudaRunner, num_sampled: int) -> SampledRows:
        calls.append((num_sampled, self.was_prepared))
        return wait(self, num_sampled)

    monkeypatch.setattr(CudaRunner, "wait", logged)
    assert outputs(decode(engine, requests)) == outputs(first)
    prompts_alone = [num_sampled == 0 for num_sampled, _ in calls]
    assert prompts_alone == [True] * 2 + [False] * (len(calls) - 2), "the last chunk comes with its root"
    was_prepared = [prepared for _, prepared in calls]
    assert was_prepared == [True, *(not alone for alone in prompts_alone[:-1])], "the rest of a prompt comes after it"


@pytest.mark.gpu
def test_graphs_and_single_launches_give_the_same_text() -> None:
    """In float32; libraries may choose other matrix products in a graph, which hardly ever changes a token."""
    requests, policy = cuda_requests(num_samples=8), runner_policy()
    expected = decode(cuda_engine(policy, cuda_graphs=False), requests)
    for max_graphs in (1, 2, 512):
        engine = cuda_engine(policy, drafter=FakeDrafter(expected, accuracy=0.7))
        graphs = StepGraphs(policy.device, max_graphs=max_graphs)
        runner_of(engine)._graphs = graphs
        found = decode(engine, requests)
        texts = [{key: one.response.token_ids.tolist() for key, one in some.items()} for some in (found, expected)]
        assert sum(texts[0][key] == texts[1][key] for key in expected) >= len(expected) - 1
        assert len(graphs) == max_graphs or 2 < len(graphs) < max_graphs


@pytest.mark.gpu
def test_pages_take_their_share_of_the_memory() -> None:
    policy = runner_policy().bfloat16()
    assert isinstance(build_runner(policy, EngineOptions(max_sequence_tokens=100)), CudaRunner)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    large = 16_384  # tokens of a page: so few slots can use all memory
    engine = cuda_engine(policy, page_size=large, kv_memory_gib="auto", slots=50_000)
    assert 0.4 * free < engine.runner.num_pages * page_bytes_of(policy, engine.options.page_size) < 0.51 * free
    del engine
    with pytest.raises(ValueError, match=r"rollout\.kv_memory_gib"):
        cuda_engine(policy, page_size=large, num_pages=int(1.2 * free) // page_bytes_of(policy, large))
