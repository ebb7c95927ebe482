"""Checks of a recipe before any weight is loaded: names, signatures, options of tasks and losses, local paths."""

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from srtrl.recipe.file import Problem, RecipeError, RecipeSource, build_recipe
from srtrl.recipe.schema import Recipe
from srtrl.resolve import PARTS, Caught, check_call, describe_error, import_user_defined, resolve_part

Call = tuple[int, tuple[str, ...]]
"""A call by the trainer: the number of positional arguments, and the names of the keyword arguments."""

ADVANTAGE: Call = (1, ())
TOKEN_ADVANTAGE: Call = (3, ("group_index", "gamma", "lam"))
"""Of an advantage function that is marked `@token_level`."""
LOSS: Call = (4, ("clip_low", "clip_high"))
REDUCTION: Call = (2, ("sequence_lengths", "max_new_tokens"))
KL_ESTIMATOR: Call = (2, ())
FILTER: Call = (2, ())
VALUE_LOSS: Call = (4, ("value_clip",))


def build_checked(source: RecipeSource, *, warm_start: bool = False) -> Recipe:
    """The recipe of `source`, with every name and local path in it checked; see `check_recipe`."""
    recipe = build_recipe(source)
    if source.is_foreign:
        _import_names(recipe, source)
    check_recipe(recipe, source, warm_start=warm_start)
    return recipe


def _import_names(recipe: Recipe, source: RecipeSource) -> None:
    """Import the user-defined modules that a foreign recipe names, and print which; not from the current folder."""
    from srtrl.run.folder import flatten

    values = dict(flatten(recipe.model_dump()))
    keys = ("task.name", "rollout.drafter", "rollout.environment.name", "rollout.environment.format", *PARTS)
    names = [
        *((key, name) for key in keys if isinstance(name := values.get(key), str)),
        *((f"algorithm.filters.{index}", name) for index, name in enumerate(recipe.algorithm.filters)),
        *((f"rewards.{index}.name", reward.name) for index, reward in enumerate(recipe.rewards)),
    ]
    for key, name in names:
        module = name.partition(":")[0]
        if module != name and module not in sys.modules:
            print(f"{source.path} imports {module} ({key})", file=sys.stderr)
            try:
                import_user_defined(name, from_here=False)
            except ValueError as error:
                raise source.located(RecipeError(Problem(key, str(error)))) from error


def check_recipe(recipe: Recipe, source: RecipeSource | None = None, *, warm_start: bool = False) -> None:
    """Resolve every name in the recipe and look for the files it needs.

    Args:
        recipe: A recipe whose types and combinations are right.
        source: Where it was read from; with it, problems name the line or the override.
        warm_start: Check for `srtrl warm-start`, which may make the model that the recipe names.

    Raises:
        RecipeError: listing every problem.
    """
    problems: list[Problem] = []
    for key, check in _checks(recipe, warm_start=warm_start):
        try:
            check()
        except RecipeError as error:
            problems.extend(error.problems)
        except (ValueError, OSError) as error:  # of the system: a path that is too long
            problems.append(_problem_of(error, key))
    if problems:
        raise source.located(RecipeError(*problems)) if source else RecipeError(*problems)


def _checks(recipe: Recipe, *, warm_start: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Pairs of a key of the recipe and a function that raises ValueError where its value cannot be used."""
    from srtrl.environments.formats import resolve_format
    from srtrl.run.trackers import check_trackers
    from srtrl.tasks.base import check_task
    from srtrl.tasks.reward_terms import resolve_rewards
    from srtrl.trainer.build import build_drafter, choose_device

    algorithm = recipe.algorithm
    functions = [
        ("algorithm.reduction", REDUCTION, algorithm.reduction),
        ("algorithm.kl.estimator", KL_ESTIMATOR, algorithm.kl.estimator),
        *((f"algorithm.filters.{index}", FILTER, name) for index, name in enumerate(algorithm.filters)),
    ]
    if recipe.critic is not None:
        functions.append(("critic.value_loss", VALUE_LOSS, recipe.critic.value_loss))
    for key, call, name in functions:
        yield key, partial(_check_function, re.sub(r"\.\d+$", "", key), name, call)
    yield "algorithm.advantage", partial(_check_advantage, recipe)
    yield "algorithm.loss", partial(_check_loss, recipe)
    yield "rewards", partial(resolve_rewards, recipe.rewards)
    yield "task.name", partial(check_task, recipe)
    yield "model.path", partial(_check_model, recipe, warm_start=warm_start)
    yield "rollout.drafter", partial(build_drafter, recipe)
    if recipe.rollout.environment is not None:
        # Resolves the environment as well.
        yield "rollout.environment.name", partial(resolve_format, recipe.rollout.environment)
    yield "output_dir", partial(_check_folder, recipe.output_dir)
    if recipe.warm_start is not None:
        yield "warm_start.output", partial(_check_output, recipe.warm_start.output)
    yield "device", partial(choose_device, recipe)
    yield "log.trackers", partial(check_trackers, recipe.log)


def _problem_of(error: Exception, default_key: str) -> Problem:
    """The problem of the option with which the message begins ("task.options.train.files.0: no file ...")."""
    key, _, message = str(error).partition(": ")
    if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)*", key) and key.partition(".")[0] == default_key.partition(".")[0]:
        return Problem(key, message)
    return Problem(default_key, str(error))


def _check_function(option: str, name: str, call: Call) -> None:
    check_call(name, resolve_part(option, name), *call)


def _check_advantage(recipe: Recipe) -> None:
    """Call an advantage as the trainer will, on two groups; there is a critic if, and only if, it needs one."""
    import torch

    from srtrl.algorithms.advantages import is_token_level, needs_critic

    algorithm, name = recipe.algorithm, recipe.algorithm.advantage
    function = resolve_part("algorithm.advantage", name)
    check_call(name, function, *(TOKEN_ADVANTAGE if is_token_level(function) else ADVANTAGE))
    problems = []
    if is_token_level(function) and algorithm.loss == "gspo":
        message = f"gspo needs one advantage per response, but {name} gives one per token: expected gspo_token"
        problems.append(Problem("algorithm.loss", message))
    if needs_critic(function) and recipe.critic is None:
        problems.append(Problem("algorithm.advantage", f"{name} needs a critic: add a section `critic: {{}}`"))
    if recipe.critic is not None and not needs_critic(function):
        message = f"algorithm.advantage {name} uses no critic (no @token_level(needs_critic=True))"
        problems.append(Problem("critic", f"{message}: remove this section, or use gae"))
    if problems:
        raise RecipeError(*problems)
    rewards = torch.arange(2.0 * recipe.rollout.num_samples, dtype=torch.float64).reshape(2, -1)  # [G, S]
    result: object = None
    with Caught() as caught:
        if is_token_level(function):
            tokens, index = rewards.reshape(-1, 1), torch.arange(2).repeat_interleave(rewards.shape[1])
            mask = torch.ones_like(tokens, dtype=torch.bool)  # [B, L], responses of one token
            options = {"group_index": index, "gamma": algorithm.gamma, "lam": algorithm.lam}
            result = function(tokens, torch.zeros_like(tokens), mask, **options)
        else:
            result = function(rewards)
    if caught.error is not None:
        raise ValueError(f"`{name}`, tried on two groups, raised {describe_error(caught.error)}") from caught.error
    if not isinstance(result, torch.Tensor):
        raise ValueError(f"`{name}` must return a tensor, tried on two groups it returned {result!r:.80}")


def _check_loss(recipe: Recipe) -> None:
    """Call the loss as the trainer will, on two tokens: it checks its own options."""
    import torch

    algorithm, name, options = recipe.algorithm, recipe.algorithm.loss, recipe.algorithm.loss_options
    function = resolve_part("algorithm.loss", name)
    num_positional, keywords = LOSS
    if both := set(keywords).intersection(options):
        raise ValueError(f"algorithm.loss_options.{min(both)}: set algorithm.{min(both)} instead")
    tokens, index = torch.tensor([-0.5, -1.5]), torch.zeros(2, dtype=torch.int64)
    clip = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    with Caught() as caught:
        check_call(name, function, num_positional, (*keywords, *options))
        if options:
            function(tokens, tokens, tokens, index, **clip, **options)
    if isinstance(error := caught.error, ValueError):
        raise RecipeError(_problem_of(error, "algorithm.loss_options" if options else "algorithm.loss")) from error
    if error is not None:
        tried = f"`{name}` with {options}, tried on two tokens, raised {describe_error(error)}"
        raise ValueError(f"algorithm.loss_options: {tried}") from error


def _check_model(recipe: Recipe, *, warm_start: bool) -> None:
    """Check that a local model, or the architecture of a warm start, is supported and has room for the lengths."""
    from srtrl.model.weights import has_tokenizer, is_local, read_config

    model, tokenizer = recipe.model.path, recipe.model.tokenizer
    architecture = recipe.warm_start.architecture if warm_start and recipe.warm_start else None
    if tokenizer is not None and is_local(tokenizer) and not has_tokenizer(tokenizer):
        raise RecipeError(Problem("model.tokenizer", f"{tokenizer} holds no tokenizer (tokenizer.json or the like)"))
    if architecture is not None:
        model, num_positions = "warm_start.architecture", architecture.max_position_embeddings
    elif is_local(model):
        num_positions = read_config(model).max_position_embeddings
    else:
        return
    longest = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens
    if longest > num_positions:
        message = (
            f"max_prompt_tokens + max_new_tokens = {longest} is more than the {num_positions} positions of {model}"
        )
        raise RecipeError(Problem("rollout.max_new_tokens", message))


def _check_folder(folder: str) -> None:
    """Refuse a folder whose path, or the beginning of it, is a file."""
    for path in (Path(folder), *Path(folder).parents):
        if path.exists() and not path.is_dir():
            raise ValueError(f"{folder}: {path} is a file, expected a folder")


def _check_output(folder: str) -> None:
    """Refuse the current folder, or one around it, which a result cannot replace."""
    _check_folder(folder)
    if Path.cwd().is_relative_to(Path(folder).resolve()):
        raise ValueError(f"{folder} holds the current folder, expected another one")
