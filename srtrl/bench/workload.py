"""What the engines of a benchmark decode: prompts, and the tokens that each sample gets."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from srtrl.drafters.base import DrafterBase
from srtrl.engine.engine import Engine
from srtrl.engine.sampling import make_rng_key
from srtrl.model.transformer import ModelConfig
from srtrl.resolve import resolve_class
from srtrl.rollout.recorded import RecordedPrompt, Tokens, feed_drafter, load_recorded_tokenizer, read_recorded
from srtrl.types import Completion, Request, SamplingParams


@dataclass(kw_only=True, slots=True, frozen=True)
class Trace:
    """Recorded rollouts, some of which a drafter has seen before while the others are decoded once more."""

    history: tuple[RecordedPrompt, ...]
    """What the drafter has seen: of each prompt its first samples."""
    requests: tuple[Request, ...]
    """What is decoded, by prompt; `draw_index` is the prompt's number."""
    responses: dict[int, Tokens]
    """RNG key of a request -> the tokens that it shall get."""

    @property
    def max_sequence_tokens(self) -> int:
        """The longest prompt and response together."""
        return max(len(request.prompt_token_ids) + request.sampling.max_new_tokens for request in self.requests)

    def first_prompts(self, num_prompts: int) -> "Trace":
        """What is left of it with the first prompts alone.

        Raises:
            ValueError: No sample of theirs is left to decode.
        """
        requests = tuple(request for request in self.requests if request.draw_index < num_prompts)
        if not requests:
            raise ValueError(f"--prompts-used: the first {num_prompts} prompts have no sample to decode; use more")
        return Trace(history=self.history[:num_prompts], requests=requests, responses=self.responses)

    def check_model(self, config: ModelConfig) -> None:
        """Raise ValueError where a token or the length of a sequence is not for the model."""
        sequences = [(request.prompt_token_ids, self.responses[request.rng_key]) for request in self.requests]
        largest = max(max(*prompt, int(response.max())) for prompt, response in sequences)
        if largest >= config.vocab_size:
            raise ValueError(
                f"--trace: token id {largest} is not in the model's vocabulary of {config.vocab_size}; choose a "
                "--model-shape of the family that the tokenizer belongs to"
            )
        if self.max_sequence_tokens > config.max_position_embeddings:
            raise ValueError(
                f"--max-tokens: the longest prompt and response together are {self.max_sequence_tokens} tokens, but "
                f"the model was made for {config.max_position_embeddings}; lower it"
            )


def read_trace(path: Path, *, tokenizer: str | None, max_tokens: int | None) -> list[RecordedPrompt]:
    """The recorded rollouts of `--trace`, cut to `--max-tokens`.

    Raises:
        ValueError: The file cannot be read, or has texts and no tokenizer was given.
    """
    try:
        loaded = load_recorded_tokenizer(tokenizer) if tokenizer is not None else None
    except ValueError as error:
        raise ValueError(f"--tokenizer: {error}") from error
    return read_recorded(path, tokenizer=loaded, max_tokens=max_tokens or sys.maxsize).prompts()


def share_out(prompts: Sequence[RecordedPrompt], *, history: float) -> Trace:
    """Let the first `history` (0 to 1) of each prompt's samples be seen before, and the others be decoded.

    Raises:
        ValueError: No sample is left to decode.
    """
    seen, requests, responses = [], [], {}
    for draw, prompt in enumerate(prompts):
        num_seen = round(history * len(prompt.samples))
        seen.append(
            RecordedPrompt(
                prompt_id=prompt.prompt_id, prompt_token_ids=prompt.prompt_token_ids, samples=prompt.samples[:num_seen]
            )
        )
        for index, token_ids in enumerate(prompt.samples[num_seen:]):
            request = make_request(prompt.prompt_token_ids, draw, index, len(token_ids), prompt_id=prompt.prompt_id)
            requests.append(request)
            responses[request.rng_key] = token_ids
    if not requests:
        raise ValueError(f"--history: {history:g} of the samples leaves none to decode; lower it")
    return Trace(history=tuple(seen), requests=tuple(requests), responses=responses)


def make_request(
    prompt: tuple[int, ...],
    draw_index: int,
    sample_index: int,
    max_new_tokens: int,
    *,
    prompt_id: str | None = None,
) -> Request:
    """A sample that ends after `max_new_tokens` and nowhere else."""
    return Request(
        prompt_id=str(draw_index) if prompt_id is None else prompt_id,
        prompt_token_ids=prompt,
        draw_index=draw_index,
        sample_index=sample_index,
        rng_key=make_rng_key(0, "train", draw_index, sample_index),
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        purpose="train",
    )


def random_prompts(
    num_prompts: int, *, shortest: int, longest: int, vocab_size: int, seed: int
) -> list[tuple[int, ...]]:
    """Prompts of random token ids whose numbers of tokens are uniform from `shortest` to `longest`."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(shortest, longest + 1, num_prompts)
    return [tuple(generator.integers(0, vocab_size, size).tolist()) for size in sizes]


SAMPLES_OF_A_PROMPT = 16
NUM_WORDINGS = 3
"""Of each generated prompt: its samples go along one of them and change at random places."""
CHANGE, NEW_TOKEN = 0.06, 0.03
"""Chances, at each token of a generated sample, that the wording changes and that nothing before has this token."""


def generated_prompts(num_prompts: int, *, max_tokens: int, vocab_size: int, seed: int = 0) -> list[RecordedPrompt]:
    """Rollouts that repeat each other about as the samples of one prompt do: `SAMPLES_OF_A_PROMPT` for each.

    With half of them as history, `srt` reaches about the tokens per step that it reaches on recorded mathematics.
    """
    generator = np.random.default_rng(seed)
    made = []
    for number, prompt in enumerate(
        random_prompts(num_prompts, shortest=32, longest=128, vocab_size=vocab_size, seed=seed)
    ):
        wordings = _zipf_tokens(generator, (NUM_WORDINGS, max_tokens), vocab_size)
        samples = []
        for _ in range(SAMPLES_OF_A_PROMPT):
            length = int(np.clip(generator.lognormal(np.log(0.6 * max_tokens), 0.3), 8, max_tokens))
            chosen = generator.integers(0, NUM_WORDINGS, length)
            last_change = np.maximum.accumulate(np.where(generator.random(length) < CHANGE, np.arange(length), 0))
            tokens = wordings[chosen[last_change], np.arange(length)]
            is_new = generator.random(length) < NEW_TOKEN
            samples.append(np.where(is_new, _zipf_tokens(generator, (length,), vocab_size), tokens).astype(np.int32))
        made.append(RecordedPrompt(prompt_id=str(number), prompt_token_ids=prompt, samples=samples))
    return made


def _zipf_tokens(generator: np.random.Generator, shape: tuple[int, ...], vocab_size: int) -> Tokens:
    """Token ids whose frequencies fall as those of words."""
    token_ids: Tokens = (np.exp(generator.random(shape) * np.log(vocab_size)) - 1).astype(np.int32)
    return token_ids


def drafter_maker(name: str) -> Callable[[], DrafterBase]:
    """What makes a drafter of that name with its default options.

    Raises:
        ValueError: There is none.
    """
    try:
        drafter: type[DrafterBase] = resolve_class("srtrl.drafters", name, "Drafter")
    except ValueError as error:
        raise ValueError(f"--drafters: {error}") from error
    return drafter


def prepare(engine: Engine, drafter: DrafterBase, trace: Trace) -> None:
    """Let the engine sample the trace, with a drafter that has seen the history and nothing else."""
    feed_drafter(drafter, trace.history, "train")
    engine.drafter = drafter
    engine.trace = trace.responses


def check_completions(completions: Sequence[Completion], trace: Trace, name: str) -> None:
    """Assert that each completion is the recorded one, token for token."""
    assert len(completions) == len(trace.requests), f"{name} did not decode all samples"
    for completion in completions:
        expected = trace.responses[completion.request.rng_key].tolist()
        assert completion.token_ids == expected, f"{name} did not sample the trace"
