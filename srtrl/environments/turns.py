"""The turns of a rollout's samples: each goes to the sample's environment, and the answer goes into the context.

Environments work in the background while other samples decode. Tokens depend on their answers, not on how long these
take. Answers are recorded as they arrive, so that a step that is repeated after a crash has the same ones.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from srtrl import ranks
from srtrl.engine.stopping import decode
from srtrl.environments.base import EnvironmentBase, Messages, Step, Turn, resolve_environment
from srtrl.environments.formats import Format, MalformedCallError, check_call, resolve_format, tool_schemas
from srtrl.environments.record import Record, key_of
from srtrl.recipe.schema import EnvironmentSection
from srtrl.resolve import Caught, describe_error, warn_once
from srtrl.rollout.one_turn import Answer, OneTurn, Segments, response_text
from srtrl.tasks.event_loop import ADVICE, DaemonThreads, event_loop
from srtrl.tasks.rendering import tokenise
from srtrl.types import Completion, Conversation, Prompt, SegmentKind, segment_slices

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

T = TypeVar("T")

NUM_THREADS = 128
"""Maximum number of environments' steps at the same time."""


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


class EnvironmentTurns(OneTurn):
    """The environments of the samples that are decoded; what they share is open inside the context."""

    has_turns = True

    def __init__(
        self, section: EnvironmentSection, tokenizer: PreTrainedTokenizerBase, record_folder: Path | None = None
    ) -> None:
        """Resolve the environment and its format.

        Args:
            section: The recipe's `rollout.environment`.
            tokenizer: The policy's.
            record_folder: For a file of answers of each step (see `begin_step`); without it none are kept.

        Raises:
            ValueError: a name or an option is incorrect, or the format does not fit the tokenizer.
        """
        super().__init__(tokenizer)
        self.section = section
        self.environment_class, self.options = resolve_environment(section)
        self._seconds = self._patience = float(self.environment_class.timeout_seconds)
        self.format: Format = resolve_format(section)(tokenizer, self.environment_class.tools)
        if self.format.describes_tools:
            self.tools = tool_schemas(self.environment_class.tools)
        self.starts_prompts = self.environment_class.start is not EnvironmentBase.start
        self.computes_here = not inspect.iscoroutinefunction(self.environment_class.step)
        self._samples: dict[tuple[str, int, int], OpenSample] = {}
        self._starts: dict[tuple[str, str], tuple[Prompt, Prompt]] = {}
        """By id and text of either: a prompt, and the prompt with the environment's first messages."""
        self._pending: list[PendingTurn] = []
        self._record_folder, self._record = record_folder, Record(None)
        self._num_samples: Counter[bool] = Counter()
        """Samples of this step that have ended, by whether their environment has raised."""
        self._first_traceback = ""
        self._has_logged_error = False
        self._stack = ExitStack()
        self._shared: Any = None

    def __enter__(self) -> Self:
        environment, options, name = self.environment_class, self.options, self.section.name
        with ExitStack() as stack:
            self._loop, _ = stack.enter_context(event_loop(f"environment {name}"))
            self._shared = self._call(f"`open` of {name}", lambda: stack.enter_context(environment.open(options)))
            limit = self._call(f"`max_parallel` of {name}", lambda: environment.max_parallel(options))
            if limit is not None and not (isinstance(limit, Integral) and limit >= 1):
                message = "must return an integer from 1 on, or None; it returned"
                raise ValueError(f"rollout.environment: `max_parallel` of {name} {message} {limit!r:.80}")
            self._threads = DaemonThreads(NUM_THREADS if limit is None else min(NUM_THREADS, int(limit)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        for sample in self._samples.values():
            self._close(sample)
        self._samples.clear()
        self._pending.clear()
        self._record.close()
        self._call_last(f"the end of `open` of {self.section.name}", self._stack.close)

    def _call(self, what: str, function: Callable[[], T], seconds: float | None = None) -> T:
        """Return the result of a function of the user's class; it runs in a thread, which is abandoned if it hangs.

        Raises:
            ValueError: it raises, or takes longer than the class's `timeout_seconds`; the message begins with `what`.
        """
        result: Future[T] = DaemonThreads().submit(lambda: self._result_of(function()))
        wait([result], self._seconds if seconds is None else seconds)
        late = TimeoutError(f"no answer within the class's timeout_seconds ({self._seconds:g}); {ADVICE}")
        error = result.exception() if result.done() else late
        if error is None:
            return result.result()
        if ":" not in self.section.name:  # of ours: its errors are meant for the user
            raise error
        raise ValueError(f"rollout.environment: {what} raised {describe_error(error)}") from error

    def _call_last(self, what: str, function: Callable[[], None]) -> None:
        """As `_call`, with a warning in place of an error."""
        with Caught() as caught:
            self._call(what, function, self._patience)
        if caught.error is not None:
            warn_once(str(caught.error))
            if isinstance(caught.error.__cause__, TimeoutError):
                self._patience = 0.0  # the first one that hangs is the last that is waited for

    def _result_of(self, value: Any) -> Any:
        """Return the result of a coroutine, or any other value itself."""
        return asyncio.run_coroutine_threadsafe(value, self._loop).result() if inspect.iscoroutine(value) else value

    def started(self, prompt: Prompt, max_prompt_tokens: int) -> Prompt:
        """The prompt with the environment's first messages.

        Raises:
            ValueError: it is longer than `max_prompt_tokens` then, or the environment's `start` raises or returns
                something else than messages.
        """
        if not self.starts_prompts:
            return prompt
        key = prompt.prompt_id, prompt.text
        if key not in self._starts:
            what = f"`start` of {self.section.name}, called with prompt {prompt.prompt_id!r},"
            sample = OpenSample(prompt)
            _, messages = self._call(what, lambda: self._begin(sample))
            self._close(sample)
            if not (isinstance(messages, Sequence) and all(isinstance(message, Mapping) for message in messages)):
                message = "must return a list of messages or None, it returned"
                raise ValueError(f"rollout.environment: {what} {message} {messages!r:.80}")
            bos, text = self.tokenizer.bos_token, self.format.add_messages(prompt.text, messages)
            has_bos = bos is not None and text.startswith(bos)  # by the chat template
            (started,) = tokenise(self.tokenizer, [replace(prompt, text=text)], add_special_tokens=not has_bos)
            if len(started.token_ids) > max_prompt_tokens:
                raise ValueError(
                    f"prompt {prompt.prompt_id!r} has {len(started.token_ids)} tokens with what the environment "
                    f"{self.section.name} begins with; rollout.max_prompt_tokens is {max_prompt_tokens}"
                )
            self._starts[key] = self._starts[started.prompt_id, started.text] = prompt, started
        return self._starts[key][1]

    def try_environment(self, prompt: Prompt) -> None:
        """Let a user-defined environment answer one turn of a prompt, the reference answer, before anything is decoded.

        Raises:
            ValueError: it raises, or returns something else than a `Step`.
        """
        if ":" not in self.section.name:
            return
        turn = Turn(index=0, text=prompt.answer or "an answer", token_ids=(0,))
        sample = OpenSample(prompt)

        def answer_and_replay() -> None:
            environment, _ = self._begin(sample)
            answer = self._step(environment, turn)
            if self.environment_class.replay is not EnvironmentBase.replay:
                self._result_of(environment.replay(turn, answer))

        tried = f"{self.section.name}, tried on prompt {prompt.prompt_id!r} with the turn {turn.text[:80]!r},"
        try:
            self._call(tried, answer_and_replay)
        finally:
            self._close(sample)

    def _begin(self, sample: OpenSample) -> tuple[EnvironmentBase, Messages]:
        """Make a sample's environment; returns it and the messages that it begins with."""
        environment = sample.environment = self.environment_class(self.options, self._shared)
        return environment, environment.start(sample.prompt) or ()

    def begin_step(self, step: int) -> None:
        """See `OneTurn`; uses the answers in the step's file in the record folder, and writes new ones into it.

        Each rank but the first writes into a file of its own (`step_000001.rank1.jsonl` beside `step_000001.jsonl`),
        and all ranks read all of them.
        """
        self._record.close()
        if self._record_folder is not None:
            self._record = Record(self._record_folder / f"step_{step:06d}.jsonl", ranks.index())
        self._num_samples.clear()
        self._first_traceback = ""

    def submit_turn(self, completion: Completion, prompt: Prompt) -> None:
        """A turn has ended: let its environment answer in the background, if it takes one to answer."""
        key = key_of(completion)
        if key not in self._samples:
            original, _ = self._starts.get((prompt.prompt_id, prompt.text), (prompt, prompt))
            self._samples[key] = OpenSample(original)
        sample, (turn, answer) = self._samples[key], self._read_turn(completion)
        sample.segments.append(("model", len(turn.token_ids)))
        if answer is None and (answer := self._record.find(completion)) is not None:
            sample.unseen.append((turn, answer))
        pending = PendingTurn(completion, sample, turn, needs_record=answer is None)
        self._pending.append(pending)
        if answer is None:
            pending.answer = self._threads.submit(self._answer, pending)
        else:
            pending.answer.set_result(answer)

    def take_answers(self) -> list[Answer]:
        """The answers since the last call; a sample whose environment exceeds the time limit ends."""
        limit = time.monotonic() - self._seconds
        answers, waiting = [], []
        for pending in self._pending:
            is_late = pending.started is not None and pending.started < limit
            if pending.answer.done() or is_late:
                answers.append(self._resolve(pending))
            else:
                waiting.append(pending)
        self._pending = waiting
        return answers

    def futures(self) -> list[Future[Step]]:
        """The answers to wait for, at most `POLL_SECONDS` because of the time limit."""
        return [pending.answer for pending in self._pending]

    def check_not_all_raised(self, where: str) -> None:
        """Stop if the environments of all samples of a step, on all ranks, have raised.

        The record of the step is deleted then, so that a resumed run calls the environment again.

        Raises:
            ValueError: with the first traceback; it begins with `where` ("step 3").
        """
        outcomes = ranks.gather((self._num_samples, self._first_traceback), "the outcomes of environments")
        num_raised, num_others = (sum(counts[raised] for counts, _ in outcomes) for raised in (True, False))
        if num_raised and not num_others:
            self._record.delete()
            first_traceback = next((text for _, text in outcomes if text), "in an attempt that was killed")
            raise ValueError(
                f"{where}: the environment {self.section.name} raised in each of {num_raised} samples; "
                f"the first time:\n{first_traceback}"
            )

    def _read_turn(self, completion: Completion) -> tuple[Turn, Step | None]:
        """The last turn, and its answer if that takes no environment: calls that cannot be read or run."""
        response = completion.response
        start = response.extensions[-1][1] if response.extensions else 0
        token_ids = response.token_ids[start:].tolist()
        assert response.finish_reason is not None
        has_end = token_ids[-1] in completion.request.sampling.end_token_ids
        text = decode(self.tokenizer, token_ids[:-1] if has_end else token_ids)
        turn = Turn(
            index=len(response.extensions),
            text=text,
            token_ids=tuple(token_ids),
            finish_reason=response.finish_reason,
        )
        if response.finish_reason == "length":
            return turn, Step(is_done=True, stop_reason="response_tokens")
        try:
            calls = self.format.parse(text)
        except MalformedCallError as error:
            return turn, Step(observation=f"error: {error}", outcomes=["malformed"])
        problems = [check_call(self.environment_class.tools, call) for call in calls]
        if not any(problems):
            return replace(turn, calls=tuple(calls)), None
        results = [problem or ("not_run", "another call of this turn cannot be run") for problem in problems]
        errors = [f"error: {message}" for _, message in results]
        return turn, Step(observation=errors, outcomes=[outcome for outcome, _ in results])

    def _answer(self, pending: PendingTurn) -> Step:
        """The environment's answer to a turn, after the turns that it has not seen."""
        sample, started = pending.sample, time.monotonic()
        pending.started = started
        try:
            environment = self._begin(sample)[0] if sample.environment is None else sample.environment
            unseen, sample.unseen = sample.unseen, []
            for turn, answer in unseen:
                with Caught() as caught:
                    self._result_of(environment.replay(turn, answer))
                if caught.error is not None and "raised" not in answer.outcomes:
                    raise caught.error
            return self._step(environment, pending.turn)
        finally:
            pending.seconds = time.monotonic() - started

    def _step(self, environment: EnvironmentBase, turn: Turn) -> Step:
        """The result of `step`, or of its coroutine."""
        step = self._result_of(environment.step(turn))
        if not isinstance(step, Step):
            raise TypeError(f"`step` of the environment {self.section.name} must return a Step, found {step!r:.80}")
        return step

    def _close(self, sample: OpenSample) -> None:
        if sample.environment is not None:
            self._call_last(f"`close` of {self.section.name}", sample.environment.close)

    def _resolve(self, pending: PendingTurn) -> Answer:
        """Apply the limits in their order: the environment's own end, turns, tokens of the response and observation."""
        completion, sample, turn = pending.completion, pending.sample, pending.turn
        step = self._result(pending)
        if pending.needs_record:
            self._record.write(completion, step)
        sample.outcomes += step.outcomes
        sample.rewards.append(step.reward)
        sample.metrics += step.metrics.items()
        if pending.seconds is not None:
            sample.seconds.append(pending.seconds)
        extension: list[int] = []
        stop_reason = step.stop_reason if step.is_done else ""
        if not stop_reason and turn.index + 1 >= self.section.max_turns:
            stop_reason = "turns"
        if not stop_reason:
            segments = self._segments_after_turn(step.observations)
            extension = [token for _, token_ids in segments for token in token_ids]
            if not extension:
                raise ValueError(
                    f"the environment {self.section.name} answered with an empty text, and the format "
                    f"{self.section.format} puts nothing around it: the next turn needs at least one token before it"
                )
            has_room = len(completion.response.token_ids) + len(extension) < completion.request.sampling.max_new_tokens
            if not has_room:
                stop_reason = "observation"
            else:
                sample.segments += [(kind, len(token_ids)) for kind, token_ids in segments if token_ids]
        if not stop_reason:
            return Answer(completion=completion, extension=extension)
        return Answer(
            completion=completion,
            text=response_text(self.tokenizer, completion.response.token_ids, ()),
            conversation=self._end(completion, sample, stop_reason),
        )

    def _result(self, pending: PendingTurn) -> Step:
        """The environment's answer; errors and the time limit become answers, too."""
        if self._threads.give_up(pending.answer):
            limit = f"within the class's timeout_seconds ({self._seconds:g})"
            warn_once(f"a sample ends: `step` of {self.section.name} gave no answer {limit}; {ADVICE}")
            return Step(is_done=True, stop_reason="time", outcomes=["time"])
        error = pending.answer.exception()
        if error is None:
            return pending.answer.result()
        if not self._first_traceback:
            self._first_traceback = "".join(traceback.format_exception(error))
        if not self._has_logged_error:
            self._has_logged_error = True
            logger.warning("%s raised, and the policy reads it: %s", self.section.name, describe_error(error))
        return Step(observation=f"error: {describe_error(error)}", outcomes=["raised"])

    def _end(self, completion: Completion, sample: OpenSample, stop_reason: str) -> Conversation:
        self._close(sample)
        del self._samples[key_of(completion)]
        self._num_samples["raised" in sample.outcomes] += 1
        if stop_reason == "time" and "time" in sample.outcomes:
            sample.rewards[-1] = math.nan
        return Conversation(
            segments=tuple(sample.segments),
            num_turns=len(completion.response.extensions) + 1,
            stop_reason=stop_reason,
            outcomes=tuple(sample.outcomes),
            rewards=tuple(sample.rewards),
            metrics=tuple(sample.metrics),
            tool_seconds=tuple(sample.seconds),
            texts=tuple(
                decode(self.tokenizer, completion.response.token_ids[part], skip_special_tokens=kind == "model")
                for kind, part in segment_slices(sample.segments)
            ),
        )

    def tokenise_solution(self, text: str) -> Segments:
        """The segments of a worked solution, without an end token, as in a rollout whose policy sampled them.

        Raises:
            MalformedCallError: no rollout can look like this.
        """
        segments: Segments = []
        turns = self.format.split_solution(text)
        if len(turns) > self.section.max_turns:
            raise MalformedCallError(f"{len(turns)} turns; rollout.environment.max_turns is {self.section.max_turns}")
        for turn, observations in turns:
            segments.append(("model", self.tokenizer.encode(turn, add_special_tokens=False)))
            if observations:
                segments += self._segments_after_turn(observations)
        return segments

    def _segments_after_turn(self, observations: Sequence[str]) -> Segments:
        """Observations and the format's text around them. Text of an environment never becomes a special token."""
        segments: Segments = []
        for text, kind in self.format.parts(observations):
            is_ours = kind == "boundary"
            valid = text.encode(errors="replace").decode()  # JSON of a call may hold half a surrogate pair
            token_ids = self.tokenizer(valid, add_special_tokens=False, split_special_tokens=not is_ours)["input_ids"]
            segments.append((kind, list(token_ids) if is_ours else self._truncate(token_ids)))
        return segments

    def _truncate(self, token_ids: list[int]) -> list[int]:
        """Replace the middle of an observation that is too long by a note."""
        limit = self.section.max_observation_tokens
        if len(token_ids) <= limit:
            return token_ids
        note = self.tokenizer(f" [... {len(token_ids) - limit} tokens left out ...] ", add_special_tokens=False)
        middle = list(note["input_ids"])[:limit]
        head = (limit - len(middle) + 1) // 2
        tail = limit - len(middle) - head
        return [*token_ids[:head], *middle, *token_ids[len(token_ids) - tail :]]
