"""`srtrl generate`: completions of prompts from a file or the command line, through the decoder that training uses."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from srtrl.recipe import MAX_WIDTH
from srtrl.recipe_file import SURROGATE
from srtrl.tasks.rendering import apply_chat_template
from srtrl.tasks.rows import Row, RowError, RowSource, parse_row, read_rows
from srtrl.types import Completion, FinishReason, Prompt, Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.drafters.base import DrafterBase
    from srtrl.engine.engine import Engine

KV_SHARE = 0.85
"""Of a CUDA device's free memory, the part for pages: there is no update to leave room for, but logits are large."""
MAX_TOKENS = 1 << 30
"""No recorded rollout is longer."""


def _finite(value: float | None) -> float | None:
    """Refuse nan and inf, which every comparison lets pass or none."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, found {value}")
    return value


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN", help="Hugging Face folder, hub name, `bundled:tiny`, or a run's folder."
        ),
    ],
    *,
    prompts: Annotated[
        Path | None,
        typer.Option(help='.jsonl or .parquet; rows {"prompt": TEXT} or {"token_ids": [...]}, with or without "id".'),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A prompt's text; may be given more than once.")
    ] = None,
    prompt_ids: Annotated[
        list[str] | None, typer.Option(metavar="1,2,3", help="A prompt's token ids; may be given more than once.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=MAX_WIDTH, help="Completions per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(max=1, help="Keep the most likely tokens up to this probability.")] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop when the text contains this; may be repeated.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of a completion.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    slots: Annotated[int, typer.Option(min=1, max=MAX_WIDTH, help="Sequences decoded at a time.")] = 64,
    kv_memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=2**31,
            callback=_finite,
            help="GiB of the KV cache; by default 4, on CUDA 0.85 of the free memory.",
        ),
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the weights.")] = "float32",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")] = "auto",
    drafter: Annotated[
        str, typer.Option(help="Drafter for speculation, which changes only the speed; or `none`.")
    ] = "srt",
    cache: Annotated[Path | None, typer.Option(help="Rollouts to draft from: a run, .parquet or .jsonl.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each text into the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Complete prompts.

    Rows are printed in the order of the prompts, each as soon as those before it are. A prompt that cannot be served is
    named on standard error, the others are completed, and the exit code is 2.
    """
    rows = _given_rows(prompts, prompt or (), prompt_ids or ())
    completer = _Completer(
        model,
        num_samples=samples,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop or (),
        seed=seed,
    )
    readable = list(_read_prompts(rows, completer.tokenizer, chat=chat))
    if not readable:
        raise typer.Exit(2)
    token_ids = {one.token_ids for _, one in readable}
    engine = completer.open_engine(
        token_ids, slots=slots, dtype=dtype, device=device, drafter=drafter, kv_memory_gib=kv_memory_gib, cache=cache
    )
    requests: list[Request] = []
    for draw, (where, one) in enumerate(readable):
        drawn = completer.requests([(draw, one)])
        try:
            engine.check_request(drawn[0])
            requests.extend(drawn)
        except ValueError as error:
            _print_error(where, error)
    for completion in _in_order(requests, engine.generate(requests)):
        print(_line(completion, completer.text(completion), as_json=as_json), flush=True)
    metrics = engine.take_metrics()
    if metrics["engine/tokens_per_decode_step"] > 1:
        tokens, verified = (metrics[f"engine/{name}_per_decode_step"] for name in ("tokens", "verified"))
        print(f"drafter {drafter}: {tokens:.2f} tokens per sequence and step, {verified:.2f} verified", file=sys.stderr)
    if len(requests) < samples * len(rows):
        raise typer.Exit(2)


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


def generate(
    model: str,
    prompts: Sequence[str | Sequence[int]],
    *,
    num_samples: int = 1,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Sequence[str] = (),
    chat: bool = False,
    seed: int = 0,
    slots: int = 64,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    drafter: str = "srt",
) -> list[list[Generated]]:
    """Complete prompts: `srtrl generate` from Python.

    Args:
        model: Hugging Face folder, hub name, `bundled:tiny`, a checkpoint or the folder of a run (its last checkpoint).
        prompts: Texts, or token ids.
        num_samples: Completions of each.
        max_new_tokens: Maximum number of tokens of a completion.
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the most likely tokens up to this probability.
        stop: Texts that end a completion.
        chat: Put each text into the model's chat template.
        seed: Of the sampling; the same seed gives the same completions (on a CPU, with one number of threads).
        slots: Sequences decoded at a time.
        dtype: Type of the weights.
        device: `auto` is CUDA where torch sees a device.
        drafter: For speculation, which changes only the speed; or `none`.

    Returns:
        For each prompt its completions.

    Raises:
        ValueError: the model cannot be loaded, or a prompt is empty or too long; names the prompt.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts: expected a list of texts, found one text")
    for name, value in (("num_samples", num_samples), ("slots", slots)):
        if not 1 <= value <= MAX_WIDTH:
            raise ValueError(f"{name}: expected 1 to {MAX_WIDTH}, found {value}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, found {max_new_tokens}")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype: expected float32 or bfloat16, found {dtype!r}")
    completer = _Completer(
        model,
        num_samples=num_samples,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop,
        seed=seed,
    )
    draws: list[tuple[int, Prompt]] = []
    for draw, given in enumerate(prompts):
        try:
            row = {"prompt": given} if isinstance(given, str) else {"token_ids": list(given)}
            draws.append((draw, _read_prompt(row, str(draw), completer.tokenizer, chat=chat)))
        except ValueError as error:
            raise ValueError(f"prompts[{draw}]: {error}") from error
    if not draws:
        raise ValueError("prompts: there is none")
    token_ids = {prompt.token_ids for _, prompt in draws}
    engine = completer.open_engine(token_ids, slots=slots, dtype=dtype, device=device, drafter=drafter)
    requests = completer.requests(draws)
    found: list[list[Generated]] = [[] for _ in draws]
    for completion in _in_order(requests, engine.generate(requests)):
        found[completion.request.draw_index].append(
            Generated(
                text=completer.text(completion),
                token_ids=completion.token_ids,
                logprobs=completion.rollout_logprobs,
                finish_reason=completion.finish_reason,
            )
        )
    return found


class _Completer:
    """A model with its tokenizer, and how its completions are sampled."""

    def __init__(
        self,
        model_or_run: str,
        *,
        num_samples: int,
        max_new_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        stop: Sequence[str],
        seed: int,
    ) -> None:
        """The arguments are those of `generate`; of the folder of a run the model is its last checkpoint."""
        from srtrl.model.weights import end_token_ids, load_tokenizer
        from srtrl.trainer.evaluate import resolve_eval_source

        self.model = resolve_eval_source(model_or_run)[0]
        self.tokenizer = load_tokenizer(self.model)
        self.sampling = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            end_token_ids=end_token_ids(self.model, self.tokenizer),
            stop_strings=tuple(stop),
        )
        self._num_samples = num_samples
        self._seed = seed

    def requests(self, draws: Sequence[tuple[int, Prompt]]) -> list[Request]:
        """The samples of prompts, each with its place on the command line or in the list."""
        from srtrl.rollout.collect import sample_requests

        return sample_requests(
            draws, num_samples=self._num_samples, sampling=self.sampling, seed=self._seed, purpose="generate"
        )

    def text(self, completion: Completion) -> str:
        """A completion without special tokens, cut before a stop string."""
        from srtrl.rollout.collect import response_text

        return response_text(self.tokenizer, completion.token_ids, self.sampling.stop_strings)

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


def _given_rows(file: Path | None, texts: Sequence[str], id_lists: Sequence[str]) -> list[Row]:
    """Every prompt of a command line as a row, the file's first.

    Raises:
        ValueError: no prompts, or the file cannot be read.
    """
    rows = [] if file is None else list(read_rows(RowSource(files=[str(file)])))
    rows += [Row(place=f"--prompt {text[:40]!r}", name="", fields={"prompt": text}) for text in texts]
    for ids in id_lists:
        rows.append(Row(place=f"--prompt-ids {ids}", name="", fields=parse_row(f'{{"token_ids": [{ids}]}}')))
    if not rows:
        raise ValueError("no prompts: give --prompts FILE.jsonl, --prompt TEXT or --prompt-ids 1,2,3")
    return rows


def _read_prompts(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, chat: bool
) -> Iterator[tuple[str, Prompt]]:
    """The prompts that have tokens, each with where it was given; what is wrong with the others is printed."""
    if chat and tokenizer.chat_template is None:
        raise ValueError("--chat: the tokenizer has no chat template")
    for index, row in enumerate(rows):
        try:
            yield row.place, _read_prompt(row.fields, str(index), tokenizer, chat=chat)
        except ValueError as error:
            _print_error(row.place, error)


def _read_prompt(
    row: Mapping[str, Any] | RowError, default_id: str, tokenizer: PreTrainedTokenizerBase, *, chat: bool
) -> Prompt:
    """The prompt of a row, with what the tokenizer or its chat template adds; ValueError where it has none."""
    if isinstance(row, RowError):
        raise row
    text, token_ids = row.get("prompt"), row.get("token_ids")
    if isinstance(text, str) and token_ids is None:
        if SURROGATE.search(text):
            raise ValueError("the prompt is no valid Unicode: it has half of a surrogate pair")
        token_ids = _tokenise(text, tokenizer, chat=chat) if text else []
    elif text is not None or not isinstance(token_ids, list) or any(type(token) is not int for token in token_ids):
        found = json.dumps(row, ensure_ascii=False, default=str)[:80]
        raise ValueError(f'expected {{"prompt": TEXT}} or {{"token_ids": [INTEGER, ...]}}, found {found}')
    if not token_ids:
        raise ValueError("the prompt is empty; at least one token is needed")
    return Prompt(prompt_id=str(row.get("id", default_id)), text=text or "", token_ids=tuple(token_ids), answer="")


def _tokenise(text: str, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> list[int]:
    """Token ids of a text, with what the tokenizer or its chat template adds."""
    if not chat:
        return list(tokenizer.encode(text))
    [rendered] = apply_chat_template(tokenizer, [[{"role": "user", "content": text}]], {})
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def _print_error(where: str, error: ValueError) -> None:
    print(f"error: {where}: {error}", file=sys.stderr, flush=True)


def _in_order(requests: Sequence[Request], completions: Iterable[Completion]) -> Iterator[Completion]:
    """The completions in the order of their requests, each as soon as it and those before it are there."""
    finished: dict[tuple[int, int], Completion] = {}
    order = [(request.draw_index, request.sample_index) for request in reversed(requests)]
    for completion in completions:
        finished[completion.request.draw_index, completion.request.sample_index] = completion
        while order and order[-1] in finished:
            yield finished.pop(order.pop())
    assert not order, f"no completion of draw {order[-1]}"


def _line(completion: Completion, text: str, *, as_json: bool) -> str:
    """One line of JSON; or for people, a heading and the completion."""
    request, token_ids = completion.request, completion.token_ids
    if not as_json:
        end = "stopped" if completion.finish_reason == "stop" else "truncated"
        return f"--- prompt {request.prompt_id}, sample {request.sample_index}: {len(token_ids)} tokens, {end}\n{text}"
    row = {
        "prompt_id": request.prompt_id,
        "sample_index": request.sample_index,
        "prompt_token_ids": request.prompt_token_ids,
        "token_ids": token_ids,
        "text": text,
        "logprobs": completion.rollout_logprobs,
        "finish_reason": completion.finish_reason,
    }
    return json.dumps(row, ensure_ascii=False)


def _build_drafter(
    name: str,
    cache: Path | None,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    prompts: Collection[tuple[int, ...]],
) -> DrafterBase:
    """The drafter, knowing the rollouts of `cache`."""
    from srtrl.drafters.base import resolve_drafter
    from srtrl.rollout.recorded import feed_drafter, read_recorded

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
