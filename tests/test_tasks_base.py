"""How a recipe's task is found, checked and loaded; every option of a task that is refused."""

import re
from typing import Any

import pytest

from srtrl.recipe.schema import ModelSection, Recipe, RolloutSection, TaskSection, TrainSection
from srtrl.tasks.base import check_task


def recipe_of(name: str, **options: Any) -> Recipe:
    return Recipe(
        name="run",
        model=ModelSection(path="bundled:tiny"),
        task=TaskSection(name=name, options=options),
        rollout=RolloutSection(num_prompts=1, num_samples=2, max_prompt_tokens=40, max_new_tokens=8),
        train=TrainSection(num_steps=1),
    )


FILES = {"train": {"files": ["no.jsonl"]}}
BOXED = {"answer_boxed": True}
HARD = {"min_operations": 1, "max_operations": 1, "max_operand": 3, "num_train": 100, "num_eval": 1}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("arithmetic", {"num_trian": 3}, "task.options.num_trian: unknown key, did you mean `num_train`"),
    ("arithmetic", {"min_operations": 9}, "task.options: min_operations (9) is above max_operations"),
    ("arithmetic", {"max_value": 5, "max_operand": 9}, "task.options: max_value (5) is below max_operand (9)"),
    ("arithmetic", HARD, "different train problems of this difficulty, num_train asks for 100; raise"),
    ("math", {"train": {"file": ["x"]}}, "task.options.train.file: unknown key, did you mean `files`"),
    ("math", FILES, "task.options.train.files.0: no file no.jsonl"),
    ("math", {"train": {"files": ["rows.csv"]}}, "task.options.train.files.0: expected a .jsonl or .parquet file"),
    ("math", {"train": {"files": ["a.jsonl"], "hub": "x/y", "split": "train"}}, "give either `files`"),
    ("math", {"train": {"files": ["a.jsonl"], "split": "train"}}, "belong to `hub`"),
    ("math", {"train": {"hub": "openai/gsm8k"}}, "`split` is missing"),
    ("math", {**FILES, "prompt_template": "problem"}, "prompt_template must contain {problem}"),
    ("prompts", {**FILES, "prompt_template": "{problem}"}, "prompt_template must contain {prompt}, found '{problem}'"),
    ("prompts", {**FILES, "problem_field": "x"}, "task.options.problem_field: unknown key, did you mean `prompt_f"),
    ("math", {**FILES, "system_prompt": "x"}, "system_prompt needs chat_template"),
    ("math", {**FILES, "chat_template_options": {"x": 1}}, "chat_template_options needs chat_template"),
    ("math", {**FILES, "answer_pattern": "####.*"}, "must have exactly one group, it has 0"),
    ("math", {**FILES, "answer_pattern": "(.*)", **BOXED}, "answer_pattern and answer_boxed are different ways"),
    ("math", {**FILES, "choices_field": "choices", **BOXED}, "choices_field and answer_boxed are different ways"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_wrong_names_and_options_fail_before_loading(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_task(recipe_of(name, **options))
