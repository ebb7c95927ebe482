"""Tokens as text, and stop strings: whether the newest token completes one."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Tokenizer(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: list[int], /) -> Any:
        """Text of the tokens, special ones included."""

    def convert_ids_to_tokens(self, ids: list[int], /) -> Any:
        """The token of each id, None where it has none."""


UNKNOWN = "<|unknown|>"
"""The text of a token that the tokenizer does not have. It has no digit, which could be read as an answer."""


def decode(tokenizer: Any, token_ids: Sequence[int] | npt.NDArray[np.int32], **options: Any) -> str:
    """The text of tokens, with `UNKNOWN` for each that the tokenizer does not have: models often have some more.

    Args:
        tokenizer: Any tokenizer of transformers; its own `decode` would leave such tokens out.
        token_ids: Tokens of the model.
        options: Of the tokenizer's `decode`.
    """
    ids = np.asarray(token_ids).tolist()
    different = list(set(ids))
    tokens = dict(zip(different, tokenizer.convert_ids_to_tokens(different), strict=True))
    text, start = "", 0
    for index, token_id in enumerate(ids):
        if tokens[token_id] is None:
            text += tokenizer.decode(ids[start:index], **options) + UNKNOWN
            start = index + 1
    return text + str(tokenizer.decode(ids[start:], **options))


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds to those before it, without special tokens; joined they are the whole text.

    If a character comes in pieces, the last piece adds it. (Some tokenizers decode bytes that are no characters in
    more than one way: there the joined text may differ.)
    """
    whole = decode(tokenizer, token_ids, skip_special_tokens=True)
    pieces = {token_id: decode(tokenizer, [token_id], skip_special_tokens=True) for token_id in set(token_ids)}
    texts = [pieces[token_id] for token_id in token_ids]
    if "".join(texts) == whole:
        return texts
    texts, before, start = [], 0, 0  # the text of a token depends on the one before: the window is from that one on
    for stop in range(1, len(token_ids) + 1):
        shown = decode(tokenizer, token_ids[before:start], skip_special_tokens=True)
        text = decode(tokenizer, token_ids[before:stop], skip_special_tokens=True)
        is_whole = not text.endswith("\ufffd") or stop == len(token_ids)
        texts.append(text[len(shown) :] if is_whole else "")
        if is_whole:
            before, start = start, stop
    return texts


def count_unknown(tokenizer: Tokenizer, token_ids: npt.NDArray[np.integer[Any]]) -> int:
    """Number of tokens that the tokenizer does not have."""
    ids, counts = np.unique(token_ids, return_counts=True)
    is_unknown = [token is None for token in tokenizer.convert_ids_to_tokens(ids.tolist())]
    return int(counts[is_unknown].sum())


class StopFinder:
    """Finds stop strings in the tokens of responses, as these arrive."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        """`tokenizer` may be None where no request has stop strings (`Engine.check_request` asserts it)."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._last_tokens: dict[tuple[str, ...], npt.NDArray[np.bool_]] = {}
        """By set of stop strings, [vocab_size]: which tokens may be the last of one."""
        self.may_end = np.zeros(vocab_size, np.bool_)
        """[vocab_size], tokens that may be the last of any stop string so far (`add`)."""

    def add(self, stop_strings: tuple[str, ...]) -> None:
        """Prepare for requests with these stop strings."""
        if stop_strings and stop_strings not in self._last_tokens:
            self._last_tokens[stop_strings] = self._find_last_tokens(stop_strings)
            self.may_end |= self._last_tokens[stop_strings]

    def ends(self, stop_strings: tuple[str, ...], token_ids: npt.NDArray[np.int32]) -> bool:
        """Whether the last token of a response completes a stop string; no shorter prefix of the response does."""
        assert self.tokenizer is not None
        if not self._last_tokens[stop_strings][token_ids[-1]]:  # most tokens: no text is made
            return False
        text = decode(self.tokenizer, token_ids[-num_tail_tokens(stop_strings) :])
        return any(stop in text for stop in stop_strings)

    def _find_last_tokens(self, stop_strings: tuple[str, ...]) -> npt.NDArray[np.bool_]:
        """The tokens whose own text has the last character of a stop string; all, where a token's text may hide it.

        A tokenizer may drop white space at the start of a text, and a character that is not ASCII may come in pieces.
        """
        assert self.tokenizer is not None
        last = {stop[-1] for stop in stop_strings}
        if any(not character.isascii() or character.isspace() for character in last):
            return np.ones(self.vocab_size, np.bool_)
        texts = (decode(self.tokenizer, [token]) for token in range(self.vocab_size))
        return np.array([not last.isdisjoint(text) for text in texts])


def num_tail_tokens(stop_strings: tuple[str, ...]) -> int:
    """Number of last tokens that decide whether the newest one completes a stop string.

    The string ends in that token, and each of its bytes but the last few comes from some token before; so as many
    tokens as the string has bytes, and four more for characters that are cut at the tail's start.
    """
    return max(len(stop.encode()) for stop in stop_strings) + 4


def cut_at_stop_string(text: str, stop_strings: Sequence[str]) -> str:
    """`text` up to the first stop string in it, without the stop string."""
    ends = [text.index(stop) for stop in stop_strings if stop in text]
    return text[: min(ends)] if ends else text
