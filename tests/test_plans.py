"""Plans and estimates: bytes of real shards, checkpoints and ranks. What is printed: test_recipe_memory.txt."""

import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tiny_run
import torch
from critic_cases import make_value_model
from rank_cases import FORKED, run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner
from update_cases import make_policy, make_recipe, make_sequences

from srtrl import planner
from srtrl.build import build_columns, run_training
from srtrl.build_models import Models
from srtrl.cli import app
from srtrl.model.hf_config import config_from_hf
from srtrl.model.published_shapes import published_shape
from srtrl.model.transformer import Transformer
from srtrl.model.weights import read_config
from srtrl.ranks.sharding import shard
from srtrl.recipe.file import load_recipe
from srtrl.recipe.schema import ModelSection
from srtrl.run.estimate import checkpoint_bytes, describe_device
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


# --- Time, disk, and the first lines of a run -------------------------------------------------------------------------


QWEN = "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize("changes", [{}, {"model__dtype": "bfloat16"}, {"model__lora": {"rank": 1}}], ids=str)
def test_a_checkpoint_has_the_computed_size(changes: dict[str, Any], policy: Path, tmp_path: Path) -> None:
    """Up to the headers of its files, and LoRA's own few numbers."""
    short = {"train__num_steps": 1, "train__max_logprob_difference": 9.0}
    recipe = tiny_run.make_recipe(policy, tmp_path, **short | changes)
    checkpoint = run_training(recipe).folder / "checkpoints" / "step_000001"
    num_bytes = sum(file.stat().st_size for file in checkpoint.rglob("*.safetensors"))
    model = Transformer(read_config(policy), torch.float32, "meta")
    computed = checkpoint_bytes(recipe, sum(weight.numel() for weight in model.parameters()))
    assert computed < num_bytes < computed + (120_000 if recipe.model.lora else 20_000)


def test_the_check_prints_what_it_computed_and_the_recipe_where_it_is_wanted() -> None:
    cpu = CliRunner().invoke(app, ["show-config", "quickstart", "--check"]).stdout.splitlines()
    assert [line.partition(":")[0] for line in cpu] == [
        "time",
        "  rollout 1.3 s, or 1.2 s with drafts as on recorded mathematics; update 2.6 s; evaluation 4.4 s "
        "(computed, not measured)",
        "disk",
        "memory",
        "verdict",
    ]
    assert "1 thread of a CPU" in cpu[0], "as the recipe has it"
    yaml = CliRunner().invoke(app, ["show-config", "quickstart", "--check", "--yaml"]).stdout.splitlines()
    assert yaml[0] == "name: quickstart"
    assert [line for line in yaml if line.startswith("#")] == [f"# {line}" for line in cpu]
    gpu = CliRunner().invoke(app, ["show-config", "quickstart", "--check", "--gpu", "24"]).stdout
    assert "computed for one H200" in gpu.splitlines()[0]


def test_a_run_names_its_device_and_a_large_model_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"the GPU {device.index}")
    known = published_shape(QWEN)
    assert known is not None
    recipe = load_recipe(Path("grpo_gsm8k"))
    for layers, warned in ((2, False), (24, True)):
        shape = config_from_hf({**known, "num_hidden_layers": layers}, QWEN)
        lines = list(describe_device(recipe, Transformer(shape, torch.float32, "meta")))
        assert lines[0] == "device: cpu, 2 threads"
        assert (len(lines) == 2) == warned
    assert lines[1] == (
        "0.5B parameters are many for a CPU: about 8 h per step if each response has 1,024 tokens (computed)"
    )
    on_gpu = Mock(device=torch.device("cuda", 1))
    assert list(describe_device(recipe, on_gpu)) == ["device: the GPU 1"]
