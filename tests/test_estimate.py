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
from srtrl.run.estimate import checkpoint_bytes, describe_cost, describe_device, step_seconds

QWEN = "Qwen/Qwen2.5-0.5B"
TIME = "if each response has 1,024 tokens (computed for {}, without drafts and evaluations)"


def test_time_is_what_a_step_reads_and_computes() -> None:
    changes = ["rollout.num_prompts=2", "rollout.num_samples=4", "rollout.max_prompt_tokens=10", "rollout.slots=5"]
    changes += ["rollout.max_new_tokens=100", "train.num_epochs=3", "model.dtype=float32", "algorithm.kl.coefficient=0"]
    recipe = load_recipe(Path("grpo_gsm8k"), changes)
    assert step_seconds(recipe, 10**9, 2) == 200 * 0.4 + (2 + 3 * 6) * 10**9 * 820 / 10**11
    assert step_seconds(recipe, 10**9, None) == pytest.approx(200 * (0.0015 + 0.002) + 20 * 10**9 * 820 / 3e13)
    changes += ["train.mini_batch_prompts=2", "algorithm.kl.coefficient=0.1"]
    dearer = load_recipe(Path("ppo_math"), changes)
    assert step_seconds(dearer, 10**9, 2) == 200 * 0.4 + (2 + 2 * 3 * 6 + 2) * 10**9 * 820 / 10**11
    measured = 5.5  # of lengths of a random policy (docs/benchmarks.md)
    assert measured < step_seconds(load_recipe(Path("grpo_gsm8k")), 494_000_000, None) < 4 * measured


@pytest.mark.parametrize("changes", [{}, {"model__dtype": "bfloat16"}, {"model__lora": {"rank": 1}}], ids=str)
def test_a_checkpoint_has_the_computed_size(changes: dict[str, Any], policy: Path, tmp_path: Path) -> None:
    """Up to the headers of its files, and LoRA's own few numbers."""
    recipe = make_recipe(policy, tmp_path, train__num_steps=1, train__max_logprob_difference=9.0, **changes)
    checkpoint = run_training(recipe).folder / "checkpoints" / "step_000001"
    num_bytes = sum(file.stat().st_size for file in checkpoint.rglob("*.safetensors"))
    model = Transformer(read_config(policy), torch.float32, "meta")
    computed = checkpoint_bytes(recipe, sum(weight.numel() for weight in model.parameters()))
    assert computed < num_bytes < computed + (120_000 if recipe.model.lora else 20_000)


def test_a_teacher_counts_with_its_own_size() -> None:
    """7.62 and 14.77 billion parameters, in bfloat16; the teacher scores, and is in no checkpoint."""
    without, beside, local, itself = (
        describe_cost(load_recipe(Path("lora_math_7b"), changes), None)
        for changes in (
            [],
            ["algorithm.teacher.path=Qwen/Qwen2.5-14B"],
            ["algorithm.teacher.path=Qwen/Qwen2.5-14B", "model.path=bundled:tiny", "model.lora=null"],
            ["algorithm.teacher.path=Qwen/Qwen2.5-7B-Instruct"],
        )
    )
    downloads = [lines[1].removeprefix("disk: ").partition(", ")[0] for lines in (without, beside, local, itself)]
    assert downloads == [
        "15 GB to download for the model",
        "45 GB to download for the model and the teacher",
        "30 GB to download for the teacher",
        "15 GB to download for the model and the teacher",
    ]
    assert without[1].partition(", ")[2] == beside[1].partition(", ")[2]
    recipe = load_recipe(
        Path("lora_math_7b"), ["algorithm.teacher.path=Qwen/Qwen2.5-14B", "algorithm.kl.coefficient=0"]
    )
    num_tokens = recipe.rollout.num_prompts * (
        recipe.rollout.num_samples * recipe.rollout.max_new_tokens + recipe.rollout.max_prompt_tokens
    )
    more = step_seconds(recipe, 10**9, None, 3 * 10**9) - step_seconds(recipe, 10**9, None)
    assert more == pytest.approx(2 * 2 * 10**9 * num_tokens / 3e14)


def test_lines_of_the_check() -> None:
    recipe = load_recipe(Path("grpo_gsm8k"))
    assert describe_cost(recipe, None) == [
        f"time: about 11 s per step, 19 min in all, {TIME.format('one H200')}",
        "disk: 0.99 GB to download for the model, 14 GB of checkpoints (2 kept)",
    ]
    assert describe_cost(recipe, 1)[0] == (
        f"time: about 15 h per step, 64 days in all, {TIME.format('1 thread of a CPU')}"
    )
    assert describe_cost(load_recipe(Path("grpo_gsm8k"), ["model.path=some/other"]), None) == []
    assert describe_cost(load_recipe(Path("warm_start_tiny")), 1) == []
    assert describe_cost(load_recipe(Path("quickstart"), ["train.num_steps=1"]), 1)[1] == (
        "disk: nothing to download, 0.0099 GB of checkpoints (1 kept)"
    )


def test_the_check_prints_what_it_computed_and_the_recipe_where_it_is_wanted() -> None:
    cpu = CliRunner().invoke(app, ["show-config", "quickstart", "--check"]).stdout.splitlines()
    assert [line.partition(":")[0] for line in cpu] == ["time", "disk", "memory", "verdict"]
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
        "0.5B parameters are many for a CPU: about 7.7 h per step if each response has 1,024 tokens (computed)"
    )
    on_gpu = Mock(device=torch.device("cuda", 1))
    assert list(describe_device(recipe, on_gpu)) == ["device: the GPU 1"]
