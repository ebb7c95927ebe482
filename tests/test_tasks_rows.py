"""The tasks of rows, `math` and `prompts`: rows become prompts or are skipped; runs without verdicts."""

import gzip
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from bench_cases import run as command
from task_cases import byte_tokenizer, cases_in, to_grade
from tiny_run import make_recipe
from transformers import AutoTokenizer

from srtrl.build import run_training
from srtrl.checks import build_checked, check_recipe
from srtrl.metrics import read_metrics
from srtrl.recipe.file import dump_recipe, read_source
from srtrl.recipe.schema import Recipe
from srtrl.report.page import write_report
from srtrl.run.step_metrics import run_figures
from srtrl.statistics import mean_interval
from srtrl.tasks import math, prompts
from srtrl.tasks.base import load_task
from srtrl.tasks.grading import Grader
from srtrl.tasks.reward_input import RewardInput
from srtrl.tasks.row_task import RowTask
from srtrl.tasks.rows import RowSource, read_rows

ROW = {"problem": "What is 1+1?", "answer": "2", "solution": "1+1=2"}
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if calm %}, calm{% endif %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
USER = {"role": "user", "content": "Hi?\n"}
WRAPPED: dict[str, Any] = {"chat_template": True}


def write_rows(path: Path, rows: Sequence[Any]) -> dict[str, Any]:
    """A JSONL file; texts are written as they are."""
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), "utf-8")
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


# --- Rows become prompts ----------------------------------------------------------------------------------------------


def test_rows_become_prompts(tmp_path: Path) -> None:
    """Task, its options, a row; the text to the byte, and the answers. `math` and `prompts` give the same tokens."""
    for name, options, row, text, answers in map(json.loads, cases_in("rows.jsonl")):
        is_math = name == "math"
        [prompt] = load_rows(tmp_path, row, task=math.Task if is_math else prompts.Task, **options).train_prompts
        assert (prompt.text, prompt.answers, prompt.answer) == (text, tuple(answers), answers[0]), (options, row)
        bos = () if "<bot>" in text else (0,)
        assert prompt.token_ids[: len(bos)] == bos  # a chat template has added what is needed
        assert str(byte_tokenizer().decode(list(prompt.token_ids[len(bos) :]))) == text
        if not is_math and "prompt_template" not in options:
            row["answer"] = "1"
            [other] = load_rows(tmp_path, row, task=math.Task, problem_field="prompt", **options).train_prompts
            assert (other.text, other.token_ids) == (prompt.text, prompt.token_ids)


def test_rewards_see_the_whole_row(tmp_path: Path) -> None:
    row = {"text": "Hi?", "id": "a", "style": {"tone": "calm"}, "target": 7, "answer": "of no interest"}
    names: dict[str, Any] = {"prompt_field": "text", "id_field": "id", "answer_field": "target"}
    task = load_rows(tmp_path, row, row | {"id": 8}, row | {"id": 9.5}, row | {"id": 10**400}, **names)
    prompt = task.train_prompts[0]
    assert (prompt.prompt_id, prompt.answer, prompt.metadata) == ("a", "7", row)
    assert [one.prompt_id for one in task.train_prompts[1:]] == ["8", "9.5", "1" + "0" * 400]
    assert task.eval_prompts == []
    assert task.load_report == {"train/rows": 4, "train/malformed": 0, "train/overlong": 0}
    assert (
        load_rows(tmp_path, {"prompt": "Hi?", "target": 7}, row | {"prompt": "Hi?"}).load_report["train/without_answer"]
        == 1
    )
    with pytest.raises(ValueError, match=r"^a has no solution: this task has none"):
        task.solution(prompt)


def test_solutions(tmp_path: Path) -> None:
    task = load_rows(tmp_path, ROW, task=math.Task)
    assert task.solution(task.train_prompts[0]) == "1+1=2"
    task = load_rows(tmp_path, ROW, task=math.Task, solution_field="solutoin")
    with pytest.raises(ValueError, match=r"rows\.jsonl:1 has no solution: no field `solutoin`, did you mean `sol"):
        task.solution(task.train_prompts[0])


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


def test_rows_of_real_files(shared_data: Path, tmp_path: Path) -> None:
    gsm8k: dict[str, Any] = {"problem_field": "question", "answer_pattern": "#### (.+)", "solution_field": "answer"}
    source = {"files": [str(shared_data / "math" / "gsm8k_test.jsonl")]}
    task = load(source, prompt_template="Q: {problem}\nA:", **gsm8k)
    assert task.load_report == {"train/rows": 1319, "train/malformed": 0, "train/overlong": 0}
    first = task.train_prompts[0]
    assert (first.prompt_id, first.answer) == ("gsm8k_test.jsonl:1", "18")
    assert first.text.startswith("Q: Janet\u2019s ducks lay 16 eggs per day.")
    assert task.solution(first).endswith("\n#### 18")
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "minimind")
    rows = RowSource(**write_rows(tmp_path / "rows.jsonl", [ROW]))
    begin = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n"
    for template_options, thought in (({}, "<think>\n\n</think>\n\n"), ({"open_thinking": True}, "<think>\n")):
        options = math.MathOptions(
            train=rows, chat_template=True, system_prompt="Be brief.", chat_template_options=template_options
        )
        [prompt] = math.Task(options, tokenizer=tokenizer, max_prompt_tokens=100).train_prompts
        assert prompt.text == begin + thought
        assert tokenizer.decode(list(prompt.token_ids)) == prompt.text  # nothing added to what the template has


# --- What is left out, or named ---------------------------------------------------------------------------------------


def test_malformed_rows_are_skipped_where_the_recipe_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = re.escape(str(tmp_path / "rows.jsonl"))
    with caplog.at_level(logging.WARNING):
        task = load_rows(tmp_path, '{"problem": "a", ', ROW, "[1, 2]", "{}", ROW, task=math.Task, malformed_rows="skip")
    assert [prompt.prompt_id for prompt in task.train_prompts] == ["rows.jsonl:2", "rows.jsonl:5"]
    assert task.load_report == {"train/rows": 5, "train/malformed": 3, "train/overlong": 0}
    assert re.search(rf"skipped 3 of 5 rows; the first: {place}:1: not JSON", caplog.text)
    for rows, reason in (([], "there are no rows"), (["x"] * 3, "none of the 3 rows can be used; the first: ")):
        with pytest.raises(ValueError, match=rf"task\.options\.train: {place}: {reason}"):
            load_rows(tmp_path, *rows, task=math.Task, malformed_rows="skip")


def test_overlong_prompts_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [ROW, *({**ROW, "problem": text} for text in ("x" * 50, "y" * 29, "z" * 30, "x" * 3_000_000))]
    with caplog.at_level(logging.WARNING):
        task = load_rows(tmp_path, *rows, task=math.Task, max_prompt_tokens=30)
    assert [prompt.text[0] for prompt in task.train_prompts] == ["W", "y"]  # BOS counts
    assert task.load_report["train/overlong"] == 3
    assert "3 of 5 prompts are longer than rollout.max_prompt_tokens (30); the first is rows.jsonl:2" in caplog.text
    with pytest.raises(ValueError, match=r"5 of 5 prompts are longer"):
        load_rows(tmp_path, *rows, task=math.Task, max_prompt_tokens=5)


def test_a_field_of_tools_that_is_not_used_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_rows(tmp_path, {"prompt": [USER], "tools": []})
    assert "`tools`" not in caplog.text
    load_rows(tmp_path, *({"prompt": [USER], "tools": [{"type": "function"}] * n} for n in range(3)))
    assert caplog.text.count("the field `tools` of its rows is not used") == 1


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


@pytest.mark.parametrize("name", ["rows.json", "lines.json", "rows.jsonl.gz", "rows.json.gz"])
def test_other_files_of_json_give_the_same_prompts(tmp_path: Path, name: str) -> None:
    """An array may begin with blanks; items are numbered from 1, as lines are."""
    rows = [{"problem": f"{i}+{i}?", "answer": i + i, "extra": {"level": i}} for i in range(40)]
    expected = load(write_rows(tmp_path / "rows.jsonl", rows)).train_prompts
    is_array = name in ("rows.json", "rows.json.gz")
    text = ("\n [" + ",\n".join(map(json.dumps, rows)) + "]\n") if is_array else "\n".join(map(json.dumps, rows))
    content = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    path = tmp_path / name
    path.write_bytes(content)
    for mine, other in zip(load({"files": [str(path)]}).train_prompts, expected, strict=True):
        assert mine == replace(other, prompt_id=other.prompt_id.replace("rows.jsonl", name))
    damaged = content[:-30] if name.endswith(".gz") else content.replace(b"[", b"[[", 1) if is_array else b"[1]"
    path.write_bytes(damaged)
    with pytest.raises(
        ValueError, match=rf"cannot read \S+{name}: Compressed file ended|{name}(: no array in JSON|:1: exp)"
    ):
        load({"files": [str(path)]})


def test_messages_may_be_a_text_of_json(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    given, texts = (load_rows(tmp_path, {"prompt": value}).train_prompts for value in (messages, json.dumps(messages)))
    assert [(one.text, one.token_ids) for one in given] == [(one.text, one.token_ids) for one in texts]


# --- Without a verifier -----------------------------------------------------------------------------------------------


def tone(sample: RewardInput) -> float:
    """A user's reward, which may read its row and gets no verdict."""
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
    with Grader(task, checked.rewards, checked.grading) as grader:
        texts = ("word " * 8, "word " * 9, "word " * 12, "word " * 13)
        tickets = [grader.submit(to_grade(prompt, text, "stop", 1)) for prompt in task.train_prompts for text in texts]
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
