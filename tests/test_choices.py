"""Multiple choice: how the choices are asked, and which letter a completion chose."""

from pathlib import Path
from typing import Any

import pytest
from bench_cases import write_rows
from task_cases import byte_tokenizer

from srtrl.tasks.choices import extract_letter, is_chosen
from srtrl.tasks.math import MathOptions, Task

ROW = {"question": "Which is prime?", "choices": ["4", "9", "A square", "13"], "answer": 3, "subject": "mathematics"}


def make_task(folder: Path, *rows: dict[str, Any], **options: Any) -> Task:
    file = write_rows(folder / "rows.jsonl", *rows)
    values = {"eval": {"files": [str(file)]}, "problem_field": "question", "choices_field": "choices", **options}
    return Task(MathOptions.model_validate(values), tokenizer=byte_tokenizer(), max_prompt_tokens=1000)


@pytest.mark.parametrize("answer", [3, "3", "D", "d"])
def test_choices_stand_below_the_problem_and_the_answer_is_a_letter(tmp_path: Path, answer: object) -> None:
    task = make_task(tmp_path, {**ROW, "answer": answer}, prompt_template="Q: {problem}\nA:")
    prompt = task.eval_prompts[0]
    assert prompt.text == "Q: Which is prime?\nA. 4\nB. 9\nC. A square\nD. 13\nA:"
    assert prompt.answer == "D"
    assert task.verifier("\\boxed{D}", prompt.answer)
    assert not task.verifier("\\boxed{13}", prompt.answer)
    assert not getattr(task.verifier, "isolated", False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": 4}, "field `answer` must be a letter A to D or an index 0 to 3, it is '4'"),
        ({"answer": "13"}, "must be a letter A to D"),
        ({"choices": "4 or 9"}, "field `choices` must be a list of 2 to 26 choices, it is '4 or 9'"),
        ({"choices": ["4", None]}, "field `choices` must hold texts or numbers, it holds None"),
    ],
)
def test_malformed_choices_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="malformed_rows: skip") as caught:
        make_task(tmp_path, {**ROW, **change})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("13 is prime: \\boxed{D}", "D"),
        ("\\boxed{A} no, \\boxed{D}.", "D"),
        ("\\boxed{\\text{D}}", "D"),
        ("\\boxed{\\textbf{(D) } 13}", "D"),
        ("\\boxed{D. 13}", "D"),
        ("\\boxed{D}, since A, B and C are composite", "D"),
        ("\\boxed{13}", None),
        ("\\boxed{A square}", None),
        ("A is wrong.\nThe answer is D.", "D"),
        ("The answer is **D**.", "D"),
        ("The answer is D because 13 is prime", "D"),
        ("Answer: $D$", "D"),
        ("the correct option is: B", "B"),
        ("So option D is correct, not A.", "D"),
        ("The answer is A prime number", None),
        ("Answer: A\nNo, wait.\nAnswer: D", "D"),
        ("work\n#### D", "D"),
        ("work\n#### 13", None),
        ("B and C are even\nD", "D"),
        ("D", "D"),
        ("I think that Dora is right", None),
        ("", None),
    ],
)
def test_the_letter_that_a_completion_chose(text: str, letter: str | None) -> None:
    assert extract_letter(text) == letter
    assert is_chosen(text, "D") is (letter == "D")
