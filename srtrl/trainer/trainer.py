"""`srtrl train`: from a recipe to a finished, interrupted or stopped run. A step is `Trainer.train_step`."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

import numpy as np
import torch
from rich.console import Console

from srtrl.metrics import MetricLog, StageTimer
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.weights import locate
from srtrl.ranks.processes import ONE_RANK, Ranks, open_ranks
from srtrl.ranks.sharding import unshard
from srtrl.recipe.schema import Recipe
from srtrl.run.checkpoint import (
    Part,
    PolicyFiles,
    TrainerState,
    checkpoint_to_resume,
    digest_model,
    digest_prompts,
    read_state,
    save_checkpoint,
)
from srtrl.run.folder import RunFolder, check_run_folder, open_run_folder, step_file_name, write_rollouts
from srtrl.run.interrupt import Interrupt, UpdateMemoryError, explain_out_of_memory, freeze_gc, how_to_resume
from srtrl.run.machine import MACHINE_FILE, describe_machine
from srtrl.run.metrics import describe_held_out, describe_step, memory_metrics, time_metrics, update_flops
from srtrl.run.place import StartFlags, run_path
from srtrl.run.progress import RunProgress, describe_prompt, reporting_compilation
from srtrl.run.trackers import check_trackers, log_samples, start_trackers
from srtrl.tasks.base import load_task
from srtrl.tasks.grading import Grader
from srtrl.trainer import build
from srtrl.trainer.credit import Credit, assign_credit, train_sequences
from srtrl.trainer.evaluate import evaluate, training_evals
from srtrl.trainer.learner import Learner
from srtrl.trainer.objective import LogprobDifferenceError, PolicyLearner
from srtrl.trainer.passes import NonFiniteError, UpdateContext, fill
from srtrl.trainer.sampling import RolloutContext, StepRollouts

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


class TrainingStoppedError(RuntimeError):
    """Training cannot continue; the message gives the reason, the last checkpoint, and what to do with it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainingResult:
    """The end of a run; its figures are in `metrics.jsonl`."""

    folder: Path
    num_steps: int
    """Training steps done, in total."""
    interrupted: bool
    """An interrupt ended the run before its last step; `resume` continues it."""


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
    with open_ranks() as ranks, Trainer(recipe, ranks, on_step=on_step, **flags) as trainer:
        trainer.train()
        interrupted = trainer.step < recipe.train.num_steps
        return TrainingResult(folder=trainer.run.path, num_steps=trainer.step, interrupted=interrupted)


class Trainer:
    """A run. `with Trainer(recipe) as trainer: trainer.train()` trains the policy step by step.

    The constructor checks and loads everything and leaves no trace. Inside the `with` block there are worker processes
    and trackers, and the run's folder is locked; after each step it has all that the step learned.
    """

    run: RunFolder
    """The run's folder, inside the `with` block. Rank 0 alone writes into it."""

    def __init__(
        self,
        recipe: Recipe,
        ranks: Ranks = ONE_RANK,
        *,
        console: Console | None = None,
        on_step: Callable[[int, Mapping[str, float]], None] = lambda *_: None,
        **flags: Unpack[StartFlags],
    ) -> None:
        """Load the task, then the weights: those of the recipe's model or, with `resume`, of a checkpoint.

        Args:
            recipe: Everything that decides the run.
            ranks: The processes of the run; all make the same calls.
            console: Where rank 0 reports; standard output by default.
            on_step: See `run_training`.
            flags: How the run begins; see `StartFlags`.

        Raises:
            ValueError: a mistake in the recipe, its data or the flags; cheap checks come before any weight is loaded.
        """
        self.recipe = recipe
        self.ranks = ranks
        self.flags = flags
        self.on_step = on_step
        self.progress = RunProgress(recipe.train.num_steps, console=console if ranks.is_main else Console(quiet=True))
        self.interrupt = Interrupt(self.progress.say)
        self.timer = StageTimer()
        self.step = 0
        """Training steps done."""
        self.is_stopping = False
        """Whether a rank was interrupted: the run ends after the current step."""
        self.changes, self.checkpoint = ranks.on_main(self._check_start, "checks of rank 0")
        self.trackers: list[GeneralTracker] = []
        """Of the main rank."""
        set_cpu_threads(recipe.num_threads)
        seed_generators(recipe.seed, 0)
        with ranks.synchronized("loading the task and the models"), explain_out_of_memory("loading the models"):
            self._load_task()
            self._load_models()
        unshard(
            self.policy, in_place=True
        )  # needs all ranks; an error within `synchronized` would leave the others waiting
        decoder = "loading the decoder and the state of the run"
        with ranks.synchronized(decoder), explain_out_of_memory(decoder):
            # After everything that takes memory for good: on CUDA the engine takes its share of the rest.
            # One model after the other learns.
            reserved_bytes = max(learner.optimizer.gradient_bytes for learner in self.learners)
            head = None
            if self.draft_head is not None:
                head = self.draft_head.head
                reserved_bytes += self.draft_head.optimizer.gradient_bytes
                head.count(np.concatenate([prompt.token_ids for prompt in self.task.train_prompts]))
            self.engine = build.build_engine(
                recipe, self.policy, self.tokenizer, reserved_bytes=reserved_bytes, draft_head=head
            )
            self.grader = Grader(self.task, recipe.rewards, recipe.grading, recipe.rollout.max_new_tokens)
            self.rollout_context = RolloutContext(
                recipe=recipe,
                engine=self.engine,
                grader=self.grader,
                tokenizer=self.tokenizer,
                end_ids=self.end_ids,
                conversations=self.conversations,
                ranks=ranks,
            )
            self.sampler = build.build_sampler(self.rollout_context, self.task)
            policy = PolicyFiles(model=self.policy, tokenizer=self.tokenizer, end_ids=self.end_ids)
            self.parts: list[Part] = [policy, *self.learners, self.sampler]
            """Of a checkpoint, and parts without which a run goes on: no token depends on them."""
            self.drafts: list[Part] = [self.engine.drafter]
            if self.checkpoint is not None:
                self.restore(self.checkpoint)

    def _check_start(self) -> tuple[list[str], Path | None]:
        """Check flags, folder and trackers; returns the changes since the run to resume, and its checkpoint."""
        changes = check_run_folder(self.recipe, **self.flags)
        check_trackers(self.recipe.log)
        if not self.flags.get("resume"):
            return changes, None
        return changes, checkpoint_to_resume(run_path(self.recipe) / "checkpoints", self.flags.get("from_step"))

    def _load_task(self) -> None:
        """Tokenizer, environment and prompts."""
        recipe = self.recipe
        self.tokenizer = build.build_tokenizer(recipe)
        self.end_ids = build.response_end_ids(recipe.model.path, self.tokenizer)
        self.conversations = build.build_conversations(recipe, self.tokenizer)
        tools = self.conversations.tools if self.conversations is not None else ()
        self.task = load_task(recipe, self.tokenizer, tools=tools)
        self.prompts_sha256 = digest_prompts(self.task.train_prompts, self.checkpoint)
        self.evaluates_ends, self.eval_prompts = training_evals(self.task, recipe)

    def _load_models(self) -> None:
        """Policy, reference and critic, with the optimizers of those that learn."""
        recipe, device = self.recipe, build.choose_device(self.recipe)
        has_lora = (
            recipe.model.lora is not None
        )  # then the state of its optimizer makes a checkpoint's weights of these
        start = locate(recipe.model.path) if has_lora else self.checkpoint or recipe.model.path
        self.policy = build.build_policy(recipe, str(start), device)
        build.shard_model(self.policy, recipe, self.ranks)
        self.optimizer = build.make_policy_optimizer(self.policy, recipe)
        self.reference = build.build_reference(recipe, self.policy, device, self.ranks)
        is_used = has_lora or self.reference is not None
        self.model_sha256 = digest_model(recipe.model.path, self.checkpoint, is_used=is_used)
        self.draft_head = build.build_draft_head(recipe, self.policy)
        self.critic = build.build_critic(recipe, self.checkpoint, device, self.ranks)
        self.learner = PolicyLearner(self.policy, self.optimizer, recipe)
        self.learner.observers += [] if self.draft_head is None else [self.draft_head]
        self.learners: list[Learner] = [*([] if self.critic is None else [self.critic]), self.learner]
        self.columns = build.build_columns(recipe, self.policy, self.optimizer, self.reference, self.critic)

    def __enter__(self) -> Self:
        """Start everything that must be stopped; an earlier run is changed last, when nothing can refuse any more."""
        with ExitStack() as stack:
            with self.ranks.synchronized("starting the graders"):
                stack.enter_context(self.grader)
                if self.conversations is not None:
                    stack.enter_context(self.conversations)
                    self.rollout_context.started(self.task.train_prompts[0])
                    self.conversations.try_environment(self.task.train_prompts[0])
                self.grader.try_rewards(self.task.train_prompts[0], self.recipe.rollout.num_samples)
                if self.step > self.recipe.train.num_steps:
                    raise ValueError(f"train.num_steps: {self.step} are done; --checkpoint resumes from an earlier one")
            with self.ranks.synchronized("opening the run's folder"):
                if self.ranks.is_main:
                    self.run = self._open_folder(stack)
                else:
                    nowhere = stack.enter_context(MetricLog(Path(os.devnull)))
                    self.run = RunFolder(path=run_path(self.recipe), checkpoint=self.checkpoint, log=nowhere)
            self._say_start()
            self._stack = stack.pop_all()
        return self

    def _open_folder(self, stack: ExitStack) -> RunFolder:
        """Lock the run's folder and start the trackers; then take the folder back to the checkpoint."""
        run = stack.enter_context(open_run_folder(self.recipe, **self.flags))
        if run.checkpoint != self.checkpoint:
            raise ValueError(f"{run.path} has changed while the model was loading: another process trains there")
        self.trackers = start_trackers(self.recipe, step=self.step)
        run.begin(self.recipe)
        with (run.path / MACHINE_FILE).open("a", encoding="utf-8") as file:
            file.write(f"{describe_machine(self.policy.device)}\n")
        return run

    def _say_start(self) -> None:
        """Report what was loaded, and from where the run continues."""
        say, resume = self.progress.say, self.flags.get("resume")
        if self.run.moved_to is not None:
            say(f"--overwrite: the folder that was {self.run.path} is now {self.run.moved_to}")
        report = self.task.load_report or {"training prompts": len(self.task.train_prompts)}
        counts = ", ".join(f"{name} {count:,}" for name, count in report.items())
        say(f"task {self.recipe.task.name}: {counts}")
        say(describe_prompt(self.rollout_context.started(self.task.train_prompts[0]), self.tokenizer))
        for change in self.changes:
            say(f"--resume: {change}")
        if resume and self.checkpoint is None:
            say(f"--resume: {self.run.path} has no checkpoint, starting from step 0")
        elif resume:
            say(f"resuming {self.run.path} after step {self.step} of {self.recipe.train.num_steps}")

    def __exit__(self, *exception: object) -> None:
        with self._stack:
            for tracker in self.trackers:
                tracker.finish()

    def state(self) -> TrainerState:
        """The state of the run beside weights, optimizers and drafter."""
        return TrainerState(
            step=self.step,
            policy_version=self.engine.policy_version,
            num_draws=self.sampler.num_draws,
            prompts_sha256=self.prompts_sha256,
            model_sha256=self.model_sha256,
        )

    def restore(self, checkpoint: Path) -> None:
        """Take back a checkpoint, whose weights are loaded: its parts and `state`."""
        for part in self.parts:
            part.load(checkpoint)
        for drafts in self.drafts:
            try:
                drafts.load(checkpoint)
            except ValueError as error:
                self.changes.append(f"{error}; these drafts begin anew (no token depends on them)")
        state = read_state(checkpoint)
        self.step = state.step
        self.engine.policy_version = state.policy_version
        self.sampler.num_draws = state.num_draws

    def train(self) -> None:
        """All steps that are left, or up to an interrupt; the last one has a checkpoint.

        Raises:
            TrainingStoppedError: see `run_training`; earlier checkpoints are untouched.
            KeyboardInterrupt: the second interrupt.
        """
        try:
            with freeze_gc(), self.interrupt, self.progress:
                with self._stage("compile"), reporting_compilation(self.progress.compiling):
                    self.engine.warm_up()
                if self.step == 0 and self.evaluates_ends:
                    self._record_observations(0)
                    self._write_row(metrics := self.evaluate())
                    self.progress.say(f"before training: {describe_held_out(metrics)}")
                self.is_stopping = self._should_stop()
                while self.step < self.recipe.train.num_steps and not self.is_stopping:
                    self.train_step(self.step + 1)
        except (NonFiniteError, LogprobDifferenceError, FloatingPointError, UpdateMemoryError) as error:
            raise TrainingStoppedError(f"{error}\n{how_to_resume(self.run.checkpoints)}") from error

    def train_step(self, step: int) -> None:
        """Training step `step`, from 1 on; docs/walkthrough.md follows it."""
        seed_generators(self.recipe.seed, step)
        self._record_observations(step)
        context = UpdateContext(recipe=self.recipe, step=step, ranks=self.ranks)
        rollouts = self.sampler.sample(step, on_progress=partial(self.progress.stage, "rollout"), timer=self.timer)
        credit = self.assign_credit(rollouts, context)
        metrics = rollouts.metrics | credit.metrics
        if credit.sequences:
            metrics |= self.sampler.credit_metrics(credit.sequences)
        is_updated = False
        for learner in self.learners:  # the policy is the last one; at first only the critic learns
            is_updated = bool(credit.sequences) and step > learner.updates.num_skipped
            if is_updated:
                with self._stage(learner.stage):
                    metrics |= learner.learn(credit.sequences, context)
        self.engine.end_step(has_new_weights=is_updated)
        self.save_rollouts(step, rollouts, credit)
        metrics |= self.evaluate_if_due(step)
        self.step = step
        self.log(metrics, rollouts, credit)
        self.is_stopping = self._should_stop()
        with self.ranks.synchronized(f"checkpoint of step {step}"):
            self.checkpoint_if_due()

    def assign_credit(self, rollouts: StepRollouts, context: UpdateContext) -> Credit:
        """Advantages of the kept samples, with the columns that the recipe needs (see `build.build_columns`)."""
        if not rollouts.kept:
            return Credit(sequences=[], advantages={}, metrics={})
        sequences = train_sequences(rollouts.kept)
        for column in self.columns:
            with self._stage(column.stage):
                sequences = fill(column, sequences, context)
        return assign_credit(rollouts.kept, sequences, self.recipe, step=context.step)

    def evaluate_if_due(self, step: int) -> dict[str, float]:
        """`eval/...` metrics where `eval` asks for them after this step, else nothing."""
        section = self.recipe.eval
        is_last = self.evaluates_ends and step == self.recipe.train.num_steps
        if not is_last and (section.every_steps is None or step % section.every_steps != 0):
            return {}
        return self.evaluate()

    def evaluate(self) -> dict[str, float]:
        """`eval/...` metrics of the policy as it is: held-out accuracy (without a verifier: reward)."""
        on_progress = partial(self.progress.stage, "evaluation")
        _, metrics = evaluate(self.rollout_context, self.eval_prompts, on_progress=on_progress)
        return metrics

    def save_rollouts(self, step: int, rollouts: StepRollouts, credit: Credit) -> None:
        """Write `rollouts/step_N.parquet`."""
        if self.ranks.is_main:
            with self.timer.stage("save_rollouts"):
                path = self.run.path / "rollouts" / step_file_name(step)
                write_rollouts(path, rollouts.groups, credit.advantages)

    def log(self, metrics: Mapping[str, float], rollouts: StepRollouts, credit: Credit) -> None:
        """One row of `metrics.jsonl`, the trackers, and a line for people; the row is on disk when this returns."""
        computed = [sequence for sequence in credit.sequences if self.learner.needs_pass(sequence)]
        num_flops = update_flops(self.recipe, self.policy.config, computed) / self.ranks.count  # of one device
        timed = time_metrics(self.timer.take(), metrics, num_flops)
        row = {**metrics, **timed, **memory_metrics(self.policy.device)}
        self._write_row(row)
        self.progress.step(self.step, describe_step(row))
        if "eval/reward" in row or "eval/accuracy" in row:
            self.progress.say(f"after step {self.step}: {describe_held_out(row)}")
        self._say_slow_rewards(row)
        if self.ranks.is_main:
            self.on_step(self.step, row)
            log_samples(self.trackers, self.step, rollouts.groups, credit.advantages)

    def _say_slow_rewards(self, row: Mapping[str, float]) -> None:
        """Once: a notice where rewards that are called for one sample after the other take most of a step."""
        seconds, names = row.get("time/grading", 0.0), self.grader.serial_rewards
        if names and seconds > max(1.0, row["time/step"] / 2):
            self.grader.serial_rewards = []
            self.progress.say(
                f"rewards took {seconds:.1f} of {row['time/step']:.1f} s: {', '.join(names)}, one sample at a time. "
                "Faster: `async def`, `@batched` or `@isolated` (docs/extending.md#a-reward)"
            )

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint where the recipe wants one, after the last step, and when the run is to end."""
        train = self.recipe.train
        is_last = self.step == train.num_steps or self.is_stopping
        if not is_last and self.step % train.checkpoint_every != 0:
            return
        self.progress.stage("checkpoint")
        tensors = {name: part for learner in self.learners for name, part in learner.tensors().items()}
        with self.timer.stage("checkpoint"), ExitStack() as stack:  # counted in the next row
            for learner in self.learners:
                stack.enter_context(learner.whole())
            save_checkpoint(
                self.run.checkpoints,
                self.state(),
                tensors=tensors,
                parts=[*self.parts, *self.drafts],
                keep=train.keep_checkpoints,
                ranks=self.ranks,
            )
        if self.ranks.is_main:
            self.run.drop_observations()

    def _record_observations(self, step: int) -> None:
        """Write the observations of environments into the file of this step, or read them where it is there."""
        if self.conversations is not None:
            self.conversations.use_record(self.run.observations(step), self.ranks.index)

    def _should_stop(self) -> bool:
        """Whether a rank was interrupted."""
        return any(self.ranks.gather(self.interrupt.requested, f"the end of step {self.step}"))

    def _write_row(self, metrics: Mapping[str, float]) -> None:
        if self.ranks.is_main:
            self.run.log.write(self.step, metrics)
            for tracker in self.trackers:
                tracker.log(dict(metrics), step=self.step)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Show and time a stage of the current step; name it where the device's memory is too small."""
        self.progress.stage(name)
        with self.timer.stage(name), explain_out_of_memory(f"step {self.step + 1}, {name}"):
            yield


def seed_generators(seed: int, step: int) -> None:
    """Seed the global generators for one step, so that a resumed run repeats it.

    srtrl draws nothing from them; rewards and losses of a user may.
    """
    state = int(np.random.SeedSequence((seed, step)).generate_state(1)[0])
    random.seed(state)
    np.random.seed(state)
    torch.manual_seed(state)
