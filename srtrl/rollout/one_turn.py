"""Continuation of a sample that the decoder gives back: its end, or an environment's answer and the next turn."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from srtrl.engine.stopping import cut_at_stop_string, decode, token_texts
from srtrl.tasks.reward_input import RewardInput
from srtrl.types import Completion, Conversation, Prompt, SegmentKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Segments = list[tuple[SegmentKind, list[int]]]
"""Kinds of segments and their token ids, in order."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Answer:
    """The continuation of a sample after a turn, or its end."""

    completion: Completion
    extension: list[int] = field(default_factory=list)
    """Tokens for `Engine.extend`; none if the sample has ended."""
    text: str = ""
    """Text of a sample that has ended; see `Rollout`."""
    conversation: Conversation | None = None
    """The turns of a sample that has ended; None: a single turn."""


class OneTurn:
    """Samples of a single turn: each has ended when the decoder gives it back. Subclasses let environments answer.

    A context manager: samples are given to it inside.
    """

    has_turns = False
    """Whether a sample may have several turns; see `Request`."""
    computes_here = False
    """Whether processors of this machine work on answers while the decoder does."""
    starts_prompts = False
    """Whether `started` adds to prompts; it must then be called inside the context."""
    tools: Sequence[dict[str, Any]] = ()
    """The tools for the chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._answers: list[Answer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the conversations that are still open."""

    def started(self, prompt: Prompt, max_prompt_tokens: int) -> Prompt:
        """The prompt with an environment's first messages."""
        return prompt

    def try_environment(self, prompt: Prompt) -> None:
        """Let user-defined code answer one turn of a prompt, before anything is decoded."""

    def begin_step(self, step: int) -> None:
        """Begin training step `step`, from 1 on, or with 0 the evaluation before it."""

    def check_not_all_raised(self, where: str) -> None:
        """Raise ValueError, beginning with `where` ("step 3"), if all samples of a step, on all ranks, failed."""

    def submit_turn(self, completion: Completion, prompt: Prompt) -> None:
        """A turn has ended."""
        stop_strings = completion.request.sampling.stop_strings
        text = response_text(self.tokenizer, completion.response.token_ids, stop_strings)
        self._answers.append(Answer(completion=completion, text=text))

    def take_answers(self) -> list[Answer]:
        """The answers since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def futures(self) -> Sequence[Future[Any]]:
        """The answers that are still to come."""
        return []

    def texts_of(self, sample: RewardInput) -> list[str]:
        """The text of each sampled token, by turns; of any sample of the tokenizer's tokens."""
        return [text for turn in sample.turns for text in token_texts(self.tokenizer, sample.token_ids[turn.tokens])]

    def tokenise_solution(self, text: str) -> Segments:
        """The segments of a worked solution, without an end token, as in a rollout whose policy sampled them."""
        return [("model", self.tokenizer.encode(text, add_special_tokens=False))]


def response_text(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int] | npt.NDArray[np.int32], stop_strings: Sequence[str]
) -> str:
    """The response as text: without special tokens, cut before the first stop string."""
    return cut_at_stop_string(decode(tokenizer, token_ids, skip_special_tokens=True), stop_strings)
