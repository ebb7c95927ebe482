"""Recipes whose values do not fit together, or whose functions do not exist or fit: each is refused at its key.

The first are found without loading anything (`recipe_conflicts.py`), the others by looking at the functions
(`checks.py`).
"""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from recipe_cases import recipe_text

from srtrl.checks import check_recipe
from srtrl.recipe.file import RecipeError, build_recipe, load_recipe, read_source

OWN = """\
from srtrl.algorithms.advantages import token_level

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
    path.write_text(recipe_text())
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    """Key and message of every problem, without the place that gives the value."""
    source = read_source(path, overrides)
    try:
        check_recipe(build_recipe(source), source)
    except RecipeError as error:
        return [f"{problem.key}: {problem.message}" for problem in error.problems]
    return []


CONFLICTS = """
train.micro_batch_tokens=127 => train.micro_batch_tokens=128
    train.micro_batch_tokens: expected at least 64
model.lora={} train.sharding=fsdp2 => train.sharding=ddp
    train.sharding: with model.lora each rank keeps whole weights
train.mini_batch_prompts=3 => train.mini_batch_prompts=4
    train.mini_batch_prompts: expected a divisor
algorithm.advantage=gae critic={} critic.mini_batch_prompts=3 => critic={}
    critic.mini_batch_prompts: expected a divisor
algorithm.advantage=gae critic={} critic.warmup_steps=3 => critic={}
    critic.warmup_steps: expected fewer than train.num_steps (3)
rollout.dynamic_sampling=true => algorithm.filters=[drop_uniform]
    rollout.dynamic_sampling: replaces
rollout.dynamic_sampling=true algorithm.filters=[drop_uniform] rollout.max_draws=7 => rollout.max_draws=8
    rollout.max_draws: expected at least rollout.num_prompts (8), found 7
rollout.num_samples=1 => algorithm.advantage=reinforce_plus_plus
    rollout.num_samples: expected at least 2 with algorithm.advantage group_relative
rollout.num_samples=1 algorithm.filters=[drop_uniform] algorithm.advantage=reinforce_plus_plus => rollout.num_samples=2
    algorithm.filters: would drop every group
algorithm.importance_cap=2 => algorithm.old_logprobs=recompute
    algorithm.importance_cap: compares
rollout.mode=partial => algorithm.old_logprobs=recompute
    algorithm.old_logprobs: some log-probs of the decoder are of earlier policies with rollout.mode
algorithm.kl.coefficient=0.1 algorithm.kl.estimator=k1 => algorithm.kl.placement=reward
    algorithm.kl.estimator: k1 in the loss
algorithm.loss=policy_gradient train.num_epochs=2 => train.num_epochs=1
    train.num_epochs: algorithm.loss policy_gradient has no ratio
algorithm.loss=policy_gradient rollout.num_prompts=4 train.mini_batch_prompts=2 => train.mini_batch_prompts=4
    train.mini_batch_prompts: algorithm.loss policy_gradient has no ratio
'warm_start={output: made, train_tokenizer_vocab_size: 300}' => 'warm_start={output: made}'
    warm_start.train_tokenizer_vocab_size: needs
'warm_start={output: made, HEADS: 2, num_key_value_heads: 1}}' => warm_start.architecture.num_attention_heads=3
    warm_start.architecture.num_attention_heads: expected a divisor of hid
'warm_start={output: made, HEADS: 3, num_key_value_heads: 2}}' => warm_start.architecture.num_key_value_heads=3
    warm_start.architecture.num_key_value_heads: expected a divisor of num_
"""
"""Overrides that are refused => what repairs them; below them the beginning of the key and message."""
HEADS = "architecture: {hidden_size: 9, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads"


@pytest.mark.parametrize("case", re.findall(r"(.*)\n    (.*)\n", CONFLICTS.replace("HEADS", HEADS)), ids="".join)
def test_a_combination_is_refused_and_its_repair_accepted(recipe_file: Path, case: tuple[str, str]) -> None:
    refused, repair = (shlex.split(overrides) for overrides in case[0].split(" => "))
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file, refused)
    (found,) = caught.value.problems
    assert f"{found.key}: {found.message}".startswith(case[1])
    assert load_recipe(recipe_file, [*refused, *repair])


FUNCTIONS = """
algorithm.advantage=leave_one_out algorithm.loss=policy_gradient
algorithm.advantage=reinforce_plus_plus algorithm.gamma=0.99 rollout.num_samples=1
algorithm.advantage=gae 'critic={value_loss: squared_error, value_clip: 0.5}'
algorithm.loss=dual_clip 'OPTIONS={ratio_cap: 5}'
algorithm.loss=gspo algorithm.clip_low=3e-4 algorithm.clip_high=4e-4
algorithm.advantage=own:tokens algorithm.gamma=0.9
algorithm.advantage=own:with_critic critic={}
algorithm.loss=own:loss 'OPTIONS={power: 3, floor: 1.5}'
algorithm.loss=own:open_loss 'OPTIONS={anything: 3}'
algorithm.loss=own:needy_loss 'OPTIONS={tau: 0.5}'
algorithm.advantage=gae => algorithm.advantage: gae needs a critic: add a section `critic: {}`
critic={} => critic: algorithm.advantage group_relative uses no critic
algorithm.advantage=own:wrong_tokens => algorithm.advantage: `own:wrong_tokens` cannot be ... own:wrong_tokens(rewards)
algorithm.advantage=own:unmarked_tokens => algorithm.advantage: `own: ... missing a required argument: 'values'
algorithm.advantage=own:tokens algorithm.loss=gspo => algorithm.loss: gspo needs one advantage ... expected gspo_token
algorithm.advantage=gae 'critic={value_loss: "own:value_loss"}' => critic.value_loss: `own:value_loss` cannot be
algorithm.advantage=plain => algorithm.advantage: `plain` is not in srtrl/algorithms/advantages.py; known: group
algorithm.loss=own:needy_loss => algorithm.loss: `own:needy_loss` cannot ... missing a required argument: 'tau'
algorithm.loss=dual_clip 'OPTIONS={ratio_kap: 3}' => algorithm.loss_options: `dual_clip` ... 'ratio_kap'; it is
algorithm.loss=dual_clip 'OPTIONS={clip_low: 0.1}' => algorithm.loss_options.clip_low: set algorithm.clip_low
algorithm.loss=dual_clip 'OPTIONS={ratio_cap: 0.5}' => algorithm.loss_options.ratio_cap: expected a number above
algorithm.loss=own:loss 'OPTIONS={power: 0}' => algorithm.loss_options.power: expected at least 1, found 0
algorithm.loss=dual_clip 'OPTIONS={ratio_cap: high}' => algorithm.loss_options: `dual_clip` with ... TypeError
algorithm.loss=own:short_loss => algorithm.loss: `own:short_loss` cannot be called with (4 ... too many positional
algorithm.filters='["own:old_filter"]' => algorithm.filters.0: `own:old_filter` cannot be called with (2 argu
"""
"""Overrides => the beginning of the problem ... a part of the rest; without one they fit together."""


@pytest.mark.parametrize("case", FUNCTIONS.strip("\n").splitlines())
def test_functions_that_do_not_fit_are_named_at_their_key(recipe_file: Path, case: str) -> None:
    overrides, _, problem = case.partition(" => ")
    found = problems_of(recipe_file, *shlex.split(overrides.replace("OPTIONS", "algorithm.loss_options")))
    beginning, _, part = problem.partition(" ... ")
    assert len(found) == bool(problem)
    assert all(line.startswith(beginning) and part in line for line in found)


@pytest.mark.parametrize("name", ["environment_cases:Ledger", "environment_cases:Echo"])
def test_off_policy_modes_refuse_an_environment_without_replay(recipe_file: Path, name: str) -> None:
    mode = "rollout.mode=partial", "algorithm.old_logprobs=recompute"
    found = problems_of(recipe_file, *mode, f"rollout.environment={{name: '{name}'}}")
    assert ["has no `replay`" in problem for problem in found] == [True] * name.endswith("Echo")


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
    assert problems_of(recipe_file, "train.num_steps=100", *overrides) == []
