"""The verifier of mathematical answers: one answer is found in a completion, shown and judged; spellings; thoughts."""
# ruff: noqa: RUF001

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from task_cases import Rows, byte_tokenizer

from srtrl.evaluation.grader_check import check_grader
from srtrl.recipe.schema import GradingSection
from srtrl.tasks.final_answer import as_judged, extract_answer, extractor
from srtrl.tasks.grading import Grader
from srtrl.tasks.math import MathOptions, Task
from srtrl.tasks.math_verifier import is_correct
from srtrl.tasks.rows import RowSource

GRADING = GradingSection(num_workers=1, timeout_seconds=5)

# --- Markdown ---------------------------------------------------------------------------------------------------------

MARKED = [
    "Answer: **X**",
    "**Answer: X**",
    "**Answer: X.**",
    "Answer: `X`",
    "#### **X**",
    "#### X",
    "<answer>**X**</answer>",
    "<answer>\n**X**\n</answer>",
    "**<answer>X</answer>**",
    "**Answer:** X",
    "**Answer**: X",
    "## Answer: X",
    "### **Answer: X**",
    "> Answer: X",
    "- **Answer:** X",
    "* Answer: *X*",
    "Answer: ***X***",
    "__Answer: X__",
    "Answer: __X__",
    "Answer: _X_",
    "**Final Answer**\nX",
    "**Final Answer:**\n\nX",
    "## Final Answer\n\n**X**",
    "### Answer\nX",
    "\\boxed{X}",
    "\\boxed {X}",
    "$\\boxed{X}$",
    "**\\boxed{X}**",
    "\\boxed{**X**}",
    "The answer is **X**.",
    "The final answer is: **$X$**.",
    "Final Answer: The final answer is $X$. I hope it is correct.",
    "Answer: $X$",
    "**Answer: $X$**",
    "Answer: \\(X\\)",
    "**Answer:** \\[X\\]",
    "```\nAnswer: X\n```",
    "Answer:\n```\nX\n```",
    "The answer is $$X$$",
    "The answer is\n\\[\nX\n\\]",
    "**Answer: X**.",
    "#### `X`",
    "####X",
    "#### $X$.",
    "#### Answer: X",
    "<answer> The answer is X </answer>",
    "<answer>$X$.</answer>",
    "Answer: **X** ",
    "**Answer: **X",
    "The **answer** is **X**",
]
ANSWERS = ["58", "\\sqrt{51}", "x^*", "a_1", "2*3", "-5", "(2,3)"]


@pytest.mark.parametrize("answer", ANSWERS)
def test_markdown_around_an_answer_is_no_part_of_it(answer: str) -> None:
    for form in MARKED:
        text = "12 + 46, see\n\n" + form.replace("X", answer)
        assert extract_answer(text) == answer, text
        assert is_correct(text, answer) is True, text
    assert is_correct("Answer: **58**", "57") is False


# --- Spellings --------------------------------------------------------------------------------------------------------

SPELLINGS: dict[str, list[tuple[str, str, bool]]] = {
    "roots": [
        ("√5", "\\sqrt{5}", True),
        ("√(5)", "\\sqrt5", True),
        ("2√3", "2\\sqrt{3}", True),
        ("³√8", "2", True),
        ("∛8", "2", True),
        ("∛(x+1)", "\\sqrt[3]{x+1}", True),
        ("√(1+√2)", "\\sqrt{1+\\sqrt{2}}", True),
        ("√2/2", "\\frac{\\sqrt2}{2}", True),
        ("√x", "\\sqrt{x}", True),
        ("√{5}", "\\sqrt{5}", True),
        ("√\\frac{1}{2}", "\\frac{1}{\\sqrt2}", True),
        ("√10", "\\sqrt{10}", True),
        ("√2.25", "1.5", True),
        ("√5", "5", False),
        ("√5", "\\sqrt{6}", False),
    ],
    "scientific": [
        ("1.2e5", "120000", True),
        ("1.2E+5", "120000", True),
        ("3e-4", "0.0003", True),
        ("2e", "2e", True),
        ("2e", "2", False),
        ("2e-1", "2e - 1", True),
        ("1.2e5", "12000", False),
        ("2e9", "2000000000", True),
        ("6.02E23", "6.02\\times 10^{23}", True),
        ("1e6", "1,000,000", True),
        ("2e^3", "2e^{3}", True),
        ("e^2", "e^{2}", True),
        ("-1.5e-3", "-0.0015", True),
    ],
    "recurring": [
        ("0.\\overline{3}", "\\frac{1}{3}", True),
        ("0.1\\overline{6}", "\\frac16", True),
        ("0.\\dot{3}", "1/3", True),
        ("0.\\bar 3", "1/3", True),
        ("0.\\bar{3}", "1/3", True),
        ("1.\\overline{142857}", "\\frac{8}{7}", True),
        ("0.\\overline{3}", "0.3", False),
        ("0.\\overline{12}", "\\frac{4}{33}", True),
        ("-0.\\overline{3}", "-\\frac13", True),
        ("0.\\dot{1}4285\\dot{7}", "\\frac17", True),
        ("0.\\overline{9}", "1", True),
        (".\\overline{3}", "1/3", True),
        ("0.\\overline{3}\\ldots", "1/3", True),
        ("0.\\overline{3}", "0.\\overline{4}", False),
        ("0.\\dot{1}\\dot{2}", "\\frac{12}{99}", True),
        ("0.\\overline 3", "1/3", True),
    ],
    "currencies": [
        ("€15", "15", True),
        ("15€", "15", True),
        ("15 €", "15", True),
        ("£15", "15", True),
        ("¥1500", "1500", True),
        ("₹500", "500", True),
        ("\\$15", "15", True),
        ("15\\$", "15", True),
        ("\\text{€}15", "15", True),
        ("15\\text{ €}", "15", True),
        ("\\euro 15", "15", True),
        ("15\\,\\euro", "15", True),
        ("\\pounds 15", "15", True),
        ("USD 15", "15", True),
        ("15 USD", "15", True),
        ("US\\$15", "15", True),
        ("\\text{USD }15", "15", True),
        ("15\\text{ EUR}", "15", True),
        ("€15", "16", False),
        ("€1,500.50", "1500.5", True),
        ("-€15", "-15", True),
        ("\\$10{,}000", "10000", True),
        ("Rs. 500", "500", True),
        ("€ 15", "15", True),
        ("\\text{\\euro}15", "15", True),
        ("\\$1\\,234", "1234", True),
    ],
    "digit_groups": [
        ("10 000", "10000", True),
        ("10\\,000", "10000", True),
        ("10\\ 000", "10000", True),
        ("10\u2009000", "10000", True),
        ("10\u202f000", "10000", True),
        ("10\xa0000", "10000", True),
        ("1 000 000", "1000000", True),
        ("1\\,000\\,000", "1000000", True),
        ("10~000", "10000", True),
        ("10\\;000", "10000", True),
        ("10\\:000", "10000", True),
        ("1 2 3", "123", False),
        ("1 1/2", "1.5", True),
        ("1\\frac12", "1.5", True),
        ("1 1/2", "112", False),
        ("10 000.5", "10000.5", True),
        ("-10 000", "-10000", True),
        ("12 345 + 1", "12346", True),
        ("10{,}000", "10000", True),
        ("10,\\!000", "10000", True),
        ("100, 200", "100200", False),
        ("1 \\, 2", "12", False),
        ("10\\thinspace000", "10000", True),
    ],
    "empty_sets": [
        ("\\varnothing", "\\emptyset", True),
        ("∅", "\\emptyset", True),
        ("\\{\\}", "\\varnothing", True),
        ("\\{ \\}", "∅", True),
        ("\\left\\{\\right\\}", "∅", True),
        ("\\text{empty set}", "\\emptyset", True),
        ("\\emptyset", "0", False),
        ("\\{\\emptyset\\}", "\\emptyset", False),
        ("\\emptyset", "\\{0\\}", False),
    ],
    "intervals": [
        ("x>3", "(3,\\infty)", True),
        ("2<x\\le7", "(2,7]", True),
        ("x \\ge 3", "[3,\\infty)", True),
        ("3 \\le x", "[3,\\infty)", True),
        ("7 \\ge x > 2", "(2,7]", True),
        ("x \\in (2,7]", "(2,7]", True),
        ("x \\in (2,7]", "2<x\\le 7", True),
        ("2<x\\le7", "[2,7]", False),
        ("x>3", "[3,\\infty)", False),
        ("x≥3", "[3,∞)", True),
        ("2 < x ≤ 7", "(2,7]", True),
        ("x<2 \\text{ or } x>5", "(-\\infty,2)\\cup(5,\\infty)", True),
        ("x<2 or x>5", "(-∞,2)∪(5,∞)", True),
        ("x<2 \\cup x>5", "(-∞,2)∪(5,∞)", True),
        ("x \\in (-\\infty,2)\\cup(5,\\infty)", "x<2 \\text{ or } x>5", True),
        ("x\\le2 or x>5", "(-∞,2)∪(5,∞)", False),
        ("x \\leqslant 3", "(-\\infty,3]", True),
        ("\\{x \\mid x>3\\}", "(3,\\infty)", True),
        ("\\{x : 2<x\\le 7\\}", "(2,7]", True),
        ("\\{x \\in \\mathbb{R} \\mid x \\ge 3\\}", "[3,\\infty)", True),
        ("x\\leq 3", "x\\geq 3", False),
        ("-1 \\le x \\le 1", "[-1,1]", True),
        ("-1 \\le x \\le 1", "(-1,1)", False),
        ("x \\neq 2", "(-\\infty,2)\\cup(2,\\infty)", True),
        ("\\left(2,7\\right]", "2<x\\leq 7", True),
        ("x>3", "x\\ge 3", False),
        ("x>3", "3<x", True),
        ("a<3", "(-\\infty,3)", True),
        ("x \\geq \\frac{1}{2}", "\\left[\\frac12,\\infty\\right)", True),
        ("(2,7]", "2\\le x<7", False),
        ("x>3", "(-\\infty,3)", False),
        ("1<x<2 or 3<x<4", "(1,2)\\cup(3,4)", True),
        ("(3,+\\infty)", "x>3", True),
        ("\\mathbb{R}", "(-\\infty,\\infty)", True),
        ("x \\in \\mathbb{R}", "\\mathbb{R}", True),
        ("x<-1 \\text{ or } x \\geq 4", "(-\\infty,-1)\\cup[4,\\infty)", True),
        ("x<-1 \\lor x \\geq 4", "(-\\infty,-1)\\cup[4,\\infty)", True),
    ],
    "euler": [
        ("\\mathrm{e}", "e", True),
        ("\\text{e}", "e", True),
        ("\\frac{1}{\\mathrm{e}}", "\\frac1e", True),
        ("2-\\frac{1}{\\mathrm{e}}", "2-\\frac1e", True),
        ("\\mathrm{e}^2", "e^2", True),
        ("2\\mathrm{i}", "2i", True),
        ("1+\\mathrm{i}", "1+i", True),
        ("\\pi\\mathrm{e}", "e\\pi", True),
        ("1+\\frac{1}{\\mathrm{e}}", "1-\\frac1e", False),
    ],
    "angles": [
        ("\\langle 1,-2\\rangle", "(1,-2)", True),
        ("\\left\\langle 1,-2\\right\\rangle", "(1,-2)", True),
        ("⟨1,-2⟩", "(1,-2)", True),
        ("\\langle 1,2,3\\rangle", "(1,2,3)", True),
        ("\\langle 1,-2\\rangle", "(1,2)", False),
    ],
    "logarithms": [
        ("\\ln 2", "\\log 2", True),
        ("\\log 100", "2", True),
        ("\\log e", "1", True),
        ("\\ln 2", "\\log_{10} 2", False),
        ("\\log_2 8", "3", True),
        ("\\ln(x+1)", "\\log(x+1)", True),
        ("\\ln 2", "\\ln 3", False),
        ("\\log_{10} 2", "\\log 2", True),
        ("2\\ln 3", "\\ln 9", True),
    ],
    "bases": [
        ("1101_2", "1101_3", False),
        ("(1101)_2", "1101_2", True),
        ("1101_{2}", "1101_2", True),
        ("1101_{10}", "1101_2", False),
        ("1101", "1101_2", True),
        ("1100_2", "1101_2", False),
        ("(1101)_{2}", "1101_{3}", False),
        ("1A_{16}", "1A_{16}", True),
        ("1A_{16}", "1B_{16}", False),
        ("(1101)_2", "1101_3", False),
        ("a_1", "a_1", True),
        ("a_1", "a_2", False),
        ("x_1+x_2", "x_2+x_1", True),
        ("1101", "1101_{2}", True),
        ("11_2, 12_3", "11_2, 12_3", True),
    ],
    "others": [
        ("2\\pi", "2π", True),
        ("−5", "-5", True),
        ("90°", "90^\\circ", True),
        ("x²+1", "x^2+1", True),
        ("2×3", "6", True),
        ("½", "0.5", True),
        ("50\\%", "50", True),
        ("12.5\\%", "12.5\\%", True),
        ("12.5%", "12.5\\%", True),
        ("x^*", "x^*", True),
        ("2*3", "6", True),
        ("\\{1,2\\}", "1, 2", True),
        ("x=5", "5", True),
        ("5 dollars", "5", True),
        ("3 \\text{ cm}", "3", True),
    ],
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_spellings_of_the_same_value_are_equal_both_ways_and_others_are_not(kind: str) -> None:
    for first, second, equal in SPELLINGS[kind]:
        assert is_correct(f"\\boxed{{{first}}}", second) is equal, (first, second)
        assert is_correct(f"\\boxed{{{second}}}", first) is equal, (second, first)


# --- What is found is what is judged ----------------------------------------------------------------------------------

FOUND: list[tuple[str, str | None, str, bool]] = [
    ("12 + 46\n\nAnswer: **58**", "58", "58", True),
    ("12 + 46\n\n**Answer: 58**", "58", "58", True),
    ("12 + 46\n\n**Answer: 58.**", "58", "58", True),
    ("12 + 46\n\nAnswer: `58`", "58", "58", True),
    ("12 + 46\n\n#### **58**", "58", "58", True),
    ("First \\boxed{4} and no, wrong. It is \\boxed{9}", "9", "9", True),
    ("<think>so we could have \\boxed{42} but let me check", None, "42", False),
    ("<think>\\boxed{42}</think>", None, "42", False),
    ("\\boxed{1101_2}", "1101_2", "1101_3", False),
    ("\\boxed{√5}", "√5", "\\sqrt{5}", True),
    ("\\boxed{\\langle 1, -2 \\rangle}", "\\langle 1, -2 \\rangle", "(1,-2)", True),
    ("\\boxed{€15}", "€15", "15", True),
    ("\\boxed{\\emptyset}", "\\emptyset", "\\varnothing", True),
    ("\\boxed{\\ln 2}", "\\ln 2", "\\log 2", True),
    ("\\boxed{0.\\overline{3}}", "0.\\overline{3}", "\\frac{1}{3}", True),
    ("\\boxed{2 < x \\le 7}", "2 < x \\le 7", "(2, 7]", True),
    ("\\boxed{2 - \\frac{1}{\\mathrm{e}}}", "2 - \\frac{1}{\\mathrm{e}}", "2-\\frac1e", True),
    ("The answer is (2, \\frac{\\pi}{4})", "(2, \\frac{\\pi}{4})", "\\left( 2, \\frac{\\pi}{4} \\right)", True),
    ("First \\boxed{4} and no, wrong. It is \\boxed{9}", "9", "4", False),
    ("First \\boxed{4} and no, wrong. It is \\boxed{9}", "9", "4,9", False),
    ("x=\\boxed{1} and y=\\boxed{2}", "1, 2", "1,2", True),
    ("$x=\\boxed{1}$, $y=\\boxed{2}$", "1, 2", "1,2", True),
    ("\\boxed{4}\n\nWait, \\boxed{9}", "9", "9", True),
    ("\\boxed{4}, then \\boxed{9}", "9", "9", True),
    ("The answer is \\boxed{42", "42", "42", True),
    ("\\boxed{42", "42", "42", True),
    ("$\\boxed{42$", "42", "42", True),
    ("\\boxed{\\frac{1}{2}", "\\frac{1}{2", "2", False),
    ("<answer>James delivers 1000 bags in 5 days.", "5", "1000", False),
    ("<answer>James delivers 1000 bags in 5 days.", "5", "5", True),
    ("The answer is (2, \\frac{\\pi}{4}).", "(2, \\frac{\\pi}{4})", "(2,\\pi/4)", True),
    ("The answer is $3$ and $4$.", "3, 4", "3,4", True),
    ("So $x=3$ or $x=4$.", "x=3, x=4", "3,4", True),
    ("The answer is 5. I used 3 facts.", "5", "5", True),
    ("The final answer is $\\frac{1}{2}$. There are 3 ways", "\\frac{1}{2}", "1/2", True),
    ("<think>\\boxed{42}</think> It is \\boxed{43}", "43", "43", True),
    ("<think>a</think>42", "42", "42", True),
    ("\\boxed{42} </think> \\boxed{41}", "41", "41", True),
    ("no <think> 42", None, "42", False),
    ("it is 50%", "50%", "50", True),
    ("the cost is \\$5 and \\$7", "7", "7", True),
    ("it is .5", ".5", "0.5", True),
    ("Answer: \\frac{1}{2} of the cake", "\\frac{1}{2}", "1/2", True),
    ("Answer: 58 dollars", "58", "58", True),
    ("#### 58 dollars", "58", "58", True),
    ("Answer: 3\\sqrt{2} cm", "3\\sqrt{2} cm", "3\\sqrt2", True),
    ("Answer: (1, 2)", "(1, 2)", "(1,2)", True),
    ("Answer: x^*", "x^*", "x^*", True),
    ("The answer is 10 000.", "10 000", "10000", True),
    ("it is 10 000 in all", "10 000", "10000", True),
    ("Answer: 2*3", "2*3", "6", True),
    ("**Answer: 2*3**", "2*3", "6", True),
    ("Answer: **2*3**", "2*3", "6", True),
    ("Answer: yes", "yes", "\\text{yes}", True),
    ("**Answer:** **yes**", "yes", "\\text{yes}", True),
    ("Answer: $x=1$ and $y=2$", "x=1, y=2", "x=1,y=2", True),
    ("= 10 - 5 = 5", "5", "5", True),
    ("thus 10-5", "5", "5", True),
]
"""Completion, the answer in it, the reference, and whether they are equal."""


def test_one_answer_is_found_and_judged() -> None:
    for text, found, answer, equal in FOUND:
        assert extract_answer(text) == found, text
        assert is_correct(text, answer) is equal, text
        if found is not None:
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


def test_a_reference_solution_follows_the_thought_that_its_prompt_opened() -> None:
    rows = Rows(is_correct, ("a", "4", "2+2=\\boxed{4}"), ("b", "5", "\\boxed{5}"))
    rows.eval_prompts = [replace(prompt, text="?<think>\n") for prompt in rows.eval_prompts]
    assert check_grader("rows", rows, GRADING).disagreements == []
