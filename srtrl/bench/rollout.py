"""`srtrl bench rollout`: our decoder against others, same weights, same prompts, same number of tokens."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer


class Peer(StrEnum):
    """What our decoder is compared with."""

    HF = "hf"
    """`transformers`' `generate`."""
    NOT_DETERMINISTIC = "not-deterministic"
    """Our decoder without the deterministic mode."""


def command(
    *,
    peer: Annotated[
        list[Peer] | None, typer.Option(help="Compare with this only; may be given more than once. [default: all]")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face folder or hub name, in place of a shape.")] = None,
    model_shape: Annotated[str, typer.Option(help="Random weights of this shape.")] = "small",
    sequences: Annotated[str, typer.Option(metavar="N,N,...", help="Sequences of a rollout.")] = "8,32,128",
    lengths: Annotated[Literal["both", "equal", "long-tailed"], typer.Option(help="How lengths are spread.")] = "both",
    equal_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each sequence, where equal.")] = 128,
    longest_tokens: Annotated[int, typer.Option(min=8, help="Most new tokens, where long-tailed.")] = 256,
    samples: Annotated[int, typer.Option(min=1, help="Sequences of one prompt, as in a group of GRPO.")] = 1,
    prompts: Annotated[
        Path | None, typer.Option(help="File of JSON rows, as of `srtrl generate`; by default random token ids.")
    ] = None,
    prompt_tokens: Annotated[
        tuple[int, int], typer.Option(metavar="LEAST MOST", help="Lengths of the random prompts.")
    ] = (16, 128),
    slots: Annotated[int, typer.Option(min=0, help="Sequences that srtrl decodes at once; 0: all.")] = 0,
    kv_memory_gib: Annotated[float, typer.Option(help="Most memory of srtrl's KV cache.")] = 4.0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each contender, after one to warm up.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, lengths and sampling.")] = 0,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the weights.")] = "float32",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default torch's own choice.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every run to this file, too.")] = None,
    write_docs: Annotated[
        Path | None, typer.Option(help="Put the result into this Markdown file, in place of an older one.")
    ] = None,
) -> None:
    """Measure whole rollouts: prefill, decoding and sampling, from the prompts to the tokens of all sequences."""
    from srtrl.bench.rollout_run import RolloutBench, choose_device, measure
    from srtrl.bench.tables import print_document, put_section
    from srtrl.metrics import write_atomic

    if not 1 <= prompt_tokens[0] <= prompt_tokens[1]:
        raise ValueError(f"--prompt-tokens: expected 1 <= LEAST <= MOST, found {prompt_tokens[0]} {prompt_tokens[1]}")
    if kv_memory_gib <= 0:
        raise ValueError(f"--kv-memory-gib: expected a number above 0, found {kv_memory_gib}")
    document = measure(
        RolloutBench(
            model=model,
            shape=model_shape,
            peers=tuple(dict.fromkeys(peer or Peer)),
            num_sequences=_parse_counts(sequences),
            lengths=("equal", "long-tailed") if lengths == "both" else (lengths,),
            equal_tokens=equal_tokens,
            longest_tokens=longest_tokens,
            num_samples=samples,
            prompts=prompts,
            prompt_tokens=prompt_tokens,
            slots=slots,
            kv_memory_gib=kv_memory_gib,
            repeats=repeats,
            seed=seed,
            dtype=dtype,
            device=choose_device(device),
            num_threads=threads,
        )
    )
    print_document(document)
    if json_file is not None:
        write_atomic(json_file, document.to_json())
    if write_docs is not None:
        put_section(write_docs, document.to_markdown())


def _parse_counts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--sequences: expected counts like 8,32,128, found {text!r}")
    return tuple(dict.fromkeys(int(part) for part in parts))
