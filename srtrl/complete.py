"""`srtrl generate`: completions of prompts from a file or the command line, through the decoder that training uses."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from srtrl.completer import Completer, Generated
from srtrl.environments import options as environment_options
from srtrl.environments.base import count_turns, mark_segments
from srtrl.ranks.processes import Ranks, is_main_process, open_ranks, refuse_ranks
from srtrl.recipe.schema import MAX_WIDTH
from srtrl.report.rollouts import printable
from srtrl.tasks.rendering import apply_chat_template
from srtrl.tasks.row_task import SURROGATE
from srtrl.tasks.rows import Row, RowError, RowSource, parse_row, read_rows
from srtrl.types import Prompt, Request, SamplingParams

if TYPE_CHECKING:
    from srtrl.engine.engine import Engine

OF_TURNS = ("segments", "num_turns", "stop_reason")
"""Fields of a row that only samples of several turns have."""


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
    environment: environment_options.Name = None,
    environment_format: environment_options.FormatName = None,
    environment_option: environment_options.Options = None,
    import_from_here: Annotated[
        bool,
        typer.Option(
            "--import-from-here", help="Import the environment that the run's recipe names from the current folder too."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Complete prompts.

    Rows are printed in the order of the prompts, each as soon as those before it are (by several ranks, at the end). A
    prompt that cannot be served is named on standard error, the others are completed, and the exit code is 2. A run
    that was trained with an environment is completed with it: its tools run, and a completion has several turns
    (--environment none: one turn).
    """
    flags = environment_options.EnvironmentFlags(
        name=environment, format=environment_format, options=environment_option or ()
    )
    rows = _given_rows(prompts, prompt or (), prompt_ids or ())
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, stop_strings=tuple(stop or ())
    )
    completer = Completer(
        model, sampling, num_samples=samples, seed=seed, environment=flags, import_from_here=import_from_here
    )
    with open_ranks() as ranks, completer:
        readable = list(_read_prompts(rows, completer, chat=chat))
        if not readable:
            raise typer.Exit(2)
        with ranks.together("the decoders"):
            engine = completer.open_engine(
                {one.token_ids for _, one in readable},
                slots=slots,
                dtype=dtype,
                device=device,
                drafter=drafter,
                kv_memory_gib=kv_memory_gib,
                cache=cache,
            )
        draws: list[tuple[int, Prompt]] = []
        for draw, (where, one) in enumerate(readable):
            try:
                engine.check_request(completer.requests([(draw, one)])[0])
                draws.append((draw, one))
            except ValueError as error:
                _print_error(where, error)
        for line in _lines(completer, engine, draws, ranks, as_json=as_json):
            print(line, flush=True)
    metrics = engine.take_metrics()
    if ranks.is_main and metrics["engine/tokens_per_decode_step"] > 1:
        tokens, verified = (metrics[f"engine/{name}_per_decode_step"] for name in ("tokens", "verified"))
        print(f"drafter {drafter}: {tokens:.2f} tokens per sequence and step, {verified:.2f} verified", file=sys.stderr)
    # Only here: an exit code of another rank would end this one before it has printed.
    if ranks.is_main and len(draws) < len(rows):
        raise typer.Exit(2)


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
    environment: str | Mapping[str, Any] | None = None,
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
        environment: What answers between turns: the fields of `rollout.environment` in a recipe, such as
            `{"name": "calculator", "format": "code_tags"}`, or a name; `none`: a single turn. By default that of the
            run.

    Returns:
        For each prompt its completions.

    Raises:
        ValueError: the model cannot be loaded, or a prompt is empty or too long; names the prompt.
    """
    refuse_ranks("srtrl.generate")
    if isinstance(prompts, str):
        raise ValueError("prompts: expected a list of texts, found one text")
    for name, value in (("num_samples", num_samples), ("slots", slots)):
        if not 1 <= value <= MAX_WIDTH:
            raise ValueError(f"{name}: expected 1 to {MAX_WIDTH}, found {value}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, found {max_new_tokens}")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype: expected float32 or bfloat16, found {dtype!r}")
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, stop_strings=tuple(stop)
    )
    flags = environment_options.EnvironmentFlags(name=environment)
    completer = Completer(model, sampling, num_samples=num_samples, seed=seed, environment=flags)
    with completer:
        draws: list[tuple[int, Prompt]] = []
        for draw, given in enumerate(prompts):
            try:
                row = {"prompt": given} if isinstance(given, str) else {"token_ids": list(given)}
                draws.append((draw, _read_prompt(row, str(draw), completer, chat=chat)))
            except ValueError as error:
                raise ValueError(f"prompts[{draw}]: {error}") from error
        if not draws:
            raise ValueError("prompts: there is none")
        token_ids = {prompt.token_ids for _, prompt in draws}
        engine = completer.open_engine(token_ids, slots=slots, dtype=dtype, device=device, drafter=drafter)
        found: list[list[Generated]] = [[] for _ in draws]
        for request, generated in completer.complete(engine, draws):
            found[request.draw_index].append(generated)
    return found


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


def _read_prompts(rows: Sequence[Row], completer: Completer, *, chat: bool) -> Iterator[tuple[str, Prompt]]:
    """The prompts that have tokens, each with where it was given; what is wrong with the others is printed."""
    if chat and completer.tokenizer.chat_template is None:
        raise ValueError("--chat: the tokenizer has no chat template")
    for index, row in enumerate(rows):
        try:
            yield row.place, _read_prompt(row.fields, str(index), completer, chat=chat)
        except ValueError as error:
            _print_error(row.place, error)


def _read_prompt(row: Mapping[str, Any] | RowError, default_id: str, completer: Completer, *, chat: bool) -> Prompt:
    """The prompt of a row, with what the chat template and the environment add; ValueError where it has none."""
    if isinstance(row, RowError):
        raise row
    text, token_ids = row.get("prompt"), row.get("token_ids")
    if isinstance(text, str) and token_ids is None:
        if SURROGATE.search(text):
            raise ValueError("the prompt is no valid Unicode: it has half of a surrogate pair")
        if text and chat:
            options = {"tools": completer.tools} if completer.tools else {}
            [text] = apply_chat_template(completer.tokenizer, [[{"role": "user", "content": text}]], options)
        token_ids = list(completer.tokenizer.encode(text, add_special_tokens=not chat)) if text else []
    elif text is not None or not isinstance(token_ids, list) or any(type(token) is not int for token in token_ids):
        found = json.dumps(row, ensure_ascii=False, default=str)[:80]
        raise ValueError(f'expected {{"prompt": TEXT}} or {{"token_ids": [INTEGER, ...]}}, found {found}')
    if not token_ids:
        raise ValueError("the prompt is empty; at least one token is needed")
    prompt = Prompt(prompt_id=str(row.get("id", default_id)), text=text or "", token_ids=tuple(token_ids), answer="")
    return completer.started(prompt)


def _lines(
    completer: Completer, engine: Engine, draws: Sequence[tuple[int, Prompt]], ranks: Ranks, *, as_json: bool
) -> Iterator[str]:
    """What is printed of the samples of prompts, in order; several ranks share the prompts, and the main one has all.

    With one rank, each as soon as it and those before it are there.
    """
    samples = completer.complete(engine, draws[ranks.index :: ranks.count])
    if ranks.count == 1:
        yield from (_line(request, generated, as_json=as_json) for request, generated in samples)
        return
    lines: dict[int, list[str]] = {}
    with ranks.together("the completions"):
        for request, generated in samples:
            lines.setdefault(request.draw_index, []).append(_line(request, generated, as_json=as_json))
    all_lines = ranks.join(lines, "the completions of all ranks")
    if ranks.is_main:
        yield from chain.from_iterable(all_lines)


def _print_error(where: str, error: ValueError) -> None:
    if is_main_process():  # all ranks find the same
        print(f"error: {where}: {error}", file=sys.stderr, flush=True)


def _line(request: Request, generated: Generated, *, as_json: bool) -> str:
    """One line of JSON; or for people, a heading and the completion, of several turns each under a line of its own."""
    if as_json:
        row = {
            "prompt_id": request.prompt_id,
            "sample_index": request.sample_index,
            "prompt_token_ids": request.prompt_token_ids,
            **{name: value for name, value in asdict(generated).items() if generated.segments or name not in OF_TURNS},
        }
        return json.dumps(row, ensure_ascii=False)
    end = "stopped" if generated.finish_reason == "stop" else "truncated"
    size, text = f"{len(generated.token_ids)} tokens", generated.text
    if generated.segments:
        size += f", {count_turns(generated.num_turns, generated.stop_reason)}"
        text = mark_segments([one.kind for one in generated.segments], [one.text for one in generated.segments])
        text = printable(text)
    return f"--- prompt {request.prompt_id}, sample {request.sample_index}: {size}, {end}\n{text}"
