"""`srtrl eval --suite`: where the data is found, what each benchmark runs with, and what comes out."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from bench_cases import run, write_rows
from tiny_run import make_policy

from srtrl.evaluation.settings import bare_source, suite_recipe, suite_recipes
from srtrl.evaluation.suite import load_suite, locate, open_suite
from srtrl.recipe.file import RecipeSource
from srtrl.recipe.schema import Recipe
from srtrl.tasks.rows import MissingDataError

GSM8K = [{"question": f"{n} plus 1?", "answer": f"so it is\n#### {n + 1}"} for n in range(6)]
MATH = [{"problem": f"{n} plus 2?", "answer": f"{n + 2}", "solution": f"\\boxed{{{n + 2}}}"} for n in range(5)]
MMLU = [{"question": "Prime?", "choices": ["4", "13"], "answer": 1, "subject": "x"}]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with three of the benchmarks."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, rows in (("gsm8k_test", GSM8K), ("math500", MATH), ("mmlu_stem", MMLU)):
        write_rows(folder / f"{name}.jsonl", *rows)
    return folder


def recipes_of(data: Path, only: str, source: RecipeSource | None = None, *overrides: str) -> dict[str, Recipe]:
    suite = open_suite("math", only=only, data_dir=data)
    return suite_recipes(suite, "bundled:tiny", source, overrides)


# --- The suite and its data -------------------------------------------------------------------------------------------


def test_fields_are_called_what_the_rows_call_them(tmp_path: Path) -> None:
    suite = load_suite("math")
    [olympiad] = [benchmark for benchmark in suite.benchmarks if benchmark.name == "olympiadbench"]
    write_rows(tmp_path / "hub.jsonl", {"question": "q", "final_answer": ["1", "2"], "answer": None})
    write_rows(tmp_path / "own.jsonl", {"problem": "q", "answer": "1, 2"})
    located = [locate(olympiad, str(tmp_path / f"{name}.jsonl"), None).options for name in ("hub", "own")]
    fields = [(options["problem_field"], options["answer_field"]) for options in located]
    assert fields == [("question", "final_answer"), ("problem", "answer")]
    write_rows(tmp_path / "none.jsonl", {"q": "q", "a": "1"})
    with pytest.raises(ValueError, match=r"none.jsonl:1: no field `question`; its fields are q, a"):
        suite_recipe(suite, locate(olympiad, str(tmp_path / "none.jsonl"), None), "bundled:tiny", None, ())


def test_what_is_not_in_the_folder_is_missing_and_the_hub_is_not_asked(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.load_dataset", Mock(side_effect=AssertionError("must not be reached")))
    with pytest.raises(MissingDataError, match=r"benchmark aime24: .*looked for aime24\.jsonl.*--data aime24=FILE"):
        open_suite("math", data_dir=data)
    suite = open_suite("math", data_dir=data, skip_missing=True)
    assert [benchmark.name for benchmark in suite.benchmarks] == ["gsm8k", "math500", "mmlu_stem"]
    assert list(suite.missing) == ["aime24", "aime25", "amc23", "olympiadbench", "minerva"]
    assert all(benchmark.data.hub and benchmark.num_rows for benchmark in load_suite("math").benchmarks)
    with pytest.raises(MissingDataError, match="no benchmark is left: aime24: "):
        open_suite("math", only="aime24,aime25", data_dir=data, skip_missing=True)


def test_a_hub_that_gives_nothing_is_a_missing_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Mock(side_effect=ConnectionError("no network"))
    monkeypatch.setattr("datasets.load_dataset", hub)
    result = run("eval", "bundled:tiny", "--suite", "math", "--only", "gsm8k")
    assert result.exit_code == 2
    assert "benchmark gsm8k: hub data set openai/gsm8k (main, test): no network; give a file" in result.stderr
    hub.assert_called_once_with("openai/gsm8k", "main", split="test")


def test_a_suite_of_one_s_own(tmp_path: Path, data: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "num_samples: 3\nbenchmarks:\n  - name: sums\n    title: Sums\n"
        f"    data: {{files: ['{data}/math500.jsonl']}}\n    max_new_tokens: 17\n"
    )
    suite = open_suite(str(path))
    [one] = suite.benchmarks
    recipe = suite_recipe(suite.suite, one, "bundled:tiny", None, ())
    assert (recipe.eval.num_samples, recipe.rollout.max_new_tokens) == (3, 17)
    path.write_text(path.read_text().replace("title", "titel"))
    result = run("eval", "bundled:tiny", "--suite", path)
    assert result.exit_code == 2
    assert f"{path}:4: benchmarks.0.titel: unknown key, did you mean `title`?" in result.stderr


# --- What each benchmark runs with ------------------------------------------------------------------------------------


def test_a_model_is_asked_as_the_suite_says(data: Path) -> None:
    recipes = recipes_of(data, "gsm8k,mmlu_stem")
    gsm8k, mmlu = recipes["gsm8k"], recipes["mmlu_stem"]
    assert (gsm8k.rollout.max_prompt_tokens, gsm8k.rollout.max_new_tokens) == (256, 256)  # half of 512 positions
    assert (gsm8k.eval.num_samples, gsm8k.eval.temperature, gsm8k.eval.num_problems) == (1, 1.0, None)
    assert "step by step" in gsm8k.task.options["prompt_template"]
    assert "letter" in mmlu.task.options["prompt_template"]
    assert mmlu.task.options["choices_field"] == "choices"


def test_a_run_is_asked_as_it_was_trained_and_the_command_line_goes_before_all(data: Path, tmp_path: Path) -> None:
    source = bare_source("bundled:tiny", 100, 50)
    trained = {"eval": {"files": ["gone.jsonl"]}, "prompt_template": "Q {problem} A", "malformed_rows": "skip"}
    source.put(("task",), {"name": "math", "options": trained}, "test")
    source.put(("eval",), {"num_samples": 8, "num_problems": 3, "temperature": 0.5}, "test")
    source.put(("rewards",), [{"name": "format"}], "test")
    recipe = recipes_of(data, "gsm8k", source)["gsm8k"]
    assert recipe.task.options["prompt_template"] == "Q {problem} A"
    assert recipe.task.options["eval"] == {"files": [str(data / "gsm8k_test.jsonl")]}
    assert "malformed_rows" not in recipe.task.options
    assert [reward.name for reward in recipe.rewards] == ["correct"]
    assert (recipe.rollout.max_new_tokens, recipe.eval.temperature) == (50, 0.5)
    assert (recipe.eval.num_samples, recipe.eval.num_problems) == (1, None)  # those are of its training
    sampling = ("eval.num_samples=4", "eval.temperature=0.7", "eval.num_problems=2")
    lengths = ("rollout.max_prompt_tokens=77", "rollout.max_new_tokens=9")
    template = "task.options.prompt_template='{problem}!'"
    recipe = recipes_of(data, "gsm8k", source, *sampling, *lengths, template)["gsm8k"]
    assert (recipe.eval.num_samples, recipe.eval.num_problems, recipe.eval.temperature) == (4, 2, 0.7)
    assert (recipe.rollout.max_prompt_tokens, recipe.rollout.max_new_tokens) == (77, 9)
    assert recipe.task.options["prompt_template"] == "{problem}!"
    assert source.data["task"]["options"] == trained  # the next benchmark starts from the same
    source.put(("task",), {"name": "arithmetic"}, "test")  # a run on another task: the suite's lengths and prompt
    recipe = recipes_of(data, "gsm8k", source)["gsm8k"]
    assert (recipe.rollout.max_prompt_tokens, recipe.rollout.max_new_tokens) == (256, 256)
    assert "step by step" in recipe.task.options["prompt_template"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "gsm8k"], "--only: it needs --suite"),
        (["--suite", "mth"], "--suite: mth is neither a suite, did you mean `math`?"),
        (["--suite", "math", "--only", "gsm8"], "--only: no benchmark `gsm8`, did you mean `gsm8k`?"),
        (["--suite", "math", "--data", "gsm8k"], "--data: expected NAME=FILE, found 'gsm8k'"),
        (["--suite", "math", "--data", "gsm=x.jsonl"], "--data: no benchmark `gsm`, did you mean"),
        (["--suite", "math", "--data-dir", "nowhere"], "--data-dir: there is no folder nowhere"),
        (["--suite", "math", "--task", "math"], "--task and --suite: choose one"),
        (["--suite", "math", "--output", "x.csv"], "--output: expected a .jsonl file, found x.csv"),
        (["--suite", "math", "--samples", "4"], "No such option: --samples"),
    ],
)
def test_wrong_options_are_named_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("srtrl.trainer.build.load_model", None)
    result = run("eval", "bundled:tiny", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_data_that_does_not_fit_is_said_before_weights(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srtrl.trainer.build.load_model", None)
    write_rows(data / "math500.jsonl", *MATH, {"problem": "no answer"})
    result = run("eval", "bundled:tiny", "--suite", "math", "--only", "gsm8k,math500", "--data-dir", data)
    assert result.exit_code == 2
    assert "math500.jsonl:6: no field `answer`" in result.stderr
    write_rows(data / "math500.jsonl", MATH[0])
    result = run("eval", "bundled:tiny", "--suite", "math", "--data", f"gsm8k={data}/math500.jsonl", "--only", "gsm8k")
    assert "no answer: `answer` has no match of '#### (.+)'" in result.stderr


# --- What comes out ---------------------------------------------------------------------------------------------------


def short(policy: Path, data: Path, *arguments: object) -> Any:
    lengths = ("rollout.max_new_tokens=8", "rollout.max_prompt_tokens=110", "rollout.kv_memory_gib=0.05")
    sampling = ("eval.num_samples=4", "eval.num_problems=3", 'task.options.prompt_template="{problem}\\n"')
    result = run("eval", policy, *lengths, *sampling, "--suite", "math", "--data-dir", data, *arguments)
    assert result.exit_code == 0, result.stderr
    return result


def test_the_suite_end_to_end(policy: Path, data: Path, tmp_path: Path) -> None:
    write_rows(data / "gsm8k_test.jsonl", *GSM8K, {"question": "long " * 40, "answer": "#### 1"})
    output = tmp_path / "rows.jsonl"
    result = short(policy, data, "--skip-missing", "--output", output, "--json")
    report = json.loads(result.stdout)
    gsm8k, math500, mmlu = report["benchmarks"]
    assert (gsm8k["num_rows"], gsm8k["num_left_out"], gsm8k["expected_rows"]) == (7, 1, 1319)
    assert (gsm8k["result"]["num_problems"], gsm8k["result"]["num_samples"]) == (3, 4)
    assert mmlu["result"]["num_problems"] == 1
    assert list(gsm8k["result"]["pass_at"]) == ["1", "2", "4"]
    assert gsm8k["result"]["majority"] is not None
    assert report["macro_average"]["num_benchmarks"] == 3
    assert "aime24" in report["missing"]
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 4 * (3 + 3 + 1)
    assert [row["sample_index"] for row in rows[:5]] == [0, 1, 2, 3, 0]
    for one in (gsm8k, math500, mmlu):
        own = [row for row in rows if row["benchmark"] == one["name"]]
        assert one["result"]["accuracy"] == pytest.approx(sum(row["correct"] for row in own) / len(own))
        assert one["result"]["num_tokens"] == sum(row["num_tokens"] for row in own)
    again = run("eval", policy, "--suite", "math", "--data-dir", data, "--output", output)
    assert again.exit_code == 2
    assert "exists; name another file" in again.stderr
    # One benchmark alone gives the same samples as among others, and the table says the same.
    fewer = tmp_path / "fewer.jsonl"
    only = ("--only", "gsm8k,math500,aime24", "--skip-missing", "--output", fewer)
    table = " ".join(short(policy, data, *only).stdout.split())
    own = [row for row in rows if row["benchmark"] != "mmlu_stem"]
    assert [json.loads(line) for line in fewer.read_text(encoding="utf-8").splitlines()] == own
    for text in (
        *("seed 0, temperature 1.0", "MATH-500", f"{100 * math500['result']['accuracy']:.1f}% ("),
        *("has 5 problems, known are 500.", "aime24: no data: --data-dir"),
        "1 of 7 problems are in no figure: their prompts have more than 110 tokens.",
        "macro average of avg@N over 2 of 3 benchmarks: ",
        "prompt_template '{problem}\\n', chat_template False",
    ):
        assert text in table


def test_a_task_s_figures_say_what_they_were_measured_with(policy: Path) -> None:
    overrides = ("eval.num_problems=2", "rollout.max_new_tokens=8", "seed=3", "eval.top_k=5")
    record = json.loads(run("eval", policy, *overrides, "--task", "arithmetic", "--json").stdout)
    asked = {"task": "arithmetic", "seed": 3, "temperature": 1.0, "top_k": 5, "top_p": 1.0, "max_new_tokens": 8}
    assert {name: record[name] for name in asked} == asked
