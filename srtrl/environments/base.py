"""What an environment is, and the records that pass between it and a sample."""

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from srtrl.recipe.schema import Section
from srtrl.types import FinishReason, Prompt, SegmentKind

Messages = Sequence[Mapping[str, str]]
"""`{"role": "user", "content": "..."}`, as chat templates read them."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Tool:
    """A tool that the policy may call."""

    name: str
    description: str
    """For the policy: the chat template puts it into the prompt, where there is one."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments. Formats without JSON, such as `code_tags`, fill in the first one."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ToolCall:
    """A call that was found in a turn."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(kw_only=True, slots=True, frozen=True)
class Turn:
    """What the policy has just said."""

    index: int
    """Number of the turn of its sample, from 0."""
    text: str
    """Without the end token."""
    token_ids: tuple[int, ...]
    """As they were sampled, the end token included."""
    calls: tuple[ToolCall, ...] = ()
    """What the format found in the text; known tools only, and none where the text is malformed."""
    finish_reason: FinishReason = "stop"
    """`length`: the response has reached `rollout.max_new_tokens`, and no turn can follow."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Step:
    """What an environment says to a turn."""

    observation: str | Sequence[str] = ""
    """What the policy reads next: one text, or one for each call of the turn."""
    is_done: bool = False
    """The sample ends here; the observation is not read."""
    reward: float = 0.0
    """The rewards of a sample's steps are summed: `environment_reward` of a `RewardInput`."""
    stop_reason: str = "done"
    """Why the sample is done, as it is counted in the metrics."""
    outcomes: Sequence[str] = ()
    """How each call ended (`ok`, `error`, `timeout`, ...), as it is counted in the metrics."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Logged as `environment/own/<name>`: the mean over all steps that have it."""


def segment_titles(kinds: Iterable[SegmentKind]) -> list[str]:
    """What people read over each segment of a sample; turns are counted from 1."""
    titles: list[str] = []
    for kind in kinds:
        turn = 1 + sum(title.startswith("turn") for title in titles)
        titles.append({"observation": "tool output", "boundary": "added by the format"}.get(kind, f"turn {turn}"))
    return titles


def mark_segments(kinds: Sequence[SegmentKind], texts: Sequence[str]) -> str:
    """A sample as one text, with a line such as `--- turn 1 ---` before each segment."""
    parts = zip(segment_titles(kinds), texts, strict=True)
    return "\n".join(f"--- {title} ---\n{text.strip(chr(10))}" for title, text in parts)


def count_turns(num_turns: int, stop_reason: str) -> str:
    """What people read about a sample: `2 turns, ended by: answered`."""
    return f"{num_turns} turn{'s' if num_turns != 1 else ''}, ended by: {stop_reason}"


class EnvironmentBase:
    """Answers the turns of one sample; a class of this kind is `srtrl/environments/<name>.py` or one of your own.

    There is one object for each sample. Its methods are called from other threads than the decoder's, those of one
    sample one after the other.
    """

    Options: type[Section] = Section
    tools: ClassVar[Sequence[Tool]] = ()
    """What the policy may call. Calls of other names are answered with an error."""

    def __init__(self, options: Section, shared: Any) -> None:
        """Keep the options, and what `open` made."""
        self.options = options
        self.shared = shared

    @classmethod
    def open(cls, options: Section) -> AbstractContextManager[Any]:
        """What all environments of a run share, such as a pool of processes; left when the run ends."""
        return nullcontext()

    @classmethod
    def max_parallel(cls, options: Section) -> int | None:
        """How many steps are begun at a time; None: many. The time limit does not count how long others wait."""
        return None

    def start(self, prompt: Prompt) -> Messages | None:
        """Begin with a prompt; returns what the policy reads after it, the same for all samples of the prompt."""
        return None

    def step(self, turn: Turn) -> Step | Awaitable[Step]:
        """Answer a turn. It may be a coroutine function."""
        raise NotImplementedError

    def close(self) -> None:
        """The sample has ended, or is given up; also while a `step` that has exceeded the time limit still runs."""


class ToolEnvironment(EnvironmentBase):
    """Answers each call of a turn by `call`; a turn without one is the policy's answer and ends the sample."""

    def call(self, call: ToolCall) -> tuple[str, str]:
        """What the tool says to a call, and how that ended: `ok`, `error`, ..."""
        raise NotImplementedError

    def step(self, turn: Turn) -> Step:
        """Run the calls of a turn, in their order."""
        if not turn.calls:
            return Step(is_done=True, stop_reason="answered")
        answers = [self.call(call) for call in turn.calls]
        return Step(observation=[text for text, _ in answers], outcomes=[outcome for _, outcome in answers])
