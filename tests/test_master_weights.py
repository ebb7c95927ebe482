"""Training of a bfloat16 model: float32 masters, moments and gradient sums, against a plain loop; resume to the bit."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from accelerate import Accelerator
from critic_cases import make_critic_recipe, make_value_model, with_random_targets
from safetensors import safe_open
from torch import Tensor, nn
from update_cases import fresh_accelerator, make_policy, make_recipe, make_sequences, update

from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.metrics import read_metrics
from srtrl.model.attention import PackedPlan
from srtrl.model.logprobs import token_logprobs
from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model, load_tokenizer
from srtrl.rollout.packing import PackedBatch, pack
from srtrl.trainer.checkpoint import TrainerState, load_training_state, save_checkpoint
from srtrl.trainer.critic import Critic, update_critic
from srtrl.trainer.optimizer import MasterWeightAdamW, build_optimizer, gradient_holders
from srtrl.trainer.out_of_memory import gradient_bytes
from srtrl.trainer.run_folder import RunProgress
from srtrl.trainer.trainer import run_training
from srtrl.trainer.update import MiniBatch, run_optimizer_steps
from srtrl.types import TrainSequence

ADAMW: dict[str, Any] = {"weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
RATE = 1e-3
BUDGET = 24


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with fresh_accelerator() as accelerator:
        yield accelerator


def half_policy(seed: int = 0, tied: bool = False) -> Transformer:
    return make_policy(seed, dtype=torch.bfloat16, tied=tied, scale=8)


def optimizer_of(model: nn.Module) -> MasterWeightAdamW:
    optimizer = build_optimizer(model, learning_rate=RATE, **ADAMW)
    assert isinstance(optimizer, MasterWeightAdamW)
    return optimizer


def micro_batch_loss(policy: Transformer, packed: PackedBatch) -> Tensor:
    """Any loss will do."""
    plan = PackedPlan.from_lengths(packed.lengths, "cpu")
    hidden = policy(packed.token_ids, plan)[packed.hidden_index]
    logprobs, _ = token_logprobs(hidden, policy.head_weight, packed.target_ids, temperature=0.8)
    return -(logprobs * packed.advantages).sum() / 30


def descend_by_ours(
    policy: Transformer,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    sequences: Sequence[TrainSequence],
    num_steps: int,
    max_norm: float,
) -> dict[str, float]:
    def loss_of(packed: PackedBatch, _: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return micro_batch_loss(policy, packed), {"one": torch.ones(len(packed.target_ids))}

    return run_optimizer_steps(
        policy,
        optimizer,
        accelerator,
        (MiniBatch(epoch=0, number=number, sequences=list(sequences)) for number in range(num_steps)),
        loss_of,
        micro_batch_tokens=BUDGET,
        max_grad_norm=max_norm,
        learning_rate=lambda number: RATE / (1 + number),
        loss_option="test",
        where="test",
    )


def descend_by_hand(policy: Transformer, sequences: Sequence[TrainSequence], num_steps: int, max_norm: float) -> float:
    """The same with plain tensors; returns the mean norm. What a bfloat16 pass gives is all that is bfloat16."""
    parameters = dict(policy.named_parameters())
    masters = {name: nn.Parameter(parameter.detach().float()) for name, parameter in parameters.items()}
    matrices = [m for name, m in masters.items() if m.ndim >= 2 and "embed" not in name]
    others = [m for name, m in masters.items() if m.ndim < 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), eps=1e-8, fused=True)
    norms = 0.0
    for number in range(num_steps):
        sums = {name: torch.zeros_like(master) for name, master in masters.items()}
        for packed in pack(sequences, BUDGET, "cpu"):
            slopes = torch.autograd.grad(micro_batch_loss(policy, packed), list(parameters.values()))
            for name, slope in zip(sums, slopes, strict=True):
                assert slope.dtype == torch.bfloat16
                sums[name] += slope.float()
        for name, master in masters.items():
            master.grad = sums[name]
        norms += float(torch.nn.utils.clip_grad_norm_(masters.values(), max_norm))
        for group in optimizer.param_groups:
            group["lr"] = RATE / (1 + number)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
    return norms / num_steps


@pytest.mark.parametrize("max_norm", [1e9, 0.05])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_those_of_float32_masters_to_the_bit(tied: bool, max_norm: float, accelerator: Accelerator) -> None:
    sequences = make_sequences(make_policy())
    assert len(list(pack(sequences, BUDGET, "cpu"))) > 2
    ours, by_hand = half_policy(tied=tied), half_policy(tied=tied)
    metrics = descend_by_ours(ours, optimizer_of(ours), accelerator, sequences, 4, max_norm)
    assert metrics["grad_norm"] == descend_by_hand(by_hand, sequences, 4, max_norm)
    changed = False
    for mine, other, first in zip(
        ours.parameters(), by_hand.parameters(), half_policy(tied=tied).parameters(), strict=True
    ):
        assert torch.equal(mine, other)
        changed |= not torch.equal(mine, first)
    assert changed


def test_small_updates_add_up() -> None:
    """A hundred steps of 1e-5 move a weight of 1 by 1e-3 in the master; in bfloat16 alone they would vanish."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    options: dict[str, Any] = {"learning_rate": 1e-4, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = build_optimizer(model, **options)
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        optimizer.zero_grad()
    (master,) = gradient_holders(model, optimizer)
    assert float(master.detach()) == pytest.approx(1 - 100 * 1e-4, abs=1e-5)
    assert float(model.weight.detach()) == float(torch.tensor(0.99).bfloat16())


def test_the_models_tensors_stay_where_they_are_and_hold_no_gradient(accelerator: Accelerator) -> None:
    """The decoder reads these very tensors."""
    policy = half_policy()
    optimizer = optimizer_of(policy)
    addresses = [parameter.data_ptr() for parameter in policy.parameters()]
    for packed in pack(make_sequences(make_policy()), BUDGET, "cpu"):
        accelerator.backward(micro_batch_loss(policy, packed))
        assert all(parameter.grad is None for parameter in policy.parameters())
    holders = gradient_holders(policy, optimizer)
    assert [one.shape for one in holders] == [parameter.shape for parameter in policy.parameters()]
    assert all(one.grad is not None and one.grad.dtype == torch.float32 for one in holders)
    assert gradient_bytes(optimizer) == 4 * sum(parameter.numel() for parameter in policy.parameters())
    optimizer.step()
    optimizer.zero_grad()
    assert all(one.grad is None for one in holders)
    assert [parameter.data_ptr() for parameter in policy.parameters()] == addresses
    for parameter, master in zip(policy.parameters(), holders, strict=True):
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, master.bfloat16())


def test_the_gradient_sum_of_micro_batches_is_float32(accelerator: Accelerator) -> None:
    """A bfloat16 sum loses what is below 1/256 of it."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = build_optimizer(model, learning_rate=RATE, **ADAMW)
    for size in (256.0, *[0.5] * 8):
        accelerator.backward((model.weight * size).sum())
    (master,) = gradient_holders(model, optimizer)
    assert master.grad is not None
    assert float(master.grad) == 260.0


def backward(model: nn.Linear) -> None:
    (model.weight * 2).sum().backward()  # type: ignore[no-untyped-call]


def test_optimizer_and_masters_are_freed_before_the_model() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = optimizer_of(model)
    backward(model)
    assert model.weight.grad is None
    (master,) = gradient_holders(model, optimizer)
    left: list[weakref.ref[Any]] = [weakref.ref(optimizer), weakref.ref(master)]
    del optimizer, master
    gc.collect()
    assert [one() for one in left] == [None, None]
    assert not model.weight._post_accumulate_grad_hooks
    backward(model)
    assert model.weight.grad is not None, "nobody takes it any more"


def test_model_and_optimizer_are_freed_together() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = optimizer_of(model)
    (master,) = gradient_holders(model, optimizer)
    left: list[weakref.ref[Any]] = [weakref.ref(optimizer), weakref.ref(master), weakref.ref(model.weight)]
    del model, optimizer, master
    gc.collect()
    assert [one() for one in left] == [None] * 3


def test_a_second_optimizer_is_refused_while_the_first_lives() -> None:
    """Its hooks would come after the first one's, which leave no gradient."""
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    first = optimizer_of(model)
    with pytest.raises(ValueError, match="another optimizer with master weights takes the gradients"):
        optimizer_of(model)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert all(one.grad is not None for one in gradient_holders(model, first)), "the first one goes on"
    del first
    gc.collect()
    second = optimizer_of(model)
    before = [parameter.detach().clone() for parameter in second.masters]
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    second.step()
    assert not any(map(torch.equal, second.masters, before))


def test_a_critics_wide_head_is_its_own_master(accelerator: Accelerator) -> None:
    model = make_value_model(dtype=torch.bfloat16)
    optimizer = optimizer_of(model)
    holders = gradient_holders(model, optimizer)
    assert [one is parameter for one, parameter in zip(holders, model.parameters(), strict=True)] == [
        parameter is model.value_head for parameter in model.parameters()
    ]
    before = model.value_head.detach().clone()
    recipe = make_critic_recipe()
    sequences = with_random_targets(make_sequences(make_policy()))
    update_critic(Critic(model=model, optimizer=optimizer), accelerator, sequences, recipe=recipe, step=1)
    assert not torch.equal(model.value_head, before)
    body = [(p, m) for p, m in zip(model.parameters(), holders, strict=True) if p is not model.value_head]
    assert all(torch.equal(parameter, master.bfloat16()) for parameter, master in body)


def test_a_float32_model_is_trained_by_plain_adamw_with_the_same_bits(accelerator: Accelerator) -> None:
    """Its state is allocated at once; nothing else differs from an optimizer that makes it in the first step."""
    sequences = make_sequences(make_policy())
    policies = [make_policy(dtype=torch.float32, scale=8) for _ in range(2)]
    ours = build_optimizer(policies[0], learning_rate=RATE, **ADAMW)
    assert type(ours) is torch.optim.AdamW
    named = list(policies[1].named_parameters())
    groups = [
        {"params": [p for n, p in named if p.ndim >= 2 and "embed" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if p.ndim < 2 or "embed" in n], "weight_decay": 0.0},
    ]
    lazy = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), eps=1e-8, fused=True)
    for policy, optimizer in zip(policies, (ours, lazy), strict=True):
        descend_by_ours(policy, optimizer, accelerator, sequences, 3, 0.05)
    assert all(map(torch.equal, policies[0].parameters(), policies[1].parameters()))
    torch.testing.assert_close(ours.state_dict(), lazy.state_dict(), rtol=0, atol=0)


# --- Checkpoints ------------------------------------------------------------------------------------------------------


class _Run:
    """A bfloat16 policy and critic with their optimizers."""

    def __init__(self, policy: Transformer) -> None:
        self.policy = policy
        self.optimizer = optimizer_of(policy)
        value_model = make_value_model(dtype=torch.bfloat16)
        self.critic = Critic(model=value_model, optimizer=optimizer_of(value_model))

    def step(self, number: int, accelerator: Accelerator) -> None:
        sequences = with_random_targets(make_sequences(make_policy(), noise=0.1, seed=number))
        update(self.policy, self.optimizer, accelerator, sequences, make_recipe(train__num_steps=9), step=number)
        recipe = make_critic_recipe(train__num_steps=9)
        update_critic(self.critic, accelerator, sequences, recipe=recipe, step=number)

    def save(self, folder: Path, tokenizer: Path) -> Path:
        return save_checkpoint(
            folder,
            TrainerState(step=2, policy_version=2, num_draws=6, kl_coefficient=0.0),
            model=self.policy,
            optimizer=self.optimizer,
            tokenizer=load_tokenizer(str(tokenizer)),
            end_ids=[0],
            drafter=NoDrafter(),
            keep=1,
            critic=self.critic,
        )

    def tensors(self) -> list[Tensor]:
        models: tuple[nn.Module, ...] = (self.policy, self.critic.model)
        masters = [
            *gradient_holders(self.policy, self.optimizer),
            *gradient_holders(self.critic.model, self.critic.optimizer),
        ]
        return [*(parameter for model in models for parameter in model.parameters()), *masters]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.make_policy(tmp_path_factory.mktemp("model") / "policy")


def test_policy_and_critic_go_on_from_a_checkpoint_with_the_same_bits(
    tiny: Path, tmp_path: Path, accelerator: Accelerator
) -> None:
    run = _Run(half_policy())
    for number in (1, 2):
        run.step(number, accelerator)
    folder = run.save(tmp_path, tiny)
    resumed = _Run(load_model(folder, dtype=torch.bfloat16, device="cpu"))
    load_training_state(folder, resumed.optimizer, resumed.critic)
    assert all(map(torch.equal, run.tensors(), resumed.tensors()))
    assert any(
        not torch.equal(master, master.bfloat16().float()) for master in gradient_holders(run.policy, run.optimizer)
    ), "the masters hold no more than the weights: the checkpoint's own files would do"
    for number in (3, 4):
        run.step(number, accelerator)
        resumed.step(number, accelerator)
    assert all(map(torch.equal, run.tensors(), resumed.tensors()))
    torch.testing.assert_close(run.optimizer.state_dict(), resumed.optimizer.state_dict(), rtol=0, atol=0)


def test_a_checkpoints_weights_are_bfloat16(tiny: Path, tmp_path: Path, accelerator: Accelerator) -> None:
    run = _Run(half_policy())
    run.step(1, accelerator)
    folder = run.save(tmp_path, tiny)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_a_state_without_masters_is_refused_with_its_file(tiny: Path, tmp_path: Path, accelerator: Accelerator) -> None:
    run = _Run(half_policy())
    folder = run.save(tmp_path, tiny)
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    masters = state.pop("masters")
    torch.save(state, folder / "optimizer.pt")
    message = r"optimizer\.pt: .* holds no float32 master weights: .* written before srtrl.*name=OTHER model\.path="
    with pytest.raises(ValueError, match=message):
        load_training_state(folder, run.optimizer)
    torch.save({**state, "masters": masters[:-1]}, folder / "optimizer.pt")
    with pytest.raises(ValueError, match=r"optimizer\.pt: the master weights have shapes"):
        load_training_state(folder, run.optimizer)


def test_a_bfloat16_run_that_is_resumed_learns_what_one_that_is_not_learns(tiny: Path, tmp_path: Path) -> None:
    def train(name: str, num_steps: int, resume: bool) -> None:
        changes = {"model__dtype": "bfloat16", "train__learning_rate": 1e-4, "eval__every_steps": None}
        recipe = tiny_run.make_recipe(
            tiny, tmp_path, name=name, train__num_steps=num_steps, eval__before_and_after=False, **changes
        )
        run_training(recipe, resume=resume, progress=RunProgress("test", num_steps, plain_every=1000))

    train("whole", 2, resume=False)
    train("resumed", 1, resume=False)
    train("resumed", 2, resume=True)
    whole, resumed = (
        [
            {name: value for name, value in row.items() if not name.startswith(("time/", "engine/"))}
            for row in read_metrics(tmp_path / name / "metrics.jsonl")
        ]
        for name in ("whole", "resumed")
    )
    assert whole == resumed
    assert whole[-1]["grad_norm"] > 0
    for file in ("model.safetensors", "optimizer.pt"):
        contents = [
            (tmp_path / name / "checkpoints" / "step_000002" / file).read_bytes() for name in ("whole", "resumed")
        ]
        assert contents[0] == contents[1], file
