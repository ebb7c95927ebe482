"""`srtrl train`: from a recipe to a finished, interrupted or stopped run. A step is `Trainer.train_step`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
from rich.console import Console

from srtrl.metrics import MetricLog, StageTimer
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.sharding import resharded, unshard
from srtrl.ranks.processes import ONE_RANK, Ranks, open_ranks
from srtrl.recipe.schema import Recipe
from srtrl.run.checkpoint import (
    CRITIC_OPTIMIZER,
    OPTIMIZER,
    TrainerState,
    check_prompts,
    checkpoint_to_resume,
    list_checkpoints,
    prompts_digest,
    read_state,
    save_checkpoint,
    step_of,
)
from srtrl.run.folder import (
    OBSERVATIONS,
    RunFolder,
    RunProgress,
    StartFlags,
    check_run_folder,
    open_run_folder,
    run_path,
    step_file_name,
    write_rollouts,
)
from srtrl.run.interrupt import Interrupt, UpdateMemoryError, explain_out_of_memory, freeze_gc, how_to_resume
from srtrl.run.metrics import (
    RunSummary,
    describe_held_out,
    describe_step,
    memory_metrics,
    time_metrics,
    update_flops,
    write_summary,
)
from srtrl.run.trackers import check_trackers, log_samples, start_trackers
from srtrl.tasks.base import load_task
from srtrl.tasks.grading import Grader
from srtrl.trainer import build
from srtrl.trainer.credit import Credit, assign_credit, train_sequences
from srtrl.trainer.critic import update_critic, with_values
from srtrl.trainer.evaluate import EvalResult, evaluate, held_out_prompts
from srtrl.trainer.objective import LogprobDifferenceError, NonFiniteError, PolicyObjective
from srtrl.trainer.optimizer import gradient_bytes, load_state, state_tensors
from srtrl.trainer.passes import UpdateContext
from srtrl.trainer.sampling import StepRollouts, StepSampler
from srtrl.trainer.update import update_policy, with_logprobs
from srtrl.types import Prompt

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

SHOWN_CHARACTERS = 500
"""Of the first prompt, at the start of a run."""


class TrainingStoppedError(RuntimeError):
    """Training cannot continue; the message says why, which checkpoint is the last, and what to do with it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainingResult:
    """How a run ended."""

    folder: Path
    summary: RunSummary


def run_training(
    recipe: Recipe,
    *,
    progress: RunProgress | None = None,
    on_step: Callable[[int, Mapping[str, float]], None] = lambda *_: None,
    **flags: Unpack[StartFlags],
) -> TrainingResult:
    """Train as the recipe says, into `<output_dir>/<name>`.

    Cheap checks come first: flags, trackers and task before any weight is loaded. The run's folder is touched last, so
    that a run which cannot start neither leaves one behind nor deletes one.

    Args:
        recipe: Everything that decides the run.
        progress: Where to report; bars or lines on standard output by default.
        on_step: Called after each step with its number and its row of `metrics.jsonl`.
        flags: How it begins; see `StartFlags`.

    Raises:
        ValueError: a mistake in the recipe, its data or the flags.
        TrainingStoppedError: the numbers went wrong, or the device is too small; see the message.
        KeyboardInterrupt: the second Ctrl-C.
    """
    with open_ranks() as ranks:
        if progress is None or not ranks.is_main:
            console = None if ranks.is_main else Console(quiet=True)
            progress = RunProgress(recipe.name, recipe.train.num_steps, console=console)
        return _train(recipe, ranks, progress, on_step, **flags)


def _train(
    recipe: Recipe,
    ranks: Ranks,
    progress: RunProgress,
    on_step: Callable[[int, Mapping[str, float]], None],
    **flags: Unpack[StartFlags],
) -> TrainingResult:
    """The run of `run_training`, on one of the ranks."""
    with open_trainer(recipe, progress=progress, ranks=ranks, **flags) as trainer:
        trainer.on_step = on_step
        try:
            with freeze_gc():
                trainer.train()
        except (NonFiniteError, LogprobDifferenceError, FloatingPointError, UpdateMemoryError) as error:
            raise TrainingStoppedError(f"{error}\n{how_to_resume(trainer.run.checkpoints)}") from error
        interrupted = trainer.step < recipe.train.num_steps
        summarise = partial(write_summary, trainer.run.path, recipe.name, interrupted=interrupted)
        return TrainingResult(folder=trainer.run.path, summary=ranks.on_main(summarise, "the summary"))


class Trainer:
    """Trains the policy step by step; what it learned is in the run folder after each step."""

    run: RunFolder
    """Set by `open_trainer`, once everything else is loaded."""
    on_step: Callable[[int, Mapping[str, float]], None] = staticmethod(lambda *_: None)
    """Called after each step, on rank 0, with its number and its row of `metrics.jsonl`."""

    def __init__(self, recipe: Recipe, checkpoint: Path | None, progress: RunProgress, ranks: Ranks = ONE_RANK) -> None:
        """Load the task, then the weights, and start at `checkpoint`; None starts a new run."""
        self.ranks = ranks
        self.is_stopping = False
        """Whether a rank was asked to end the run after the present step."""
        set_cpu_threads(recipe.num_threads)
        seed_generators(recipe.seed, 0)
        self.recipe = recipe
        self.progress = progress
        with ranks.together("the others to load the task and the models"):  # then sharded ranks need each other
            self.tokenizer = build.build_tokenizer(recipe)
            self.end_ids = build.response_end_ids(recipe.model.path, self.tokenizer)
            self.conversations = build.build_conversations(recipe, self.tokenizer)
            self.task = load_task(recipe, self.tokenizer, tools=self.conversations.tools if self.conversations else ())
            self.prompts_sha256 = prompts_digest(self.task.train_prompts)
            if checkpoint is not None:
                check_prompts(checkpoint, self.prompts_sha256)
            has_eval = recipe.eval.before_and_after or recipe.eval.every_steps is not None
            self.eval_prompts = held_out_prompts(self.task, recipe) if has_eval else []
            self.accelerator = build.build_accelerator(recipe, run_path(recipe))
            set_cpu_threads(recipe.num_threads)  # again: with several ranks accelerate shares the cores among them
            device = build.choose_device(recipe)
            self.policy = build.build_policy(recipe, str(checkpoint or recipe.model.path), device)
            build.shard_model(self.policy, recipe, ranks)
            self.objective = PolicyObjective(self.policy, recipe)
            self.optimizer = build.make_optimizer(
                self.policy,
                recipe,
                learning_rate=recipe.train.learning_rate,
                weight_decay=recipe.train.weight_decay,
            )
            self.reference = build.build_reference(recipe, device, ranks)
            self.critic = build.build_critic(recipe, checkpoint, device, ranks)
        self.optimizers: dict[str, torch.optim.Optimizer] = {OPTIMIZER: self.optimizer}
        """By the name of their folder in a checkpoint."""
        if self.critic is not None:
            self.optimizers[CRITIC_OPTIMIZER] = self.critic.optimizer
        gradients = max(map(gradient_bytes, self.optimizers.values()))  # one after the other has gradients
        unshard(self.policy)
        # From here on no rank needs another, so that an error of one reaches all (see `open_trainer`).
        # After all that takes memory for good: on CUDA the engine takes its share of what is left.
        self.engine = build.build_engine(recipe, self.policy, self.tokenizer, reserved_bytes=gradients)
        if checkpoint is None:
            state = TrainerState(step=0, policy_version=0, num_draws=0)
        else:
            state = read_state(checkpoint)
            for name, optimizer in self.optimizers.items():
                load_state(optimizer, checkpoint, name)
            self.engine.drafter.load(checkpoint)
        self.engine.policy_version = state.policy_version
        self.step = state.step
        self.timer = StageTimer()
        self.interrupt = Interrupt(progress.say)
        self.grader = Grader(self.task, recipe.rewards, recipe.grading, recipe.rollout.max_new_tokens)
        self.sampler = StepSampler(
            recipe,
            self.task,
            self.engine,
            self.grader,
            self.tokenizer,
            self.end_ids,
            num_draws=state.num_draws,
            conversations=self.conversations,
            ranks=ranks,
        )

    def train(self) -> None:
        """All steps that are left, or as many as until an interrupt; the last one done has a checkpoint.

        Raises:
            NonFiniteError, LogprobDifferenceError: see `update_policy`; earlier checkpoints are untouched.
            KeyboardInterrupt: the second interrupt.
        """
        with self.interrupt, self.progress:
            with self._stage("compile"):
                self.engine.warm_up(self.progress.compiling)
            if self.step == 0 and self.recipe.eval.before_and_after:
                self._record_observations(0)
                self._write_row(self.evaluate("before training").metrics())
            self.is_stopping = self._should_stop()
            while self.step < self.recipe.train.num_steps and not self.is_stopping:  # as it was when the step ended
                self.train_step(self.step + 1)

    def train_step(self, step: int) -> None:
        """Training step `step`, from 1 on; docs/walkthrough.md follows it."""
        seed_generators(self.recipe.seed, step)
        self._record_observations(step)
        rollouts = self.sampler.sample(step, on_progress=partial(self.progress.stage, "rollout"), timer=self.timer)
        credit = self.assign_credit(step, rollouts)
        metrics = rollouts.metrics | credit.metrics
        context = UpdateContext(recipe=self.recipe, step=step, ranks=self.ranks)
        if credit.sequences and self.critic is not None:
            with self._stage("critic"):
                metrics |= update_critic(self.critic, credit.sequences, context)
        # At first only the critic learns.
        is_updated = bool(credit.sequences) and step > self.recipe.policy_updates.num_skipped
        if is_updated:
            with self._stage("update"), resharded(self.policy):
                metrics |= update_policy(self.objective, self.optimizer, credit.sequences, context)
        self.engine.end_step(has_new_weights=is_updated)
        self.save_rollouts(step, rollouts, credit)
        metrics |= self.evaluate_if_due(step)
        self.step = step
        self.log(metrics, credit)
        if self.ranks.is_main:
            log_samples(self.accelerator, step, rollouts.groups, credit.advantages)
        self.is_stopping = self._should_stop()
        with self.ranks.together(f"the checkpoint of step {step}"):
            self.checkpoint_if_due()

    def assign_credit(self, step: int, rollouts: StepRollouts) -> Credit:
        """Advantages of the kept samples; with the log-probs and values that the recipe needs."""
        if not rollouts.kept:
            return Credit(sequences=[], advantages={}, metrics={})
        sequences = train_sequences(rollouts.kept)
        context = UpdateContext(recipe=self.recipe, step=step, ranks=self.ranks)
        if self.reference is not None:
            with self._stage("reference"):
                sequences = with_logprobs("ref_logprobs", self.reference, sequences, context)
        if self.recipe.algorithm.old_logprobs == "recompute":
            with self._stage("old_logprobs"):
                sequences = with_logprobs("old_logprobs", self.policy, sequences, context)
        if self.critic is not None:
            with self._stage("values"):
                sequences = with_values(self.critic.model, sequences, context)
        return assign_credit(rollouts.kept, sequences, self.recipe)

    def evaluate_if_due(self, step: int) -> dict[str, float]:
        """`eval/...` metrics where `eval` asks for them after this step, else nothing."""
        section = self.recipe.eval
        is_last = section.before_and_after and step == self.recipe.train.num_steps
        if not is_last and (section.every_steps is None or step % section.every_steps != 0):
            return {}
        return self.evaluate(f"after step {step}").metrics()

    def evaluate(self, when: str) -> EvalResult:
        """Held-out accuracy (without a verifier: reward) of the policy as it is."""
        _, result = evaluate(
            self.recipe,
            self.eval_prompts,
            self.engine,
            self.grader,
            self.tokenizer,
            self.end_ids,
            on_progress=partial(self.progress.stage, "evaluation"),
            conversations=self.conversations,
            ranks=self.ranks,
        )
        self.progress.say(f"{when}: {describe_held_out(result.metrics())}")
        return result

    def save_rollouts(self, step: int, rollouts: StepRollouts, credit: Credit) -> None:
        """Write `rollouts/step_N.parquet`."""
        if self.ranks.is_main:
            with self.timer.stage("save_rollouts"):
                path = self.run.path / "rollouts" / step_file_name(step)
                write_rollouts(path, rollouts.groups, credit.advantages)

    def log(self, metrics: Mapping[str, float], credit: Credit) -> None:
        """One row of `metrics.jsonl`, the trackers, and a line for people; the row is on disk when this returns."""
        computed = [sequence for sequence in credit.sequences if self.objective.needs_pass(sequence)]
        num_flops = update_flops(self.recipe, self.policy.config, computed) / self.ranks.count  # of one device
        timed = time_metrics(self.timer.take(), metrics, num_flops, peak_tflops=self.recipe.train.peak_tflops)
        row = {**metrics, **timed, **memory_metrics(self.policy.device)}
        self._write_row(row)
        self.progress.step(self.step, describe_step(row))
        if self.ranks.is_main:
            self.on_step(self.step, row)

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint where the recipe wants one, after the last step, and when the run is to end."""
        train = self.recipe.train
        is_last = self.step == train.num_steps or self.is_stopping
        if not is_last and self.step % train.checkpoint_every != 0:
            return
        self.progress.stage("checkpoint")
        with self.timer.stage("checkpoint"):  # counted in the next row: this step's row precedes its checkpoint
            save_checkpoint(
                self.run.checkpoints,
                TrainerState(
                    step=self.step,
                    policy_version=self.engine.policy_version,
                    num_draws=self.sampler.num_draws,
                    prompts_sha256=self.prompts_sha256,
                ),
                model=self.policy,
                tensors={name: state_tensors(optimizer) for name, optimizer in self.optimizers.items()},
                critic=None if self.critic is None else self.critic.model,
                tokenizer=self.tokenizer,
                end_ids=self.end_ids,
                drafter=self.engine.drafter,
                keep=train.keep_checkpoints,
                ranks=self.ranks,
            )
        if self.ranks.is_main:
            oldest = step_of(list_checkpoints(self.run.checkpoints)[0])
            for path in (self.run.path / OBSERVATIONS).glob("step_*.jsonl"):
                if step_of(path) <= oldest:  # no step that can be repeated
                    path.unlink()

    def _record_observations(self, step: int) -> None:
        """From now on what environments say is written into the file of this step, or read where it is there."""
        if self.conversations is not None:
            path = self.run.path / OBSERVATIONS / f"step_{step:06d}.jsonl"
            self.conversations.use_record(path, self.ranks.index)

    def _should_stop(self) -> bool:
        """Whether a rank was asked to end the run."""
        return any(self.ranks.gather(self.interrupt.requested, f"the end of step {self.step}"))

    def _write_row(self, metrics: Mapping[str, float]) -> None:
        if self.ranks.is_main:
            self.run.log.write(self.step, metrics)
            self.accelerator.log(dict(metrics), step=self.step)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Show and time a stage of the present step; name it where the device's memory is too small."""
        self.progress.stage(name)
        with self.timer.stage(name), explain_out_of_memory(f"step {self.step + 1}, {name}"):
            yield


# --- Start and end of a run -------------------------------------------------------------------------------------------


@contextmanager
def open_trainer(
    recipe: Recipe, *, progress: RunProgress, ranks: Ranks = ONE_RANK, **flags: Unpack[StartFlags]
) -> Iterator[Trainer]:
    """Everything that a run needs, ready for its next step; see `run_training` for the arguments and errors.

    Rank 0 has the run's folder, and alone writes into it.
    """
    resume = flags.get("resume", False)

    def check() -> tuple[list[str], Path | None]:
        changes = check_run_folder(recipe, **flags)
        check_trackers(recipe.log)
        checkpoints = run_path(recipe) / "checkpoints"
        return changes, checkpoint_to_resume(checkpoints, flags.get("from_step")) if resume else None

    changes, checkpoint = ranks.on_main(check, "the checks of rank 0")
    with ExitStack() as stack:
        with ranks.together("the others to load the model and the task"):
            trainer = Trainer(recipe, checkpoint, progress, ranks)
            stack.enter_context(trainer.grader)
            if trainer.conversations is not None:
                stack.enter_context(trainer.conversations)
            trainer.grader.try_rewards(trainer.task.train_prompts[0], recipe.rollout.num_samples)
            if trainer.step > recipe.train.num_steps:
                raise ValueError(f"train.num_steps: {trainer.step} are done; --checkpoint resumes from an earlier one")
        with ranks.together("rank 0 to open the run's folder"):
            if not ranks.is_main:  # it writes nothing
                nowhere = stack.enter_context(MetricLog(Path(os.devnull)))
                trainer.run = RunFolder(path=run_path(recipe), checkpoint=checkpoint, log=nowhere)
            else:
                run = trainer.run = stack.enter_context(open_run_folder(recipe, **flags))
                if run.checkpoint != checkpoint:
                    raise ValueError(
                        f"{run.path} has changed while the model was loading: another process trains there"
                    )
                start_trackers(trainer.accelerator, recipe, step=trainer.step)
                run.begin(recipe)
                if run.moved_to is not None:
                    progress.say(f"--overwrite: the folder that was {run.path} is now {run.moved_to}")
        counts = ", ".join(f"{name} {count:,}" for name, count in trainer.task.load_report.items())
        progress.say(f"task {recipe.task.name}: {counts}")
        progress.say(describe_prompt(trainer.sampler.started(trainer.task.train_prompts[0]), trainer.tokenizer))
        for change in changes:
            progress.say(f"--resume: {change}")
        if resume and checkpoint is None:
            progress.say(f"--resume: {trainer.run.path} has no checkpoint, starting from step 0")
        elif resume:
            progress.say(f"resuming {trainer.run.path} after step {trainer.step} of {recipe.train.num_steps}")
        try:
            yield trainer
        finally:
            for tracker in trainer.accelerator.trackers:  # `end_training` would also disconnect the ranks
                tracker.finish()


def describe_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    """The prompt as the policy reads it, special tokens and the ends of lines included; the middle of a long one goes.

    Each line begins with `| `, so that an end of line at the very end is seen.
    """
    text = str(tokenizer.decode(list(prompt.token_ids), clean_up_tokenization_spaces=False))
    if (num_left_out := len(text) - SHOWN_CHARACTERS) > 0:
        half = SHOWN_CHARACTERS // 2
        text = f"{text[:half]} [... {num_left_out:,} characters left out ...] {text[-half:]}"
    heading = f"first training prompt, {prompt.prompt_id} ({len(prompt.token_ids):,} tokens):"
    return "\n| ".join([heading, *text.split("\n")])


def seed_generators(seed: int, step: int) -> None:
    """Seed the global generators for one step, so that a resumed run repeats it.

    Nothing of ours draws from them; rewards and losses of the user's own may.
    """
    from accelerate.utils import set_seed

    set_seed(int(np.random.SeedSequence((seed, step)).generate_state(1)[0]))
