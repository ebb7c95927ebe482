"""The parts of a run, each made from the recipe by one small function."""

from __future__ import annotations

import logging
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from srtrl.drafters.base import DrafterBase, resolve_drafter
from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.draft_budget import MAX_ROWS, StepCost
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.engine.kv_memory import choose_slots, free_bytes, kv_bytes
from srtrl.engine.runner import PAGE_SIZE, Runner, page_bytes_of
from srtrl.engine.stopping import UNKNOWN, count_unknown
from srtrl.engine.warm_up import compile_kernels
from srtrl.environments.conversations import Conversations
from srtrl.features.draft_head import DraftHead
from srtrl.features.draft_head_learner import DraftHeadLearner
from srtrl.features.head_drafter import HeadDrafter, wrap_for_warm_up
from srtrl.features.partial import PartialSampler
from srtrl.features.spec_rl import SpecRlSampler
from srtrl.model.attention import check_packed_attention
from srtrl.model.value_model import ValueModel, load_value_model
from srtrl.model.weights import base_name, end_token_ids, find_adapter, load_model, load_tokenizer, read_adapter
from srtrl.ranks.processes import Ranks
from srtrl.ranks.sharding import shard
from srtrl.recipe.file import validate_section
from srtrl.recipe.schema import LoraSection, Recipe
from srtrl.run.checkpoint import CRITIC_FOLDER
from srtrl.tasks.base import TaskBase
from srtrl.trainer.critic import Critic, values_column
from srtrl.trainer.lora import LoraAdamW
from srtrl.trainer.objective import logprobs_column
from srtrl.trainer.optimizer import MasterAdamW, build_optimizer
from srtrl.trainer.passes import Column
from srtrl.trainer.sampling import RolloutContext, Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.model.transformer import Transformer

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CPU_SLOTS = 64
"""`rollout.slots: auto` on a CPU."""
PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}
"""Prompt tokens computed in one decode step at most, by type of device."""


def choose_device(recipe: Recipe) -> torch.device:
    """The recipe's device; `auto` is CUDA where present, of several ranks each has its own.

    Raises:
        ValueError: a device that this machine lacks.
    """
    if recipe.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda, but torch sees no CUDA device here; use device=cpu or device=auto")
    return torch.device(recipe.device)


def build_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer of the recipe's model, or the one it names."""
    return load_tokenizer(recipe.model.tokenizer or recipe.model.path)


def build_policy(recipe: Recipe, path: str, device: torch.device) -> Transformer:
    """The policy with the weights of `path` (the recipe's model, or a checkpoint), in the recipe's dtype."""
    model = load_model(path, dtype=DTYPES[recipe.model.dtype], device=device)
    model.gradient_checkpointing = recipe.model.gradient_checkpointing
    return model


def shard_model(model: Transformer | ValueModel, recipe: Recipe, ranks: Ranks) -> None:
    """Shard a model where `train.sharding` asks for it, before its optimizer is made; all ranks call this.

    Raises:
        ValueError: there is one process only.
    """
    if recipe.train.sharding == "fsdp2":
        if ranks.count == 1:
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


def build_reference(recipe: Recipe, policy: Transformer, device: torch.device, ranks: Ranks) -> Transformer | None:
    """The frozen reference policy, or None where the KL coefficient is 0.

    It is a second set of weights in memory; with LoRA it is the policy itself, inside `LoraAdamW.base_weights`.
    """
    if recipe.algorithm.kl.coefficient == 0:
        return None
    if recipe.model.lora is not None:
        return policy
    # Its log-probs are compared with the policy's: the same rounding.
    reference = build_policy(recipe, recipe.model.path, device).requires_grad_(False)
    shard_model(reference, recipe, ranks)
    return reference


def build_critic(recipe: Recipe, checkpoint: Path | None, device: torch.device, ranks: Ranks) -> Critic | None:
    """The critic with a fresh optimizer, or None where the recipe has none.

    Its weights are those of the checkpoint, else of `model.path`; a folder without a value head gets one that is zero.
    """
    section = recipe.critic
    if section is None:
        return None
    path = recipe.model.path if checkpoint is None else checkpoint / CRITIC_FOLDER
    model = load_value_model(path, dtype=DTYPES[recipe.model.dtype], device=device)
    model.body.gradient_checkpointing = recipe.model.gradient_checkpointing
    shard_model(model, recipe, ranks)
    optimizer = make_optimizer(
        model, recipe, learning_rate=section.learning_rate, weight_decay=recipe.train.weight_decay
    )
    return Critic(model, optimizer, recipe)


def build_columns(
    recipe: Recipe, policy: Transformer, optimizer: MasterAdamW, reference: Transformer | None, critic: Critic | None
) -> list[Column]:
    """What passes compute before credit is assigned: the reference's log-probs, the policy's, and values."""
    columns, temperature = [], recipe.rollout.temperature
    if reference is not None:
        columns.append(logprobs_column("reference", "ref_logprobs", reference, temperature, optimizer.base_weights))
    if recipe.algorithm.old_logprobs == "recompute":
        columns.append(logprobs_column("old_logprobs", "old_logprobs", policy, temperature))
    if critic is not None:
        columns.append(values_column(critic.model))
    return columns


def build_sampler(context: RolloutContext, task: TaskBase) -> Sampler:
    """What takes the groups of a step, by `rollout.mode`."""
    samplers = {"on_policy": Sampler, "partial": PartialSampler, "spec_rl": SpecRlSampler}
    return samplers[context.recipe.rollout.mode](context, task)


def build_draft_head(recipe: Recipe, policy: Transformer) -> DraftHeadLearner | None:
    """The draft head with a fresh optimizer, or None where the recipe has none."""
    section = recipe.rollout.draft_head
    if section is None:
        return None
    dtype = DTYPES[recipe.model.dtype]
    head = DraftHead(policy, dtype, vocabulary=section.vocabulary, hidden=section.hidden, seed=recipe.seed)
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
    rollout = recipe.rollout
    if num_unknown := count_unknown(tokenizer, np.arange(model.config.vocab_size)):
        logger.warning("the tokenizer lacks %d of the model's tokens; in texts they are %s", num_unknown, UNKNOWN)
    options = EngineOptions(
        slots=number_of_slots(
            recipe, model, free_bytes(model.device), num_samples=num_samples, reserved_bytes=reserved_bytes
        ),
        kv_memory_gib=rollout.kv_memory_gib,
        kv_reserved_bytes=reserved_bytes,
        cuda_graphs=rollout.cuda_graphs,
        prefill_chunk_tokens=PREFILL_TOKENS[model.device.type],
        max_sequence_tokens=rollout.max_prompt_tokens + rollout.max_new_tokens,
        draft_budget=rollout.draft_budget,
        run_ahead_max_slowdown=rollout.run_ahead_max_slowdown,
    )
    runner, drafter = build_runner(model, options), build_drafter(recipe)
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
    )


def build_runner(policy: Transformer, options: EngineOptions) -> Runner:
    """The runner for the policy's device, without pages yet; `options` say how long sequences may be.

    Raises:
        ValueError: Triton is not installed.
    """
    if policy.device.type == "cpu":
        return CpuRunner(policy, options)
    if find_spec("triton") is None:
        raise ValueError(
            "decoding on a CUDA device needs Triton, which PyTorch's CUDA builds for Linux include and this "
            "installation lacks: `pip install triton`, or run with device=cpu"
        )
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
        return min(CPU_SLOTS if rollout.slots == "auto" else rollout.slots, num_samples or sys.maxsize)
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


def build_conversations(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Conversations | None:
    """The environment that answers the policy between two turns; None where a sample is a single turn.

    Raises:
        ValueError: the environment or its format is unknown or wrong, or does not fit the tokenizer.
    """
    environment = recipe.rollout.environment
    return None if environment is None else Conversations(environment, tokenizer)


def response_end_ids(model_path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a response of the model at `model_path`; see `weights.end_token_ids`.

    Raises:
        ValueError: there is none, so that no response could ever end before the length limit.
    """
    ids = end_token_ids(model_path, tokenizer)
    if not ids:
        raise ValueError(f"{model_path}: neither its configs nor its tokenizer name an end token (eos_token_id)")
    return ids
