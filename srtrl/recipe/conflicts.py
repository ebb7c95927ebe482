"""Combinations of values that cannot run, found before anything is loaded.

What only the functions that a recipe names can show (does this advantage need a critic?) is in `checks.py`.
"""

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

from srtrl.recipe.fields import fields_of
from srtrl.recipe.rollout import MIN_TEMPERATURE, DraftHeadSection
from srtrl.recipe.schema import STATIC_ORDERS, ArchitectureSection, Recipe

Conflict = tuple[str, str]
"""The dotted key of the value to change first, whose line is shown, and its problem."""
Rule = tuple[str, Callable[[Recipe], object], str]
"""Dotted key, whether a recipe breaks the rule, and the message; `{...}` in it is a value of the recipe."""

PAIRS: tuple[tuple[str, str, str], ...] = (
    (
        "rollout.mode",
        "rollout.environment",
        "an off-policy mode cannot go on from turns of an environment: expected on_policy, whose run-aheads fill the "
        "waits for tools exactly, without another policy's tokens",
    ),
    ("train.sharding", "rollout.draft_head", "a draft head learns from whole weights: expected ddp, or no draft head"),
    (
        "train.sharding",
        "warm_start",
        "a warm start has whole weights: expected ddp; or start from any Hugging Face checkpoint trained elsewhere",
    ),
)
"""Options that cannot both differ from their default, and the message; the line of the first one is shown."""

GROUP_ADVANTAGES = frozenset({"group_relative", "group_centered", "leave_one_out", "max_rl"})
"""Advantages that compare the samples of a group."""
OTHER_ADVANTAGES = frozenset({"gae", "reinforce_plus_plus"})
"""Those that do not."""
UNIFORM_FILTERS = frozenset({"drop_uniform", "drop_all_right_or_wrong"})
"""Filters that would drop every group of a single sample."""


def _longest(recipe: Recipe) -> int:
    """Tokens of the longest sequence that a recipe allows."""
    return recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens


def _is_divisible(whole: int, part: int | None) -> bool:
    """Whether `part`, where it is given, divides `whole`."""
    return part is None or whole % part == 0


def _needs_ratio(recipe: Recipe) -> bool:
    """Whether a loss without a ratio would see a batch after the policy has changed."""
    return recipe.algorithm.loss == "policy_gradient" and recipe.policy_updates.steps_per_batch > 1


def _is_frozen_with_learners_options(head: DraftHeadSection | None) -> bool:
    """Whether a draft head that does not learn has options of one that does."""
    default = DraftHeadSection()
    return (
        head is not None
        and head.kind != "recurrent"
        and (head.vocabulary, head.learning_rate) != (default.vocabulary, default.learning_rate)
    )


def _architecture(recipe: Recipe) -> ArchitectureSection | None:
    return recipe.warm_start.architecture if recipe.warm_start else None


NO_RATIO = "algorithm.loss policy_gradient has no ratio, and after the first optimizer step the batch is off-policy"

NO_REWARDS = "looks at rewards, which have the weight 0: a teacher alone teaches all groups; expected"

RULES: tuple[Rule, ...] = (
    (
        "rollout.environment",
        lambda r: r.task.name == "mixture" and r.rollout.environment is not None,
        "an environment goes with one task: expected none with several tasks, or one task",
    ),
    (
        "data.order",
        lambda r: r.task.name == "mixture" and r.data.order not in STATIC_ORDERS,
        "an order that depends on samples goes with one task: expected shuffled or as_is, or one task",
    ),
    (
        "data.order",
        lambda r: (
            r.data.order == "skip_silent" and (r.rollout.num_samples == 1 or r.algorithm.advantage in OTHER_ADVANTAGES)
        ),
        "skip_silent takes a group with equal rewards for one without a signal, which it has with "
        "algorithm.advantage {algorithm.advantage} and rollout.num_samples {rollout.num_samples}",
    ),
    ("train.num_steps", lambda r: r.train.num_steps == 0 and r.train.num_passes is None, "expected at least 1"),
    (
        "train.num_passes",
        lambda r: r.train.num_passes is not None and r.train.num_steps > 0,
        "give train.num_steps or passes, not both: train.num_steps=null leaves it out",
    ),
    (
        "train.num_passes",
        lambda r: (
            r.train.num_passes is not None
            and (r.rollout.dynamic_sampling or r.rollout.mode == "partial" or r.data.order not in STATIC_ORDERS)
        ),
        "needs a known number of draws in each step, which rollout.dynamic_sampling, rollout.mode partial and a "
        "data.order that reads statistics do not have: give train.num_steps",
    ),
    (
        "train.keep_best",
        lambda r: r.train.keep_best is not None and r.eval.every_steps is None,
        "needs evaluations to compare: set eval.every_steps",
    ),
    (
        "train.micro_batch_tokens",
        lambda r: r.train.micro_batch_tokens < _longest(r),
        "expected at least {rollout.max_prompt_tokens} + {rollout.max_new_tokens}, for one sequence of "
        "rollout.max_prompt_tokens + rollout.max_new_tokens",
    ),
    (
        "train.mini_batch_prompts",
        lambda r: not _is_divisible(r.rollout.num_prompts, r.train.mini_batch_prompts),
        "expected a divisor of rollout.num_prompts ({rollout.num_prompts})",
    ),
    (
        "critic.mini_batch_prompts",
        lambda r: r.critic and not _is_divisible(r.rollout.num_prompts, r.critic.mini_batch_prompts),
        "expected a divisor of rollout.num_prompts ({rollout.num_prompts})",
    ),
    (
        "critic.warmup_steps",
        lambda r: r.critic and r.train.num_steps and r.critic.warmup_steps >= r.train.num_steps,
        "expected fewer than train.num_steps ({train.num_steps}), or the policy would never learn; "
        "for a short trial set critic.warmup_steps=0",
    ),
    (
        "rollout.dynamic_sampling",
        lambda r: r.rollout.dynamic_sampling and not r.algorithm.filters,
        "replaces the groups that algorithm.filters drop, but it is empty; DAPO uses drop_all_right_or_wrong",
    ),
    (
        "rollout.draft_head.path",
        lambda r: (head := r.rollout.draft_head) and (head.path is None) == (head.kind == "eagle3"),
        "a pretrained head has kind eagle3 and a path, any other kind has no path; kind is {rollout.draft_head.kind}",
    ),
    (
        "rollout.draft_head.kind",
        lambda r: _is_frozen_with_learners_options(r.rollout.draft_head),
        "a pretrained head does not learn: leave out rollout.draft_head.vocabulary and learning_rate",
    ),
    (
        "rollout.max_draws",
        lambda r: r.rollout.max_draws is not None and r.rollout.max_draws < r.rollout.num_prompts,
        "expected at least rollout.num_prompts ({rollout.num_prompts})",
    ),
    (
        "rollout.num_samples",
        lambda r: r.rollout.num_samples == 1 and r.algorithm.advantage in GROUP_ADVANTAGES and not r.teaches_alone,
        "expected at least 2 with algorithm.advantage {algorithm.advantage} (a group of one has no advantage)",
    ),
    (
        "algorithm.filters",
        lambda r: r.rollout.num_samples == 1 and UNIFORM_FILTERS.intersection(r.algorithm.filters),
        "would drop every group: a group of rollout.num_samples 1 is always uniform",
    ),
    (
        "algorithm.importance.mode",
        lambda r: r.importance_mode != "none" and r.algorithm.loss == "dppo",
        "the loss dppo takes the ratio to the decoder's probability itself: expected none",
    ),
    (
        "algorithm.importance.mode",
        lambda r: r.algorithm.importance.mode not in ("auto", "none") and r.algorithm.old_logprobs == "rollout",
        "compares the trainer's old log-probs with the decoder's, but algorithm.old_logprobs is rollout "
        "(the decoder's): set algorithm.old_logprobs=recompute",
    ),
    (
        "algorithm.old_logprobs",
        lambda r: r.rollout.mode != "on_policy" and r.algorithm.old_logprobs == "rollout",
        "some log-probs of the decoder are of earlier policies with rollout.mode {rollout.mode}: expected recompute",
    ),
    (
        "critic",
        lambda r: r.critic and r.algorithm.teacher,
        "knows nothing of what algorithm.teacher adds: expected none",
    ),
    (
        "algorithm.loss",
        lambda r: r.algorithm.teacher and r.algorithm.loss == "gspo",
        "gspo needs one advantage per response, and a teacher gives one per token: expected gspo_token",
    ),
    ("algorithm.filters", lambda r: r.teaches_alone and r.algorithm.filters, f"{NO_REWARDS} no filters"),
    ("data.order", lambda r: r.teaches_alone and r.data.order == "skip_silent", f"{NO_REWARDS} shuffled or as_is"),
    (
        "algorithm.kl.placement",
        lambda r: r.teaches_alone and r.algorithm.kl.coefficient and r.algorithm.kl.placement == "reward",
        f"{NO_REWARDS} loss",
    ),
    (
        "algorithm.kl.estimator",
        lambda r: r.algorithm.kl.coefficient and (r.algorithm.kl.placement, r.algorithm.kl.estimator) == ("loss", "k1"),
        "k1 in the loss has a gradient of expectation 0: expected k2 or k3, or algorithm.kl.placement reward",
    ),
    (
        "train.num_epochs",
        lambda r: _needs_ratio(r) and r.train.num_epochs > 1,
        f"{NO_RATIO}: expected 1",
    ),
    (
        "train.mini_batch_prompts",
        lambda r: _needs_ratio(r) and r.policy_updates.mini_batch_prompts < r.rollout.num_prompts,
        f"{NO_RATIO}: expected rollout.num_prompts ({{rollout.num_prompts}}) or no such option",
    ),
    (
        "eval.temperature",
        lambda r: 0 < r.eval.temperature < MIN_TEMPERATURE,
        f"expected 0 (greedy) or at least {MIN_TEMPERATURE:g}",
    ),
    (
        "warm_start.train_tokenizer_vocab_size",
        lambda r: r.warm_start and r.warm_start.train_tokenizer_vocab_size and not r.warm_start.architecture,
        "needs warm_start.architecture: the weights of model.path belong to the tokenizer of that model",
    ),
    (
        "warm_start.architecture.num_attention_heads",
        lambda r: (shape := _architecture(r)) and not _is_divisible(shape.hidden_size, shape.num_attention_heads),
        "expected a divisor of hidden_size ({warm_start.architecture.hidden_size})",
    ),
    (
        "warm_start.architecture.num_key_value_heads",
        lambda r: (
            (shape := _architecture(r)) and not _is_divisible(shape.num_attention_heads, shape.num_key_value_heads)
        ),
        "expected a divisor of num_attention_heads ({warm_start.architecture.num_attention_heads})",
    ),
)

NO_AUTO = "expected a number: `auto` depends on free memory or measured time"
NO_FILTER = "torch sums its filter in no fixed order: expected"

REPEATABLE: tuple[Rule, ...] = (
    ("rollout.slots", lambda r: r.rollout.slots == "auto", NO_AUTO),
    ("rollout.kv_memory_gib", lambda r: r.rollout.kv_memory_gib == "auto", NO_AUTO),
    ("rollout.draft_budget", lambda r: _drafts(r) and r.rollout.draft_budget == "auto", NO_AUTO),
    (
        "rollout.run_ahead_max_slowdown",
        lambda r: _drafts(r) and r.rollout.run_ahead_max_slowdown is not None,
        "run-aheads depend on measured time: expected null",
    ),
    ("rollout.environment.name", lambda r: r.rollout.environment, "its answers take time: expected no environment"),
    (
        "rollout.dynamic_sampling",
        lambda r: r.rollout.dynamic_sampling and r.rollout.mode == "on_policy",
        "draws begin when groups are graded: expected false",
    ),
    ("eval.top_k", lambda r: r.eval.top_k > 0, f"{NO_FILTER} 0"),
    ("eval.top_p", lambda r: r.eval.top_p < 1, f"{NO_FILTER} 1"),
)
"""Options that give a run with `repeatable: true` other bits the next time, on a device that is not a CPU."""


def _drafts(recipe: Recipe) -> bool:
    return recipe.rollout.drafter != "none" and recipe.rollout.draft_budget != 0


def _value(recipe: Recipe, key: str) -> Any:
    return reduce(getattr, key.split("."), recipe)


def find_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    """Every rule that `recipe` breaks: the key, and the message with the value that it has."""
    defaults = fields_of(Recipe)
    for key, other, message in PAIRS:
        if all(_value(recipe, name) != defaults[name].default for name in (key, other)):
            yield key, f"{message}, found {_value(recipe, key)}"
    for key, is_broken, message in RULES:
        if is_broken(recipe):
            yield key, f"{message.format(**dict(recipe))}, found {_value(recipe, key)}"
    for key, is_broken, message in REPEATABLE if recipe.repeatable and recipe.device != "cpu" else ():
        if is_broken(recipe):
            yield key, f"with repeatable: true on a GPU, {message}, found {_value(recipe, key)}"
