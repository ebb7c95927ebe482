"""Memory of a training step on one GPU, computed on no device: `srtrl show-config --check`, docs/performance.md.

Tensors on PyTorch's device `meta` have sizes and no content, so the parts that a run builds, and the update's own code,
say what they would allocate. The peak of a step is in the update, while the decoder keeps what it has.
"""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import huggingface_hub
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from srtrl.build import number_of_slots
from srtrl.build_models import DTYPES, build_draft_head
from srtrl.cuda.flash import choose_flash
from srtrl.cuda.tiles import SCRATCH_LANES
from srtrl.engine.kv_memory import GIB, GRAPH_BYTES, choose_num_pages, kv_bytes
from srtrl.engine.runner import PAGE_SIZE, page_bytes_of
from srtrl.features.attention_drafter import DrafterNeeds, needs_of
from srtrl.features.attention_head import AttentionHead, mtp_config, usual_config
from srtrl.features.critic import ValueModel
from srtrl.features.draft_head_learner import MAX_TOKENS, NUM_STEPS, NUM_TARGETS, STRIDE, Texts
from srtrl.features.lora import LoraAdamW
from srtrl.model.folders import is_local
from srtrl.model.hf_config import config_from_hf
from srtrl.model.logprobs import Softmax, token_logprobs
from srtrl.model.published_shapes import published_shape
from srtrl.model.transformer import Layer, ModelConfig, Style, Transformer
from srtrl.model.weights import read_config
from srtrl.recipe.file import RecipeError, RecipeSource, build_recipe
from srtrl.recipe.schema import ModelSection, Recipe
from srtrl.run.place import is_empty
from srtrl.tasks.base import needs_network
from srtrl.trainer.optimizer import MasterAdamW, build_optimizer

DEFAULT_GPU_GIB = 80.0
"""The GPU to plan for if there is none. One that is sold as 80 GB has about 79 GiB."""
MAX_SHARE = 0.9
"""Share of a GPU's memory. The rest is for the CUDA context, libraries' workspaces and fragmentation."""
DECODER_LOGITS, DECODER_ROWS = 2**10, 2**14
"""Rows of logits and of hidden states in the decoder's buffers."""
NUM_GPUS = (2, 4, 8, 16, 32, 64)
"""With `train.sharding: fsdp2` the plan is for the first of these that fits."""
KV_CACHE = "KV cache"
KV_CHANGE = "rollout.kv_memory_gib={kv_gib}"
CHANGES = (
    KV_CHANGE,
    "model.gradient_checkpointing=half",
    "model.gradient_checkpointing=true",
    "train.micro_batch_tokens={longest}",
    "model.dtype=bfloat16",
    KV_CHANGE,
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
    section, lora = recipe.model, recipe.model.lora
    kept, gradients, base = _learner_bytes(config, section)
    has_reference = recipe.algorithm.kl.coefficient > 0 if lora is None else lora.base == "device"
    parts = {**kept, "reference": base if has_reference else 0, "critic": 0}
    if recipe.algorithm.teacher is not None:
        teacher = find_config(recipe.algorithm.teacher.path, "algorithm.teacher.path")[0]
        parts["teacher"] = _num_bytes(_make_policy(teacher, section).parameters())
    if recipe.critic is not None:
        critic, critic_gradients, _ = _learner_bytes(config, section, is_critic=True)
        parts["critic"] = sum(critic.values())
        gradients = max(gradients, critic_gradients)  # one model after the other learns
    gathered = 0
    if recipe.train.sharding == "fsdp2":  # parts are float32; the decoder and passes use whole weights of their type
        float32 = parts["weights"] * 4 // DTYPES[recipe.model.dtype].itemsize
        parts["masters"], parts["moments"] = float32 // num_gpus, parts["moments"] // num_gpus
        parts["reference"] = float32 // num_gpus if has_reference else 0
        if "teacher" in parts:
            parts["teacher"] = parts["teacher"] * 4 // DTYPES[recipe.model.dtype].itemsize // num_gpus
        parts["critic"] = (float32 + critic["moments"]) // num_gpus if recipe.critic else 0
        gradients //= num_gpus
        gathered = 2 * parts["weights"] // config.num_hidden_layers  # of two layers at a time
    needs = DrafterNeeds()
    if (draft_head := recipe.rollout.draft_head) is not None and draft_head.kind == "recurrent":
        parts["draft head"] = _draft_head_bytes(config, recipe)
    elif draft_head is not None:
        shape = usual_config(config) if draft_head.kind == "eagle3" else mtp_config(config)
        head = AttentionHead(shape, dtype := DTYPES[recipe.model.dtype], "meta")
        needs = needs_of(head)
        state_bytes = DECODER_ROWS * len(shape.reads) * config.hidden_size * dtype.itemsize
        parts["draft head"] = _num_bytes(head.parameters()) + state_bytes
    policy, rollout, free = _make_policy(config, recipe.model), recipe.rollout, max(0, gpu_bytes - sum(parts.values()))
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
    settings = section.model_dump_json(exclude={"lora": {"base"}})
    num_rows, num_samples = recipe.train.micro_batch_tokens, rollout.num_samples
    num_keys = num_rows * num_samples * longest // (longest + (num_samples - 1) * rollout.max_new_tokens)
    parts["activations"] = gathered + _activation_bytes(config, settings, num_rows, num_keys)
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
    several = ", or several with train.sharding=fsdp2" if plan.num_gpus == 1 and recipe.model.lora is None else ""
    too_little = f"; {best} saves {saved / GIB:.1f} GiB, which is not enough" if best else ""
    return f"a GPU of {needed:.0f} GiB{several}{too_little}"


def describe_memory(recipe: Recipe, gpu_gib: float | None) -> Iterator[str]:
    """The lines of `srtrl show-config --check`: table, verdict, and what helps where the step does not fit.

    Args:
        recipe: Only `config.json` of its model is read.
        gpu_gib: Memory of the GPU; None: this machine's, or `DEFAULT_GPU_GIB` where it has none.

    Raises:
        ValueError: see `find_config` and `plan_memory`.
    """
    if recipe.warm_start is not None and recipe.warm_start.architecture is not None:
        yield "memory: not computed for the model that warm_start.architecture makes"
        yield f"verdict: {_checked(recipe)}; `srtrl warm-start` writes {recipe.warm_start.output}"
        return
    if gpu_gib is None and recipe.device == "cpu":
        yield "memory: not computed for device: cpu; --gpu GIB computes it for a GPU"
        yield _verdict(recipe, "trains on the CPU")
        return
    origin = "--gpu"
    if gpu_gib is None and torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        gpu_gib, origin = device.total_memory / GIB, device.name
    elif gpu_gib is None:
        gpu_gib, origin = DEFAULT_GPU_GIB, "there is none here; --gpu GIB for another size"
    config, source = find_config(recipe.model.path)
    for num_gpus in NUM_GPUS if recipe.train.sharding == "fsdp2" else (1,):
        plan = plan_memory(recipe, config, int(gpu_gib * GIB), num_gpus)
        if plan.fits:
            break
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
    rows = (DECODER_LOGITS * config.vocab_size + DECODER_ROWS * config.hidden_size) * itemsize
    return rows + SCRATCH_LANES * (config.head_dim + 1) * 4 + (GRAPH_BYTES if has_graphs else 0)


def _make_policy(config: ModelConfig, section: ModelSection) -> Transformer:
    policy = Transformer(config, DTYPES[section.dtype], "meta")
    policy.gradient_checkpointing = section.gradient_checkpointing
    return policy


def _make_optimizer(model: Transformer | ValueModel, section: ModelSection) -> tuple[MasterAdamW, list[Tensor]]:
    """The optimizer of a model that learns, and the tensors that it moves in the place of the model's own."""
    options: dict[str, Any] = {"learning_rate": 1.0, "weight_decay": 0.0, "betas": (0.9, 0.999)}
    if section.lora is not None and isinstance(model, Transformer):
        optimizer: MasterAdamW = LoraAdamW(model, section.lora, seed=0, lr=options.pop("learning_rate"), **options)
    else:
        optimizer = build_optimizer(model, **options)
    own = {id(parameter) for parameter in model.parameters()}
    held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    return optimizer, [tensor for tensor in held if id(tensor) not in own]


def _learner_bytes(
    config: ModelConfig, section: ModelSection, *, is_critic: bool = False
) -> tuple[dict[str, int], int, int]:
    """Bytes by name of what a model that learns keeps, of its gradients, and of its weights at the start of the run."""
    policy = _make_policy(config, section)
    model = ValueModel(policy) if is_critic else policy
    optimizer, masters = _make_optimizer(model, section)
    weights = _num_bytes(model.parameters())
    kept = {
        "weights": weights,
        "masters": _num_bytes(masters),
        "moments": sum(_num_bytes(state.values()) for state in optimizer.state.values()),
    }
    if isinstance(optimizer, LoraAdamW):
        return kept, optimizer.gradient_bytes, _num_bytes(matrix.base for matrix in optimizer.matrices)
    return kept, optimizer.gradient_bytes, weights


def _draft_head_bytes(config: ModelConfig, recipe: Recipe) -> int:
    """Peak of a draft head while it learns: weights, optimizer and gradients, and a mini-batch that it learns from."""
    policy = _make_policy(replace(config, num_hidden_layers=1), recipe.model)
    tracker = _MemoryTracker(policy.parameters())
    with tracker:
        learner = build_draft_head(recipe, policy)
        assert learner is not None, "the recipe has no draft head"
        hidden = policy.embedding.new_empty(MAX_TOKENS, config.hidden_size)
        numbers = torch.empty(MAX_TOKENS, NUM_TARGETS, device="meta")
        texts = Texts(hidden, numbers[:, 0].long(), hidden.clone(), numbers, numbers.long())
        learner.loss(texts, numbers[:: NUM_STEPS * STRIDE, 0].long()).backward()  # type: ignore[no-untyped-call]
    return tracker.peak - _num_bytes(policy.parameters())


@cache  # for other GPUs; sections hold lists, so that their JSON stands for them
def _activation_bytes(config: ModelConfig, section: str, num_rows: int, num_keys: int) -> int:
    """Peak of an update, beside weights, masters and gradients; pairs of layers are alike, so that two sizes say it."""
    settings, num_layers = ModelSection.model_validate_json(section), config.num_hidden_layers
    few = 2 + num_layers % 2
    sizes = (replace(config, num_hidden_layers=number) for number in (few, few + 2))
    low, high = (_peak_bytes(size, settings, num_rows, num_keys) for size in sizes)
    return low + (num_layers - few) // 2 * (high - low)


def _peak_bytes(config: ModelConfig, section: ModelSection, num_rows: int, num_keys: int) -> int:
    """Peak of an update's second micro-batch, run on no device."""
    policy = _make_policy(config, section)
    for layer in policy.layers:
        cast(Layer, layer).gated = _gated
    optimizer, masters = _make_optimizer(policy, section)
    tracker = _MemoryTracker([*policy.parameters(), *masters])
    with tracker:
        for _ in range(2):  # gradients of the first one are there while the second one is computed
            tokens = torch.zeros(num_rows, dtype=torch.int64, device="meta")
            hidden = policy(tokens, _Plan(num_rows, num_keys))[tokens]
            options: dict[str, Any] = {"temperature": 1.0, "softmax": _Softmax()}
            logprobs, entropy = token_logprobs(hidden, policy.head_weight, tokens, **options)
            (logprobs + entropy).sum().backward()  # type: ignore[no-untyped-call]
            del hidden, logprobs, entropy
    return tracker.peak - _num_bytes([*policy.parameters(), *masters]) - optimizer.gradient_bytes


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class _MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that live; `peak` is the largest number of them."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Start with tensors that exist already."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._living: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self.peak = 0
        self._add(known)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._add(
            tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor) and tensor.device.type == "meta"
        )
        return result

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._living[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._living.values()))


class _Attention(torch.autograd.Function):
    """Allocates what FlashAttention does: it keeps its inputs, its output and one float32 for each row and head.

    Backward it has the queries' gradient in float32, and those of keys and values for each query head.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *_ = ctx.saved_tensors
        temporary = [
            torch.empty_like(q, dtype=torch.float32),
            *(q.new_empty(len(tensor), *q.shape[1:]) for tensor in (k, v)),
        ]
        found = tuple(torch.empty_like(tensor) for tensor in (q, k, v))
        del temporary
        return found


class _Gated(torch.autograd.Function):
    """Allocates what the kernels of the gated activation do (srtrl/cuda/update.py): they keep the fused projection."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


def _gated(gate_up: Tensor, style: Style) -> Tensor:
    return _Gated.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]


class _Softmax(Softmax):
    """Allocates what the kernels of the log-probs do: logits in the type of the weights, their gradient over them."""

    def forward(self, hidden: Tensor, head_weight: Tensor, *_: Any, has_entropy: bool) -> tuple[Tensor, Tensor | None]:
        logits = functional.linear(hidden, head_weight)
        logprobs = logits.new_empty(len(logits), dtype=torch.float32)
        return logprobs, torch.empty_like(logprobs) if has_entropy else None

    def gradient(self, hidden: Tensor, head_weight: Tensor, *_: Any) -> Tensor:
        return functional.linear(hidden, head_weight)


class _Plan:
    """The plan of a micro-batch in an update, without attention's arithmetic."""

    def __init__(self, num_rows: int, num_keys: int) -> None:
        self.positions = torch.zeros(num_rows, dtype=torch.int64, device="meta")
        self.num_positions = num_rows
        self.path = torch.zeros(num_keys, dtype=torch.int64, device="meta")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        k, v = k.index_select(0, self.path), v.index_select(0, self.path)
        return _Attention.apply(q, k, v)  # type: ignore[no-any-return, no-untyped-call]
