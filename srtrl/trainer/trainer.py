"""`srtrl train`: from a recipe to a finished, interrupted or stopped run. A step is `Trainer.train_step`."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.recipe import Recipe
from srtrl.rollout.collect import CollectProgress, StageTimer
from srtrl.tasks.base import Task, check_task, load_task
from srtrl.tasks.grading import Grader
from srtrl.trainer import build
from srtrl.trainer.checkpoint import (
    CRITIC_FOLDER,
    TrainerState,
    latest_checkpoint,
    load_training_state,
    save_checkpoint,
)
from srtrl.trainer.credit import Credit, assign_credit, train_sequences, with_numbers
from srtrl.trainer.critic import Critic, compute_values, update_critic
from srtrl.trainer.evaluate import EvalResult, evaluate, held_out_prompts
from srtrl.trainer.optimizer import gradient_bytes
from srtrl.trainer.out_of_memory import UpdateMemoryError, explain_out_of_memory
from srtrl.trainer.run_folder import (
    RunFolder,
    RunProgress,
    check_run_folder,
    open_run_folder,
    run_path,
    step_file_name,
    write_rollouts,
    write_timeline,
)
from srtrl.trainer.run_metrics import (
    RunSummary,
    describe_step,
    memory_metrics,
    merge_metrics,
    time_metrics,
    update_flops,
    write_summary,
)
from srtrl.trainer.sampling import StepRollouts, StepSampler
from srtrl.trainer.update import (
    LogprobDifferenceError,
    NonFiniteError,
    compute_logprobs,
    next_kl_coefficient,
    update_policy,
)
from srtrl.types import Prompt

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

    from srtrl.engine.engine import Engine
    from srtrl.model.transformer import Transformer


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
        except (NonFiniteError, LogprobDifferenceError, FloatingPointError, UpdateMemoryError) as error:
            raise TrainingStoppedError(f"{error}\n{how_to_resume(trainer.run.checkpoints, error)}") from error
        interrupted = trainer.step < recipe.train.num_steps
        summary = write_summary(trainer.run.path, recipe.name, interrupted=interrupted)
        return TrainingResult(folder=trainer.run.path, summary=summary, interrupted=interrupted)


@dataclass(kw_only=True, slots=True)
class TrainerParts:
    """What a trainer works with; made by `_build_parts`."""

    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    """Tokens that end a response."""
    task: Task
    eval_prompts: list[Prompt]
    """Held-out problems; empty where the recipe asks for no evaluation."""
    policy: Transformer
    reference: Transformer | None
    """Frozen; None where the recipe asks for no KL."""
    engine: Engine
    grader: Grader
    optimizer: torch.optim.Optimizer
    critic: Critic | None
    """PPO's value model and its optimizer; None where the recipe has no `critic`."""


class Trainer:
    """Trains the policy step by step; what it learned is in the run folder after each step."""

    def __init__(
        self, recipe: Recipe, parts: TrainerParts, run: RunFolder, progress: RunProgress, state: TrainerState
    ) -> None:
        """Start at `state`: that of a new run, or a checkpoint's for a resumed one."""
        self.recipe = recipe
        self.parts = parts
        self.run = run
        self.progress = progress
        self.step = state.step
        self.kl_coefficient = state.kl_coefficient
        self.sampler = StepSampler(recipe, parts, state.num_draws)
        self.timer = StageTimer()
        self.interrupt = Interrupt(progress.say)

    def train(self) -> None:
        """All steps that are left, or as many as until an interrupt; the last one done has a checkpoint.

        Raises:
            NonFiniteError, LogprobDifferenceError: see `update_policy`; earlier checkpoints are untouched.
            KeyboardInterrupt: the second interrupt.
        """
        with self.interrupt, self.progress:
            if self.step == 0 and self.recipe.eval.before_and_after:
                self._write_row(self.evaluate("before training").metrics())
            while self.step < self.recipe.train.num_steps and not self.interrupt.requested:
                self.train_step(self.step + 1)

    def train_step(self, step: int) -> None:
        """Training step `step` (the first is 1): DESIGN.md, "One training step"."""
        rollouts = self.sample(step)
        credit = self.assign_credit(step, rollouts)
        metrics = rollouts.metrics | credit.metrics | self.update_critic(step, credit)
        metrics = merge_metrics(metrics, self.update_policy(step, credit))
        self.save_rollouts(step, rollouts, credit)
        metrics |= self.evaluate_if_due(step)
        self.step = step
        self.log(metrics, credit)
        self.checkpoint_if_due()

    def sample(self, step: int) -> StepRollouts:
        """Decode and grade the step's draws; the KV cache is given back where the recipe says so."""
        rollouts = self.sampler.sample(step, on_progress=self._show("rollout"), timer=self.timer)
        self.parts.engine.release_kv()
        return rollouts

    def assign_credit(self, step: int, rollouts: StepRollouts) -> Credit:
        """Advantages of the kept samples; with a reference also its log-probs, with a critic its values."""
        parts, train = self.parts, self.recipe.train
        if not rollouts.kept:
            return Credit(sequences=[], advantages={}, sampled_kl=None, metrics={})
        sequences = train_sequences(rollouts.kept)
        if parts.reference is not None:
            with self._stage("reference", f"step {step}, the reference's log-probs"):
                ref_logprobs = compute_logprobs(
                    parts.reference,
                    sequences,
                    parts.accelerator,
                    micro_batch_tokens=train.micro_batch_tokens,
                    temperature=self.recipe.rollout.temperature,
                )
            sequences = with_numbers(sequences, "ref_logprobs", ref_logprobs)
        if parts.critic is not None:
            with self._stage("values", f"step {step}, the critic's values"):
                values = compute_values(
                    parts.critic.model,
                    sequences,
                    parts.accelerator,
                    micro_batch_tokens=train.micro_batch_tokens,
                    where=f"step {step}",
                )
            sequences = with_numbers(sequences, "values", values)
        return assign_credit(rollouts.kept, sequences, self.recipe, kl_coefficient=self.kl_coefficient)

    def update_critic(self, step: int, credit: Credit) -> dict[str, float]:
        """Teach the critic, where there is one, the step's returns."""
        if self.parts.critic is None or not credit.sequences:
            return {}
        with self._stage("critic", f"step {step}, update of the critic"):
            return update_critic(
                self.parts.critic, self.parts.accelerator, credit.sequences, recipe=self.recipe, step=step
            )

    def update_policy(self, step: int, credit: Credit) -> dict[str, float]:
        """Change the policy, tell the decoder, and adapt the KL coefficient where the recipe wants that.

        In the first `critic.warmup_steps` steps nothing of this is done: only the critic learns.
        """
        recipe, parts = self.recipe, self.parts
        if not credit.sequences or (recipe.critic is not None and step <= recipe.critic.warmup_steps):
            return {}
        with self._stage("update", f"step {step}, update"):
            metrics = update_policy(
                parts.policy,
                parts.optimizer,
                parts.accelerator,
                credit.sequences,
                recipe=recipe,
                step=step,
                kl_coefficient=self.kl_coefficient,
            )
            parts.engine.on_policy_update()
        num_tokens = sum(len(sequence.token_ids) for sequence in credit.sequences)
        metrics["tokens/update"] = recipe.train.num_epochs * num_tokens
        if recipe.algorithm.kl.target is not None:
            metrics["kl/coefficient"] = self.kl_coefficient
        self.kl_coefficient = next_kl_coefficient(
            self.kl_coefficient, metrics, recipe, sampled_kl=credit.sampled_kl, num_samples=len(credit.sequences)
        )
        return metrics

    def evaluate_if_due(self, step: int) -> dict[str, float]:
        """`eval/...` metrics where `eval` asks for them after this step, else nothing."""
        section = self.recipe.eval
        is_last = section.before_and_after and step == self.recipe.train.num_steps
        if not is_last and (section.every_steps is None or step % section.every_steps != 0):
            return {}
        return self.evaluate(f"after step {step}").metrics()

    def evaluate(self, when: str) -> EvalResult:
        """Held-out accuracy of the policy as it is."""
        _, result = evaluate(
            self.parts.engine,
            self.parts.grader,
            self.parts.tokenizer,
            self.parts.eval_prompts,
            num_samples=self.recipe.eval.num_samples,
            sampling=build.eval_sampling(self.recipe, self.parts.end_ids),
            seed=self.recipe.seed,
            on_progress=self._show("evaluation"),
        )
        self.parts.engine.take_timeline()  # the next step's would begin with it
        low, high = result.interval
        self.progress.say(f"{when}: held-out accuracy {result.accuracy:.1%} (95%: {low:.1%} to {high:.1%})")
        return result

    def save_rollouts(self, step: int, rollouts: StepRollouts, credit: Credit) -> None:
        """Write `rollouts/step_N.parquet` and `timeline/step_N.parquet`."""
        if self.recipe.log.save_rollouts:
            with self.timer.stage("save_rollouts"):
                write_rollouts(self.run.rollouts / step_file_name(step), rollouts.groups, credit.advantages)
                write_timeline(self.run.timeline / step_file_name(step), rollouts.timeline)

    def log(self, metrics: Mapping[str, float], credit: Credit) -> None:
        """One row of `metrics.jsonl`, the trackers, and a line for people; the row is on disk when this returns."""
        num_flops = update_flops(self.recipe, self.parts.policy.config, credit.sequences)
        timed = time_metrics(self.timer.take(), metrics, num_flops, peak_tflops=self.recipe.train.peak_tflops)
        row = {**metrics, **timed, **memory_metrics(self.parts.policy.device)}
        self._write_row(row)
        self.progress.step(self.step, describe_step(row))

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint where the recipe wants one, after the last step, and when the run is to end."""
        train = self.recipe.train
        is_last = self.step == train.num_steps or self.interrupt.requested
        if not is_last and self.step % train.checkpoint_every != 0:
            return
        with self.timer.stage("checkpoint"):  # counted in the next row: this step's row precedes its checkpoint
            save_checkpoint(
                self.run.checkpoints,
                TrainerState(
                    step=self.step,
                    policy_version=self.parts.engine.policy_version,
                    num_draws=self.sampler.num_draws,
                    kl_coefficient=self.kl_coefficient,
                ),
                model=self.parts.policy,
                optimizer=self.parts.optimizer,
                critic=self.parts.critic,
                tokenizer=self.parts.tokenizer,
                end_ids=self.parts.end_ids,
                drafter=self.parts.engine.drafter,
                keep=train.keep_checkpoints,
            )

    def _write_row(self, metrics: Mapping[str, float]) -> None:
        self.run.log.write(self.step, metrics)
        self.parts.accelerator.log(dict(metrics), step=self.step)

    @contextmanager
    def _stage(self, name: str, where: str) -> Iterator[None]:
        """Time a stage, and say what helps where it runs out of the device's memory."""
        with self.timer.stage(name), explain_out_of_memory(where, self.recipe):
            yield

    def _show(self, stage: str) -> Callable[[CollectProgress], None]:
        """Feeds the inner progress bar of one stage."""
        start = time.perf_counter()

        def show(progress: CollectProgress) -> None:
            speed = progress.num_tokens / (time.perf_counter() - start)
            self.progress.stage(stage, progress.num_done, progress.num_total, f"{speed:,.0f} tokens/s")

        return show


# --- Start and end of a run -------------------------------------------------------------------------------------------


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
        counts = ", ".join(f"{name} {count:,}" for name, count in parts.task.load_report.items())
        progress.say(f"task {recipe.task.name}: {counts}")
        if resume and checkpoint is None:
            progress.say(f"--resume: {run.path} has no checkpoint, starting from step 0")
        elif resume:
            progress.say(f"resuming {run.path} after step {state.step} of {recipe.train.num_steps}")
        try:
            yield Trainer(recipe, parts, run, progress, state)
        finally:
            parts.accelerator.end_training()


def _build_parts(recipe: Recipe, checkpoint: Path | None, stack: ExitStack) -> tuple[TrainerParts, TrainerState]:
    """Load the task, then the weights, and put a checkpoint's state back; `stack` ends the graders.

    Returns:
        The parts, and where the run is.
    """
    set_cpu_threads(recipe.num_threads)
    # Nothing of ours draws from the global generators; rewards and losses of the user's own may.
    random.seed(recipe.seed)
    np.random.seed(recipe.seed % 2**32)
    torch.manual_seed(recipe.seed)
    tokenizer = build.build_tokenizer(recipe)
    task = load_task(recipe, tokenizer)
    has_eval = recipe.eval.before_and_after or recipe.eval.every_steps is not None
    eval_prompts = held_out_prompts(task, recipe) if has_eval else []
    accelerator = build.build_accelerator(recipe, run_path(recipe))
    policy = build.build_policy(recipe, str(checkpoint or recipe.model.path), accelerator.device)
    optimizer = build.make_optimizer(policy, recipe.train, recipe)
    reference = build.build_reference(recipe, accelerator.device)
    critic = build.build_critic(recipe, checkpoint, policy, tokenizer)
    optimizers = [optimizer, *([critic.optimizer] if critic is not None else [])]  # one after the other has gradients
    # After all that takes memory for good: on CUDA the engine takes its share of what is left.
    engine = build.build_engine(recipe, policy, tokenizer, reserved_bytes=max(map(gradient_bytes, optimizers)))
    grader = Grader(task, recipe.rewards, recipe.grading, max_new_tokens=recipe.rollout.max_new_tokens)
    parts = TrainerParts(
        accelerator=accelerator,
        tokenizer=tokenizer,
        end_ids=build.response_end_ids(recipe.model.path, tokenizer),
        task=task,
        eval_prompts=eval_prompts,
        policy=policy,
        reference=reference,
        engine=engine,
        grader=stack.enter_context(grader),
        optimizer=optimizer,
        critic=critic,
    )
    if checkpoint is None:
        first_kl = recipe.algorithm.kl.coefficient
        return parts, TrainerState(step=0, policy_version=0, num_draws=0, kl_coefficient=first_kl)
    state = load_training_state(checkpoint, parts.optimizer, parts.critic)
    engine.drafter.load(checkpoint)
    engine.policy_version = state.policy_version
    return parts, state


def how_to_resume(checkpoints: Path, error: Exception) -> str:
    """Which checkpoint is the last and what can be done with it after `error`."""
    checkpoint = latest_checkpoint(checkpoints)
    if checkpoint is None:
        return "There is no checkpoint yet. Change the recipe and start again with --overwrite"
    intact = f"The last checkpoint is intact: {checkpoint}. --resume"
    if isinstance(error, UpdateMemoryError):
        return (
            f"{intact} goes on from it, on CUDA with other values of these options too; rollout.max_new_tokens and "
            f"model.dtype alone need a run of another name with model.path={checkpoint}"
        )
    critic = f" and critic.path={checkpoint / CRITIC_FOLDER}" if (checkpoint / CRITIC_FOLDER).is_dir() else ""
    return (
        f"{intact} would go on from it with the same numbers, and so stop at the same place; to go on otherwise, start "
        f"a run of another name with model.path={checkpoint}{critic}, for example with a lower train.learning_rate"
    )


@contextmanager
def long_lived_objects_left_alone() -> Iterator[None]:
    """Let the garbage collector look through none of the objects that are there by now.

    Importing torch and its like leaves half a million of them, and looking through all takes 0.2 to 0.5 seconds, now
    and then, in the middle of a rollout. What comes later is collected as ever, and at the end all is as before.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Interrupt:
    """Ctrl-C and SIGTERM: the first asks the run to end after the running step, the second ends it at once.

    Signals are caught while it is entered, in the main thread (elsewhere they are not ours to catch).
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._say = say
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested:
            raise KeyboardInterrupt(f"second {name}")
        self.requested = True
        self._say(
            f"{name}: finishing what is under way, then writing a checkpoint (after a step); once more stops at once"
        )
