"""Supervised fine-tuning on the task's own solutions: makes a policy that RL can start from (`srtrl warm-start`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from torch import Tensor

from srtrl import build, build_models, ranks
from srtrl.environments.formats import MalformedCallError
from srtrl.evaluation.policy import EvalOutcome, run_evals
from srtrl.files import is_free, new_folder, temporary_beside, write_atomic
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.folders import load_tokenizer
from srtrl.model.hf_config import config_from_hf
from srtrl.model.weights import init_model
from srtrl.recipe.schema import Recipe, UpdatePlan, WarmStartSection
from srtrl.rollout.packing import PackedBatch
from srtrl.run.checkpoint import PolicyFiles
from srtrl.run.estimate import count_weights
from srtrl.run.folder import move_aside
from srtrl.run.interrupt import explain_out_of_memory
from srtrl.run.machine import choose_device
from srtrl.run.progress import RunProgress
from srtrl.tasks.base import TaskBase, load_task
from srtrl.trainer.evaluate import training_evals
from srtrl.trainer.learner import Learner
from srtrl.trainer.objective import response_logprobs
from srtrl.trainer.passes import UpdateContext
from srtrl.types import Prompt, TrainSequence

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from srtrl.model.transformer import Transformer
    from srtrl.rollout.one_turn import OneTurn

RECORD = "warm_start.json"
TOKENIZER_PROBLEMS = 10_000
"""Most problems whose texts train a tokenizer, from the first; merges of a larger sample hardly differ."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WarmStartSummary:
    """Results of a warm start."""

    output: Path
    """The policy's folder."""
    losses: list[float]
    """Mean negative log-prob of an answer token at each optimizer step, in nats."""
    held_out: EvalOutcome | None
    """None where `eval.before_and_after` is false."""


def run_warm_start(recipe: Recipe, *, overwrite: bool = False) -> WarmStartSummary:
    """Fine-tune on `task.solution` of the training prompts, save the policy, and evaluate it on held-out problems.

    The loss is on the solution's tokens and the end token only. Prompt and solution are tokenised apart, so that the
    boundary is the one that RL sees. Same recipe, machine and thread count: same weights. Several ranks share the
    passes of each step; the first one writes.

    Raises:
        ValueError: the recipe has no `warm_start`, the output folder is not empty (without `overwrite`), the task has
            no solutions, or none fits `rollout.max_new_tokens`.
        RuntimeError: the loss or its gradient is not finite, or the device's memory is too small; nothing is saved.
    """
    section = recipe.warm_start
    if section is None:
        raise ValueError("this recipe has no `warm_start` section (at least `warm_start.output` must be given)")
    output = Path(section.output)
    with ranks.open_ranks():
        ranks.on_main(lambda: _check_output(output, overwrite=overwrite), "checks of rank 0")
        set_cpu_threads(recipe.num_threads, device=choose_device(recipe).type)
        losses, record, has_eval = _learn(recipe, section)
        held_out = None
        if has_eval:  # of the saved weights and tokenizer, as RL will load them
            saved = recipe.model.model_copy(update={"tokenizer": None})
            [held_out] = run_evals(str(output), {"warm start": recipe.model_copy(update={"model": saved})})
        figures = held_out.metrics if held_out is not None else {}
        record["held_out"] = {name: value for name, value in figures.items() if name != "time/eval"}
        if ranks.is_main():
            write_atomic(output / RECORD, json.dumps(record, indent=2) + "\n")
    return WarmStartSummary(output=output, losses=losses, held_out=held_out)


def _learn(recipe: Recipe, section: WarmStartSection) -> tuple[list[float], dict[str, Any], bool]:
    """All optimizer steps, after which the first rank saves the policy.

    If the weights have float32 masters, those are the model's at the end, so that `save_dtype` float32 saves the
    weights to the last bit.

    Returns:
        The loss of each step, what `RECORD` says of them, and whether the policy is to be evaluated.
    """
    with ranks.synchronized("loading the task and the model"):
        tokenizer = _tokenizer(recipe, section)
        turns = build.build_turns(recipe, tokenizer)
        task = load_task(recipe, tokenizer, tools=turns.tools)
        has_eval, _ = training_evals(task, recipe)  # raises if there are no problems for it
        model = _model(recipe, section, tokenizer, choose_device(recipe))
        end_ids = () if section.architecture is not None else build.response_end_ids(recipe.model.path, tokenizer)
    losses: list[float] = []
    optimizer = build_models.make_optimizer(model, recipe, learning_rate=section.learning_rate, weight_decay=0.0)
    learner = SupervisedLearner(model, optimizer, update_plan(section))
    progress = RunProgress(section.num_steps, console=None if ranks.is_main() else Console(quiet=True))
    # No tool runs: only an environment that adds to the prompts is opened, and no sandbox is needed.
    with progress, turns if turns.starts_prompts else nullcontext():
        batches = solution_batches(recipe, section, task, turns)
        for step in range(1, section.num_steps + 1):
            batch, num_left_out = next(batches)
            context = UpdateContext(recipe=recipe, step=step)
            with explain_out_of_memory(f"warm start step {step}"):
                metrics = learner.learn(batch, context)
            losses.append(metrics["loss"])
            text = "loss {loss:.4f}  grad norm {grad_norm:.2f}  learning rate {learning_rate:.2e}"
            progress.step(step, text.format_map(metrics))
    optimizer.hand_over_masters()

    def save() -> None:
        output = Path(section.output)
        if not is_free(output):  # or has come into it while the policy learned
            progress.say(f"the folder that was {output} is now {move_aside(output)}")
        ids = sorted({int(tokenizer.eos_token_id), *end_ids})
        with new_folder(output) as temporary:
            dtype = build_models.DTYPES[section.save_dtype]
            PolicyFiles(model=model, tokenizer=tokenizer, end_ids=ids, dtype=dtype).save(temporary)

    ranks.on_main(save, "saving the policy")
    progress.say(f"saved {section.output}: loss {losses[-1]:.4f}")
    if num_left_out:
        progress.say(f"left out {num_left_out} draws whose solution no rollout could produce")
    every = max(1, len(losses) // 20)
    record = {  # no times, so that the same recipe writes the same file
        "recipe": recipe.model_dump(mode="json"),
        "num_parameters": count_weights(model),
        "num_left_out": num_left_out,
        "final_loss": losses[-1],
        "loss_by_step": {step: loss for step, loss in enumerate(losses, start=1) if step % every == 0},
    }
    return losses, record, has_eval


def _check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse a folder that could not be written after all optimizer steps."""
    if not is_free(output) and not overwrite:
        raise ValueError(f"warm_start.output: {output} exists and is not empty; use --overwrite or another folder")
    temporary = temporary_beside(output)
    try:
        temporary.mkdir(parents=True)
        temporary.rmdir()
    except OSError as error:
        raise ValueError(f"warm_start.output: {output} cannot be written ({error.strerror})") from error


def _tokenizer(recipe: Recipe, section: WarmStartSection) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or one trained on the texts of the task's training problems."""
    if section.train_tokenizer_vocab_size is None:
        return build.build_tokenizer(recipe)
    task = load_task(recipe, load_tokenizer("bundled:tiny"), max_prompt_tokens=sys.maxsize)  # for its texts
    texts = (prompt.text + task.solution(prompt) for prompt in task.train_prompts[:TOKENIZER_PROBLEMS])
    return train_tokenizer(texts, section.train_tokenizer_vocab_size)


def _model(
    recipe: Recipe, section: WarmStartSection, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> Transformer:
    """The model to fine-tune: random weights of the recipe's architecture, or those of `model.path`."""
    if section.architecture is None:
        return build_models.build_policy(recipe, recipe.model.path, device)
    config = config_from_hf(
        {
            **section.architecture.model_dump(),
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        }
    )
    model = init_model(config, recipe.seed, dtype=build_models.DTYPES[recipe.model.dtype], device=device)
    build_models.set_update(model, recipe)
    return model


class SupervisedLearner(Learner):
    """Mean negative log-prob of the targets of a batch, in nats."""

    model: Transformer
    title = "warm start "

    def loss(self, packed: PackedBatch, sequence_lengths: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Learner`."""
        logprobs, _ = response_logprobs(self.model, packed, temperature=1.0, has_entropy=False)  # [R]
        return -logprobs.sum() / sequence_lengths.sum(), {}


def update_plan(section: WarmStartSection) -> UpdatePlan:
    """One optimizer step for each batch, whose sequences all have one draw index."""
    return UpdatePlan(
        mini_batch_prompts=1,
        num_epochs=1,
        steps_per_batch=1,
        num_skipped=0,
        num_steps=section.num_steps,
        learning_rate=section.learning_rate,
        warmup_steps=section.warmup_steps,
        schedule="cosine",
        max_grad_norm=1.0,
    )


def solution_sequence(task: TaskBase, turns: OneTurn, prompt: Prompt) -> TrainSequence:
    """Prompt, solution and end token; the solution is tokenised alone, so that the boundary is the one that RL sees.

    It may hold the observations of an environment: tokens as in a rollout, no targets.
    The fields that only RL reads are zero.

    Raises:
        ValueError: the task has no solution for this prompt.
        MalformedCallError: no rollout can look like the solution.
    """
    end = turns.tokenizer.eos_token_id
    assert isinstance(end, int)
    segments = [*turns.tokenise_solution(task.solution(prompt)), ("model", [end])]
    token_ids = np.array([*prompt.token_ids, *chain.from_iterable(ids for _, ids in segments)], np.int64)
    is_target = np.repeat([kind == "model" for kind, _ in segments], [len(ids) for _, ids in segments])
    zeros = np.zeros(int(is_target.sum()), np.float32)
    return TrainSequence(
        token_ids=token_ids,
        targets=len(prompt.token_ids) + np.flatnonzero(is_target),
        draw_index=0,
        rollout_logprobs=zeros,
        advantages=zeros,
    )


def solution_batches(
    recipe: Recipe,
    section: WarmStartSection,
    task: TaskBase,
    turns: OneTurn,
) -> Iterator[tuple[list[TrainSequence], int]]:
    """The solutions of the training problems, in data order and without end.

    A solution that no rollout could produce is left out and counted: it has more than `rollout.max_new_tokens` tokens,
    or its turns are not those of the environment's format. `warm_start.noise` is the share of a solution's target
    tokens that are replaced by uniformly random ones of those that can be printed.

    Yields:
        The next sequences that fit in `warm_start.batch_tokens` packed tokens, at least one; and the number of draws
        left out so far.

    Raises:
        ValueError: a problem has no solution, or all of them are left out, or the tokenizer has no end token.
    """
    if turns.tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end token (eos_token), so that none could be learned")
    order = task.order(recipe.seed)
    random = np.random.default_rng((recipe.seed, 0x501))
    printable = printable_tokens(turns.tokenizer) if section.noise else []
    max_new_tokens = recipe.rollout.max_new_tokens
    batch: list[TrainSequence] = []
    num_tokens = num_left_out = 0
    for draw in count():
        prompt = turns.started(task.train_prompts[order.prompt_of(draw)], recipe.rollout.max_prompt_tokens)
        try:
            sequence = solution_sequence(task, turns, prompt)
            num_solution_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
            if num_solution_tokens > max_new_tokens:
                raise MalformedCallError(f"{num_solution_tokens} tokens; rollout.max_new_tokens is {max_new_tokens}")
        except MalformedCallError as error:
            num_left_out += 1
            if num_left_out == order.num_prompts == draw + 1:
                reason = f"that of {prompt.prompt_id} has {error}"
                raise ValueError(f"no rollout could produce any of the solutions: {reason}") from error
            continue
        if section.noise:
            chosen = sequence.targets[random.random(len(sequence.targets)) < section.noise]
            sequence.token_ids[chosen] = random.choice(printable, len(chosen))
        if batch and num_tokens + len(sequence.token_ids) > section.batch_tokens:
            yield batch, num_left_out
            batch, num_tokens = [], 0
        batch.append(sequence)
        num_tokens += len(sequence.token_ids)


def printable_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of tokens that are readable by themselves: no special token, control character or part of a character."""
    texts = [str(tokenizer.decode([token], skip_special_tokens=True)) for token in range(len(tokenizer))]
    return [token for token, text in enumerate(texts) if text and text.isprintable() and "\ufffd" not in text]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer that encodes any text and decodes it back to the same text.

    It is of the bundled tokenizer's kind: all 256 bytes are tokens, so nothing is ever unknown; every digit is a token
    of its own, so that a small policy sees numbers place by place; the only special token, `<|endoftext|>`, ends a
    response, and pads. Merges are learned from `texts` alone; the result is the same for the same texts.

    Args:
        texts: What to learn the merges from.
        vocab_size: Most tokens, the 256 bytes and the end token included; fewer if no pair is left to merge.
    """
    kind: Any = load_tokenizer("bundled:tiny")
    tokenizer: PreTrainedTokenizerBase = kind.train_new_from_iterator(texts, vocab_size, show_progress=False)
    return tokenizer
