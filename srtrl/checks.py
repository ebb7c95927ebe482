"""What can be known to be wrong with a recipe before any weight is loaded: names, task options, paths, the machine."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from srtrl.recipe import Recipe
from srtrl.recipe_errors import Key, Problem, RecipeError
from srtrl.recipe_file import RecipeSource
from srtrl.resolve import PARTS, UnknownOptionError, check_options, resolve_part


@dataclass(frozen=True, slots=True)
class Signature:
    """How the trainer calls a function that a recipe names."""

    option: str
    """Which option of the recipe names it."""
    num_positional: int
    keywords: tuple[str, ...] = ()


ADVANTAGE = Signature("algorithm.advantage", 1)
TOKEN_ADVANTAGE = Signature("algorithm.advantage", 3, ("group_index", "gamma", "lam"))
"""Of an advantage function that is marked `@token_level`."""
LOSS = Signature("algorithm.loss", 4, ("clip_low", "clip_high"))
REDUCTION = Signature("algorithm.reduction", 2, ("sequence_lengths", "max_new_tokens"))
KL_ESTIMATOR = Signature("algorithm.kl.estimator", 2)
FILTER = Signature("algorithm.filters", 2)
VALUE_LOSS = Signature("critic.value_loss", 4, ("value_clip",))
REWARDS = "rewards"


def check_recipe(recipe: Recipe, source: RecipeSource | None = None, *, warm_start: bool = False) -> None:
    """Resolve every name in the recipe and look for the files it needs.

    Args:
        recipe: A recipe whose types and combinations are right.
        source: Where it was read from; with it, problems name the line or the override.
        warm_start: Check for `srtrl warm-start`, which may make the model that the recipe names.

    Raises:
        RecipeError: listing every problem.
    """
    problems = [
        *_function_problems(recipe),
        *_advantage_problems(recipe),
        *_loss_problems(recipe),
        *_reward_problems(recipe),
        *_problems_of_parts(recipe, warm_start=warm_start),
    ]
    if problems:
        raise RecipeError([source.located(problem) if source else problem for problem in problems])


def _function_problems(recipe: Recipe) -> Iterator[Problem]:
    algorithm = recipe.algorithm
    named: list[tuple[Key, Signature, str]] = [
        (("algorithm", "reduction"), REDUCTION, algorithm.reduction),
        (("algorithm", "kl", "estimator"), KL_ESTIMATOR, algorithm.kl.estimator),
        *((("algorithm", "filters", index), FILTER, name) for index, name in enumerate(algorithm.filters)),
        *([(("critic", "value_loss"), VALUE_LOSS, recipe.critic.value_loss)] if recipe.critic else []),
    ]
    for key, signature, name in named:
        try:
            _check_function(signature, name)
        except ValueError as error:
            yield Problem(key, str(error))


def _check_function(signature: Signature, name: str) -> None:
    """Raise ValueError for an unknown function, or one that the trainer could not call."""
    function = resolve_part(signature.option, name)
    arguments = dict.fromkeys(signature.keywords)
    try:
        inspect.signature(function).bind(*[None] * signature.num_positional, **arguments)
    except TypeError as error:
        call = ", ".join(
            [f"{signature.num_positional} arguments", *(f"{keyword}=..." for keyword in signature.keywords)]
        )
        module_name, _ = PARTS[signature.option]
        raise ValueError(
            f"`{name}` cannot be called with ({call}): {error}; see {module_name.replace('.', '/')}.py"
        ) from error


def _advantage_problems(recipe: Recipe) -> Iterator[Problem]:
    """An advantage is called as its mark says; what it does not use must not be set, and what it needs must be there.

    `recipe_conflicts.py` knows our own functions by name; this looks at the function, and so at a user's too.
    """
    from srtrl.algorithms.advantages import is_token_level, needs_critic

    algorithm, key = recipe.algorithm, ("algorithm", "advantage")
    name = algorithm.advantage
    try:
        function = resolve_part(ADVANTAGE.option, name)
        _check_function(TOKEN_ADVANTAGE if is_token_level(function) else ADVANTAGE, name)
    except ValueError as error:
        yield Problem(key, str(error))
        return
    if not is_token_level(function):
        for option, value in (("gamma", algorithm.gamma), ("lam", algorithm.lam)):
            if value != 1:
                message = f"{name} gives all tokens of a sample one advantage (no @token_level): expected 1, found"
                yield Problem(("algorithm", option), f"{message} {value:g}")
    if is_token_level(function) and algorithm.loss == "gspo":
        message = f"gspo has one ratio and one advantage a response, {name} one a token: expected gspo_token"
        yield Problem(("algorithm", "loss"), message)
    if needs_critic(function) and recipe.critic is None:
        yield Problem(key, f"{name} needs a critic: add a section `critic: {{}}`")
    if recipe.critic is not None and not needs_critic(function):
        yield Problem(
            ("critic",),
            f"algorithm.advantage {name} uses no critic (no @token_level(needs_critic=True)): leave the critic out, "
            "or take gae",
        )


def _loss_problems(recipe: Recipe) -> Iterator[Problem]:
    """A loss that is not there or cannot be called, options that it does not have, and values of theirs it refuses."""
    name, options = recipe.algorithm.loss, recipe.algorithm.loss_options
    key: Key = ("algorithm", "loss")
    options_key: Key = ("algorithm", "loss_options")
    try:
        function = resolve_part(LOSS.option, name)
        check_options(name, function, options, num_positional=LOSS.num_positional, reserved=LOSS.keywords)
        _check_function(replace(LOSS, keywords=(*LOSS.keywords, *options)), name)
    except UnknownOptionError as error:
        yield Problem((*options_key, error.option), str(error))
        return
    except ValueError as error:
        yield Problem(key, str(error))
        return
    if not options:
        return
    try:
        _call_loss(function, recipe)
    except ValueError as error:
        yield _problem_of(error, options_key)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        tried = f"`{name}` with {options}, tried on two tokens, raised {type(error).__name__}"
        yield Problem(options_key, f"{tried}: {error}" if str(error) else tried)


def _call_loss(function: Callable[..., Any], recipe: Recipe) -> None:
    """Call a loss as the trainer will, on two tokens."""
    import torch

    algorithm = recipe.algorithm
    tokens = torch.tensor([-0.5, -1.5])
    index = torch.zeros(2, dtype=torch.int64)
    clip = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    function(tokens, tokens, tokens, index, **clip, **algorithm.loss_options)


def _reward_problems(recipe: Recipe) -> Iterator[Problem]:
    """Rewards that are not there, that refuse their options, or that the grader could not call."""
    from srtrl.tasks.reward_terms import check_reward_options, resolve_rewards

    for index, section in enumerate(recipe.rewards):
        part = "name"
        try:
            function = resolve_part(REWARDS, section.name)
            part = "options"
            check_reward_options(section.name, function, section.options, recipe.rollout.max_new_tokens)
            part = "name"
            _check_function(Signature(REWARDS, 1, tuple(section.options)), section.name)
            resolve_rewards([section], recipe.rollout.max_new_tokens)
        except ValueError as error:
            yield Problem(("rewards", index, part), str(error))


def _problems_of_parts(recipe: Recipe, *, warm_start: bool) -> Iterator[Problem]:
    from_scratch = warm_start and recipe.warm_start is not None and recipe.warm_start.architecture is not None
    checks: list[tuple[Key, Callable[[Recipe], None]]] = [
        (("task", "name"), _check_task),
        (("model", "path"), _check_architecture if from_scratch else _check_model),
        (("critic", "path"), _check_critic),
        (("rollout", "drafter"), _check_drafter),
        (("device",), _check_device),
        (("log", "trackers"), _check_trackers),
    ]
    for key, check in checks:
        try:
            check(recipe)
        except RecipeError as error:
            yield from error.problems
        except ValueError as error:
            yield _problem_of(error, key)


def _problem_of(error: Exception, default_key: Key) -> Problem:
    """A message that begins with its option ("task.options.train.files.0: no file ...") is a problem of that one."""
    option, _, message = str(error).partition(": ")
    if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)*", option) and option.split(".")[0] == default_key[0]:
        return Problem(tuple(int(part) if part.isdecimal() else part for part in option.split(".")), message)
    return Problem(default_key, str(error))


def _check_task(recipe: Recipe) -> None:
    from srtrl.tasks.base import check_task

    check_task(recipe)


def _check_model(recipe: Recipe) -> None:
    """A local model must be there, of a supported architecture, with room for the lengths; the hub is not asked."""
    from srtrl.model.weights import read_config

    path = recipe.model.path
    if not _is_local(path):
        return
    _check_length(recipe, read_config(path).max_position_embeddings, path)


def _check_critic(recipe: Recipe) -> None:
    """Local weights that the critic starts from must fit the policy; the hub is not asked."""
    from srtrl.model.weights import read_config
    from srtrl.trainer.build import build_tokenizer, check_critic

    critic_path = recipe.critic.path if recipe.critic else None
    policy = recipe.model.path
    if (
        critic_path is None
        or not _is_local(critic_path)
        or not (policy.startswith("bundled:") or Path(policy).exists())
    ):
        return
    check_critic(recipe, read_config(recipe.model.path).vocab_size, build_tokenizer(recipe))


def _check_architecture(recipe: Recipe) -> None:
    """A model from scratch must have room for the lengths; `model.path` is not read."""
    assert recipe.warm_start is not None
    assert recipe.warm_start.architecture is not None
    num_positions = recipe.warm_start.architecture.max_position_embeddings
    _check_length(recipe, num_positions, "warm_start.architecture (max_position_embeddings)")


def _check_length(recipe: Recipe, num_positions: int, model: str) -> None:
    longest = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens
    if longest > num_positions:
        key = ("rollout", "max_new_tokens")
        message = f"max_prompt_tokens + max_new_tokens = {longest} is beyond the {num_positions} positions of {model}"
        raise RecipeError([Problem(key, message)])


def _is_local(path: str) -> bool:
    """A hub name is `name` or `organisation/name`; what cannot be one was meant as a folder, there or not."""
    return path.startswith(("bundled:", ".", "/", "~")) or path.count("/") > 1 or Path(path).exists()


def _check_drafter(recipe: Recipe) -> None:
    from srtrl.trainer.build import build_drafter

    build_drafter(recipe)


def _check_device(recipe: Recipe) -> None:
    from srtrl.trainer.build import choose_device, is_deterministic

    is_deterministic(recipe, choose_device(recipe))


def _check_trackers(recipe: Recipe) -> None:
    from srtrl.trainer.build import check_trackers

    check_trackers(recipe.log.trackers)
