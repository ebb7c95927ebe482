"""From a recipe to the parts of a run: the one place that says which of `features/` a recipe has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import numpy as np
import torch

from srtrl import ranks
from srtrl.cuda.compiler import check_triton
from srtrl.cuda.flash import use_flash
from srtrl.drafters.base import DrafterBase, resolve_drafter
from srtrl.engine.background import Background
from srtrl.engine.batch import Batch
from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.draft_budget import MAX_ROWS, StepCost
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.engine.kv_memory import GRAPH_BYTES, choose_slots, free_bytes, kv_bytes
from srtrl.engine.runner import PAGE_SIZE, Runner, page_bytes_of
from srtrl.engine.stopping import UNKNOWN, count_unknown
from srtrl.engine.warm_up import compile_kernels
from srtrl.environments.turns import EnvironmentTurns
from srtrl.features.adapters import load_policy, read_adapter
from srtrl.features.critic import CRITIC_FOLDER, Critic, ValueModel, load_value_model, values_column
from srtrl.features.draft_head import DraftHead
from srtrl.features.draft_head_learner import DraftHeadLearner
from srtrl.features.head_drafter import HeadDrafter, wrap_for_warm_up
from srtrl.features.lora import LoraAdamW
from srtrl.features.off_policy import PartialSampler, SpecRlSampler, age_metrics
from srtrl.features.run_ahead import RunAhead
from srtrl.features.sharing import RankShare
from srtrl.features.teacher import check_scores, check_vocabulary, teach
from srtrl.model.attention import check_packed_attention
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.folders import base_name, end_token_ids, find_adapter, load_tokenizer, locate
from srtrl.ranks.sharding import shard, unshard
from srtrl.recipe.file import validate_section
from srtrl.recipe.schema import LoraSection, Recipe
from srtrl.rollout.share import Share
from srtrl.rollout.turns import Turns
from srtrl.run.checkpoint import PolicyFiles, checkpoint_to_resume, digest_model, digest_prompts
from srtrl.run.folder import OBSERVATIONS, check_run_folder
from srtrl.run.interrupt import explain_out_of_memory
from srtrl.run.machine import choose_device
from srtrl.run.place import StartFlags, TrainingResult
from srtrl.run.repeatable import fix_workspace
from srtrl.run.trackers import check_trackers
from srtrl.tasks.base import TaskBase, load_task
from srtrl.tasks.grading import Grader
from srtrl.trainer.credit import CreditAssigner
from srtrl.trainer.evaluate import training_evals
from srtrl.trainer.learner import Learner
from srtrl.trainer.objective import PolicyLearner, logprobs_column
from srtrl.trainer.optimizer import MasterAdamW, build_optimizer
from srtrl.trainer.passes import Column
from srtrl.trainer.sampling import RolloutContext, Sampler
from srtrl.trainer.trainer import Parts, Trainer, seed_generators

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.model.transformer import Transformer

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CPU_SLOTS = 64
"""`rollout.slots: auto` on a CPU."""
PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}
"""Prompt tokens computed in one decode step at most, by type of device."""


def run_training(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    from_step: int | None = None,
    on_step: Callable[[int, Mapping[str, float]], None] = lambda *_: None,
) -> TrainingResult:
    """Train as the recipe says, into the folder `<output_dir>/<name>`.

    Args:
        recipe: From `load_recipe`.
        resume: Continue from the last checkpoint of the run's folder; options of `recipe` that differ from the run's
            hold from there on, except those that cannot change within a run.
        overwrite: Rename a folder that is in the way to `NAME.1` (or the next free number) and begin again.
        from_step: With `resume`, the step whose checkpoint to continue from; later checkpoints are deleted (the option
            `--checkpoint`).
        on_step: Called after each training step with its number and its metrics (docs/metrics.md), which are on disk
            then. An exception from it ends the run; `resume` continues it from its last checkpoint.

    Raises:
        ValueError: a mistake in the recipe, its data or the flags.
        TrainingStoppedError: a number is not finite, decoder and trainer differ, or memory is short; see the message.
        KeyboardInterrupt: the second Ctrl-C.
    """
    flags = StartFlags(resume=resume, overwrite=overwrite, from_step=from_step)
    with ranks.open_ranks(), Trainer(build_parts(recipe, **flags), on_step=on_step) as trainer:
        trainer.train()
        interrupted = trainer.step < recipe.train.num_steps
        return TrainingResult(folder=trainer.run.path, num_steps=trainer.step, interrupted=interrupted)


def build_parts(recipe: Recipe, **flags: Unpack[StartFlags]) -> Parts:
    """The parts of a run, with the weights of the recipe's model or, with `resume`, of a checkpoint.

    Args:
        recipe: Everything that decides the run.
        flags: How the run begins; see `StartFlags`.

    Raises:
        ValueError: a mistake in the recipe, its data or the flags; cheap checks come before any weight is loaded.
    """
    changes, checkpoint = ranks.on_main(lambda: _check_start(recipe, flags), "checks of rank 0")
    device = choose_device(recipe)
    set_cpu_threads(recipe.num_threads, device=device.type)
    seed_generators(recipe.seed, 0)
    with ranks.synchronized("loading the task and the models"), explain_out_of_memory("loading the models"):
        tokenizer = build_tokenizer(recipe)
        end_ids = response_end_ids(recipe.model.path, tokenizer)
        turns = build_turns(recipe, tokenizer, recipe.folder / OBSERVATIONS)
        task = load_task(recipe, tokenizer, tools=turns.tools)
        prompts_sha256 = digest_prompts(task.train_prompts, checkpoint)
        training_evals(task, recipe)  # raises where there are no problems for it
        if recipe.repeatable and device.type == "cuda":
            fix_workspace()
        is_lora = recipe.model.lora is not None  # then the optimizer's state makes the policy of the base model
        first = locate(recipe.model.path) if is_lora else checkpoint or recipe.model.path
        policy = build_policy(recipe, str(first), device)
        shard_model(policy, recipe)
        optimizer = make_policy_optimizer(policy, recipe)
        reference = build_reference(recipe, policy, device)
        teacher = build_teacher(recipe, tokenizer, device)
        model_sha256 = digest_model(recipe.model.path, checkpoint, is_used=is_lora or reference is not None)
        draft_head = build_draft_head(recipe, policy)
        critic = build_critic(recipe, checkpoint, device)
    unshard(policy, in_place=True)  # of all ranks; an error within `synchronized` would leave the others waiting
    with ranks.synchronized("loading the decoder"), explain_out_of_memory("loading the decoder"):
        columns = build_columns(recipe, policy, optimizer, reference, teacher, critic)
        observers = [] if draft_head is None else [draft_head]
        policy_learner = PolicyLearner(policy, optimizer, recipe, observers)
        learners: list[Learner] = [*([] if critic is None else [critic]), policy_learner]
        # After everything that takes memory for good: on CUDA the engine takes its share of the rest.
        # One model learns after the other.
        reserved_bytes = max(learner.optimizer.gradient_bytes for learner in learners)
        head = None
        if draft_head is not None:
            head = draft_head.head
            reserved_bytes += draft_head.optimizer.gradient_bytes
            head.count(np.concatenate([prompt.token_ids for prompt in task.train_prompts]))
        engine = build_engine(recipe, policy, tokenizer, reserved_bytes=reserved_bytes, draft_head=head)
        context = RolloutContext(
            recipe=recipe,
            engine=engine,
            grader=Grader(task, recipe.rewards, recipe.grading, recipe.rollout.max_new_tokens),
            tokenizer=tokenizer,
            end_ids=end_ids,
            turns=turns,
            share=choose_share(),
        )
        credit = build_credit(recipe)
        return Parts(
            context=context,
            task=task,
            sampler=build_sampler(context, task, credit),
            credit=credit,
            columns=columns,
            learners=learners,
            policy=policy_learner,
            saved=[PolicyFiles(model=policy, tokenizer=tokenizer, end_ids=end_ids), engine.drafter],
            prompts_sha256=prompts_sha256,
            model_sha256=model_sha256,
            flags=flags,
            checkpoint=checkpoint,
            changes=changes,
        )


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


def build_policy(recipe: Recipe, path: str, device: torch.device) -> Transformer:
    """The policy with the weights of `path` (the recipe's model, or a checkpoint), in the recipe's dtype."""
    model = load_policy(path, dtype=DTYPES[recipe.model.dtype], device=device)
    set_update(model, recipe)
    return model


def set_update(model: Transformer, recipe: Recipe) -> None:
    """How a model that was loaded is updated: as the recipe says, on a CUDA device with kernels of its own.

    Raises:
        ValueError: as `check_triton`.
    """
    model.gradient_checkpointing = recipe.model.gradient_checkpointing
    if model.device.type == "cuda":
        check_triton()
        from srtrl.cuda.update import fuse_update

        fuse_update(model)


def choose_share() -> Share:
    """What this process takes of each rollout: with one rank all of it."""
    return RankShare() if ranks.count() > 1 else Share()


def shard_model(model: Transformer | ValueModel, recipe: Recipe) -> None:
    """Shard a model where `train.sharding` asks for it, before its optimizer is made; all ranks call this.

    Raises:
        ValueError: there is one process only.
    """
    if recipe.train.sharding == "fsdp2":
        if ranks.count() == 1:
            raise ValueError(
                "train.sharding: fsdp2 shares the weights among several processes, found one: start with torchrun, "
                "or leave train.sharding out"
            )
        shard(model)


def make_optimizer(
    model: Transformer | ValueModel,
    recipe: Recipe,
    *,
    learning_rate: float,
    weight_decay: float,
    lora: LoraSection | None = None,
) -> MasterAdamW:
    """AdamW with this learning rate and weight decay, for all weights or for `lora`; the rest is `train`'s.

    Raises:
        ValueError: the update's attention cannot run on the model's device in its type.
    """
    body = model.body if isinstance(model, ValueModel) else model
    check_packed_attention(body.device, DTYPES[recipe.model.dtype], body.config.head_dim)
    use_flash(recipe.train.attention, body.device, DTYPES[recipe.model.dtype], body.config)
    options: dict[str, Any] = {"weight_decay": weight_decay, "betas": recipe.train.betas}
    if lora is None:
        return build_optimizer(model, learning_rate=learning_rate, **options)
    base = base_name(recipe.model.path)
    optimizer = LoraAdamW(body, lora, seed=recipe.seed, base=base, lr=learning_rate, **options)
    if (folder := find_adapter(recipe.model.path)) is not None:
        optimizer.start_from(read_adapter(folder))
    return optimizer


def make_policy_optimizer(policy: Transformer, recipe: Recipe) -> MasterAdamW:
    """The policy's optimizer; with `model.lora` that of A and B, which start from the adapter at `model.path`, if any.

    Raises:
        ValueError: as `make_optimizer`, or that adapter is not what `model.lora` says.
    """
    rates = {"learning_rate": recipe.train.learning_rate, "weight_decay": recipe.train.weight_decay}
    return make_optimizer(policy, recipe, **rates, lora=recipe.model.lora)


def build_reference(recipe: Recipe, policy: Transformer, device: torch.device) -> Transformer | None:
    """The frozen reference policy, or None where the KL coefficient is 0.

    It is a second set of weights in memory; with LoRA it is the policy itself, inside `LoraAdamW.base_weights`.
    """
    if recipe.algorithm.kl.coefficient == 0:
        return None
    if recipe.model.lora is not None:
        return policy
    # Its log-probs are compared with the policy's: the same rounding.
    reference = build_policy(recipe, recipe.model.path, device).requires_grad_(False)
    shard_model(reference, recipe)
    return reference


def build_teacher(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> Transformer | None:
    """The frozen teacher of `algorithm.teacher`, a second set of weights in the policy's type; None without one.

    Raises:
        ValueError: its vocabulary is not the policy's, or its scores are no numbers that repeat.
    """
    section = recipe.algorithm.teacher
    if section is None:
        return None
    check_vocabulary(tokenizer, load_tokenizer(section.path))
    teacher = build_policy(recipe, section.path, device).requires_grad_(False)
    check_packed_attention(device, DTYPES[recipe.model.dtype], teacher.config.head_dim)
    check_scores(teacher)
    shard_model(teacher, recipe)
    return teacher


def build_critic(recipe: Recipe, checkpoint: Path | None, device: torch.device) -> Critic | None:
    """The critic with a fresh optimizer, or None where the recipe has none.

    Its weights are those of the checkpoint, else of `model.path`; a folder without a value head gets one that is zero.
    """
    section = recipe.critic
    if section is None:
        return None
    path = recipe.model.path if checkpoint is None else checkpoint / CRITIC_FOLDER
    model = load_value_model(path, dtype=DTYPES[recipe.model.dtype], device=device)
    set_update(model.body, recipe)
    shard_model(model, recipe)
    optimizer = make_optimizer(
        model, recipe, learning_rate=section.learning_rate, weight_decay=recipe.train.weight_decay
    )
    return Critic(model, optimizer, recipe)


def build_columns(
    recipe: Recipe,
    policy: Transformer,
    optimizer: MasterAdamW,
    reference: Transformer | None,
    teacher: Transformer | None,
    critic: Critic | None,
) -> list[Column]:
    """What passes compute before credit is assigned: log-probs of reference, teacher and policy, and values."""
    columns, temperature = [], recipe.rollout.temperature
    if reference is not None:
        columns.append(logprobs_column("reference", "ref_logprobs", reference, temperature, optimizer.base_weights))
    if teacher is not None:
        columns.append(logprobs_column("teacher", "teacher_logprobs", teacher, temperature))
    if recipe.algorithm.old_logprobs == "recompute":
        columns.append(logprobs_column("old_logprobs", "old_logprobs", policy, temperature))
    if critic is not None:
        columns.append(values_column(critic.model))
    return columns


def build_credit(recipe: Recipe) -> CreditAssigner:
    """What assigns credit, with the metrics of ages where tokens have some, and with what a teacher adds."""
    describe = (lambda _: {}) if recipe.rollout.mode == "on_policy" else age_metrics
    section = recipe.algorithm.teacher
    return CreditAssigner(recipe, describe, None if section is None else partial(teach, section))


def build_sampler(context: RolloutContext, task: TaskBase, credit: CreditAssigner) -> Sampler:
    """What takes the groups of a step, by `rollout.mode`."""
    samplers = {"on_policy": Sampler, "partial": PartialSampler, "spec_rl": SpecRlSampler}
    return samplers[context.recipe.rollout.mode](context, task, credit)


def build_draft_head(recipe: Recipe, policy: Transformer) -> DraftHeadLearner | None:
    """The draft head with a fresh optimizer, or None where the recipe has none."""
    section = recipe.rollout.draft_head
    if section is None:
        return None
    dtype = DTYPES[recipe.model.dtype]
    head = DraftHead(policy, dtype, vocabulary=section.vocabulary, seed=recipe.seed)
    return DraftHeadLearner(head, policy, recipe)


def build_engine(
    recipe: Recipe,
    model: Transformer,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_samples: int | None = None,
    reserved_bytes: int = 0,
    draft_head: DraftHead | None = None,
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
    options = EngineOptions(
        slots=number_of_slots(recipe, model, free, num_samples=num_samples, reserved_bytes=reserved_bytes),
        kv_memory_gib=rollout.kv_memory_gib,
        kv_reserved_bytes=reserved_bytes,
        cuda_graphs=rollout.cuda_graphs,
        prefill_chunk_tokens=PREFILL_TOKENS[model.device.type],
        max_sequence_tokens=rollout.max_prompt_tokens + rollout.max_new_tokens,
        draft_budget=rollout.draft_budget,
        num_top=drafter.num_top,
    )
    runner = build_runner(model, options)
    cost = StepCost(runner.row_edges(MAX_ROWS))
    if rollout.draft_head is not None and draft_head is not None:
        budget = cost if options.draft_budget == "auto" else None
        headed = HeadDrafter(drafter, draft_head, runner, k=rollout.draft_head.k, slots=options.slots, cost=budget)
        drafter = cast(DrafterBase, headed)
    return Engine(
        model,
        options,
        tokenizer=tokenizer,
        drafter=drafter,
        runner=runner,
        cost=cost,
        compile_kernels=partial(compile_kernels, wrap=wrap_for_warm_up if draft_head is not None else None),
        background=build_background(recipe, drafter),
    )


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
    recipe: Recipe, model: Transformer, free: int | None, *, num_samples: int | None = None, reserved_bytes: int = 0
) -> int:
    """`rollout.slots`; where it is `auto`, as many as the KV cache will hold (see `kv_memory.choose_slots`).

    Args:
        recipe: As for `build_engine`, like `model`, `num_samples` and `reserved_bytes`.
        model: The policy.
        free: Memory of the CUDA device that new tensors could take, in bytes; None on a CPU.
        num_samples: The maximum: more slots would never be used.
        reserved_bytes: For the update.
    """
    rollout = recipe.rollout
    if rollout.slots != "auto" or free is None:
        slots = int(min(CPU_SLOTS if rollout.slots == "auto" else rollout.slots, num_samples or recipe.max_samples))
        if rollout.slots not in ("auto", slots) and num_samples is None:
            logger.warning("rollout.slots: %s are more than there are samples; %d are used", rollout.slots, slots)
        return slots
    return choose_slots(
        kv_bytes(rollout.kv_memory_gib, free, reserved_bytes=reserved_bytes),
        page_bytes=page_bytes_of(model, PAGE_SIZE),
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
    given = dict(recipe.rollout.drafter_options)
    return drafter_class(validate_section(drafter_class.Options, given, "rollout.drafter_options"))


def build_background(
    recipe: Recipe, drafter: DrafterBase
) -> Callable[[Batch, StepCost, DrafterBase], Background] | None:
    """What makes the engine's background: run-aheads, where they are allowed and the drafter drafts from them."""
    slowdown = recipe.rollout.run_ahead_max_slowdown
    if slowdown is None or recipe.rollout.draft_budget == 0 or not drafter.uses_texts:
        return None
    return partial(RunAhead, max_slowdown=slowdown)


def build_turns(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, record_folder: Path | None = None) -> Turns:
    """What follows where a sample's turn ends: the environment that the recipe names answers, or the sample's end.

    `record_folder`: see `EnvironmentTurns`.

    Raises:
        ValueError: the environment or its format is unknown or wrong, or does not fit the tokenizer.
    """
    environment = recipe.rollout.environment
    return Turns(tokenizer) if environment is None else EnvironmentTurns(environment, tokenizer, record_folder)


def response_end_ids(model_path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a response of the model at `model_path`; see `weights.end_token_ids`.

    Raises:
        ValueError: there is none, so that no response could ever end before the length limit.
    """
    ids = end_token_ids(model_path, tokenizer)
    if not ids:
        raise ValueError(f"{model_path}: neither its configs nor its tokenizer name an end token (eos_token_id)")
    return ids
