"""The decoder: exactness whatever the slots, pages, order, drafts and threads; ends, errors and metrics."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_cases import PROMPTS, KnowingDrafter, decode, options, outputs, requests_for, tiny_policy

from srtrl.engine.engine import Engine
from srtrl.model.attention import PackedPlan
from srtrl.model.logprobs import token_logprobs
from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model, load_tokenizer
from srtrl.types import Completion, Request, SamplingParams


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def sequential(policy: Transformer, requests: list[Request]) -> dict[tuple[int, int], Completion]:
    """The reference: one slot, so one sample after the other and one token at a time."""
    return decode(Engine(policy, options(slots=1)), requests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_at_any_slots_pages_and_order(dtype: torch.dtype, threads: int) -> None:
    policy = tiny_policy(dtype)
    requests = requests_for()
    expected = outputs(sequential(policy, requests))
    assert len({tuple(tokens) for tokens, _, _ in expected.values()}) > len(expected) // 2
    for slots in (7, 64):
        assert outputs(decode(Engine(policy, options(slots=slots)), requests)) == expected
    reordered = requests[::-1]
    assert outputs(decode(Engine(policy, options(slots=7)), reordered)) == expected
    tight = Engine(policy, options(slots=7, num_pages=12))  # a longest sequence needs 9
    assert outputs(decode(tight, requests)) == expected
    assert tight.take_metrics()["engine/preemptions"] > 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
def test_draft_trees_change_nothing(dtype: torch.dtype, accuracy: float, threads: int) -> None:
    policy = tiny_policy(dtype)
    requests = requests_for()
    expected = sequential(policy, requests)
    for slots, num_pages in ((1, None), (7, None), (64, None), (7, 12)):
        drafter = KnowingDrafter(expected, accuracy=accuracy)
        engine = Engine(policy, options(slots=slots, num_pages=num_pages), drafter=drafter)
        assert outputs(decode(engine, requests)) == outputs(expected)
        metrics = engine.take_metrics()
        assert metrics["engine/verified_per_decode_step"] > 1.3
        assert (metrics["engine/tokens_per_decode_step"] > 1.2) == (accuracy > 0.5)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_rollout_logprobs_are_the_trainers(model_type: str) -> None:
    policy = tiny_policy(model_type=model_type)
    requests = requests_for(temperature=0.7)
    with torch.no_grad():
        for completion in decode(Engine(policy, options()), requests).values():
            prompt = completion.request.prompt_token_ids
            token_ids = torch.tensor([*prompt, *completion.token_ids])
            hidden = policy(token_ids, PackedPlan.from_lengths([len(token_ids)], "cpu"))
            rows = hidden[len(prompt) - 1 : -1]
            logprobs, _ = token_logprobs(rows, policy.head_weight, token_ids[len(prompt) :], temperature=0.7)
            assert torch.allclose(logprobs, torch.tensor(completion.rollout_logprobs), atol=1e-5, rtol=0)


def test_outside_deterministic_mode_greedy_text_is_the_same() -> None:
    policy = tiny_policy()
    requests = requests_for(temperature=0.0)
    expected = {k: c.token_ids for k, c in sequential(policy, requests).items()}
    found = decode(Engine(policy, options(slots=5, deterministic=False)), requests)
    assert {k: c.token_ids for k, c in found.items()} == expected


def test_float64_decodes_through_the_reference() -> None:
    policy = tiny_policy(torch.float64)
    requests = requests_for(num_samples=1, temperature=0.0)
    single = {k: c.token_ids for k, c in sequential(tiny_policy(), requests).items()}
    assert {k: c.token_ids for k, c in decode(Engine(policy, options()), requests).items()} == single


def test_a_cast_copy_decodes_in_its_own_type_and_follows_updates() -> None:
    policy = tiny_policy()
    requests = requests_for()
    engine = Engine(policy, options(decode_dtype=torch.bfloat16))
    assert outputs(decode(engine, requests)) == outputs(sequential(tiny_policy(torch.bfloat16), requests))
    changed = tiny_policy(scale=5.0)
    with torch.no_grad():
        for target, source in zip(policy.parameters(), changed.parameters(), strict=True):
            target.copy_(source)
    engine.on_policy_update()
    assert engine.policy_version == 1
    after = decode(engine, requests)
    assert outputs(after) == outputs(sequential(tiny_policy(torch.bfloat16, scale=5.0), requests))
    assert {completion.policy_version for completion in after.values()} == {1}


def test_ends_by_end_token_length_and_stop_string() -> None:
    class Letters:
        def decode(self, token_ids: list[int]) -> str:
            return "".join(chr(ord("A") + token) for token in token_ids)

    policy = tiny_policy()
    plain = decode(Engine(policy, options()), requests_for(num_samples=8))
    assert {c.finish_reason for c in plain.values()} == {"stop", "length"}
    for completion in plain.values():
        assert 0 not in completion.token_ids[:-1]
        assert (completion.token_ids[-1] == 0) == (completion.finish_reason == "stop")
        assert len(completion.token_ids) == len(completion.rollout_logprobs)
    whole = max(plain.values(), key=lambda completion: len(completion.token_ids))
    stop = Letters().decode(whole.token_ids[3:5])
    sampling = SamplingParams(max_new_tokens=24, end_token_ids=(0,), stop_strings=("no such text", stop))
    request = Request(
        prompt_id="0",
        prompt_token_ids=whole.request.prompt_token_ids,
        draw_index=0,
        sample_index=0,
        rng_key=whole.request.rng_key,
        sampling=sampling,
    )
    (stopped,) = decode(Engine(policy, options(), tokenizer=Letters()), [request]).values()
    end = Letters().decode(whole.token_ids).index(stop) + len(stop)
    assert stopped.token_ids == whole.token_ids[:end]
    assert stopped.finish_reason == "stop"


def bad_request(**changes: object) -> Request:
    sampling = SamplingParams(max_new_tokens=int(str(changes.pop("max_new_tokens", 4))))
    values: dict[str, object] = {"prompt_token_ids": (1, 2), "draw_index": 3, "sample_index": 1, "rng_key": 0}
    return Request(prompt_id="the-prompt", sampling=sampling, **(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (bad_request(prompt_token_ids=()), "the prompt is empty"),
        (bad_request(prompt_token_ids=(1, 61)), "token id 61 is not in the vocabulary of 61"),
        (bad_request(prompt_token_ids=(-1,)), "token id -1"),
        (bad_request(max_new_tokens=63), "2 prompt tokens and max_new_tokens 63 exceed the limit of 64"),
        (bad_request(max_new_tokens=60), "need 16 pages of 4, but there are 12"),
        (bad_request(max_new_tokens=0), "expected at least 1"),
    ],
)
def test_impossible_requests_are_refused_by_name_and_the_others_go_on(request_: Request, message: str) -> None:
    engine = Engine(tiny_policy(), options(num_pages=12))
    good = requests_for(num_samples=1, max_new_tokens=5)
    expected = outputs(sequential(tiny_policy(), good))
    with pytest.raises(ValueError, match="'the-prompt', sample 1.*" + message):
        engine.add(request_)
    assert outputs(decode(engine, good)) == expected


def test_a_consumer_that_stops_early_leaves_nothing_behind() -> None:
    engine = Engine(tiny_policy(), options())
    requests = requests_for()
    next(iter(engine.generate(requests)))
    engine.scheduler.check_integrity()
    assert engine.pool.num_used == 0
    again = {(c.request.draw_index, c.request.sample_index): c for c in engine.generate(requests)}
    assert outputs(again) == outputs(sequential(tiny_policy(), requests))


def test_broken_weights_are_reported_not_sampled() -> None:
    policy = tiny_policy()
    with torch.no_grad():
        policy.head_weight[3, 3] = torch.nan
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        list(Engine(policy, options()).generate(requests_for()))


def test_memory_too_small_for_one_sequence_and_sequences_too_long_for_the_model() -> None:
    with pytest.raises(ValueError, match=r"kv_memory_gib \(1e-06\) holds"):
        Engine(tiny_policy(), options(kv_memory_gib=1e-6))
    with pytest.raises(ValueError, match="max_position_embeddings"):
        Engine(tiny_policy(), options(max_sequence_tokens=257))


def test_metrics_count_what_was_done() -> None:
    engine = Engine(tiny_policy(), options(slots=100))
    completions = decode(engine, requests_for(num_samples=2))
    metrics = engine.take_metrics()
    assert metrics["engine/tokens"] == sum(len(c.token_ids) for c in completions.values())
    assert metrics["engine/prefill_tokens"] == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert metrics["engine/tokens_per_decode_step"] == 1
    assert engine.take_metrics()["engine/tokens"] == 0


def test_golden_story(shared_data: Path) -> None:
    folder = shared_data / "models/stories260K"
    request = Request(
        prompt_id="bos",
        prompt_token_ids=(1,),
        draw_index=0,
        sample_index=0,
        rng_key=0,
        sampling=SamplingParams(max_new_tokens=120, temperature=0.0),
    )
    engine = Engine(load_model(folder, dtype=torch.float32, device="cpu"), options(max_sequence_tokens=256))
    (completion,) = engine.generate([request])
    text = load_tokenizer(folder).decode(completion.token_ids)
    assert isinstance(text, str)
    assert text.strip().startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw "
        "a big, red ball. She wanted to play with it, but it was too high."
    )
