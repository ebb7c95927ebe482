"""`srtrl eval --check-grader`: does the grader agree with the reference solutions? No model is needed.

Three questions to the verifier, for every row: is the worked solution right (where the rows have one), is the reference
answer right when it stands alone in a box, and is the solution of the row before wrong? The last one is there since a
verifier that accepts everything agrees with every solution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich.markup import escape
from rich.table import Table

from srtrl.tasks.final_answer import BOX, extractor
from srtrl.tasks.reward_input import RewardInput
from srtrl.tasks.worker import Caught, Failure, Graded, IsolatedFunctions, describe_error
from srtrl.tasks.worker_pool import WorkerPool
from srtrl.types import Prompt

if TYPE_CHECKING:
    from concurrent.futures import Future

    from srtrl.recipe import GradingSection
    from srtrl.tasks.base import Verifier

Question = Literal["solution", "boxed answer", "other solution"]
CUT = 60
"""Characters of an answer in a reason."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ReferenceRow:
    """One row of a data set, as the check reads it."""

    prompt_id: str
    answer: str
    solution: str | None
    """None where the row has none."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Disagreement:
    """A row where the verifier did not say what it should."""

    prompt_id: str
    question: Question
    reason: str


@dataclass(kw_only=True, slots=True, frozen=True)
class GraderReport:
    """What the verifier said of one data set."""

    name: str
    place: str
    num_rows: int
    num_asked: dict[Question, int]
    """How often each question was asked."""
    disagreements: list[Disagreement]

    def num_agreed(self, question: Question) -> int:
        """How often the verifier said what it should."""
        return self.num_asked[question] - sum(one.question == question for one in self.disagreements)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Asked:
    row: ReferenceRow
    question: Question
    text: str


def check_grader(
    name: str, place: str, rows: Sequence[ReferenceRow], verifier: Verifier, grading: GradingSection
) -> GraderReport:
    """Ask the verifier about every row, in worker processes where it is `isolated`."""
    asked = list(_questions(rows))
    verdicts = _verdicts(asked, verifier, grading)
    extract = extractor(verifier)
    disagreements = []
    for one, verdict in zip(asked, verdicts, strict=True):
        expected = one.question != "other solution"
        if isinstance(verdict, Failure):
            reason = f"{verdict.outcome}: {verdict.detail}"
        elif bool(verdict.correct) != expected:
            found = None if extract is None else extract(one.text)
            what = "no answer was found" if found is None else f"found {found[:CUT]!r}"
            reason = f"{what}, the reference is {one.row.answer[:CUT]!r}"
        else:
            continue
        disagreements.append(Disagreement(prompt_id=one.row.prompt_id, question=one.question, reason=reason))
    num_asked: dict[Question, int] = {"solution": 0, "boxed answer": 0, "other solution": 0}
    for one in asked:
        num_asked[one.question] += 1
    return GraderReport(name=name, place=place, num_rows=len(rows), num_asked=num_asked, disagreements=disagreements)


def _questions(rows: Sequence[ReferenceRow]) -> Iterator[_Asked]:
    for index, row in enumerate(rows):
        if row.solution is not None:
            yield _Asked(row=row, question="solution", text=row.solution)
        yield _Asked(row=row, question="boxed answer", text=f"{BOX}{row.answer}}}")
        before = rows[index - 1]
        text = before.solution or f"{BOX}{before.answer}}}"
        if _plain(before.answer) != _plain(row.answer):
            yield _Asked(row=row, question="other solution", text=text)


def _plain(answer: str) -> str:
    """Without what makes no difference, so that rows of equal answers are not asked to differ."""
    return "".join(answer.replace(",", "").replace("\\!", "").replace("dfrac", "frac").split())


def _verdicts(asked: Sequence[_Asked], verifier: Verifier, grading: GradingSection) -> list[Graded | Failure]:
    if not getattr(verifier, "isolated", False):
        return [_ask(verifier, one) for one in asked]
    pool = WorkerPool(IsolatedFunctions(verifier=verifier, rewards=()), grading.num_workers, grading.timeout_seconds)
    try:
        waiting: list[Future[Graded | Failure]] = [pool.submit(_as_input(one)) for one in asked]
        return [future.result() for future in waiting]
    finally:
        pool.close()


def _ask(verifier: Verifier, one: _Asked) -> Graded | Failure:
    with Caught() as caught:
        return Graded(correct=bool(verifier(one.text, one.row.answer)))
    assert caught.error is not None
    return Failure(outcome="error", detail=describe_error(caught.error))


def _as_input(one: _Asked) -> RewardInput:
    prompt = Prompt(prompt_id=one.row.prompt_id, text="", token_ids=(0,), answer=one.row.answer)
    return RewardInput(prompt=prompt, text=one.text, correct=None, finish_reason="stop", num_tokens=1, max_new_tokens=1)


# --- For people and programs ------------------------------------------------------------------------------------------


def grader_table(reports: Sequence[GraderReport]) -> Table:
    """How often the verifier said what it should."""
    table = Table(title="agreement of the grader with reference solutions")
    table.add_column("data")
    table.add_column("rows", justify="right")
    for heading in ("solution\naccepted", "boxed answer\naccepted", "other row's\nsolution refused"):
        table.add_column(heading, justify="right")
    for report in reports:
        cells = [
            f"{report.num_agreed(question):,} of {count:,}" if count else "none"
            for question, count in report.num_asked.items()
        ]
        table.add_row(escape(report.name), f"{report.num_rows:,}", *cells)
    return table


def disagreement_lines(reports: Sequence[GraderReport]) -> list[str]:
    """One line for each row where the verifier did not say what it should."""
    return [
        f"{report.name} {one.prompt_id}: {one.question}: {one.reason}"
        for report in reports
        for one in report.disagreements
    ]


def as_record(reports: Sequence[GraderReport]) -> list[dict[str, Any]]:
    """What `--json` prints."""
    return [
        {**asdict(report), "num_agreed": {question: report.num_agreed(question) for question in report.num_asked}}
        for report in reports
    ]
