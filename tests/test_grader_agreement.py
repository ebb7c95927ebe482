"""The verifier of mathematics against reference solutions: it accepts its own, and refuses those of other problems."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import rollout_cases
from task_cases import Rows, byte_tokenizer, prompt_of

from srtrl.recipe.schema import AlgorithmSection, GradingSection, RewardSection
from srtrl.tasks.final_answer import extract_answer
from srtrl.tasks.grading import Grader
from srtrl.tasks.math import MathOptions, Task
from srtrl.tasks.math_verifier import is_correct
from srtrl.tasks.rows import RowSource
from srtrl.trainer.credit import groups_to_learn_from
from srtrl.types import Prompt

GRADING = GradingSection(num_workers=1, timeout_seconds=0.6)
OPTIONS: dict[str, dict[str, Any]] = {
    "gsm8k_test": {"problem_field": "question", "answer_pattern": "#### (.+)", "solution_field": "answer"},
    "math500": {"id_field": "id"},
    "olympiadbench": {},  # without solutions
}
"""File -> options of the task."""
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("name", "num_rows", "num_asked", "disagreements"),
    [
        ("gsm8k_test", 8, {"solution": 8, "boxed answer": 8, "other solution": 8}, []),
        ("olympiadbench", 8, {"boxed answer": 8, "other solution": 7}, []),
        pytest.param(
            *("gsm8k_test", None, {"solution": 1319, "boxed answer": 1319, "other solution": 1304}, []), marks=SLOW
        ),
        pytest.param(  # the reference of that row is x=5, and the row before it has the answer 5
            *("math500", None, {"solution": 500, "boxed answer": 500, "other solution": 498}),
            [("other solution", "test/algebra/2193.json")],
            marks=SLOW,
        ),
        pytest.param("olympiadbench", None, {"boxed answer": 675, "other solution": 671}, [], marks=SLOW),
    ],
)
def test_the_grader_agrees_with_reference_solutions(
    name: str, num_rows: int | None, num_asked: dict[str, int], disagreements: list[tuple[str, str]], shared_data: Path
) -> None:
    """The table in docs/grading.md."""
    source = RowSource(files=[str(shared_data / "math" / f"{name}.jsonl")])
    options = MathOptions(eval=source, **OPTIONS[name])
    task = Task(options, tokenizer=byte_tokenizer(), max_prompt_tokens=sys.maxsize)
    asked = list(questions(task, task.eval_prompts[:num_rows]))
    assert Counter(question for question, _, _ in asked) == num_asked
    with Grader(task, (), GradingSection(num_workers=1 if num_rows else 2), max_new_tokens=1) as grader:
        grades = grader.collect([grader.submit(prompt, text, "stop", 1) for _, prompt, text in asked])
    expected = {"solution": "correct", "boxed answer": "correct", "other solution": "wrong"}
    found = [
        (question, prompt.prompt_id)
        for (question, prompt, _), grade in zip(asked, grades, strict=True)
        if grade.outcome != expected[question]
    ]
    assert found == disagreements


def questions(task: Task, prompts: Sequence[Prompt]) -> Iterator[tuple[str, Prompt, str]]:
    """(question, problem, completion); rows of equal answers are not expected to differ."""

    def solution(prompt: Prompt) -> str | None:
        try:
            return task.solution(prompt)
        except ValueError:
            return None

    for index, prompt in enumerate(prompts):
        other = prompts[index - 1]
        if (own := solution(prompt)) is not None:
            yield "solution", prompt, own
        yield "boxed answer", prompt, f"\\boxed{{{prompt.answer}}}"
        if plain(other.answer) != plain(prompt.answer):
            yield "other solution", prompt, solution(other) or f"\\boxed{{{other.answer}}}"


def plain(answer: str) -> str:
    """An answer without what makes no difference."""
    return "".join(answer.replace(",", "").replace("\\!", "").replace("dfrac", "frac").split())


def test_a_response_that_cannot_be_graded_is_not_better_than_an_incorrect_one() -> None:
    """It would be, with its reward of 0, if it were learned from."""
    rewards = [RewardSection(name="correct", options={"incorrect": -1.0})]
    with Grader(Rows(is_correct), rewards, GRADING, 10) as grader:
        texts = [rf"\boxed{{{answer}}}" for answer in ("5", "6", "9^{9^{9^{9}}}")]
        grades = grader.collect([grader.submit(prompt_of("5"), text, "stop", 3) for text in texts])
    assert [(grade.outcome, grade.reward) for grade in grades] == [("correct", 1.0), ("wrong", -1.0), ("timeout", 0.0)]
    [kept] = groups_to_learn_from([rollout_cases.graded(grades)], AlgorithmSection())
    assert [rollout.grade for rollout in kept.rollouts] == grades[:2]


def test_what_is_extracted_is_what_was_graded(shared_data: Path) -> None:
    """The extracted text, put into a box, has the grade of the whole completion (recorded samples of real policies)."""
    rows = (shared_data / "rollouts" / "qwen_math_cot_100x8.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, rows[:12]):
        for sample in row["samples"]:
            extracted = extract_answer(sample["text"])
            boxed = extracted is not None and is_correct(f"\\boxed{{{extracted}}}", row["answer"])
            assert boxed is is_correct(sample["text"], row["answer"]) is sample["correct"]
