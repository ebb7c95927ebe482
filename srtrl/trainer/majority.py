"""maj@N: whether the answer that most of a problem's samples give is right (Wang et al. 2022, arXiv 2203.11171).

Answers are the same where the task's verifier says so, not where their texts are equal: `1/2` and `0.5` vote together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Self

from srtrl.tasks.final_answer import extractor
from srtrl.tasks.reward_input import RewardInput
from srtrl.tasks.worker import Caught, Failure, Graded, IsolatedFunctions
from srtrl.tasks.worker_pool import WorkerPool
from srtrl.types import Prompt, RolloutGroup

if TYPE_CHECKING:
    from srtrl.recipe import GradingSection
    from srtrl.tasks.base import Verifier

INTEGER = re.compile(r"-?[0-9]{1,18}")
Same = Callable[[str, Sequence[str]], list[bool]]
"""(text of a completion, answers) -> for each answer, whether the completion gives it."""


def majority_scores(groups: Sequence[RolloutGroup], extract: Callable[[str], str | None], same: Same) -> list[float]:
    """For each problem, the chance that its most frequent answer is right.

    The votes are the samples with a final answer whose grading did not fail; the others abstain. Samples that the
    verifier accepted equal the reference and so each other: they are one cluster, and a vote is right where it is the
    largest. The answers of wrong samples are clustered one after the other: each joins the first cluster whose first
    member the verifier finds it equal to. Of n largest clusters of equal size each is taken with chance 1/n, so a tie
    that the right one is in counts 1/n; where nobody votes, the score is 0.
    """
    return [_score(group, extract, same) for group in groups]


def _score(group: RolloutGroup, extract: Callable[[str], str | None], same: Same) -> float:
    num_right = sum(rollout.grade.outcome == "correct" for rollout in group.rollouts)
    wrong = [rollout.text for rollout in group.rollouts if rollout.grade.outcome == "wrong"]
    votes = [(text, _plain(answer)) for text in wrong if (answer := extract(text)) is not None]
    if num_right == 0 or num_right > len(votes):
        return float(num_right > 0)  # whatever the clusters of the wrong ones are
    sizes = _cluster_sizes(votes, same)
    if max(sizes) > num_right:
        return 0.0
    return 1 / (1 + sizes.count(num_right))


def _cluster_sizes(votes: Sequence[tuple[str, str]], same: Same) -> list[int]:
    """Sizes of the clusters of equal answers among (text, answer) pairs."""
    texts = {answer: text for text, answer in reversed(votes)}
    sizes: dict[str, int] = {}
    for answer, count in Counter(answer for _, answer in votes).items():
        candidates = [first for first in sizes if not (INTEGER.fullmatch(answer) and INTEGER.fullmatch(first))]
        equal = [first for first, found in zip(candidates, same(texts[answer], candidates), strict=True) if found]
        known = equal[0] if equal else answer
        sizes[known] = sizes.get(known, 0) + count
    return list(sizes.values())


def _plain(answer: str) -> str:
    """An integer without leading zeros, so that two integers are equal where their texts are, without the verifier."""
    return str(int(answer)) if INTEGER.fullmatch(answer) else answer


class AnswerComparer:
    """Compares completions with answers by a task's verifier, in worker processes where it is `isolated`.

    A comparison that fails (an answer that cannot be read as a reference, a timeout) counts as not the same.
    """

    def __init__(self, verifier: Verifier, grading: GradingSection) -> None:
        self._verifier = verifier
        self._isolated = bool(getattr(verifier, "isolated", False))
        self._grading = grading
        self._pool: WorkerPool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.close()

    def same(self, text: str, answers: Sequence[str]) -> list[bool]:
        """For each of `answers`, whether the completion `text` gives it."""
        if not self._isolated:
            return [self._is_same(text, answer) for answer in answers]
        if not answers:
            return []
        if self._pool is None:  # most votes are decided without a comparison
            functions = IsolatedFunctions(verifier=self._verifier, rewards=())
            self._pool = WorkerPool(functions, self._grading.num_workers, self._grading.timeout_seconds)
        pool = self._pool
        waiting: list[Future[Graded | Failure]] = [pool.submit(_as_input(text, answer)) for answer in answers]
        verdicts = [future.result() for future in waiting]
        return [isinstance(verdict, Graded) and bool(verdict.correct) for verdict in verdicts]

    def _is_same(self, text: str, answer: str) -> bool:
        with Caught():
            return bool(self._verifier(text, answer))
        return False


def vote(groups: Sequence[RolloutGroup], verifier: Verifier, grading: GradingSection) -> list[float] | None:
    """`majority_scores` by the task's verifier; None with one sample a problem, or a verifier without `extract`."""
    extract = extractor(verifier)
    if extract is None or len(groups[0].rollouts) == 1:
        return None
    with AnswerComparer(verifier, grading) as comparer:
        return majority_scores(groups, extract, comparer.same)


def _as_input(text: str, answer: str) -> RewardInput:
    prompt = Prompt(prompt_id="vote", text="", token_ids=(0,), answer=answer)
    return RewardInput(prompt=prompt, text=text, correct=None, finish_reason="stop", num_tokens=1, max_new_tokens=1)
