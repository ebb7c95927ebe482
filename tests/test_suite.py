"""`srtrl eval --suite`: where the data is found, what each benchmark runs with, and what comes out."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from bench_cases import run, write_rows

from srtrl.evaluation.suite import Benchmark, Suite, bare_source, open_suite, suite_recipe
from srtrl.recipe.file import RecipeSource
from srtrl.recipe.schema import Recipe

GSM8K = [{"question": f"{n} plus 1?", "answer": f"so it is\n#### {n + 1}"} for n in range(6)]
MATH = [{"problem": f"{n} plus 2?", "answer": f"{n + 2}", "solution": f"\\boxed{{{n + 2}}}"} for n in range(5)]
MMLU = [{"question": "Prime?", "choices": ["4", "13"], "answer": 1, "subject": "x"}]


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
    return {one.name: suite_recipe(suite, one, "bundled:tiny", source, overrides) for one in suite.benchmarks}


# --- The suite and its data -------------------------------------------------------------------------------------------


def test_fields_are_called_what_the_rows_call_them(tmp_path: Path) -> None:
    def located(row: dict[str, Any]) -> dict[str, Any]:
        write_rows(tmp_path / "olympiadbench.jsonl", row)
        suite = open_suite("math", only="olympiadbench", data_dir=tmp_path)
        return suite_recipe(suite, suite.benchmarks[0], "bundled:tiny", None, ()).task.options

    fields = ("problem_field", "answer_field")
    hub = located({"question": "q", "final_answer": ["1", "2"], "answer": None})
    assert [hub[name] for name in fields] == ["question", "final_answer"]
    assert [located({"problem": "q", "answer": "1, 2"})[name] for name in fields] == ["problem", "answer"]
    with pytest.raises(ValueError, match=r"olympiadbench.jsonl:1: no field `question`; its fields are q, a"):
        located({"q": "q", "a": "1"})


def test_what_is_not_in_the_folder_is_missing_and_the_hub_is_not_asked(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.load_dataset", Mock(side_effect=AssertionError("must not be reached")))
    with pytest.raises(ValueError, match=r"no data of aime24; expected one of aime24\.jsonl.*with --only"):
        open_suite("math", data_dir=data)
    suite = open_suite("math", only="mmlu_stem,gsm8k", data_dir=data)
    assert [benchmark.name for benchmark in suite.benchmarks] == ["gsm8k", "mmlu_stem"]


def test_a_hub_that_gives_nothing_is_a_missing_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Mock(side_effect=ConnectionError("no network"))
    monkeypatch.setattr("datasets.load_dataset", hub)
    result = run("eval", "bundled:tiny", "--suite", "math", "--only", "gsm8k")
    assert result.exit_code == 2
    assert "hub data set openai/gsm8k (main, test): no network; choose other benchmarks" in result.stderr
    hub.assert_called_once_with("openai/gsm8k", "main", split="test")


def test_a_suite_of_one_s_own(tmp_path: Path, data: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "num_samples: 3\nbenchmarks:\n  - name: sums\n"
        f"    data: {{files: ['{data}/math500.jsonl']}}\n    max_new_tokens: 17\n"
    )
    suite = open_suite(str(path))
    recipe = suite_recipe(suite, suite.benchmarks[0], "bundled:tiny", None, ())
    assert (recipe.eval.num_samples, recipe.rollout.max_new_tokens) == (3, 17)
    path.write_text(path.read_text().replace("max_new", "max_nwe").replace("num_samples", "num_sample"))
    result = run("eval", "bundled:tiny", "--suite", path)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: 2 problems in the suite:\n")
    assert f"{path}:5: benchmarks.0.max_nwe_tokens: unknown key, did you mean `max_new_tokens`?" in result.stderr


def test_the_page_lists_the_keys_of_a_suite() -> None:
    page = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text(encoding="utf-8")
    listed = page.partition("## A suite of your own")[2].partition("\n## ")[0]
    keys = [name for row in re.findall(r"^\| (`.*?) \|", listed, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(keys) == sorted([*Suite.model_fields, *Benchmark.model_fields])


# --- What each benchmark runs with ------------------------------------------------------------------------------------


TRAINED = {"eval": {"files": ["gone.jsonl"]}, "prompt_template": "Q {problem} A", "malformed_rows": "skip"}
FLAGS = (
    *("eval.num_samples=4", "eval.temperature=0.7", "eval.num_problems=2", "rollout.max_prompt_tokens=77"),
    *("rollout.max_new_tokens=9", "task.options.prompt_template='{problem}!'"),
)


def test_a_model_is_asked_as_the_suite_says_and_a_run_as_it_was_trained(data: Path) -> None:
    """The command line goes before all."""
    gsm8k, mmlu = (recipe.task.options for recipe in recipes_of(data, "gsm8k,mmlu_stem").values())
    asked = gsm8k["prompt_template"]
    assert "step by step" in asked
    assert ("letter" in mmlu["prompt_template"], mmlu["choices_field"]) == (True, "choices")
    source = bare_source("bundled:tiny", 100, 50)
    source.put(("task",), {"name": "math", "options": TRAINED}, "test")
    source.put(("eval",), {"num_samples": 8, "num_problems": 3, "temperature": 0.5}, "test")
    source.put(("rewards",), [{"name": "format"}], "test")
    other = bare_source("bundled:tiny", 100, 50)
    other.put(("eval",), {"temperature": 0.5}, "test")
    other.put(("task",), {"name": "arithmetic"}, "test")  # a run on another task: the suite's lengths and prompt
    cases: list[tuple[RecipeSource | None, tuple[str, ...], tuple[Any, ...]]] = [
        (None, (), (256, 256, 1, None, 1.0, asked)),  # half of 512 positions
        (source, (), (100, 50, 1, None, 0.5, "Q {problem} A")),  # numbers of samples and problems are of its training
        (source, FLAGS, (77, 9, 4, 2, 0.7, "{problem}!")),
        (other, (), (256, 256, 1, None, 0.5, asked)),
    ]
    for case, flags, (*numbers, template) in cases:
        recipe = recipes_of(data, "gsm8k", case, *flags)["gsm8k"]
        lengths, sampling = recipe.rollout, recipe.eval
        found = [lengths.max_prompt_tokens, lengths.max_new_tokens, sampling.num_samples, sampling.num_problems]
        assert [*found, sampling.temperature] == numbers
        assert recipe.task.options["prompt_template"] == template
        assert recipe.task.options["eval"] == {"files": [str(data / "gsm8k_test.jsonl")]}
        assert "malformed_rows" not in recipe.task.options
        assert [reward.name for reward in recipe.rewards] == ["correct"]
    assert source.data["task"]["options"] == TRAINED  # each benchmark starts from the same


def test_data_that_does_not_fit_is_said_before_weights(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srtrl.build_models.load_policy", None)
    write_rows(data / "math500.jsonl", *MATH, {"problem": "no answer"})
    result = run("eval", "bundled:tiny", "--suite", "math", "--only", "gsm8k,math500", "--data-dir", data)
    assert result.exit_code == 2
    assert "math500.jsonl:6: no field `answer`" in result.stderr


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
    names = ("gsm8k", "math500", "mmlu_stem")
    result = short(policy, data, "--only", ",".join(names), "--output", output, "--json")
    report = json.loads(result.stdout)
    gsm8k, math500, mmlu = report["benchmarks"]
    assert (gsm8k["num_rows"], gsm8k["num_left_out"]) == (7, 1)
    assert (gsm8k["eval/num_problems"], gsm8k["eval/num_samples"]) == (3, 4)
    assert mmlu["eval/num_problems"] == 1
    assert list(gsm8k["estimates"]) == ["accuracy", "maj_at_N", "pass_at_2", "pass_at_4"]
    accuracies = [one["estimates"]["accuracy"]["value"] for one in (gsm8k, math500, mmlu)]
    assert report["macro_average"]["value"] == pytest.approx(sum(accuracies) / 3)
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 4 * (3 + 3 + 1)
    assert [row["sample_index"] for row in rows[:5]] == [0, 1, 2, 3, 0]
    for one in (gsm8k, math500, mmlu):
        own = [row for row in rows if row["benchmark"] == one["name"]]
        assert one["eval/accuracy"] == pytest.approx(sum(row["correct"] for row in own) / len(own))
        assert one["eval/accuracy"] == one["estimates"]["accuracy"]["value"]
        assert one["eval/tokens"] == sum(row["num_tokens"] for row in own)
    # One benchmark alone gives the same samples as among others, and the table has the same figures.
    fewer = tmp_path / "fewer.jsonl"
    table = " ".join(short(policy, data, "--only", "gsm8k,math500", "--output", fewer).stdout.split())
    own = [row for row in rows if row["benchmark"] != "mmlu_stem"]
    assert [json.loads(line) for line in fewer.read_text(encoding="utf-8").splitlines()] == own
    for text in (
        *("seed 0, temperature 1.0", f"{100 * math500['eval/accuracy']:.1f}% ("),
        "gsm8k: 1 of 7 problems are in no figure: their prompts have more than 110 tokens.",
        "macro average of avg@N over 2 benchmarks: ",
        "prompt_template '{problem}\\n', chat_template False",
    ):
        assert text in table


def test_a_task_s_figures_say_what_they_were_measured_with(policy: Path) -> None:
    few = "task.options={num_train: 9, num_eval: 9}"
    overrides = (few, "eval.num_problems=2", "rollout.max_new_tokens=8", "seed=3", "eval.top_k=5")
    record = json.loads(run("eval", policy, *overrides, "--task", "arithmetic", "--json").stdout)
    settings = {"name": "arithmetic", "seed": 3, "temperature": 1.0, "top_k": 5, "top_p": 1.0, "max_new_tokens": 8}
    assert {name: record[name] for name in settings} == settings
