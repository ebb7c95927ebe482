"""Prompts of one split: tokenised once, kept compactly, handed out as `Prompt` records."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from srtrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_CHUNK = 1024
"""Texts given to the tokenizer at once: enough to use its threads, few enough to bound its memory."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Problem:
    """A rendered problem that has not been tokenised; the fields are those of `Prompt`."""

    prompt_id: str
    text: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class PromptTable(Sequence[Prompt]):
    """The prompts of one split, in order.

    Token ids are held as int32 arrays (a tuple of Python ints takes ten times the memory) and become a `Prompt` when
    asked for: 100,000 problems of 100 tokens take about 40 MB here.
    """

    def __init__(self, problems: Sequence[Problem], token_ids: Sequence[npt.NDArray[np.int32]]) -> None:
        assert len(problems) == len(token_ids)
        self._problems = problems
        self._token_ids = token_ids

    def __len__(self) -> int:
        return len(self._problems)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> "PromptTable": ...

    def __getitem__(self, index: int | slice) -> "Prompt | PromptTable":
        if isinstance(index, slice):
            return PromptTable(self._problems[index], self._token_ids[index])
        problem = self._problems[index]
        return Prompt(
            prompt_id=problem.prompt_id,
            text=problem.text,
            token_ids=tuple(self._token_ids[index].tolist()),
            answer=problem.answer,
            metadata=problem.metadata,
        )

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))


def tokenise(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], *, add_special_tokens: bool = True
) -> list[npt.NDArray[np.int32]]:
    """Token ids of each text.

    Args:
        tokenizer: Any tokenizer of transformers.
        texts: What the policy shall read.
        add_special_tokens: Add what the tokenizer itself adds, such as BOS; False where a chat template has done it.

    Returns:
        One array `[L]` a text.

    Raises:
        ValueError: a text has no tokens, or the tokenizer ends each text with its end token (the policy would be asked
            to go on after the end).
    """
    token_ids: list[npt.NDArray[np.int32]] = []
    for start in range(0, len(texts), TOKENIZER_CHUNK):
        chunk = list(texts[start : start + TOKENIZER_CHUNK])
        encoded = tokenizer(chunk, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        token_ids.extend(np.asarray(ids, dtype=np.int32) for ids in encoded)
    for text, ids in zip(texts, token_ids, strict=True):
        if len(ids) == 0:
            raise ValueError(f"the tokenizer gives no tokens for the prompt {text[:80]!r}")
    if add_special_tokens and tokenizer.eos_token_id is not None:
        _refuse_end_token(tokenizer, token_ids)
    return token_ids


def _refuse_end_token(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[npt.NDArray[np.int32]]) -> None:
    """Refuse a tokenizer that closes every text; one whose BOS and EOS are the same token may still open it."""
    if token_ids and all(len(ids) > 1 and ids[-1] == tokenizer.eos_token_id for ids in token_ids):
        raise ValueError(
            f"the tokenizer ends every prompt with its end token {tokenizer.eos_token!r}; "
            "set add_eos_token to false in its tokenizer_config.json"
        )
