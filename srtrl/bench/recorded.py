"""Recorded rollouts: JSONL or Parquet rows of any trainer or engine, or the `rollouts/*.parquet` of a run of ours.

`srtrl replay` counts the decode steps of them, the trace-driven benchmarks decode them again, and drafters can learn
them before they start.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import AliasChoices, AliasPath, BeforeValidator, Field, model_validator

from srtrl.drafters.base import DrafterBase
from srtrl.model.folders import load_tokenizer
from srtrl.model.noise import make_rng_key
from srtrl.recipe.file import RecipeError, read_source, validate_section
from srtrl.recipe.schema import Section
from srtrl.tasks.rendering import Message, apply_chat_template
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
    """Positions of an environment's tokens, in a sample of several turns."""
    rng_key: int | None = None
    """None if the rollouts are not those of a run of ours."""
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
"""One list of prompts for each training step of a run, in order; rows without a `step` are one for each file."""

SECONDS_PER_LINE = 10.0
"""Interval between lines of progress."""

Names = dict[tuple[int, ...], str]
"""Tokens of a prompt -> the name that the first row with them has."""

ItemT = TypeVar("ItemT")


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
        path: A JSONL or Parquet file of any trainer or engine (docs/data.md has the shapes of its rows), a Parquet file
            of a run's `rollouts/`, a folder of such files, or that of a run. Token ids are not changed.
        tokenizer: Folder or hub name; it encodes texts and messages, and its end token is appended to each sample's.
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
        folder = path / "rollouts" if (path / "rollouts").is_dir() else path
        files = sorted(file for file in folder.glob("*") if file.name.endswith((".jsonl", ".jsonl.gz", ".parquet")))
    rows = [row for index, file in enumerate(files) for row in _read(file, index)]
    rows.sort(key=lambda item: (item[1].step, item[1].draw_index, item[1].sample_index))
    if not rows:
        raise ValueError(f"{path}: no rows; expected rollouts as .jsonl or .parquet, or the folder of a run")
    recipe = next((one for one in (path, *path.parents[:2]) if (one / "recipe.yaml").is_file()), None)
    is_ours = path.is_dir() or path.suffix == ".parquet"
    seed = read_source(recipe / "recipe.yaml").data.get("seed") if recipe and is_ours else None
    names: Names = {}
    steps = []
    for _, of_step in groupby(with_progress(rows, f"{path}: rows tokenised"), lambda row: row[1].step):
        steps.append(merge_prompts(_prompt_of(*row, names, encoder, seed, max_tokens) for row in of_step))
    return steps


def with_progress(items: Sequence[ItemT], what: str) -> Iterator[ItemT]:
    """The items; every ten seconds a line on standard error says how many of them are done."""
    last = monotonic()
    for number, item in enumerate(items):
        if monotonic() > last + SECONDS_PER_LINE:
            last = monotonic()
            print(f"{what}: {number:,} of {len(items):,}", file=sys.stderr)
        yield item


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
PROMPTS = ("prompt", "messages", "input", "arguments.gen_args_0.arg_0", "arguments.0.0")
TEXTS = ("text", "completion", "response", "output", "completions")
LISTS = ("samples", "outputs", "choices", "response.choices", "response.body.choices", "resps.0", *TEXTS[1:])
"""Names that trainers and engines give to a prompt, a completion and a list of completions."""


def _named(*names: str) -> Any:
    """An optional field: the first of these that the row has; `a.b` is the field (or the item) `b` of `a`."""
    split = ([int(part) if part.isdigit() else part for part in name.split(".")] for name in names)
    return Field(default=None, validation_alias=AliasChoices(*(AliasPath(str(first), *rest) for first, *rest in split)))


def _list_samples(value: Any) -> Any:
    """A text, a message, or a list of samples some of which are texts, as a list of samples."""
    values = value if isinstance(value, list) else [value]
    if value is not None and not all(isinstance(one, str | dict) for one in values):
        raise ValueError(f"expected a text or a list of texts, found {json.dumps(value)[:80]}")
    if len(values) > 1 and all(isinstance(one, dict) and "role" in one for one in values):
        raise ValueError("several messages are not one completion; rows of several turns are not supported")
    return None if value is None else [{"text": one} if isinstance(one, str) else one for one in values]


class _Sample(Section, extra="ignore"):
    text: str | None = _named(*TEXTS, "message.content", "content")
    token_ids: TokenIds | None = None
    segment_kinds: list[SegmentKind] | None = None
    """In a run's files, as `segment_lengths`: samples of several turns."""
    segment_lengths: list[int] | None = None


class _Row(_Sample):
    """A prompt with its samples; without any the row itself is one, as in a run's Parquet files."""

    id: Any = _named("id", "prompt_id")
    step: int
    prompt: Text | list[Message] | None = _named(*PROMPTS)
    prompt_token_ids: TokenIds | None = None
    draw_index: int = 0
    sample_index: int = 0
    text: str | None = None
    samples: Annotated[list[_Sample] | None, Field(min_length=1), BeforeValidator(_list_samples)] = _named(*LISTS)

    @model_validator(mode="before")
    @classmethod
    def split_messages(cls, fields: Any) -> Any:
        """The last of `messages` is the completion, if it is the assistant's."""
        match fields.get("messages"):
            case [*prompt, {"role": "assistant", "content": str(text)}] if "prompt" not in fields:
                return {"text": text} | fields | {"prompt": prompt}
        return fields

    @property
    def all_samples(self) -> list[_Sample]:
        """At least one."""
        return self.samples or [self]


def _read(path: Path, index: int) -> list[tuple[str, _Row]]:
    """The rows of a file, checked, each with its place; `index` is the step of those without one."""
    rows = []
    for place, fields in ((row.place, row.fields) for row in read_rows(RowSource(files=[str(path)]))):
        if isinstance(fields, RowError):
            raise ValueError(f"{place}: {fields}") from fields
        try:
            row = validate_section(_Row, {"step": index, **fields})
        except RecipeError as error:
            raise ValueError(f"{place}: {error.problems[0]}") from error
        problem = ""
        if (row.prompt_token_ids or row.prompt) is None:
            problem = f"no prompt: expected {', '.join(PROMPTS[:3])} or prompt_token_ids"
        elif any((sample.token_ids or sample.text) is None for sample in row.all_samples):
            problem = f"no completion: expected {', '.join(TEXTS)}, token_ids, or a list in {', '.join(LISTS[:3])}"
        if problem:
            raise ValueError(f"{place}: {problem} (all shapes: docs/data.md); the row has {', '.join(fields)}")
        rows.append((place, row))
    return rows


def _prompt_of(
    place: str, row: _Row, names: Names, tokenizer: "PreTrainedTokenizerBase | None", seed: int | None, max_tokens: int
) -> RecordedPrompt:
    """The row as a prompt; one without a name gets a number, the same for the same tokens."""
    prompt = tuple(row.prompt_token_ids or _encode(f"{place}: prompt", row.prompt or "", tokenizer))
    samples = []
    for number, sample in enumerate(row.all_samples):
        token_ids = sample.token_ids or _encode(
            f"{place}: samples.{number}", sample.text or "", tokenizer, is_sample=True
        )
        whole = RecordedSample(
            tokens=np.array(token_ids, np.int32),
            extensions=find_extensions(sample.segment_kinds or (), sample.segment_lengths or ()),
            rng_key=None if seed is None else make_rng_key(seed, "train", row.draw_index, row.sample_index),
        )
        samples.append(_truncated(whole, max_tokens))
    prompt_id = names.setdefault(prompt, str(len(names) if row.id is None else row.id))
    return RecordedPrompt(prompt_id=prompt_id, prompt_token_ids=prompt, samples=samples)


def _encode(
    place: str, text: str | list[Message], tokenizer: "PreTrainedTokenizerBase | None", *, is_sample: bool = False
) -> list[int]:
    """The tokens of a text, or of messages through the chat template; a sample's end with the end token, once."""
    if tokenizer is None:
        what = "a text" if isinstance(text, str) else "a list of messages"
        raise ValueError(f"{place} is {what}; give --tokenizer DIR, the tokenizer to encode it with")
    add_special_tokens = isinstance(text, str) and not is_sample
    if isinstance(text, list):
        try:
            (text,) = apply_chat_template(tokenizer, [text], {})
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    end = tokenizer.eos_token_id
    if is_sample and end is None:
        raise ValueError(f"{place}: the tokenizer has no end token to put after the text (eos_token)")
    if is_sample and token_ids[-1:] != [end]:
        token_ids.append(end)
    if not token_ids:
        raise ValueError(f"{place} gives no tokens")
    return token_ids
