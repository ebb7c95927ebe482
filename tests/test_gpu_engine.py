"""The decoder on a CUDA device, graphs included: same bits with any drafts, and memory that comes and goes."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import KnowingDrafter, decode, outputs
from srtrl.engine.device_runner import DeviceRunner
from srtrl.engine.graphs import CudaCapturer, GraphedSteps

from srtrl.engine.engine import Engine, EngineOptions
from srtrl.engine.sampling import make_rng_key
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Transformer
from srtrl.model.weights import init_model
from srtrl.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 1000
Completions = dict[tuple[int, int], Completion]


@pytest.fixture(autouse=True)
def _memory_of_earlier_engines_is_free() -> None:
    """Engines and their graphs are in cycles: what one test allocates must not be missing in the next one."""
    gc.collect()
    torch.cuda.empty_cache()


def policy_of(dtype: torch.dtype, device: str = "cuda", model_type: str = "qwen2") -> Transformer:
    config = {
        "model_type": model_type,
        "architectures": [{"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[model_type]],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    model = init_model(config_from_hf(config), seed=1, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return model.to(dtype=dtype, device=device)


def requests_of(*, num_prompts: int = 5, num_samples: int = 6, max_new_tokens: int = 80) -> list[Request]:
    return [
        Request(
            prompt_id=str(draw),
            prompt_token_ids=tuple(range(1 + draw, 8 + 30 * draw)),
            draw_index=draw,
            sample_index=sample,
            rng_key=make_rng_key(0, "train", draw, sample),
            sampling=SamplingParams(max_new_tokens=max_new_tokens, end_token_ids=(0,)),
        )
        for draw in range(num_prompts)
        for sample in range(num_samples)
    ]


def engine_of(policy: Transformer, *, drafter: KnowingDrafter | None = None, **changes: object) -> Engine:
    values: dict[str, object] = {
        "slots": 16,
        "max_sequence_tokens": 512,
        "draft_budget": 16,
        "max_draft_nodes": 16,
        "kv_memory_gib": 0.25,
    }
    return Engine(policy, EngineOptions(**(values | changes)), drafter=drafter)  # type: ignore[arg-type]


def drafter_of(requests: list[Request], completions: Completions, accuracy: float) -> KnowingDrafter:
    truth = [(r.prompt_token_ids, completions[r.draw_index, r.sample_index].token_ids) for r in requests]
    return KnowingDrafter(truth, accuracy=accuracy, vocab_size=VOCAB_SIZE)


def graphs_of(engine: Engine) -> GraphedSteps:
    assert isinstance(engine.runner, DeviceRunner)
    assert isinstance(engine.runner.executor, GraphedSteps)
    return engine.runner.executor


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_float32_tokens_are_those_of_the_cpu_decoder(model_type: str) -> None:
    requests = requests_of(num_samples=2, max_new_tokens=40)
    expected = decode(engine_of(policy_of(torch.float32, "cpu", model_type)), requests)
    for deterministic in (False, True):
        found = decode(
            engine_of(policy_of(torch.float32, model_type=model_type), deterministic=deterministic), requests
        )
        same = sum(found[key].token_ids == expected[key].token_ids for key in expected)
        assert same >= len(expected) - 1, "one token in some thousands may lie on the border"
        for key, completion in found.items():
            if completion.token_ids == expected[key].token_ids:
                pairs = zip(completion.rollout_logprobs, expected[key].rollout_logprobs, strict=True)
                assert max(abs(a - b) for a, b in pairs) < 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_deterministic_bits_at_any_slots_drafts_and_pages(dtype: torch.dtype) -> None:
    policy = policy_of(dtype)
    requests = requests_of()
    expected = decode(engine_of(policy, deterministic=True, slots=1), requests)
    for changes in ({"slots": 16}, {"slots": 30}, {"slots": 30, "num_pages": 60}, {"cuda_graphs": False}):
        assert outputs(decode(engine_of(policy, deterministic=True, **changes), requests)) == outputs(expected)
        for accuracy in (0.0, 0.7, 1.0):
            drafter = drafter_of(requests, expected, accuracy)
            engine = engine_of(policy, deterministic=True, drafter=drafter, **changes)
            assert outputs(decode(engine, requests)) == outputs(expected)


def test_graphs_and_single_launches_give_the_same_text_in_free_mode() -> None:
    policy = policy_of(torch.float32)
    requests = requests_of()
    graphed = engine_of(policy, deterministic=False)
    found = decode(graphed, requests)
    assert len(graphs_of(graphed)) > 2
    expected = decode(engine_of(policy, deterministic=False, cuda_graphs=False), requests)
    same = sum(found[key].token_ids == expected[key].token_ids for key in expected)
    assert same >= len(expected) - 1, "libraries may choose other kernels; in float32 that hardly ever flips a token"


@pytest.mark.parametrize("name", ["varlen", "flash"])
def test_a_librarys_attention_gives_the_log_probs_of_our_kernel(name: str) -> None:
    """In graphs, with sequences that come and go: the same tokens are taken, so that log-probs can be compared."""
    policy = policy_of(torch.bfloat16)
    requests = requests_of()
    expected = decode(engine_of(policy, attention="triton", page_size=256), requests)
    try:
        engine = engine_of(policy, attention=name, page_size=256)
    except ValueError as error:
        pytest.skip(str(error))
    truth = {request.rng_key: expected[request.draw_index, request.sample_index].token_ids for request in requests}
    engine.trace = {rng_key: np.array(tokens, np.int32) for rng_key, tokens in truth.items()}
    found = decode(engine, requests)
    backends = [shape.launch.backend for shape in graphs_of(engine)._graphs]
    assert any(backend is not None and backend.name == name for backend in backends)
    for key, completion in found.items():
        assert completion.token_ids == expected[key].token_ids
        pairs = zip(completion.rollout_logprobs, expected[key].rollout_logprobs, strict=True)
        differences = [abs(a - b) for a, b in pairs]
        assert sum(differences) / len(differences) < 0.05


def test_few_graphs_suffice() -> None:
    policy = policy_of(torch.bfloat16)
    requests = requests_of()
    expected = decode(engine_of(policy, deterministic=True), requests)
    for most in (1, 2):
        engine = engine_of(policy, deterministic=True, drafter=drafter_of(requests, expected, 0.7))
        runner = engine.runner
        assert isinstance(runner, DeviceRunner)
        runner.executor = GraphedSteps(runner.device_step.compute, CudaCapturer(policy.device), max_graphs=most)
        assert outputs(decode(engine, requests)) == outputs(expected)
        assert len(graphs_of(engine)) == most


def test_graphs_read_weights_that_were_updated_in_place() -> None:
    policy = policy_of(torch.bfloat16)
    requests = requests_of(num_samples=2)
    engine = engine_of(policy, deterministic=True)
    decode(engine, requests)
    num_graphs = len(graphs_of(engine))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    engine.on_policy_update()
    assert len(graphs_of(engine)) == num_graphs
    assert outputs(decode(engine, requests)) == outputs(decode(engine_of(policy, deterministic=True), requests))


def test_pages_are_released_and_taken_back() -> None:
    policy = policy_of(torch.bfloat16)
    requests = requests_of(num_samples=2)
    engine = engine_of(policy, deterministic=True, kv_across_update="release", num_pages=20_000)
    first = decode(engine, requests)
    held = engine.kv_bytes()
    before = torch.cuda.memory_allocated()
    engine.release_kv()
    assert before - torch.cuda.memory_allocated() >= held
    assert outputs(decode(engine, requests)) == outputs(first)
    assert engine.kv_bytes() == held


def test_more_memory_than_there_is_means_fewer_pages_and_a_warning() -> None:
    policy = policy_of(torch.bfloat16)
    requests = requests_of(num_samples=2)
    expected = decode(engine_of(policy, deterministic=True), requests)
    page_bytes = engine_of(policy).runner.page_bytes
    free, _ = torch.cuda.mem_get_info()
    with pytest.warns(UserWarning, match="rollout.kv_memory_share"):
        engine = engine_of(policy, deterministic=True, num_pages=int(1.2 * free / page_bytes))
    assert engine.kv_bytes() < free
    assert outputs(decode(engine, requests)) == outputs(expected)


def test_auto_takes_its_share_of_free_memory() -> None:
    policy = policy_of(torch.bfloat16)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    engine = engine_of(policy, kv_memory_gib="auto", kv_memory_share=0.25, slots=1_000_000)
    assert 0.2 * free < engine.kv_bytes() < 0.26 * free


def test_the_host_is_told_apart_from_the_device() -> None:
    engine = engine_of(policy_of(torch.bfloat16), deterministic=False)
    decode(engine, requests_of())
    metrics = engine.take_metrics()
    assert 0 < metrics["engine/host_share"] < 1


def test_top_p_requests_beside_others_are_sampled_from_their_nucleus() -> None:
    policy = policy_of(torch.float32)
    requests = requests_of(num_samples=2, max_new_tokens=20)
    sampling = SamplingParams(max_new_tokens=20, end_token_ids=(0,), top_k=20, top_p=0.5)
    some = [replace(request, sampling=sampling) for request in requests[::2]]
    mixed = [*some, *requests[1::2]]
    expected = decode(engine_of(policy.to("cpu")), mixed)
    found = decode(engine_of(policy_of(torch.float32), deterministic=False), mixed)
    same = sum(found[key].token_ids == expected[key].token_ids for key in expected)
    assert same >= len(expected) - 1
