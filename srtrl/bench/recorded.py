"""Recorded rollouts: JSONL rows of any trainer, or the `rollouts/*.parquet` of a run of ours.

`srtrl replay` counts the decode steps of them, the trace-driven benchmarks decode them again, and drafters can learn
them before they start.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import AliasChoices, Field

from srtrl.drafters.base import DrafterBase
from srtrl.model.folders import load_tokenizer
from srtrl.model.noise import make_rng_key
from srtrl.recipe.file import RecipeError, read_source, validate_section
from srtrl.recipe.schema import Section
from srtrl.tasks.rows import RowError, RowSource, read_rows
from srtrl.types import Completion, Request, Response, SamplingParams, SegmentKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = npt.NDArray[np.int32]
Extensions = tuple[tuple[int, int], ...]
"""Start and stop of each part of a sample that was not sampled, as in `Response`; a turn ends before each."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RecordedSample:
    """A response."""

    tokens: Tokens
    """Never empty."""
    extensions: Extensions = ()
    """Where the tokens of an environment are, in a sample of several turns."""
    rng_key: int | None = None
    """None where the rollouts are not those of a run of ours."""
    is_cut: bool = False
    """Whether it was longer, and was truncated."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RecordedPrompt:
    """A prompt and its samples."""

    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    """Never empty; prompts of one step differ in it."""
    samples: list[RecordedSample]
    """In the order of the file."""

    def split(self, history: float) -> tuple["RecordedPrompt", "RecordedPrompt"]:
        """The prompt with the first `history` (0 to 1) of its samples, rounded down, and with the others."""
        count = int(history * len(self.samples) + 1e-9)  # 0.29 of 100 is 29
        return replace(self, samples=self.samples[:count]), replace(self, samples=self.samples[count:])

    def request(self, draw_index: int, sample_index: int, max_new_tokens: int) -> Request:
        """A sample of the prompt that ends after `max_new_tokens` and nowhere else."""
        return Request(
            prompt_id=self.prompt_id,
            prompt_token_ids=self.prompt_token_ids,
            draw_index=draw_index,
            sample_index=sample_index,
            rng_key=make_rng_key(0, "train", draw_index, sample_index),
            sampling=SamplingParams(max_new_tokens=max_new_tokens),
            purpose="train",
        )


Recording = list[list[RecordedPrompt]]
"""One list of prompts for each training step of a run, in order; a JSONL file is one step."""


def feed_drafter(drafter: DrafterBase, prompts: Iterable[RecordedPrompt]) -> None:
    """Let a drafter learn recorded rollouts as completed samples, before it drafts for others."""
    for prompt in prompts:
        requests = [prompt.request(0, index, len(sample.tokens)) for index, sample in enumerate(prompt.samples)]
        drafter.learn([recorded_completion(*pair) for pair in zip(requests, prompt.samples, strict=True)])
    drafter.end_step()


def recorded_completion(request: Request, sample: RecordedSample) -> Completion:
    """A recorded sample as a completion of the engine; log-probs were not recorded, and no drafter needs them."""
    response = Response(
        token_ids=sample.tokens,
        rollout_logprobs=np.zeros(len(sample.tokens), np.float32),
        policy_versions=np.zeros(len(sample.tokens), np.int32),
        finish_reason="stop",
        extensions=sample.extensions,
    )
    return Completion(request=request, response=response)


def read_recorded(path: Path, *, tokenizer: str | None, max_tokens: int) -> Recording:
    """Read recorded rollouts.

    Args:
        path: A JSONL file with rows `{"id", "prompt", "samples": [{"text"}, ...]}`, or `{"id", "prompt", "text"}` for
            each sample; a Parquet file of a run's `rollouts/`; that folder, or the run's. In a JSONL file
            `prompt_token_ids` may replace `prompt` and `token_ids` replace `text`; they are not changed.
        tokenizer: Folder or hub name; it encodes texts, and its end token is appended to each sample's.
        max_tokens: Samples are truncated to this number of tokens.

    Raises:
        ValueError: No such file, a row that cannot be used, by file and line, or texts and no tokenizer.
    """
    try:
        encoder = None if tokenizer is None else load_tokenizer(tokenizer)
    except ValueError as error:
        raise ValueError(f"--tokenizer: {error}") from error
    files = [path]
    if path.is_dir():
        files = sorted((path / "rollouts" if (path / "rollouts").is_dir() else path).glob("step_*.parquet"))
    rows = [_read(file) for file in files]
    if not any(rows):
        raise ValueError(f"{path}: no rows; expected rollouts as .jsonl or .parquet, or the folder of a run")
    recipe = next((one for one in (path, *path.parents[:2]) if (one / "recipe.yaml").is_file()), None)
    seed = None if recipe is None or path.suffix == ".jsonl" else read_source(recipe / "recipe.yaml").data.get("seed")
    return [
        merge_prompts(_prompt_of(*row, index, encoder, seed, max_tokens) for index, row in enumerate(of_step))
        for of_step in rows
    ]


def _truncated(sample: RecordedSample, max_tokens: int) -> RecordedSample:
    """The sample with at most `max_tokens` tokens; it does not end within an extension."""
    end = min([max_tokens, *(start for start, stop in sample.extensions if stop >= max_tokens)])
    if end >= len(sample.tokens):
        return sample
    extensions = tuple(part for part in sample.extensions if part[1] < end)
    return replace(sample, tokens=sample.tokens[:end], extensions=extensions, is_cut=True)


def merge_prompts(prompts: Iterable[RecordedPrompt]) -> list[RecordedPrompt]:
    """Prompts with equal tokens become one prompt, in the place and with the id of the first."""
    merged: dict[tuple[int, ...], RecordedPrompt] = {}
    for prompt in prompts:
        merged.setdefault(prompt.prompt_token_ids, replace(prompt, samples=[])).samples.extend(prompt.samples)
    return list(merged.values())


def find_extensions(kinds: Iterable[SegmentKind], lengths: Iterable[int]) -> Extensions:
    """The parts of a sample that were not sampled; neighbours are one part."""
    parts: list[tuple[int, int]] = []
    stop = 0
    for kind, length in zip(kinds, lengths, strict=True):
        start, stop = stop, stop + length
        if kind != "model":
            parts.append((parts.pop()[0] if parts and parts[-1][1] == start else start, stop))
    return tuple(parts)


# --- Rows of files ----------------------------------------------------------------------------------------------------

Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=np.iinfo(np.int32).max)]], Field(min_length=1)]


class _Sample(Section, extra="ignore"):
    text: str | None = None
    token_ids: TokenIds | None = None
    segment_kinds: list[SegmentKind] | None = None
    """In a run's files, as `segment_lengths`: samples of several turns."""
    segment_lengths: list[int] | None = None


class _Row(_Sample):
    """A prompt with its samples; without any the row itself is one, as in a run's Parquet files."""

    id: Any = Field(default=None, validation_alias=AliasChoices("id", "prompt_id"))
    prompt: Text | None = None
    prompt_token_ids: TokenIds | None = None
    draw_index: int = 0
    sample_index: int = 0
    samples: Annotated[list[_Sample], Field(min_length=1)] | None = None
    """A list of {"text": ...} or {"token_ids": ...}."""

    @property
    def all_samples(self) -> list[_Sample]:
        """At least one."""
        return self.samples or [self]


def _read(path: Path) -> list[tuple[str, _Row]]:
    """The rows of a file, checked, each with its place; those of a Parquet file by draw and sample."""
    rows = []
    for row in read_rows(RowSource(files=[str(path)])):
        if isinstance(row.fields, RowError):
            raise ValueError(f"{row.place}: {row.fields}") from row.fields
        try:
            rows.append((row.place, validate_section(_Row, dict(row.fields))))
        except RecipeError as error:
            raise ValueError(f"{row.place}: {error.problems[0]}") from error
    if path.suffix == ".parquet":
        rows.sort(key=lambda item: (item[1].draw_index, item[1].sample_index))
    return rows


def _prompt_of(
    place: str, row: _Row, index: int, tokenizer: "PreTrainedTokenizerBase | None", seed: int | None, max_tokens: int
) -> RecordedPrompt:
    prompt = row.prompt_token_ids or _encode(f"{place}: prompt", row.prompt, tokenizer)
    samples = []
    for number, sample in enumerate(row.all_samples):
        token_ids = sample.token_ids or _encode(f"{place}: samples.{number}", sample.text, tokenizer, is_sample=True)
        whole = RecordedSample(
            tokens=np.array(token_ids, np.int32),
            extensions=find_extensions(sample.segment_kinds or (), sample.segment_lengths or ()),
            rng_key=None if seed is None else make_rng_key(seed, "train", row.draw_index, row.sample_index),
        )
        samples.append(_truncated(whole, max_tokens))
    prompt_id = str(index if row.id is None else row.id)
    return RecordedPrompt(prompt_id=prompt_id, prompt_token_ids=tuple(prompt), samples=samples)


def _encode(
    place: str, text: str | None, tokenizer: "PreTrainedTokenizerBase | None", *, is_sample: bool = False
) -> list[int]:
    """The tokens of a text; those of a sample end with the end token, once."""
    if not text:
        raise ValueError(f"{place}: expected a text (`prompt`, `text`) or token ids (`prompt_token_ids`, `token_ids`)")
    if tokenizer is None:
        raise ValueError(f"{place} is a text; give --tokenizer DIR, the tokenizer to encode it with")
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=not is_sample)
    end = tokenizer.eos_token_id
    if is_sample and end is None:
        raise ValueError(f"{place}: the tokenizer has no end token to put after the text (eos_token)")
    if is_sample and token_ids[-1:] != [end]:
        token_ids.append(end)
    if not token_ids:
        raise ValueError(f"{place} gives no tokens")
    return token_ids
