"""The verifiers of answers: one answer is found in a completion, shown and judged; spellings, letters, thoughts."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sympy.parsing import sympy_parser
from task_cases import Rows, byte_tokenizer, cases_in, prompt_of, sample_of, to_grade

from srtrl.recipe.schema import GradingSection
from srtrl.tasks import arithmetic, rewards
from srtrl.tasks.choices import extract_letter, is_chosen
from srtrl.tasks.final_answer import as_judged, extract_answer, extractor
from srtrl.tasks.grading import Grader
from srtrl.tasks.math import MathOptions, Task
from srtrl.tasks.math_verifier import is_correct
from srtrl.tasks.rows import RowSource

# --- One answer is found, and judged ----------------------------------------------------------------------------------


def compared(line: str) -> tuple[str, str, bool]:
    """Both sides of `a == b` or `a != b`, and whether they are equal."""
    first, relation, second = re.split(" ([=!]=) ", line)
    return first, second, relation == "=="


def test_one_answer_is_found_and_judged() -> None:
    """Completion => the answer in it, and whether that is the reference's."""
    for line in cases_in("found.txt"):
        text, _, judgement = line.partition(" => ")
        found, answer, equal = compared(judgement)
        assert extract_answer(text) == (None if found == "nothing" else found), text
        assert is_correct(text, answer) is equal, text
        if found != "nothing":
            assert is_correct(f"\\boxed{{{found}}}", answer) is equal, text


def test_the_letter_that_a_completion_chose() -> None:
    """Completion => the letter, of completions for multiple choice."""
    for line in [*cases_in("letters.txt"), " => nothing"]:
        text, _, letter = line.partition(" => ")
        assert extract_letter(text) == (None if letter == "nothing" else letter), text
        assert is_chosen(text, "D") is (letter == "D"), text


@pytest.mark.parametrize("answer", ["58", "\\sqrt{51}", "x^*", "a_1", "2*3", "-5", "(2,3)"])
def test_markdown_around_an_answer_is_no_part_of_it(answer: str) -> None:
    for form in cases_in("marked.txt"):
        text = "12 + 46, see\n\n" + form.replace("X", answer)
        assert extract_answer(text) == answer, text
        assert is_correct(text, answer) is True, text
    assert is_correct("Answer: **58**", "57") is False


KINDS = "\n".join(cases_in("spellings.txt")).split("# ")[1:]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.split()[0])
def test_spellings_of_the_same_value_are_equal_both_ways_and_others_are_not(kind: str) -> None:
    for first, second, equal in map(compared, kind.splitlines()[1:]):
        assert is_correct(f"\\boxed{{{first}}}", second) is equal, (first, second)
        assert is_correct(f"\\boxed{{{second}}}", first) is equal, (second, first)


def test_spaces_between_groups_of_digits() -> None:
    for space in "\u2009\u202f\xa0":
        assert is_correct(f"\\boxed{{10{space}000}}", "10000")


# --- Crafted texts ----------------------------------------------------------------------------------------------------

HOSTILE = [
    *("__import__('os').system('touch evaluated')", "().__class__", "(lambda: 1)()", "open('evaluated', 'w')"),
    *("9**9**9**9", "9**(9**(9**9))", "9^(9**9)", "((9**999)**999)**999", "exp(exp(exp(9**999)))", "10**99999999"),
    *("sqrt(" * 200, "pi**" * 200, "A and " * 150, "{" * 900, "\\color{" * 100, "7:30 a.m." * 100),
    *(f"{'(' * 99}5{')' * 99}", f"5{'+0' * 999}"),  # absurd: too deep, too long
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
    assert is_correct("\ud800 \\boxed{5}", "5")


def test_an_answer_without_end_costs_its_own_sample() -> None:
    with Grader(Rows(is_correct), (), GradingSection(num_workers=1, timeout_seconds=0.6)) as grader:
        texts = [rf"\boxed{{{answer}}}" for answer in ("9^{9^{9^{9}}}", "5", "6")]
        grades = grader.collect([grader.submit(to_grade(prompt_of("5"), text, "stop", 3)) for text in texts])
    assert [grade.outcome for grade in grades] == ["timeout", "correct", "wrong"]


@pytest.mark.slow
def test_brackets_take_quadratic_time() -> None:
    assert is_correct(f"\\boxed{{{'(' * 29}5{')' * 29}}}", "5")


UNITS = ["\\boxed{", "answer ", "final answer is ", "answer:\n", "1,", "{", "$", "$a$ and ", "**a ", "so C ", "#### "]
UNITS += ["12,", "A, ", "B and ", "选", "答案", "\\boxed{}", "Answer: ", "Answer: 1\n", "9", " ", "-", "\ud800"]
UNITS += ["Answer: " + "0" * 1000]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("unit", [*UNITS, pytest.param("\\(", marks=pytest.mark.slow)])
def test_reading_an_answer_takes_linear_time(unit: str) -> None:
    """In the trainer's own process: crafted text may not stall it. In quadratic time this would take minutes."""
    crafted = "answer" + unit * min(100_000, 2_000_000 // len(unit)) + " " * 100_000 + "x"
    extract_answer(crafted)
    extract_letter(crafted)
    assert rewards.format(sample_of(crafted)) in (0.0, 1.0)
    for suffix in ("", "\nAnswer: ", "\nAnswer: " + "7" * 1_000_000, " x"):
        arithmetic.is_correct(unit * (500_000 // len(unit)) + suffix, "7")


def test_a_worker_imports_the_verifier_without_torch() -> None:
    check = "import srtrl.tasks.worker, srtrl.tasks.math_verifier, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=100).returncode == 0


# --- Thoughts ---------------------------------------------------------------------------------------------------------

THOUGHTS: list[tuple[str, str, bool]] = [
    ("Q: ?", "\\boxed{4}", True),
    ("Q: ?", "<think>\\boxed{4}</think>", False),
    ("Q: ?", "<think>so \\boxed{4}", False),
    ("Q: ?", "<think>\\boxed{5}</think>\\boxed{4}", True),
    ("Q: ?<think>\n", "\\boxed{4}", False),
    ("Q: ?<think>\n", "\\boxed{5}</think>\n\\boxed{4}", True),
    ("Q: ?<think>", "\\boxed{4}</think>", False),
    ("Q: ?<think>\n\n</think>\n\n", "\\boxed{4}", True),
    ("Write <think> first. Q: ?", "\\boxed{4}", True),
]
"""Prompt, completion, and whether it is correct by default; with `answer_in_thought` all are."""


@pytest.mark.parametrize("options", [{}, {"answer_in_thought": True}])
@pytest.mark.parametrize("choices", [{}, {"choices_field": "choices"}])
def test_only_what_follows_a_thought_is_the_answer(options: Any, choices: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"problem": "?", "answer": "4", "choices": [1, 2, 3, 4, 5]}')
    source = RowSource(files=[str(tmp_path / "rows.jsonl")])
    task = Task(MathOptions(train=source, **options, **choices), tokenizer=byte_tokenizer(), max_prompt_tokens=99)
    [prompt], extract = task.train_prompts, extractor(task.verifier)
    assert extract is not None
    assert options or task.verifier is (is_chosen if choices else is_correct)
    with Grader(task, (), GradingSection(num_workers=1, timeout_seconds=5)) as grader:
        for prompt_text, said, follows in THOUGHTS:
            asked = replace(prompt, text=prompt_text)
            text = said.replace("4", "E").replace("5", "D") if choices else said
            [grade] = grader.collect([grader.submit(to_grade(asked, text, "stop", 1))])
            is_right = follows or bool(options)
            assert grade.outcome == ("correct" if is_right else "wrong"), (prompt_text, said)
            assert extract(as_judged(asked, text)) == (prompt.answer if is_right else None)  # without one, no vote
