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
from srtrl.engine.kv_memory import GIB
from srtrl.model.hf_config import config_from_hf
from srtrl.model.published_shapes import published_shape
from srtrl.model.transformer import Transformer
from srtrl.model.weights import read_config
from srtrl.planner import find_config, plan_memory, step_time
from srtrl.recipe.file import load_recipe
from srtrl.run.estimate import GPUS, StepTime, checkpoint_bytes, cpu_time, describe_cost, describe_device

QWEN = "Qwen/Qwen2.5-0.5B"
TIME = "if each response has 1,024 tokens (computed for {}, without drafts and evaluations)"


def test_time_on_a_cpu_is_what_a_step_reads_and_computes() -> None:
    changes = ["rollout.num_prompts=2", "rollout.num_samples=4", "rollout.max_prompt_tokens=10", "rollout.slots=5"]
    changes += ["rollout.max_new_tokens=100", "train.num_epochs=3", "model.dtype=float32", "algorithm.kl.coefficient=0"]
    known = published_shape(QWEN)
    assert known is not None
    policy = Transformer(config_from_hf(known, QWEN), torch.float32, "meta")
    weights, kv_bytes = sum(one.numel() for one in policy.parameters()), 24 * 2 * 2 * 64 * 4

    def decoded(*waves: int) -> float:
        read = sum(kv_bytes * 60 * number / 1e10 for number in waves)
        return 100 * (read + weights * sum(max(4 / 1e10, 2 * number / 1e11) for number in waves))

    def seconds(name: str, *overrides: str) -> float:
        return cpu_time(load_recipe(Path(name), [*changes, *overrides]), policy, 2).step_seconds()

    read = 2 * 20 * weights / 1e11
    assert seconds("grpo_gsm8k") == pytest.approx(decoded(5, 3) + read + 18 * weights * 820 / 1e11)
    more = seconds("grpo_gsm8k", "rollout.slots=auto", "rollout.num_prompts=33")
    assert more == pytest.approx(decoded(64, 64, 4) + 16.5 * read + 18 * weights * 13_530 / 1e11), "64 slots"
    dearer = seconds("ppo_math", "train.mini_batch_prompts=2", "algorithm.kl.coefficient=0.1")
    assert dearer == pytest.approx(decoded(5, 3) + read + (2 * 18 + 2) * weights * 820 / 1e11)


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

    def times(*changes: str) -> StepTime:
        recipe = load_recipe(Path("lora_math_7b"), ["algorithm.kl.coefficient=0", "rollout.slots=64", *changes])
        config = find_config(recipe.model.path)[0]
        return step_time(recipe, config, plan_memory(recipe, config, 140 * GIB), GPUS["h200"])

    large = "algorithm.teacher.path=Qwen/Qwen2.5-14B"
    without, beside, local, itself = found = (
        times(),
        times(large),
        times(large, "model.path=bundled:tiny", "model.lora=null", "rollout.max_new_tokens=512"),
        times("algorithm.teacher.path=Qwen/Qwen2.5-7B-Instruct"),
    )
    assert [describe_cost(one)[2].removeprefix("disk: ").partition(", ")[0] for one in found] == [
        "15 GB to download for the model",
        "45 GB to download for the model and the teacher",
        "30 GB to download for the teacher",
        "15 GB to download for the model and the teacher",
    ]
    assert describe_cost(without)[2].partition(", ")[2] == describe_cost(beside)[2].partition(", ")[2]
    assert local.teacher_weights == beside.teacher_weights > itself.teacher_weights == without.num_weights
    rollout = beside.recipe.rollout
    num_tokens = rollout.num_prompts * (rollout.num_samples * rollout.max_new_tokens + rollout.max_prompt_tokens)
    more = beside.update_seconds() - without.update_seconds()
    assert more == pytest.approx(2 * beside.teacher_weights * num_tokens / (0.32 * 989e12))


def test_lines_of_the_check() -> None:
    def lines(recipe: str, *overrides: str) -> list[str]:
        arguments = ["show-config", recipe, "--check", "device=cpu", "num_threads=1", *overrides]
        return CliRunner().invoke(app, arguments).stdout.splitlines()[:-2]

    assert lines("grpo_gsm8k") == [
        f"time: about 15 h per step, 64 days in all, {TIME.format('1 thread of a CPU')}",
        "  rollout 3.2 h, or 3.2 h with drafts as on recorded mathematics; update 12 h (computed, not measured)",
        "disk: 0.99 GB to download for the model, 14 GB of checkpoints (2 kept)",
    ]
    assert lines("grpo_gsm8k", "model.path=some/other") == []
    assert lines("warm_start_tiny") == []
    assert lines("quickstart", "train.num_steps=1")[2] == (
        "disk: nothing to download, 0.0099 GB of checkpoints (1 kept)"
    )


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
