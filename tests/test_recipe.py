"""Recipe files: what they read, what they refuse, and where an error points."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from srtrl.drafters.base import NoOptions
from srtrl.recipe_base import Section
from srtrl.recipe_errors import REMOVED, RecipeError, validate_section
from srtrl.recipe_file import dump_recipe, load_recipe, read_source

MINIMAL = """\
name: test
model:
  path: bundled:tiny
task:
  name: arithmetic
rollout:
  num_prompts: 8
  num_samples: 4
  max_prompt_tokens: 64
  max_new_tokens: 64
train:
  num_steps: 3
"""


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
    recipe = load_recipe(
        recipe_file,
        [
            "train.learning_rate=1e-6",
            "train.betas=[0.9, 0.95]",
            "task.options.num_train=10",
            "task.options.train.files=[a.jsonl, b.jsonl]",
            "model.mixed_precision=no",
            "train.weight_decay=1",
        ],
    )
    assert recipe.train.learning_rate == 1e-6
    assert recipe.train.betas == (0.9, 0.95)
    assert recipe.task.options == {"num_train": 10, "train": {"files": ["a.jsonl", "b.jsonl"]}}
    assert recipe.model.mixed_precision == "no"
    assert recipe.train.weight_decay == 1.0
    assert recipe.rollout.num_prompts == 8
    assert [reward.name for reward in recipe.rewards] == ["correct"]


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.e-6", "0.000001", "+1e-06"])
def test_scientific_notation_is_a_number(recipe_file: Path, text: str) -> None:
    assert load_recipe(with_line(recipe_file, f"  learning_rate: {text}")).train.learning_rate == 1e-6


def test_later_overrides_win_and_reach_into_lists(recipe_file: Path) -> None:
    overrides = ["rewards=[{name: correct}, {name: format}]", "rewards.1.weight=0.5", "rewards.1.weight=0.25"]
    assert [reward.weight for reward in load_recipe(recipe_file, overrides).rewards] == [1.0, 0.25]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (
            "  learning_rat: 1",
            "recipe.yaml:13: train.learning_rat: unknown key, did you mean `learning_rate`?",
        ),
        ("  slots: 3", "recipe.yaml:13: train.slots: unknown key, did you mean `rollout.slots`?"),
        ("modle: {}", "recipe.yaml:13: modle: unknown key, did you mean `model`?"),
        (
            "  mini_batch_prompts: '4'",
            'recipe.yaml:13: train.mini_batch_prompts: expected an integer, found the text "4"',
        ),
        (
            "  mini_batch_prompts: true",
            "recipe.yaml:13: train.mini_batch_prompts: expected an integer, found the boolean true",
        ),
        (
            "  mini_batch_prompts: 4.0",
            "recipe.yaml:13: train.mini_batch_prompts: expected an integer, found the number 4.0",
        ),
        ("  learning_rate: -1", "recipe.yaml:13: train.learning_rate: expected a number above 0, found the integer -1"),
        (
            "  learning_rate: .nan",
            "recipe.yaml:13: train.learning_rate: expected a finite number, found the number NaN",
        ),
        (
            "  betas: [0.9]",
            "recipe.yaml:13: train.betas.1: is missing",
        ),
        ("  betas: [0.9, 1]", "recipe.yaml:13: train.betas.1: expected a number below 1, found the integer 1"),
        (
            "  schedule: cosin",
            "recipe.yaml:13: train.schedule: expected 'constant', 'linear' or 'cosine', found the text \"cosin\", "
            "did you mean `cosine`?",
        ),
        ("eval:", "recipe.yaml:13: eval: expected a section (key: value), found nothing (null)"),
        ("log: {trackers: tensorboard}", 'recipe.yaml:13: log.trackers: expected a list, found the text "tensorboard"'),
        (
            "rewards:\n- {weight: 2}",
            "recipe.yaml:14: rewards.0.name: is missing (A function in `srtrl/tasks/rewards.py`, or "
            "`package.module:function` of your own.)",
        ),
        ("  num_steps: 4", "recipe.yaml:13: train.num_steps: is given twice, first at recipe.yaml:12"),
        ("  1: 4", "recipe.yaml:13: train: a key must be a text, found 1"),
    ],
)
def test_file_errors_name_line_key_and_expectation(recipe_file: Path, line: str, error: str) -> None:
    assert errors_of(with_line(recipe_file, line)) == [error]


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("train.num_step=4", "train.num_step: unknown key, did you mean `num_steps`?"),
        ("train.num_steps='4'", 'train.num_steps: expected an integer, found the text "4"'),
        (
            "train.num_steps=",
            "no value; write train.num_steps=null for none or train.num_steps=\"''\" for an empty text",
        ),
        ("train.num_steps", "expected section.key=value"),
        ("train..num_steps=1", "expected section.key=value"),
        ("train.num_steps.x=1", "train.num_steps is the integer 3, not a section"),
        ("rewards.0.weight=2", "the recipe file has no list `rewards`; give it whole: rewards=[...]"),
        (
            "rollout.draft_budget=-1",
            "rollout.draft_budget: expected 'auto' or a number of at least 0, found the integer -1",
        ),
        ("rollout.draft_budget=many", "rollout.draft_budget: expected 'auto' or an integer, found the text \"many\""),
        ("rollout.run_ahead=both", "rollout.run_ahead: expected 'off' or 'next_step', found the text \"both\""),
        ("task={name: arithmetic, nam: 1}", "task.nam: unknown key, did you mean `name`?"),
        (
            "log.trackers=[1]",
            "log.trackers.0: expected a text (quote it if it looks like a number), found the integer 1",
        ),
    ],
)
def test_override_errors_name_the_override(recipe_file: Path, override: str, error: str) -> None:
    assert errors_of(recipe_file, override) == [f"override `{override}`: {error}"]


@pytest.mark.parametrize("name", ["attention", "admission", "long_first", "run_ahead_coupled"])
def test_removed_keys_are_refused_with_what_to_do(recipe_file: Path, name: str) -> None:
    (error,) = errors_of(recipe_file, f"rollout.{name}=true")
    assert error == f"override `rollout.{name}=true`: rollout.{name}: {REMOVED[f'rollout.{name}']}"
    assert error.endswith(" now: leave the key out")


def test_a_list_index_out_of_range_is_refused(recipe_file: Path) -> None:
    (error,) = errors_of(recipe_file, "rewards=[{name: correct}]", "rewards.1.weight=2")
    assert error.endswith("rewards is a list of 1 items; expected an index below that, found `1`")


def test_yaml_syntax_error_names_file_and_line(recipe_file: Path) -> None:
    (error,) = errors_of(with_line(recipe_file, "rewards: ]"))
    assert error.startswith("recipe.yaml:13:10: not valid YAML: ")


@pytest.mark.parametrize("text", ["", "[1, 2]", "just text"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    (error,) = errors_of(path)
    assert error.startswith("recipe.yaml: expected a mapping of sections, found ")


def test_an_alias_inside_its_own_value_is_refused(recipe_file: Path) -> None:
    (error,) = errors_of(with_line(recipe_file, "rewards: &loop [*loop]"))
    assert error == "recipe.yaml:13: rewards.0: an alias (*name) inside the value that it names"


def test_merge_keys_and_aliases_are_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\nc: *a\n")
    source = read_source(path)
    assert source.data == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 2}}
    assert source.locate(("b", "y")) == f"{path}:4"
    assert source.locate(("b", "x", "unknown")) == f"{path}:1"


def test_a_missing_file_is_a_recipe_error(tmp_path: Path) -> None:
    (error,) = errors_of(tmp_path / "none.yaml")
    assert "cannot read the recipe" in error


def test_missing_sections_and_keys_are_all_listed(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: test\nmodel: {path: x}\ntask: {name: math}\nrollout:\n  num_prompts: 8\n")
    errors = errors_of(path)
    assert [error.split(":")[1] for error in errors[:3]] == ["4", "4", "4"]
    assert [error.split(": ")[1] for error in errors] == [
        "rollout.num_samples",
        "rollout.max_prompt_tokens",
        "rollout.max_new_tokens",
        "train",
    ]


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (
            ["train.mini_batch_prompts=3"],
            "override `train.mini_batch_prompts=3`: train.mini_batch_prompts: expected a divisor of "
            "rollout.num_prompts (8), found 3",
        ),
        (
            ["rollout.num_pages=7"],
            "override `rollout.num_pages=7`: rollout.num_pages: expected at least 8 pages of 16 tokens, to hold one "
            "sequence (rollout.max_prompt_tokens + rollout.max_new_tokens = 128), found 7",
        ),
        (
            ["train.micro_batch_tokens=127"],
            "override `train.micro_batch_tokens=127`: train.micro_batch_tokens: expected at least the longest sequence "
            "(rollout.max_prompt_tokens + rollout.max_new_tokens = 128), found 127",
        ),
        (
            ["rollout.num_samples=1"],
            "override `rollout.num_samples=1`: rollout.num_samples: expected at least 2 with algorithm.advantage "
            "group_relative (a group of one has no advantage), found 1",
        ),
        (
            ["train.schedule=cosine", "train.warmup_steps=3"],
            "override `train.warmup_steps=3`: train.warmup_steps: expected fewer than the run's 3 optimizer steps, or "
            "the cosine schedule would never begin, found 3",
        ),
        (
            ["eval.temperature=0", "eval.num_samples=4"],
            "override `eval.num_samples=4`: eval.num_samples: expected 1 with eval.temperature 0 (greedy samples are "
            "all the same), found 4",
        ),
        (
            ["rewards=[{name: correct}, {name: correct}]"],
            "override `rewards=[{name: correct}, {name: correct}]`: rewards.1.name: correct is given twice; add the "
            "weights up in one entry",
        ),
    ],
)
def test_impossible_combinations_are_refused(recipe_file: Path, overrides: list[str], error: str) -> None:
    assert errors_of(recipe_file, *overrides) == [error]


def test_several_impossible_combinations_are_all_listed(recipe_file: Path) -> None:
    errors = errors_of(
        with_line(recipe_file, "  mini_batch_prompts: 5\n  micro_batch_tokens: 5"), "rollout.num_pages=1"
    )
    assert [error.split(": ")[0] for error in errors] == [
        "override `rollout.num_pages=1`",
        "recipe.yaml:14",
        "recipe.yaml:13",
    ]


def test_dividing_and_just_large_enough_values_are_accepted(recipe_file: Path) -> None:
    overrides = [
        "train.mini_batch_prompts=4",
        "rollout.num_pages=8",
        "train.micro_batch_tokens=128",
        "eval.temperature=0",
    ]
    recipe = load_recipe(recipe_file, [*overrides, "train.schedule=cosine", "train.warmup_steps=5"])
    assert recipe.train.warmup_steps == 5


TRICKY = ["", " \n", "\n ", "a\nb\n", "a\r\n", "\x85/", "a\u2028b", "--- ", "<<", "=", "~", "null", "no", "on", "true"]
NUMBERS = ["1", ".5", "1e-6", "0x1", "1:30", "2001-01-01"]
texts = st.one_of(st.text(max_size=20), st.sampled_from(TRICKY + NUMBERS))
numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
plain = st.recursive(
    st.one_of(texts, numbers, st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    options=st.dictionaries(texts, plain, max_size=4), rate=st.floats(1e-30, 1e30), stops=st.lists(texts.filter(bool))
)
def test_a_dumped_recipe_loads_as_the_same(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, object], rate: float, stops: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(MINIMAL)
    recipe = load_recipe(path, [f"train.learning_rate={rate!r}"])
    recipe = recipe.model_copy(
        update={
            "task": recipe.task.model_copy(update={"options": options}),
            "rollout": recipe.rollout.model_copy(update={"stop_strings": stops}),
        }
    )
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe
    assert yaml.safe_load(dump_recipe(recipe))["name"] == "test"


class Options(Section):
    """Options of a task that a user wrote."""

    num_train: int = 1


def test_options_of_a_task_are_checked_at_their_place() -> None:
    with pytest.raises(RecipeError, match=r"^task.options.num_trian: unknown key, did you mean `num_train`\?$"):
        validate_section(Options, {"num_trian": 3}, ("task", "options"))
    assert validate_section(Options, {"num_train": 3}, ("task", "options")).num_train == 3


def test_where_there_are_no_options_the_error_says_so() -> None:
    with pytest.raises(RecipeError, match=r"^rollout.drafter_options.rule: unknown key; there are no options here$"):
        validate_section(NoOptions, {"rule": "blend"}, ("rollout", "drafter_options"))
