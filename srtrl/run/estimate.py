"""Time and space of a run, computed from a recipe before it runs: seconds of a step, bytes to download and to keep.

Responses count with their maximum length; what samples of a prompt share is left out. The curves of GPUs are data
sheets, and the shares of them that one H200 reached with Qwen2.5-1.5B (docs/benchmarks.md, "On a GPU"). Nothing is
known of what other GPUs reach, and NCCL has not run: links count with their data sheets.
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np
import torch

from srtrl.engine.kv_memory import CPU_SLOTS, GIB
from srtrl.engine.runner import page_bytes_of
from srtrl.model.folders import is_local
from srtrl.model.transformer import Transformer
from srtrl.recipe.schema import Recipe

MIN_SLOW_PARAMETERS = 400_000_000
"""A model with as many is one for a GPU: Qwen2.5-0.5B has 494 million."""
DEFAULT_GPU_GIB, MAX_GPU_GIB = 80.0, 100_000
"""Memory to plan for where there is no GPU (one that is sold as 80 GB has about 79 GiB), and the largest."""
GPUS_OF_A_MACHINE, BETWEEN_MACHINES = 8, 50e9
"""Beyond as many the network is the link: bytes per second of a GPU's 400 Gbit/s."""
HOST = ((0.25e-3, 2.8e-6), (0.6e-3, 15e-6))
"""Seconds of the host while a GPU waits, without and with drafts: of a decode step, and of each of its sequences."""
DRAFTS = ((6, 9.2, 16.0), (45, 5.4, 7.2), (125, 4.8, 5.8), (308, 1.4, 1.6))
"""Sequences in a decode step, tokens that each got from it and had in it: recorded mathematics, `srt`, half known."""


class Device(NamedTuple):
    """How fast a device computes."""

    name: str
    read: float
    """Bytes per second in a decode step."""
    products: float
    """Operations per second of the rows of a decode step."""
    update: float
    """The same of a whole update."""
    link: float = 1.0
    """Bytes per second to the other GPUs of the machine, in one direction."""
    gib: float = 0.0
    """Memory that PyTorch shows, rounded down."""
    float32: float = 1.0
    """Share of the operations per second that is left in float32."""
    layer_seconds: float = 0.0
    """Of a decode step for each layer, beside its bytes or operations."""
    host: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.0), (0.0, 0.0))


def cpu(num_threads: int) -> Device:
    """Threads of a CPU, which share its bytes: assumed, not measured on the CPU at hand."""
    flops = 5e10 * num_threads
    return Device(f"{_threads(num_threads)} of a CPU", 1e10, flops, flops)


def _gpu(name: str, gib: float, read: float, flops: float, link: float) -> Device:
    """A GPU by its data sheet (SXM; bfloat16 without sparsity), and the H200's shares: float32's tenth is a guess."""
    return Device(name, 0.87 * read, 0.6 * flops, 0.32 * flops, link, gib, 0.1, 43e-6, HOST)


GPUS = {
    "a100": _gpu("A100", 79, 2.04e12, 312e12, 300e9),
    "h100": _gpu("H100", 79, 3.35e12, 989e12, 450e9),
    "h200": _gpu("H200", 139, 4.8e12, 989e12, 450e9),
    "b200": _gpu("B200", 178, 8e12, 2250e12, 900e9),
}


def find_gpu(text: str | None) -> tuple[Device, float, str]:
    """The GPU to plan for, its GiB, and their origin; where only a size is known, the time is that of an H200.

    Args:
        text: A name, or GiB; None for this machine's GPU.

    Raises:
        ValueError: It is neither.
    """
    if text is None and torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        known = next((name for name in GPUS if name in device.name.lower()), "h200")
        return GPUS[known], device.total_memory / GIB, device.name
    if text is None:
        return GPUS["h200"], DEFAULT_GPU_GIB, "there is none here; --gpu GIB for another size"
    if text in GPUS:
        return GPUS[text], GPUS[text].gib, f"--gpu {text}"
    if not text.replace(".", "", 1).isdecimal() or not 1 <= float(text) <= MAX_GPU_GIB:
        raise ValueError(f"--gpu: expected GiB from 1 to {MAX_GPU_GIB:,}, or one of {', '.join(GPUS)}; found {text!r}")
    return GPUS["h200"], float(text), "--gpu"


@dataclass(kw_only=True, frozen=True, slots=True)
class StepTime:
    """The parts of a training step's time."""

    recipe: Recipe
    policy: Transformer
    """Only its sizes count."""
    device: Device
    slots: int
    """Of each device."""
    num_gpus: int = 1
    gradient_bytes: int = 0
    """What `train.sharding: ddp` sums over the GPUs in each optimizer step."""
    teacher_weights: int = 0
    """Number of a teacher's weights."""

    @property
    def num_weights(self) -> int:
        """Number of the policy's weights."""
        return count_weights(self.policy)

    def _seconds(self, num_operations: float, rate: float) -> float:
        return num_operations / (rate if self.recipe.model.dtype == "bfloat16" else rate * self.device.float32)

    def token_seconds(self, num_sequences: int, *, drafts: bool) -> float:
        """Seconds in which a device decodes a token of each of its sequences; drafts are used where that is faster."""
        rollout, device, rate, rows = self.recipe.rollout, self.device, 1.0, 1.0
        if drafts:
            sequences, *columns = zip(*DRAFTS, strict=True)
            rate, rows = (float(np.interp(num_sequences, sequences, column)) for column in columns)
        context = rollout.max_prompt_tokens + rollout.max_new_tokens / 2
        kv_bytes, num_weights = page_bytes_of(self.policy, 1) * context, self.num_weights
        step = max(
            num_weights * self.policy.dtype.itemsize / device.read,
            self._seconds(2 * num_weights * rows * num_sequences, device.products),
        )
        step += device.layer_seconds * len(self.policy.layers) + kv_bytes * num_sequences / device.read
        fixed, each = device.host[drafts]
        found = (step + fixed + each * num_sequences) / rate
        return min(found, self.token_seconds(num_sequences, drafts=False)) if drafts else found

    def rollout_seconds(self, num_prompts: int, num_samples: int, *, drafts: bool = False) -> float:
        """Seconds of a rollout with `num_samples` of each prompt, which the GPUs share evenly."""
        rollout = self.recipe.rollout
        full, rest = divmod(ceil(num_prompts * num_samples / self.num_gpus), self.slots)
        waves = [self.slots] * full + [rest] * (rest > 0)
        decoded = rollout.max_new_tokens * sum(self.token_seconds(number, drafts=drafts) for number in waves)
        read = 2 * self.num_weights * num_prompts * rollout.max_prompt_tokens / self.num_gpus
        return decoded + self._seconds(read, self.device.products)

    def update_seconds(self) -> float:
        """Seconds of all passes over a batch, with the messages between GPUs; those of fsdp2 hide behind the passes."""
        train, rollout, has_reference = self.recipe.train, self.recipe.rollout, self.recipe.has_reference
        num_tokens = rollout.num_prompts * (rollout.num_samples * rollout.max_new_tokens + rollout.max_prompt_tokens)
        num_updates = self.recipe.policy_updates.steps_per_batch
        num_passes = ceil(num_tokens * train.num_epochs / num_updates / train.micro_batch_tokens)
        mine = ceil(num_passes / self.num_gpus)
        operations = 6 * train.num_epochs * (1 if self.recipe.critic is None else 2) + 2 * has_reference
        operations = operations * self.num_weights + 2 * self.teacher_weights
        seconds = mine / num_passes * self._seconds(operations * num_tokens, self.device.update)
        link = self.device.link if self.num_gpus <= GPUS_OF_A_MACHINE else BETWEEN_MACHINES
        sent = (1 - 1 / self.num_gpus) * num_updates / link
        if train.sharding == "ddp":
            return seconds + 2 * sent * self.gradient_bytes
        gathered = ((2 + has_reference) * self.num_weights + self.teacher_weights) * self.policy.dtype.itemsize
        return max(seconds, mine * sent * (gathered + 4 * self.num_weights))

    def step_seconds(self) -> float:
        """Seconds of a step without drafts and evaluations."""
        rollout = self.recipe.rollout
        return self.rollout_seconds(rollout.num_prompts, rollout.num_samples) + self.update_seconds()


def count_weights(model: Transformer) -> int:
    """Number of weights of a model; one that embedding and head share counts once."""
    return sum(weight.numel() for weight in model.parameters())


def cpu_time(recipe: Recipe, policy: Transformer, num_threads: int, teacher_weights: int = 0) -> StepTime:
    """The time of a step on a CPU."""
    slots = CPU_SLOTS if recipe.rollout.slots == "auto" else recipe.rollout.slots
    sizes = {"slots": slots, "teacher_weights": teacher_weights}
    return StepTime(recipe=recipe, policy=policy, device=cpu(num_threads), **sizes)


def checkpoint_bytes(recipe: Recipe, num_parameters: int) -> int:
    """Bytes of a checkpoint: weights and, of what learns without LoRA, float32 masters (of bfloat16) and moments."""
    weights, optimizer = (2, 12) if recipe.model.dtype == "bfloat16" else (4, 8)
    policy = weights + (optimizer if recipe.model.lora is None else 0)
    return num_parameters * (policy + (0 if recipe.critic is None else weights + optimizer))


def describe_cost(times: StepTime) -> list[str]:
    """Time and disk: lines of `srtrl show-config --check`."""
    recipe, rollout, train, held_out = times.recipe, times.recipe.rollout, times.recipe.train, times.recipe.eval
    name, seconds = times.device.name, times.step_seconds()
    device = f"{times.num_gpus} x {name}" if times.num_gpus > 1 else f"one {name}" if times.device.gib else name
    drafted = times.rollout_seconds(rollout.num_prompts, rollout.num_samples, drafts=True)
    update = times.update_seconds()
    with_drafts = f", or {_duration(drafted)} with drafts as on recorded mathematics"
    parts = f"rollout {_duration(seconds - update)}{with_drafts if drafted < seconds - update else ''}"
    parts += f"; update {_duration(update)}"
    if held_out.num_problems is not None:
        parts += f"; evaluation {_duration(times.rollout_seconds(held_out.num_problems, held_out.num_samples))}"
    sizes = {"model": (recipe.model.path, times.num_weights)}
    if recipe.algorithm.teacher is not None:
        sizes["teacher"] = recipe.algorithm.teacher.path, times.teacher_weights
    remote = {name: pair for name, pair in sizes.items() if not is_local(pair[0])}
    download = _two_digits(2 * sum(dict(remote.values()).values()) / 1e9)
    download = f"{download} GB to download for the {' and the '.join(remote)}" if remote else "nothing to download"
    kept = min(train.keep_checkpoints + (train.keep_best is not None), -(-train.num_steps // train.checkpoint_every))
    size = _two_digits(kept * checkpoint_bytes(recipe, times.num_weights) / 1e9)
    return [
        f"time: about {_duration(seconds)} per step, {_duration(train.num_steps * seconds)} in all, "
        f"{_condition(recipe)} (computed for {device}, without drafts and evaluations)",
        f"  {parts} (computed, not measured)",
        f"disk: {download}, {size} GB of checkpoints ({kept} kept)",
    ]


def describe_device(recipe: Recipe, model: Transformer) -> list[str]:
    """The first lines of a run: its device and, for a large model on a CPU, the seconds of a step."""
    if model.device.type == "cuda":
        return [f"device: {torch.cuda.get_device_name(model.device)}"]
    times = cpu_time(recipe, model, num_threads := torch.get_num_threads())
    lines = [f"device: cpu, {_threads(num_threads)}"]
    if times.num_weights >= MIN_SLOW_PARAMETERS:
        duration, condition = _duration(times.step_seconds()), _condition(recipe)
        many = f"{times.num_weights / 1e9:.1f}B parameters are many for a CPU"
        lines.append(f"{many}: about {duration} per step {condition} (computed)")
    return lines


def _threads(number: int) -> str:
    return f"{number} thread{'s' if number > 1 else ''}"


def _condition(recipe: Recipe) -> str:
    return f"if each response has {recipe.rollout.max_new_tokens:,} tokens"


def _duration(seconds: float) -> str:
    """Two digits in seconds, minutes, hours or days."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{_two_digits(seconds / size)} {unit}"
    return f"{_two_digits(seconds)} s"


def _two_digits(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.4g}"
