"""`model.compile`: the same numbers, one graph for every number of tokens and all layers, and never in the decoder."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from accelerate import Accelerator
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from update_cases import RecordingSGD, make_policy, make_recipe, make_sequences, update

from srtrl.checks import check_recipe
from srtrl.model.attention import PackedPlan
from srtrl.model.transformer import CompiledLayers
from srtrl.ranks.processes import ONE_RANK
from srtrl.trainer import build


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(
    compiled: CompiledLayers | None, accelerator: Accelerator, *, dtype: torch.dtype, checkpointing: bool
) -> tuple[list[Tensor], dict[str, float]]:
    """Of one update in three micro-batches, with a pass without gradient before it: both must round alike."""
    policy = make_policy(dtype=dtype, scale=8)
    policy.gradient_checkpointing = checkpointing
    policy.compiled_layers = compiled
    optimizer = RecordingSGD(policy)
    recipe = make_recipe(train__micro_batch_tokens=24, algorithm__old_logprobs="recompute")
    metrics = update(policy, optimizer, accelerator, make_sequences(policy), recipe)
    return optimizer.gradients[0], metrics


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_layers_have_the_same_loss_and_gradients(
    backend: str, checkpointing: bool, accelerator: Accelerator
) -> None:
    dtype = torch.float32 if backend == "inductor" else torch.float64
    expected, metrics = gradients(None, accelerator, dtype=dtype, checkpointing=False)
    found, compiled_metrics = gradients(CompiledLayers(backend), accelerator, dtype=dtype, checkpointing=checkpointing)
    tolerance = 1e-4 if backend == "inductor" else 1e-10
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert compiled_metrics == pytest.approx(metrics, rel=tolerance, abs=tolerance)


def num_graphs(counter: CompileCounterWithBackend) -> int:
    """Graphs compiled so far; dynamo hands an empty one to the backend too."""
    return sum(len(module.graph.nodes) > 0 for module in counter.graphs)


def test_each_half_is_compiled_once_for_all_layers_and_lengths() -> None:
    policy = make_policy(dtype=torch.float32)
    for layer in policy.layers:  # as in Qwen3
        layer.q_norm = layer.k_norm = torch.nn.Parameter(torch.ones(policy.config.head_dim))
    counter = CompileCounterWithBackend("aot_eager")
    policy.compiled_layers = CompiledLayers(counter)  # type: ignore[arg-type]
    generator = np.random.default_rng(0)
    for _ in range(6):
        lengths = generator.integers(2, 12, size=generator.integers(1, 5)).tolist()
        token_ids = torch.randint(19, (sum(lengths),))
        policy(token_ids, PackedPlan.from_lengths(lengths, "cpu")).sum().backward()
    assert len(policy.layers) > 1
    assert num_graphs(counter) == 2


class OtherPlan:
    """A plan that is no `PackedPlan`, as the decoder's are."""

    def __init__(self, length: int) -> None:
        self.packed = PackedPlan.from_lengths([length], "cpu")
        self.positions, self.num_positions = self.packed.positions, self.packed.num_positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As the packed plan."""
        return self.packed.attend(layer, q, k, v)


def test_the_decoder_never_runs_compiled_layers() -> None:
    def refuse(*_: Any) -> Tensor:
        raise AssertionError("compiled layers were called")

    policy = make_policy()
    expected = policy(torch.arange(5), OtherPlan(5))
    policy.compiled_layers = refuse  # type: ignore[assignment]
    assert torch.equal(policy(torch.arange(5), OtherPlan(5)), expected)
    with pytest.raises(AssertionError, match="were called"):
        policy(torch.arange(5), PackedPlan.from_lengths([5], "cpu"))


@pytest.mark.parametrize("is_set", [False, True])
def test_the_options_reach_policy_reference_and_critic(is_set: bool, policy: Path, tmp_path: Path) -> None:
    """No gradient would show that checkpointing is off, only the memory of a large model."""
    recipe = tiny_run.make_recipe(
        policy,
        tmp_path,
        model__compile=is_set,
        model__gradient_checkpointing=is_set,
        algorithm={"advantage": "gae", "kl": {"coefficient": 0.1}},
        critic={},
    )
    model = build.build_policy(recipe, recipe.model.path, torch.device("cpu"))
    reference = build.build_reference(recipe, torch.device("cpu"), ONE_RANK)
    critic = build.build_critic(recipe, None, model, build.build_tokenizer(recipe), ONE_RANK)
    assert critic is not None
    assert reference is not None
    models = (model, reference, critic.model.body)
    assert [model.compiled_layers is not None for model in models] == [is_set] * 3
    assert [model.gradient_checkpointing for model in (models[0], models[2])] == [is_set] * 2


def test_a_run_without_a_compiler_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_run.make_recipe(tmp_path / "no policy", tmp_path, model__compile=True)
    message = r"model\.compile: true needs a C\+\+ compiler.*/no/such/compiler.*install g\+\+"
    with (
        torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",)}),
        pytest.raises(ValueError, match=message),
    ):
        check_recipe(recipe)
    build.check_compiler(tiny_run.make_recipe(tmp_path / "no policy", tmp_path))
    monkeypatch.setattr(build, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match=r"model\.compile: true needs Triton on CUDA"):
        build.check_compiler(recipe)
