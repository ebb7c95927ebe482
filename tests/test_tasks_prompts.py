"""Prompts without reference answers: texts and messages become prompts, and rewards alone judge."""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from bench_cases import run as command
from task_cases import byte_tokenizer
from tiny_run import make_recipe, train

from srtrl.build import run_training
from srtrl.checks import build_checked, check_recipe
from srtrl.metrics import read_metrics
from srtrl.recipe.file import dump_recipe, read_source
from srtrl.recipe.schema import Recipe
from srtrl.report.page import write_report
from srtrl.run.metrics import run_figures
from srtrl.statistics import mean_interval
from srtrl.tasks import math, prompts
from srtrl.tasks.base import load_task
from srtrl.tasks.grading import Grader
from srtrl.tasks.reward_input import RewardInput
from srtrl.tasks.row_task import RowTask

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if calm %}, calm{% endif %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
USER = {"role": "user", "content": "Hi?\n"}
SYSTEM = {"role": "system", "content": "Be kind."}
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, USER]


def write_rows(path: Path, rows: Sequence[Any]) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"files": [str(path)]}


def load(
    tmp_path: Path, *rows: Any, task: type[RowTask[Any]] = prompts.Task, chat: str | None = CHAT, **options: Any
) -> RowTask[Any]:
    """The task of these rows, those to train on, for a tokenizer of bytes."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat
    checked = task.Options.model_validate({"train": write_rows(tmp_path / "rows.jsonl", rows), **options})
    task.check_options(checked)
    return task(checked, tokenizer=tokenizer, max_prompt_tokens=100)


WRAPPED: dict[str, Any] = {"chat_template": True}
FILLED = "[3, 25] [3, 25] calm \\boxed{target} { x } {}"
RENDERED: list[tuple[Any, dict[str, Any], str]] = [
    (" Hi?\n", {}, " Hi?\n"),  # to the byte: neither stripped nor added to
    ("Hi?", {"prompt_template": "{prompt} {x}"}, "Hi? {x}"),
    ("Hi?", WRAPPED, "<user>Hi?<bot>"),
    ("Hi?", {**WRAPPED, "system_prompt": "Be brief."}, "<system>Be brief.<user>Hi?<bot>"),
    ([USER], {}, "<user>Hi?\n<bot>"),
    (TURNS, {}, "<user>a<assistant>b<user>Hi?\n<bot>"),
    (TURNS, {"prompt_template": "Q: {prompt}"}, "<user>a<assistant>b<user>Q: Hi?\n<bot>"),
    ([USER], {**WRAPPED, "system_prompt": "Be brief."}, "<system>Be brief.<user>Hi?\n<bot>"),
    ([SYSTEM, USER], {**WRAPPED, "system_prompt": "Be brief."}, "<system>Be kind.<user>Hi?\n<bot>"),
    ([USER], {"system_prompt": "Be brief."}, "<system>Be brief.<user>Hi?\n<bot>"),  # messages need no option
    ([USER], {"chat_template_options": {"calm": True}}, "<user>Hi?\n, calm<bot>"),
    ("Hi?", {"prompt_template": "{nums} {nums}{style.tone} \\boxed{target} { x } {}"}, FILLED),
    ("Hi?", {"prompt_template": "{target}: {texts}", **WRAPPED}, '<user>7: ["a", "{target}"]<bot>'),
]
OTHERS = {"nums": [3, 25], "target": 7, "style": {"tone": " calm"}, "texts": ["a", "{target}"], "images": []}


def test_texts_and_messages_become_prompts(tmp_path: Path) -> None:
    for value, options, text in RENDERED:
        [prompt] = load(tmp_path, {"prompt": value, **OTHERS}, **options).train_prompts
        assert prompt.text == text
        bos = () if "<bot>" in text else (0,)
        assert str(byte_tokenizer().decode(list(prompt.token_ids[len(bos) :]))) == text
        assert prompt.token_ids[: len(bos)] == bos  # a chat template has added what is needed


REFERENCES: list[tuple[Any, tuple[str, ...]]] = [
    ("a", ("a",)),
    (7, ("7",)),
    (["a", 7], ("a", "7")),
    *((nothing, ("",)) for nothing in ("", None, [], {"a": 1}, ["a", None])),
]
"""Of the field `answer`, which needs no option; what is neither a text nor a number is left to the row."""


def test_rewards_see_the_whole_row(tmp_path: Path) -> None:
    row = {"text": "Hi?", "id": "a", "style": {"tone": "calm"}, "target": 7}
    names: dict[str, Any] = {"prompt_field": "text", "id_field": "id", "answer_field": "target"}
    task = load(tmp_path, row | {"answer": "of no interest"}, **names)
    [prompt] = task.train_prompts
    assert (prompt.prompt_id, prompt.answer, prompt.metadata) == ("a", "7", row | {"answer": "of no interest"})
    assert task.eval_prompts == []
    assert task.load_report == {"train/rows": 1, "train/malformed": 0, "train/overlong": 0}
    [prompt] = load(tmp_path, row, prompt_field="text").train_prompts
    assert (prompt.prompt_id, prompt.answer) == ("rows.jsonl:1", "")
    for given, answers in REFERENCES:
        [prompt] = load(tmp_path, {"prompt": "Hi?", "answer": given}).train_prompts
        assert (prompt.answers, prompt.answer) == (answers, answers[0])
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: no field `targt`, did you mean `target`"):
        load(tmp_path, row, prompt_template="Make {targt}.")
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: field `answer` must be a text or a number, it is dict"):
        load(tmp_path, {"prompt": "Hi?", "answer": {"a": 1}}, answer_field="answer")
    with pytest.raises(ValueError, match=r"^rows\.jsonl:1 has no solution: the rows of this task hold prompts only"):
        task.solution(prompt)


def test_mathematics_takes_messages_too(tmp_path: Path) -> None:
    row = {"problem": [SYSTEM, {"role": "user", "content": " 1+1?\n"}], "answer": "1", "choices": [1, 2]}
    template: dict[str, Any] = {"prompt_template": "{problem}\nPut the letter into \\boxed{}."}
    [prompt] = load(tmp_path, row, task=math.Task, choices_field="choices", **template).train_prompts
    expected = "<system>Be kind.<user> 1+1?\n\nA. 1\nB. 2\nPut the letter into \\boxed{}.<bot>"
    assert (prompt.text, prompt.answer) == (expected, "B")
    [prompt] = load(tmp_path, {"problem": "1+1?", "answer": "2"}, task=math.Task).train_prompts
    assert prompt.text == "1+1?", "nothing is added to a problem unless the recipe says so"


@pytest.mark.parametrize(
    "value", [" Hi?\n", "\t\nHi?\r\n\n ", "Hi?\u00a0", "\ufeffHi?\u2028", [USER], [SYSTEM, TURNS[0], TURNS[1], USER]]
)
@pytest.mark.parametrize("wrapped", [{}, WRAPPED])
def test_math_and_prompts_give_the_same_tokens(tmp_path: Path, value: Any, wrapped: dict[str, Any]) -> None:
    row = {"prompt": value, "answer": "1"}
    [first] = load(tmp_path, row, **wrapped).train_prompts
    [second] = load(tmp_path, row, task=math.Task, problem_field="prompt", **wrapped).train_prompts
    assert (second.text, second.token_ids) == (first.text, first.token_ids)
    assert isinstance(value, list) or value in second.text


@pytest.mark.parametrize("blank", ["", " ", "\n\t\r\n", "\u00a0"])
def test_a_blank_problem_is_an_error(tmp_path: Path, blank: str) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: field `problem` is empty"):
        load(tmp_path, {"problem": blank, "answer": "1"}, task=math.Task)


def test_what_a_policy_of_texts_cannot_see_is_refused_or_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("images", "image", "videos"):
        row = {"problem": "<image>Find x.", "answer": 5, name: [{"bytes": "aGk="}]}
        with pytest.raises(ValueError, match=rf"rows\.jsonl:1: field `{name}` holds something, and a policy"):
            load(tmp_path, row, task=math.Task)
    assert "`tools`" not in caplog.text
    load(tmp_path, *({"prompt": [USER], "tools": [{"type": "function"}] * n} for n in range(3)))
    assert caplog.text.count("the field `tools` of its rows is not used") == 1


WRONG_ROWS: list[tuple[Any, str]] = [
    ([], "field `prompt` is an empty list; expected messages"),
    (json.dumps(TURNS), "field `prompt` is messages written as one text of JSON: give the list"),
    (["Hi?"], 'prompt.0: expected {"role": ..., "content": ...}, found \'Hi?\''),
    ([USER, {"content": "x"}], 'prompt.1: expected {"role": ..., "content": ...}, found'),
    ([{"role": "user"}], "field `prompt.0.content` must be a text or a number, it is NoneType"),
    ([{"role": "user", "content": [{"type": "image"}]}], "field `prompt.0.content` must be a text or a number"),
    (TURNS[:2], "the last message of `prompt` must be the user's, it is of the role assistant"),
]


def test_wrong_rows_name_their_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for value, message in WRONG_ROWS:
        rows = [{"prompt": [USER]}, {"prompt": value}]
        with pytest.raises(ValueError, match=re.escape(f"rows.jsonl:2: {message}")):
            load(tmp_path, *rows)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert len(load(tmp_path, *rows, malformed_rows="skip").train_prompts) == 1
        assert message in caplog.text


MISSING: list[tuple[dict[str, Any], Any, str]] = [
    ({"messages": [USER], "target": 1}, prompts.Task, "prompt_field: messages"),
    ({"question": "1+1?", "answer": "2"}, math.Task, "problem_field: question"),
    ({"prompt": [USER], "answer": "2"}, math.Task, "problem_field: prompt"),
    ({"problem": "1+1?", "reply": "2"}, math.Task, "answer_field to one of them"),
    ({"words": "Hi?"}, prompts.Task, "prompt_field to one of them"),
]


def test_a_row_of_other_fields_says_which_option_to_set(tmp_path: Path) -> None:
    for row, task, option in MISSING:
        fields = f"its fields are {', '.join(row)}: set task.options.{option}"
        with pytest.raises(ValueError, match=re.escape(f"{fields} (or set task.options.malformed_rows: skip)")):
            load(tmp_path, row, task=task)


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    for value, options in (([USER], {}), ("Hi?", WRAPPED)):
        with pytest.raises(ValueError, match=r"^task\.options\.chat_template .*: the tokenizer has no chat template"):
            load(tmp_path, {"prompt": value}, chat=None, **options)
    with pytest.raises(ValueError, match="refuses: only the user"):
        load(tmp_path, {"prompt": [USER]}, chat="{{ raise_exception('only the user') }}")
    mixed = [{"prompt": [USER]}, {"prompt": "Hi?"}]
    with pytest.raises(ValueError, match=r"^task\.options\.train: some rows hold messages, others a text; set chat_t"):
        load(tmp_path, *mixed)
    assert len(load(tmp_path, *mixed, **WRAPPED).train_prompts) == 2


# --- Without a verifier -----------------------------------------------------------------------------------------------


def tone(sample: RewardInput) -> float:
    """What a user's reward may read: its row, and no verdict."""
    assert sample.correct is None
    return float(sample.prompt.metadata["weight"] * len(sample.text))


def recipe_of(policy: Path, folder: Path, **changes: Any) -> Recipe:
    rows = write_rows(folder / "rows.jsonl", [{"prompt": f"Say {n}\n", "weight": -n} for n in range(5)])
    task = {"name": "prompts", "options": {"train": rows, "eval": rows}}
    rewards = [{"name": "test_tasks_prompts:tone"}]
    return make_recipe(policy, folder / "runs", **{"task": task, "rewards": rewards, "train__num_steps": 2} | changes)


def test_a_run_without_verdicts_shows_rewards_and_no_accuracy(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_training(recipe_of(policy, tmp_path))
    said = capsys.readouterr().out
    assert "first training prompt, rows.jsonl:1 (6 tokens):\n| Say 0\n| \n" in said
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert len(rows) == 3
    for row in rows:
        assert not re.search("accuracy|solved|pass_at|all_right|all_wrong|correct|wrong", " ".join(row))
    assert [row["grading/graded"] for row in rows[1:]] == [16, 16]
    held_out = [row for row in rows if "eval/reward" in row]
    assert [row["step"] for row in held_out] == [0, 2]
    for row in held_out:
        assert row["eval/reward_low"] < row["eval/reward"] < row["eval/reward_high"] < 0
        shown = "held-out reward {eval/reward:.3f} (95%: {eval/reward_low:.3f} to {eval/reward_high:.3f})"
        assert shown.format_map(row) in said
    assert run_figures(rows)["gain"] == f"{held_out[1]['eval/reward'] - held_out[0]['eval/reward']:+.3f}"
    page = write_report(result.folder).read_text(encoding="utf-8")
    for text in (said, page.partition("<details")[0]):
        assert "accuracy" not in text.lower()


def test_eval_shows_the_reward(policy: Path, tmp_path: Path) -> None:
    recipe = recipe_of(policy, tmp_path)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    arguments = ("eval", policy, "--recipe", tmp_path / "recipe.yaml", "eval.num_samples=2")
    result = command(*arguments, "--output", tmp_path / "samples.jsonl")
    assert "mean reward (95% interval)" in result.stdout
    assert not re.search(r"avg@N|pass@|maj@", result.stdout)
    record = json.loads(command(*arguments, "--json").stdout)
    assert (record["estimates"], record["eval/grading/graded"]) == ({}, 10)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {(one["correct"], one["outcome"]) for one in samples} == {(None, "graded")}
    assert record["eval/reward"] == pytest.approx(fmean(one["reward"] for one in samples))
    by_problem = [fmean(one["reward"] for one in samples[start : start + 2]) for start in range(0, 10, 2)]
    assert [record["eval/reward_low"], record["eval/reward_high"]] == list(mean_interval(by_problem))


def test_the_example_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
    section = page.partition("## Prompts without answers")[2]
    json_rows, recipe, reward = re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)[:3]
    monkeypatch.chdir(tmp_path)
    for name, text in (("prompts.jsonl", json_rows), ("held_out.jsonl", json_rows), ("recipe.yaml", recipe)):
        Path(name).write_text(text, encoding="utf-8")
    Path("my_rewards.py").write_text(reward, encoding="utf-8")
    sizes = ["rollout.max_prompt_tokens=64", "rollout.max_new_tokens=8"]
    checked = build_checked(read_source(Path("recipe.yaml"), ["model.path=bundled:tiny", *sizes]))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    task = load_task(checked, tokenizer)
    assert [prompt.text.count("<user>") for prompt in task.eval_prompts] == [1, 1]
    with Grader(task, checked.rewards, checked.grading, max_new_tokens=8) as grader:
        texts = ("word " * 8, "word " * 9, "word " * 12, "word " * 13)
        tickets = [grader.submit(prompt, text, "stop", 1) for prompt in task.train_prompts for text in texts]
        assert [grade.reward for grade in grader.collect(tickets)] == [1, 1, 1, 0, 1, 0, 0, 0]


class Own(prompts.Task):
    """As a user may write it: that there is no verifier shows only once the task is loaded."""

    verifier = property(lambda self: None)


def test_what_needs_a_verdict_is_refused(policy: Path, tmp_path: Path) -> None:
    asks = "rewards.0.name: `correct` (the default) asks whether a completion is"
    for changes, message in (
        ({"rewards": [{"name": "correct"}]}, asks),
        ({"algorithm__filters": ["drop_all_right_or_wrong"]}, "algorithm.filters.0: drop_all_right_or_wrong asks"),
    ):
        recipe = recipe_of(policy, tmp_path, **changes)
        for refuse in (check_recipe, train):
            with pytest.raises(ValueError, match=re.escape(message)):
                refuse(recipe)
        assert not (tmp_path / "runs").exists()
    task = {"name": "test_tasks_prompts:Own", "options": recipe.task.options}
    recipe = recipe_of(policy, tmp_path, task=task, rewards=[{"name": "correct"}])
    check_recipe(recipe)
    with pytest.raises(ValueError, match=f"^{re.escape(asks)}"):
        load_task(recipe, byte_tokenizer())
