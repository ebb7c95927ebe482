"""A model with its tokenizer, its decoder and perhaps an environment: what `srtrl generate` and its Python twin use."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from srtrl.checks import import_foreign
from srtrl.environments.options import KEY, EnvironmentFlags
from srtrl.recipe.file import RecipeError, RecipeSource, read_source, validate_section
from srtrl.recipe.schema import EnvironmentSection
from srtrl.types import (
    Completion,
    Conversation,
    FinishReason,
    Prompt,
    Request,
    SamplingParams,
    SegmentKind,
    segment_slices,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.drafters.base import DrafterBase
    from srtrl.engine.engine import Engine
    from srtrl.environments.conversations import Conversations

KV_SHARE = 0.85
"""Of a CUDA device's free memory, the part for pages: there is no update to leave room for, but logits are large."""
MAX_TOKENS = 1 << 30
"""No recorded rollout is longer."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GeneratedSegment:
    """A part of a completion of several turns."""

    kind: SegmentKind
    """`model`, `observation` (what a tool said) or `boundary` (what the format puts around that)."""
    token_ids: list[int]
    text: str
    logprobs: list[float] | None
    """None where nobody sampled."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Generated:
    """One completion of a prompt."""

    text: str
    """Without special tokens, cut before a stop string."""
    token_ids: list[int]
    """The end token, if one was sampled, is the last."""
    logprobs: list[float]
    """Of each token, under the full distribution at the temperature."""
    finish_reason: FinishReason
    """`stop` or `length`."""
    segments: list[GeneratedSegment] = field(default_factory=list)
    """With an environment: the parts of the completion, in order."""
    num_turns: int = 1
    stop_reason: str = ""
    """With an environment: why the turns ended, as in the metrics `environment/stop_<reason>`."""


class Completer:
    """A model with its tokenizer and its environment, and how its completions are sampled.

    Use it as a context manager: the environment is open inside.
    """

    def __init__(
        self,
        model_or_run: str,
        sampling: SamplingParams,
        *,
        num_samples: int,
        seed: int,
        environment: EnvironmentFlags,
        import_from_here: bool = False,
    ) -> None:
        """The arguments are those of `generate`, `sampling` without the model's end tokens and the environment's stops.

        Of the folder of a run the model is its last checkpoint.
        """
        from srtrl.environments.conversations import Conversations
        from srtrl.evaluation.policy import resolve_eval_source
        from srtrl.model.weights import end_token_ids, load_tokenizer

        self.model, recipe = resolve_eval_source(model_or_run)
        section = _read_environment(recipe, environment, import_from_here=import_from_here)
        self.tokenizer = load_tokenizer(self.model)
        self.conversations = None if section is None else Conversations(section, self.tokenizer)
        stops = self.conversations.format.stop_strings if self.conversations else ()
        end_tokens = end_token_ids(self.model, self.tokenizer)
        self.sampling = replace(sampling, end_token_ids=end_tokens, stop_strings=(*sampling.stop_strings, *stops))
        self._num_samples = num_samples
        self._seed = seed

    def requests(self, draws: Sequence[tuple[int, Prompt]]) -> list[Request]:
        """The samples of prompts, each with its place on the command line or in the list."""
        from srtrl.rollout.collect import sample_requests

        requests = sample_requests(
            draws, num_samples=self._num_samples, sampling=self.sampling, seed=self._seed, purpose="generate"
        )
        return [replace(one, has_turns=self.conversations is not None) for one in requests]

    def __enter__(self) -> Self:
        if self.conversations is not None:
            self.conversations.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.conversations is not None:
            self.conversations.__exit__(*exception)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """What the chat template tells the policy of."""
        return self.conversations.tools if self.conversations else []

    def started(self, prompt: Prompt) -> Prompt:
        """The prompt with what the environment begins with; ValueError where that cannot be put after token ids."""
        started = prompt if self.conversations is None else self.conversations.started(prompt, MAX_TOKENS)
        if started is not prompt and not prompt.text:
            raise ValueError("the environment begins with messages of its own, which needs a prompt of text")
        return started

    def complete(self, engine: Engine, draws: Sequence[tuple[int, Prompt]]) -> Iterator[tuple[Request, Generated]]:
        """The samples of prompts in their order, each as soon as it and those before it are there.

        Raises:
            ValueError: the environment has raised in every sample.
        """
        requests = self.requests(draws)
        samples: Iterable[tuple[Completion, Conversation | None]]
        if self.conversations is None:
            samples = ((one, None) for one in engine.generate(requests))
        else:
            samples = self._converse(self.conversations, engine, requests, dict(draws))
        for completion, conversation in _in_order(requests, samples):
            yield completion.request, self._generated(completion, conversation)
        if self.conversations is not None:
            self.conversations.check_not_all_raised("generate")

    def _converse(
        self,
        conversations: Conversations,
        engine: Engine,
        requests: Sequence[Request],
        prompts: Mapping[int, Prompt],
    ) -> Iterator[tuple[Completion, Conversation]]:
        """Samples with all their turns, as they end."""
        from concurrent.futures import FIRST_COMPLETED, wait

        from srtrl.environments.conversations import POLL_SECONDS
        from srtrl.rollout.collect import finish_turns

        ended: deque[tuple[Completion, Conversation]] = deque()

        def advance() -> None:
            ended.extend(finish_turns(engine, conversations, wait_for_tools))

        def wait_for_tools() -> None:
            wait(conversations.futures(), POLL_SECONDS, FIRST_COMPLETED)

        for completion in engine.generate(requests, before_step=advance):
            conversations.submit_turn(completion, prompts[completion.request.draw_index])
            while ended:
                yield ended.popleft()
        yield from ended

    def _generated(self, completion: Completion, conversation: Conversation | None) -> Generated:
        from srtrl.rollout.collect import response_text

        token_ids, logprobs = completion.token_ids, completion.rollout_logprobs
        whole = Generated(
            text=response_text(self.tokenizer, token_ids, () if conversation else self.sampling.stop_strings),
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
        )
        if conversation is None:
            return whole
        segments = []
        for (kind, part), text in zip(segment_slices(conversation.segments), conversation.texts, strict=True):
            sampled = logprobs[part] if kind == "model" else None
            segments.append(GeneratedSegment(kind=kind, token_ids=token_ids[part], text=text, logprobs=sampled))
        return replace(whole, segments=segments, num_turns=conversation.num_turns, stop_reason=conversation.stop_reason)

    def open_engine(
        self,
        prompts: Collection[tuple[int, ...]],
        *,
        slots: int,
        dtype: str,
        device: str,
        drafter: str,
        kv_memory_gib: float | None = None,
        cache: Path | None = None,
    ) -> Engine:
        """A decoder for these prompts, with its kernels compiled.

        Raises:
            ValueError: the model cannot be loaded, the drafter is unknown, or there is no such device or memory.
        """
        import torch

        from srtrl.engine.engine import Engine, EngineOptions
        from srtrl.engine.warm_up import COMPILE_MESSAGE
        from srtrl.model.weights import load_model, read_config

        config = read_config(self.model)
        built_drafter = _build_drafter(drafter, cache, self.tokenizer, config.vocab_size, prompts)
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device: cuda, but torch sees no CUDA device here; use --device cpu or leave it out")
        device = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        policy = load_model(self.model, dtype=getattr(torch, dtype), device=torch.device(device))
        longest = max(map(len, prompts)) + self.sampling.max_new_tokens
        options = EngineOptions(
            slots=slots,
            max_sequence_tokens=min(longest, config.max_position_embeddings),
            kv_memory_gib="auto" if kv_memory_gib is None else kv_memory_gib,
            kv_memory_share=KV_SHARE,
        )
        engine = Engine(policy, options, tokenizer=self.tokenizer, drafter=built_drafter)
        engine.warm_up(lambda number, _: print(COMPILE_MESSAGE, file=sys.stderr) if number == 1 else None)
        return engine


def _read_environment(
    recipe: Path | None, flags: EnvironmentFlags, *, import_from_here: bool = False
) -> EnvironmentSection | None:
    """The environment of a run's recipe, if there is one, with what the flags say; None: a single turn.

    Raises:
        ValueError: the recipe cannot be read, or a value is wrong.
    """
    is_given = recipe is None or flags.name is not None
    source = RecipeSource(Path("--environment")) if is_given or recipe is None else read_source(recipe)
    flags.put(source)
    data = (source.data.get("rollout") or {}).get("environment")
    if not data:
        return None
    try:
        section = validate_section(EnvironmentSection, data, ".".join(KEY))
    except RecipeError as error:
        raise source.located(error) from error
    if not (is_given or import_from_here):
        import_foreign({"rollout.environment.name": section.name, "rollout.environment.format": section.format}, source)
    return section


def _in_order(
    requests: Sequence[Request], samples: Iterable[tuple[Completion, Conversation | None]]
) -> Iterator[tuple[Completion, Conversation | None]]:
    """The samples in the order of their requests, each as soon as it and those before it are there."""
    finished: dict[tuple[int, int], tuple[Completion, Conversation | None]] = {}
    order = [(request.draw_index, request.sample_index) for request in reversed(requests)]
    for completion, conversation in samples:
        finished[completion.request.draw_index, completion.request.sample_index] = completion, conversation
        while order and order[-1] in finished:
            yield finished.pop(order.pop())
    assert not order, f"no completion of draw {order[-1]}"


def _build_drafter(
    name: str,
    cache: Path | None,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    prompts: Collection[tuple[int, ...]],
) -> DrafterBase:
    """The drafter, knowing the rollouts of `cache`."""
    from srtrl.bench.recorded import feed_drafter, read_recorded
    from srtrl.drafters.base import resolve_drafter

    drafter = resolve_drafter("--drafter", name)()
    if cache is not None:
        recorded = read_recorded(cache, tokenizer=tokenizer, max_tokens=MAX_TOKENS).prompts()
        largest = max(int(tokens.max()) for prompt in recorded for tokens in prompt.samples)
        if largest >= vocab_size:
            raise ValueError(
                f"--cache: {cache}: token id {largest} is not in the model's vocabulary of {vocab_size}; "
                "expected rollouts of this model's tokenizer"
            )
        num_known = sum(prompt.prompt_token_ids in prompts for prompt in recorded)
        print(f"--cache: {cache} has rollouts of {num_known} of the {len(prompts)} prompts", file=sys.stderr)
        feed_drafter(drafter, recorded, "generate")
    return drafter
