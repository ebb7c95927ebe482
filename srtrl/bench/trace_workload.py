"""A trace: recorded rollouts, some of which a drafter has seen before while the others are decoded once more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from srtrl.bench.rollout_options import RolloutBench
from srtrl.bench.workload import Workload
from srtrl.drafters.base import DrafterBase
from srtrl.engine.sampling import make_rng_key
from srtrl.model.transformer import ModelConfig
from srtrl.rollout.recorded import RecordedPrompt, Tokens, feed_drafter
from srtrl.types import Request, SamplingParams


@dataclass(kw_only=True, slots=True, frozen=True)
class Trace:
    """Recorded rollouts, shared out."""

    history: Mapping[tuple[int, ...], Sequence[Tokens]]
    """Prompt -> its rollouts of an epoch that is over, in the order of the file."""
    requests: tuple[Request, ...]
    """What is decoded, by prompt; `draw_index` is the prompt's number."""
    responses: Mapping[int, Tokens]
    """Stream of a request -> the tokens that it shall get."""


def share_out(prompts: Sequence[RecordedPrompt], *, history: float, seed: int) -> Trace:
    """Let the first `history` (0 to 1) of each prompt's samples be seen before, and the others be decoded.

    Raises:
        ValueError: No sample is left to decode.
    """
    earlier: dict[tuple[int, ...], Sequence[Tokens]] = {}
    requests = []
    responses = {}
    for draw, prompt in enumerate(prompts):
        num_earlier = round(history * len(prompt.samples))
        earlier[prompt.prompt_token_ids] = prompt.samples[:num_earlier]
        for sample, token_ids in enumerate(prompt.samples[num_earlier:]):
            rng_key = make_rng_key(seed, "train", draw, sample)
            responses[rng_key] = token_ids
            requests.append(
                Request(
                    prompt_id=prompt.prompt_id,
                    prompt_token_ids=prompt.prompt_token_ids,
                    draw_index=draw,
                    sample_index=sample,
                    rng_key=rng_key,
                    sampling=SamplingParams(max_new_tokens=len(token_ids)),
                    purpose="train",
                )
            )
    if not requests:
        raise ValueError(f"--history: {history:g} of the samples leaves none to decode; lower it")
    return Trace(history=earlier, requests=tuple(requests), responses=responses)


def trace_workloads(bench: RolloutBench, trace: Trace, config: ModelConfig) -> list[Workload]:
    """One rollout for each number of slots.

    Raises:
        ValueError: A token is not in the model's vocabulary, or a sequence is longer than the model was made for.
    """
    workloads = []
    for index, slots in enumerate(bench.slots):
        most = bench.num_prompts_at(index)
        requests = tuple(request for request in trace.requests if most is None or request.draw_index < most)
        if not requests:
            raise ValueError(f"--prompts-used: the first {most} prompts have no sample to decode; lower --history")
        _check_vocabulary(requests, trace, config)
        num_slots = slots or len(requests)
        workload = Workload(
            lengths="recorded",
            requests=requests,
            slots=num_slots,
            labels={"slots": str(num_slots), "sequences": str(len(requests))},
        )
        if workload.max_sequence_tokens > config.max_position_embeddings:
            raise ValueError(
                f"--max-tokens: the longest prompt and response together are {workload.max_sequence_tokens} tokens, "
                f"but the model was made for {config.max_position_embeddings}; lower it"
            )
        workloads.append(workload)
    return workloads


def _check_vocabulary(requests: Sequence[Request], trace: Trace, config: ModelConfig) -> None:
    largest = max(max(*request.prompt_token_ids, *trace.responses[request.rng_key].tolist()) for request in requests)
    if largest >= config.vocab_size:
        raise ValueError(
            f"--trace: token id {largest} is not in the model's vocabulary of {config.vocab_size}; choose a "
            "--model-shape of the family that the tokenizer belongs to"
        )


def feed_history(drafter: DrafterBase, trace: Trace, requests: Sequence[Request]) -> None:
    """Let the drafter see the earlier rollouts of the requests' prompts, as an epoch that is over."""
    of_prompt = {request.prompt_token_ids: request.prompt_id for request in requests}
    earlier = [
        RecordedPrompt(prompt_id=prompt_id, prompt_token_ids=prompt, samples=list(trace.history[prompt]))
        for prompt, prompt_id in of_prompt.items()
    ]
    feed_drafter(drafter, earlier, "train")
