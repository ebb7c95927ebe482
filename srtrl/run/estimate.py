"""Time and space of a run, computed from a recipe before it runs: seconds of a step, bytes to download and to keep.

Responses count with their maximum length; drafts, evaluations and what samples of a prompt share are left out.
"""

import torch

from srtrl.engine.kv_memory import CPU_SLOTS
from srtrl.model.folders import is_local
from srtrl.model.hf_config import config_from_hf
from srtrl.model.published_shapes import published_shape
from srtrl.model.transformer import Transformer
from srtrl.model.weights import read_config
from srtrl.recipe.schema import Recipe
from srtrl.run.step_time import StepTime, num_tokens, operations_per_weight

MIN_SLOW_PARAMETERS = 400_000_000
"""A model with as many is one for a GPU: Qwen2.5-0.5B has 494 million."""
THREAD_FLOPS, CPU_BYTES_PER_SECOND = 5e10, 1e10
"""Of a thread of a CPU; and of a CPU, whose threads share them. Assumed, not measured on the CPU at hand."""


def step_seconds(recipe: Recipe, num_parameters: int, num_threads: int) -> float:
    """Seconds of a training step of a model with `num_parameters`, on threads of a CPU."""
    rollout, is_half = recipe.rollout, recipe.model.dtype == "bfloat16"
    num_samples = rollout.num_prompts * rollout.num_samples
    slots = CPU_SLOTS if rollout.slots == "auto" else rollout.slots
    decode_step = num_parameters * (2 if is_half else 4) / CPU_BYTES_PER_SECOND
    decode = -(-num_samples // slots) * rollout.max_new_tokens * decode_step
    passes = 2 + operations_per_weight(recipe)  # 2 of the rollout itself
    return decode + passes * num_parameters * num_tokens(recipe) / (THREAD_FLOPS * num_threads)


def checkpoint_bytes(recipe: Recipe, num_parameters: int) -> int:
    """Bytes of a checkpoint: weights and, of what learns without LoRA, float32 masters (of bfloat16) and moments."""
    weights, optimizer = (2, 12) if recipe.model.dtype == "bfloat16" else (4, 8)
    policy = weights + (optimizer if recipe.model.lora is None else 0)
    return num_parameters * (policy + (0 if recipe.critic is None else weights + optimizer))


def describe_cpu(recipe: Recipe, num_threads: int) -> list[str]:
    """Time on a CPU, and disk: lines of `srtrl show-config --check`; none for a model whose shape is not known here.

    Args:
        recipe: Of its model only the shape is read.
        num_threads: Of the CPU that trains.
    """
    path, known = recipe.model.path, published_shape(recipe.model.path)
    if (recipe.warm_start is not None and recipe.warm_start.architecture is not None) or not (is_local(path) or known):
        return []
    config = read_config(path) if is_local(path) else config_from_hf(known or {}, path)
    num_parameters = _num_parameters(Transformer(config, torch.float32, "meta"))
    seconds = step_seconds(recipe, num_parameters, num_threads)
    return [_time(recipe, seconds, f"{_threads(num_threads)} of a CPU"), _disk(recipe, num_parameters)]


def describe_gpus(times: StepTime, name: str, *, fits: bool) -> list[str]:
    """The same on GPUs of this name, and the parts of the step; no time where the step does not fit."""
    recipe, rollout, held_out = times.recipe, times.recipe.rollout, times.recipe.eval
    disk = _disk(recipe, _num_parameters(times.policy))
    if not fits:
        return ["time: not computed for a step that does not fit", disk]
    plain, drafted = (
        times.rollout_seconds(rollout.num_prompts, rollout.num_samples, drafts=drafts) for drafts in (False, True)
    )
    update, device = times.update_seconds(), f"{times.num_gpus} x" if times.num_gpus > 1 else "one"
    parts = f"rollout {_duration(plain)}, or {_duration(drafted)} with drafts as on recorded mathematics; "
    parts += f"update {_duration(update)}"
    if held_out.num_problems is not None:
        evaluation = times.rollout_seconds(held_out.num_problems, held_out.num_samples, drafts=False)
        parts += f"; evaluation {_duration(evaluation)}"
    return [_time(recipe, plain + update, f"{device} {name.upper()}"), f"  {parts} (computed, not measured)", disk]


def _time(recipe: Recipe, seconds: float, device: str) -> str:
    return (
        f"time: about {_duration(seconds)} per step, {_duration(recipe.train.num_steps * seconds)} in all, "
        f"{_condition(recipe)} (computed for {device}, without drafts and evaluations)"
    )


def _disk(recipe: Recipe, num_parameters: int) -> str:
    train = recipe.train
    download = "nothing" if is_local(recipe.model.path) else f"{_two_digits(2 * num_parameters / 1e9)} GB"
    kept = min(train.keep_checkpoints + (train.keep_best is not None), -(-train.num_steps // train.checkpoint_every))
    size = kept * checkpoint_bytes(recipe, num_parameters) / 1e9
    return f"disk: {download} to download for the model, {_two_digits(size)} GB of checkpoints ({kept} kept)"


def describe_device(recipe: Recipe, model: Transformer) -> list[str]:
    """The first lines of a run: its device and, for a large model on a CPU, the seconds of a step."""
    if model.device.type == "cuda":
        return [f"device: {torch.cuda.get_device_name(model.device)}"]
    num_threads, num_parameters = torch.get_num_threads(), _num_parameters(model)
    duration = _duration(step_seconds(recipe, num_parameters, num_threads))
    slow = f"{num_parameters / 1e9:.1f}B parameters are many for a CPU: about {duration} per step {_condition(recipe)}"
    return [f"device: cpu, {_threads(num_threads)}", *[f"{slow} (computed)"] * (num_parameters >= MIN_SLOW_PARAMETERS)]


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
            return f"{_two_digits(seconds / size)} {unit}"
    return f"{_two_digits(seconds)} s"


def _two_digits(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.4g}"
