"""Recipe files: what they read, what they refuse, and where an error points."""

import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recipe_cases import MINIMAL
from test_bad_input import parsed

from srtrl.recipe.fields import fields_of
from srtrl.recipe.file import FOREIGN_NAMES, RecipeError, dump_recipe, dump_yaml, load_recipe, read_yaml
from srtrl.recipe.schema import Recipe


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)
    return path


def errors_of(path: Path, *overrides: str) -> list[str]:
    """The lines of the error, without the folder of the file."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return [str(problem).replace(str(path), path.name) for problem in caught.value.problems]


def with_line(path: Path, line: str) -> Path:
    """The recipe with one more line at its end (the section `train`)."""
    path.write_text(MINIMAL + line + "\n")
    return path


def test_reads_values_defaults_and_overrides(recipe_file: Path) -> None:
    overrides = [
        "train.learning_rate=1e-6",
        "train.betas=[0.9, 0.95]",
        "task.options.num_train=10",
        "task.options.train.files=[a.jsonl, b.jsonl]",
        "rollout.run_ahead_max_slowdown=null",
        "train.weight_decay=1",
        "rewards=[{name: correct}, {name: format}]",
        "rewards.1.weight=0.5",
        "rewards.1.weight=0.25",
    ]
    recipe = load_recipe(recipe_file, overrides)
    assert recipe.train.learning_rate == 1e-6
    assert recipe.train.betas == (0.9, 0.95)
    assert recipe.task.options == {"num_train": 10, "train": {"files": ["a.jsonl", "b.jsonl"]}}
    assert recipe.rollout.run_ahead_max_slowdown is None
    assert recipe.train.weight_decay == 1.0
    assert recipe.rollout.num_prompts == 8
    assert [reward.weight for reward in recipe.rewards] == [1.0, 0.25]
    assert [reward.name for reward in load_recipe(recipe_file).rewards] == ["correct"]
    for text in ("1e-6", "1.e-6", "+1E-06"):
        assert load_recipe(with_line(recipe_file, f"  learning_rate: {text}")).train.learning_rate == 1e-6


@pytest.mark.parametrize(("line", "error"), parsed("lines"))
def test_file_errors_name_line_key_and_expectation(recipe_file: Path, line: str, error: str) -> None:
    (found,) = errors_of(with_line(recipe_file, line.replace("\\n", "\n")))
    assert found.startswith(f"recipe.yaml:{error}")


@pytest.mark.parametrize("text", ["", "[1, 2]", "just text"])
def test_a_file_that_is_no_mapping_is_refused(recipe_file: Path, text: str) -> None:
    recipe_file.write_text(text)
    (error,) = errors_of(recipe_file)
    assert error.startswith("recipe.yaml: expected a mapping of sections, found ")


NAMES: dict[str, str] = read_yaml(FOREIGN_NAMES.read_text(), "names")[0]


def test_an_option_of_another_trainer_is_translated(recipe_file: Path) -> None:
    """By a key that there is, or a sentence whose keys there are."""
    fields = fields_of(Recipe)
    recipe_file = with_line(recipe_file, "".join(f"  {name}: 1\n" for name in NAMES))
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file)
    assert [problem.key for problem in caught.value.problems] == [f"train.{name}" for name in NAMES]
    for problem, meant in zip(caught.value.problems, NAMES.values(), strict=True):
        if re.fullmatch(r"[a-z_.]+", meant):
            description = fields[meant].description
            assert description is not None
            assert problem.message == f"unknown key, did you mean `{meant}`: {description.splitlines()[0]}"
        else:
            assert problem.message == f"unknown key, of another trainer: {meant}"
            keys = re.findall(r"\b(?:model|rollout|algorithm|train|eval|log)\.[a-z_]+(?:\.[a-z_]+)*", meant)
            assert set(keys) <= {*fields, "algorithm.loss_options.ratio_cap"}
            assert keys or re.search(r"task\.options|srtrl|docs/|leave it out|rewards", meant)
    assert not {key.rpartition(".")[2] for key in fields} & NAMES.keys() - {"top_p", "top_k"}


def test_missing_keys_and_impossible_combinations_are_all_listed(recipe_file: Path) -> None:
    recipe_file.write_text("name: test\nmodel: {path: x}\ntask: {name: math}\nrollout:\n  num_prompts: 8\n")
    keys = ["4: rollout.num_samples", "4: rollout.max_prompt_tokens", "4: rollout.max_new_tokens"]
    expected = [*(f"recipe.yaml:{key}: is missing " for key in keys), "recipe.yaml: train: is missing "]
    assert [error.partition("(")[0] for error in errors_of(recipe_file)] == expected
    lines = "  mini_batch_prompts: 5\n  micro_batch_tokens: 5"
    errors = errors_of(with_line(recipe_file, lines), "rollout.max_draws=1")
    places = [error.split(": ")[0] for error in errors]
    assert places == ["recipe.yaml:14", "recipe.yaml:13", "override `rollout.max_draws=1`"]


TRICKY = ["", " \n", "\n ", "a\nb\n", "a\r\n", "\x85/", "a\u2028b", "--- ", "<<", "=", "~", "null", "no", "on", "true"]
NUMBERS = ["1", ".5", "1e-6", "0x1", "1:30", "2001-01-01"]
texts = st.one_of(st.text(max_size=20), st.sampled_from(TRICKY + NUMBERS))
numbers = st.one_of(st.integers(-(2**63) + 1, 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False))
plain = st.recursive(
    st.one_of(texts, numbers, st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)


def test_texts_of_yaml_indicators_are_read_as_written() -> None:
    indicators = "?:-,[]{}#&*!|>'\"%@`0a ~=<\t"
    made = [first + gap + second for first, gap, second in product(["", *indicators], ["", " "], indicators)]
    for text in made:
        pair = [text, {text: [text, text]}]
        assert read_yaml(dump_yaml(pair), "here")[0] == pair, text


@settings(deadline=None)
@given(
    options=st.dictionaries(texts, plain, max_size=4), rate=st.floats(1e-30, 1e9), stops=st.lists(texts.filter(bool))
)
@example(options={}, rate=1.0, stops=["?0"])
def test_a_dumped_recipe_loads_as_the_same(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, object], rate: float, stops: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(MINIMAL)
    recipe = load_recipe(path, [f"train.learning_rate={rate!r}"])
    task = recipe.task.model_copy(update={"options": options})
    rollout = recipe.rollout.model_copy(update={"stop_strings": stops})
    recipe = recipe.model_copy(update={"task": task, "rollout": rollout})
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe
