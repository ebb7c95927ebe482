"""Grading while the decoder runs: the verifier and the rewards of each completion.

`submit` returns at once: `isolated` functions (math-verify, say) start in a worker process, and coroutines (of judges,
say) in an event loop, while the decoder continues with other samples. `collect` waits for them and runs the rest in the
training process. A sample that hangs or
crashes is retried once in a process that has graded nothing else; a second failure costs that sample only: it is left
out of its group, with its outcome, and a line in the log.
"""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from math import fsum
from operator import itemgetter, mul
from typing import Any, Self

from srtrl import ranks
from srtrl.recipe.schema import GradingSection, RewardSection
from srtrl.resolve import Caught, describe_error, restore_process, warn_once
from srtrl.tasks.base import TaskBase
from srtrl.tasks.event_loop import ADVICE, event_loop
from srtrl.tasks.final_answer import as_judged
from srtrl.tasks.reward_input import RewardInput, characters
from srtrl.tasks.reward_terms import Reward, check_importable, is_isolated, resolve_rewards
from srtrl.tasks.worker import Failure, Graded, IsolatedFunctions, RewardValue, check_rewards
from srtrl.tasks.worker_pool import WALL_SECONDS_PER_CPU_SECOND, GradingWorker, WorkerPool
from srtrl.types import (
    UNVERIFIED_OUTCOMES,
    VERIFIED_OUTCOMES,
    FinishReason,
    Grade,
    GradeOutcome,
    Prompt,
    RolloutGroup,
    SampledTurn,
)

logger = logging.getLogger(__name__)

TextsOf = Callable[[RewardInput], Sequence[str]]
MAX_AWAITED = 64
"""Maximum number of coroutine rewards at the same time."""
GRACE_SECONDS = 5.0
"""The event loop may be silent for this much longer than a coroutine reward may take."""
LATE = "; what needs longer, as a judge that wakes, needs a larger grading.timeout_seconds (wall-clock time: 20 x that)"
"""End of a message after a time limit."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GradeTicket:
    """A completion that is being graded."""

    sample: RewardInput
    """Its `correct` is None as long as an isolated verifier runs."""
    verdict: "Future[Graded | Failure]"
    """Verdict, isolated and awaited rewards; done at once if there is nothing to wait for."""


class Grader:
    """Grades completions with a task's verifier and the recipe's rewards.

    Use it as a context manager: worker processes start for the first samples, and leaving it ends them, also in the
    middle of a job. There are none if neither the verifier nor a reward is `isolated`. Coroutine rewards run in an
    event loop, `MAX_AWAITED` at a time.

    Args:
        task: Whose verifier decides what is correct; without one, nothing is correct or wrong.
        rewards: The recipe's rewards; the sample's reward is their weighted sum.
        grading: Number of workers and their CPU limit.
        max_new_tokens: `RewardInput.max_new_tokens`.

    Raises:
        ValueError: as `resolve_rewards`, or a verifier that workers could not import.
    """

    def __init__(
        self, task: TaskBase, rewards: Sequence[RewardSection], grading: GradingSection, max_new_tokens: int
    ) -> None:
        self._rewards = resolve_rewards(rewards)
        self._max_new_tokens = max_new_tokens
        self._logged: set[str] = set()
        """Reasons of failures that have been logged."""
        self._verifier = task.verifier
        self.outcomes = VERIFIED_OUTCOMES if task.verifier is not None else UNVERIFIED_OUTCOMES
        """The outcomes that a grading can have."""
        self._verifier_isolated = is_isolated(task.verifier)
        if self._verifier_isolated:
            check_importable("the task's verifier", task.verifier)
        self._isolated = IsolatedFunctions(
            verifier=self._verifier if self._verifier_isolated else None,
            rewards=tuple((reward.name, reward.function) for reward in self._rewards if reward.isolated),
        )
        self.computes_here = bool(self._isolated.modules)
        """Whether processors of this machine work on grades while the decoder does; coroutines only wait."""
        self._grading = grading
        self._seconds = WALL_SECONDS_PER_CPU_SECOND * grading.timeout_seconds
        """Wall-clock limit of a coroutine; after this time other functions that run here are named in a warning."""
        is_ours = str(getattr(self._verifier, "__module__", "")).startswith("srtrl.")  # these end for any text
        self._watch_verifier = nullcontext if is_ours else partial(self._warning_if_late, "the task's verifier")
        self._pool: WorkerPool | None = None
        self._num_threads: int | None = None
        self._awaited = [reward for reward in self._rewards if reward.awaited]
        self._names = [f"reward `{reward.name}`" for reward in self._awaited]
        self._stack = ExitStack()

    def by_task(self, groups: Sequence[RolloutGroup]) -> dict[str, list[RolloutGroup]]:
        """Groups by the label of their task, of a mixture; else nothing."""
        return {}

    def __enter__(self) -> Self:
        self._num_threads = restore_process("this program")
        if self._isolated.modules:
            limits = self._grading
            workers = [GradingWorker(self._isolated, limits.timeout_seconds) for _ in range(limits.num_workers)]
            self._pool = WorkerPool(workers, "srtrl-grading")
            self._stack.callback(self._pool.close)
        if self._awaited:
            self._loop = self._stack.enter_context(event_loop(", ".join(self._names)))
            self._limit = asyncio.Semaphore(MAX_AWAITED)
            self._running: object = None
            self._sign_of_life: Future[Any] = _done(Graded(correct=None))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def submit(
        self,
        prompt: Prompt,
        text: str,
        finish_reason: FinishReason,
        num_tokens: int,
        *,
        token_ids: Sequence[int] = (),
        turns: Sequence[SampledTurn] = (),
        texts_of: TextsOf = characters,
    ) -> GradeTicket:
        """Start grading one completion; isolated functions run while the caller continues.

        Args:
            prompt: The problem.
            text: The completion without special tokens.
            finish_reason: Why it ended.
            num_tokens: Its length, the end token included.
            token_ids: The sampled tokens.
            turns: The policy's turns; none: all is one turn.
            texts_of: Makes the texts of its tokens; called from any thread.
        """
        sample = RewardInput(
            prompt=prompt,
            text=text,
            correct=None,
            finish_reason=finish_reason,
            num_tokens=num_tokens,
            max_new_tokens=self._max_new_tokens,
            token_ids=tuple(token_ids),
            turns=tuple(turns),
            texts_of=texts_of,
        )
        if self._verifier is not None and not self._verifier_isolated:
            with self._watch_verifier(), Caught() as caught:
                sample = replace(sample, correct=bool(self._verifier(as_judged(prompt, text), prompt.answer)))
            if caught.error is not None:
                failure = Failure(outcome="error", detail=f"verifier: {describe_error(caught.error)}")
                return GradeTicket(sample=sample, verdict=_done(failure))
        assert self._pool or not self._isolated.modules, "the grader is used outside of its context"
        verdict = self._pool.submit(sample) if self._pool else _done(Graded(correct=sample.correct))
        if self._awaited:
            verdict = asyncio.run_coroutine_threadsafe(self._await_rewards(sample, verdict), self._loop)
        return GradeTicket(sample=sample, verdict=verdict)

    async def _await_rewards(self, sample: RewardInput, verdict: "Future[Graded | Failure]") -> Graded | Failure:
        """The verdict with the coroutine rewards."""
        graded = await asyncio.wrap_future(verdict)
        if isinstance(graded, Failure):
            return graded
        sample, parts = replace(sample, correct=graded.correct), dict(graded.parts)
        async with self._limit:
            for reward in self._awaited:
                with Caught() as caught:
                    task = self._loop.create_task(reward.function(sample), name=f"reward `{reward.name}`")
                    await asyncio.wait([task], timeout=self._seconds)
                    if not task.done():
                        task.cancel()  # and nobody waits for it: it may catch that and go on
                        late = f"no answer within {self._seconds:g} seconds of wall-clock time"
                        return Failure(outcome="timeout", detail=f"reward `{reward.name}`: {late}")
                    parts[reward.name] = check_rewards(reward.name, task.result(), sample)
                if caught.error is not None:
                    detail = f"reward `{reward.name}`: {describe_error(caught.error)}"
                    return Failure(outcome="error", detail=detail)
        return replace(graded, parts=parts)

    def _check_loop(self) -> None:
        """Stop if a coroutine blocks the event loop: no limit inside it would ever be kept.

        Raises:
            ValueError: one has run for the time that it may take, and some seconds, without an `await`.
        """
        task, now = asyncio.current_task(self._loop), time.monotonic()
        if self._sign_of_life.done() or task is not self._running:
            self._running, self._since = task, now
        if self._sign_of_life.done():
            self._sign_of_life = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        elif now > self._since + self._seconds + GRACE_SECONDS:
            name = task.get_name() if task and task.get_name() in self._names else " or ".join(self._names)
            problem = f"has blocked the event loop for {now - self._since:.0f} seconds; {ADVICE}, or mark a plain"
            raise ValueError(f"rewards: {name} {problem} function @isolated (docs/extending.md#a-reward)")

    @contextmanager
    def _warning_if_late(self, what: str) -> Iterator[None]:
        """Log a line if the `with` block takes long: the training process waits for it without a limit."""
        text = f"{self._seconds:g} seconds in {what}, which has no limit in the training process: what may hang should"
        timer = threading.Timer(self._seconds, warn_once, [f"{text} be @isolated (docs/extending.md#a-reward)"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def is_done(self, ticket: GradeTicket) -> bool:
        """Whether `collect` would return this grade without waiting."""
        return ticket.verdict.done()

    def wait_any(
        self, tickets: Sequence[GradeTicket], others: Sequence[Future[Any]] = (), timeout: float | None = None
    ) -> None:
        """Wait until one more of `tickets` or `others` is done, or for `timeout` seconds; at once where all are.

        Raises:
            ValueError: a coroutine reward blocks the event loop.
        """
        pending = [future for future in (*(ticket.verdict for ticket in tickets), *others) if not future.done()]
        is_waiting = bool(pending)
        while is_waiting:
            if self._awaited:
                self._check_loop()
            is_done = wait(pending, 1.0 if timeout is None else timeout, return_when=FIRST_COMPLETED).done
            is_waiting = not is_done and timeout is None

    def collect(self, tickets: Sequence[GradeTicket]) -> list[Grade]:
        """Wait for the grades of `tickets`, in their order; batched rewards see all of them at once.

        The first sample of each reason why samples cannot be graded is logged.

        Raises:
            RuntimeError: a worker process cannot start.
            ValueError: as `wait_any`.
        """
        grades = self._grades(tickets)
        for ticket, grade in zip(tickets, grades, strict=True):
            if grade.detail and (reason := _reason(grade.detail)) not in self._logged:
                self._logged.add(reason)
                prompt_id = ticket.sample.prompt.prompt_id
                logger.warning("prompt %s: grading ended in %s, left out: %s", prompt_id, grade.outcome, grade.detail)
        return grades

    def _grades(self, tickets: Sequence[GradeTicket]) -> list[Grade]:
        """As `collect`; nothing is logged."""
        verdicts = [self._verdict(ticket) for ticket in tickets]
        restore_process(" or ".join(["the verifier", *self._names, "the environment"]), self._num_threads)
        samples = [
            replace(ticket.sample, correct=verdict.correct) if isinstance(verdict, Graded) else ticket.sample
            for ticket, verdict in zip(tickets, verdicts, strict=True)
        ]
        for reward in self._rewards:
            if not (reward.isolated or reward.awaited):
                with self._warning_if_late(f"reward `{reward.name}`"):
                    _apply(reward, samples, verdicts)
                restore_process(f"reward `{reward.name}`", self._num_threads)
        return [self._grade(verdict) for verdict in verdicts]

    def _verdict(self, ticket: GradeTicket) -> Graded | Failure:
        self.wait_any([ticket])
        return ticket.verdict.result()

    def collect_on_ranks(
        self, tickets: Sequence[GradeTicket], keys: Sequence[tuple[int, int]], texts_of: TextsOf = characters
    ) -> list[Grade]:
        """As `collect`, where other ranks have other tickets of the same rollout; called on all ranks.

        If a reward is `batched`, rank 0 grades all of them in the order of their `keys` (draw and sample): the
        reward sees what it would see with one rank, and is called once. `texts_of` makes texts of all ranks' tokens.
        """
        if not any(reward.batched for reward in self._rewards):
            with ranks.synchronized("grading"):
                return self.collect(tickets)
        own = [
            (key, replace(ticket.sample, texts_of=characters), self._verdict(ticket))
            for key, ticket in zip(keys, tickets, strict=True)
        ]
        rows = sorted(chain(*ranks.gather(own, "samples for a batched reward")), key=itemgetter(0))
        samples = [replace(sample, texts_of=texts_of) for _, sample, _ in rows]
        everything = [GradeTicket(sample=it, verdict=_done(row[2])) for it, row in zip(samples, rows, strict=True)]
        grades = ranks.on_main(lambda: self.collect(everything), "a batched reward")
        grade_of = {key: grade for (key, *_), grade in zip(rows, grades, strict=True)}
        return [grade_of[key] for key in keys]

    def try_rewards(self, prompt: Prompt, num_samples: int = 1) -> None:
        """Grade the reference answer of a prompt, as a group of samples, before anything is decoded.

        Raises:
            ValueError: the verifier or a reward raises on it, or gives no answer in time.
        """
        text = prompt.answer or "an answer"
        tokens = [ord(character) for character in text]  # the grader has no tokenizer
        tickets = [self.submit(prompt, text, "stop", len(text), token_ids=tokens) for _ in range(num_samples)]
        grade, *_ = self._grades(tickets)
        if grade.outcome in ("error", "timeout"):
            raise ValueError(
                f"rewards: tried on prompt {prompt.prompt_id} with the response {text[:80]!r}, before the run began: "
                f"{grade.detail}{LATE if grade.outcome == 'timeout' else ''}"
            )

    def _grade(self, verdict: Graded | Failure) -> Grade:
        if isinstance(verdict, Failure):
            parts = {reward.name: 0.0 for reward in self._rewards}
            return Grade(reward=0.0, parts=parts, outcome=verdict.outcome, detail=verdict.detail)
        values = [verdict.parts[reward.name] for reward in self._rewards]
        parts = {it.name: fsum(v) if isinstance(v, list) else v for it, v in zip(self._rewards, values, strict=True)}
        outcome: GradeOutcome = "correct" if verdict.correct else "wrong"
        return Grade(
            reward=sum(reward.weight * parts[reward.name] for reward in self._rewards),
            parts=parts,
            outcome=outcome if self._verifier is not None else "graded",
            token_rewards=_on_tokens([reward.weight for reward in self._rewards], values),
        )


def _on_tokens(weights: Sequence[float], values: Sequence[RewardValue]) -> tuple[float, ...] | None:
    """The weighted sum on each token, where a number stands on the last; None if all values are numbers."""
    num_tokens = max((len(value) for value in values if isinstance(value, list)), default=0)
    if not num_tokens:
        return None
    rows = [value if isinstance(value, list) else [0.0] * (num_tokens - 1) + [value] for value in values]
    return tuple(sum(map(mul, weights, column)) for column in zip(*rows, strict=True))


def make_grader(
    task: TaskBase, rewards: Sequence[RewardSection], grading: GradingSection, max_new_tokens: int
) -> Grader:
    """The grader of a task; see `Grader`."""
    grader_class: type[Grader] = task.grader_class or Grader
    return grader_class(task, rewards, grading, max_new_tokens)


def check_not_all_failed(groups: Sequence[RolloutGroup], where: str) -> None:
    """Stop if no sample of a step could be graded, all for one reason: nothing would ever be learned.

    Raises:
        ValueError: all outcomes are `error` or `crash`, with the same detail but for lengths, or all are `timeout`; it
            begins with `where` ("step 3").
    """
    grades = [rollout.grade for group in groups for rollout in group.rollouts]
    is_late = {grade.outcome for grade in grades} == {"timeout"}
    reasons = {(grade.outcome, _reason(grade.detail)) for grade in grades}
    if is_late or (len(reasons) == 1 and grades[0].outcome in ("error", "crash")):
        raise ValueError(
            f"{where}: none of the {len(grades)} samples could be graded, all for the same reason "
            f"({grades[0].outcome}): {grades[0].detail}{LATE if is_late else ''}"
        )


def _reason(detail: str) -> str:
    """A detail without its prompt and its numbers: a list of an incorrect length has others for each sample."""
    return re.sub(r"prompt `[^`]*`|\d+", "", detail)


def _done(verdict: Graded | Failure) -> "Future[Graded | Failure]":
    future: Future[Graded | Failure] = Future()
    future.set_result(verdict)
    return future


def _apply(reward: Reward, samples: Sequence[RewardInput], verdicts: list[Graded | Failure]) -> None:
    """Add one in-process reward to the verdicts; if it raises, the samples concerned become failures."""
    graded = [index for index, verdict in enumerate(verdicts) if isinstance(verdict, Graded)]
    for indices in [range(len(samples))] if reward.batched else [range(index, index + 1) for index in graded]:
        with Caught() as caught:
            values = _values(reward, [samples[index] for index in indices])
        for index in indices:
            verdict = verdicts[index]
            if caught.error is not None and isinstance(verdict, Graded):
                detail = f"reward `{reward.name}`: {describe_error(caught.error)}"
                verdicts[index] = Failure(outcome="error", detail=detail)
            elif isinstance(verdict, Graded):
                verdicts[index] = replace(verdict, parts=verdict.parts | {reward.name: values[index - indices.start]})


def _values(reward: Reward, samples: Sequence[RewardInput]) -> list[RewardValue]:
    """The values of one call of a reward; ValueError unless they are as in `check_rewards`, one for each sample."""
    given = reward.function(samples) if reward.batched else [reward.function(samples[0])]
    if isinstance(given, Mapping | str | bytes):
        raise ValueError(f"a batched reward must return a list of numbers, it returned {given!r:.100}")
    values = list(islice(given, len(samples) + 1))  # it may have no end
    if len(values) != len(samples):
        number = len(values) if len(values) < len(samples) else f"more than {len(samples)}"
        raise ValueError(f"it returned {number} values for {len(samples)} samples")
    return [check_rewards(reward.name, value, sample) for value, sample in zip(values, samples, strict=True)]
