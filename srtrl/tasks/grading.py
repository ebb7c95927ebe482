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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import fsum
from operator import itemgetter, mul
from typing import Any, Self

from srtrl import ranks
from srtrl.recipe.schema import GradingSection, RewardSection
from srtrl.resolve import Caught, describe_error, restore_process, warn_once
from srtrl.tasks.base import TaskBase, Verifier
from srtrl.tasks.event_loop import ADVICE, Blocked, event_loop
from srtrl.tasks.final_answer import as_judged
from srtrl.tasks.reward_input import RewardInput, characters
from srtrl.tasks.reward_terms import Reward, check_importable, is_isolated, resolve_rewards
from srtrl.tasks.worker import Failure, Graded, IsolatedFunctions, RewardValue, check_rewards
from srtrl.tasks.worker_pool import WALL_SECONDS_PER_CPU_SECOND, GradingWorker, WorkerPool
from srtrl.types import (
    UNVERIFIED_OUTCOMES,
    VERIFIED_OUTCOMES,
    Grade,
    GradeOutcome,
    Prompt,
    RolloutGroup,
)

logger = logging.getLogger(__name__)

TextsOf = Callable[[RewardInput], Sequence[str]]
MAX_AWAITED = 64
"""Maximum number of coroutine rewards at the same time."""
GRACE_SECONDS = 5.0
"""A coroutine may block the event loop for this much longer than it may take."""
LATE = "; what needs longer, as a judge that wakes, needs a larger grading.timeout_seconds (wall-clock time: 20 x that)"
"""End of a message after a time limit."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GradeTicket:
    """A completion that is being graded."""

    sample: RewardInput
    """Its `correct` is None as long as an isolated verifier runs."""
    verdict: "Future[Graded | Failure]"
    """Verdict, isolated and awaited rewards; done at once if there is nothing to wait for."""


class Judge:
    """The verifier and the rewards of one task's samples, and where each of them runs.

    Raises:
        ValueError: as `resolve_rewards`, or a verifier that workers could not import.
    """

    def __init__(self, verifier: Verifier | None, rewards: Sequence[RewardSection]) -> None:
        self.verifier = verifier
        self.is_ours = str(getattr(verifier, "__module__", "")).startswith("srtrl.")
        """Whether the verifier is one of srtrl, which end for any text."""
        self.rewards = resolve_rewards(rewards)
        self.awaited = [reward for reward in self.rewards if reward.awaited]
        if is_isolated(verifier):
            check_importable("the task's verifier", verifier)
        self.isolated = IsolatedFunctions(
            verifier=verifier if is_isolated(verifier) else None,
            rewards=tuple((reward.name, reward.function) for reward in self.rewards if reward.isolated),
        )

    def grade(self, verdict: Graded | Failure) -> Grade:
        """The grade of a sample whose verifier and rewards have all run, or one of them has failed."""
        if isinstance(verdict, Failure):
            parts = {reward.name: 0.0 for reward in self.rewards}
            return Grade(reward=0.0, parts=parts, outcome=verdict.outcome, detail=verdict.detail)
        values = [verdict.parts[reward.name] for reward in self.rewards]
        parts = {it.name: fsum(v) if isinstance(v, list) else v for it, v in zip(self.rewards, values, strict=True)}
        outcome: GradeOutcome = "correct" if verdict.correct else "wrong"
        return Grade(
            reward=sum(reward.weight * parts[reward.name] for reward in self.rewards),
            parts=parts,
            outcome=outcome if self.verifier is not None else "graded",
            token_rewards=_on_tokens([reward.weight for reward in self.rewards], values),
        )


class Grader:
    """Grades completions with the verifier and the rewards of the task, or of each sample's task of a mixture.

    Use it as a context manager: worker processes start for the first samples, and leaving it ends them, also in the
    middle of a job. There are none if neither a verifier nor a reward is `isolated`. Coroutine rewards run in an
    event loop, `MAX_AWAITED` at a time.

    Args:
        task: Whose verifier decides what is correct; without one, nothing is correct or wrong.
        rewards: The recipe's rewards; the sample's reward is their weighted sum.
        grading: Number of workers and their CPU limit.

    Raises:
        ValueError: as `Judge`.
    """

    def __init__(self, task: TaskBase, rewards: Sequence[RewardSection], grading: GradingSection) -> None:
        self._task = task
        self._judges = {
            label: Judge(part.verifier, sections) for label, (part, sections) in task.judged_by(rewards).items()
        }
        self._logged: set[str] = set()
        """Reasons of failures that have been logged."""
        self.outcomes = VERIFIED_OUTCOMES if task.verifier is not None else UNVERIFIED_OUTCOMES
        """The outcomes that a grading can have."""
        self._isolated = {label: judge.isolated for label, judge in self._judges.items() if judge.isolated.modules}
        self.computes_here = bool(self._isolated)
        """Whether processors of this machine work on grades while the decoder does; coroutines only wait."""
        self._grading = grading
        self._seconds = WALL_SECONDS_PER_CPU_SECOND * grading.timeout_seconds
        """Wall-clock limit of a coroutine; after this time other functions that run here are named in a warning."""
        self._pool: WorkerPool | None = None
        self._num_threads: int | None = None
        awaited = chain.from_iterable(judge.awaited for judge in self._judges.values())
        self._names = list(dict.fromkeys(f"reward `{reward.name}`" for reward in awaited))
        """Of the coroutine rewards."""
        self._blocked: list[Future[Blocked]] = []
        """Done when a coroutine reward has blocked the event loop for too long; empty without such rewards."""
        self._stack = ExitStack()

    def _judge_of(self, prompt: Prompt) -> Judge:
        return self._judges[self._task.label_of(prompt)]

    def by_task(self, groups: Sequence[RolloutGroup]) -> dict[str, list[RolloutGroup]]:
        """Groups by the label of their task, of a mixture; else nothing."""
        labels = dict.fromkeys(filter(None, (self._task.label_of(group.prompt) for group in groups)))
        return {label: [it for it in groups if self._task.label_of(it.prompt) == label] for label in labels}

    def __enter__(self) -> Self:
        self._num_threads = restore_process("this program")
        if self._isolated:
            limits = self._grading
            workers = [GradingWorker(self._isolated, limits.timeout_seconds) for _ in range(limits.num_workers)]
            self._pool = WorkerPool(workers, "srtrl-grading")
            self._stack.callback(self._pool.close)
        if self._names:
            limit = self._seconds + GRACE_SECONDS
            self._loop, blocked = self._stack.enter_context(event_loop(", ".join(self._names), limit))
            self._blocked = [blocked]
            self._limit = asyncio.Semaphore(MAX_AWAITED)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def submit(self, sample: RewardInput) -> GradeTicket:
        """Start grading one completion, whose `correct` is None; isolated functions run while the caller continues."""
        prompt, label = sample.prompt, self._task.label_of(sample.prompt)
        judge = self._judges[label]
        if judge.verifier is not None and judge.isolated.verifier is None:
            with nullcontext() if judge.is_ours else self._warning_if_late("the task's verifier"), Caught() as caught:
                sample = replace(sample, correct=bool(judge.verifier(as_judged(prompt, sample.text), prompt.answer)))
            if caught.error is not None:
                failure = Failure(outcome="error", detail=f"verifier: {describe_error(caught.error)}")
                return GradeTicket(sample=sample, verdict=_done(failure))
        verdict = _done(Graded(correct=sample.correct))
        if label in self._isolated:
            assert self._pool, "the grader is used outside of its context"
            verdict = self._pool.submit((label, sample))
        if judge.awaited:
            awaiting = self._await_rewards(judge.awaited, sample, verdict)
            verdict = asyncio.run_coroutine_threadsafe(awaiting, self._loop)
        return GradeTicket(sample=sample, verdict=verdict)

    async def _await_rewards(
        self, rewards: Sequence[Reward], sample: RewardInput, verdict: "Future[Graded | Failure]"
    ) -> Graded | Failure:
        """The verdict with the coroutine rewards."""
        graded = await asyncio.wrap_future(verdict)
        if isinstance(graded, Failure):
            return graded
        sample, parts = replace(sample, correct=graded.correct), dict(graded.parts)
        async with self._limit:
            for reward in rewards:
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
        if pending:
            wait([*pending, *self._blocked], timeout, return_when=FIRST_COMPLETED)
            for blocked in self._blocked:
                self._check_loop(blocked)

    def _check_loop(self, blocked: "Future[Blocked]") -> None:
        """Stop if a coroutine blocks the event loop: no limit inside it would ever be kept; ValueError."""
        if blocked.done():
            task_name, seconds = blocked.result()
            name = task_name if task_name in self._names else " or ".join(self._names)
            problem = f"has blocked the event loop for {seconds:.0f} seconds; {ADVICE}, or mark a plain"
            raise ValueError(f"rewards: {name} {problem} function @isolated (docs/extending.md#a-reward)")

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
        judges = [self._judge_of(sample.prompt) for sample in samples]
        for judge in self._judges.values():
            own = [index for index, its_judge in enumerate(judges) if its_judge is judge]
            for reward in judge.rewards if own else ():
                if not (reward.isolated or reward.awaited):
                    with self._warning_if_late(f"reward `{reward.name}`"):
                        _apply(reward, samples, verdicts, own)
                    restore_process(f"reward `{reward.name}`", self._num_threads)
        return [judge.grade(verdict) for judge, verdict in zip(judges, verdicts, strict=True)]

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
        if not any(reward.batched for judge in self._judges.values() for reward in judge.rewards):
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

    def try_rewards(self, prompts: Sequence[Prompt], num_samples: int, max_new_tokens: int) -> None:
        """Grade the reference answer of each task's first prompt, as a group of samples, before anything is decoded.

        Args:
            prompts: The task's.
            num_samples: Of a group.
            max_new_tokens: The recipe's.

        Raises:
            ValueError: the verifier or a reward raises on it, or gives no answer in time.
        """
        for prompt in {self._task.label_of(prompt): prompt for prompt in reversed(prompts)}.values():
            text = prompt.answer or "an answer"
            tokens = tuple(ord(character) for character in text)  # the grader has no tokenizer
            sample = RewardInput(
                prompt=prompt,
                text=text,
                finish_reason="stop",
                num_tokens=len(text),
                max_new_tokens=max_new_tokens,
                token_ids=tokens,
            )
            grade, *_ = self._grades([self.submit(sample) for _ in range(num_samples)])
            if grade.outcome in ("error", "timeout"):
                raise ValueError(
                    f"rewards: tried on prompt {prompt.prompt_id} with the response {text[:80]!r}, before the run "
                    f"began: {grade.detail}{LATE if grade.outcome == 'timeout' else ''}"
                )


def _on_tokens(weights: Sequence[float], values: Sequence[RewardValue]) -> tuple[float, ...] | None:
    """The weighted sum on each token, where a number stands on the last; None if all values are numbers."""
    num_tokens = max((len(value) for value in values if isinstance(value, list)), default=0)
    if not num_tokens:
        return None
    rows = [value if isinstance(value, list) else [0.0] * (num_tokens - 1) + [value] for value in values]
    return tuple(sum(map(mul, weights, column)) for column in zip(*rows, strict=True))


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


def _apply(
    reward: Reward, samples: Sequence[RewardInput], verdicts: list[Graded | Failure], own: Sequence[int]
) -> None:
    """Add one in-process reward to the `own` ones of the verdicts; if it raises, these samples become failures."""
    graded = [index for index in own if isinstance(verdicts[index], Graded)]
    for indices in [own] if reward.batched else [[index] for index in graded]:
        with Caught() as caught:
            values = _values(reward, [samples[index] for index in indices])
        for place, index in enumerate(indices):
            verdict = verdicts[index]
            if caught.error is not None and isinstance(verdict, Graded):
                detail = f"reward `{reward.name}`: {describe_error(caught.error)}"
                verdicts[index] = Failure(outcome="error", detail=detail)
            elif isinstance(verdict, Graded):
                verdicts[index] = replace(verdict, parts=verdict.parts | {reward.name: values[place]})


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
