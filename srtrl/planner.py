"""Memory of a training step on one GPU, computed on no device: `srtrl show-config --check`, docs/performance.md.

Tensors on PyTorch's device `meta` have sizes and no content, so the parts that a run builds, and the update's own code,
say what they would allocate. The peak of a step is in the update, while the decoder keeps what it has.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import huggingface_hub
import torch

from srtrl.build import number_of_slots
from srtrl.build_models import build_draft_head
from srtrl.cuda.flash import choose_flash
from srtrl.cuda.shapes import LOGITS_AT_ONCE
from srtrl.cuda.tiles import SCRATCH_LANES
from srtrl.engine.kv_memory import GIB, GRAPH_BYTES, choose_num_pages, kv_bytes
from srtrl.engine.runner import PAGE_SIZE, page_bytes_of
from srtrl.features.attention_drafter import DrafterNeeds, needs_of
from srtrl.features.attention_head import AttentionHead, mtp_config, usual_config
from srtrl.features.critic import ValueModel
from srtrl.features.draft_head_learner import MAX_TOKENS, NUM_STEPS, NUM_TARGETS, STRIDE, Texts
from srtrl.features.lora import LoraAdamW
from srtrl.meta_update import MemoryTracker, activation_bytes, make_optimizer, make_policy, num_bytes
from srtrl.model.cpu_threads import num_cores
from srtrl.model.folders import is_local
from srtrl.model.hf_config import config_from_hf
from srtrl.model.published_shapes import published_shape
from srtrl.model.transformer import ModelConfig, Transformer
from srtrl.model.weights import read_config
from srtrl.recipe.file import RecipeError, RecipeSource, build_recipe
from srtrl.recipe.schema import ModelSection, Recipe
from srtrl.run.estimate import Device, StepTime, count_weights, cpu_time, describe_cost, find_gpu
from srtrl.run.machine import choose_device
from srtrl.run.place import is_empty
from srtrl.tasks.base import needs_network

MAX_SHARE = 0.9
"""Share of a GPU's memory. The rest is for the CUDA context, libraries' workspaces and fragmentation."""
DECODER_ROWS = 2**14
"""Rows of hidden states in the decoder's buffers."""
NUM_GPUS = (2, 4, 8, 16, 32, 64)
"""With `train.sharding: fsdp2` and no `--gpus` the plan is for the first of these that fits."""
KV_CACHE = "KV cache"
KV_CHANGE = "rollout.kv_memory_gib={kv_gib}"
CHANGES = (
    KV_CHANGE,
    "model.gradient_checkpointing=half",
    "model.gradient_checkpointing=true",
    "train.micro_batch_tokens={longest}",
    "model.dtype=bfloat16",
    KV_CHANGE,
    "train.sharding=fsdp2",
    "model.lora.rank=32",
    "model.lora.base=host",
)
"""Overrides that lower the memory of a step, in the order in which they are advised. The KV cache is first where a half
of it is left, and then where it holds what is useful."""
USEFUL_SEQUENCES = 4
"""Sequences of the maximum length in the smallest KV cache that is advised."""


@dataclass(kw_only=True, frozen=True, slots=True)
class MemoryPlan:
    """The peak of a training step on a GPU of a given size."""

    gpu_bytes: int
    parts: dict[str, int]
    """Bytes by name."""
    smallest_kv: int
    """Bytes of the KV cache of one sequence of the maximum length."""
    slots: int
    """Sequences decoded at a time."""
    num_gpus: int
    """GPUs that share what `train.sharding: fsdp2` shards."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def without_kv(self) -> int:
        """Bytes of all parts but the KV cache."""
        return self.total - self.parts[KV_CACHE]

    @property
    def limit(self) -> int:
        """Bytes that the parts may have."""
        return int(MAX_SHARE * self.gpu_bytes)

    @property
    def gpus(self) -> str:
        """Whose memory it is, as a sentence has it."""
        return "a GPU" if self.num_gpus == 1 else f"each of {self.num_gpus} GPUs"

    @property
    def fits(self) -> bool:
        """Whether the step runs on this GPU."""
        return self.total <= self.limit and self.parts[KV_CACHE] >= self.smallest_kv


def plan_memory(recipe: Recipe, config: ModelConfig, gpu_bytes: int, num_gpus: int = 1) -> MemoryPlan:
    """Memory of a training step on each GPU.

    Attention counts as FlashAttention, and the logits of every row are computed, as though there were no prompts. The
    keys and values that samples of the maximum length gather are counted, by their shared prompts.

    Args:
        recipe: Where `rollout.slots` or `rollout.kv_memory_gib` is auto, it is chosen for this GPU.
        config: The shape of the recipe's model.
        gpu_bytes: Memory of a GPU with nothing else on it.
        num_gpus: With `train.sharding: fsdp2`, those that share the weights (see `srtrl/ranks/sharding.py`).

    Raises:
        ValueError: `rollout.kv_memory_gib` is given, and does not hold a sequence of the maximum length.
    """
    section, lora, gathered, policy = recipe.model, recipe.model.lora, 0, make_policy(config, recipe.model)
    num_parts = 1
    if recipe.train.sharding == "fsdp2":  # parts are float32; the decoder and passes use whole weights of their type
        section = section.model_copy(update={"dtype": "float32"})
        num_parts, gathered = num_gpus, _gathered_bytes(policy)
    kept, gradients, base = _learner_bytes(config, section, num_parts)
    if gathered:
        kept |= {"weights": num_bytes(policy.parameters()), "masters": kept["masters"] + kept["weights"]}
        base = base * policy.dtype.itemsize // 4 if lora else base  # W0 is in the type of passes
    has_reference = recipe.has_reference if lora is None else lora.base == "device"
    parts = {**kept, "reference": base if has_reference else 0, "critic": 0}
    if recipe.algorithm.teacher is not None:
        teacher = find_config(recipe.algorithm.teacher.path, "algorithm.teacher.path")[0]
        parts["teacher"] = num_bytes(make_policy(teacher, section).parameters(), num_parts)
        if gathered:
            gathered = max(gathered, _gathered_bytes(make_policy(teacher, recipe.model), learns=False))
    if recipe.critic is not None:
        critic, critic_gradients, _ = _learner_bytes(config, section, num_parts, is_critic=True)
        parts["critic"] = sum(critic.values())
        gradients = max(gradients, critic_gradients)  # one model after the other learns
    needs = DrafterNeeds()
    if (draft_head := recipe.rollout.draft_head) is not None and draft_head.kind == "recurrent":
        parts["draft head"] = _draft_head_bytes(config, recipe)
    elif draft_head is not None:
        shape = usual_config(config) if draft_head.kind == "eagle3" else mtp_config(config)
        head = AttentionHead(shape, policy.dtype, "meta")
        needs = needs_of(head)
        state_bytes = DECODER_ROWS * len(shape.reads) * config.hidden_size * policy.dtype.itemsize
        parts["draft head"] = num_bytes(head.parameters()) + state_bytes
    rollout, free = recipe.rollout, max(0, gpu_bytes - sum(parts.values()))
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    slots = number_of_slots(recipe, policy, free, reserved_bytes=gradients, drafter_page_bytes=needs.page_bytes)
    parts["decoder's buffers"] = buffers = decoder_bytes(policy, has_graphs=rollout.cuda_graphs)
    page_bytes = page_bytes_of(policy, PAGE_SIZE) + needs.page_bytes
    smallest_kv = -(-longest // PAGE_SIZE) * page_bytes
    kv = kv_bytes(rollout.kv_memory_gib, free - buffers, reserved_bytes=gradients)
    if kv >= smallest_kv or rollout.kv_memory_gib != "auto":
        kv = page_bytes * choose_num_pages(
            kv, page_bytes=page_bytes, page_size=PAGE_SIZE, slots=slots, max_sequence_tokens=longest
        )
    parts[KV_CACHE] = kv
    parts["gradients"] = gradients
    settings = recipe.model.model_dump_json(exclude={"lora": {"base"}})
    num_rows, num_samples = recipe.train.micro_batch_tokens, rollout.num_samples
    num_keys = num_rows * num_samples * longest // (longest + (num_samples - 1) * rollout.max_new_tokens)
    parts["activations"] = gathered + activation_bytes(config, settings, num_rows, num_keys)
    return MemoryPlan(gpu_bytes=gpu_bytes, parts=parts, smallest_kv=smallest_kv, slots=slots, num_gpus=num_gpus)


def advise(recipe: Recipe, config: ModelConfig, plan: MemoryPlan) -> str:
    """Advice for a step that does not fit: the first of `CHANGES` with which it fits, else the one that saves most."""
    longest = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens
    kv_gib = (plan.limit - plan.without_kv) * 10 // GIB / 10  # rounded down
    saved, best = 0, ""
    for index, change in enumerate(CHANGES):
        least = USEFUL_SEQUENCES * plan.smallest_kv if index else plan.parts[KV_CACHE] / 2
        if change == KV_CHANGE and kv_gib * GIB < least:
            continue
        override = change.format(longest=longest, kv_gib=kv_gib)
        source = RecipeSource(Path(), recipe.model_dump())
        source.override([override])
        try:
            changed = plan_memory(build_recipe(source), config, plan.gpu_bytes, plan.num_gpus)
        except RecipeError:  # it does not go with another option
            continue
        if changed.fits:
            return f"with {override} it fits, with {changed.slots} slots"
        saved, best = max((saved, best), (plan.without_kv - changed.without_kv, override))
    needed = (plan.without_kv + USEFUL_SEQUENCES * plan.smallest_kv) / MAX_SHARE / GIB
    several = ", or several with train.sharding=fsdp2" if plan.num_gpus == 1 else ""
    too_little = f"; {best} saves {saved / GIB:.1f} GiB, which is not enough" if best else ""
    return f"a GPU of {needed:.0f} GiB{several}{too_little}"


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
    if recipe.warm_start is not None and recipe.warm_start.architecture is not None:
        yield "memory: not computed for the model that warm_start.architecture makes"
        yield f"verdict: {_checked(recipe)}; `srtrl warm-start` writes {recipe.warm_start.output}"
        return
    on_cpu, path = gpu is None and gpus is None and choose_device(recipe).type == "cpu", recipe.model.path
    paths = [path] if recipe.algorithm.teacher is None else [path, recipe.algorithm.teacher.path]
    if on_cpu and all(is_local(one) or published_shape(one) for one in paths):
        policy, num_threads = make_policy(find_config(path)[0], recipe.model), recipe.num_threads or num_cores()
        yield from describe_cost(cpu_time(recipe, policy, num_threads, _teacher_weights(recipe)))
    if on_cpu and recipe.device == "cpu":
        yield "memory: not computed for device: cpu; --gpu GIB computes it for a GPU"
        yield _verdict(recipe, "trains on the CPU")
        return
    device, gpu_gib, origin = find_gpu(gpu)
    config, source = find_config(path)
    for num_gpus in (gpus,) if gpus else NUM_GPUS if recipe.train.sharding == "fsdp2" else (1,):
        plan = plan_memory(recipe, config, int(gpu_gib * GIB), num_gpus)
        if plan.fits:
            break
    if not on_cpu:
        cost = describe_cost(step_time(recipe, config, plan, device))
        yield from cost if plan.fits else cost[-1:]
    yield f"memory of a training step on {plan.gpus} of {gpu_gib:.4g} GiB ({origin}), computed:"
    yield from _table(recipe, plan, source)
    outcome, place = "fits" if plan.fits else "does not fit", f"{plan.gpus} of {gpu_gib:.4g} GiB"
    if not torch.cuda.is_available() and recipe.device == "auto":
        place += " (there is none here: trains on the CPU)"
    if torch.cuda.is_available() and recipe.model.dtype != "float32":
        flash = choose_flash(recipe.train.attention, torch.device("cuda"), config.head_dim)
        yield f"attention of the update: {flash}"
    yield from _advice(recipe, config, plan)
    yield _verdict(recipe, f"{outcome} {place}")


def _table(recipe: Recipe, plan: MemoryPlan, source: str) -> Iterator[str]:
    """The bytes of each part, and their sum."""
    notes = {"weights": f"{recipe.model.path}{source}", KV_CACHE: f"for {plan.slots} slots"}
    if plan.parts[KV_CACHE] < plan.smallest_kv:
        notes[KV_CACHE] = f"and one sequence needs {plan.smallest_kv / GIB:.1f}"
    if (lora := recipe.model.lora) is not None:
        notes |= {"masters": "A and B of LoRA", "reference": f"LoRA's copy of the base weights, base: {lora.base}"}
    for name, size in plan.parts.items():
        if size or name in notes:
            yield f"  {name:<18}{size / GIB:7.1f} GiB  {notes.get(name, '')}".rstrip()
    outcome = "fits" if plan.fits else "does not fit"
    limit = f"{'at most' if plan.total <= plan.limit else 'more than'} {plan.limit / GIB:.1f} GiB"
    yield f"  {'sum':<18}{plan.total / GIB:7.1f} GiB  {outcome}: {limit}, {MAX_SHARE:.0%} of the GPU"


def step_time(recipe: Recipe, config: ModelConfig, plan: MemoryPlan, gpu: Device) -> StepTime:
    """The time of a step as it is planned, on GPUs of this kind."""
    policy, gradients = make_policy(config, recipe.model), plan.parts["gradients"]
    sizes = {"num_gpus": plan.num_gpus, "slots": plan.slots, "gradient_bytes": gradients}
    return StepTime(recipe=recipe, policy=policy, device=gpu, teacher_weights=_teacher_weights(recipe), **sizes)


def _teacher_weights(recipe: Recipe) -> int:
    """Number of weights of the teacher, if there is one."""
    if recipe.algorithm.teacher is None:
        return 0
    config, _ = find_config(recipe.algorithm.teacher.path, "algorithm.teacher.path")
    return count_weights(make_policy(config, recipe.model))


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
    remote = [f"{option} ({path})" for option, path in recipe.model_paths.items() if not is_local(path)]
    remote += ["the rows of task.options"] if needs_network(recipe.task) else []
    unseen = f"; not looked up on the hub: {', '.join(remote)}" if remote else ""
    return f"all names, options and paths are correct{unseen}"


def find_config(path: str, option: str = "model.path") -> tuple[ModelConfig, str]:
    """The shape of a model that an option names, without its weights, and what to say of where it is from.

    The shapes of `srtrl.model.published_shapes` need no network; of another hub model only `config.json` is downloaded.

    Raises:
        ValueError: there is no such model, or it is not supported.
    """
    if is_local(path):
        return read_config(path), ""
    if known := published_shape(path):
        return config_from_hf(known, path), ", by srtrl's record of its shape"
    try:
        file = huggingface_hub.hf_hub_download(path, "config.json")
    except (OSError, ValueError) as error:  # every error of the hub and of the network is one of the two
        raise ValueError(
            f"{option}: {path}: the Hugging Face hub does not give its config.json ({type(error).__name__}), which "
            "says what memory it needs; without network give a local folder, or Qwen2.5 up to 14B, Qwen3-4B or Qwen3-8B"
        ) from error
    return read_config(Path(file).parent), ""


def decoder_bytes(policy: Transformer, *, has_graphs: bool) -> int:
    """Bytes of the decoder's buffers on a GPU, beside the KV cache, and of the graphs that it captures."""
    config, itemsize = policy.config, policy.dtype.itemsize
    rows = (LOGITS_AT_ONCE * config.vocab_size + DECODER_ROWS * config.hidden_size) * itemsize
    return rows + SCRATCH_LANES * (config.head_dim + 1) * 4 + (GRAPH_BYTES if has_graphs else 0)


def _learner_bytes(
    config: ModelConfig, section: ModelSection, num_parts: int = 1, *, is_critic: bool = False
) -> tuple[dict[str, int], int, int]:
    """Bytes by name of what a model that learns keeps, of its gradients, and of its weights at the start of the run.

    With `num_parts` they are those of one rank of as many that shard the model, whose type is then float32. A and B of
    LoRA are whole on each.
    """
    policy = make_policy(config, section)
    model = ValueModel(policy) if is_critic else policy
    optimizer, masters = make_optimizer(model, section)
    base = weights = num_bytes(model.parameters(), num_parts)
    if isinstance(optimizer, LoraAdamW):
        base, num_parts = num_bytes((matrix.base for matrix in optimizer.matrices), num_parts), 1
    kept = {
        "weights": weights,
        "masters": num_bytes(masters, num_parts),
        "moments": sum(num_bytes(state.values(), num_parts) for state in optimizer.state.values()),
    }
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return kept, num_bytes(held, num_parts), base


def _gathered_bytes(model: Transformer, *, learns: bool = True) -> int:
    """Peak of a pass of a sharded model: all outside the layers, two layers, and float32 gradients of one if any."""
    layers = list(model.layers.parameters())
    of_layer = num_bytes(layers) // len(model.layers)
    gradients = 4 * sum(weight.numel() for weight in layers) // len(model.layers) if learns else 0
    return num_bytes(model.parameters()) - num_bytes(layers) + 2 * of_layer + gradients


def _draft_head_bytes(config: ModelConfig, recipe: Recipe) -> int:
    """Peak of a draft head while it learns: weights, optimizer and gradients, and a mini-batch that it learns from."""
    policy = make_policy(replace(config, num_hidden_layers=1), recipe.model)
    tracker = MemoryTracker(policy.parameters())
    with tracker:
        learner = build_draft_head(recipe, policy)
        assert learner is not None, "the recipe has no draft head"
        hidden = policy.embedding.new_empty(MAX_TOKENS, config.hidden_size)
        numbers = torch.empty(MAX_TOKENS, NUM_TARGETS, device="meta")
        texts = Texts(hidden, numbers[:, 0].long(), hidden.clone(), numbers, numbers.long())
        learner.loss(texts, numbers[:: NUM_STEPS * STRIDE, 0].long()).backward()  # type: ignore[no-untyped-call]
    return tracker.peak - num_bytes(policy.parameters())
