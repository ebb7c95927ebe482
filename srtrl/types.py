"""The small records that travel between the packages. They hold data and no behaviour.

Dimension letters used in the whole project: B sequences, L tokens of one sequence, T packed tokens of a micro-batch,
R response tokens of a micro-batch (those with a loss), N rows of one decode step, V vocabulary, D model width,
H query heads, K key-value heads, E width of one head.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length"]
"""`stop`: an end token or a stop string; `length`: `max_new_tokens` was reached."""

GradeOutcome = Literal["correct", "wrong", "graded", "timeout", "crash", "error"]
"""The end of a grading; `graded`: by rewards alone, for the task has no verifier. The last three are failures of the
grader, counted apart from wrong answers."""
GRADED_OUTCOMES: tuple[GradeOutcome, ...] = ("correct", "wrong", "graded")
"""The outcomes with a reward."""
VERIFIED_OUTCOMES: tuple[GradeOutcome, ...] = ("correct", "wrong", "timeout", "crash", "error")
"""Outcomes if the task has a verifier."""
UNVERIFIED_OUTCOMES: tuple[GradeOutcome, ...] = ("graded", "timeout", "crash", "error")
"""Outcomes if it has none: `accuracy` and the like are then not defined."""

SegmentKind = Literal["model", "observation", "boundary"]
"""Sampled by the policy; text of an environment; text of the format between turns, which is not sampled."""

Purpose = Literal["train", "eval", "generate"]
"""The use of a sample; part of its RNG key, so that evaluation never shares noise with training."""

SampleKey = tuple[int, int]
"""Draw and sample index."""


def num_equal(tokens: npt.NDArray[np.integer], others: npt.NDArray[np.integer]) -> int:
    """Number of tokens of two texts before the first difference."""
    length = min(len(tokens), len(others))
    return int(np.append(tokens[:length] != others[:length], True).argmax())


@dataclass(kw_only=True, slots=True, frozen=True)
class TopTokens:
    """The most likely tokens of some rows, unordered."""

    token_ids: npt.NDArray[np.int32]
    """[L, K]."""
    logprobs: npt.NDArray[np.float32]
    """[L, K], of the tempered distribution without top-k or top-p."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompt:
    """One problem, rendered and tokenised."""

    prompt_id: str
    """Unique within its data source."""
    text: str
    """The text after the template, as the policy reads it."""
    token_ids: tuple[int, ...]
    """Tokens of `text`, special tokens included; never empty."""
    answer: str
    """Reference answer, as the grader wants it; empty if the task has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's other fields (`problem`, `solution`, ...), for reward functions."""
    other_answers: tuple[str, ...] = ()
    """Further answers, each as right as `answer`."""

    @property
    def answers(self) -> tuple[str, ...]:
        """All reference answers: any of them is right."""
        return (self.answer, *self.other_answers)


@dataclass(kw_only=True, slots=True, frozen=True)
class SamplingParams:
    """Distribution and end of the tokens of a request."""

    max_new_tokens: int
    """Maximum number of tokens to generate, the end token included; at least 1."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy. Log-probs are of the tempered distribution (of temperature 1 when greedy)."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all. Evaluation and `generate` only."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with this mass; 1 keeps all. Evaluation and `generate` only."""
    end_token_ids: tuple[int, ...] = ()
    """A token that ends the sequence; it is kept as the last token of the completion."""
    stop_strings: tuple[str, ...] = ()
    """A string that ends the sequence once the decoded completion contains it."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Response:
    """The tokens of a sample after its prompt: all of them, or the first ones of a sample that continues.

    Arrays are shared, from the decoder to the update: nothing writes into them.
    """

    token_ids: npt.NDArray[np.int32]
    """[L]; the end token, if one was sampled, is the last."""
    rollout_logprobs: npt.NDArray[np.float32]
    """[L], by the decoder's policy (temperature applied, no top-k or top-p); 0 where nothing was sampled."""
    policy_versions: npt.NDArray[np.int32]
    """[L], number of policy updates before each token was sampled."""
    finish_reason: FinishReason | None = None
    """None: it continues."""
    extensions: tuple[tuple[int, int], ...] = ()
    """Start and stop of each part that was not sampled (`Engine.extend`)."""

    @property
    def sampled(self) -> npt.NDArray[np.int64]:
        """Indices of the tokens that a policy sampled."""
        is_sampled = np.ones(len(self.token_ids), np.bool_)
        for start, stop in self.extensions:
            is_sampled[start:stop] = False
        return np.flatnonzero(is_sampled)

    def cut(self, length: int) -> "Response":
        """The first `length` tokens, without an extension that does not end in them; a part has no finish reason."""
        if length >= len(self.token_ids):
            return self
        return replace(
            self,
            token_ids=self.token_ids[:length],
            rollout_logprobs=self.rollout_logprobs[:length],
            policy_versions=self.policy_versions[:length],
            finish_reason=None,
            extensions=tuple(part for part in self.extensions if part[1] <= length),
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class Request:
    """One sample for the engine to decode."""

    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    """Requests with equal prompt tokens share the prompt's pages."""
    draw_index: int
    """Index of the draw in the run (evaluation: of the problem): the order of admission, and the first half of the sort
    key of what is learned."""
    sample_index: int
    """Index in the draw's group."""
    rng_key: int
    """Unsigned 64-bit RNG key, from `srtrl.model.noise.make_rng_key`."""
    sampling: SamplingParams
    purpose: Purpose = "generate"
    """The use of the sample; drafters keep the history of each purpose apart."""
    prefix: Response | None = None
    """The response begins with these tokens, at least one, which count as its own in `max_new_tokens` and in the
    completion. It ends in a turn, or where the next one begins. The noise goes by absolute position, so that the policy
    that sampled them would go on as it would have without a break."""
    has_turns: bool = False
    """Whether the sample pauses at an end token or a stop string instead of finishing; `Engine.extend` or
    `Engine.end` then decides how it continues."""

    @property
    def num_reused(self) -> int:
        """Tokens of `prefix`."""
        return 0 if self.prefix is None else len(self.prefix.token_ids)

    @property
    def is_whole(self) -> bool:
        """Whether `prefix` is a whole response, so that nothing is left to decode."""
        return self.prefix is not None and self.prefix.finish_reason is not None

    @property
    def text_start(self) -> int:
        """Index in the response of the first token that drafts may continue: none leads from a turn into the next."""
        return self.prefix.extensions[-1][0] if self.prefix is not None and self.prefix.extensions else 0

    def admission_key(self, expected_tokens: float) -> tuple[float, float, int]:
        """Samples are admitted by this key: breadth-first, and in such a wave those that are expected to be long first.

        Those with a prefix come before, in data order. `expected_tokens`: expected length of the response.
        """
        if self.prefix is not None:
            return BEFORE_FIRST_SAMPLES, self.draw_index, self.sample_index
        return self.sample_index, -expected_tokens, self.draw_index


BEFORE_ALL, BEFORE_FIRST_SAMPLES = -1.0, -0.5
"""Beginnings of an admission key, in place of a sample's index: of a sample that has lost its slot or continues in its
next turn, and of one with a prefix."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Completion:
    """A finished request."""

    request: Request
    response: Response


@dataclass(kw_only=True, slots=True, frozen=True)
class Grade:
    """The rewards of one completion."""

    reward: float
    """Weighted sum of `parts`; 0 where `is_graded` is false."""
    parts: Mapping[str, float]
    """Unweighted value of each named reward."""
    outcome: GradeOutcome
    detail: str = ""
    """For failures: what happened (shown in the log)."""
    token_rewards: tuple[float, ...] | None = None
    """[R], the weighted sum on each sampled token; None if each reward is one number: then all is on the last."""

    @property
    def is_graded(self) -> bool:
        """Whether there is a reward: grading did not fail."""
        return self.outcome in GRADED_OUTCOMES


def segment_slices(segments: Sequence[tuple[SegmentKind, int]]) -> Iterator[tuple[SegmentKind, slice]]:
    """Kind and place in the response of each of its parts, which are given by kind and number of tokens."""
    start = 0
    for kind, length in segments:
        yield kind, slice(start, start + length)
        start += length


@dataclass(kw_only=True, slots=True, frozen=True)
class SampledTurn:
    """One turn of the policy, as rewards see it."""

    text: str
    """Without special tokens."""
    tokens: slice
    """Place of its tokens among the sampled tokens of the sample."""
    observations: tuple[str, ...] = ()
    """Texts of the environment that follow it."""
    reward: float = 0.0
    """The reward of the environment's step; NaN if it exceeded its time limit."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Conversation:
    """The turns of a sample."""

    segments: tuple[tuple[SegmentKind, int], ...]
    """Kind and number of tokens of each part of the response, in order."""
    num_turns: int
    stop_reason: str
    """Why it ended: `answered`, `turns`, `response_tokens`, `observation` (one that does not fit), `time`, or the
    environment's own."""
    outcomes: tuple[str, ...] = ()
    """End of each call: `ok`, `malformed`, `unknown_tool`, `raised`, `time`, or a name of the environment."""
    rewards: tuple[float, ...] = ()
    """The reward of the environment's step for each turn; NaN if it exceeded its time limit."""
    metrics: tuple[tuple[str, float], ...] = ()
    """Metrics of the environment's steps."""
    tool_seconds: tuple[float, ...] = ()
    """Wall-clock seconds that each step of the environment took."""
    texts: tuple[str, ...] = ()
    """Text of each segment; what was sampled without special tokens, the others with them."""

    @property
    def policy_text(self) -> str:
        """The policy's turns, each on a line: the output of a tool is no answer of the policy."""
        return "\n".join(text for (kind, _), text in zip(self.segments, self.texts, strict=True) if kind == "model")

    @property
    def reward(self) -> float:
        """Sum of the rewards of the environment's steps."""
        return fsum(self.rewards)

    @property
    def turns(self) -> tuple[SampledTurn, ...]:
        """The policy's turns, each with what the environment answered."""
        turns: list[SampledTurn] = []
        start = 0
        for (kind, length), text in zip(self.segments, self.texts, strict=True):
            if kind == "model":
                tokens, reward = slice(start, start + length), self.rewards[len(turns)]
                turns.append(SampledTurn(text=text, tokens=tokens, reward=reward))
                start += length
            elif kind == "observation":
                turns[-1] = replace(turns[-1], observations=(*turns[-1].observations, text))
        return tuple(turns)


@dataclass(kw_only=True, slots=True, frozen=True)
class Rollout:
    """One graded sample of a prompt."""

    prompt: Prompt
    draw_index: int
    sample_index: int
    response: Response
    text: str
    """Decoded response without special tokens, truncated before a stop string."""
    policy_version: int
    """Number of policy updates before the rollout in which the sample ended."""
    grade: Grade
    conversation: Conversation | None = None
    """None: a single turn."""

    @property
    def policy_text(self) -> str:
        """The part of `text` that is graded: the policy's turns."""
        return self.text if self.conversation is None else self.conversation.policy_text


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutGroup:
    """All samples of one draw of a prompt, sorted by `sample_index`."""

    prompt: Prompt
    draw_index: int
    rollouts: list[Rollout]
    """The rollouts to learn from, without the samples that could not be graded."""

    @property
    def graded(self) -> list[Rollout]:
        """The samples that have a reward."""
        return [rollout for rollout in self.rollouts if rollout.grade.is_graded]


@dataclass(kw_only=True, slots=True, frozen=True)
class StepRollouts:
    """The rollouts of a training step."""

    groups: list[RolloutGroup]
    """The groups of all its draws, in data order."""
    kept: list[RolloutGroup]
    """Those to learn from, in data order."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainSequence:
    """One rollout as the update reads it: prompt and response with one number for each sampled token.

    R here is the number of tokens that the policy sampled: of a single turn the whole response; of several turns what
    an environment or the format put in is left out. It is read, and nothing is learned from it.
    """

    token_ids: npt.NDArray[np.int64]
    """Prompt then response, [L]."""
    targets: npt.NDArray[np.int64]
    """Indices in `token_ids` of the sampled tokens, [R]; the first token after the prompt is one."""
    draw_index: int
    """Index of the draw in the run; the sequences of a draw are a group, whole or the rest of it."""
    rollout_logprobs: npt.NDArray[np.float32]
    """[R]."""
    advantages: npt.NDArray[np.float32]
    """[R]."""
    ages: npt.NDArray[np.int32] | None = None
    """[R], number of policy updates since each token was sampled; None: none."""
    old_logprobs: npt.NDArray[np.float32] | None = None
    """[R], PPO's snapshot; filled before the first mini-batch."""
    ref_logprobs: npt.NDArray[np.float32] | None = None
    """[R], by the frozen reference; None if the recipe has no KL."""
    teacher_logprobs: npt.NDArray[np.float32] | None = None
    """[R], by the teacher; None if the recipe has none."""
    values: npt.NDArray[np.float32] | None = None
    """[R], by the critic before the update; None if the recipe has none."""
    returns: npt.NDArray[np.float32] | None = None
    """[R], the critic's targets: advantages before whitening + `values`."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return int(self.targets[0])
