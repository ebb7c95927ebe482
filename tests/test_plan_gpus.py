"""Plans for several GPUs: bytes of real shards, and a simulation of ranks. What is printed: test_recipe_memory.txt."""

import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from critic_cases import make_value_model
from rank_cases import FORKED, run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from update_cases import make_policy, make_recipe, make_sequences

from srtrl import planner
from srtrl.build import build_columns
from srtrl.build_models import Models
from srtrl.ranks.sharding import shard
from srtrl.recipe.schema import ModelSection
from srtrl.trainer.optimizer import build_optimizer
from srtrl.trainer.passes import UpdateContext, fill

ROOT = Path(__file__).parents[1]
OPTIMIZER: dict[str, Any] = {"learning_rate": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.99)}


# --- Bytes ------------------------------------------------------------------------------------------------------------


def model_of(kind: str, dtype: torch.dtype) -> nn.Module:
    return make_value_model(dtype=dtype) if kind == "critic" else make_policy(dtype=dtype, tied=kind == "tied")


def num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in tensors)


def sharded_bytes(kind: str, dtype: torch.dtype) -> tuple[int, int, int]:
    """Weights, moments and gradients of a rank, of which the first one has the largest parts."""
    model = model_of(kind, dtype)
    shard(model)
    optimizer = build_optimizer(model, **OPTIMIZER)
    weights = list(model.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return num_bytes(weights), num_bytes(moments), num_bytes([one.grad for one in weights if one.grad is not None])


@FORKED
@pytest.mark.parametrize(
    ("kind", "dtype", "count"),
    [
        ("policy", torch.float32, 2),
        ("policy", torch.bfloat16, 3),
        ("tied", torch.bfloat16, 2),
        ("tied", torch.float32, 3),
        ("critic", torch.float32, 2),
        ("critic", torch.bfloat16, 3),
    ],
)
def test_the_plan_has_the_bytes_of_real_shards(kind: str, dtype: torch.dtype, count: int) -> None:
    """19 tokens and layers of 8 and 12: neither 2 nor 3 divides all rows."""
    config = make_policy(tied=kind == "tied").config
    kept, gradients, _ = planner._learner_bytes(
        config, ModelSection(path="x", dtype="float32"), count, is_critic=kind == "critic"
    )
    assert kept["masters"] == 0
    assert (kept["weights"], kept["moments"], gradients) == run_ranks(count, sharded_bytes, kind, dtype)[0]


def gathered_after_the_reference() -> list[str]:
    """Names of the reference's weights that are whole after its pass."""
    recipe = make_recipe(algorithm__kl={"coefficient": 0.1}, train__sharding="fsdp2")
    policy, reference = make_policy(), make_policy(seed=3).requires_grad_(False)
    shard(reference)
    optimizer = build_optimizer(policy, **OPTIMIZER)
    models = Models(
        policy=policy,
        reference=reference,
        teacher=None,
        optimizer=optimizer,
        critic=None,
        draft_head=None,
        attention_head=None,
    )
    [column] = build_columns(recipe, models)
    filled = fill(column, make_sequences(make_policy(scale=8)), UpdateContext(recipe=recipe, step=1))
    assert all(sequence.ref_logprobs is not None for sequence in filled)
    return [name for name, weight in reference.named_parameters() if not isinstance(weight, DTensor)]


@FORKED
def test_a_reference_is_sharded_again_after_its_pass() -> None:
    assert run_ranks(2, gathered_after_the_reference) == [[], []]


# --- The simulation ---------------------------------------------------------------------------------------------------


def test_the_table_of_the_page_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    page = (ROOT / "docs" / "ranks.md").read_text(encoding="utf-8")
    [command] = re.findall(r"`python docs/(simulate_ranks\.py .*?)`", page)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [*command.split(), "--gpus", "64,512"])
    import_module("simulate_ranks").main()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert [line for line in printed if f"\n{line}\n" not in page] == []
