"""When a sample ends: end token, stop string, or length. Looked at token by token, also inside an accepted path."""

from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from srtrl.engine.sequence import Sequence
from srtrl.types import FinishReason


class Tokenizer(Protocol):
    """The part of a tokenizer that stop strings need."""

    def decode(self, token_ids: list[int], /) -> Any:
        """Text of the tokens, special ones included."""


def finish_reason(sequence: Sequence, tokenizer: Tokenizer | None) -> FinishReason | None:
    """Whether the sample ends with its newest token, and why."""
    sampling = sequence.request.sampling
    if sequence.token_ids[-1] in sampling.end_token_ids:
        return "stop"
    if sampling.stop_strings:
        assert tokenizer is not None, "check_request refuses stop strings without a tokenizer"
        tail = sequence.last_generated(num_tail_tokens(sampling.stop_strings))
        if ends_with_stop_string(sampling.stop_strings, tail, tokenizer):
            return "stop"
    return "length" if sequence.num_remaining == 0 else None


def ends_with_stop_string(stop_strings: tuple[str, ...], generated: SequenceOf[int], tokenizer: Tokenizer) -> bool:
    """Whether the text of `generated` contains a stop string; the caller has asked for every shorter prefix."""
    text = tokenizer.decode(list(generated[-num_tail_tokens(stop_strings) :]))
    return any(stop in text for stop in stop_strings)


def num_tail_tokens(stop_strings: tuple[str, ...]) -> int:
    """How many of the last tokens decide whether the newest one completes a stop string.

    The string ends in that token, and each of its bytes but the last few comes from some token before; so as many
    tokens as the string has bytes, and four more for characters that are cut at the tail's start.
    """
    return max(len(stop.encode()) for stop in stop_strings) + 4


def cut_at_stop_string(text: str, stop_strings: SequenceOf[str]) -> str:
    """`text` up to the first stop string in it, without the stop string."""
    ends = [text.index(stop) for stop in stop_strings if stop in text]
    return text[: min(ends)] if ends else text
