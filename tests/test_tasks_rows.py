"""The tasks of rows, `math` and `prompts`: rows become prompts or are refused; answers; runs without verdicts."""

import json
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from bench_cases import run as command
from task_cases import byte_tokenizer, cases_in, sample_of
from tiny_run import make_recipe
from transformers import AutoTokenizer

from srtrl.build import run_training
from srtrl.checks import build_checked, check_recipe
from srtrl.metrics import read_metrics
from srtrl.recipe.file import dump_recipe, read_source
from srtrl.recipe.schema import Recipe
from srtrl.report.page import write_report
from srtrl.run.metrics import run_figures
from srtrl.statistics import mean_interval
from srtrl.tasks import math, prompts, rewards
from srtrl.tasks.base import load_task
from srtrl.tasks.choices import extract_letter, is_chosen
from srtrl.tasks.final_answer import extract_answer
from srtrl.tasks.grading import Grader
from srtrl.tasks.math_verifier import is_correct
from srtrl.tasks.reward_input import RewardInput
from srtrl.tasks.row_task import RowTask
from srtrl.tasks.rows import RowSource, read_rows

GSM8K: dict[str, Any] = {"problem_field": "question", "answer_pattern": "#### (.+)", "solution_field": "answer"}
ROW = {"problem": "What is 1+1?", "answer": "2", "solution": "1+1=2"}
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if calm %}, calm{% endif %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
USER = {"role": "user", "content": "Hi?\n"}
SYSTEM = {"role": "system", "content": "Be kind."}
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, USER]


def write_rows(path: Path, rows: Sequence[Any]) -> dict[str, Any]:
    """A JSONL file; texts and bytes are written as they are."""
    texts = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    path.write_bytes(b"".join((text if isinstance(text, bytes) else text.encode()) + b"\n" for text in texts))
    return {"files": [str(path)]}


def load(
    source: dict[str, Any],
    task: type[RowTask[Any]] = math.Task,
    *,
    chat: str | None = CHAT,
    max_prompt_tokens: int = 1000,
    **options: Any,
) -> RowTask[Any]:
    """A task with these rows to train on, for a tokenizer of bytes."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat
    checked = task.Options.model_validate({"train": source, **options})
    task.check_options(checked)
    return task(checked, tokenizer=tokenizer, max_prompt_tokens=max_prompt_tokens)


def load_rows(tmp_path: Path, *rows: Any, task: type[RowTask[Any]] = prompts.Task, **options: Any) -> RowTask[Any]:
    return load(write_rows(tmp_path / "rows.jsonl", rows), task, **options)


# --- What is refused --------------------------------------------------------------------------------------------------

ARC = [
    {"text": ["one", "two", "three", "four"], "label": labels} for labels in (list("1234"), list("ABCD"), list("1BC4"))
]
QUESTION = {"problem": "Which is prime?", "choices": ["4", "9", "A square", "13"], "answer": 3, "subject": "maths"}
CHOICES = {"choices_field": "choices"}
LABELS = {"choices_field": "choices.text"}
BOXED = {"answer_field": "solution", "answer_boxed": True}
IMAGE = [{"bytes": "aGk="}]
NO_BOXES = ("1", "\\boxed{1", "\\boxed{ }", "\\boxed{\\}")
MATH_ROWS: list[tuple[dict[str, Any], Any, str]] = [
    ({}, '{"problem": "a", ', "not JSON: "),
    ({}, b'{"problem": "\xff", "answer": "2"}', "not JSON: 'utf-8' codec can't decode byte 0xff"),
    ({}, "[" * 100_000, "not JSON: maximum recursion depth exceeded"),
    ({}, '{"problem": "a", "answer": ' + "9" * 5000 + "}", "not JSON: Exceeds the limit"),
    ({}, '{"problem": "a", "answer": NaN}', "field `answer` must be a text or a number"),
    ({}, '{"problem": "\\ud800", "answer": "2"}', "field `problem` is no valid Unicode"),
    ({}, "[1, 2]", "expected an object with fields, found list"),
    ({}, {"problem": "a"}, "no field `answer`; its fields are problem"),
    ({}, {"problem": "a", "answer": "  "}, "field `answer` is empty"),
    ({}, {"problem": "a", "answer": None}, "field `answer` must be a text or a number, it is NoneType"),
    *(({}, {"problem": blank, "answer": "1"}, "field `problem` is empty") for blank in ("", "\n\t\r\n", "\u00a0")),
    (
        {"problem_field": "probelm"},
        ROW,
        "no field `probelm`, did you mean `problem`?; its fields are problem, answer, ",
    ),
    ({}, {"question": "1+1?", "answer": "2"}, "are question, answer: set task.options.problem_field: question (or"),
    ({}, {"prompt": [USER], "answer": "2"}, "are prompt, answer: set task.options.problem_field: prompt (or"),
    ({}, {"problem": "a", "x": "2"}, "its fields are problem, x: set task.options.answer_field to one of them (or"),
    *(({}, {**ROW, name: IMAGE}, f"field `{name}` holds something") for name in ("images", "image", "videos")),
    *((BOXED, ROW | {"solution": text}, "no answer: `solution` has") for text in NO_BOXES),
    ({"answer_field": "solution", "answer_pattern": "#### (.+)"}, ROW, "no answer: `solution` has no "),
    (CHOICES, QUESTION | {"answer": 4}, "field `answer` must be a letter A to D or an index 0 to 3, it is '4'"),
    (CHOICES, QUESTION | {"answer": "13"}, "field `answer` must be a letter A to D"),
    (CHOICES, QUESTION | {"choices": "4 or 9"}, "field `choices` must be a list of 2 to 26 choices, it is '4 or 9'"),
    (CHOICES, QUESTION | {"choices": ["4", None]}, "field `choices` must hold texts or numbers, it holds None"),
    (CHOICES, QUESTION | {"choices": [{"label": "A"}, {"label": "B"}]}, "field `choices` must hold texts or numbers,"),
    (LABELS, {"problem": "a", "choices": ARC[0], "answer": "5"}, "field `answer` must be one of the choices' labels"),
    (LABELS, {"problem": "a", "choices": ARC[0], "answer": "A"}, "field `answer` must be one of the choices' labels"),
    (LABELS, {"problem": "a", "choices": ARC[1], "answer": "2"}, "field `answer` must be one of the choices' labels"),
    (LABELS, ROW | {"choices": ARC[0] | {"label": ["1", "2", "3"]}}, "field `choices.text` has 4 choices, and as labe"),
    (LABELS, ROW | {"choices": ARC[0] | {"label": ["1", "2", "2", "3"]}}, "field `choices.text` has 4 choices, and as"),
]
PROMPT_ROWS: list[tuple[dict[str, Any], Any, str]] = [
    ({}, {"prompt": []}, "field `prompt` is an empty list; expected messages"),
    ({}, {"prompt": json.dumps(TURNS)}, "field `prompt` is messages written as one text of JSON: give the list"),
    ({}, {"prompt": ["Hi?"]}, 'prompt.0: expected {"role": ..., "content": ...}, found \'Hi?\''),
    ({}, {"prompt": [USER, {"content": "x"}]}, 'prompt.1: expected {"role": ..., "content": ...}, found'),
    ({}, {"prompt": [{"role": "user"}]}, "field `prompt.0.content` must be a text or a number, it is NoneType"),
    ({}, {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "field `prompt.0.content` must be a text or"),
    ({}, {"prompt": TURNS[:2]}, "the last message of `prompt` must be the user's, it is of the role assistant"),
    ({}, {"messages": [USER], "target": 1}, "are messages, target: set task.options.prompt_field: messages (or"),
    ({}, {"words": "Hi?"}, "its fields are words: set task.options.prompt_field to one of them (or"),
    ({"prompt_template": "Make {targt}."}, {"target": 7}, "no field `targt`, did you mean `target`?"),
    (
        {"answer_field": "answer"},
        {"prompt": "Hi?", "answer": {"a": 1}},
        "field `answer` must be a text or a number, it",
    ),
    ({"id_field": "id"}, {"prompt": "a", "id": 7}, "an earlier row has the same `id`, 7 (or"),
]
"""Options, a row in the third line, and the reason."""


def test_a_row_that_cannot_be_used_is_named_with_its_reason_or_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "rows.jsonl"
    source: dict[str, Any] = {"files": [str(file)]}
    cases = [(math.Task, *row) for row in MATH_ROWS] + [(prompts.Task, *row) for row in PROMPT_ROWS]
    for task, options, row, reason in cases:
        write_rows(file, ["", row if "id_field" in options else "", row])
        with pytest.raises(ValueError, match=rf"^{file}:3: .*{re.escape(reason)}.*: skip\)$"):
            load(source, task, **options)
    rows = [row for options, row, _ in MATH_ROWS if not options]
    write_rows(file, [rows[0], ROW, *rows[1:], ROW])
    with caplog.at_level(logging.WARNING):
        skipped = load(source, malformed_rows="skip")
    assert [prompt.prompt_id for prompt in skipped.train_prompts] == ["rows.jsonl:2", f"rows.jsonl:{len(rows) + 2}"]
    assert skipped.load_report == {"train/rows": len(rows) + 2, "train/malformed": len(rows), "train/overlong": 0}
    assert f"skipped {len(rows)} of {len(rows) + 2} rows; the first: {file}:1: not JSON" in caplog.text
    for rows, reason in (([], "there are no rows"), (["x"] * 3, "none of the 3 rows can be used; the first: ")):
        write_rows(file, rows)
        with pytest.raises(ValueError, match=rf"task\.options\.train: {re.escape(str(file))}: {reason}"):
            math.Task(
                math.MathOptions(train=RowSource(**source), malformed_rows="skip"),
                tokenizer=byte_tokenizer(),
                max_prompt_tokens=10,
            )


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    for value, options in (([USER], {}), ("Hi?", WRAPPED)):
        with pytest.raises(ValueError, match=r"^task\.options\.chat_template .*: the tokenizer has no chat template"):
            load_rows(tmp_path, {"prompt": value}, chat=None, **options)
    with pytest.raises(ValueError, match="refuses: only the user"):
        load_rows(tmp_path, {"prompt": [USER]}, chat="{{ raise_exception('only the user') }}")
    mixed = [{"prompt": [USER]}, {"prompt": "Hi?"}]
    with pytest.raises(ValueError, match=r"^task\.options\.train: some rows hold messages, others a text; set chat_t"):
        load_rows(tmp_path, *mixed)
    assert len(load_rows(tmp_path, *mixed, **WRAPPED).train_prompts) == 2


# --- Rows become prompts ----------------------------------------------------------------------------------------------

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
        [prompt] = load_rows(tmp_path, {"prompt": value, **OTHERS}, **options).train_prompts
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
    row = {"text": "Hi?", "id": "a", "style": {"tone": "calm"}, "target": 7, "answer": "of no interest"}
    names: dict[str, Any] = {"prompt_field": "text", "id_field": "id", "answer_field": "target"}
    task = load_rows(tmp_path, row, **names)
    [prompt] = task.train_prompts
    assert (prompt.prompt_id, prompt.answer, prompt.metadata) == ("a", "7", row)
    assert task.eval_prompts == []
    assert task.load_report == {"train/rows": 1, "train/malformed": 0, "train/overlong": 0}
    for given, answers in REFERENCES:
        [prompt] = load_rows(tmp_path, {"prompt": "Hi?", "answer": given}).train_prompts
        assert (prompt.prompt_id, prompt.answers, prompt.answer) == ("rows.jsonl:1", answers, answers[0])
    with pytest.raises(ValueError, match=r"^rows\.jsonl:1 has no solution: the rows of this task hold prompts only"):
        task.solution(prompt)


def test_mathematics_takes_messages_too(tmp_path: Path) -> None:
    row = {"problem": [SYSTEM, {"role": "user", "content": " 1+1?\n"}], "answer": "1", "choices": [1, 2]}
    template: dict[str, Any] = {"prompt_template": "{problem}\nPut the letter into \\boxed{}."}
    [prompt] = load_rows(tmp_path, row, task=math.Task, choices_field="choices", **template).train_prompts
    expected = "<system>Be kind.<user> 1+1?\n\nA. 1\nB. 2\nPut the letter into \\boxed{}.<bot>"
    assert (prompt.text, prompt.answer) == (expected, "B")
    [prompt] = load_rows(tmp_path, {"problem": "1+1?", "answer": "2"}, task=math.Task).train_prompts
    assert prompt.text == "1+1?", "nothing is added to a problem unless the recipe says so"


@pytest.mark.parametrize(
    "value", [" Hi?\n", "\t\nHi?\r\n\n ", "Hi?\u00a0", "\ufeffHi?\u2028", [USER], [SYSTEM, TURNS[0], TURNS[1], USER]]
)
@pytest.mark.parametrize("wrapped", [{}, WRAPPED])
def test_math_and_prompts_give_the_same_tokens(tmp_path: Path, value: Any, wrapped: dict[str, Any]) -> None:
    row = {"prompt": value, "answer": "1"}
    [first] = load_rows(tmp_path, row, **wrapped).train_prompts
    [second] = load_rows(tmp_path, row, task=math.Task, problem_field="prompt", **wrapped).train_prompts
    assert (second.text, second.token_ids) == (first.text, first.token_ids)
    assert isinstance(value, list) or value in second.text


def test_a_field_of_tools_that_is_not_used_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_rows(tmp_path, {"prompt": [USER], "tools": []})
    assert "`tools`" not in caplog.text
    load_rows(tmp_path, *({"prompt": [USER], "tools": [{"type": "function"}] * n} for n in range(3)))
    assert caplog.text.count("the field `tools` of its rows is not used") == 1


def test_gsm8k_loads(shared_data: Path) -> None:
    task = load(
        {"files": [str(shared_data / "math" / "gsm8k_test.jsonl")]}, prompt_template="Q: {problem}\nA:", **GSM8K
    )
    assert task.load_report == {"train/rows": 1319, "train/malformed": 0, "train/overlong": 0}
    first = task.train_prompts[0]
    assert (first.prompt_id, first.answer) == ("gsm8k_test.jsonl:1", "18")
    assert first.text.startswith("Q: Janet\u2019s ducks lay 16 eggs per day.")
    assert task.solution(first).endswith("\n#### 18")


def test_chat_template_of_a_real_tokenizer(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "minimind")
    rows = RowSource(**write_rows(tmp_path / "rows.jsonl", [ROW]))
    options = math.MathOptions(train=rows, chat_template=True, system_prompt="Be brief.")
    prompt = math.Task(options, tokenizer=tokenizer, max_prompt_tokens=100).train_prompts[0]
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1+1?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert tokenizer.decode(list(prompt.token_ids)) == prompt.text  # nothing added to what the template has
    thinking = options.model_copy(update={"chat_template_options": {"open_thinking": True}})
    prompt = math.Task(thinking, tokenizer=tokenizer, max_prompt_tokens=100).train_prompts[0]
    assert prompt.text.endswith("<|im_start|>assistant\n<think>\n")


def test_overlong_prompts_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [ROW, *({**ROW, "problem": text} for text in ("x" * 50, "y" * 29, "z" * 30, "x" * 3_000_000))]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        task = load(source, max_prompt_tokens=30)
    assert [prompt.text[0] for prompt in task.train_prompts] == ["W", "y"]  # BOS counts
    assert task.load_report["train/overlong"] == 3
    assert "3 of 5 prompts are longer than rollout.max_prompt_tokens (30); the first is rows.jsonl:2" in caplog.text
    with pytest.raises(ValueError, match=r"5 of 5 prompts are longer"):
        load(source, max_prompt_tokens=5)


def test_fields_inside_fields_numbers_and_ids(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "reward_model": {"ground_truth": 204, "style": "rule"}, "index": 7},
        {"prompt": "b", "reward_model": {"ground_truth": "-0.5"}, "index": "eight"},
        {"prompt": "c", "reward_model": {"ground_truth": 10**400}, "index": 9.5},
    ]
    fields = {"problem_field": "prompt", "answer_field": "reward_model.ground_truth", "id_field": "index"}
    task = load_rows(tmp_path, *rows, task=math.Task, **fields)
    found = [(prompt.prompt_id, prompt.answer) for prompt in task.train_prompts]
    assert found == [("7", "204"), ("eight", "-0.5"), ("9.5", "1" + "0" * 400)]


SOLUTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("\\boxed{1} then \\boxed{\\frac{1}{2}}.", {"answer_boxed": True}, "\\frac{1}{2}"),
    ("\\boxed{\\{1, 2\\}}", {"answer_boxed": True}, "\\{1, 2\\}"),
    ("\\boxed{x\n+ 1}", {"answer_boxed": True}, "x\n+ 1"),
    ("#### 1\n#### 2 ", {"answer_pattern": "#### (.+)"}, "2"),
]


def test_the_answer_in_a_solution(tmp_path: Path) -> None:
    for solution, options, answer in SOLUTIONS:
        row = {"problem": "a", "solution": solution}
        task = load_rows(tmp_path, row, task=math.Task, answer_field="solution", **options)
        assert task.train_prompts[0].answer == answer
        assert task.solution(task.train_prompts[0]) == solution
    task = load_rows(tmp_path, ROW, task=math.Task, solution_field="solutoin")
    with pytest.raises(ValueError, match=r"rows\.jsonl:1 has no solution: no field `solutoin`, did you mean `sol"):
        task.solution(task.train_prompts[0])


KNOWN = ["0", "-1", "None", "A", "yes", "\\emptyset", "∅", "\\{\\}", "\\left\\{1\\right\\}", "no solution"]
UNKNOWN = ["proof", "Proof.", "\\text{see solution}", "\\frac{", "not found", "?", "...", "\\text{}", "nan"]


def test_references_that_stand_for_no_answer_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They train, with one line; a file of no others is refused. Not so the letters of choices."""
    rows = [{"problem": "a", "answer": answer} for answer in (*KNOWN, *UNKNOWN)]
    with caplog.at_level(logging.WARNING):
        task = load_rows(tmp_path, *rows[: len(KNOWN)], task=math.Task)
        assert not caplog.records
        task = load_rows(tmp_path, *rows, task=math.Task)
    [line] = caplog.messages
    assert "9 of the 19 reference answers are cut off or stand for none" in line
    assert line.endswith("the first: 'proof' of rows.jsonl:11")
    assert len(task.train_prompts) == len(rows)
    for row in rows[len(KNOWN) :]:
        with pytest.raises(ValueError, match=r"task\.options\.train: 1 of the 1 reference .*options\.answer_field"):
            load_rows(tmp_path, row, task=math.Task)


def test_parquet_and_the_hub_give_the_same_prompts_as_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = [{"problem": f"{i}+{i}?", "answer": i + i, "extra": {"level": i}} for i in range(1100)]
    jsonl = RowSource(**write_rows(tmp_path / "rows.jsonl", rows))
    parquet = tmp_path / "hub" / "train.parquet"
    parquet.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    hub = RowSource(hub=str(parquet.parent), split="train")
    first, second, third = (
        load(source.model_dump(), max_prompt_tokens=200).train_prompts
        for source in (jsonl, RowSource(files=[str(parquet)]), hub)
    )
    for other, name in ((second, "train.parquet"), (third, f"{parquet.parent}/train")):
        for a, b in zip(first, other, strict=True):
            assert (a.text, a.token_ids, a.answer, a.metadata) == (b.text, b.token_ids, b.answer, b.metadata)
        assert [prompt.prompt_id for prompt in other[1022:1026]] == [f"{name}:{i}" for i in range(1023, 1027)]
    with pytest.raises(ValueError, match=r"hub data set .*nowhere"):
        list(read_rows(RowSource(hub=str(tmp_path / "nowhere"), split="train")))
    parquet.write_bytes(parquet.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"train\.parquet: cannot read this Parquet file"):
        list(read_rows(RowSource(files=[str(parquet)])))


# --- The verifier -----------------------------------------------------------------------------------------------------


HOSTILE = [
    ("\ud800 \\boxed{5}", True),
    (f"\\boxed{{{'(' * 99}5{')' * 99}}}", False),  # absurd: too deep, too long
    (f"\\boxed{{5{'+0' * 999}}}", False),
    pytest.param(f"\\boxed{{{'(' * 29}5{')' * 29}}}", True, marks=pytest.mark.slow),  # brackets take quadratic time
]


@pytest.mark.parametrize(("text", "correct"), HOSTILE, ids=["surrogate", "too deep", "too long", "deepest"])
def test_the_verifier_takes_any_text(text: str, correct: bool) -> None:
    assert is_correct(text, "5") is correct


def test_a_worker_imports_the_verifier_without_torch() -> None:
    check = "import srtrl.tasks.worker, srtrl.tasks.math_verifier, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=100).returncode == 0


UNITS = ["\\boxed{", "answer ", "final answer is ", "answer:\n", "1,", "{", "$", "$a$ and ", "**a ", "so C ", "#### "]
UNITS += ["12,", "A, ", "B and ", "选", "答案", "\\boxed{}"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("text", [*UNITS, pytest.param("\\(", marks=pytest.mark.slow)])
def test_reading_an_answer_takes_linear_time(text: str) -> None:
    """In the trainer's own process: crafted text may not stall it. In quadratic time this would take minutes."""
    num = 100_000
    crafted = "answer" + text * num + " " * num + "x"
    extract_answer(crafted)
    extract_letter(crafted)
    assert rewards.format(sample_of(crafted)) in (0.0, 1.0)


# --- Multiple choice --------------------------------------------------------------------------------------------------


def test_choices_stand_below_the_problem_and_the_answer_is_a_letter(tmp_path: Path) -> None:
    template = "Q: {problem}\nA:"
    rows = [{**QUESTION, "answer": answer} for answer in (3, "3", "D", "d")]
    task = load_rows(tmp_path, *rows, task=math.Task, prompt_template=template, **CHOICES)
    for prompt in task.train_prompts:
        assert prompt.text == "Q: Which is prime?\nA. 4\nB. 9\nC. A square\nD. 13\nA:"
        assert prompt.answer == "D"
    assert task.verifier is is_chosen


LABELLED: list[tuple[dict[str, Any], str, str]] = [
    ({"choices": ARC[0], "answer": "3"}, "choices.text", "C"),
    ({"choices": ARC[0], "answer": 4}, "choices.text", "D"),
    ({"choices": ARC[1], "answer": "C"}, "choices.text", "C"),
    ({"choices": ARC[1], "answer": "c"}, "choices.text", "C"),
    ({"choices": ARC[2], "answer": "B"}, "choices.text", "B"),
    ({"choices": ARC[2], "answer": "1"}, "choices.text", "A"),
    ({"choices": {**ARC[0], "label": [1, 2, 3, 4]}, "answer": 1}, "choices.text", "A"),
    ({"question": {"choices": ARC[0]}, "answer": "3"}, "question.choices.text", "C"),
    ({"choices": ARC[0]["text"], "labels": ["4", "3", "2", "1"], "answer": "4"}, "choices", "A"),
    (
        {"choices": [dict(zip(ARC[0], pair, strict=True)) for pair in zip(*ARC[0].values(), strict=True)]}
        | {"answer": 3},
        "choices",
        "C",
    ),
    ({"choices": {"A": "one", "B": "two", "C": "three", "D": "four"}, "answer": "C"}, "choices", "C"),
    ({"choices": ["A)one", "B)two", "C)three", "D)four"], "answer": "C"}, "choices", "C"),
    ({"choices": ["(A) one", "(B) two", "(C) three", "(D) four"], "answer": 3}, "choices", "D"),
    ({"choices": ["1) one", "2) two", "3) three", "4) four"], "answer": "4"}, "choices", "D"),
    ({"choices": ARC[0]["text"], "label": "2", "answer": "2"}, "choices", "C"),  # no labels: the index of the answer
]


def test_labels_of_choices_say_which_one_the_answer_is(tmp_path: Path) -> None:
    for fields, choices_field, letter in LABELLED:
        row = {"problem": "Which?", **fields}
        [prompt] = load_rows(tmp_path, row, task=math.Task, choices_field=choices_field).train_prompts
        assert (prompt.text, prompt.answer) == ("Which?\nA. one\nB. two\nC. three\nD. four", letter), fields
    decimals = {"problem": "Which?", "choices": ["1.5", "2.5"], "answer": 1}
    [prompt] = load_rows(tmp_path, decimals, task=math.Task, **CHOICES).train_prompts
    assert (prompt.text, prompt.answer) == ("Which?\nA. 1.5\nB. 2.5", "B")


def test_the_letter_that_a_completion_chose() -> None:
    """Completion => the letter, of completions for multiple choice."""
    for line in [*cases_in("letters.txt"), " => nothing"]:
        text, _, letter = line.partition(" => ")
        assert extract_letter(text) == (None if letter == "nothing" else letter), text
        assert is_chosen(text, "D") is (letter == "D"), text


# --- Without a verifier -----------------------------------------------------------------------------------------------


def tone(sample: RewardInput) -> float:
    """What a user's reward may read: its row, and no verdict."""
    assert sample.correct is None
    return float(sample.prompt.metadata["weight"] * len(sample.text))


def recipe_of(policy: Path, folder: Path, **changes: Any) -> Recipe:
    rows = write_rows(folder / "rows.jsonl", [{"prompt": f"Say {n}\n", "weight": -n} for n in range(5)])
    task = {"name": "prompts", "options": {"train": rows, "eval": rows}}
    rewards = [{"name": "test_tasks_rows:tone"}]
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


def test_a_task_without_verifier_is_noticed_once_it_is_loaded(policy: Path, tmp_path: Path) -> None:
    task = {"name": "test_tasks_rows:Own", "options": recipe_of(policy, tmp_path).task.options}
    recipe = recipe_of(policy, tmp_path, task=task, rewards=[{"name": "correct"}])
    check_recipe(recipe)
    with pytest.raises(ValueError, match=r"^rewards\.0\.name: `correct` \(the default\) asks whether a completion is"):
        run_training(recipe)
    assert not (tmp_path / "runs").exists()
