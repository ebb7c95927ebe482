"""Prompts without reference answers: texts and messages become prompts, and rewards alone judge."""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from task_cases import byte_tokenizer

from srtrl.tasks import math, prompts
from srtrl.tasks.row_task import RowTask

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
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
    checked = task.Options.model_validate({"train": write_rows(tmp_path / "rows.jsonl", rows), **options})  # type: ignore[attr-defined]
    task.check_options(checked)
    return task(checked, tokenizer=tokenizer, max_prompt_tokens=100)


WRAPPED: dict[str, Any] = {"chat_template": True}
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
]


@pytest.mark.parametrize(("value", "options", "text"), RENDERED)
def test_texts_and_messages_become_prompts(tmp_path: Path, value: Any, options: dict[str, Any], text: str) -> None:
    [prompt] = load(tmp_path, {"prompt": value}, **options).train_prompts
    assert prompt.text == text
    bos = () if "<bot>" in text else (0,)
    assert bytes_of(prompt.token_ids[len(bos) :]) == text
    assert prompt.token_ids[: len(bos)] == bos  # a chat template has added what is needed


def bytes_of(token_ids: Sequence[int]) -> str:
    return str(byte_tokenizer().decode(list(token_ids)))


def test_rewards_see_the_whole_row(tmp_path: Path) -> None:
    row = {"text": "Hi?", "id": "a", "style": {"tone": "calm"}, "target": 7}
    names: dict[str, Any] = {"prompt_field": "text", "id_field": "id", "answer_field": "target"}
    task = load(tmp_path, row, **names)
    [prompt] = task.train_prompts
    assert (prompt.prompt_id, prompt.answer, prompt.metadata) == ("a", "7", row)
    assert task.eval_prompts == []
    assert task.load_report == {"train/rows": 1, "train/malformed": 0, "train/overlong": 0}
    [prompt] = load(tmp_path, row, prompt_field="text").train_prompts
    assert (prompt.prompt_id, prompt.answer) == ("rows.jsonl:1", "")
    with pytest.raises(ValueError, match=r"^rows\.jsonl:1 has no solution: the rows of this task hold prompts only"):
        task.solution(prompt)


def test_mathematics_takes_messages_too(tmp_path: Path) -> None:
    row = {"problem": [SYSTEM, {"role": "user", "content": " 1+1?\n"}], "answer": "1", "choices": [1, 2]}
    template: dict[str, Any] = {"prompt_template": "{problem}\nPut the letter into \\boxed{}."}
    [prompt] = load(tmp_path, row, task=math.Task, choices_field="choices", **template).train_prompts
    expected = "<system>Be kind.<user>1+1?\nA. 1\nB. 2\nPut the letter into \\boxed{}.<bot>"
    assert (prompt.text, prompt.answer) == (expected, "B")
    [prompt] = load(tmp_path, {"problem": "1+1?", "answer": "2"}, task=math.Task).train_prompts
    assert prompt.text == "1+1?", "nothing is added to a problem unless the recipe says so"


WRONG_ROWS: list[tuple[Any, str]] = [
    ([], "field `prompt` is an empty list; expected messages"),
    (["Hi?"], 'prompt.0: expected {"role": ..., "content": ...}, found \'Hi?\''),
    ([USER, {"content": "x"}], 'prompt.1: expected {"role": ..., "content": ...}, found'),
    ([{"role": "user"}], "field `prompt.0.content` must be a text or a number, it is NoneType"),
    ([{"role": "user", "content": [{"type": "image"}]}], "field `prompt.0.content` must be a text or a number"),
    (TURNS[:2], "the last message of `prompt` must be the user's, it is of the role assistant"),
    ("", "field `prompt` is empty"),
    ({}, "field `prompt` must be a text or a number, it is dict"),
]


@pytest.mark.parametrize(("value", "message"), WRONG_ROWS)
def test_wrong_rows_name_their_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: Any, message: str
) -> None:
    rows = [{"prompt": [USER]}, {"prompt": value}]
    with pytest.raises(ValueError, match=re.escape(f"rows.jsonl:2: {message}")):
        load(tmp_path, *rows)
    with caplog.at_level(logging.WARNING):
        assert len(load(tmp_path, *rows, malformed_rows="skip").train_prompts) == 1
    assert message in caplog.text


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    for value, options in (([USER], {}), ("Hi?", WRAPPED)):
        with pytest.raises(ValueError, match=r"^task\.options\.chat_template: the tokenizer has no chat template"):
            load(tmp_path, {"prompt": value}, chat=None, **options)
    with pytest.raises(ValueError, match="refuses: only the user"):
        load(tmp_path, {"prompt": [USER]}, chat="{{ raise_exception('only the user') }}")
    mixed = [{"prompt": [USER]}, {"prompt": "Hi?"}]
    with pytest.raises(ValueError, match=r"^task\.options\.train: some rows hold messages, others a text; set chat_t"):
        load(tmp_path, *mixed)
    assert len(load(tmp_path, *mixed, **WRAPPED).train_prompts) == 2
    with pytest.raises(ValueError, match="yet to be trained has no chat template"):
        list(prompts.Task.texts(prompts.PromptsOptions.model_validate({"train": write_rows(tmp_path / "m", mixed)})))


def test_wrong_options(tmp_path: Path) -> None:
    for options, message in (
        ({"prompt_template": "{problem}"}, "prompt_template must contain {prompt}, found '{problem}'"),
        ({"system_prompt": "x"}, "system_prompt needs chat_template"),
        ({"train": None}, "name the prompts: `train`, `eval` or both"),
        ({"problem_field": "x"}, "Extra inputs are not permitted"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            load(tmp_path, {"prompt": "x"}, **options)
