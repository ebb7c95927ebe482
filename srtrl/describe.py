"""What `srtrl show-config --check` prints of a recipe whose checks passed: time, disk, memory and verdict."""

from collections.abc import Iterator

import torch

from srtrl.cuda.flash import choose_flash
from srtrl.engine.kv_memory import GIB
from srtrl.model.cpu_threads import num_cores
from srtrl.model.folders import is_local
from srtrl.model.transformer import ModelConfig
from srtrl.planner import KV_CACHE, MAX_SHARE, NUM_GPUS, MemoryPlan, advise, find_config, plan_memory, step_time
from srtrl.recipe.schema import Recipe
from srtrl.run.estimate import describe_cpu, describe_gpus
from srtrl.run.machine import choose_device
from srtrl.run.place import is_empty
from srtrl.run.step_time import find_gpu
from srtrl.tasks.base import needs_network


def describe_plan(recipe: Recipe, gpu: str | None, gpus: int | None) -> Iterator[str]:
    """The lines of `srtrl show-config --check`: cost, table, verdict, and what helps where the step does not fit.

    Args:
        recipe: Only `config.json` of its model is read.
        gpu: See `find_gpu`.
        gpus: Their number; None: one, or with `train.sharding: fsdp2` as many as are needed.

    Raises:
        ValueError: see `find_gpu`, `find_config` and `plan_memory`; or one GPU for `fsdp2`.
    """
    if recipe.train.sharding == "fsdp2" and gpus == 1:
        raise ValueError("--gpus: train.sharding: fsdp2 shares the weights among several, expected 2 or more, found 1")
    on_cpu = gpu is None and gpus is None and choose_device(recipe).type == "cpu"
    yield from describe_cpu(recipe, recipe.num_threads or num_cores()) if on_cpu else ()
    if recipe.warm_start is not None and recipe.warm_start.architecture is not None:
        yield "memory: not computed for the model that warm_start.architecture makes"
        yield f"verdict: {_checked(recipe)}; `srtrl warm-start` writes {recipe.warm_start.output}"
        return
    if on_cpu and recipe.device == "cpu":
        yield "memory: not computed for device: cpu; --gpu GIB computes it for a GPU"
        yield _verdict(recipe, "trains on the CPU")
        return
    name, gpu_gib, origin = find_gpu(gpu)
    config, source = find_config(recipe.model.path)
    for num_gpus in (gpus,) if gpus else NUM_GPUS if recipe.train.sharding == "fsdp2" else (1,):
        plan = plan_memory(recipe, config, int(gpu_gib * GIB), num_gpus)
        if plan.fits:
            break
    if not on_cpu:
        yield from describe_gpus(step_time(recipe, config, plan, name), name, fits=plan.fits)
    notes = {"weights": f"{recipe.model.path}{source}", KV_CACHE: f"for {plan.slots} slots"}
    if plan.parts[KV_CACHE] < plan.smallest_kv:
        notes[KV_CACHE] = f"and one sequence needs {plan.smallest_kv / GIB:.1f}"
    if (lora := recipe.model.lora) is not None:
        notes |= {"masters": "A and B of LoRA", "reference": f"LoRA's copy of the base weights, base: {lora.base}"}
    yield f"memory of a training step on {plan.gpus} of {gpu_gib:.4g} GiB ({origin}), computed:"
    for name, num_bytes in plan.parts.items():
        if num_bytes or name in notes:
            yield f"  {name:<18}{num_bytes / GIB:7.1f} GiB  {notes.get(name, '')}".rstrip()
    outcome = "fits" if plan.fits else "does not fit"
    limit = f"{'at most' if plan.total <= plan.limit else 'more than'} {plan.limit / GIB:.1f} GiB"
    yield f"  {'sum':<18}{plan.total / GIB:7.1f} GiB  {outcome}: {limit}, {MAX_SHARE:.0%} of the GPU"
    place = f"{plan.gpus} of {gpu_gib:.4g} GiB"
    if not torch.cuda.is_available() and recipe.device == "auto":
        place += " (there is none here: trains on the CPU)"
    if torch.cuda.is_available() and recipe.model.dtype != "float32":
        flash = choose_flash(recipe.train.attention, torch.device("cuda"), config.head_dim)
        yield f"attention of the update: {flash}"
    yield from _advice(recipe, config, plan)
    yield _verdict(recipe, f"{outcome} {place}")


def _advice(recipe: Recipe, config: ModelConfig, plan: MemoryPlan) -> Iterator[str]:
    """Lines that say what to change."""
    if recipe.model.dtype == "float32":
        yield (
            "advice: model.dtype=bfloat16 is some 10 times as fast on a GPU (computed): float32 uses neither its "
            "tensor cores nor FlashAttention"
        )
    if not plan.fits:
        yield f"advice: {advise(recipe, config, plan)}"
    elif recipe.model.gradient_checkpointing is True:
        for text, less in (("false", False), ("half", "half")):
            model = recipe.model.model_copy(update={"gradient_checkpointing": less})
            changed = recipe.model_copy(update={"model": model})
            if plan_memory(changed, config, plan.gpu_bytes, plan.num_gpus).fits:
                yield f"advice: with model.gradient_checkpointing={text} it fits too, and updates are faster"
                break


def _verdict(recipe: Recipe, outcome: str) -> str:
    """The result that `srtrl train` would have with a recipe whose checks passed."""
    folder = f"{recipe.output_dir}/{recipe.name}"
    exists = "" if is_empty(recipe.folder) else f"; {folder} exists: --resume continues it, --overwrite begins again"
    return f"verdict: {_checked(recipe)}; {outcome}{exists}"


def _checked(recipe: Recipe) -> str:
    """The correct parts of a recipe, and those that the checks did not look up."""
    paths = recipe.model.model_dump(include={"path", "tokenizer"})
    remote = [f"model.{key} ({path})" for key, path in paths.items() if path and not is_local(path)]
    remote += ["the rows of task.options"] if needs_network(recipe.task) else []
    unseen = f"; not looked up on the hub: {', '.join(remote)}" if remote else ""
    return f"all names, options and paths are correct{unseen}"
