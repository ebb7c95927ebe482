"""From a recipe to the parts of a run: with `build_models.py` the place that says which of `features/` a recipe has."""

from __future__ import annotations

import logging
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast

import numpy as np

from srtrl import ranks
from srtrl.cuda.compiler import check_triton
from srtrl.drafters.base import DrafterBase, resolve_drafter
from srtrl.engine.batch import Batch
from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.draft_budget import MAX_ROWS, StepCost
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.engine.kv_memory import CPU_SLOTS, GRAPH_BYTES, choose_slots, free_bytes, kv_bytes
from srtrl.engine.no_run_ahead import NoRunAhead
from srtrl.engine.runner import PAGE_SIZE, Runner, page_bytes_of
from srtrl.engine.stopping import UNKNOWN, count_unknown
from srtrl.engine.warm_up import compile_kernels
from srtrl.environments.turns import EnvironmentTurns
from srtrl.features.attention_drafter import AttentionDrafter, AttentionGuesser, entry_bytes
from srtrl.features.attention_head import AttentionHead
from srtrl.features.critic import values_column
from srtrl.features.draft_head import DraftHead
from srtrl.features.head_drafter import HeadDrafter, wrap_for_warm_up
from srtrl.features.off_policy import PartialSampler, SpecRlSampler, age_metrics
from srtrl.features.run_ahead import RunAhead
from srtrl.features.sharing import SeveralRanks
from srtrl.features.teacher import teach
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.folders import end_token_ids, load_tokenizer
from srtrl.ranks.sharding import resharded_after, unshard
from srtrl.recipe.conflicts import find_conflicts
from srtrl.recipe.file import Problem, RecipeError, validate_section
from srtrl.recipe.schema import STATIC_ORDERS, Recipe
from srtrl.rollout.one_rank import OneRank
from srtrl.rollout.one_turn import OneTurn
from srtrl.run.checkpoint import PolicyFiles, checkpoint_to_resume, digest_models, digest_prompts
from srtrl.run.folder import OBSERVATIONS, check_run_folder
from srtrl.run.interrupt import explain_out_of_memory
from srtrl.run.machine import choose_device
from srtrl.run.place import StartFlags, TrainingResult
from srtrl.run.trackers import check_trackers
from srtrl.tasks.base import TaskBase, load_task
from srtrl.tasks.grading import Grader
from srtrl.tasks.order import Order
from srtrl.trainer.credit import CreditAssigner
from srtrl.trainer.evaluate import training_evals
from srtrl.trainer.objective import PolicyLearner, logprobs_column
from srtrl.trainer.passes import Column
from srtrl.trainer.sampling import RolloutContext, Sampler
from srtrl.trainer.trainer import OnStep, Parts, Trainer, seed_generators

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.model.transformer import Transformer

from srtrl.build_models import Models, load_models

logger = logging.getLogger(__name__)

PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}
"""Prompt tokens computed in one decode step at most, by type of device."""


def run_training(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    from_step: int | None = None,
    on_step: OnStep = lambda *_: None,
) -> TrainingResult:
    """Train as the recipe says, into the folder `<output_dir>/<name>`.

    Args:
        recipe: From `load_recipe`.
        resume: Continue from the last checkpoint of the run's folder; options of `recipe` that differ from the run's
            hold from there on, except those that cannot change within a run.
        overwrite: Rename a folder that is in the way to `NAME.1` (or the next free number) and begin again.
        from_step: With `resume`, the step whose checkpoint to continue from; later checkpoints are deleted (the option
            `--checkpoint`).
        on_step: See `OnStep`. An exception from it ends the run; `resume` continues it from its last checkpoint.

    Raises:
        ValueError: a mistake in the recipe, its data or the flags.
        TrainingStoppedError: a number is not finite, decoder and trainer differ, or memory is short; see the message.
        KeyboardInterrupt: the second Ctrl-C.
    """
    flags = StartFlags(resume=resume, overwrite=overwrite, from_step=from_step)
    with ranks.open_ranks(), Trainer(build_parts(recipe, **flags), on_step=on_step) as trainer:
        trainer.train()
        interrupted = trainer.step < trainer.recipe.train.num_steps
        return TrainingResult(folder=trainer.run.path, num_steps=trainer.step, interrupted=interrupted)


def build_parts(recipe: Recipe, **flags: Unpack[StartFlags]) -> Parts:
    """The parts of a run, with the weights of the recipe's model or, with `resume`, of a checkpoint.

    Args:
        recipe: Everything that decides the run.
        flags: How the run begins; see `StartFlags`.

    Raises:
        ValueError: a mistake in the recipe, its data or the flags; cheap checks come before any weight is loaded.
    """
    seed_generators(recipe.seed, 0)
    data = None
    if recipe.train.num_passes is not None:
        with ranks.synchronized("counting the training prompts"):
            data = load_data(recipe)
            recipe = with_num_steps(recipe, data[2])
    changes, checkpoint = ranks.on_main(lambda: _check_start(recipe, flags), "checks of rank 0")
    device = choose_device(recipe)
    set_cpu_threads(recipe.num_threads, device=device.type)
    with ranks.synchronized("loading the task and the models"), explain_out_of_memory("loading the models"):
        tokenizer, turns, task = data or load_data(recipe)
        end_ids = response_end_ids(recipe.model.path, tokenizer)
        digests = {"prompts_sha256": digest_prompts(task.train_prompts, checkpoint)}
        training_evals(task, recipe)  # raises if there are no problems for it
        models = load_models(recipe, checkpoint, device)
        digests |= digest_models(recipe, checkpoint)
    unshard(models.policy, in_place=True)  # of all ranks; an error within `synchronized` would leave the others waiting
    with ranks.synchronized("loading the decoder"), explain_out_of_memory("loading the decoder"):
        observers = [] if models.draft_head is None else [models.draft_head]
        policy_learner = PolicyLearner(models.policy, models.optimizer, recipe, observers)
        engine = build_training_engine(recipe, models, tokenizer, task)
        context = RolloutContext(
            recipe=recipe,
            engine=engine,
            grader=Grader(task, recipe.rewards, recipe.grading),
            tokenizer=tokenizer,
            end_ids=end_ids,
            turns=turns,
            ranks=choose_ranks(),
        )
        credit = build_credit(recipe)
        return Parts(
            context=context,
            task=task,
            sampler=build_sampler(context, task, credit, build_order(recipe, task)),
            credit=credit,
            columns=build_columns(recipe, models),
            learners=[policy_learner] if models.critic is None else [models.critic, policy_learner],
            policy=policy_learner,
            saved=[PolicyFiles(model=models.policy, tokenizer=tokenizer, end_ids=end_ids), engine.drafter],
            digests=digests,
            flags=flags,
            checkpoint=checkpoint,
            changes=changes,
        )


def load_data(recipe: Recipe) -> tuple[PreTrainedTokenizerBase, OneTurn, TaskBase]:
    """Load the task as the recipe says, after the tokenizer and the environment whose tools its prompts show.

    Raises:
        ValueError: a mistake in the data, the environment or the tokenizer.
    """
    tokenizer = build_tokenizer(recipe)
    turns = build_turns(recipe, tokenizer, recipe.folder / OBSERVATIONS)
    return tokenizer, turns, load_task(recipe, tokenizer, tools=turns.tools)


def with_num_steps(recipe: Recipe, task: TaskBase) -> Recipe:
    """The recipe with `train.num_passes` turned into `train.num_steps` by the number of training prompts.

    Raises:
        ValueError: a value does not go with this number.
    """
    if (num_passes := recipe.train.num_passes) is None:
        return recipe
    num_steps = ceil(Fraction(str(num_passes)) * len(task.train_prompts) / recipe.rollout.num_prompts)
    train = recipe.train.model_copy(update={"num_steps": num_steps, "num_passes": None})
    counted = recipe.model_copy(update={"train": train})
    if conflicts := [Problem(*conflict) for conflict in find_conflicts(counted)]:
        raise RecipeError(*conflicts)
    return counted


def _check_start(recipe: Recipe, flags: StartFlags) -> tuple[list[str], Path | None]:
    """Check flags, folder and trackers; returns the changes since the run to resume, and its checkpoint."""
    changes = check_run_folder(recipe, **flags)
    check_trackers(recipe.log)
    if not flags.get("resume"):
        return changes, None
    return changes, checkpoint_to_resume(recipe.folder / "checkpoints", flags.get("from_step"))


def build_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer of the recipe's model, or the one it names."""
    return load_tokenizer(recipe.model.tokenizer or recipe.model.path)


def choose_ranks() -> OneRank:
    """Choose this process's part of each rollout: with one rank all of it."""
    return SeveralRanks() if ranks.count() > 1 else OneRank()


def build_columns(recipe: Recipe, models: Models) -> list[Column]:
    """Numbers that passes compute before credit is assigned: log-probs of reference, teacher and policy, and values."""
    columns, temperature = [], recipe.rollout.temperature
    if models.reference is not None:
        is_policy = models.reference is models.policy  # with LoRA
        around = models.optimizer.base_weights if is_policy else partial(resharded_after, models.reference)
        columns.append(logprobs_column("reference", "ref_logprobs", models.reference, temperature, around))
    if models.teacher is not None:
        around = partial(resharded_after, models.teacher)
        columns.append(logprobs_column("teacher", "teacher_logprobs", models.teacher, temperature, around))
    if recipe.algorithm.old_logprobs == "recompute":
        columns.append(logprobs_column("old_logprobs", "old_logprobs", models.policy, temperature))
    if models.critic is not None:
        columns.append(values_column(models.critic.model))
    return columns


def build_credit(recipe: Recipe) -> CreditAssigner:
    """Build the credit assigner, with metrics of ages if tokens have ages, and with a teacher's advantages."""
    section = recipe.algorithm.teacher
    describe = (lambda _: {}) if recipe.rollout.mode == "on_policy" else age_metrics
    return CreditAssigner(recipe, describe, None if section is None else partial(teach, section))


def build_order(recipe: Recipe, task: TaskBase) -> Order:
    """Which training prompt is drawn when, by `data.order`.

    Raises:
        ValueError: there are no prompts, no such order, or it returns what is no order.
    """
    name = recipe.data.order
    if name in STATIC_ORDERS:
        return task.order(recipe.seed, is_shuffled=name == "shuffled")
    from srtrl.features.data_order import StatisticsOrder

    return StatisticsOrder(name, len(task.train_prompts), recipe.seed)


def build_sampler(context: RolloutContext, task: TaskBase, credit: CreditAssigner, order: Order) -> Sampler:
    """The sampler of `rollout.mode`."""
    samplers = {"on_policy": Sampler, "partial": PartialSampler, "spec_rl": SpecRlSampler}
    return samplers[context.recipe.rollout.mode](context, task, credit, order)


def build_training_engine(recipe: Recipe, models: Models, tokenizer: PreTrainedTokenizerBase, task: TaskBase) -> Engine:
    """The decoder of a run, made after all that takes memory for good: on CUDA it takes its share of the rest."""
    optimizers = [models.optimizer] if models.critic is None else [models.optimizer, models.critic.optimizer]
    reserved_bytes = max(optimizer.gradient_bytes for optimizer in optimizers)  # these models learn in turn
    head: DraftHead | AttentionHead | None = models.attention_head
    if models.draft_head is not None:
        head = models.draft_head.head
        reserved_bytes += models.draft_head.optimizer.gradient_bytes
        models.draft_head.head.count(np.concatenate([prompt.token_ids for prompt in task.train_prompts]))
    return build_engine(recipe, models.policy, tokenizer, reserved_bytes=reserved_bytes, draft_head=head)


def build_engine(
    recipe: Recipe,
    model: Transformer,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_samples: int | None = None,
    reserved_bytes: int = 0,
    draft_head: DraftHead | AttentionHead | None = None,
) -> Engine:
    """The decoder, on the weights of `model`.

    On a CUDA device it looks at what memory is free: all other weights and optimizers must be there already.

    Args:
        recipe: Its model and its rollouts.
        model: The policy.
        tokenizer: For stop strings.
        num_samples: Of one rollout, at most; by default those of a training step.
        reserved_bytes: Memory left for what the update will take beside its activations.
        draft_head: Of `rollout.draft_head`.
    """
    rollout, drafter, free = recipe.rollout, build_drafter(recipe), free_bytes(model.device)
    if free is not None and rollout.cuda_graphs:
        reserved_bytes += GRAPH_BYTES
    if num_unknown := count_unknown(tokenizer, np.arange(model.config.vocab_size)):
        logger.warning("the tokenizer lacks %d of the model's tokens; in texts they are %s", num_unknown, UNKNOWN)
    drafter_page_bytes, state_layers = 0, tuple[int, ...]()
    if isinstance(draft_head, AttentionHead):
        drafter_page_bytes, state_layers = entry_bytes(draft_head), draft_head.config.reads
    sizes = {"reserved_bytes": reserved_bytes, "drafter_page_bytes": drafter_page_bytes}
    options = EngineOptions(
        slots=number_of_slots(recipe, model, free, num_samples=num_samples, **sizes),
        kv_memory_gib=rollout.kv_memory_gib,
        kv_reserved_bytes=reserved_bytes,
        cuda_graphs=rollout.cuda_graphs,
        prefill_chunk_tokens=PREFILL_TOKENS[model.device.type],
        max_sequence_tokens=rollout.max_prompt_tokens + rollout.max_new_tokens,
        draft_budget=rollout.draft_budget,
        num_top=drafter.num_top,
        state_layers=state_layers,
        drafter_page_bytes=drafter_page_bytes,
    )
    runner = build_runner(model, options)
    cost = StepCost(runner.row_edges(MAX_ROWS))
    if rollout.draft_head is not None and draft_head is not None:
        drafter = add_head(rollout.draft_head.k, drafter, draft_head, runner, options, cost)
    return Engine(
        model,
        options,
        tokenizer=tokenizer,
        drafter=drafter,
        runner=runner,
        cost=cost,
        compile_kernels=partial(compile_kernels, wrap=wrap_for_warm_up if draft_head is not None else None),
        run_ahead=build_run_ahead(recipe, drafter),
    )


def add_head(
    k: int,
    inner: DrafterBase,
    head: DraftHead | AttentionHead,
    runner: Runner,
    options: EngineOptions,
    cost: StepCost,
) -> DrafterBase:
    """The drafter with `k` guesses of a head in its trees; `cost` decides where they pay, if it budgets drafts."""
    budget = cost if options.draft_budget == "auto" else None
    if isinstance(head, DraftHead):
        return cast(DrafterBase, HeadDrafter(inner, head, runner, k=k, slots=options.slots, cost=budget))
    guesser = AttentionGuesser(head, runner, options)
    return cast(DrafterBase, AttentionDrafter(inner, guesser, runner, k=k, slots=options.slots, cost=budget))


def build_runner(policy: Transformer, options: EngineOptions) -> Runner:
    """The runner for the policy's device, without pages yet; `options` say how long sequences may be.

    Raises:
        ValueError: as `check_triton`.
    """
    if policy.device.type == "cpu":
        return CpuRunner(policy, options)
    check_triton()
    from srtrl.cuda.runner import CudaRunner

    assert options.max_sequence_tokens is not None
    return CudaRunner(policy, options, options.max_sequence_tokens)


def number_of_slots(
    recipe: Recipe,
    model: Transformer,
    free: int | None,
    *,
    num_samples: int | None = None,
    reserved_bytes: int = 0,
    drafter_page_bytes: int = 0,
) -> int:
    """`rollout.slots`; if it is `auto`, as many as the KV cache will hold (see `kv_memory.choose_slots`).

    Args:
        recipe: As for `build_engine`, like `model`, `num_samples` and `reserved_bytes`.
        model: The policy.
        free: Memory of the CUDA device that new tensors could take, in bytes; None on a CPU.
        num_samples: The maximum: more slots would never be used.
        reserved_bytes: For the update.
        drafter_page_bytes: See `EngineOptions`.
    """
    rollout = recipe.rollout
    if rollout.slots != "auto" or free is None:
        slots = int(min(CPU_SLOTS if rollout.slots == "auto" else rollout.slots, num_samples or recipe.max_samples))
        if rollout.slots not in ("auto", slots) and num_samples is None:
            logger.warning("rollout.slots: %s are more than there are samples; %d are used", rollout.slots, slots)
        return slots
    return choose_slots(
        kv_bytes(rollout.kv_memory_gib, free, reserved_bytes=reserved_bytes),
        page_bytes=page_bytes_of(model, PAGE_SIZE) + drafter_page_bytes,
        page_size=PAGE_SIZE,
        max_sequence_tokens=rollout.max_prompt_tokens + rollout.max_new_tokens,
        num_samples=num_samples or rollout.num_prompts * rollout.num_samples,
    )


def build_drafter(recipe: Recipe) -> DrafterBase:
    """The drafter that the recipe names, with its options.

    Raises:
        ValueError: unknown, no drafter, or an option of it is wrong.
    """
    drafter_class = resolve_drafter("rollout.drafter", recipe.rollout.drafter)
    options = dict(recipe.rollout.drafter_options)
    return drafter_class(validate_section(drafter_class.Options, options, "rollout.drafter_options"))


def build_run_ahead(
    recipe: Recipe, drafter: DrafterBase
) -> Callable[[Batch, StepCost, DrafterBase], NoRunAhead] | None:
    """The constructor of the engine's run-ahead, if it is allowed and the drafter drafts from it; else None."""
    slowdown = recipe.rollout.run_ahead_max_slowdown
    if slowdown is None or recipe.rollout.draft_budget == 0 or not drafter.uses_texts:
        return None
    return partial(RunAhead, max_slowdown=slowdown)


def build_turns(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, record_folder: Path | None = None) -> OneTurn:
    """The environment that the recipe names, which answers where a turn ends; `OneTurn` if it names none.

    `record_folder`: see `EnvironmentTurns`.

    Raises:
        ValueError: the environment or its format is unknown or wrong, or does not fit the tokenizer.
    """
    environment = recipe.rollout.environment
    return OneTurn(tokenizer) if environment is None else EnvironmentTurns(environment, tokenizer, record_folder)


def response_end_ids(model_path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a response of the model at `model_path`; see `weights.end_token_ids`.

    Raises:
        ValueError: there is none, so that no response could ever end before the length limit.
    """
    ids = end_token_ids(model_path, tokenizer)
    if not ids:
        raise ValueError(f"{model_path}: neither its configs nor its tokenizer name an end token (eos_token_id)")
    return ids
