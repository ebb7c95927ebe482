"""The optimizers: float32 masters of a bfloat16 model against a plain loop; LoRA, whose steps and files are PEFT's.

`test_promises.py` resumes killed runs in bfloat16 and with LoRA.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_cases
import pytest
import tiny_run
import torch
from model_cases import CASES, ModelCase, load_ours, make_hf_model
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from update_cases import make_policy, make_recipe, make_sequences

from srtrl.build import build_parts
from srtrl.features.adapters import load_policy
from srtrl.features.lora import LoraAdamW
from srtrl.model.logprobs import token_logprobs
from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model, named_tensors
from srtrl.recipe.schema import LoraSection
from srtrl.rollout.packing import PackedBatch, pack, sharing_order
from srtrl.trainer.learner import Learner
from srtrl.trainer.optimizer import MasterAdamW, build_optimizer
from srtrl.trainer.passes import UpdateContext
from srtrl.types import TrainSequence

RATE = 1e-3
BUDGET = 24


def optimizer_of(model: nn.Module) -> MasterAdamW:
    return build_optimizer(model, learning_rate=RATE, weight_decay=0.1, betas=(0.9, 0.99))


def micro_batch_loss(policy: Transformer, packed: PackedBatch) -> Tensor:
    """Any loss will do."""
    hidden = policy(packed.token_ids, packed.plan)[packed.hidden_index]
    logprobs, _ = token_logprobs(hidden, policy.head_weight, packed.target_ids, temperature=0.8)
    return -(logprobs * packed.advantages).sum() / 30


class AnyLearner(Learner):
    """Learner with the loss `micro_batch_loss`."""

    model: Transformer

    def loss(self, packed: PackedBatch, sequence_lengths: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """With a metric of ones."""
        return micro_batch_loss(self.model, packed), {"one": torch.ones(len(packed.target_ids))}


def descend_by_hand(policy: Transformer, sequences: Sequence[TrainSequence], max_norm: float) -> float:
    """Four epochs of one mini-batch with plain tensors; returns the mean norm. All but a pass's results is float32.

    Weight decay is for matrices alone.
    """
    names, parameters = zip(*policy.named_parameters(), strict=True)
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    groups = [
        {"params": [master], "weight_decay": 0.1 * (master.ndim >= 2 and "embed" not in name)}
        for name, master in zip(names, masters, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), eps=1e-8, fused=True)
    norms = 0.0
    for number in range(4):
        for master in masters:
            master.grad = torch.zeros_like(master)
        for packed in pack(sequences, BUDGET, "cpu"):
            slopes = torch.autograd.grad(micro_batch_loss(policy, packed), parameters)
            for master, slope in zip(masters, slopes, strict=True):
                assert slope.dtype == policy.dtype
                assert master.grad is not None
                master.grad += slope.float()
        norms += float(torch.nn.utils.clip_grad_norm_(masters, max_norm))
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - number / 4)
        optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.data.copy_(master.data)
    return norms / 4


@pytest.mark.parametrize(
    ("dtype", "tied", "max_norm"),
    [(torch.bfloat16, False, 1e9), (torch.bfloat16, True, 0.05), (torch.float32, False, 0.05)],
    ids=str,
)
def test_weights_are_those_of_float32_masters_to_the_bit(dtype: torch.dtype, tied: bool, max_norm: float) -> None:
    """A float32 model is trained by plain AdamW; nothing but the time at which its state is made differs."""
    sequences = [replace(sequence, draw_index=0) for sequence in make_sequences(make_policy())]
    sequences = [sequences[index] for index in sharing_order(sequences)]
    assert len(list(pack(sequences, BUDGET, "cpu"))) > 2
    ours, by_hand, before = (make_policy(dtype=dtype, tied=tied, scale=8) for _ in range(3))
    optimizer = optimizer_of(ours)
    assert bool(optimizer.master_of) == (dtype != torch.float32), "a float32 parameter is its own master"
    recipe = make_recipe(
        train__num_steps=1,
        train__num_epochs=4,
        train__micro_batch_tokens=BUDGET,
        train__schedule="linear",
        train__max_grad_norm=max_norm,
    )
    learner = AnyLearner(ours, optimizer, recipe.policy_updates)
    metrics = learner.learn(sequences, UpdateContext(recipe=recipe, step=1))
    assert metrics["grad_norm"] == descend_by_hand(by_hand, sequences, max_norm)
    assert all(map(torch.equal, ours.parameters(), by_hand.parameters()))
    assert not all(map(torch.equal, ours.parameters(), before.parameters()))


def test_the_models_tensors_stay_where_they_are_and_hold_no_gradient() -> None:
    """The decoder reads these very tensors; and a step allocates nothing that could run out with half of it done."""
    policy = make_policy(dtype=torch.bfloat16, scale=8)
    optimizer = optimizer_of(policy)
    parameters = list(policy.parameters())

    def addresses() -> list[int]:
        state = [tensor for one in optimizer.state.values() for _, tensor in sorted(one.items())]
        return [tensor.data_ptr() for tensor in (*parameters, *optimizer.master_of.values(), *state)]

    before = addresses()
    assert len(before) == 5 * len(parameters), "steps and both moments are there"
    loss = micro_batch_loss(policy, next(pack(make_sequences(make_policy()), BUDGET, "cpu")))
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None for parameter in parameters)
    gradients = [one.grad for one in optimizer.holders(policy) if one.grad is not None]
    assert [(one.shape, one.dtype) for one in gradients] == [(one.shape, torch.float32) for one in parameters]
    assert optimizer.gradient_bytes == sum(one.nbytes for one in gradients)
    optimizer.step()
    assert all(one.grad is None for one in (*parameters, *optimizer.master_of.values())), "they are used up"
    assert addresses() == before
    assert all(torch.equal(parameter, optimizer.master_of[parameter].bfloat16()) for parameter in parameters)


def test_optimizer_and_masters_are_freed_before_the_model() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    first = optimizer_of(model)
    (master,) = first.holders(model)
    left: list[weakref.ref[Any]] = [weakref.ref(first), weakref.ref(master)]
    second = optimizer_of(model)
    (model.weight * 2).sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(AssertionError, match="another optimizer took them"):
        second.step()
    del first, master
    gc.collect()
    assert [one() for one in left] == [None, None]
    (master,) = second.holders(model)
    before = master.item()
    (model.weight * 2).sum().backward()  # type: ignore[no-untyped-call]
    second.step()
    assert master.item() != before


# --- LoRA ------------------------------------------------------------------------------------------------------------

MAX_NORM, TEMPERATURE = 0.05, 0.8
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
LORA: dict[str, Any] = {"model__lora": {"rank": 4, "alpha": 12}, "train__learning_rate": 0.02}


def make_optimizer(model: Transformer) -> LoraAdamW:
    return LoraAdamW(model, LoraSection(rank=3, alpha=20), seed=0, lr=RATE, weight_decay=0.1, betas=(0.9, 0.99))


def peft_model(base: nn.Module, optimizer: LoraAdamW) -> tuple[Any, list[nn.Parameter]]:
    """PEFT's model with the same A and B, and these in our order."""
    targets = sorted({one.name.rpartition(".")[2] for one in optimizer.matrices})
    section = optimizer.section
    config = LoraConfig(r=section.rank, lora_alpha=section.alpha, target_modules=targets)  # type: ignore[arg-type]
    model: Any = get_peft_model(base, config)
    learned = {name: one for name, one in model.named_parameters() if one.requires_grad}
    parameters = []
    for one in optimizer.matrices:
        for kind, tensor in (("A", one.lora_a), ("B", one.lora_b)):
            parameters.append(learned.pop(f"base_model.model.{one.name}.lora_{kind}.default.weight"))
            parameters[-1].data.copy_(tensor.detach())
    assert not learned, "PEFT adapts the same matrices"
    return model, parameters


def peft_steps(model: Any, parameters: Sequence[nn.Parameter], sequences: Sequence[TrainSequence]) -> list[float]:
    """Two steps of torch's AdamW, each sequence alone, end to end; returns the norms."""
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.99), weight_decay=0.1)
    norms = []
    for _ in range(2):
        optimizer.zero_grad()
        for sequence in sequences:
            token_ids, targets = torch.from_numpy(sequence.token_ids), torch.from_numpy(sequence.targets)
            logits = model(token_ids[None]).logits[0, targets - 1]
            logprobs = torch.log_softmax(logits / TEMPERATURE, dim=-1).gather(1, token_ids[targets, None])[:, 0]
            (-(logprobs * torch.from_numpy(sequence.advantages)).sum() / 30).backward()  # type: ignore[no-untyped-call]
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)))
        optimizer.step()
    return norms


@pytest.mark.parametrize("case", [CASES[2], CASES[7], CASES[13]], ids=lambda case: case.name)
def test_gradients_and_steps_are_pefts(case: ModelCase, tmp_path: Path) -> None:
    """Packed, in several micro-batches, with clipping and weight decay; float64."""
    hf_model = make_hf_model(case, torch.float64)
    ours = load_ours(hf_model, tmp_path, torch.float64)
    optimizer = make_optimizer(ours)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in optimizer.matrices:  # without values in B, A has no gradient
            one.lora_b.normal_(0, 0.05, generator=generator)
    optimizer.write_weights()
    theirs, parameters = peft_model(hf_model, optimizer)
    sequences = make_sequences(make_policy())
    expected = peft_steps(theirs, parameters, sequences)
    recipe = make_recipe(
        train__num_epochs=2, train__micro_batch_tokens=24, train__learning_rate=RATE, train__max_grad_norm=MAX_NORM
    )
    one_draw = [replace(sequence, draw_index=0) for sequence in sequences]
    learner = AnyLearner(ours, optimizer, recipe.policy_updates)
    metrics = learner.learn(one_draw, UpdateContext(recipe=recipe, step=1))
    assert learner.num_rows < 2 * sum(len(sequence.token_ids) for sequence in sequences), "some tokens are shared"
    assert metrics["grad_norm"] == pytest.approx(sum(expected) / 2, rel=1e-12)
    assert min(expected) > MAX_NORM
    for mine, other in zip(optimizer.holders(ours), parameters, strict=True):
        assert mine.dtype == other.dtype == torch.float64
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=0, atol=1e-10)
    merged = named_tensors(ours)
    for name, tensor in theirs.merge_and_unload().state_dict().items():
        if name in merged:
            torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-10)


def test_merged_weights_are_those_of_a_and_b_to_the_bit_after_a_thousand_steps() -> None:
    """Adding and subtracting the update would drift; all else stays, and the reference is what was loaded."""
    policy, loaded = (make_policy(dtype=torch.bfloat16, scale=8) for _ in range(2))
    optimizer = make_optimizer(policy)
    addresses = [tensor.data_ptr() for tensor in policy.parameters()]
    assert all(map(torch.equal, policy.parameters(), loaded.parameters())), "B is 0"
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        for holder in optimizer.holders(policy):
            holder.grad = torch.randn(holder.shape, generator=generator)
        optimizer.step()
    mine, num_changed = named_tensors(policy), 0
    updates = {f"{m.name}.weight": (m.lora_b @ m.lora_a).detach() * (20 / 3) for m in optimizer.matrices}
    for name, tensor in named_tensors(loaded).items():
        update = updates.get(name, torch.zeros(()))
        assert torch.equal(mine[name], (tensor.float() + update).bfloat16()), name
        num_changed += int((mine[name] != tensor).sum())
    norm = float(torch.cat([update.flatten() for update in updates.values()]).norm())
    num_weights = sum(update.numel() for update in updates.values())
    expected = {"lora/norm": norm, "lora/changed_share": num_changed / num_weights}
    assert optimizer.metrics() == pytest.approx(expected, rel=1e-5)
    assert norm > 1
    merged = [tensor.clone() for tensor in policy.parameters()]
    with optimizer.base_weights():
        assert all(map(torch.equal, policy.parameters(), loaded.parameters()))
    assert all(map(torch.equal, policy.parameters(), merged))
    assert [tensor.data_ptr() for tensor in policy.parameters()] == addresses, "the decoder reads these"


def test_a_run_is_exported_and_started_from_its_adapter(
    policy: Path, finished: Callable[..., Path], tmp_path: Path
) -> None:
    """It is PEFT's, too: merged into the base model, it gives the checkpoint's weights and logits."""
    changes = {**LORA, "model__dtype": "bfloat16", "train__num_steps": 2, "train__checkpoint_every": 1}
    run = finished(**changes)
    rows = tiny_run.learned_rows(run)[1:]
    assert all(row["logprob_difference/max"] < 0.3 for row in rows)
    assert rows[-1]["kl/ref"] > 1e-4
    assert rows[-1]["lora/norm"] > rows[0]["lora/norm"] > 0
    assert 0.1 < rows[0]["lora/changed_share"] <= rows[-1]["lora/changed_share"] <= 1
    checkpoint = run / "checkpoints" / "step_000002"
    base = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16).float()  # type: ignore[no-untyped-call]
    adapted = PeftModel.from_pretrained(base, checkpoint / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    token_ids = torch.arange(40)[None]
    torch.testing.assert_close(adapted(token_ids).logits, whole(token_ids).logits, rtol=0, atol=0.2)
    merged = adapted.merge_and_unload().state_dict()
    assert all(torch.equal(merged[name].bfloat16(), tensor.bfloat16()) for name, tensor in whole.state_dict().items())
    exported = bench_cases.run("export", run, tmp_path / "exported", "--adapter")
    assert exported.exit_code == 0, exported.output
    files = {path.name for path in (tmp_path / "exported").iterdir()}
    assert files == {*ADAPTER_FILES, "README.md", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    again = tiny_run.make_recipe(tmp_path / "exported", tmp_path / "again", **changes)
    policy_again = build_parts(again).policy.model
    saved = load_model(checkpoint, dtype=policy_again.dtype, device="cpu")
    assert all(map(torch.equal, policy_again.parameters(), saved.parameters()))
    loaded = load_policy(tmp_path / "exported", dtype=policy_again.dtype, device="cpu")
    assert all(map(torch.equal, loaded.parameters(), saved.parameters()))
    shapes = r"model\.layers\.0\.self_attn\.q_proj\.lora_A is \[2, 32\] here and \[4, 32\] there"
    with pytest.raises(ValueError, match=rf"model.lora: rank 2, .* has rank 4, alpha 12 and 28; {shapes}"):
        build_parts(again.model_copy(update={"model": again.model.model_copy(update={"lora": LoraSection(rank=2)})}))
