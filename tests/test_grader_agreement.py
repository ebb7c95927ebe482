"""The verifier of mathematics against reference solutions: it accepts its own, and refuses those of other problems."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from task_cases import byte_tokenizer, to_grade

from srtrl.recipe.schema import GradingSection
from srtrl.tasks.final_answer import extract_answer
from srtrl.tasks.grading import Grader
from srtrl.tasks.math import MathOptions, Task
from srtrl.tasks.math_verifier import is_correct
from srtrl.tasks.rows import RowSource

OPTIONS: dict[str, dict[str, Any]] = {
    "gsm8k_test": {"problem_field": "question", "answer_pattern": "#### (.+)", "solution_field": "answer"},
    "math500": {"id_field": "id"},
    "olympiadbench": {},
}
"""File -> options of the task."""
NUM_ASKED = {"gsm8k_test": (1319, 1319, 1304), "math500": (500, 500, 498), "olympiadbench": (0, 675, 671)}
"""File -> solutions, boxed answers, and other rows' solutions, as in the table of docs/grading.md."""
SAME_VALUE = "test/algebra/2193.json"
"""A row of MATH-500 with the answer x=5, after one with the answer 5."""
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [("gsm8k_test", 8), ("olympiadbench", 8), *(pytest.param(name, None, marks=SLOW) for name in OPTIONS)],
)
def test_the_grader_agrees_with_reference_solutions(name: str, num_rows: int | None, shared_data: Path) -> None:
    """It accepts each row's solution, and its answer alone in a box, and refuses the solution of the row before."""
    source = RowSource(files=[str(shared_data / "math" / f"{name}.jsonl")])
    task = Task(MathOptions(eval=source, **OPTIONS[name]), tokenizer=byte_tokenizer(), max_prompt_tokens=sys.maxsize)
    prompts = task.eval_prompts[:num_rows]
    boxed = [f"\\boxed{{{prompt.answer}}}" for prompt in prompts]
    solutions = [] if name == "olympiadbench" else [task.solution(prompt) for prompt in prompts]
    texts = solutions or boxed
    before = zip((prompts[-1], *prompts), prompts, (texts[-1], *texts), strict=False)
    others = [(prompt, text) for other, prompt, text in before if plain(other.answer) != plain(prompt.answer)]
    accepted = [*zip(prompts, solutions, strict=False), *zip(prompts, boxed, strict=True)]
    if num_rows is None:
        assert (len(solutions), len(boxed), len(others)) == NUM_ASKED[name]
    with Grader(task, (), GradingSection(num_workers=1 if num_rows else 2)) as grader:
        grades = grader.collect([grader.submit(to_grade(*pair)) for pair in (*accepted, *others)])
    outcomes = [grade.outcome for grade in grades]
    assert set(outcomes[: len(accepted)]) == {"correct"}
    judged = zip(others, outcomes[len(accepted) :], strict=True)
    taken = [prompt.prompt_id for (prompt, _), outcome in judged if outcome != "wrong"]
    assert taken == ([SAME_VALUE] if name == "math500" else [])


def plain(answer: str) -> str:
    """An answer without what makes no difference, so that rows of equal answers are not expected to differ."""
    return "".join(answer.replace(",", "").replace("\\!", "").replace("dfrac", "frac").split())


def test_what_is_extracted_is_what_was_graded(shared_data: Path) -> None:
    r"""The extracted text, put into a box, has the grade of the whole completion (recorded samples of real policies).

    The record rejects `4:30 \text{ p.m.}` for `\text{4:30 p.m.}`, all samples of one prompt.
    """
    rows = (shared_data / "rollouts" / "qwen_math_cot_100x8.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, rows[:12]):
        for sample in row["samples"]:
            extracted = extract_answer(sample["text"])
            boxed = extracted is not None and is_correct(f"\\boxed{{{extracted}}}", row["answer"])
            assert boxed is is_correct(sample["text"], row["answer"])
            assert boxed is (sample["correct"] or row["answer"] == "\\text{4:30 p.m.}")
