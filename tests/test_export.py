"""`srtrl export`: a folder that others load, and its model card."""

import re
from pathlib import Path
from typing import Any

import bench_cases
import pytest
import torch
from tiny_run import make_recipe, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from srtrl.model.weights import load_model
from srtrl.recipe.file import read_yaml
from srtrl.recipe.schema import LogSection, Recipe


@pytest.fixture(scope="module")
def run(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with a critic, whose weights are not the policy's, and a checkpoint after each."""
    changes: dict[str, Any] = {"algorithm__advantage": "gae", "critic": {}, "train__checkpoint_every": 1}
    return train(make_recipe(policy, tmp_path_factory.mktemp("runs"), train__num_steps=2, **changes)).folder


def export(*arguments: object) -> None:
    result = bench_cases.run("export", *arguments)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(("arguments", "step"), [((), 2), (("--step", 1), 1)])
def test_an_export_is_a_model_with_tokenizer_and_card(
    run: Path, tmp_path: Path, arguments: tuple[object, ...], step: int
) -> None:
    folder = tmp_path / "new" / "policy"
    export(run, folder, *arguments)
    kept = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == kept | {"README.md"}
    checkpoint = run / "checkpoints" / f"step_{step:06d}"
    for name in kept:
        assert (folder / name).read_bytes() == (checkpoint / name).read_bytes(), name
    token_ids = AutoTokenizer.from_pretrained(folder).encode("Compute 1+1.\n", return_tensors="pt")
    logits = AutoModelForCausalLM.from_pretrained(folder)(token_ids).logits
    assert logits.shape == (1, token_ids.shape[1], 257)
    assert load_model(str(folder), dtype=torch.float32, device=torch.device("cpu")).config.vocab_size == 257
    _, front, card = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    assert read_yaml(front, "card")[0]["library_name"] == "transformers"
    assert f"after {step} of 2 steps of reinforcement learning on the task `arithmetic`" in card
    steps = re.findall(r"^- step (\d+): held-out accuracy .*\(95%: ", card, re.MULTILINE)
    assert steps == ["0", "2"] if step == 2 else ["0"]
    recipe = Recipe.model_validate(read_yaml(card.split("```yaml\n")[1].split("```")[0], "card")[0])
    assert (recipe.seed, recipe.output_dir, recipe.log) == (7, "runs", LogSection()), "nothing of the machine"
    assert bench_cases.run("export", run, folder).exit_code == 2, "it is not empty any more"


def test_what_is_beside_an_export_stays(run: Path, tmp_path: Path) -> None:
    for name in (".new.writing", ".new.deleting", ".new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").touch()
    export(run, tmp_path / "new")
    assert len(list(tmp_path.rglob("mine.txt"))) == 3
    assert len(list(tmp_path.iterdir())) == 4, "and nothing else"
