"""The samples of a rollout between their turns: what `turns.py` keeps of each."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from srtrl.environments.base import EnvironmentBase, Step, Turn
from srtrl.types import Completion, Prompt, SegmentKind


@dataclass(slots=True)
class OpenSample:
    """One sample between its first turn and its end."""

    prompt: Prompt
    """Without the messages that the environment begins with."""
    environment: EnvironmentBase | None = None
    """Made before its first step."""
    segments: list[tuple[SegmentKind, int]] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    unseen: list[tuple[Turn, Step]] = field(default_factory=list)
    """Turns that the record has answered: the environment sees them before the next."""


@dataclass(slots=True)
class PendingTurn:
    """A turn whose answer is still to come."""

    completion: Completion
    sample: OpenSample
    turn: Turn
    needs_record: bool
    """Whether the answer is to be recorded: it comes neither from the record nor from the format."""
    answer: Future[Step] = field(default_factory=Future)
    started: float | None = None
    """When the environment began, `time.monotonic`."""
    seconds: float | None = None
    """The environment's time."""
