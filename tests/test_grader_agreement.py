"""The grader against reference solutions: it accepts its own, refuses those of other problems, and says where not."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench_cases import run, write_rows
from recipe_cases import MINIMAL
from task_cases import Rows

from srtrl.evaluation.grader_check import check_grader
from srtrl.recipe.schema import GradingSection
from srtrl.tasks.arithmetic import is_correct as is_integer
from srtrl.tasks.final_answer import extract_answer
from srtrl.tasks.math_verifier import is_correct

GRADING = GradingSection(num_workers=1, timeout_seconds=0.6)
KNOWN = {("math500", "test/algebra/2193.json", "other solution")}
"""Row 23's answer is 5, row 24's is x=5: the same value."""


def check(*arguments: object) -> list[dict[str, Any]]:
    result = run("eval", "--check-grader", "--suite", "math", *arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    reports: list[dict[str, Any]] = json.loads(result.stdout)
    return reports


@pytest.mark.parametrize(
    "num_rows", [(6, 6, 6), pytest.param((1319, 500, 675), marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_the_grader_agrees_with_reference_solutions(shared_data: Path, num_rows: tuple[int, int, int]) -> None:
    only = "gsm8k,math500,olympiadbench"
    reports = check(
        "--data-dir",
        shared_data / "math",
        "--only",
        only,
        f"eval.num_problems={max(num_rows)}",
        "grading.num_workers=1",
    )
    for report, num, has_solutions in zip(reports, num_rows, (True, True, False), strict=True):
        assert report["num_rows"] == report["num_asked"]["boxed answer"] == num
        assert report["num_asked"]["solution"] == (num if has_solutions else 0)
        assert report["num_asked"]["other solution"] >= 0.85 * num
        found = {(report["name"], one["prompt_id"], one["question"]) for one in report["disagreements"]}
        assert found <= KNOWN


def test_each_way_to_disagree_is_said_with_its_reason_and_what_cannot_be_graded_is_not_wrong() -> None:
    rows = Rows(
        is_correct,
        ("bomb", "4", "\\boxed{(10^{9})! + (10^{9}+1)!}"),
        ("right", "4", "2+2=\\boxed{4}"),
        ("wrong", "5", "2+2=\\boxed{4}"),
        ("silent", "6", "who knows"),
        ("none", "7", None),
        ("unreadable", "}", "\\boxed{8}"),
    )
    report = check_grader("rows", rows, GRADING)
    assert report.num_asked == {"solution": 5, "boxed answer": 6, "other solution": 5}
    assert report.num_agreed == {"solution": 1, "boxed answer": 5, "other solution": 4}
    found = [(one.prompt_id, one.question, one.reason) for one in report.disagreements]
    assert found[:3] == [
        ("bomb", "solution", "timeout: more than 0.6 CPU seconds, also when retried alone"),
        ("wrong", "solution", "found '4', the reference is '5'"),
        ("silent", "solution", "no answer was found, the reference is '6'"),
    ]
    assert [one[:2] for one in found[3:]] == [("unreadable", question) for question in report.num_asked]
    assert all("math-verify cannot read the reference answer '}'" in one[2] for one in found[3:])


def test_a_verifier_of_this_process_that_accepts_everything_is_found_out() -> None:
    rows = (("a", "4", "Answer: 4"), ("b", "4", "Answer: 4"), ("c", "5", "Answer: 5"))  # equal answers need not differ
    honest = check_grader("rows", Rows(is_integer, *rows), GRADING)
    assert [one.question for one in honest.disagreements] == ["boxed answer"] * 3  # arithmetic's answers have no box
    report = check_grader("rows", Rows(lambda text, answer: True, *rows), GRADING)
    assert [(one.prompt_id, one.question) for one in report.disagreements] == [
        ("a", "other solution"),
        ("c", "other solution"),
    ]


def test_a_recipe_s_task_is_checked_too(tmp_path: Path) -> None:
    rows = [{"problem": f"{n}+1?", "answer": str(n + 1), "solution": f"\\boxed{{{n + 1}}}"} for n in range(5)]
    file, recipe = write_rows(tmp_path / "rows.jsonl", *rows), tmp_path / "recipe.yaml"
    task = f"name: math\n  options: {{eval: {{files: ['{file}']}}}}"
    recipe.write_text(MINIMAL.replace("name: arithmetic", task))
    result = run("eval", "--check-grader", "--recipe", recipe, "eval.num_problems=4", "grading.num_workers=1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("4 of 4") == 3


def test_what_is_extracted_is_what_was_graded(shared_data: Path) -> None:
    """The extracted text, put into a box, has the grade of the whole completion (recorded samples of real policies)."""
    rows = (shared_data / "rollouts" / "qwen_math_cot_100x8.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, rows[:12]):
        for sample in row["samples"]:
            extracted = extract_answer(sample["text"])
            boxed = extracted is not None and is_correct(f"\\boxed{{{extracted}}}", row["answer"])
            assert boxed is is_correct(sample["text"], row["answer"]) is sample["correct"]
