"""The CUDA path, unchanged, on a fake device: the CPU's tokens and metrics, and nothing that a device forbids.

The kernels run under Triton's interpreter, as whole steps, captured and replayed. The slow ones are part of
`make check-gpu-static`. That the device sees what it is for is in `mutations.yaml`.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fake_cuda import FakeCuda, fake_cuda
from rank_cases import FORKED
from rank_runs import Around, train_on_ranks
from runner_cases import runner_policy
from tiny_run import SMALL, learned_rows, make_policy, make_recipe, train
from torch import Tensor
from torch.nn import functional

from srtrl.features.lora import LoraAdamW
from srtrl.model.attention import PackedPlan
from srtrl.recipe.schema import LoraSection, Recipe

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")

BF16 = {"model__dtype": "bfloat16", "train__max_logprob_difference": 1.0}
TRAINING: dict[str, dict[str, Any]] = {
    "grpo": {"rollout__drafter": "srt"},
    "ppo": {"critic": {"learning_rate": 0.01}, "algorithm__advantage": "gae"},
    "lora": {"model__lora": {"rank": 4}},
    "lora, base on the host": {"model__lora": {"rank": 4, "base": "host"}},
    "draft head": {
        "rollout__draft_head": {"k": 2, "vocabulary": 64},
        "rollout__draft_budget": 4,
        "train__micro_batch_tokens": 24,
    },
    "bfloat16": BF16,
    "bfloat16, checkpointing": BF16 | {"model__gradient_checkpointing": True},
}


def small_recipe(policy: Path, folder: Path, device: str, **changes: Any) -> Recipe:
    """Recipe of a run of one step by default."""
    values: dict[str, Any] = {
        "device": device,
        "rollout__drafter": "none",
        "train__num_steps": 1,
        "train__checkpoint_every": 1,
        "train__mini_batch_prompts": 1,
        "task__options": {"num_train": 4, "num_eval": 2, "min_operations": 1, "max_operations": 1},
    }
    return make_recipe(policy, folder, **(SMALL | values | changes))


def train_small(policy: Path, folder: Path, device: str, *, resume: bool = False, **changes: Any) -> Any:
    """The metrics of such a run."""
    train(small_recipe(policy, folder, device, **changes), resume=resume)
    return learned_rows(folder / "run", beside=("memory/",))


def assert_close(found: Any, expected: Any, rtol: float) -> None:
    """The metrics of two runs."""
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=rtol, abs=rtol / 10)


def test_gradients_of_lora_are_products_of_half_types_with_float32_sums(device: FakeCuda) -> None:
    """But for the rounding of A and B they are the CPU's, which multiplies in float32."""
    found: list[list[Tensor]] = []
    for place in ("cpu", "cuda"):
        model = runner_policy().to(place, torch.bfloat16)
        optimizer = LoraAdamW(model, LoraSection(rank=3), seed=0, lr=0.1)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for one in optimizer.matrices:
                one.lora_b.copy_(torch.randn(one.lora_b.shape, generator=generator))
        for _ in range(2):
            for parameter in filter(lambda one: one.requires_grad, model.parameters()):
                slope = torch.randn(parameter.shape, generator=generator).bfloat16().to(place)
                (parameter * slope).sum().backward()  # type: ignore[no-untyped-call]
        gradients = [tensor.grad for tensor in optimizer.holders(model) if tensor.grad is not None]
        assert all(gradient.dtype == torch.float32 for gradient in gradients)
        found.append([gradient.cpu() for gradient in gradients])
    assert len(found[0]) == 28
    for expected, gradient in zip(*found, strict=True):
        assert 0 < (gradient - expected).norm() < 2**-8 * expected.norm()
    assert not device.findings


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINING)
def test_a_training_step(device: FakeCuda, case: str, tmp_path: Path) -> None:
    """Its metrics are the CPU's but for rounding."""
    is_half = case.startswith("bfloat16")
    dtype = torch.bfloat16 if is_half else torch.float32
    policy = make_policy(tmp_path / "policy", dtype=dtype, num_hidden_layers=1)
    found, expected = (train_small(policy, tmp_path / name, name, **TRAINING[case]) for name in ("cuda", "cpu"))
    assert device.num_replays > 0
    assert not device.findings
    kernels = {"softmax_rows", "softmax_gradient_rows", "gated_gradient_rows", "rotate_heads"}
    assert {name for name, *_ in device.kernels} >= kernels
    assert not [wait for wait in device.waits if wait.startswith("_local_scalar_dense at features/draft_head")]
    if is_half:  # of a few tokens
        names = ("reward/mean", "tokens/update", "response/length_mean")
        assert [[row.get(name) for name in names] for row in found] == [
            [row.get(name) for name in names] for row in expected
        ]
        assert found[-1]["logprob_difference/mean"] < 0.02
    else:
        assert_close(found, expected, 1e-3)


@pytest.mark.slow
def test_a_resumed_run(device: FakeCuda, tmp_path: Path) -> None:
    policy = make_policy(tmp_path / "policy", num_hidden_layers=1)
    train_small(policy, tmp_path / "cuda", "cuda")
    found = train_small(policy, tmp_path / "cuda", "cuda", resume=True, train__num_steps=2)
    expected = train_small(policy, tmp_path / "cpu", "cpu", train__num_steps=2)
    assert not device.findings
    assert_close(found[-1:], expected[-1:], 1e-3)


@contextmanager
def fake_rank() -> Iterator[None]:
    """A rank's device, with gloo in the place of NCCL."""
    connect = dist.init_process_group
    with fake_cuda() as device, patch.object(dist, "init_process_group") as init:
        init.side_effect = lambda backend, *, timeout, device_id: connect("gloo", timeout=timeout)
        yield
    init.assert_called_once()
    assert init.call_args.args == ("cpu:gloo,cuda:nccl",)
    assert device.num_replays > 0
    assert not device.findings


@FORKED
@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_a_training_step_of_two_ranks(sharding: str, tmp_path: Path) -> None:
    policy = make_policy(tmp_path / "policy", num_hidden_layers=1)
    metrics = []
    for device in ("cuda", "cpu"):
        changes: dict[str, Any] = {"train__sharding": sharding, "train__mini_batch_prompts": 2}
        around: Around = fake_rank if device == "cuda" else nullcontext
        recipe = small_recipe(policy, tmp_path / device, device, **changes)
        assert [process.exitcode for process in train_on_ranks(recipe, 2, around=around)] == [0, 0]
        metrics.append(learned_rows(tmp_path / device / "run", beside=("memory/",)))
    assert len(metrics[0]) == 2
    assert_close(metrics[0], metrics[1], 1e-3)


def test_the_update_in_float32_shares_no_heads(device: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else PyTorch takes the backend that computes all scores, of all pairs of tokens, at once."""
    seen: list[tuple[int, int, bool]] = []
    attend = functional.scaled_dot_product_attention

    def logged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((q.shape[1], k.shape[1], options["enable_gqa"]))
        return attend(q, k, v, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", logged)
    q, k, v = (torch.randn(9, heads, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 1))
    v = v.expand(9, 2, 8)
    expected = PackedPlan([5, 6], "cpu", [0, 2]).attend(0, q, k, v)
    found = PackedPlan([5, 6], "cuda", [0, 2]).attend(0, q.to("cuda"), k.to("cuda"), v.to("cuda"))
    torch.testing.assert_close(found.cpu(), expected)
    assert set(seen) == {(4, 2, True), (4, 4, False)}


def test_base_weights_on_the_host_take_no_more_pinned_memory_than_they_have(device: FakeCuda) -> None:
    policy = runner_policy().to("cuda")
    optimizer = LoraAdamW(policy, LoraSection(rank=2, base="host"), seed=0)
    sizes = [one.base.nbytes for one in optimizer.matrices]
    assert list(device.pinned.values()) == sizes
    assert all(one.base.is_pinned() for one in optimizer.matrices)
    del optimizer
    gc.collect()
    assert not device.pinned
