"""Checks of a recipe before any weight is loaded: names, signatures, options of tasks and losses, local paths."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from srtrl.recipe.file import Problem, RecipeError, RecipeSource, build_recipe, validate_section
from srtrl.recipe.schema import STATIC_ORDERS, AlgorithmSection, EnvironmentSection, Recipe, TaskSection
from srtrl.resolve import Caught, check_call, declared, describe_error, describe_value, resolve_part, restore_process

OPTION = re.compile(r"[a-z_]+(\.[a-z_0-9]+)*: ")
"""Begins messages that name an option."""


def build_checked(source: RecipeSource, *, warm_start: bool = False, downloads: bool = False) -> Recipe:
    """The recipe of `source`, with every name and local path in it checked; see `check_recipe`."""
    recipe = build_recipe(source)
    check_recipe(recipe, source, warm_start=warm_start, downloads=downloads)
    return recipe


def check_recipe(
    recipe: Recipe, source: RecipeSource | None = None, *, warm_start: bool = False, downloads: bool = False
) -> None:
    """Resolve every name in the recipe and look for the files it needs.

    Args:
        recipe: A recipe whose types and combinations are right.
        source: Where it was read from; with it, problems name the line or the override.
        warm_start: Check for `srtrl warm-start`, which may make the model that the recipe names.
        downloads: Check the models on the hub, too, as a run does that needs them; each is downloaded.

    Raises:
        RecipeError: listing every problem.
    """
    restore_process("this program")
    problems: list[Problem] = []
    for key, check in _checks(recipe, warm_start=warm_start, downloads=downloads):
        try:
            check()
        except RecipeError as error:
            problems.extend(error.problems)
        except (ValueError, OSError) as error:  # of the system: a path that is too long
            problems.append(_problem_of(error, key))
    if problems:
        raise source.located(RecipeError(*problems)) if source else RecipeError(*problems)


def check_data(recipe: Recipe) -> Recipe:
    """Load the task as training will, where that needs no network; the recipe with its number of steps.

    Raises:
        ValueError: what training would refuse.
    """
    from srtrl import build
    from srtrl.model.folders import is_local
    from srtrl.tasks.base import needs_network
    from srtrl.trainer.evaluate import training_evals

    paths = [recipe.model.path, recipe.model.tokenizer or recipe.model.path]
    makes_model = recipe.warm_start is not None and recipe.warm_start.architecture is not None
    if makes_model or not all(map(is_local, paths)) or needs_network(recipe.task):
        return recipe
    tokenizer, _, task = build.load_data(recipe)
    build.response_end_ids(recipe.model.path, tokenizer)
    build.build_order(recipe, task)
    training_evals(task, recipe)
    return build.with_num_steps(recipe, task)


def _checks(recipe: Recipe, *, warm_start: bool, downloads: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Pairs of a key of the recipe and a function that raises ValueError where its value cannot be used."""
    from srtrl.run.machine import choose_device
    from srtrl.run.trackers import check_trackers
    from srtrl.tasks.base import check_task
    from srtrl.tasks.reward_terms import resolve_rewards

    yield "algorithm.advantage", partial(_check_advantage, recipe)
    for key, *call in _trials(recipe):
        yield key, partial(_try, key.rstrip(".0123456789"), *call)
    yield "algorithm.filter_options", partial(_check_filter_options, recipe.algorithm)
    yield "rewards", partial(resolve_rewards, recipe.rewards)
    yield "task.name", partial(check_task, recipe)
    if recipe.data.order not in STATIC_ORDERS:
        yield "data.order", partial(resolve_part, "data.order", recipe.data.order)
    yield from _model_checks(recipe, warm_start=warm_start, downloads=downloads)
    yield "rollout.drafter", partial(_check_drafter, recipe)
    if recipe.rollout.environment is not None:
        yield "rollout.environment.name", partial(_check_environment, recipe.rollout.environment)
    yield "output_dir", partial(check_folder, recipe.output_dir)
    if recipe.warm_start is not None:
        yield "warm_start.output", partial(_check_output, recipe.warm_start.output)
    yield "device", partial(choose_device, recipe)
    yield "log.trackers", partial(check_trackers, recipe.log)


def _check_environment(section: EnvironmentSection) -> None:
    """Resolve environment and format."""
    from srtrl.environments.base import resolve_environment
    from srtrl.environments.formats import resolve_format

    resolve_format(section)
    resolve_environment(section)


def _problem_of(error: Exception, default_key: str) -> Problem:
    """The problem of the option with which the message begins ("task.options.train.files.0: no file ...")."""
    key, _, message = str(error).partition(": ")
    if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)*", key) and key.partition(".")[0] == default_key.partition(".")[0]:
        return Problem(key, message)
    return Problem(default_key, str(error))


def _try(
    option: str,
    name: str,
    arguments: Sequence[Any],
    given: Mapping[str, Any],
    offered: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Call a function that the recipe names as the trainer will, on made-up data.

    Args:
        option: It names the function, `name`.
        name: Of the function.
        arguments: By position.
        given: By name.
        offered: By name, where the function declares them.
        options: Of the recipe.

    Raises:
        ValueError: the function takes other arguments, raises, or returns something else.
    """
    from srtrl.trainer.credit import check_returned

    if both := options.keys() & {*given, *offered}:
        instead = f"set algorithm.{min(both)} instead" if min(both).startswith("clip_") else "the trainer gives it"
        raise ValueError(f"{option}_options.{min(both)}: {instead}")
    function = resolve_part(option, name)
    keywords = {**given, **declared(function, len(arguments), offered), **options}
    where = f"{option}_options: " if options else ""
    try:
        check_call(name, function, len(arguments), keywords)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from error
    with Caught() as caught:
        returned = function(*arguments, **keywords)
    _report(caught.error, f"{where}`{name}` with {dict(options)}" if options else f"`{name}`")
    is_loss, values = option in ("algorithm.loss", "critic.value_loss"), {"it returned": returned}
    if is_loss:
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
            expected = "(token_loss, metrics), a tensor and a dictionary of tensors"
            raise ValueError(f"{option}: `{name}` must return {expected}; it returned: {describe_value(returned)}")
        values = {"its loss": returned[0], **returned[1]}
    for what, value in values.items():
        check_returned(option, name, value, arguments[0], what)
    scalar = returned[0] if is_loss else returned
    if (is_loss or option == "algorithm.reduction") and not scalar.requires_grad:
        raise ValueError(f"{option}: `{name}` returned a loss without gradient (detached?)")


def _report(error: BaseException | None, what: str) -> None:
    """Raise an error of a user's function as ValueError; one that names an option (of its own, say) as it is."""
    if isinstance(error, RecipeError) or (isinstance(error, ValueError) and OPTION.match(str(error))):
        raise error
    if error is not None:
        raise ValueError(f"{what}, tried on made-up data, raised {describe_error(error)}") from error


def _trials(recipe: Recipe) -> Iterator[tuple[Any, ...]]:
    """For each function of tensors that a recipe names, but the advantage: its key, and what `_try` takes."""
    import torch

    algorithm, critic = recipe.algorithm, recipe.critic
    logprobs = torch.tensor([-0.5, -1.5, -1.0, -2.0], requires_grad=True)  # [R], of two sequences
    numbers, index = logprobs.detach(), torch.tensor([0, 0, 1, 1])
    clip = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    offered: dict[str, Any] = {"entropy": -logprobs, "rollout_logprobs": numbers}
    offered |= {"ref_logprobs": numbers} if recipe.has_reference else {}
    losses = [logprobs, numbers, numbers + 1, index]
    lengths = {"sequence_lengths": torch.tensor([2, 2]), "max_new_tokens": recipe.rollout.max_new_tokens}
    yield "algorithm.loss", algorithm.loss, losses, clip, offered, algorithm.loss_options
    yield "algorithm.kl.estimator", algorithm.kl.estimator, [logprobs, numbers], {}, {}, {}
    yield "algorithm.reduction", algorithm.reduction, [logprobs, index], lengths, {}, {}
    if critic is not None:
        yield "critic.value_loss", critic.value_loss, losses, {"value_clip": critic.value_clip}, {}, {}
    rewards = torch.arange(2.0 * recipe.rollout.num_samples, dtype=torch.float64).reshape(2, -1)  # [G, S]
    for number, name in enumerate(algorithm.filters):
        yield f"algorithm.filters.{number}", name, [rewards, rewards > 0], {}, algorithm.filter_options, {}


def _has_own_rewards(section: TaskSection) -> bool:
    """Whether it has several tasks, and one of them has rewards of its own."""
    from srtrl.tasks.mixture import MixtureOptions

    if section.name != "mixture":
        return False
    with suppress(ValueError):  # the check of the task reports it
        options = validate_section(MixtureOptions, dict(section.options), "task.options")
        return any(task.rewards for task in options.tasks)
    return False


def _check_advantage(recipe: Recipe) -> None:
    """Call the advantage on two groups; there is a critic if, and only if, it needs one."""
    import torch

    from srtrl.algorithms.advantages import is_token_level, needs_values

    algorithm, name = recipe.algorithm, recipe.algorithm.advantage
    function = resolve_part("algorithm.advantage", name)
    problems = []
    if is_token_level(function) and algorithm.loss == "gspo":
        message = f"gspo needs one advantage per response, but {name} gives one per token: expected gspo_token"
        problems.append(Problem("algorithm.loss", message))
    parameters = inspect.signature(function).parameters.keys()
    if not is_token_level(function) and {"values", "mask"} & parameters:
        message = f"{name} takes values or a mask, as advantages of tokens do: put `@token_level` of"
        problems.append(Problem("algorithm.advantage", f"{message} srtrl.algorithms.advantages before it"))
    if "reward_weights" in parameters and _has_own_rewards(recipe.task):
        message = f"{name} reads one weight for each reward, and tasks with `rewards` of their own have others"
        problems.append(Problem("algorithm.advantage", f"{message}: expected the same rewards for all tasks"))
    if needs_values(function) and recipe.critic is None:
        problems.append(Problem("algorithm.advantage", f"{name} needs a critic: add a section `critic: {{}}`"))
    if recipe.critic is not None and not needs_values(function):
        message = f"algorithm.advantage {name} uses no critic (no @token_level(needs_values=True))"
        problems.append(Problem("critic", f"{message}: remove this section, or use gae"))
    if problems:
        raise RecipeError(*problems)
    if recipe.teaches_alone and recipe.rollout.num_samples == 1 and not is_token_level(function):
        return  # it is not called
    rewards = torch.arange(2.0 * recipe.rollout.num_samples, dtype=torch.float64).reshape(2, -1)  # [G, S]
    arguments, given = [rewards], {}
    if is_token_level(function):  # of responses of one token, [B, 1]
        arguments = [rewards.reshape(-1, 1), rewards.reshape(-1, 1), rewards.reshape(-1, 1) >= 0]
        index = torch.arange(2).repeat_interleave(rewards.shape[1])
        given = {"group_index": index, "gamma": algorithm.gamma, "lam": algorithm.lam}
        rewards = rewards.flatten()
    weights = {reward.name.rpartition(":")[2]: reward.weight for reward in recipe.rewards}
    offered = {"reward_terms": dict.fromkeys(weights, rewards), "reward_weights": weights, "correct": rewards > 0}
    offered |= {"lengths": torch.ones_like(rewards).long(), "prompt_ids": ["one", "two"], "step": 1}
    _try("algorithm.advantage", name, arguments, given, offered, algorithm.advantage_options)


def _check_filter_options(algorithm: AlgorithmSection) -> None:
    """Each option must be an argument of a filter."""
    for option in algorithm.filter_options:
        if not any(declared(resolve_part("algorithm.filters", name), 2, {option: 0}) for name in algorithm.filters):
            raise ValueError(f"no filter declares an argument `{option}`")


def _check_drafter(recipe: Recipe) -> None:
    """Let a user-defined drafter draft for one sample."""
    import numpy as np

    from srtrl.build import build_drafter
    from srtrl.drafters.base import end_to_end
    from srtrl.drafters.draft_tree import check_trees
    from srtrl.trainer.sampling import train_sampling
    from srtrl.types import Request

    name, slots, max_nodes = recipe.rollout.drafter, np.zeros(1, np.int64), np.full(1, 4)
    with Caught() as caught:
        drafter = build_drafter(recipe)
        if ":" not in name:
            return
        sample: dict[str, Any] = {"prompt_id": "made up", "draw_index": 0, "sample_index": 0, "rng_key": 0}
        sample |= {"prompt_token_ids": (1, 2), "sampling": train_sampling(recipe, (0,))}
        drafter.start(slots, [Request(**sample)])
        drafter.observe(slots, *end_to_end([[2]]))
        trees = drafter.propose(slots, max_nodes, 0.0)
        drafter.finish([0], [None])
    _report(caught.error, f"`{name}`")
    check_trees(trees, max_nodes, 2**31, str(drafter))


def _model_checks(recipe: Recipe, *, warm_start: bool, downloads: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """As `_checks`, of each option that names the folder of a model or a tokenizer, or a model on the hub."""
    from srtrl.model.folders import is_local

    paths = {
        option: path
        for option, path in recipe.model_paths.items()
        if is_local(path) or (downloads and (option.startswith("model.") or not warm_start))  # which needs no others
    }
    architecture = recipe.warm_start.architecture if warm_start and recipe.warm_start else None
    if "model.tokenizer" in paths:
        yield "model.tokenizer", partial(_check_tokenizer, paths["model.tokenizer"])
    if architecture is not None:
        lengths = partial(_check_lengths, recipe, "warm_start.architecture", architecture.max_position_embeddings)
        yield "rollout.max_new_tokens", lengths
    elif "model.path" in paths:
        yield "model.path", partial(_check_model, recipe, paths["model.path"])
        head = recipe.rollout.draft_head
        if head is not None and head.kind == "mtp":
            yield "rollout.draft_head.kind", partial(_check_draft_head, recipe)
        if "rollout.draft_head.path" in paths:
            yield "rollout.draft_head.path", partial(_check_draft_head, recipe)
    if "algorithm.teacher.path" in paths:
        has_policy = ("model.path" if recipe.model.tokenizer is None else "model.tokenizer") in paths
        teacher = partial(_check_teacher, recipe, paths["algorithm.teacher.path"], has_policy=has_policy)
        yield "algorithm.teacher.path", teacher


def _check_tokenizer(path: str) -> None:
    """Check that there is a tokenizer in a folder."""
    from srtrl.model.folders import has_tokenizer

    if not has_tokenizer(path):
        raise ValueError(f"{path} holds no tokenizer (tokenizer.json or the like)")


def _check_draft_head(recipe: Recipe) -> None:
    """Check that a pretrained draft head is for the policy: read it as training will, beside no weights."""
    import torch

    from srtrl.build_models import build_attention_head
    from srtrl.model.files import weight_files
    from srtrl.model.folders import locate
    from srtrl.model.transformer import Transformer
    from srtrl.model.weights import carried_tensors, read_config

    folder = locate(recipe.model.path)
    policy = Transformer(read_config(folder), torch.bfloat16, "meta")
    policy.carried = carried_tensors(weight_files(folder))
    build_attention_head(recipe, policy)


def _check_model(recipe: Recipe, path: str) -> None:
    """Check that a model is supported, has its weights, and has room for the lengths and for LoRA's rank."""
    from srtrl.features.lora import check_rank
    from srtrl.model.folders import locate
    from srtrl.model.weights import check_weights, read_config

    config = read_config(path)
    check_weights(locate(path), config)
    _check_lengths(recipe, path, config.max_position_embeddings)
    if recipe.model.lora is not None and path == recipe.model.path:
        check_rank(recipe.model.lora, config)


def _check_lengths(recipe: Recipe, model: str, num_positions: int) -> None:
    """Check that prompt and response fit into a model."""
    longest = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens
    if longest > num_positions:
        message = (
            f"max_prompt_tokens + max_new_tokens = {longest} is more than the {num_positions} positions of {model}"
        )
        raise RecipeError(Problem("rollout.max_new_tokens", message))


def _check_teacher(recipe: Recipe, path: str, *, has_policy: bool) -> None:
    """As `_check_model`, and with a policy whose tokenizer is there compare the vocabularies."""
    from srtrl.build import build_tokenizer
    from srtrl.features.teacher import check_vocabulary
    from srtrl.model.folders import load_tokenizer

    _check_model(recipe, path)
    tokenizer = None
    with suppress(ValueError):  # the checks of the policy report it
        tokenizer = build_tokenizer(recipe) if has_policy else None
    if tokenizer is not None:
        check_vocabulary(tokenizer, load_tokenizer(path))


def check_folder(folder: str) -> None:
    """Refuse a folder whose path, or the beginning of it, is a file."""
    for path in (Path(folder), *Path(folder).parents):
        if path.exists() and not path.is_dir():
            raise ValueError(f"{folder}: {path} is a file, expected a folder")


def _check_output(folder: str) -> None:
    """Refuse the current folder, or one around it, which a result cannot replace."""
    check_folder(folder)
    if Path.cwd().is_relative_to(Path(folder).resolve()):
        raise ValueError(f"{folder} holds the current folder, expected another one")
