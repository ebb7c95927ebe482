"""`srtrl eval --check-grader`: does the grader agree with the reference solutions? No model is needed.

Three questions to the verifier, for every row: is the worked solution right (where the rows have one), is the reference
answer right when it stands alone in a box, and is the solution of the row before incorrect? The last one is there since
a verifier that accepts everything agrees with every solution.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from rich.markup import escape
from rich.table import Table

from srtrl.recipe.schema import GradingSection
from srtrl.tasks.base import TaskBase
from srtrl.tasks.final_answer import BOX, extractor
from srtrl.tasks.grading import Grader
from srtrl.types import Prompt

Question = Literal["solution", "boxed answer", "other solution"]
SHOWN_CHARACTERS = 60
"""Of an answer in a reason."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Disagreement:
    """A row where the verifier did not say what it should."""

    prompt_id: str
    question: Question
    reason: str


@dataclass(kw_only=True, slots=True, frozen=True)
class GraderReport:
    """The verdicts of the verifier on one data set, as `--json` prints them."""

    name: str
    num_rows: int
    num_asked: dict[Question, int]
    """How often each question was asked."""
    num_agreed: dict[Question, int]
    """How often the verifier was right."""
    disagreements: list[Disagreement]


def check_grader(name: str, task: TaskBase, grading: GradingSection, num_problems: int | None = None) -> GraderReport:
    """Ask the task's verifier about its held-out problems, or those to train on where it has no others.

    Raises:
        ValueError: the task has no verifier.
    """
    if task.verifier is None:
        raise ValueError(
            f"--check-grader: the task {name} has no verifier: its completions are judged by rewards alone"
        )
    prompts = (task.eval_prompts or task.train_prompts)[:num_problems]
    asked = list(_questions(task, prompts))
    with Grader(task, (), grading, max_new_tokens=1) as grader:
        # Without the prompt's text, which may open a thought that no solution ends.
        grades = grader.collect([grader.submit(replace(prompt, text=""), text, "stop", 1) for _, prompt, text in asked])
    extract = extractor(task.verifier)
    disagreements = []
    for (question, prompt, text), grade in zip(asked, grades, strict=True):
        if grade.outcome == ("wrong" if question == "other solution" else "correct"):
            continue
        reason = f"{grade.outcome}: {grade.detail}"
        if grade.outcome in ("correct", "wrong"):
            found = None if extract is None else extract(text)
            what = "no answer was found" if found is None else f"found {found[:SHOWN_CHARACTERS]!r}"
            reason = f"{what}, the reference is {prompt.answer[:SHOWN_CHARACTERS]!r}"
        disagreements.append(Disagreement(prompt_id=prompt.prompt_id, question=question, reason=reason))
    num_asked = Counter(question for question, _, _ in asked)
    num_agreed = num_asked - Counter(one.question for one in disagreements)
    return GraderReport(
        name=name,
        num_rows=len(prompts),
        num_asked={question: num_asked[question] for question in get_args(Question)},
        num_agreed={question: num_agreed[question] for question in get_args(Question)},
        disagreements=disagreements,
    )


def _questions(task: TaskBase, prompts: Sequence[Prompt]) -> Iterator[tuple[Question, Prompt, str]]:
    """(question, problem, completion to be graded)."""
    solutions = [_solution(task, prompt) for prompt in prompts]
    boxed = [f"{BOX}{prompt.answer}}}" for prompt in prompts]
    for index, prompt in enumerate(prompts):
        if (solution := solutions[index]) is not None:
            yield "solution", prompt, solution
        yield "boxed answer", prompt, boxed[index]
        if _plain(prompts[index - 1].answer) != _plain(prompt.answer):
            yield "other solution", prompt, solutions[index - 1] or boxed[index - 1]


def _solution(task: TaskBase, prompt: Prompt) -> str | None:
    try:
        return task.solution(prompt)
    except ValueError:  # its row has none
        return None


def _plain(answer: str) -> str:
    """Without what makes no difference, so that rows of equal answers are not expected to differ."""
    return "".join(answer.replace(",", "").replace("\\!", "").replace("dfrac", "frac").split())


def grader_table(reports: Sequence[GraderReport]) -> Table:
    """How often the verifier was right."""
    table = Table("data", title="agreement of the grader with reference solutions")
    for heading in ("rows", "solution\naccepted", "boxed answer\naccepted", "other row's\nsolution refused"):
        table.add_column(heading, justify="right")
    for report in reports:
        cells = [
            f"{report.num_agreed[question]:,} of {count:,}" if count else "none"
            for question, count in report.num_asked.items()
        ]
        table.add_row(escape(report.name), f"{report.num_rows:,}", *cells)
    return table
