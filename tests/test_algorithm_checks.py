"""What `check_recipe` says of an advantage, a loss and its options, before anything runs."""

import json
import re
import sys
from pathlib import Path

import pytest

from srtrl.checks import check_recipe
from srtrl.recipe_errors import RecipeError
from srtrl.recipe_file import build_recipe, read_source

MINIMAL = """\
name: test
model:
  path: bundled:tiny
task:
  name: arithmetic
  options: {num_train: 16, num_eval: 4} # drawing the default number takes seconds
rollout:
  num_prompts: 8
  num_samples: 4
  max_prompt_tokens: 64
  max_new_tokens: 64
train:
  num_steps: 100
"""

OWN = """\
from srtrl.algorithms.advantages import token_level

def plain(rewards):
    return rewards

@token_level
def tokens(token_rewards, values, mask, *, group_index, gamma, lam):
    return token_rewards

@token_level(needs_critic=True)
def with_critic(token_rewards, values, mask, *, group_index, gamma, lam):
    return token_rewards - values

@token_level
def wrong_tokens(rewards):
    return rewards

def unmarked_tokens(token_rewards, values, mask, *, group_index, gamma, lam):
    return token_rewards

def loss(logprobs, old_logprobs, advantages, sequence_index, *, clip_low, clip_high, power=2, floor=0.0):
    if power < 1:
        raise ValueError(f"algorithm.loss_options.power: expected at least 1, found {power}")
    return -advantages * logprobs ** power, {}

def needy_loss(logprobs, old_logprobs, advantages, sequence_index, *, clip_low, clip_high, tau):
    return -advantages * logprobs / tau, {}

def open_loss(logprobs, old_logprobs, advantages, sequence_index, *, clip_low, clip_high, **options):
    return -advantages * logprobs, {}

def failing_loss(logprobs, old_logprobs, advantages, sequence_index, *, clip_low, clip_high, how="fine"):
    assert how != "assert"
    if how == "sizes":
        raise RuntimeError("wrong sizes")
    return -advantages * logprobs, {}

def short_loss(logprobs, advantages, *, clip_low, clip_high):
    return -advantages * logprobs, {}

def value_loss(values, returns):
    return values - returns

def old_filter(rewards):
    return rewards[:, 0] > 0
"""


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe beside a module `own` of the user's."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    """Key and message of every problem, without the place that gives the value."""
    source = read_source(path, overrides)
    try:
        check_recipe(build_recipe(source), source)
    except RecipeError as error:
        return [f"{'.'.join(map(str, problem.key))}: {problem.message}" for problem in error.problems]
    return []


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.advantage=group_centered"],
        ["algorithm.advantage=leave_one_out", "algorithm.loss=policy_gradient"],
        ["algorithm.advantage=reinforce_plus_plus", "algorithm.gamma=0.99", "rollout.num_samples=1"],
        ["algorithm.advantage=gae", "critic={}", "algorithm.lam=0.95"],
        ["algorithm.advantage=gae", "critic={value_loss: squared_error}"],
        ["algorithm.loss=dual_clip", "algorithm.loss_options={ratio_cap: 5}"],
        ["algorithm.loss=gspo", "algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4"],
        ["algorithm.loss=cispo", "algorithm.clip_low=1", "algorithm.clip_high=4"],
        ["algorithm.filters=[drop_uniform, drop_all_right_or_wrong]"],
        ["algorithm.advantage='own:plain'"],
        ["algorithm.advantage='own:tokens'", "algorithm.gamma=0.9"],
        ["algorithm.advantage='own:with_critic'", "critic={}"],
        ["algorithm.loss='own:loss'", "algorithm.loss_options={power: 3, floor: 1.5}"],
        ["algorithm.loss='own:open_loss'", "algorithm.loss_options={anything: 3}"],
        ["algorithm.loss='own:needy_loss'", "algorithm.loss_options={tau: 0.5}"],
    ],
)
def test_what_fits_together_is_accepted(recipe_file: Path, overrides: list[str]) -> None:
    assert problems_of(recipe_file, *overrides) == []


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["algorithm.advantage='own:with_critic'"],
            "algorithm.advantage: own:with_critic needs a critic: add a section `critic: {}`",
        ),
        (
            ["algorithm.advantage='own:tokens'", "critic={}"],
            "critic: algorithm.advantage own:tokens uses no critic (no @token_level(needs_critic=True)): leave the "
            "critic out, or take gae",
        ),
        (
            ["algorithm.advantage='own:plain'", "critic={}"],
            "critic: algorithm.advantage own:plain uses no critic (no @token_level(needs_critic=True)): leave the "
            "critic out, or take gae",
        ),
        (
            ["algorithm.advantage='own:plain'", "algorithm.gamma=0.9"],
            "algorithm.gamma: own:plain gives all tokens of a sample one advantage (no @token_level): expected 1, "
            "found 0.9",
        ),
        (
            ["algorithm.advantage='own:plain'", "algorithm.lam=0.5"],
            "algorithm.lam: own:plain gives all tokens of a sample one advantage (no @token_level): expected 1, "
            "found 0.5",
        ),
        (
            ["algorithm.advantage='own:wrong_tokens'"],
            "algorithm.advantage: `own:wrong_tokens` cannot be called with (3 arguments, group_index=..., gamma=..., "
            "lam=...): too many positional arguments; see srtrl/algorithms/advantages.py",
        ),
        (
            ["algorithm.advantage='own:unmarked_tokens'"],
            "algorithm.advantage: `own:unmarked_tokens` cannot be called with (1 arguments): missing a required "
            "argument: 'values'; see srtrl/algorithms/advantages.py",
        ),
        (
            ["algorithm.filters=['own:old_filter']"],
            "algorithm.filters.0: `own:old_filter` cannot be called with (2 arguments): too many positional "
            "arguments; see srtrl/algorithms/reductions.py",
        ),
        (
            ["algorithm.advantage=gae", "critic={value_loss: 'own:value_loss'}"],
            "critic.value_loss: `own:value_loss` cannot be called with (4 arguments, value_clip=...): too many "
            "positional arguments; see srtrl/algorithms/losses.py",
        ),
        (
            ["algorithm.advantage='own:tokens'", "algorithm.loss=gspo"],
            "algorithm.loss: gspo has one ratio and one advantage a response, own:tokens one a token: expected "
            "gspo_token",
        ),
        (
            ["algorithm.loss='own:needy_loss'"],
            "algorithm.loss: `own:needy_loss` needs the option `tau`, which is not given",
        ),
        (
            ["algorithm.loss=dual_clip", "algorithm.loss_options={ratio_kap: 3}"],
            "algorithm.loss_options.ratio_kap: `dual_clip` has no option `ratio_kap`, did you mean `ratio_cap`? known: "
            "ratio_cap",
        ),
        (
            ["algorithm.loss=ppo_clip", "algorithm.loss_options={ratio_cap: 3}"],
            "algorithm.loss_options.ratio_cap: `ppo_clip` has no option `ratio_cap`; known: none",
        ),
        (
            ["algorithm.loss=dual_clip", "algorithm.loss_options={clip_low: 0.1}"],
            "algorithm.loss_options.clip_low: `dual_clip` has no option `clip_low`; known: ratio_cap",
        ),
        (
            ["algorithm.loss='own:loss'", "algorithm.loss_options={advantages: 0.1}"],
            "algorithm.loss_options.advantages: `own:loss` has no option `advantages`; known: power, floor",
        ),
        (
            ["algorithm.loss=dual_clip", "algorithm.loss_options={ratio_cap: 0.5}"],
            "algorithm.loss_options.ratio_cap: expected a number above 1, found 0.5",
        ),
        (
            ["algorithm.loss='own:loss'", "algorithm.loss_options={power: 0}"],
            "algorithm.loss_options.power: expected at least 1, found 0",
        ),
        (
            ["algorithm.loss=dual_clip", "algorithm.loss_options={ratio_cap: high}"],
            "algorithm.loss_options: `dual_clip` with {'ratio_cap': 'high'}, tried on two tokens, raised TypeError: "
            "'>' not supported between instances of 'str' and 'int'",
        ),
        (
            ["algorithm.loss='own:failing_loss'", "algorithm.loss_options={how: assert}"],
            "algorithm.loss_options: `own:failing_loss` with {'how': 'assert'}, tried on two tokens, raised "
            "AssertionError",
        ),
        (
            ["algorithm.loss='own:failing_loss'", "algorithm.loss_options={how: sizes}"],
            "algorithm.loss_options: `own:failing_loss` with {'how': 'sizes'}, tried on two tokens, raised "
            "RuntimeError: wrong sizes",
        ),
        (
            ["algorithm.loss='own:short_loss'"],
            "algorithm.loss: `own:short_loss` cannot be called with (4 arguments, clip_low=..., clip_high=...): too "
            "many positional arguments; see srtrl/algorithms/losses.py",
        ),
    ],
)
def test_what_does_not_fit_is_named_at_its_key(recipe_file: Path, overrides: list[str], problem: str) -> None:
    assert problems_of(recipe_file, *overrides) == [problem]


def test_an_unknown_loss_with_options_is_one_problem(recipe_file: Path) -> None:
    (problem,) = problems_of(recipe_file, "algorithm.loss=dual_klip", "algorithm.loss_options={ratio_cap: 3}")
    assert problem.startswith("algorithm.loss: ")
    assert "did you mean `dual_clip`?" in problem


def test_an_unknown_value_loss_is_named(recipe_file: Path) -> None:
    (problem,) = problems_of(recipe_file, "algorithm.advantage=gae", "critic={value_loss: squared}")
    assert problem.startswith("critic.value_loss: ")
    assert "squared_error" in problem


DOCS = Path(__file__).resolve().parent.parent / "docs" / "algorithms"
PAGES = ("cispo", "dr_grpo", "gspo", "options", "ppo", "reinforce_plus_plus", "rloo")
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in (DOCS / f"{name}.md" for name in PAGES)
    for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_recipe_lines_of_the_pages_pass_the_checks(recipe_file: Path, tmp_path: Path, block: str) -> None:
    lines = tmp_path / "lines.yaml"
    lines.write_text(block)
    sections = read_source(lines).data
    overrides = [
        f"{section}.{option}={json.dumps(value)}"
        for section, options in sections.items()
        for option, value in options.items()
    ]
    assert overrides
    assert problems_of(recipe_file, *overrides) == []
