"""Combinations of values that cannot run or make no sense, found before anything is loaded.

What only a look at the user's own functions can tell (does this advantage need a critic?) is in `checks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from srtrl.recipe_base import Conflict, Section

if TYPE_CHECKING:
    from srtrl.recipe import Recipe

GROUP_ADVANTAGES = frozenset({"group_relative", "group_centered", "leave_one_out"})
"""Advantages that compare the samples of a group; none of them looks at single tokens."""
TOKEN_ADVANTAGES = frozenset({"gae", "reinforce_plus_plus"})
"""Advantages that may differ from token to token."""
UNIFORM_FILTERS = frozenset({"drop_uniform", "drop_all_right_or_wrong"})
"""Filters that would drop every group of one sample."""
MAX_KL_ERROR = 0.2
"""`MAX_ERROR` of `algorithms/reductions.py`, which a recipe may not import: a step changes an adaptive KL coefficient
by this x samples / horizon at most. A test holds the two equal."""


def find_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    """Every combination in `recipe` that is refused, each with the value to change first."""
    yield from _model_conflicts(recipe)
    yield from _rollout_conflicts(recipe)
    yield from _sampling_conflicts(recipe)
    yield from _advantage_conflicts(recipe)
    yield from _objective_conflicts(recipe)
    yield from _train_conflicts(recipe)
    yield from _critic_conflicts(recipe)
    yield from _other_conflicts(recipe)


def _model_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    model = recipe.model
    if model.dtype == "bfloat16" and model.mixed_precision == "bf16":
        yield Conflict(
            ("model", "mixed_precision"),
            "casts float32 weights for each product, but model.dtype is bfloat16: expected no, or model.dtype float32, "
            "found bf16",
        )


def _rollout_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    rollout = recipe.rollout
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    longest_text = f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}"
    pages_of_one = -(-longest // rollout.page_size)
    if rollout.num_pages is not None and rollout.num_pages < pages_of_one:
        yield Conflict(
            ("rollout", "num_pages"),
            f"expected at least {pages_of_one} pages of {rollout.page_size} tokens, to hold one sequence "
            f"({longest_text}), found {rollout.num_pages}",
        )
    for name in ("num_pages", "kv_memory_gib"):
        value = getattr(rollout, name)
        if value != _default(rollout, name) and rollout.kv_memory_share != _default(rollout, "kv_memory_share"):
            yield Conflict(
                ("rollout", "kv_memory_share"),
                f"has no effect beside rollout.{name} ({value}), which says how large the KV cache is: leave one out",
            )
    if recipe.train.micro_batch_tokens < longest:
        yield Conflict(
            ("train", "micro_batch_tokens"),
            f"expected at least the longest sequence ({longest_text}), found {recipe.train.micro_batch_tokens}",
        )


def _sampling_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    rollout, filters = recipe.rollout, recipe.algorithm.filters
    if rollout.dynamic_sampling and not filters:
        yield Conflict(
            ("rollout", "dynamic_sampling"),
            "replaces the groups that algorithm.filters drop, but there are no filters; "
            "DAPO has algorithm.filters: [drop_all_right_or_wrong]",
        )
    for name in ("max_open_prompts", "max_draws"):
        value = getattr(rollout, name)
        if value is not None and not rollout.dynamic_sampling:
            yield Conflict(("rollout", name), f"is for rollout.dynamic_sampling: true only, found {value}")
    if rollout.dynamic_sampling and rollout.max_draws is not None and rollout.max_draws < rollout.num_prompts:
        yield Conflict(
            ("rollout", "max_draws"),
            f"expected at least rollout.num_prompts ({rollout.num_prompts}), found {rollout.max_draws}",
        )
    for index, name in enumerate(filters):
        if name in UNIFORM_FILTERS and rollout.num_samples == 1:
            yield Conflict(
                ("algorithm", "filters", index),
                f"{name} would drop every group: rollout.num_samples is 1, and a group of one is always uniform",
            )


def _advantage_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    algorithm = recipe.algorithm
    name = algorithm.advantage
    if name in GROUP_ADVANTAGES and recipe.rollout.num_samples < 2:
        yield Conflict(
            ("rollout", "num_samples"),
            f"expected at least 2 with algorithm.advantage {name} (a group of one has no advantage), "
            f"found {recipe.rollout.num_samples}",
        )
    if name in GROUP_ADVANTAGES and algorithm.gamma != 1:
        yield Conflict(
            ("algorithm", "gamma"),
            f"{name} gives all tokens of a sample one advantage: expected 1, found {algorithm.gamma:g}",
        )
    if name in GROUP_ADVANTAGES | {"reinforce_plus_plus"} and algorithm.lam != 1:
        yield Conflict(
            ("algorithm", "lam"), f"is of algorithm.advantage gae; {name} has none: expected 1, found {algorithm.lam:g}"
        )
    if name == "reinforce_plus_plus" and algorithm.whiten_advantages:
        yield Conflict(("algorithm", "whiten_advantages"), f"{name} does so itself: leave it out")


def _objective_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    algorithm = recipe.algorithm
    kl = algorithm.kl
    if kl.target is not None and kl.coefficient == 0:
        yield Conflict(("algorithm", "kl", "target"), "needs a first coefficient above 0 to adapt, found 0")
    num_samples = recipe.rollout.num_prompts * recipe.rollout.num_samples
    if kl.target is not None and MAX_KL_ERROR * num_samples >= kl.horizon:
        yield Conflict(
            ("algorithm", "kl", "horizon"),
            f"expected more than {MAX_KL_ERROR} x the {num_samples} samples of a step, or one step could take the "
            f"adaptive coefficient to 0, found {kl.horizon}",
        )
    if kl.coefficient > 0 and kl.placement == "loss" and kl.estimator == "k1":
        yield Conflict(
            ("algorithm", "kl", "estimator"),
            "k1 in the loss has a gradient of expectation 0: expected k2 or k3, or algorithm.kl.placement reward",
        )
    if kl.target is None and kl.horizon != _default(kl, "horizon"):
        yield Conflict(
            ("algorithm", "kl", "horizon"),
            f"is of the adaptive coefficient: leave it out, or set algorithm.kl.target; found {kl.horizon}",
        )
    if algorithm.importance_cap is None and algorithm.importance_level != _default(algorithm, "importance_level"):
        yield Conflict(
            ("algorithm", "importance_level"),
            "is of the importance weights: leave it out, or set algorithm.importance_cap; "
            f"found {algorithm.importance_level}",
        )
    if algorithm.importance_cap is not None and algorithm.old_logprobs == "rollout":
        yield Conflict(
            ("algorithm", "importance_cap"),
            "weighs the trainer's old log-probs against the decoder's, but algorithm.old_logprobs is rollout, so both "
            "are the decoder's: set algorithm.old_logprobs=recompute",
        )
    if algorithm.loss == "gspo" and algorithm.advantage in TOKEN_ADVANTAGES:
        yield Conflict(
            ("algorithm", "loss"),
            f"gspo has one ratio and one advantage a response, {algorithm.advantage} one a token: expected gspo_token",
        )
    if algorithm.loss == "policy_gradient" and recipe.train.num_epochs > 1:
        yield Conflict(
            ("train", "num_epochs"),
            "expected 1 with algorithm.loss policy_gradient (later epochs are off-policy, and it has no ratio), found "
            f"{recipe.train.num_epochs}",
        )


def _train_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    train, num_prompts = recipe.train, recipe.rollout.num_prompts
    updates = recipe.policy_updates
    if num_prompts % updates.mini_batch_prompts != 0:
        yield Conflict(
            ("train", "mini_batch_prompts"),
            f"expected a divisor of rollout.num_prompts ({num_prompts}), found {updates.mini_batch_prompts}",
        )
    num_updates = updates.num_steps
    if num_updates > 0 and train.schedule != "constant" and train.warmup_steps >= num_updates:
        yield Conflict(
            ("train", "warmup_steps"),
            f"expected fewer than the run's {num_updates} optimizer steps, or the {train.schedule} schedule would "
            f"never begin, found {train.warmup_steps}",
        )


def _critic_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    critic, num_prompts = recipe.critic, recipe.rollout.num_prompts
    advantage = recipe.algorithm.advantage
    if advantage == "gae" and critic is None:
        yield Conflict(("algorithm", "advantage"), "gae needs a critic: add a section `critic: {}`")
    if critic is None:
        return
    if advantage in GROUP_ADVANTAGES | {"reinforce_plus_plus"}:
        yield Conflict(("critic",), f"algorithm.advantage {advantage} uses no critic: leave it out, or take gae")
    mini_batch = critic.mini_batch_prompts
    if mini_batch is not None and num_prompts % mini_batch != 0:
        yield Conflict(
            ("critic", "mini_batch_prompts"),
            f"expected a divisor of rollout.num_prompts ({num_prompts}), found {mini_batch}",
        )
    schedule, num_updates = recipe.train.schedule, recipe.critic_updates.num_steps
    if schedule != "constant" and critic.lr_warmup_steps >= num_updates:
        yield Conflict(
            ("critic", "lr_warmup_steps"),
            f"expected fewer than the run's {num_updates} optimizer steps of the critic, or the {schedule} "
            f"schedule would never begin, found {critic.lr_warmup_steps}",
        )
    if critic.warmup_steps >= recipe.train.num_steps:
        yield Conflict(
            ("critic", "warmup_steps"),
            f"expected fewer than train.num_steps ({recipe.train.num_steps}), or the policy would never learn, "
            f"found {critic.warmup_steps}: for a short trial set critic.warmup_steps=0",
        )


def _default(section: Section, option: str) -> object:
    """An option's default. What has no effect is refused by its value: a resolved recipe gives every option."""
    return type(section).model_fields[option].default


def _other_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    names = [reward.name for reward in recipe.rewards]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Conflict(("rewards", index, "name"), f"{name} is given twice; add the weights up in one entry")
    if recipe.eval.temperature == 0 and recipe.eval.num_samples > 1:
        yield Conflict(
            ("eval", "num_samples"),
            f"expected 1 with eval.temperature 0 (greedy samples are all the same), found {recipe.eval.num_samples}",
        )
    shape = recipe.warm_start.architecture if recipe.warm_start else None
    if shape and shape.hidden_size % shape.num_attention_heads != 0:
        yield Conflict(
            ("warm_start", "architecture", "num_attention_heads"),
            f"expected a divisor of hidden_size ({shape.hidden_size}), found {shape.num_attention_heads}",
        )
    if shape and shape.num_attention_heads % shape.num_key_value_heads != 0:
        yield Conflict(
            ("warm_start", "architecture", "num_key_value_heads"),
            f"expected a divisor of num_attention_heads ({shape.num_attention_heads}), "
            f"found {shape.num_key_value_heads}",
        )
