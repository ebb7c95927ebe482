"""The interface of an environment, and the records that pass between it and a sample."""

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar

from srtrl.recipe.file import validate_section
from srtrl.recipe.schema import EnvironmentSection, Section
from srtrl.resolve import resolve_class
from srtrl.tasks.worker import check_reward
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
    """A call in a turn."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(kw_only=True, slots=True, frozen=True)
class Turn:
    """The policy's latest turn."""

    index: int
    """Number of the turn in its sample, from 0."""
    text: str
    """Without the end token."""
    token_ids: tuple[int, ...]
    """As they were sampled, the end token included."""
    calls: tuple[ToolCall, ...] = ()
    """The calls in the text: of tools that exist only, and none where the text is malformed."""
    finish_reason: FinishReason = "stop"
    """`length`: the response has reached `rollout.max_new_tokens`, and no turn can follow."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Step:
    """The environment's answer to a turn.

    Raises:
        TypeError: an observation, an outcome or the stop reason is not a text.
        ValueError: the reward or a metric is not a finite number.
    """

    observation: str | Sequence[str] = ""
    """The text that the policy reads next, or a list of one text for each call of the turn."""
    is_done: bool = False
    """The sample ends here; the observation is not read."""
    reward: float = 0.0
    """Stands on the last token of the turn; `environment_reward` of a `RewardInput` is the sum over the steps."""
    stop_reason: str = "done"
    """Why the sample is done, as it is counted in the metrics."""
    outcomes: Sequence[str] = ()
    """How each call ended (`ok`, `error`, `timeout`, ...), as it is counted in the metrics."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Logged as `environment/own/<name>`: the mean over all steps that have it."""

    def __post_init__(self) -> None:
        """Check the values, and make those of NumPy plain, so that the record of the run can hold them."""
        texts_of = {"observation": self.observations, "outcomes": self.outcomes, "stop_reason": [self.stop_reason]}
        for name, texts in texts_of.items():
            if not (type(texts) in (list, tuple) and all(isinstance(text, str) for text in texts)):
                raise TypeError(f"Step: {name} must be text, found {getattr(self, name)!r:.80}")
        metrics = {str(name): check_reward(f"environment: {name}", value) for name, value in self.metrics.items()}
        object.__setattr__(self, "is_done", bool(self.is_done))
        object.__setattr__(self, "reward", check_reward("environment", self.reward))
        object.__setattr__(self, "metrics", metrics)

    @property
    def observations(self) -> Sequence[str]:
        """The texts of the observation."""
        return [self.observation] if isinstance(self.observation, str) else self.observation


def segment_titles(kinds: Iterable[SegmentKind]) -> list[str]:
    """The heading of each segment of a sample; turns are counted from 1."""
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
    """A sample's turns in words: `2 turns, ended by: answered`."""
    return f"{num_turns} turn{'s' if num_turns != 1 else ''}, ended by: {stop_reason}"


class EnvironmentBase:
    """Answers the turns of one sample; a subclass is `srtrl/environments/<name>.py` or in a package of the user.

    There is one object for each sample. Its methods are called from other threads than the decoder's, those of one
    sample one after the other.
    """

    Options: type[Section] = Section
    tools: ClassVar[Sequence[Tool]] = ()
    """The tools that the policy may call. Calls of other names are answered with an error."""
    timeout_seconds: ClassVar[float] = 300.0
    """Wall-clock limit of a turn, from the start of `step`, and of every other method. It is a safety net: the sample
    ends with the stop reason `time`, the reward `environment` cannot grade it, and a step that hangs keeps its
    thread."""

    def __init__(self, options: Section, shared: Any) -> None:
        """Keep the options, and the result of `open`."""
        self.options = options
        self.shared = shared

    @classmethod
    def open(cls, options: Section) -> AbstractContextManager[Any]:
        """Resources that all environments of a run share, such as a pool of processes; closed when the run ends."""
        return nullcontext()

    @classmethod
    def max_parallel(cls, options: Section) -> int | None:
        """Maximum number of steps at the same time, at least 1 (beside those past the time limit); None: many."""
        return None

    def start(self, prompt: Prompt) -> Messages | None:
        """Begin with a prompt; returns the messages that follow it, the same for all samples of the prompt."""
        return None

    def step(self, turn: Turn) -> Step | Coroutine[Any, Any, Step]:
        """Answer a turn. It may be a coroutine function."""
        raise NotImplementedError

    def replay(self, turn: Turn, answer: Step) -> object:
        """Take the state that `step(turn)` had left, whose answer is given, without doing its work again.

        For the turns of a sample that a killed run had recorded; by default `step` is called again. Nothing to do where
        an answer depends on its turn alone. An answer with the outcome `raised` is an error of `step`. It may be a
        coroutine function.
        """
        return self.step(turn)

    def close(self) -> None:
        """Called when the sample has ended or is given up; also while a `step` past the time limit still runs."""


class ToolEnvironment(EnvironmentBase):
    """Answers each call of a turn by `call`; a turn without one is the policy's answer and ends the sample."""

    def call(self, call: ToolCall) -> tuple[str, str]:
        """The tool's answer to a call, and how the call ended: `ok`, `error`, ..."""
        raise NotImplementedError

    def step(self, turn: Turn) -> Step:
        """Run the calls of a turn, in their order."""
        if not turn.calls:
            return Step(is_done=True, stop_reason="answered")
        answers = [self.call(call) for call in turn.calls]
        return Step(observation=[text for text, _ in answers], outcomes=[outcome for _, outcome in answers])


def resolve_environment(section: EnvironmentSection) -> tuple[type[EnvironmentBase], Section]:
    """The class that the recipe names, and its options.

    Raises:
        ValueError: the name is unknown or not an environment's, or an option or an attribute of the class is incorrect.
    """
    environment = resolve_class("srtrl.environments", section.name, "Environment")
    if not (isinstance(environment, type) and issubclass(environment, EnvironmentBase)):
        raise ValueError(f"`{section.name}` is no environment; expected a subclass of {__name__}:EnvironmentBase")
    tools, seconds, where = environment.tools, environment.timeout_seconds, f"rollout.environment: {section.name}: "
    if not (isinstance(seconds, Real) and 0 < float(seconds) < 1e9):
        raise ValueError(f"{where}timeout_seconds must be a number above 0 and below 1e9, found {seconds!r:.80}")
    if not (isinstance(tools, Sequence) and all(isinstance(tool, Tool) for tool in tools)):
        raise ValueError(f"{where}tools must be a list of Tool, found {tools!r:.80}")
    if not (isinstance(environment.Options, type) and issubclass(environment.Options, Section)):
        raise ValueError(f"{where}Options must be a subclass of Section, found {environment.Options!r:.80}")
    options = validate_section(environment.Options, dict(section.options), "rollout.environment.options")
    return environment, options
