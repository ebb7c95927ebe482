"""Time and space of a run, computed from a recipe before it runs: seconds of a step, bytes to download and to keep.

Responses count with their maximum length; drafts, evaluations and what samples of a prompt share are left out.
"""

from typing import NamedTuple

import torch

from srtrl.engine.kv_memory import MAX_AUTO_SLOTS
from srtrl.model.folders import is_local
from srtrl.model.hf_config import config_from_hf
from srtrl.model.published_shapes import published_shape
from srtrl.model.transformer import Transformer
from srtrl.model.weights import read_config
from srtrl.recipe.schema import Recipe

MIN_SLOW_PARAMETERS = 400_000_000
"""A model with as many is one for a GPU: Qwen2.5-0.5B has 494 million."""


class Speed(NamedTuple):
    """How fast a device computes; assumed, not measured on the device at hand."""

    flops: float
    """Operations per second of an update."""
    bytes_per_second: float
    """Rate at which a decode step reads weights."""
    overhead: float
    """Seconds of a decode step beside that."""


GPU = {"bfloat16": Speed(3e14, 2e12, 1.5e-3), "float32": Speed(3e13, 2e12, 1.5e-3)}
"""An H200, by `model.dtype`. In bfloat16 updates had 2.99e14 and 3.19e14 operations per second, and decode steps of
Qwen2.5-1.5B took 1.8 to 4.7 ms, here 3.0 (docs/benchmarks.md); float32 is a guess."""
THREAD = Speed(5e10, 1e10, 0.0)
"""A thread of a CPU. All threads share the bytes."""


def step_seconds(
    recipe: Recipe, num_parameters: int, num_threads: int | None, teacher_parameters: int | None = None
) -> float:
    """Seconds of a training step of a model with `num_parameters`, on threads of a CPU or (None) on a GPU.

    Its teacher, where it has one, is as large, or has `teacher_parameters`.
    """
    rollout, is_half = recipe.rollout, recipe.model.dtype == "bfloat16"
    speed = GPU[recipe.model.dtype] if num_threads is None else THREAD
    num_samples = rollout.num_prompts * rollout.num_samples
    slots = MAX_AUTO_SLOTS if rollout.slots == "auto" else rollout.slots
    decode_step = speed.overhead + num_parameters * (2 if is_half else 4) / speed.bytes_per_second
    decode = -(-num_samples // slots) * rollout.max_new_tokens * decode_step
    passes = 2 + 6 * recipe.train.num_epochs * (1 if recipe.critic is None else 2)  # 2 of the rollout itself
    passes += 2 * (recipe.algorithm.kl.coefficient > 0)
    num_tokens = num_samples * rollout.max_new_tokens + rollout.num_prompts * rollout.max_prompt_tokens
    operations = passes * num_parameters
    if recipe.algorithm.teacher is not None:
        operations += 2 * (teacher_parameters or num_parameters)
    return decode + operations * num_tokens / (speed.flops * (num_threads or 1))


def checkpoint_bytes(recipe: Recipe, num_parameters: int) -> int:
    """Bytes of a checkpoint: weights and, of what learns without LoRA, float32 masters (of bfloat16) and moments."""
    weights, optimizer = (2, 12) if recipe.model.dtype == "bfloat16" else (4, 8)
    policy = weights + (optimizer if recipe.model.lora is None else 0)
    return num_parameters * (policy + (0 if recipe.critic is None else weights + optimizer))


def describe_cost(recipe: Recipe, num_threads: int | None) -> list[str]:
    """Lines of `srtrl show-config --check`; none for a model whose shape is not known here.

    Args:
        recipe: Of its model only the shape is read.
        num_threads: Of the CPU that trains; None for a GPU.
    """
    paths, train = {"model": recipe.model.path}, recipe.train
    if recipe.algorithm.teacher is not None:
        paths["teacher"] = recipe.algorithm.teacher.path
    makes_model = recipe.warm_start is not None and recipe.warm_start.architecture is not None
    if makes_model or not all(is_local(path) or published_shape(path) for path in paths.values()):
        return []
    sizes = {name: _known_parameters(path) for name, path in paths.items()}
    seconds = step_seconds(recipe, sizes["model"], num_threads, sizes.get("teacher"))
    device = "one H200" if num_threads is None else f"{_threads(num_threads)} of a CPU"
    remote = {name: path for name, path in paths.items() if not is_local(path)}
    num_bytes = 2 * sum({path: sizes[name] for name, path in remote.items()}.values())
    download = f"{num_bytes / 1e9:.2g} GB to download for the {' and the '.join(remote)}"
    kept = min(train.keep_checkpoints + (train.keep_best is not None), -(-train.num_steps // train.checkpoint_every))
    size = kept * checkpoint_bytes(recipe, sizes["model"]) / 1e9
    return [
        f"time: about {_duration(seconds)} per step, {_duration(train.num_steps * seconds)} in all, "
        f"{_condition(recipe)} (computed for {device}, without drafts and evaluations)",
        f"disk: {download if remote else 'nothing to download'}, {size:.2g} GB of checkpoints ({kept} kept)",
    ]


def describe_device(recipe: Recipe, model: Transformer) -> list[str]:
    """The first lines of a run: its device and, for a large model on a CPU, the seconds of a step."""
    if model.device.type == "cuda":
        return [f"device: {torch.cuda.get_device_name(model.device)}"]
    num_threads, num_parameters = torch.get_num_threads(), _num_parameters(model)
    duration = _duration(step_seconds(recipe, num_parameters, num_threads))
    slow = f"{num_parameters / 1e9:.1f}B parameters are many for a CPU: about {duration} per step {_condition(recipe)}"
    return [f"device: cpu, {_threads(num_threads)}", *[f"{slow} (computed)"] * (num_parameters >= MIN_SLOW_PARAMETERS)]


def _known_parameters(path: str) -> int:
    """Number of parameters of a local model, or of one with a published shape."""
    config = read_config(path) if is_local(path) else config_from_hf(published_shape(path) or {}, path)
    return _num_parameters(Transformer(config, torch.float32, "meta"))


def _num_parameters(model: Transformer) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _condition(recipe: Recipe) -> str:
    return f"if each response has {recipe.rollout.max_new_tokens:,} tokens"


def _threads(number: int) -> str:
    return f"{number} thread{'s' if number > 1 else ''}"


def _duration(seconds: float) -> str:
    """Two digits in seconds, minutes, hours or days."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{float(f'{seconds / size:.2g}'):,.4g} {unit}"
    return f"{seconds:.2g} s"
