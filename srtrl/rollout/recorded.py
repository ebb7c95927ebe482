"""Recorded rollouts: JSONL rows of any trainer, or the `rollouts/*.parquet` of a run of ours.

They are what `srtrl replay` goes through, what the trace-driven benchmark decodes again, and what drafters can be
filled with before they start.
"""

from __future__ import annotations

import gzip
import itertools
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from srtrl.resolve import suggestion
from srtrl.tasks.rows import RowError, RowSource, read_rows
from srtrl.types import Completion, Purpose, Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.drafters.base import DrafterBase

Tokens = npt.NDArray[np.int32]

PARQUET_COLUMNS = ("prompt_id", "draw_index", "sample_index", "prompt_token_ids", "token_ids")
"""The columns that are read of a run's files; see `srtrl.trainer.run_folder`."""
_STEP_FILE = re.compile(r"step_(\d+)\.parquet")


@dataclass(kw_only=True, slots=True, frozen=True)
class RecordedPrompt:
    """A prompt and what was sampled for it."""

    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    """Never empty; prompts of one step differ in it."""
    samples: list[Tokens]
    """Response tokens of each sample, none of them empty, in the order of the file."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Recording:
    """The recorded rollouts of one file, or of one run."""

    path: Path
    steps: list[list[RecordedPrompt]]
    """One list of prompts for each training step, in order; a JSONL file is one step."""
    is_retokenised: bool
    """Whether tokens were made from text: nearly, but not always, the tokens that were sampled."""
    num_cut: int
    """Samples that were longer than `max_tokens` and lost their end."""

    def prompts(self) -> list[RecordedPrompt]:
        """All prompts, each once, with its samples of all steps, the earliest first."""
        return _merge(itertools.chain.from_iterable(self.steps))


def feed_drafter(drafter: DrafterBase, prompts: Iterable[RecordedPrompt], purpose: Purpose) -> None:
    """Let a drafter learn recorded rollouts as completed samples, before it drafts for others."""
    for prompt in prompts:
        drafter.learn([_completion_of(prompt, index, purpose) for index in range(len(prompt.samples))])
    drafter.on_policy_update()


def _completion_of(prompt: RecordedPrompt, sample_index: int, purpose: Purpose) -> Completion:
    """A recorded sample as the engine would have given it, but for what was not recorded and no drafter needs."""
    token_ids = prompt.samples[sample_index].tolist()
    return Completion(
        request=Request(
            prompt_id=prompt.prompt_id,
            prompt_token_ids=prompt.prompt_token_ids,
            draw_index=0,
            sample_index=sample_index,
            rng_key=0,
            sampling=SamplingParams(max_new_tokens=len(token_ids)),
            purpose=purpose,
        ),
        token_ids=token_ids,
        rollout_logprobs=[0.0] * len(token_ids),
        finish_reason="stop",
        policy_version=0,
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
            `rollouts/`; that folder, or the run's. In a JSONL file `prompt_token_ids` may stand for `prompt` and
            `token_ids` for `text`; they are taken as they are.
        tokenizer: Encodes texts, and its end token is appended to each sample's; needed where there are texts.
        max_tokens: Samples are cut to this many tokens.

    Raises:
        ValueError: No such file, or a row that cannot be used, by file and line.
    """
    if path.is_dir():
        return _read_run(path, max_tokens)
    if not path.is_file():
        raise ValueError(f"{path}: no such file or folder; expected rollouts as .jsonl or .parquet, or a run's folder")
    if path.suffix == ".parquet":
        return _cut(path, [_read_step(path)], max_tokens)
    if path.suffix != ".jsonl":
        raise ValueError(f"{path}: expected a .jsonl or .parquet file, or the folder of a run")
    rows = [_parse_row(row.place, row.fields) for row in read_rows(RowSource(files=[str(path)]))]
    encoder = _Encoder(tokenizer)
    prompts = [
        RecordedPrompt(
            prompt_id=row.prompt_id or str(index),
            prompt_token_ids=tuple(encoder.encode_prompt(row)),
            samples=encoder.encode_samples(row),
        )
        for index, row in enumerate(rows)
    ]
    return _cut(path, [_merge(prompts)], max_tokens, is_retokenised=encoder.has_encoded)


def _cut(
    path: Path, steps: Sequence[list[RecordedPrompt]], max_tokens: int, *, is_retokenised: bool = False
) -> Recording:
    """The recording, its samples cut to `max_tokens`; refuses an empty one."""
    if not any(steps):
        raise ValueError(f"{path}: no rows in it; expected recorded rollouts")
    num_cut = 0
    for prompt in itertools.chain.from_iterable(steps):
        num_cut += sum(len(sample) > max_tokens for sample in prompt.samples)
        prompt.samples[:] = [sample[:max_tokens] for sample in prompt.samples]
    return Recording(path=path, steps=list(steps), is_retokenised=is_retokenised, num_cut=num_cut)


def _merge(prompts: Iterable[RecordedPrompt]) -> list[RecordedPrompt]:
    """Prompts with equal tokens become one, in the place and with the id of the first."""
    merged: dict[tuple[int, ...], RecordedPrompt] = {}
    for prompt in prompts:
        known = merged.setdefault(
            prompt.prompt_token_ids,
            RecordedPrompt(prompt_id=prompt.prompt_id, prompt_token_ids=prompt.prompt_token_ids, samples=[]),
        )
        known.samples.extend(prompt.samples)
    return list(merged.values())


# --- JSONL ------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True, frozen=True)
class _Row:
    """One row of a JSONL file, checked; texts are not encoded yet."""

    place: str
    prompt_id: str | None
    prompt: str | Tokens
    samples: list[str | Tokens]


class _Encoder:
    """Turns the texts of rows into tokens, and remembers whether it had to."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self.has_encoded = False

    def encode_prompt(self, row: _Row) -> list[int]:
        """Token ids of the prompt."""
        if not isinstance(row.prompt, str):
            return [int(token) for token in row.prompt]
        token_ids: list[int] = self._tokenizer_for(row).encode(row.prompt)
        if not token_ids:
            raise ValueError(f"{row.place}: the prompt gives no tokens")
        return token_ids

    def encode_samples(self, row: _Row) -> list[Tokens]:
        """Tokens of the samples: the end token is appended to those that come as text."""
        texts = [sample for sample in row.samples if isinstance(sample, str)]
        if not texts:
            return [np.asarray(sample, np.int32) for sample in row.samples]
        tokenizer = self._tokenizer_for(row)
        end = tokenizer.eos_token_id
        if end is None:
            raise ValueError(f"{row.place}: the tokenizer has no end token to put after the samples' texts (eos_token)")
        encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
        return [
            _ended(next(encoded), end) if isinstance(sample, str) else np.asarray(sample, np.int32)
            for sample in row.samples
        ]

    def _tokenizer_for(self, row: _Row) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError(f"{row.place}: the row has texts; give --tokenizer DIR, the tokenizer to encode them with")
        self.has_encoded = True
        return self.tokenizer


def _ended(token_ids: Sequence[int], end: int) -> Tokens:
    """The tokens with `end` last, once."""
    return np.array(token_ids if token_ids and token_ids[-1] == end else [*token_ids, end], np.int32)


def _parse_row(place: str, fields: Mapping[str, Any] | RowError) -> _Row:
    """Check one row.

    Raises:
        ValueError: It cannot be used; the message begins with `place`.
    """
    if isinstance(fields, RowError):
        raise ValueError(f"{place}: {fields}") from fields
    samples = fields.get("samples")
    if not isinstance(samples, list) or not samples:
        found = "no such field" if "samples" not in fields else f"found {str(samples)[:40]!r}"
        near = "" if "samples" in fields else suggestion("samples", fields)
        raise ValueError(f"{place}: samples: expected a list of at least one {{'text': ...}}, {found}{near}")
    prompt_id = fields.get("id")
    return _Row(
        place=place,
        prompt_id=None if prompt_id is None else str(prompt_id),
        prompt=_text_or_tokens(place, fields, "prompt", "prompt_token_ids"),
        samples=[
            _text_or_tokens(f"{place}: samples.{index}", sample, "text", "token_ids")
            for index, sample in enumerate(samples)
        ],
    )


def _text_or_tokens(place: str, fields: object, text_name: str, tokens_name: str) -> str | Tokens:
    """The token ids in `fields`, or else the text."""
    if not isinstance(fields, Mapping) or not (text_name in fields or tokens_name in fields):
        names = f"; its fields are {', '.join(fields)}" if isinstance(fields, Mapping) else ""
        raise ValueError(f"{place}: expected an object with `{text_name}` or `{tokens_name}`{names}")
    if tokens_name in fields:
        return _checked_tokens(f"{place}: {tokens_name}", fields[tokens_name])
    text = fields[text_name]
    if not isinstance(text, str) or not text:
        raise ValueError(f"{place}: {text_name}: expected a text that is not empty, found {str(text)[:40]!r}")
    return text


def _checked_tokens(place: str, value: object) -> Tokens:
    most = np.iinfo(np.int32).max
    valid = isinstance(value, list) and all(type(token) is int and 0 <= token <= most for token in value)
    if not valid or not value:
        raise ValueError(f"{place}: expected a list of at least one token id, found {str(value)[:40]!r}")
    return np.array(value, np.int32)


# --- Parquet ----------------------------------------------------------------------------------------------------------


def _read_run(folder: Path, max_tokens: int) -> Recording:
    """All steps of a run, in order."""
    inner = folder / "rollouts" if (folder / "rollouts").is_dir() else folder
    numbered = [(int(match[1]), path) for path in inner.iterdir() if (match := _STEP_FILE.fullmatch(path.name))]
    if not numbered:
        raise ValueError(f"{folder}: no recorded rollouts in this folder; expected rollouts/step_000001.parquet, ...")
    return _cut(folder, [_read_step(path) for _, path in sorted(numbered)], max_tokens)


def _read_step(path: Path) -> list[RecordedPrompt]:
    """The rollouts of one training step, ordered by draw and sample."""
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
        missing = [name for name in PARQUET_COLUMNS if name not in names]
        if missing:
            raise ValueError(f"{path}: no column `{missing[0]}`; expected those of a run's rollouts/*.parquet")
        rows = pyarrow.parquet.read_table(path, columns=list(PARQUET_COLUMNS)).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: cannot read this Parquet file: {error}") from error
    return _merge(_parquet_prompts(path, rows))


def _parquet_prompts(path: Path, rows: Sequence[Mapping[str, Any]]) -> Iterator[RecordedPrompt]:
    """One prompt of a single sample for each row, sorted."""
    places = sorted((row["draw_index"], row["sample_index"], number) for number, row in enumerate(rows, start=1))
    for _, _, number in places:
        row = rows[number - 1]
        tokens = _checked_tokens(f"{path}:{number}: token_ids", row["token_ids"])
        prompt = _checked_tokens(f"{path}:{number}: prompt_token_ids", row["prompt_token_ids"])
        yield RecordedPrompt(prompt_id=str(row["prompt_id"]), prompt_token_ids=tuple(prompt.tolist()), samples=[tokens])
