"""Combinations of values that cannot run or make no sense, found before anything is loaded.

What only a look at the functions that a recipe names can tell (does this advantage need a critic?) is in `checks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from srtrl.recipe.schema import Recipe, Section

Conflict = tuple[str, str]
"""The dotted key of the value to change first, whose line is shown, and what is wrong with it."""

GROUP_ADVANTAGES = frozenset({"group_relative", "group_centered", "leave_one_out"})
"""Advantages that compare the samples of a group."""
UNIFORM_FILTERS = frozenset({"drop_uniform", "drop_all_right_or_wrong"})
"""Filters that would drop every group of one sample."""
MAX_KL_ERROR = 0.2
"""`MAX_ERROR` of `algorithms/reductions.py`, which a recipe may not import: a step changes an adaptive KL coefficient
by this x samples / horizon at most. A test holds the two equal."""


class RecipeConflictsError(ValueError):
    """All combinations in a recipe that cannot run."""

    def __init__(self, conflicts: list[Conflict]) -> None:
        self.conflicts = conflicts
        super().__init__("; ".join(f"{key}: {message}" for key, message in conflicts))


def find_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    """Every combination in `recipe` that is refused."""
    yield from _size_conflicts(recipe)
    yield from _rollout_conflicts(recipe)
    yield from _algorithm_conflicts(recipe)
    yield from _kl_conflicts(recipe)
    yield from _update_conflicts(recipe)


def _size_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    model, rollout = recipe.model, recipe.rollout
    if model.dtype == "bfloat16" and model.mixed_precision == "bf16":
        yield "model.mixed_precision", "is for float32 weights: expected no with model.dtype bfloat16, found bf16"
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    sequence = f"one sequence (rollout.max_prompt_tokens + rollout.max_new_tokens = {longest})"
    num_pages = -(-longest // rollout.page_size)
    if rollout.num_pages is not None and rollout.num_pages < num_pages:
        pages = f"{num_pages} pages of {rollout.page_size} tokens"
        yield "rollout.num_pages", f"expected at least {pages}, to hold {sequence}, found {rollout.num_pages}"
    if recipe.train.micro_batch_tokens < longest:
        found = recipe.train.micro_batch_tokens
        yield "train.micro_batch_tokens", f"expected enough for {sequence}, found {found}"
    for name in ("num_pages", "kv_memory_gib"):
        if not _is_default(rollout, name) and not _is_default(rollout, "kv_memory_share"):
            other = f"rollout.{name} ({getattr(rollout, name)})"
            yield (
                "rollout.kv_memory_share",
                f"has no effect with {other}, which sets the size of the KV cache: remove one of the two",
            )
    shape = recipe.warm_start.architecture if recipe.warm_start else None
    if recipe.warm_start and recipe.warm_start.train_tokenizer_vocab_size is not None and shape is None:
        message = "needs warm_start.architecture: the weights of model.path belong to the tokenizer of that model"
        yield "warm_start.train_tokenizer_vocab_size", message
    for name, whole in (("num_attention_heads", "hidden_size"), ("num_key_value_heads", "num_attention_heads")):
        if shape and getattr(shape, whole) % getattr(shape, name) != 0:
            message = f"expected a divisor of {whole} ({getattr(shape, whole)}), found {getattr(shape, name)}"
            yield f"warm_start.architecture.{name}", message


def _rollout_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    rollout, filters = recipe.rollout, recipe.algorithm.filters
    if rollout.dynamic_sampling and not filters:
        message = "replaces the groups that algorithm.filters drop, but it is empty; DAPO uses drop_all_right_or_wrong"
        yield "rollout.dynamic_sampling", message
    for name in ("max_open_prompts", "max_draws"):
        value = getattr(rollout, name)
        if value is not None and not rollout.dynamic_sampling:
            yield f"rollout.{name}", f"needs rollout.dynamic_sampling: true, found {value}"
    if rollout.dynamic_sampling and rollout.max_draws is not None and rollout.max_draws < rollout.num_prompts:
        message = f"expected at least rollout.num_prompts ({rollout.num_prompts}), found {rollout.max_draws}"
        yield "rollout.max_draws", message
    for index, name in enumerate(filters):
        if name in UNIFORM_FILTERS and rollout.num_samples == 1:
            message = f"{name} would drop every group: a group of rollout.num_samples 1 is always uniform"
            yield f"algorithm.filters.{index}", message
    if recipe.eval.temperature == 0 and recipe.eval.num_samples > 1:
        found = recipe.eval.num_samples
        yield "eval.num_samples", f"expected 1 with eval.temperature 0 (greedy samples are all the same), found {found}"


def _algorithm_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    algorithm, num_samples = recipe.algorithm, recipe.rollout.num_samples
    name = algorithm.advantage
    if name in GROUP_ADVANTAGES and num_samples < 2:
        message = f"expected at least 2 with algorithm.advantage {name} (a group of one has no advantage)"
        yield "rollout.num_samples", f"{message}, found {num_samples}"
    if name == "reinforce_plus_plus" and algorithm.lam != 1:
        yield (
            "algorithm.lam",
            f"has no effect with algorithm.advantage {name} (only with gae): expected 1, found {algorithm.lam:g}",
        )
    if name == "reinforce_plus_plus" and algorithm.whiten_advantages:
        yield "algorithm.whiten_advantages", f"{name} always whitens its advantages: remove this option"
    if algorithm.importance_cap is None and not _is_default(algorithm, "importance_level"):
        message = "has no effect without algorithm.importance_cap: set it, or remove this option"
        yield "algorithm.importance_level", f"{message}; found {algorithm.importance_level}"
    if algorithm.importance_cap is not None and algorithm.old_logprobs == "rollout":
        message = "compares the trainer's old log-probs with the decoder's, but algorithm.old_logprobs is rollout"
        yield "algorithm.importance_cap", f"{message} (the decoder's): set algorithm.old_logprobs=recompute"
    if algorithm.drop_void_turns and recipe.rollout.environment is None:
        yield "algorithm.drop_void_turns", "needs rollout.environment: a sample of a single turn has no void turns"
    if algorithm.loss == "policy_gradient" and recipe.policy_updates.steps_per_batch > 1:
        message = (
            "algorithm.loss policy_gradient has no ratio, and after the first optimizer step the batch is off-policy"
        )
        if recipe.train.num_epochs > 1:
            yield "train.num_epochs", f"{message}: expected 1, found {recipe.train.num_epochs}"
        if (size := recipe.policy_updates.mini_batch_prompts) < recipe.rollout.num_prompts:
            expected = f"rollout.num_prompts ({recipe.rollout.num_prompts})"
            yield "train.mini_batch_prompts", f"{message}: expected {expected} or no such option, found {size}"


def _kl_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    kl, num_samples = recipe.algorithm.kl, recipe.rollout.num_prompts * recipe.rollout.num_samples
    if kl.coefficient > 0 and kl.placement == "loss" and kl.estimator == "k1":
        message = "k1 in the loss has a gradient of expectation 0: expected k2 or k3, or algorithm.kl.placement reward"
        yield "algorithm.kl.estimator", message
    if kl.target is None:
        if not _is_default(kl, "horizon"):
            message = "has no effect without algorithm.kl.target: set it, or remove this option"
            yield "algorithm.kl.horizon", f"{message}; found {kl.horizon}"
        return
    if kl.coefficient == 0:
        yield "algorithm.kl.target", "needs a first coefficient above 0 to adapt, found 0"
    if MAX_KL_ERROR * num_samples >= kl.horizon:
        message = f"expected more than {MAX_KL_ERROR} x the {num_samples} samples of a step"
        reason = "or one step could take the adaptive coefficient to 0"
        yield "algorithm.kl.horizon", f"{message}, {reason}, found {kl.horizon}"


def _update_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    num_prompts, train, critic = recipe.rollout.num_prompts, recipe.train, recipe.critic
    if train.sharding == "fsdp2" and recipe.model.compile:
        yield "train.sharding", "fsdp2 gathers whole layers, and model.compile computes halves: use one of the two"
    updates = [("train", train.mini_batch_prompts, "warmup_steps", recipe.policy_updates)]
    if critic is not None:
        updates.append(("critic", critic.mini_batch_prompts, "lr_warmup_steps", recipe.critic_updates))
        if critic.warmup_steps >= train.num_steps:
            message = f"expected fewer than train.num_steps ({train.num_steps}), or the policy would never learn"
            hint = "for a short trial set critic.warmup_steps=0"
            yield "critic.warmup_steps", f"{message}, found {critic.warmup_steps}: {hint}"
            return
    for section, size, warmup, plan in updates:
        if size is not None and num_prompts % size != 0:
            message = f"expected a divisor of rollout.num_prompts ({num_prompts}), found {size}"
            yield f"{section}.mini_batch_prompts", message
        if plan.num_steps > 0 and plan.schedule != "constant" and plan.warmup_steps >= plan.num_steps:
            message = f"expected fewer than the {plan.num_steps} optimizer steps of the run"
            reason = f"or the {plan.schedule} schedule would never begin"
            yield f"{section}.{warmup}", f"{message}, {reason}, found {plan.warmup_steps}"


def _is_default(section: Section, option: str) -> bool:
    """Whether an option has its default. A resolved recipe gives every option, so only the value can be refused."""
    return bool(getattr(section, option) == type(section).model_fields[option].default)
