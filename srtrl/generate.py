"""`srtrl generate`: completions of prompts from a file or the command line, through the decoder that training uses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from srtrl.types import Completion, FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.drafters.base import DrafterBase
    from srtrl.engine.engine import Engine

KV_SHARE = 0.85
"""Of a CUDA device's free memory, the part for pages: there is no update to leave room for, but logits are large."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PromptSource:
    """One prompt as the user gave it: a text, token ids, or what is wrong with it."""

    prompt_id: str
    where: str
    """Where it was given: `prompts.jsonl:3` or the option; error messages begin with it."""
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    error: str | None = None


@dataclass(kw_only=True, slots=True, frozen=True)
class GenerateOptions:
    """How prompts are completed."""

    num_samples: int = 1
    sampling: SamplingParams
    """End tokens are added from the model."""
    seed: int = 0
    slots: int = 64
    page_size: int = 16
    kv_memory_gib: float | Literal["auto"] = "auto"
    """Most memory of the KV cache; `auto`: 4 on a CPU, most of what is free on a CUDA device."""
    dtype: str = "float32"
    device: str = "auto"
    drafter: str = "srt"
    """Guesses tokens; it changes the speed and nothing else."""
    cache: Path | None = None
    """Recorded rollouts that the drafter knows from the start."""
    chat: bool = False
    """Give each text to the tokenizer's chat template, as a user's message."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GeneratedRow:
    """One completion, as `--json` prints it."""

    prompt_id: str
    sample_index: int
    token_ids: list[int] = field(repr=False)
    text: str
    logprobs: list[float] = field(repr=False)
    finish_reason: FinishReason

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    def to_text(self) -> str:
        """For people: a heading and the completion."""
        end = "stopped" if self.finish_reason == "stop" else "cut at the limit"
        return (
            f"--- prompt {self.prompt_id}, sample {self.sample_index}: {len(self.token_ids)} tokens, {end}\n{self.text}"
        )


def gather_prompts(file: Path | None, texts: Sequence[str], id_lists: Sequence[str]) -> list[PromptSource]:
    """All prompts of a command line, the file's first; those without an `id` are known by their number.

    Raises:
        ValueError: no prompts, or the file cannot be read.
    """
    sources = read_prompts(file) if file is not None else []
    for text in texts:
        sources.append(PromptSource(prompt_id=str(len(sources)), where=f"--prompt {text[:40]!r}", text=text))
    for id_list in id_lists:
        sources.append(parse_token_ids(id_list, str(len(sources))))
    if not sources:
        raise ValueError("no prompts: give --prompts FILE.jsonl, --prompt TEXT or --prompt-ids 1,2,3")
    return sources


def read_prompts(path: Path) -> list[PromptSource]:
    """Read a file of JSON rows: `{"prompt": text}` or `{"token_ids": [...]}`, with an optional `id`.

    A row that cannot be used becomes a `PromptSource` with its `error`; the others are unaffected.

    Raises:
        ValueError: the file cannot be read, or has no rows.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts: cannot read {path}: {error}") from error
    rows = [(f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise ValueError(f"--prompts: {path} has no rows")
    return [_parse_row(where, line, str(index)) for index, (where, line) in enumerate(rows)]


def parse_token_ids(text: str, prompt_id: str) -> PromptSource:
    """Read `--prompt-ids 1,2,3`."""
    where = f"--prompt-ids {text}"
    try:
        token_ids = tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        return PromptSource(prompt_id=prompt_id, where=where, error="expected token ids like 1,2,3")
    return PromptSource(prompt_id=prompt_id, where=where, token_ids=token_ids)


def generate(
    model_path: str,
    prompts: Sequence[PromptSource],
    options: GenerateOptions,
    *,
    on_row: Callable[[GeneratedRow], None],
    on_error: Callable[[str], None],
    on_note: Callable[[str], None],
) -> int:
    """Complete each prompt `options.num_samples` times.

    Rows are handed to `on_row` in the order of (prompt, sample), each as soon as those before it are done. A prompt
    that cannot be served goes to `on_error` and the others go on. `on_note` is told what drafting brought.

    Returns:
        How many prompts could not be served.

    Raises:
        ValueError: the model cannot be loaded; there is no such drafter; the cache cannot be read.
    """
    from srtrl.model.weights import end_token_ids, load_tokenizer, read_config

    config = read_config(model_path)
    tokenizer = load_tokenizer(model_path)
    errors: list[str] = []
    encoded = list(_encode(prompts, tokenizer, options, errors))
    for message in errors:
        on_error(message)
    if not encoded:
        return len(errors)

    longest = max(len(token_ids) for _, token_ids in encoded) + options.sampling.max_new_tokens
    known = {token_ids for _, token_ids in encoded}
    drafter = _build_drafter(options, tokenizer, config.vocab_size, known, on_note)
    engine = _build_engine(model_path, options, tokenizer, drafter, min(longest, config.max_position_embeddings))
    sampling = replace(options.sampling, end_token_ids=end_token_ids(model_path, tokenizer))
    requests: list[Request] = []
    for draw_index, (source, token_ids) in enumerate(encoded):
        samples = _requests(source, token_ids, draw_index, sampling, options)
        try:
            engine.check_request(samples[0])
        except ValueError as error:
            errors.append(f"{source.where}: {error}")
            on_error(errors[-1])
        else:
            requests.extend(samples)
    for completion in _in_order(requests, engine.generate(requests)):
        on_row(_row(completion, tokenizer))
    metrics = engine.take_metrics()
    if metrics["engine/tokens_per_decode_step"] > 1:
        on_note(
            f"drafter {options.drafter}: {metrics['engine/tokens_per_decode_step']:.2f} tokens a sequence and step, "
            f"{metrics['engine/verified_per_decode_step']:.2f} verified"
        )
    return len(errors)


def _parse_row(where: str, line: str, default_id: str) -> PromptSource:
    try:
        row = _read_object(line)
        text, token_ids = _prompt_of(row)
    except ValueError as error:
        return PromptSource(prompt_id=default_id, where=where, error=str(error))
    return PromptSource(prompt_id=str(row.get("id", default_id)), where=where, text=text, token_ids=token_ids)


def _read_object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError("expected a JSON object")
    return row


def _prompt_of(row: Mapping[str, Any]) -> tuple[str | None, tuple[int, ...] | None]:
    """The text or the token ids of a row, the other being None."""
    given = [key for key in ("prompt", "token_ids") if row.get(key) is not None]
    if len(given) != 1:
        found = " and ".join(given) or f"only the keys {', '.join(row) or '(none)'}"
        raise ValueError(f"expected one of `prompt` (a text) and `token_ids` (a list of integers), found {found}")
    value = row[given[0]]
    if given == ["prompt"]:
        if not isinstance(value, str):
            raise ValueError("`prompt` must be a text")
        return value, None
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError("`token_ids` must be a list of integers")
    return None, tuple(value)


def _encode(
    prompts: Iterable[PromptSource], tokenizer: PreTrainedTokenizerBase, options: GenerateOptions, errors: list[str]
) -> Iterator[tuple[PromptSource, tuple[int, ...]]]:
    """The prompts that have tokens; what is wrong with the others is added to `errors`."""
    if options.chat and tokenizer.chat_template is None:
        raise ValueError("--chat: the tokenizer has no chat template")
    for source in prompts:
        token_ids = source.token_ids
        if source.text:
            token_ids = _tokenise(source.text, tokenizer, chat=options.chat)
        if token_ids:
            yield source, token_ids
        else:
            errors.append(f"{source.where}: {source.error or 'the prompt is empty; at least one token is needed'}")


def _tokenise(text: str, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> tuple[int, ...]:
    """Token ids of a prompt, with what the tokenizer or its chat template adds."""
    if not chat:
        return tuple(tokenizer.encode(text))
    message = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer.encode(str(rendered), add_special_tokens=False))


def _requests(
    source: PromptSource,
    token_ids: tuple[int, ...],
    draw_index: int,
    sampling: SamplingParams,
    options: GenerateOptions,
) -> list[Request]:
    from srtrl.engine.sampling import make_rng_key

    return [
        Request(
            prompt_id=source.prompt_id,
            prompt_token_ids=token_ids,
            draw_index=draw_index,
            sample_index=sample_index,
            rng_key=make_rng_key(options.seed, "generate", draw_index, sample_index),
            sampling=sampling,
            purpose="generate",
        )
        for sample_index in range(options.num_samples)
    ]


def _in_order(requests: Sequence[Request], completions: Iterable[Completion]) -> Iterator[Completion]:
    """The completions in the order of their requests, each as soon as it and those before it are there."""
    waiting: dict[tuple[int, int], Completion] = {}
    order = iter([(request.draw_index, request.sample_index) for request in requests])
    following = next(order, None)
    for completion in completions:
        waiting[completion.request.draw_index, completion.request.sample_index] = completion
        while following in waiting:
            yield waiting.pop(following)
            following = next(order, None)
    assert following is None, f"no completion of draw {following}"


def _row(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> GeneratedRow:
    from srtrl.rollout.collect import response_text

    request = completion.request
    return GeneratedRow(
        prompt_id=request.prompt_id,
        sample_index=request.sample_index,
        token_ids=completion.token_ids,
        text=response_text(tokenizer, completion.token_ids, request.sampling.stop_strings),
        logprobs=completion.rollout_logprobs,
        finish_reason=completion.finish_reason,
    )


def _build_drafter(
    options: GenerateOptions,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    prompts: set[tuple[int, ...]],
    on_note: Callable[[str], None],
) -> DrafterBase:
    from srtrl.resolve import resolve_class
    from srtrl.rollout.recorded import feed_drafter, read_recorded

    try:
        drafter: DrafterBase = resolve_class("srtrl.drafters", options.drafter, "Drafter")()
    except ValueError as error:
        raise ValueError(f"--drafter: {error}") from error
    if options.cache is not None:
        try:
            recorded = read_recorded(options.cache, tokenizer=tokenizer, max_tokens=1 << 30).prompts()
        except ValueError as error:
            raise ValueError(f"--cache: {error}") from error
        largest = max(int(tokens.max()) for prompt in recorded for tokens in prompt.samples)
        if largest >= vocab_size:
            raise ValueError(
                f"--cache: {options.cache}: token id {largest} is not in the model's vocabulary of {vocab_size}; "
                "expected rollouts of this model's tokenizer"
            )
        num_known = sum(prompt.prompt_token_ids in prompts for prompt in recorded)
        on_note(f"--cache: {options.cache} has rollouts of {num_known} of the {len(prompts)} prompts")
        feed_drafter(drafter, recorded, "generate")
    return drafter


def _build_engine(
    model_path: str,
    options: GenerateOptions,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DrafterBase,
    max_sequence_tokens: int,
) -> Engine:
    import torch

    from srtrl.engine.engine import Engine, EngineOptions
    from srtrl.engine.kv_memory import free_bytes, kv_bytes
    from srtrl.engine.runner import page_bytes_of
    from srtrl.model.weights import load_model

    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    model = load_model(model_path, dtype=dtype, device=torch.device(device))
    free = free_bytes(model.device)
    num_bytes, _ = kv_bytes(options.kv_memory_gib, free, share=KV_SHARE, reserved_bytes=0)
    num_pages = _num_pages(num_bytes, page_bytes_of(model, options.page_size), options, max_sequence_tokens)
    engine_options = EngineOptions(
        slots=options.slots,
        page_size=options.page_size,
        max_sequence_tokens=max_sequence_tokens,
        num_pages=num_pages,
    )
    return Engine(model, engine_options, tokenizer=tokenizer, drafter=drafter)


def _num_pages(num_bytes: int, page_bytes: int, options: GenerateOptions, max_sequence_tokens: int) -> int:
    """Pages for all slots at full length, as far as the memory goes; a request that needs more is refused alone."""
    affordable = num_bytes // page_bytes
    if affordable == 0:
        raise ValueError(
            f"--kv-memory-gib: {options.kv_memory_gib} holds no page, one takes {page_bytes / 2**30:.2g} GiB"
        )
    pages_of_one = -(-max_sequence_tokens // options.page_size)
    return min(affordable, options.slots * (pages_of_one + 1))
