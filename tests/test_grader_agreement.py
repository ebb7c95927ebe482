"""The grader against reference solutions: it accepts its own, refuses those of other problems, and says where not."""

import json
from pathlib import Path
from typing import Any

import pytest
import rollout_cases
from bench_cases import run
from recipe_cases import recipe_text
from task_cases import Rows, prompt_of

from srtrl.evaluation.grader_check import check_grader
from srtrl.recipe.schema import AlgorithmSection, GradingSection, RewardSection
from srtrl.tasks.arithmetic import is_correct as is_integer
from srtrl.tasks.final_answer import extract_answer
from srtrl.tasks.grading import Grader
from srtrl.tasks.math_verifier import is_correct
from srtrl.trainer.credit import groups_to_learn_from

GRADING = GradingSection(num_workers=1, timeout_seconds=0.6)
KNOWN = {("math500", "test/algebra/2193.json", "other solution")}
"""Row 23's answer is 5, row 24's is x=5: the same value."""


def check(*arguments: object) -> list[dict[str, Any]]:
    result = run("eval", "--check-grader", "--suite", "math", *arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    reports: list[dict[str, Any]] = json.loads(result.stdout)
    return reports


FEW, ALL = {"gsm8k": 8, "olympiadbench": 8}, {"gsm8k": 1319, "math500": 500, "olympiadbench": 675}
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("num_rows", "num_workers"), [(FEW, 1), pytest.param(ALL, 2, marks=SLOW)])
def test_the_grader_agrees_with_reference_solutions(
    shared_data: Path, num_rows: dict[str, int], num_workers: int
) -> None:
    sizes = f"eval.num_problems={max(num_rows.values())}", f"grading.num_workers={num_workers}"
    reports = check("--data-dir", shared_data / "math", "--only", ",".join(num_rows), *sizes)
    assert [report["name"] for report in reports] == list(num_rows)
    for report, num in zip(reports, num_rows.values(), strict=True):
        assert report["num_rows"] == report["num_asked"]["boxed answer"] == num
        assert report["num_asked"]["solution"] == (0 if report["name"] == "olympiadbench" else num)
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


def test_a_response_that_cannot_be_graded_is_not_better_than_an_incorrect_one() -> None:
    """It would be, with its reward of 0, if it were learned from."""
    rewards = [RewardSection(name="correct", options={"incorrect": -1.0})]
    with Grader(Rows(is_correct), rewards, GRADING, 10) as grader:
        texts = [rf"\boxed{{{answer}}}" for answer in ("5", "6", "9^{9^{9^{9}}}")]
        grades = grader.collect([grader.submit(prompt_of("5"), text, "stop", 3) for text in texts])
    assert [(grade.outcome, grade.reward) for grade in grades] == [("correct", 1.0), ("wrong", -1.0), ("timeout", 0.0)]
    [kept] = groups_to_learn_from([rollout_cases.graded(grades)], AlgorithmSection())
    assert [rollout.grade for rollout in kept.rollouts] == grades[:2]


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
    (tmp_path / "recipe.yaml").write_text(recipe_text())
    result = run("eval", "--check-grader", "--recipe", tmp_path / "recipe.yaml", "eval.num_problems=4")
    assert (result.exit_code, result.stderr) == (0, "")
    assert (result.stdout.count("4 of 4"), result.stdout.count("0 of 4")) == (2, 1)  # arithmetic's answers have no box


def test_what_is_extracted_is_what_was_graded(shared_data: Path) -> None:
    """The extracted text, put into a box, has the grade of the whole completion (recorded samples of real policies)."""
    rows = (shared_data / "rollouts" / "qwen_math_cot_100x8.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, rows[:12]):
        for sample in row["samples"]:
            extracted = extract_answer(sample["text"])
            boxed = extracted is not None and is_correct(f"\\boxed{{{extracted}}}", row["answer"])
            assert boxed is is_correct(sample["text"], row["answer"]) is sample["correct"]
