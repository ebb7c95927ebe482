"""PPO's critic: the same `Transformer` with a number for each token instead of logits, and how it learns the returns.

T packed tokens of one forward pass, R response tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from srtrl.features.adapters import load_policy
from srtrl.model.attention import AttentionPlan, Gather
from srtrl.model.files import full_disk_as_os_error, read_tensors
from srtrl.model.folders import locate
from srtrl.model.transformer import ModelConfig, Transformer
from srtrl.model.weights import save_model
from srtrl.ranks.sharding import reshard, unshard
from srtrl.recipe.schema import Recipe
from srtrl.resolve import resolve_part
from srtrl.rollout.packing import PackedBatch
from srtrl.trainer.learner import Learner, loss_metrics
from srtrl.trainer.optimizer import MasterAdamW
from srtrl.trainer.passes import Column, UpdateContext
from srtrl.types import TrainSequence

HEAD_FILE = "value_head.safetensors"
_HEAD_NAME = "value_head.weight"
CRITIC_FOLDER = "critic"
CRITIC_OPTIMIZER = "critic_optimizer"
MIN_RELATIVE_VARIANCE = 1e-12
"""Returns that vary by less, against the mean square of returns and values, are equal but for rounding to float32."""


class ValueModel(nn.Module):
    """A transformer with a value head: the expected return of the state after each token.

    The head is one linear map without bias (the final norm keeps the hidden states at one length, so the map learns a
    constant as fast as a bias would). It starts at zero, and so do the values: the first advantages are then the
    returns themselves instead of the noise of a random head. Head and values are float32 even for a bfloat16 body, for
    GAE adds up differences of neighbouring values, which in bfloat16 (8 bits) would be rounding.

    The body has no output head: an untied one would be V x D weights that nothing reads.
    """

    def __init__(self, body: Transformer) -> None:
        """A fresh head on `body`, whose output head is taken off; no random state is read or moved."""
        super().__init__()
        body.head = None
        # Heads called tied, so that no file of the body needs an output head.
        hf_config = {**body.config.hf_config, "tie_word_embeddings": True}
        body.config = replace(body.config, tie_word_embeddings=True, hf_config=hf_config)
        self.body = body
        head_dtype = torch.promote_types(body.dtype, torch.float32)
        self.value_head = nn.Parameter(torch.zeros(1, body.config.hidden_size, dtype=head_dtype, device=body.device))

    @property
    def config(self) -> ModelConfig:
        """Shape of the body."""
        return self.body.config

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.body.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the body's weights."""
        return self.body.dtype

    def forward(self, token_ids: Tensor, plan: AttentionPlan) -> Tensor:
        """Values of `token_ids` [T] that attend as `plan` says: [T] float32 (float64 for a float64 body).

        The value at a token is that of the state after it, in which the next token is chosen.
        """
        hidden = self.body(token_ids, plan)  # [T, D]
        values = functional.linear(hidden.to(self.value_head.dtype), self.value_head)  # [T, 1]
        return values.squeeze(-1).clone()  # fully_shard hooks what it returns, and warns of a view


class Critic(Learner):
    """The value model; its loss is the mean of `critic.value_loss` over the response tokens of a mini-batch."""

    model: ValueModel
    stage = "critic"
    title = "critic, "
    prefix = "critic/"
    folder = CRITIC_OPTIMIZER

    def __init__(self, model: ValueModel, optimizer: MasterAdamW, recipe: Recipe) -> None:
        """Resolve `critic.value_loss`.

        Raises:
            ValueError: it is unknown.
        """
        super().__init__(model, optimizer, recipe.critic_updates)
        assert recipe.critic is not None, "the recipe has no critic"
        self.section = section = recipe.critic
        self.loss_name = f"critic.value_loss {section.value_loss}"
        self.value_loss = resolve_part("critic.value_loss", section.value_loss)

    def loss(self, packed: PackedBatch, sequence_lengths: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Learner`."""
        values = response_values(self.model, packed)  # [R]
        token_loss, logged = self.value_loss(
            values, packed.values, packed.returns, packed.sequence_index, value_clip=self.section.value_clip
        )
        return token_loss.sum() / sequence_lengths.sum(), loss_metrics(self.section.value_loss, logged)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """See `Learner`."""
        unshard(self.model)
        yield
        reshard(self.model)

    def save(self, folder: Path) -> None:
        """See `Learner`; the model is written, too."""
        super().save(folder)
        save_value_model(self.model, folder / CRITIC_FOLDER)

    def after_update(self, sequences: Sequence[TrainSequence], context: UpdateContext) -> dict[str, float]:
        """`value_mean`, `return_mean` and `explained_variance` of the values before the update; see `value_metrics`."""
        return value_metrics(sequences)


def response_values(model: ValueModel, packed: PackedBatch) -> Tensor:
    """Forward pass of one micro-batch: values [R], differentiable.

    The value of a response token is that of the state in which it is chosen: of all tokens before it.
    """
    values: Tensor = model(packed.token_ids, packed.plan)  # [T]
    return Gather(packed.hidden_index, len(values))(values)


def values_column(model: ValueModel) -> Column:
    """The critic's values of the response tokens; see `Column`."""
    return Column(stage="values", field="values", model=model, forward=lambda packed: response_values(model, packed))


def value_metrics(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Quality of `values` as predictions of `returns`, over all response tokens.

    The metrics `value_mean`, `return_mean` and `explained_variance`, 1 - Var(returns - values) / Var(returns): 1 for a
    perfect critic, 0 for one that is no better than a constant, below 0 for a worse one. It is left out where all
    returns are equal, up to rounding: returns are advantages + values, and where the values cancel (all rewards 0),
    only the rounding error of the values varies.
    """
    pairs = [
        (sequence.values, sequence.returns)
        for sequence in sequences
        if sequence.values is not None and sequence.returns is not None
    ]
    assert len(pairs) == len(sequences), "the critic learns from sequences with values and returns"
    values, returns = (np.concatenate(arrays).astype(np.float64) for arrays in zip(*pairs, strict=True))  # [R] each
    metrics = {"value_mean": float(values.mean()), "return_mean": float(returns.mean())}
    variance = returns.var()
    if variance > MIN_RELATIVE_VARIANCE * max(np.square(returns).mean(), np.square(values).mean()):
        metrics["explained_variance"] = float(1 - (returns - values).var() / variance)
    return metrics


def load_value_model(path: str | Path, *, dtype: torch.dtype, device: torch.device | str) -> ValueModel:
    """The critic in the folder at `path` (see `folders.locate`), or a policy's body with a fresh head.

    A folder with `value_head.safetensors` is a critic's. A critic saved in `dtype` has the same bits.

    Raises:
        ValueError: as `load_policy`, or a value head that is not readable or of another width.
    """
    folder = locate(path)
    model = ValueModel(load_policy(path, dtype=dtype, device=device))
    file = folder / HEAD_FILE
    if not file.is_file():
        return model
    tensors = dict(read_tensors(file))
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    expected = {_HEAD_NAME: list(model.value_head.shape)}
    if shapes != expected:
        raise ValueError(f"{file}: found tensors of shapes {shapes}; by {folder / 'config.json'} expected {expected}")
    with torch.no_grad():
        model.value_head.copy_(tensors[_HEAD_NAME])
    return model


def save_value_model(model: ValueModel, folder: str | Path) -> None:
    """Write the body as `weights.save_model` does (as a model with tied heads), and `value_head.safetensors`.

    Raises:
        ValueError: the folder already holds weights.
    """
    folder = Path(folder)
    save_model(model.body, folder)
    file = folder / HEAD_FILE
    with full_disk_as_os_error(file):
        save_file({_HEAD_NAME: model.value_head.detach().cpu()}, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors makes it readable for its owner only
