"""The mathematics task: real data load and grade right; what is wrong with a file is said by file and line; choices."""

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from task_cases import byte_tokenizer, cases_in, sample_of
from transformers import AutoTokenizer

from srtrl.tasks import rewards
from srtrl.tasks.choices import extract_letter, is_chosen
from srtrl.tasks.final_answer import extract_answer
from srtrl.tasks.math import MathOptions, Task
from srtrl.tasks.math_verifier import is_correct
from srtrl.tasks.rows import RowSource, read_rows

GSM8K: dict[str, Any] = {"problem_field": "question", "answer_pattern": "#### (.+)", "solution_field": "answer"}
ROW = {"problem": "What is 1+1?", "answer": "2", "solution": "1+1=2"}


def write_rows(path: Path, rows: Sequence[Any]) -> str:
    """A JSONL file; texts and bytes are written as they are."""
    texts = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    path.write_bytes(b"".join((text if isinstance(text, bytes) else text.encode()) + b"\n" for text in texts))
    return str(path)


def make_task(file: str, max_prompt_tokens: int = 1000, **options: Any) -> Task:
    checked = MathOptions.model_validate({"train": {"files": [file]}, **options})
    Task.check_options(checked)
    return Task(checked, tokenizer=byte_tokenizer(), max_prompt_tokens=max_prompt_tokens)


# --- Real data --------------------------------------------------------------------------------------------------------


def test_gsm8k_loads(shared_data: Path) -> None:
    task = make_task(str(shared_data / "math" / "gsm8k_test.jsonl"), prompt_template="Q: {problem}\nA:", **GSM8K)
    assert task.load_report == {"train/rows": 1319, "train/malformed": 0, "train/overlong": 0}
    first = task.train_prompts[0]
    assert (first.prompt_id, first.answer) == ("gsm8k_test.jsonl:1", "18")
    assert first.text.startswith("Q: Janet\u2019s ducks lay 16 eggs per day.")
    assert task.solution(first).endswith("\n#### 18")


def test_chat_template_of_a_real_tokenizer(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "minimind")
    file = write_rows(tmp_path / "rows.jsonl", [ROW])
    options = MathOptions(
        train=RowSource(files=[file]), prompt_template="{problem}", chat_template=True, system_prompt="Be brief."
    )
    prompt = Task(options, tokenizer=tokenizer, max_prompt_tokens=100).train_prompts[0]
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1+1?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert tokenizer.decode(list(prompt.token_ids)) == prompt.text  # nothing added to what the template has
    thinking = options.model_copy(update={"chat_template_options": {"open_thinking": True}})
    prompt = Task(thinking, tokenizer=tokenizer, max_prompt_tokens=100).train_prompts[0]
    assert prompt.text.endswith("<|im_start|>assistant\n<think>\n")


# --- The verifier -----------------------------------------------------------------------------------------------------


VERDICTS = [
    ("so \\boxed{\\frac{1}{2}}", "0.5", True),
    ("I get \\boxed{3}. That was wrong: the result is \\boxed{4}.", "4", True),
    ("\\boxed{3} or \\boxed{4}", "4", False),
    ("$\\boxed{3}$ and $\\boxed{4}$", "3, 4", True),
    ("we have 1\n#### 1,234", "1234", True),
    ("4 + 2 = $<<4+2=6.00>>6.00\n#### 6", "6", True),
    ("**Answer:** $x = 42$", "42", True),
    ("The final answer is $\\sqrt{2}/2$.", "\\frac{1}{\\sqrt{2}}", True),
    ("it is 12 apples and 30 pears, 42", "42", True),
    ("no idea", "42", False),
    ("\\boxed{42", "43", False),
    ("\\boxed{10\\%}", "10\\%", True),
    ("\ud800 \\boxed{5}", "5", True),
    ("work\n#### \\sqrt{51}", "\\sqrt{51}", True),  # LaTeX without dollar signs
    ("work\n#### \\frac{3}{4}", "0.75", True),
    ("work\n#### \\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", True),
    ("work\n#### Evelyn", "\\text{Evelyn}", True),
    ("work\n#### \\sqrt{52}", "\\sqrt{51}", False),
    ("Answer: 3\\sqrt{13}", "\\sqrt{117}", True),
    ("**Final Answer:** \\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)", True),
    ("Answer: 7\nso \\boxed{8}", "8", True),
    ("<think>1</think>\n<answer>42</answer>", "42", True),  # DeepSeek-R1's format
    ("<answer>so \\boxed{6}</answer>", "6", True),
    ("<answer>42</answer> or 43", "43", True),  # not at the end, so not marked
    ("\\boxed{5 dollars}", "5", True),  # words behind a number
    ("\\boxed{5 sin x}", "5", False),
    (f"\\boxed{{{'(' * 99}5{')' * 99}}}", "5", False),  # absurd: too deep, too long
    (f"\\boxed{{5{'+0' * 999}}}", "5", False),
    (f"\\boxed{{{'(' * 5}5{')' * 5}}}", "5", True),
    ("\\boxed{28\\,800}", "28800", True),  # groups of digits
    ("\\fbox{7}", "7", True),
    ("\\boxed{221, 8}", "221,$8", True),  # a stray dollar sign in the reference (OlympiadBench)
]


def test_verifier() -> None:
    for text, answer, correct in VERDICTS:
        assert is_correct(text, answer) is correct, text


@pytest.mark.slow  # brackets take quadratic time
def test_the_deepest_answer_that_is_read() -> None:
    assert is_correct(f"\\boxed{{{'(' * 29}5{')' * 29}}}", "5")


def test_a_worker_imports_the_verifier_without_torch() -> None:
    check = "import srtrl.tasks.worker, srtrl.tasks.math_verifier, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=100).returncode == 0


# --- What is wrong with a file ----------------------------------------------------------------------------------------

MALFORMED: list[tuple[Any, str]] = [
    ('{"problem": "a", ', "not JSON: "),
    (b'{"problem": "\xff", "answer": "2"}', "not JSON: 'utf-8' codec can't decode byte 0xff"),
    ("[" * 100_000, "not JSON: maximum recursion depth exceeded"),
    ('{"problem": "a", "answer": ' + "9" * 5000 + "}", "not JSON: Exceeds the limit"),
    ('{"problem": "a", "answer": NaN}', "must be a text or a number"),
    ('{"problem": "\\ud800", "answer": "2"}', "is no valid Unicode"),
    ("[1, 2]", "expected an object with fields, found list"),
    ({"problem": "a"}, "no field `answer`; its fields are problem"),
    ({"problem": "a", "answer": "  "}, "field `answer` is empty"),
    ({"problem": "a", "answer": None}, "field `answer` must be a text or a number, it is NoneType"),
]


def test_malformed_rows_stop_with_file_line_and_reason_or_are_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for row, reason in MALFORMED:
        file = write_rows(tmp_path / "rows.jsonl", [ROW, "", row, ROW])
        with pytest.raises(ValueError, match="malformed_rows: skip") as caught:
            make_task(file)
        assert str(caught.value).startswith(f"{file}:3: ")
        assert reason in str(caught.value)
    write_rows(tmp_path / "rows.jsonl", [MALFORMED[0][0], ROW, *[row for row, _ in MALFORMED[1:]], ROW])
    with caplog.at_level(logging.WARNING):
        task = make_task(file, malformed_rows="skip")
    assert [prompt.prompt_id for prompt in task.train_prompts] == ["rows.jsonl:2", "rows.jsonl:12"]
    assert task.load_report == {"train/rows": 12, "train/malformed": 10, "train/overlong": 0}
    assert f"skipped 10 of 12 rows; the first: {file}:1: not JSON" in caplog.text


def test_files_without_a_usable_row_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"empty\.jsonl: there are no rows"):
        make_task(write_rows(tmp_path / "empty.jsonl", [""]))
    bad = MathOptions(train=RowSource(files=[write_rows(tmp_path / "bad.jsonl", ["x"] * 3)]), malformed_rows="skip")
    with pytest.raises(ValueError, match=r"none of the 3 rows can be used; the first: .*not JSON"):
        Task(bad, tokenizer=byte_tokenizer(), max_prompt_tokens=10)


def test_wrong_names_get_a_suggestion(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "train.jsonl", [ROW])
    with pytest.raises(ValueError, match=r"no field `probelm`, did you mean `problem`\?.* problem, answer, solution"):
        make_task(file, problem_field="probelm")
    with pytest.raises(ValueError, match=r"task\.options\.train\.files\.0: no file .*did you mean .*train\.jsonl`\?"):
        make_task(str(tmp_path / "tran.jsonl"))
    with pytest.raises(ValueError, match="is listed twice"):
        Task.check_options(MathOptions(train=RowSource(files=[file, file])))
    task = make_task(file, solution_field="solutoin")
    with pytest.raises(ValueError, match=r"train\.jsonl:1 has no solution: no field `solutoin`, did you mean `sol"):
        task.solution(task.train_prompts[0])


# --- Rows become prompts ----------------------------------------------------------------------------------------------


def test_overlong_prompts_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [ROW, *({**ROW, "problem": text} for text in ("x" * 50, "y" * 29, "z" * 30, "x" * 3_000_000))]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        task = make_task(file, max_prompt_tokens=30, prompt_template="{problem}")
    assert [prompt.text[0] for prompt in task.train_prompts] == ["W", "y"]  # BOS counts
    assert task.load_report["train/overlong"] == 3
    assert "3 of 5 prompts are longer than rollout.max_prompt_tokens (30); the first is rows.jsonl:2" in caplog.text
    with pytest.raises(ValueError, match=r"5 of 5 prompts are longer"):
        make_task(file, max_prompt_tokens=5)


def test_fields_inside_fields_numbers_and_ids(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "reward_model": {"ground_truth": 204, "style": "rule"}, "index": 7},
        {"prompt": "b", "reward_model": {"ground_truth": "-0.5"}, "index": "eight"},
        {"prompt": "c", "reward_model": {"ground_truth": 10**400}, "index": 9.5},
    ]
    fields = {"problem_field": "prompt", "answer_field": "reward_model.ground_truth", "id_field": "index"}
    task = make_task(write_rows(tmp_path / "rows.jsonl", rows), 1000, **fields)
    found = [(prompt.prompt_id, prompt.answer) for prompt in task.train_prompts]
    assert found == [("7", "204"), ("eight", "-0.5"), ("9.5", "1" + "0" * 400)]
    twice = write_rows(tmp_path / "twice.jsonl", [rows[0], rows[0]])
    with pytest.raises(ValueError, match=r"twice\.jsonl:2: an earlier row has the same `index`, 7"):
        make_task(twice, 1000, **fields)


SOLUTIONS: list[tuple[str, dict[str, Any], str | None]] = [
    ("\\boxed{1} then \\boxed{\\frac{1}{2}}.", {"answer_boxed": True}, "\\frac{1}{2}"),
    ("\\boxed{\\{1, 2\\}}", {"answer_boxed": True}, "\\{1, 2\\}"),
    ("\\boxed{x\n+ 1}", {"answer_boxed": True}, "x\n+ 1"),
    ("#### 1\n#### 2 ", {"answer_pattern": "#### (.+)"}, "2"),
    *((text, {"answer_boxed": True}, None) for text in ("none", "\\boxed{1", "\\boxed{ }", "\\boxed{\\}")),
    ("none", {"answer_pattern": "#### (.+)"}, None),
]


def test_the_answer_in_a_solution(tmp_path: Path) -> None:
    for solution, options, answer in SOLUTIONS:
        file = write_rows(tmp_path / "rows.jsonl", [{"problem": "a", "solution": solution}])
        if answer is None:
            with pytest.raises(ValueError, match=r"rows\.jsonl:1: no answer: `solution` has no "):
                make_task(file, answer_field="solution", **options)
        else:
            assert make_task(file, answer_field="solution", **options).train_prompts[0].answer == answer


REFERENCES = ["0", "-1", "None", "A", "yes", "\\emptyset", "∅", "\\{\\}", "\\left\\{1\\right\\}", "no solution"]
NO_REFERENCES = ["proof", "Proof.", "\\text{see solution}", "\\frac{", "not found", "?", "...", "\\text{}", "nan"]


def test_references_that_stand_for_no_answer_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They train, with one line; a file of no others is refused. Not so the letters of choices."""
    rows = [{"problem": "a", "answer": answer} for answer in (*REFERENCES, *NO_REFERENCES)]
    with caplog.at_level(logging.WARNING):
        task = make_task(write_rows(tmp_path / "rows.jsonl", rows[: len(REFERENCES)]))
        assert not caplog.records
        task = make_task(write_rows(tmp_path / "rows.jsonl", rows))
    [line] = caplog.messages
    assert "9 of the 19 reference answers are cut off or stand for none" in line
    assert line.endswith("the first: 'proof' of rows.jsonl:11")
    assert len(task.train_prompts) == len(rows)
    for row in rows[len(REFERENCES) :]:
        with pytest.raises(ValueError, match=r"task\.options\.train: 1 of the 1 reference .*options\.answer_field"):
            make_task(write_rows(tmp_path / "rows.jsonl", [row]))


def test_parquet_and_the_hub_give_the_same_prompts_as_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = [{"problem": f"{i}+{i}?", "answer": i + i, "extra": {"level": i}} for i in range(1100)]
    jsonl = write_rows(tmp_path / "rows.jsonl", rows)
    parquet = tmp_path / "hub" / "train.parquet"
    parquet.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    hub = RowSource(hub=str(parquet.parent), split="train")
    first, second, third = (
        Task(MathOptions(train=source), tokenizer=byte_tokenizer(), max_prompt_tokens=200).train_prompts
        for source in (RowSource(files=[jsonl]), RowSource(files=[str(parquet)]), hub)
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

QUESTION = {"problem": "Which is prime?", "choices": ["4", "9", "A square", "13"], "answer": 3, "subject": "maths"}
MALFORMED_CHOICES: list[tuple[dict[str, Any], str]] = [
    ({"answer": 4}, "field `answer` must be a letter A to D or an index 0 to 3, it is '4'"),
    ({"answer": "13"}, "must be a letter A to D"),
    ({"choices": "4 or 9"}, "field `choices` must be a list of 2 to 26 choices, it is '4 or 9'"),
    ({"choices": ["4", None]}, "field `choices` must hold texts or numbers, it holds None"),
    ({"choices": [{"label": "A"}, {"label": "B"}]}, "field `choices` must hold texts or numbers, it holds None"),
]


def test_choices_stand_below_the_problem_and_the_answer_is_a_letter(tmp_path: Path) -> None:
    options: dict[str, Any] = {"prompt_template": "Q: {problem}\nA:", "choices_field": "choices"}
    file = write_rows(tmp_path / "rows.jsonl", [{**QUESTION, "answer": answer} for answer in (3, "3", "D", "d")])
    task = make_task(file, **options)
    for prompt in task.train_prompts:
        assert prompt.text == "Q: Which is prime?\nA. 4\nB. 9\nC. A square\nD. 13\nA:"
        assert prompt.answer == "D"
    assert task.verifier("\\boxed{D}", "D")
    assert not task.verifier("\\boxed{13}", "D")
    assert not getattr(task.verifier, "isolated", False)
    for change, message in MALFORMED_CHOICES:
        file = write_rows(tmp_path / "malformed.jsonl", [{**QUESTION, **change}])
        with pytest.raises(ValueError, match="malformed_rows: skip") as caught:
            make_task(file, **options)
        assert message in str(caught.value)


ARC = [
    {"text": ["one", "two", "three", "four"], "label": labels} for labels in (list("1234"), list("ABCD"), list("1BC4"))
]
LABELLED: list[tuple[dict[str, Any], str, str | None]] = [
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
    ({"choices": ARC[0], "answer": "5"}, "choices.text", None),
    ({"choices": ARC[0], "answer": "A"}, "choices.text", None),
    ({"choices": ARC[1], "answer": "2"}, "choices.text", None),
    ({"choices": {**ARC[0], "label": ["1", "2", "3"]}, "answer": "3"}, "choices.text", None),
    ({"choices": {**ARC[0], "label": ["1", "2", "2", "3"]}, "answer": "3"}, "choices.text", None),
]


def test_labels_of_choices_say_which_one_the_answer_is(tmp_path: Path) -> None:
    for fields, choices_field, letter in LABELLED:
        file = write_rows(tmp_path / "rows.jsonl", [{"problem": "Which?", **fields}])
        if letter is None:
            with pytest.raises(ValueError, match=r"rows\.jsonl:1: field `(answer|choices\.text)` .*label"):
                make_task(file, choices_field=choices_field)
        else:
            [prompt] = make_task(file, choices_field=choices_field).train_prompts
            assert (prompt.text, prompt.answer) == ("Which?\nA. one\nB. two\nC. three\nD. four", letter), fields
    decimals = write_rows(tmp_path / "rows.jsonl", [{"problem": "Which?", "choices": ["1.5", "2.5"], "answer": 1}])
    [prompt] = make_task(decimals, choices_field="choices").train_prompts
    assert (prompt.text, prompt.answer) == ("Which?\nA. 1.5\nB. 2.5", "B")


def test_the_letter_that_a_completion_chose() -> None:
    """Completion => the letter, of completions for multiple choice."""
    for line in [*cases_in("letters.txt"), " => nothing"]:
        text, _, letter = line.partition(" => ")
        assert extract_letter(text) == (None if letter == "nothing" else letter), text
        assert is_chosen(text, "D") is (letter == "D"), text
