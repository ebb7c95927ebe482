"""`srtrl train`: from a recipe to a finished, interrupted or stopped run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.recipe import Recipe
from srtrl.tasks.base import Task, check_task, load_task
from srtrl.tasks.grading import Grader
from srtrl.trainer import build
from srtrl.trainer.checkpoint import CRITIC_FOLDER, TrainerState, latest_checkpoint, load_training_state
from srtrl.trainer.collector import long_lived_objects_left_alone
from srtrl.trainer.evaluate import held_out_prompts
from srtrl.trainer.optimizer import build_optimizer
from srtrl.trainer.out_of_memory import UpdateMemoryError, gradient_bytes
from srtrl.trainer.progress import RunProgress
from srtrl.trainer.run_folder import check_run_folder, open_run_folder, run_path
from srtrl.trainer.sequence_logprobs import LogprobDifferenceError, NonFiniteError
from srtrl.trainer.summary import RunSummary, write_summary
from srtrl.trainer.trainer import Trainer, TrainerParts, first_state
from srtrl.types import Prompt


class TrainingStoppedError(RuntimeError):
    """Training cannot go on; the message says why, which checkpoint is the last, and how to go on."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainingResult:
    """How a run ended."""

    folder: Path
    summary: RunSummary
    interrupted: bool
    """An interrupt ended the run before its last step; `--resume` goes on."""


def run_training(
    recipe: Recipe, *, resume: bool = False, overwrite: bool = False, progress: RunProgress | None = None
) -> TrainingResult:
    """Train as the recipe says, into `<output_dir>/<name>`.

    What can be wrong is checked from cheap to dear: flags, trackers and task before any weight is loaded. The run's
    folder is touched last, so that a run which cannot start neither leaves one behind nor deletes one.

    Args:
        recipe: Everything that decides the run.
        resume: Go on from the last checkpoint of the run's folder; a run that is not there is begun.
        overwrite: Delete the run's folder and begin again.
        progress: Where to report; bars or lines on standard output by default.

    Raises:
        ValueError: a mistake in the recipe, its data or the flags.
        TrainingStoppedError: the numbers went wrong, or the device is too small; see the message.
        KeyboardInterrupt: the second Ctrl-C.
    """
    progress = progress if progress is not None else RunProgress(recipe.name, recipe.train.num_steps)
    with open_trainer(recipe, resume=resume, overwrite=overwrite, progress=progress) as trainer:
        try:
            with long_lived_objects_left_alone():
                trainer.train()
        except (NonFiniteError, LogprobDifferenceError, FloatingPointError) as error:
            raise TrainingStoppedError(f"{error}\n{_how_to_go_on(trainer.run.checkpoints)}") from error
        except UpdateMemoryError as error:
            raise TrainingStoppedError(f"{error}\n{_how_to_fit(trainer.run.checkpoints)}") from error
        interrupted = trainer.step < recipe.train.num_steps
        summary = write_summary(trainer.run.path, recipe.name, interrupted=interrupted)
        return TrainingResult(folder=trainer.run.path, summary=summary, interrupted=interrupted)


@contextmanager
def open_trainer(
    recipe: Recipe, *, resume: bool = False, overwrite: bool = False, progress: RunProgress
) -> Iterator[Trainer]:
    """Everything that a run needs, ready for its next step; see `run_training` for the arguments and errors."""
    check_run_folder(recipe, resume=resume, overwrite=overwrite)
    build.check_trackers(recipe.log.trackers)
    build.check_compiler(recipe)
    check_task(recipe)
    checkpoint = latest_checkpoint(run_path(recipe) / "checkpoints") if resume else None
    with ExitStack() as stack:
        parts, state = _build_parts(recipe, checkpoint, stack)
        run = stack.enter_context(open_run_folder(recipe, resume=resume, overwrite=overwrite))
        if run.checkpoint != checkpoint:
            raise ValueError(f"{run.path} has changed while the model was loading: another process trains there")
        build.start_trackers(parts.accelerator, recipe, state.step)
        trainer = Trainer(recipe, parts, run, progress, state)
        _announce(trainer, progress, resume=resume)
        try:
            yield trainer
        finally:
            parts.accelerator.end_training()


def _build_parts(recipe: Recipe, checkpoint: Path | None, stack: ExitStack) -> tuple[TrainerParts, TrainerState]:
    """Load the task, then the weights, and put a checkpoint's state back; `stack` ends the graders.

    Returns:
        The parts, and where the run is.
    """
    set_cpu_threads(recipe.num_threads)
    seed_user_code(recipe.seed)
    tokenizer = build.build_tokenizer(recipe)
    task = load_task(recipe, tokenizer)
    eval_prompts = _eval_prompts(recipe, task)
    accelerator = build.build_accelerator(recipe, run_path(recipe))
    policy = build.build_policy(recipe, str(checkpoint or recipe.model.path), accelerator.device)
    train = recipe.train
    optimizer = build_optimizer(
        policy,
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        betas=train.betas,
        eps=train.eps,
    )
    reference = build.build_reference(recipe, accelerator.device)
    critic = build.build_critic(recipe, checkpoint, policy, tokenizer)
    optimizers = [optimizer, *([critic.optimizer] if critic is not None else [])]  # one after the other has gradients
    parts = TrainerParts(
        accelerator=accelerator,
        tokenizer=tokenizer,
        end_ids=build.response_end_ids(recipe.model.path, tokenizer),
        task=task,
        eval_prompts=eval_prompts,
        policy=policy,
        reference=reference,
        # Behind all that takes memory for good: on CUDA it shares out what is left.
        engine=build.build_engine(recipe, policy, tokenizer, reserved_bytes=max(map(gradient_bytes, optimizers))),
        grader=stack.enter_context(
            Grader(task, recipe.rewards, recipe.grading, max_new_tokens=recipe.rollout.max_new_tokens)
        ),
        optimizer=optimizer,
        critic=critic,
    )
    if checkpoint is None:
        return parts, first_state(recipe)
    state = load_training_state(checkpoint, parts.optimizer, parts.critic)
    parts.engine.drafter.load(checkpoint)
    parts.engine.policy_version = state.policy_version
    return parts, state


def seed_user_code(seed: int) -> None:
    """Seed the global generators. Nothing of ours draws from them; rewards and losses of the user's own may."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _eval_prompts(recipe: Recipe, task: Task) -> list[Prompt]:
    if not recipe.eval.before_and_after and recipe.eval.every_steps is None:
        return []
    return held_out_prompts(task, recipe)


def _announce(trainer: Trainer, progress: RunProgress, *, resume: bool) -> None:
    """Say what starts, and what loading the data left out."""
    folder = trainer.run.path
    counts = ", ".join(f"{name} {count:,}" for name, count in trainer.parts.task.load_report.items())
    progress.say(f"task {trainer.recipe.task.name}: {counts}")
    policy, mixed = trainer.parts.policy, trainer.recipe.model.mixed_precision == "bf16"
    note = build.attention_note(policy.config, policy.device, torch.bfloat16 if mixed else policy.dtype)
    if note is not None:
        progress.say(note)
    if not resume:
        return
    if trainer.run.checkpoint is None:
        progress.say(f"--resume: {folder} has no checkpoint, starting from step 0")
    else:
        progress.say(f"resuming {folder} after step {trainer.step} of {trainer.recipe.train.num_steps}")


def _how_to_go_on(checkpoints: Path) -> str:
    """Which checkpoint is the last and what can be done with it."""
    checkpoint = latest_checkpoint(checkpoints)
    if checkpoint is None:
        return "There is no checkpoint yet. Change the recipe and start again with --overwrite"
    critic = f" and critic.path={checkpoint / CRITIC_FOLDER}" if (checkpoint / CRITIC_FOLDER).is_dir() else ""
    return (
        f"The last checkpoint is intact: {checkpoint}. --resume would go on from it with the same numbers, and so stop "
        f"at the same place; to go on otherwise, start a run of another name with model.path={checkpoint}{critic}, for "
        "example with a lower train.learning_rate"
    )


def _how_to_fit(checkpoints: Path) -> str:
    """Where a run that ran out of memory goes on with other options."""
    checkpoint = latest_checkpoint(checkpoints)
    if checkpoint is None:
        return "There is no checkpoint yet. Change the recipe and start again with --overwrite"
    return (
        f"The last checkpoint is intact: {checkpoint}. --resume goes on from it, on CUDA with other values of these "
        "options too; rollout.max_new_tokens and model.dtype alone need a run of another name with "
        f"model.path={checkpoint}"
    )
