"""PPO's critic: the same `Transformer` with a number for each token instead of logits.

T packed tokens of one forward pass, D model width.
"""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from srtrl.model.attention import AttentionPlan
from srtrl.model.files import full_disk_as_os_error, read_tensors
from srtrl.model.transformer import ModelConfig, Transformer
from srtrl.model.weights import load_model, locate, save_model

HEAD_FILE = "value_head.safetensors"
_HEAD_NAME = "value_head.weight"


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

    def forward(self, token_ids: Tensor, plan: AttentionPlan) -> Tensor:
        """Values of `token_ids` [T] that attend as `plan` says: [T] float32 (float64 for a float64 body).

        The value at a token is that of the state after it, in which the next token is chosen.
        """
        hidden = self.body(token_ids, plan)  # [T, D]
        values = functional.linear(hidden.to(self.value_head.dtype), self.value_head)  # [T, 1]
        return values.squeeze(-1).clone()  # fully_shard hooks what it returns, and warns of a view


def load_value_model(path: str | Path, *, dtype: torch.dtype, device: torch.device | str) -> ValueModel:
    """The critic in the folder at `path` (see `weights.locate`), or a policy's body with a fresh head.

    A folder with `value_head.safetensors` is a critic's. A critic saved in `dtype` has the same bits.

    Raises:
        ValueError: as `weights.load_model`, or a value head that is not readable or of another width.
    """
    folder = locate(path)
    model = ValueModel(load_model(path, dtype=dtype, device=device))
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
