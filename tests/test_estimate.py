"""Estimates before a run: time, disk, and the first lines of a run."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny_run import make_recipe
from typer.testing import CliRunner

from srtrl.build import run_training
from srtrl.cli import app
from srtrl.model.hf_config import config_from_hf
from srtrl.model.published_shapes import published_shape
from srtrl.model.transformer import Transformer
from srtrl.model.weights import read_config
from srtrl.recipe.file import load_recipe
from srtrl.run.estimate import checkpoint_bytes, describe_device

QWEN = "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize("changes", [{}, {"model__dtype": "bfloat16"}, {"model__lora": {"rank": 1}}], ids=str)
def test_a_checkpoint_has_the_computed_size(changes: dict[str, Any], policy: Path, tmp_path: Path) -> None:
    """Up to the headers of its files, and LoRA's own few numbers."""
    recipe = make_recipe(policy, tmp_path, train__num_steps=1, train__max_logprob_difference=9.0, **changes)
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
