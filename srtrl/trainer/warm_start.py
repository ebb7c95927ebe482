"""Supervised fine-tuning on the task's own solutions: makes a policy that RL can start from (`srtrl warm-start`)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from srtrl.metrics import write_atomic
from srtrl.model.attention import PackedPlan
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.hf_config import config_from_hf
from srtrl.model.logprobs import token_logprobs
from srtrl.model.weights import init_model, load_tokenizer
from srtrl.recipe import ArchitectureSection, Recipe, WarmStartSection
from srtrl.rollout.packing import pack
from srtrl.tasks.base import Task, load_task, task_texts
from srtrl.tasks.grading import Grader
from srtrl.trainer import build
from srtrl.trainer.build import DTYPES
from srtrl.trainer.checkpoint import save_policy, written_beside
from srtrl.trainer.evaluate import EvalResult, evaluate, held_out_prompts
from srtrl.trainer.optimizer import MasterWeightAdamW, gradient_holders, learning_rate_at, set_learning_rate
from srtrl.trainer.out_of_memory import explain_out_of_memory
from srtrl.trainer.run_folder import RunProgress
from srtrl.trainer.sampling import DataOrder
from srtrl.types import Prompt, TrainSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.model.transformer import Transformer

END_OF_TEXT = "<|endoftext|>"
"""The only special token of a trained tokenizer: ends a response, and pads."""
NUM_BYTES = 256
TOKENIZER_PROBLEMS = 10_000
"""Most problems whose texts train a tokenizer, from the first; merges of a larger sample hardly differ."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WarmStartSummary:
    """What a warm start made."""

    output: Path
    """The policy's folder."""
    losses: list[float]
    """Mean negative log-prob of an answer token at each optimizer step, in nats."""
    held_out: EvalResult | None
    """None where `eval.before_and_after` is false."""
    num_parameters: int
    num_overlong: int
    """Draws left out because the solution is longer than `rollout.max_new_tokens`."""
    seconds: float


def run_warm_start(recipe: Recipe, *, overwrite: bool = False, progress: RunProgress | None = None) -> WarmStartSummary:
    """Fine-tune on `task.solution` of the training prompts, save the policy, and evaluate it on held-out problems.

    The loss is on the solution's tokens and the end token only. Prompt and solution are tokenised apart, so that the
    boundary is the one that RL sees. Same recipe, machine and thread count: same weights.

    Raises:
        ValueError: the recipe has no `warm_start`, the output folder is not empty (without `overwrite`), the task has
            no solutions, or none fits `rollout.max_new_tokens`.
        RuntimeError: the loss or its gradient is not finite, or the device's memory is too small.
    """
    section = _check(recipe, overwrite)
    start = time.perf_counter()
    set_cpu_threads(recipe.num_threads)
    device = build.choose_device(recipe)
    build.check_compiler(recipe)
    tokenizer = _tokenizer(recipe, section)
    task = load_task(recipe, tokenizer)
    problems = held_out_prompts(task, recipe) if recipe.eval.before_and_after else []
    model = _model(recipe, section, tokenizer, device)
    solutions = SolutionStream(
        task,
        tokenizer,
        num_problems=min(section.num_problems or len(task.train_prompts), len(task.train_prompts)),
        max_new_tokens=recipe.rollout.max_new_tokens,
        seed=recipe.seed,
        noise=section.noise,
    )
    progress = progress if progress is not None else RunProgress("warm start", section.num_steps, plain_every=20)
    with progress:
        losses = _fine_tune(recipe, section, model, solutions, progress)
    output = Path(section.output)
    _save(recipe, section, model, tokenizer, output)
    progress.say(f"saved {output}: loss {losses[-1]:.4f}")
    if solutions.num_overlong:
        progress.say(f"left out {solutions.num_overlong} draws: solution longer than rollout.max_new_tokens")
    held_out = _evaluate(recipe, task, output, device, problems) if problems else None
    summary = WarmStartSummary(
        output=output,
        losses=losses,
        held_out=held_out,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_overlong=solutions.num_overlong,
        seconds=time.perf_counter() - start,
    )
    write_atomic(output / "warm_start.json", _record(recipe, summary))
    return summary


def _check(recipe: Recipe, overwrite: bool) -> WarmStartSection:
    """What can be refused before anything is loaded."""
    section = recipe.warm_start
    if section is None:
        raise ValueError("this recipe has no `warm_start` section (at least `warm_start.output` must be given)")
    if section.architecture is None and section.train_tokenizer_vocab_size is not None:
        raise ValueError(
            "warm_start.train_tokenizer_vocab_size needs warm_start.architecture: "
            "the weights of model.path belong to the tokenizer of that model"
        )
    longest = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens
    if section.architecture is not None and section.architecture.max_position_embeddings < longest:
        raise ValueError(
            f"warm_start.architecture.max_position_embeddings: at least {longest} are needed "
            "(rollout.max_prompt_tokens + rollout.max_new_tokens), "
            f"found {section.architecture.max_position_embeddings}"
        )
    _check_output(Path(section.output), overwrite)
    return section


def _check_output(output: Path, overwrite: bool) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"warm_start.output: {output} exists and is not empty; use --overwrite or another folder")
    if not (output / "config.json").is_file():
        raise ValueError(f"--overwrite: {output} holds no config.json, so it is not a model; delete it yourself")


def _tokenizer(recipe: Recipe, section: WarmStartSection) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or one trained on the texts of the task's training problems."""
    if section.train_tokenizer_vocab_size is None:
        return build.build_tokenizer(recipe)
    texts = islice(task_texts(recipe), TOKENIZER_PROBLEMS)
    return train_tokenizer(texts, section.train_tokenizer_vocab_size)


def _model(
    recipe: Recipe, section: WarmStartSection, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> Transformer:
    """The model to fine-tune: random weights of the recipe's architecture, or those of `model.path`."""
    if section.architecture is None:
        return build.build_policy(recipe, recipe.model.path, device)
    config = config_from_hf(hf_config(section.architecture, tokenizer))
    model = init_model(config, recipe.seed, dtype=DTYPES[recipe.model.dtype], device=device)
    build.set_update_options(model, recipe)
    return model


def hf_config(architecture: ArchitectureSection, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """The Hugging Face config of a policy from scratch, with the tokenizer's vocabulary and end token."""
    return {
        **architecture.model_dump(),
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    }


def _fine_tune(
    recipe: Recipe, section: WarmStartSection, model: Transformer, solutions: SolutionStream, progress: RunProgress
) -> list[float]:
    """All optimizer steps; returns the loss of each.

    Where the weights have float32 masters, those are the model's at the end, so that `save_dtype` float32 saves what
    was learned to the last bit.
    """
    optimizer = build.make_optimizer(model, section, recipe)
    losses: list[float] = []
    for step in range(1, section.num_steps + 1):
        rate = learning_rate_at(
            step - 1,
            peak=section.learning_rate,
            warmup_steps=section.warmup_steps,
            num_steps=section.num_steps,
            schedule="cosine",
        )
        set_learning_rate(optimizer, rate)
        optimizer.zero_grad(set_to_none=True)
        batch = solutions.batch(section.batch_tokens)
        with explain_out_of_memory(f"warm start step {step}", recipe, has_engine=False):
            loss = supervised_backward(model, batch, recipe.train.micro_batch_tokens)
            norm = torch.nn.utils.clip_grad_norm_(gradient_holders(model, optimizer), section.max_grad_norm).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise RuntimeError(
                f"warm start step {step}: loss {loss}, gradient norm {norm}; nothing was saved. "
                f"Try a lower warm_start.learning_rate (now {section.learning_rate})"
            )
        optimizer.step()
        losses.append(loss)
        progress.step(step, f"loss {loss:.4f}  grad norm {norm:.2f}  rate {rate:.2e}")
    if isinstance(optimizer, MasterWeightAdamW):
        optimizer.hand_over_masters()
    return losses


def supervised_backward(model: Transformer, batch: Sequence[TrainSequence], micro_batch_tokens: int) -> float:
    """Add the gradient of the mean negative log-prob of the batch's response tokens; returns that mean in nats.

    `micro_batch_tokens` bounds memory and does not change the gradient.
    """
    device = model.head_weight.device
    num_targets = sum(len(sequence.token_ids) - sequence.num_prompt_tokens for sequence in batch)
    total = 0.0
    for packed in pack(batch, micro_batch_tokens, device):
        plan = PackedPlan.from_lengths(packed.lengths, device)
        hidden = model(packed.token_ids, plan)[packed.hidden_index]  # [R, D]
        logprobs, _ = token_logprobs(hidden, model.head_weight, packed.target_ids, temperature=1.0)  # [R]
        loss = -logprobs.sum() / num_targets
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _save(
    recipe: Recipe, section: WarmStartSection, model: Transformer, tokenizer: PreTrainedTokenizerBase, output: Path
) -> None:
    """Write the policy beside its folder, then rename: the folder is whole or not there."""
    end_ids = () if section.architecture is not None else build.response_end_ids(recipe.model.path, tokenizer)
    with written_beside(output) as temporary:
        save_policy(
            temporary,
            model=model,
            tokenizer=tokenizer,
            end_ids=sorted({int(tokenizer.eos_token_id), *end_ids}),
            dtype=DTYPES[section.save_dtype],
        )


def _evaluate(recipe: Recipe, task: Task, output: Path, device: torch.device, problems: Sequence[Prompt]) -> EvalResult:
    """Held-out accuracy of the saved weights, as RL will load them."""
    tokenizer = load_tokenizer(str(output))
    engine = build.build_engine(recipe, build.build_policy(recipe, str(output), device), tokenizer)
    with Grader(task, recipe.rewards, recipe.grading, recipe.rollout.max_new_tokens) as grader:
        _, result = evaluate(
            engine,
            grader,
            tokenizer,
            problems,
            num_samples=recipe.eval.num_samples,
            sampling=build.eval_sampling(recipe, build.response_end_ids(str(output), tokenizer)),
            seed=recipe.seed,
        )
    return result


def _record(recipe: Recipe, summary: WarmStartSummary) -> str:
    """The provenance kept with the policy, as JSON; no times, so that the same recipe writes the same file."""
    every = max(1, len(summary.losses) // 20)
    held_out = summary.held_out.metrics() if summary.held_out is not None else {}
    record = {
        "recipe": recipe.model_dump(mode="json"),
        "num_parameters": summary.num_parameters,
        "num_overlong": summary.num_overlong,
        "final_loss": summary.losses[-1],
        "loss_by_step": {step: loss for step, loss in enumerate(summary.losses, start=1) if step % every == 0},
        "held_out": {name: value for name, value in held_out.items() if name != "time/eval"},
    }
    return json.dumps(record, indent=2) + "\n"


def solution_sequence(task: Task, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> TrainSequence:
    """Prompt, solution and end token; the solution is tokenised alone, so that the boundary is the one that RL sees.

    The fields that only RL reads are zero.

    Raises:
        ValueError: the task has no solution for this prompt.
    """
    assert tokenizer.eos_token_id is not None, "refused by SolutionStream"
    solution_ids = tokenizer.encode(task.solution(prompt), add_special_tokens=False)
    token_ids = np.array([*prompt.token_ids, *solution_ids, tokenizer.eos_token_id], np.int64)
    zeros = np.zeros(len(solution_ids) + 1, np.float32)
    return TrainSequence(
        token_ids=token_ids,
        num_prompt_tokens=len(prompt.token_ids),
        draw_index=0,
        rollout_logprobs=zeros,
        advantages=zeros,
    )


class SolutionStream:
    """The endless stream of solutions of the task's first `num_problems` training problems, in the seeded data order.

    A solution that no rollout could produce, for it has more than `max_new_tokens` tokens, is left out and counted.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_problems: int,
        max_new_tokens: int,
        seed: int,
        noise: float = 0.0,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end token (eos_token), so that none could be learned")
        self._task = task
        self._tokenizer = tokenizer
        self._order = DataOrder(num_problems, seed)
        self._max_new_tokens = max_new_tokens
        self._noise = noise
        self._random = np.random.default_rng((seed, 0x501))
        self._position = 0
        self._pending: TrainSequence | None = None
        self.num_overlong = 0
        """Draws left out so far."""

    def batch(self, num_tokens: int) -> list[TrainSequence]:
        """The next sequences that fit in `num_tokens` packed tokens; at least one.

        Raises:
            ValueError: a problem has no solution, or all of them are too long.
        """
        sequences: list[TrainSequence] = []
        used = 0
        while True:
            sequence = self._pending if self._pending is not None else self._next()
            self._pending = None
            if sequences and used + len(sequence.token_ids) > num_tokens:
                self._pending = sequence
                return sequences
            sequences.append(sequence)
            used += len(sequence.token_ids)

    def _next(self) -> TrainSequence:
        for _ in range(self._order.num_prompts):
            index = self._order.prompt_of(self._position)
            self._position += 1
            sequence = solution_sequence(self._task, self._tokenizer, self._task.train_prompts[index])
            if len(sequence.advantages) <= self._max_new_tokens:
                self._spoil(sequence)
                return sequence
            self.num_overlong += 1
        raise ValueError(f"every solution is longer than rollout.max_new_tokens ({self._max_new_tokens}): raise it")

    def _spoil(self, sequence: TrainSequence) -> None:
        """Replace the recipe's share of the solution's tokens by uniformly random ones, in place."""
        if self._noise:
            solution = sequence.token_ids[sequence.num_prompt_tokens :]
            chosen = self._random.random(len(solution)) < self._noise
            solution[chosen] = self._random.integers(0, len(self._tokenizer), int(chosen.sum()))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer that encodes any text and decodes it back to the same text.

    All 256 bytes are tokens, so nothing is ever unknown; every digit is a token of its own, so that a small policy sees
    numbers place by place. Merges are learned from `texts` alone; the result is the same for the same texts.

    Args:
        texts: What to learn the merges from.
        vocab_size: Most tokens, the bytes and the end token included; fewer where no pair is left to merge.

    Raises:
        ValueError: `vocab_size` has no room for the bytes and the end token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < NUM_BYTES + 1:
        raise ValueError(
            f"warm_start.train_tokenizer_vocab_size ({vocab_size}) must be at least {NUM_BYTES + 1}: "
            f"{NUM_BYTES} bytes and {END_OF_TEXT}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
