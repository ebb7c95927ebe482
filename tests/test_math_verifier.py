"""The verifier of mathematical answers: one answer is found in a completion, shown and judged; spellings; thoughts."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sympy.parsing import sympy_parser
from task_cases import byte_tokenizer, cases_in

from srtrl.recipe.schema import GradingSection
from srtrl.tasks.final_answer import as_judged, extract_answer, extractor
from srtrl.tasks.grading import Grader
from srtrl.tasks.math import MathOptions, Task
from srtrl.tasks.math_verifier import is_correct
from srtrl.tasks.rows import RowSource

GRADING = GradingSection(num_workers=1, timeout_seconds=5)

# --- Markdown ---------------------------------------------------------------------------------------------------------

ANSWERS = ["58", "\\sqrt{51}", "x^*", "a_1", "2*3", "-5", "(2,3)"]


@pytest.mark.parametrize("answer", ANSWERS)
def test_markdown_around_an_answer_is_no_part_of_it(answer: str) -> None:
    for form in cases_in("marked.txt"):
        text = "12 + 46, see\n\n" + form.replace("X", answer)
        assert extract_answer(text) == answer, text
        assert is_correct(text, answer) is True, text
    assert is_correct("Answer: **58**", "57") is False


# --- Spellings --------------------------------------------------------------------------------------------------------


KINDS = "\n".join(cases_in("spellings.txt")).split("# ")[1:]


def compared(line: str) -> tuple[str, str, bool]:
    """Both sides of `a == b` or `a != b`, and whether they are equal."""
    first, relation, second = re.split(" ([=!]=) ", line)
    return first, second, relation == "=="


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.split()[0])
def test_spellings_of_the_same_value_are_equal_both_ways_and_others_are_not(kind: str) -> None:
    for first, second, equal in map(compared, kind.splitlines()[1:]):
        assert is_correct(f"\\boxed{{{first}}}", second) is equal, (first, second)
        assert is_correct(f"\\boxed{{{second}}}", first) is equal, (second, first)


def test_spaces_between_groups_of_digits() -> None:
    for space in "\u2009\u202f\xa0":
        assert is_correct(f"\\boxed{{10{space}000}}", "10000")


HOSTILE = [
    *("__import__('os').system('touch evaluated')", "().__class__", "(lambda: 1)()", "open('evaluated', 'w')"),
    *("9**9**9**9", "9**(9**(9**9))", "9^(9**9)", "((9**999)**999)**999", "exp(exp(exp(9**999)))", "10**99999999"),
    *("sqrt(" * 200, "pi**" * 200, "A and " * 150, "{" * 900, "\\color{" * 100, "7:30 a.m." * 100),
]


def test_an_answer_is_never_evaluated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Python sees single numbers and names of it, and what would be a tower of powers stays text: this ends at once."""
    evaluated: list[str] = []
    monkeypatch.chdir(tmp_path)
    evaluate = sympy_parser.eval_expr

    def recording(code: str, *names: dict[str, Any]) -> Any:
        evaluated.append(code)
        return evaluate(code, *names)

    monkeypatch.setattr(sympy_parser, "eval_expr", recording)
    for text in HOSTILE:
        assert is_correct(f"\\boxed{{{text}}}", "5") is is_correct(f"The answer is {text}.", "5") is False, text
    assert [code for code in evaluated if not re.fullmatch(r"(Integer|Float|Symbol) \('?\w+'? \)", code)] == []
    assert not list(tmp_path.iterdir())


# --- What is found is what is judged ----------------------------------------------------------------------------------


def test_one_answer_is_found_and_judged() -> None:
    """Completion => the answer in it, and whether that is the reference's."""
    for line in cases_in("found.txt"):
        text, _, judgement = line.partition(" => ")
        found, answer, equal = compared(judgement)
        assert extract_answer(text) == (None if found == "nothing" else found), text
        assert is_correct(text, answer) is equal, text
        if found != "nothing":
            assert is_correct(f"\\boxed{{{found}}}", answer) is equal, text


# --- Thoughts ---------------------------------------------------------------------------------------------------------

THOUGHTS: list[tuple[str, str, bool, bool]] = [
    ("Q: ?", "\\boxed{4}", True, True),
    ("Q: ?", "<think>\\boxed{4}</think>", False, True),
    ("Q: ?", "<think>so \\boxed{4}", False, True),
    ("Q: ?", "<think>\\boxed{5}</think>\\boxed{4}", True, True),
    ("Q: ?<think>\n", "\\boxed{4}", False, True),
    ("Q: ?<think>\n", "\\boxed{5}</think>\n\\boxed{4}", True, True),
    ("Q: ?<think>", "\\boxed{4}</think>", False, True),
    ("Q: ?<think>\n\n</think>\n\n", "\\boxed{4}", True, True),
    ("Write <think> first. Q: ?", "\\boxed{4}", True, True),
]
"""Prompt, completion, and whether it is correct: by default, and with `answer_in_thought`."""


@pytest.mark.parametrize("options", [{}, {"answer_in_thought": True}])
@pytest.mark.parametrize("choices", [{}, {"choices_field": "choices"}])
def test_only_what_follows_a_thought_is_the_answer(options: Any, choices: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"problem": "?", "answer": "4", "choices": [1, 2, 3, 4, 5]}')
    source = RowSource(files=[str(tmp_path / "rows.jsonl")])
    task = Task(MathOptions(train=source, **options, **choices), tokenizer=byte_tokenizer(), max_prompt_tokens=99)
    prompt, extract = task.train_prompts[0], extractor(task.verifier)
    assert extract is not None
    rows = [
        tuple(text.replace("4", "E").replace("5", "D") if choices else text for text in row[:2]) for row in THOUGHTS
    ]
    with Grader(task, (), GRADING, max_new_tokens=1) as grader:
        prompts = [replace(prompt, text=text) for text, _ in rows]
        tickets = [grader.submit(one, text, "stop", 1) for one, (_, text) in zip(prompts, rows, strict=True)]
        outcomes = [grade.outcome for grade in grader.collect(tickets)]
    expected = [row[3 if options else 2] for row in THOUGHTS]
    assert outcomes == ["correct" if correct else "wrong" for correct in expected]
    found = [extract(as_judged(one, text)) for one, (_, text) in zip(prompts, rows, strict=True)]
    assert found == [prompt.answer if correct else None for correct in expected]  # without an answer, no vote
