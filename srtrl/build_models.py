"""The models of a run, as its recipe says: policy, reference, teacher, critic, draft head; and their optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from srtrl import ranks
from srtrl.cuda.compiler import check_triton
from srtrl.cuda.flash import use_flash
from srtrl.features.adapters import load_policy, read_adapter
from srtrl.features.attention_head import AttentionHead, load_eagle3, load_mtp
from srtrl.features.critic import CRITIC_FOLDER, Critic, ValueModel, load_value_model
from srtrl.features.draft_head import DraftHead
from srtrl.features.draft_head_learner import DraftHeadLearner
from srtrl.features.lora import LoraAdamW
from srtrl.model.attention import check_packed_attention
from srtrl.model.folders import base_name, find_adapter, locate
from srtrl.ranks.sharding import shard
from srtrl.recipe.schema import LoraSection, Recipe
from srtrl.run.repeatable import fix_workspace
from srtrl.trainer.optimizer import MasterAdamW, build_optimizer

if TYPE_CHECKING:
    from srtrl.model.transformer import Transformer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Models(NamedTuple):
    """The models of a run, sharded where the recipe says so; those that learn have fresh optimizers."""

    policy: Transformer
    optimizer: MasterAdamW
    """The policy's optimizer."""
    reference: Transformer | None
    teacher: Transformer | None
    draft_head: DraftHeadLearner | None
    """A head that learns, as `attention_head` is one that does not."""
    attention_head: AttentionHead | None
    critic: Critic | None


def load_models(recipe: Recipe, checkpoint: Path | None, device: torch.device) -> Models:
    """Load the models that the recipe asks for, with the weights of a checkpoint if there is one.

    Raises:
        ValueError: a model does not fit the recipe or the device.
    """
    if recipe.repeatable and device.type == "cuda":
        fix_workspace()
    first: str | Path = checkpoint or recipe.model.path
    if recipe.model.lora is not None:  # the optimizer's state makes the policy of the base model
        first = locate(recipe.model.path)
    policy = build_policy(recipe, str(first), device)
    shard_model(policy, recipe)
    return Models(
        policy=policy,
        optimizer=make_policy_optimizer(policy, recipe),
        reference=build_reference(recipe, policy, device),
        teacher=build_teacher(recipe, device),
        draft_head=build_draft_head(recipe, policy),
        attention_head=build_attention_head(recipe, policy),
        critic=build_critic(recipe, checkpoint, device),
    )


def build_policy(recipe: Recipe, path: str, device: torch.device) -> Transformer:
    """The policy with the weights of `path` (the recipe's model, or a checkpoint), in the recipe's dtype."""
    model = load_policy(path, dtype=DTYPES[recipe.model.dtype], device=device)
    set_update(model, recipe)
    return model


def set_update(model: Transformer, recipe: Recipe) -> None:
    """Prepare a loaded model for updates: the recipe's gradient checkpointing, and on a CUDA device fused kernels.

    Raises:
        ValueError: as `check_triton`.
    """
    model.gradient_checkpointing = recipe.model.gradient_checkpointing
    if model.device.type == "cuda":
        check_triton()
        from srtrl.cuda.update import fuse_update

        fuse_update(model)


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
    options |= {"seed": recipe.seed, "base": base_name(recipe.model.path), "dtype": DTYPES[recipe.model.dtype]}
    optimizer = LoraAdamW(body, lora, lr=learning_rate, **options)
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
    """The frozen reference policy, or None where the recipe has none.

    It is a second set of weights in memory; with LoRA it is the policy itself, inside `LoraAdamW.base_weights`.
    """
    if not recipe.has_reference:
        return None
    if recipe.model.lora is not None:
        return policy
    # Its log-probs are compared with the policy's: the same rounding.
    reference = build_policy(recipe, recipe.model.path, device).requires_grad_(False)
    shard_model(reference, recipe)
    return reference


def build_teacher(recipe: Recipe, device: torch.device) -> Transformer | None:
    """The frozen teacher of `algorithm.teacher`, a second set of weights in the policy's type; None without one."""
    section = recipe.algorithm.teacher
    if section is None:
        return None
    teacher = build_policy(recipe, section.path, device).requires_grad_(False)
    check_packed_attention(device, DTYPES[recipe.model.dtype], teacher.config.head_dim)
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


def build_draft_head(recipe: Recipe, policy: Transformer) -> DraftHeadLearner | None:
    """The draft head that learns with a fresh optimizer, or None where the recipe has none."""
    section = recipe.rollout.draft_head
    if section is None or section.kind != "recurrent":
        return None
    dtype = DTYPES[recipe.model.dtype]
    head = DraftHead(policy, dtype, vocabulary=section.vocabulary, seed=recipe.seed)
    return DraftHeadLearner(head, policy, recipe)


def build_attention_head(recipe: Recipe, policy: Transformer) -> AttentionHead | None:
    """The pretrained draft head that the recipe names, or None.

    Raises:
        ValueError: it is not for this policy, or its folder is not there or damaged.
    """
    section = recipe.rollout.draft_head
    if section is None or section.kind == "recurrent":
        return None
    return load_mtp(policy) if section.path is None else load_eagle3(section.path, policy)
