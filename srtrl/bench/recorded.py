"""Recorded rollouts: JSONL rows of any trainer, or the `rollouts/*.parquet` of a run of ours.

`srtrl replay` counts the decode steps of them, the trace-driven benchmarks decode them again, and drafters can learn
them before they start.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import AliasChoices, Field, model_validator

from srtrl.recipe.file import RecipeError, validate_section
from srtrl.recipe.schema import Section
from srtrl.tasks.rows import RowError, RowSource, read_rows
from srtrl.types import Completion, Purpose, Request, SamplingParams, SegmentKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.drafters.base import DrafterBase

Tokens = npt.NDArray[np.int32]
Extensions = tuple[tuple[int, int], ...]
"""Start and stop of each part of a sample that was not sampled, as in `Completion`; a turn ends before each."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RecordedPrompt:
    """A prompt and its samples."""

    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    """Never empty; prompts of one step differ in it."""
    samples: list[Tokens]
    """Response tokens of each sample, none of them empty, in the order of the file."""
    extensions: dict[int, Extensions] = field(default_factory=dict)
    """Index in `samples` -> where the tokens of an environment are, for samples of several turns."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Recording:
    """The recorded rollouts of one file, or of one run."""

    path: Path
    steps: list[list[RecordedPrompt]]
    """One list of prompts for each training step, in order; a JSONL file is one step."""
    is_retokenised: bool
    """Whether tokens were made from text: nearly, but not always, the tokens that were sampled."""
    num_cut: int
    """Samples that were longer than `max_tokens` and were truncated."""

    def prompts(self) -> list[RecordedPrompt]:
        """All prompts, each once, with its samples of all steps, the earliest first."""
        return _merge(chain.from_iterable(self.steps))


def feed_drafter(drafter: DrafterBase, prompts: Iterable[RecordedPrompt], purpose: Purpose) -> None:
    """Let a drafter learn recorded rollouts as completed samples, before it drafts for others."""
    for prompt in prompts:
        completions = []
        for index, sample in enumerate(prompt.samples):
            request = Request(
                prompt_id=prompt.prompt_id,
                prompt_token_ids=prompt.prompt_token_ids,
                draw_index=0,
                sample_index=index,
                rng_key=0,
                sampling=SamplingParams(max_new_tokens=len(sample)),
                purpose=purpose,
            )
            completions.append(recorded_completion(request, sample, prompt.extensions.get(index, ())))
        drafter.learn(completions)
    drafter.end_step()


def recorded_completion(request: Request, tokens: Tokens, extensions: Extensions = ()) -> Completion:
    """A recorded sample as a completion of the engine; log-probs were not recorded, and no drafter needs them."""
    return Completion(
        request=request,
        token_ids=tokens.tolist(),
        rollout_logprobs=[0.0] * len(tokens),
        finish_reason="stop",
        policy_version=0,
        extensions=extensions,
    )


def load_recorded_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Tokenizer of a folder or hub name, as `srtrl.model.weights.load_tokenizer`; its vocabulary may be gzipped.

    Raises:
        ValueError: No such folder, or no tokenizer in it.
    """
    from srtrl.model.weights import load_tokenizer

    folder = Path(path)
    packed = folder / "tokenizer.json.gz"
    if not packed.is_file() or (folder / "tokenizer.json").is_file():
        return load_tokenizer(path)
    with tempfile.TemporaryDirectory() as temporary:
        unpacked = Path(temporary)
        for file in folder.glob("*.json"):
            shutil.copyfile(file, unpacked / file.name)
        with gzip.open(packed) as source, (unpacked / "tokenizer.json").open("wb") as target:
            shutil.copyfileobj(source, target)
        return load_tokenizer(unpacked)


def read_recorded(path: Path, *, tokenizer: PreTrainedTokenizerBase | None, max_tokens: int) -> Recording:
    """Read recorded rollouts.

    Args:
        path: A JSONL file with rows `{"id", "prompt", "samples": [{"text"}, ...]}`; a Parquet file of a run's
            `rollouts/`; that folder, or the run's. In a JSONL file `prompt_token_ids` may replace `prompt` and
            `token_ids` replace `text`; they are not changed.
        tokenizer: Encodes texts, and its end token is appended to each sample's; needed where there are texts.
        max_tokens: Samples are truncated to this number of tokens.

    Raises:
        ValueError: No such file, or a row that cannot be used, by file and line.
    """
    files = [path]
    if path.is_dir():
        files = sorted((path / "rollouts" if (path / "rollouts").is_dir() else path).glob("step_*.parquet"))
    rows = [list(_read(file)) for file in files]
    if not any(rows):
        raise ValueError(f"{path}: no rows; expected rollouts as .jsonl or .parquet, or the folder of a run")
    steps = [
        _merge(_prompt_of(place, row, index, tokenizer) for index, (place, row) in enumerate(of_step))
        for of_step in rows
    ]
    num_cut = sum(_truncate(prompt, max_tokens) for prompt in chain.from_iterable(steps))
    has_texts = any(row.has_texts for _, row in chain.from_iterable(rows))
    return Recording(path=path, steps=steps, is_retokenised=has_texts, num_cut=num_cut)


def _truncate(prompt: RecordedPrompt, max_tokens: int) -> int:
    """Truncate a prompt's samples, but not within an extension; returns the number of truncated ones."""
    num_cut = 0
    for index, sample in enumerate(prompt.samples):
        extensions = prompt.extensions.get(index, ())
        end = min([max_tokens, *(start for start, stop in extensions if stop >= max_tokens)])
        if end < len(sample):
            num_cut += 1
            prompt.samples[index] = sample[:end]
            prompt.extensions[index] = tuple(part for part in extensions if part[1] < end)
    return num_cut


def _merge(prompts: Iterable[RecordedPrompt]) -> list[RecordedPrompt]:
    """Prompts with equal tokens become one prompt, in the place and with the id of the first."""
    merged: dict[tuple[int, ...], RecordedPrompt] = {}
    for prompt in prompts:
        known = merged.setdefault(
            prompt.prompt_token_ids,
            RecordedPrompt(prompt_id=prompt.prompt_id, prompt_token_ids=prompt.prompt_token_ids, samples=[]),
        )
        known.extensions.update({len(known.samples) + index: parts for index, parts in prompt.extensions.items()})
        known.samples.extend(prompt.samples)
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
OF_SAMPLE = ("token_ids", "segment_kinds", "segment_lengths")


class _Sample(Section, extra="ignore"):
    text: Text | None = None
    token_ids: TokenIds | None = None
    segment_kinds: list[SegmentKind] | None = None
    """In a run's files, as `segment_lengths`: samples of several turns."""
    segment_lengths: list[int] | None = None


class _Row(Section, extra="ignore"):
    """A prompt with its samples, or with one: a row of a run's Parquet file."""

    id: Any = Field(default=None, validation_alias=AliasChoices("id", "prompt_id"))
    prompt: Text | None = None
    prompt_token_ids: TokenIds | None = None
    draw_index: int = 0
    sample_index: int = 0
    samples: Annotated[list[_Sample], Field(min_length=1)]
    """A list of {"text": ...} or {"token_ids": ...}."""

    @model_validator(mode="before")
    @classmethod
    def one_sample(cls, row: Any) -> Any:
        """A row with tokens of its own is a sample of its prompt."""
        if isinstance(row, dict) and "samples" not in row and "token_ids" in row:
            return row | {"samples": [{name: row[name] for name in OF_SAMPLE if name in row}]}
        return row

    @property
    def has_texts(self) -> bool:
        """Whether some tokens have to be made from texts."""
        return None in (self.prompt_token_ids, *(sample.token_ids for sample in self.samples))


def _read(path: Path) -> Sequence[tuple[str, _Row]]:
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


def _prompt_of(place: str, row: _Row, index: int, tokenizer: PreTrainedTokenizerBase | None) -> RecordedPrompt:
    return RecordedPrompt(
        prompt_id=str(index if row.id is None else row.id),
        prompt_token_ids=tuple(row.prompt_token_ids or _encode(f"{place}: prompt", row.prompt, tokenizer)),
        samples=[
            np.array(
                sample.token_ids or _encode(f"{place}: samples.{number}", sample.text, tokenizer, is_sample=True),
                np.int32,
            )
            for number, sample in enumerate(row.samples)
        ],
        extensions={
            number: find_extensions(sample.segment_kinds, sample.segment_lengths or ())
            for number, sample in enumerate(row.samples)
            if sample.segment_kinds
        },
    )


def _encode(
    place: str, text: str | None, tokenizer: PreTrainedTokenizerBase | None, *, is_sample: bool = False
) -> list[int]:
    """The tokens of a text; those of a sample end with the end token, once."""
    if text is None:
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
