"""Stop strings: whether the newest token completes one."""

from collections.abc import Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of a tokenizer that stop strings need."""

    def decode(self, token_ids: list[int], /) -> Any:
        """Text of the tokens, special ones included."""


def completes_stop_string(stop_strings: tuple[str, ...], tail: list[int], tokenizer: Tokenizer) -> bool:
    """Whether the text of a response's last tokens has a stop string; no shorter prefix of the response had one."""
    text = tokenizer.decode(tail)
    return any(stop in text for stop in stop_strings)


def num_tail_tokens(stop_strings: tuple[str, ...]) -> int:
    """How many of the last tokens decide whether the newest one completes a stop string.

    The string ends in that token, and each of its bytes but the last few comes from some token before; so as many
    tokens as the string has bytes, and four more for characters that are cut at the tail's start.
    """
    return max(len(stop.encode()) for stop in stop_strings) + 4


def cut_at_stop_string(text: str, stop_strings: Sequence[str]) -> str:
    """`text` up to the first stop string in it, without the stop string."""
    ends = [text.index(stop) for stop in stop_strings if stop in text]
    return text[: min(ends)] if ends else text
