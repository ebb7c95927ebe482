"""PPO of a bfloat16 policy and critic: the warm-up of the critic, and a state of the optimizer that does not fit."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save
from tiny_run import PPO, make_recipe, train

from srtrl.metrics import read_metrics
from srtrl.model.weights import load_model
from srtrl.run.checkpoint import OPTIMIZER, read_state
from srtrl.run.step_metrics import step_problems
from srtrl.trainer.optimizer import build_optimizer

BFLOAT16 = PPO | {"model__dtype": "bfloat16"}


def weights_of(folder: Path) -> list[torch.Tensor]:
    return list(load_model(folder, dtype=torch.bfloat16, device="cpu").parameters())


def test_the_warm_up_leaves_the_policy_alone(policy: Path, tmp_path: Path) -> None:
    """Two steps of critic alone, then one of both; the policy's schedule begins with the third step."""
    critic = PPO["critic"] | {"warmup_steps": 2}
    changes = BFLOAT16 | {"critic": critic, "train__num_steps": 3, "train__schedule": "linear"}
    changes |= {"train__checkpoint_every": 1, "train__keep_checkpoints": 3}
    folder = train(make_recipe(policy, tmp_path, **changes)).folder
    rows = {int(row["step"]): row for row in read_metrics(folder / "metrics.jsonl")}
    checkpoints = {step: folder / "checkpoints" / f"step_{step:06d}" for step in (1, 2, 3)}
    versions = [read_state(checkpoint).policy_version for checkpoint in checkpoints.values()]
    assert versions == [0, 0, 1]
    before = weights_of(policy)
    for step in (1, 2):
        assert all(map(torch.equal, weights_of(checkpoints[step]), before))
        assert "loss" not in rows[step]
        assert "critic/loss" in rows[step]
        assert step_problems(rows[step]).endswith("critic warm-up: no update of the policy")
    assert not any(map(torch.equal, weights_of(checkpoints[3]), before))
    assert rows[3]["learning_rate"] == pytest.approx(0.01)  # the peak: its first 3 of 4 optimizer steps were warm-up


def test_an_optimizer_state_of_another_model_is_refused_with_its_folder(
    finished: Callable[..., Path], tmp_path: Path
) -> None:
    saved = shutil.copytree(finished(**BFLOAT16) / "checkpoints" / "step_000004", tmp_path / "saved")
    [file] = (saved / "optimizer").iterdir()
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load(file.read_bytes())
    without = {name: tensor for name, tensor in tensors.items() if not name.endswith(".master")}
    narrow = tensors | {"final_norm.master": torch.ones(1)}
    for num_layers, changed, message in (
        (2, without, r"it has no embedding\.master: it is of another model, or of another model\.dtype"),
        (2, narrow, r"its final_norm\.master has shape \[1\], this model's \[32\]"),
        (1, tensors, r"this model has no layers\.1\.\S+: it is of another model, or of another model\.dtype"),
    ):
        file.write_bytes(save(changed, metadata))
        model = load_model(saved, dtype=torch.bfloat16, device="cpu")
        model.layers = model.layers[:num_layers]
        optimizer = build_optimizer(model, learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.99))
        with pytest.raises(ValueError, match=rf"saved/optimizer: {message}; .*name=OTHER model\.path=.*saved$"):
            optimizer.load(torch.bfloat16, saved, OPTIMIZER)
