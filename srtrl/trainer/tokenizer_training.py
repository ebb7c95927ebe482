"""A byte-level BPE tokenizer trained on the task's own texts, for policies made from scratch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
"""The only special token: ends a response, and pads."""

NUM_BYTES = 256


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer that encodes any text and decodes it back to the same text.

    All 256 bytes are tokens, so nothing is ever unknown; every digit is a token of its own, so that a small policy sees
    numbers place by place. Merges are learned from `texts` alone; the result is the same for the same texts.

    Args:
        texts: What to learn the merges from.
        vocab_size: Most tokens, the bytes and the end token included; fewer where no pair is left to merge.

    Raises:
        ValueError: `vocab_size` has no room for the bytes and the end token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < NUM_BYTES + 1:
        raise ValueError(
            f"warm_start.train_tokenizer_vocab_size ({vocab_size}) must be at least {NUM_BYTES + 1}: "
            f"{NUM_BYTES} bytes and {END_OF_TEXT}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
