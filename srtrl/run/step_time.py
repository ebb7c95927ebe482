"""Seconds of a training step on one or several GPUs, by curves: computed, not measured.

The curves are data sheets, and the shares of them that one H200 reached with Qwen2.5-1.5B (docs/benchmarks.md, "On a
GPU"). Nothing is known of what other GPUs reach, and NCCL has not run: links count with their data sheets.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from srtrl.engine.kv_memory import GIB
from srtrl.engine.runner import page_bytes_of
from srtrl.model.transformer import Transformer
from srtrl.recipe.schema import Recipe

DEFAULT_GPU_GIB = 80.0
"""Memory to plan for where there is no GPU. One that is sold as 80 GB has about 79 GiB."""


class Gpu(NamedTuple):
    """Figures of a data sheet (SXM; bfloat16, without sparsity)."""

    gib: float
    """Memory that PyTorch shows, rounded down."""
    bytes_per_second: float
    flops: float
    link: float
    """Bytes per second to the other GPUs of the machine, in one direction."""


GPUS = {
    "a100": Gpu(79, 2.04e12, 312e12, 300e9),
    "h100": Gpu(79, 3.35e12, 989e12, 450e9),
    "h200": Gpu(139, 4.8e12, 989e12, 450e9),
    "b200": Gpu(178, 8e12, 2250e12, 900e9),
}
MEASURED, MAX_GPU_GIB = "h200", 100_000
GPUS_OF_A_MACHINE, BETWEEN_MACHINES = 8, 50e9
"""Beyond as many the network is the link: bytes per second of a GPU's 400 Gbit/s."""
READ, PRODUCTS, UPDATE = 0.87, 0.6, 0.32
"""Shares of a data sheet: bytes per second of a copy; operations per second of each more row of a decode step, and of a
whole update. Float32 computes with a tenth of that, which is a guess."""
LAYER_SECONDS = 43e-6
"""Of a decode step for each layer, beside its bytes or operations."""
HOST = {False: (0.25e-3, 2.8e-6), True: (0.6e-3, 15e-6)}
"""Seconds of the host while the GPU waits, without and with drafts: of a decode step, and of each of its sequences."""
DRAFTS = ((6, 9.2, 16.0), (45, 5.4, 7.2), (125, 4.8, 5.8), (308, 1.4, 1.6))
"""Sequences in a decode step, tokens that each got from it and had in it: recorded mathematics, `srt`, half known."""


def num_tokens(recipe: Recipe) -> int:
    """Tokens of a step's update: responses of the maximum length, and each prompt once."""
    rollout = recipe.rollout
    return rollout.num_prompts * (rollout.num_samples * rollout.max_new_tokens + rollout.max_prompt_tokens)


def num_frozen(recipe: Recipe) -> int:
    """Models whose log-probs of a step are computed, and which do not learn: reference and teacher."""
    return (recipe.algorithm.kl.coefficient > 0) + (recipe.algorithm.teacher is not None)


def operations_per_weight(recipe: Recipe) -> int:
    """Operations of a step's update for each weight of the policy and each token of `num_tokens`."""
    return 6 * recipe.train.num_epochs * (1 if recipe.critic is None else 2) + 2 * num_frozen(recipe)


def find_gpu(text: str | None) -> tuple[str, float, str]:
    """The GPU to plan for: its name in `GPUS` (of unknown ones the one that was measured), its GiB, and their origin.

    Args:
        text: A name, or GiB; None for this machine's GPU.

    Raises:
        ValueError: It is neither.
    """
    if text is None and torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        name = next((name for name in GPUS if name in device.name.lower()), MEASURED)
        return name, device.total_memory / GIB, device.name
    if text is None:
        return MEASURED, DEFAULT_GPU_GIB, "there is none here; --gpu GIB for another size"
    if text.lower() in GPUS:
        return text.lower(), GPUS[text.lower()].gib, f"--gpu {text}"
    if not text.replace(".", "", 1).isdecimal() or not 1 <= float(text) <= MAX_GPU_GIB:
        raise ValueError(f"--gpu: expected GiB from 1 to {MAX_GPU_GIB:,}, or one of {', '.join(GPUS)}; found {text!r}")
    return MEASURED, float(text), "--gpu"


@dataclass(kw_only=True, frozen=True, slots=True)
class StepTime:
    """The parts of a training step's time; each response has the maximum length."""

    recipe: Recipe
    policy: Transformer
    """Only its sizes count."""
    gpu: Gpu
    num_gpus: int
    slots: int
    """Of each GPU."""
    gradient_bytes: int
    """What `train.sharding: ddp` sums over the GPUs in each optimizer step."""

    @property
    def _sizes(self) -> tuple[int, int]:
        """Number of the policy's weights, and their bytes."""
        weights = list(self.policy.parameters())
        return sum(weight.numel() for weight in weights), sum(weight.nbytes for weight in weights)

    def _product_seconds(self, num_operations: float, share: float) -> float:
        is_half = self.recipe.model.dtype != "float32"
        return num_operations / (share * self.gpu.flops * (1 if is_half else 0.1))

    def token_seconds(self, num_sequences: int, *, drafts: bool) -> float:
        """Seconds in which a GPU decodes one token of each of its sequences; drafts are used where they are faster."""
        rollout, (num_weights, weight_bytes) = self.recipe.rollout, self._sizes
        rate, rows = 1.0, 1.0
        if drafts:
            sequences, *columns = zip(*DRAFTS, strict=True)
            rate, rows = (float(np.interp(num_sequences, sequences, column)) for column in columns)
        context = rollout.max_prompt_tokens + rollout.max_new_tokens / 2
        kv_bytes = page_bytes_of(self.policy, 1) * context * num_sequences
        read = READ * self.gpu.bytes_per_second
        computed = self._product_seconds(2 * num_weights * rows * num_sequences, PRODUCTS)
        fixed, each = HOST[drafts]
        step = LAYER_SECONDS * len(self.policy.layers) + max(weight_bytes / read, computed) + kv_bytes / read
        found = (step + fixed + each * num_sequences) / rate
        return min(found, self.token_seconds(num_sequences, drafts=False)) if drafts else found

    def rollout_seconds(self, num_prompts: int, num_samples: int, *, drafts: bool) -> float:
        """Seconds of a rollout with `num_samples` of each prompt, which the GPUs share evenly."""
        rollout, num_weights = self.recipe.rollout, self._sizes[0]
        full, rest = divmod(-(-num_prompts * num_samples // self.num_gpus), self.slots)
        waves = full * [self.slots] + [rest] * (rest > 0)
        read = self._product_seconds(2 * num_weights * num_prompts * rollout.max_prompt_tokens, PRODUCTS)
        decoded = rollout.max_new_tokens * sum(self.token_seconds(number, drafts=drafts) for number in waves)
        return decoded + read / self.num_gpus

    def update_seconds(self) -> float:
        """Seconds of all passes over a batch, with the messages between GPUs; those of fsdp2 hide behind the passes."""
        train, (num_weights, weight_bytes), all_tokens = self.recipe.train, self._sizes, num_tokens(self.recipe)
        num_updates = self.recipe.policy_updates.steps_per_batch
        num_passes = -(-all_tokens * train.num_epochs // (num_updates * train.micro_batch_tokens))  # of an update
        mine = -(-num_passes // self.num_gpus)
        operations = operations_per_weight(self.recipe) * num_weights * all_tokens
        seconds = mine / num_passes * self._product_seconds(operations, UPDATE)
        link = self.gpu.link if self.num_gpus <= GPUS_OF_A_MACHINE else BETWEEN_MACHINES
        others = (self.num_gpus - 1) / self.num_gpus
        if train.sharding == "ddp":
            return seconds + others * 2 * self.gradient_bytes * num_updates / link
        of_pass = (2 + num_frozen(self.recipe)) * weight_bytes + 4 * num_weights
        return max(seconds, others * of_pass * mine * num_updates / link)
