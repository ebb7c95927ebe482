"""The grader against reference solutions: it accepts its own, refuses those of other problems, and says where not."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_cli import run

from srtrl.evaluation.grader_check import ReferenceRow, check_grader, disagreement_lines
from srtrl.recipe import GradingSection
from srtrl.tasks.arithmetic import is_correct as is_integer
from srtrl.tasks.final_answer import extract_answer
from srtrl.tasks.math_verifier import is_correct

GRADING = GradingSection(num_workers=2, timeout_seconds=10.0)
KNOWN = {("math500", "test/algebra/2193.json", "other solution")}
"""Row 23's answer is 5, row 24's is x=5: the same value."""


def check(*arguments: object) -> list[dict[str, Any]]:
    result = run("eval", "--check-grader", "--suite", "math", *arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    reports: list[dict[str, Any]] = json.loads(result.stdout)
    return reports


def test_a_sample_of_reference_solutions(shared_data: Path) -> None:
    gsm8k, math500 = check("--data-dir", shared_data / "math", "--only", "gsm8k,math500", "--problems", 40)
    for report in (gsm8k, math500):
        assert report["num_rows"] == 40
        assert report["num_asked"]["solution"] == report["num_asked"]["boxed answer"] == 40
        assert report["num_asked"]["other solution"] >= 35
        found = {(report["name"], one["prompt_id"], one["question"]) for one in report["disagreements"]}
        assert found <= KNOWN


@pytest.mark.slow
def test_all_reference_solutions(shared_data: Path) -> None:
    only = "gsm8k,math500,olympiadbench"
    gsm8k, math500, olympiad = check("--data-dir", shared_data / "math", "--only", only)
    assert (gsm8k["num_asked"]["solution"], math500["num_asked"]["solution"]) == (1319, 500)
    assert olympiad["num_asked"]["solution"] == 0  # its rows have none
    assert olympiad["num_asked"]["boxed answer"] == 675
    for report in (gsm8k, math500, olympiad):
        found = {(report["name"], one["prompt_id"], one["question"]) for one in report["disagreements"]}
        assert found <= KNOWN


def test_each_way_to_disagree_is_said_with_its_reason() -> None:
    rows = [
        ReferenceRow(prompt_id="right", answer="4", solution="2+2=\\boxed{4}"),
        ReferenceRow(prompt_id="wrong", answer="5", solution="2+2=\\boxed{4}"),
        ReferenceRow(prompt_id="silent", answer="6", solution="who knows"),
        ReferenceRow(prompt_id="none", answer="7", solution=None),
        ReferenceRow(prompt_id="unreadable", answer="}", solution="\\boxed{8}"),
    ]
    report = check_grader("rows", "here", rows, is_correct, GRADING)
    assert report.num_asked == {"solution": 4, "boxed answer": 5, "other solution": 5}
    assert [report.num_agreed(question) for question in report.num_asked] == [1, 4, 4]
    lines = disagreement_lines([report])
    assert lines[:2] == [
        "rows wrong: solution: found '4', the reference is '5'",
        "rows silent: solution: no answer was found, the reference is '6'",
    ]
    assert len(lines) == 5
    for line, question in zip(lines[2:], ("solution", "boxed answer", "other solution"), strict=True):
        assert line.startswith(f"rows unreadable: {question}: error: ")
        assert "math-verify cannot read the reference answer '}'" in line


def test_a_verifier_of_this_process_that_accepts_everything_is_found_out() -> None:
    rows = [
        ReferenceRow(prompt_id="a", answer="4", solution="Answer: 4"),
        ReferenceRow(prompt_id="b", answer="4", solution="Answer: 4"),  # equal answers are not asked to differ
        ReferenceRow(prompt_id="c", answer="5", solution="Answer: 5"),
    ]
    honest = check_grader("rows", "here", rows, is_integer, GRADING)
    assert [one.question for one in honest.disagreements] == ["boxed answer"] * 3  # arithmetic's answers have no box
    report = check_grader("rows", "here", rows, lambda text, answer: True, GRADING)
    assert [(one.prompt_id, one.question) for one in report.disagreements] == [
        ("a", "other solution"),
        ("c", "other solution"),
    ]


def test_a_recipe_s_task_is_checked_too(tmp_path: Path) -> None:
    rows = [{"problem": f"{n}+1?", "answer": str(n + 1), "solution": f"\\boxed{{{n + 1}}}"} for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: check\nmodel: {{path: 'bundled:tiny'}}\n"
        f"task: {{name: math, options: {{eval: {{files: ['{tmp_path}/rows.jsonl']}}}}}}\n"
        "rollout: {num_prompts: 1, num_samples: 2, max_prompt_tokens: 200, max_new_tokens: 8}\n"
        "train: {num_steps: 1}\n"
    )
    result = run("eval", "--check-grader", "--recipe", recipe, "--problems", 4)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("4 of 4") == 3


# --- What the verifier reads beyond math-verify -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "correct"),
    [
        ("work\n#### \\sqrt{51}", "\\sqrt{51}", True),  # LaTeX without dollar signs
        ("work\n#### \\frac{3}{4}", "0.75", True),
        ("work\n#### p - q", "p-q", True),
        ("work\n#### \\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", True),
        ("work\n#### Evelyn", "\\text{Evelyn}", True),
        ("work\n#### 5 dollars", "5", True),
        ("work\n#### The total is 42", "42", True),
        ("work\n#### \\sqrt{52}", "\\sqrt{51}", False),
        ("Answer: 3\\sqrt{13}", "\\sqrt{117}", True),
        ("**Final Answer:** \\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)", True),
        ("Answer: 7\nso \\boxed{8}", "8", True),
        ("<think>1</think>\n<answer>42</answer>", "42", True),  # DeepSeek-R1's format
        ("<answer>\\frac12</answer>", "1/2", True),
        ("<answer>so \\boxed{6}</answer>", "6", True),
        ("<answer>41</answer>", "42", False),
        ("<answer>42</answer> or 43", "43", True),  # not at the end, so not marked
        ("\\boxed{5 dollars}", "5", True),  # words behind a number
        ("\\boxed{12.5 square feet}", "12.5", True),
        ("\\boxed{6 dollars}", "5", False),
        ("\\boxed{5 sin x}", "5", False),
        ("\\boxed{28\\,800}", "28800", True),  # groups of digits
        ("\\boxed{28{,}800}", "28,800", True),
        ("\\fbox{7}", "7", True),
        ("\\boxed{221, 8}", "221,$8", True),  # a stray dollar sign in the reference (OlympiadBench)
        ("\\boxed{\\$5}", "\\$5", True),
    ],
)
def test_forms_of_an_answer(text: str, answer: str, correct: bool) -> None:
    assert is_correct(text, answer) is correct


def test_what_is_extracted_is_what_was_graded(shared_data: Path) -> None:
    """The extracted text, put into a box, has the grade of the whole completion (recorded samples of real policies)."""
    rows = (shared_data / "rollouts" / "qwen_math_cot_100x8.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, rows[:12]):
        for sample in row["samples"]:
            extracted = extract_answer(sample["text"])
            boxed = extracted is not None and is_correct(f"\\boxed{{{extracted}}}", row["answer"])
            assert boxed is is_correct(sample["text"], row["answer"]) is sample["correct"]
