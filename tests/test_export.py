"""`srtrl export`: a folder that others load, and its model card."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_cases
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from srtrl.model.folders import load_tokenizer
from srtrl.model.weights import load_model
from srtrl.recipe.file import load_recipe, read_yaml
from srtrl.recipe.schema import LogSection, Recipe
from srtrl.report.export import model_card
from srtrl.report.runs import read_run


@pytest.fixture
def run(finished: Callable[..., Path]) -> Path:
    """Two steps with a critic, whose weights are not the policy's, and a checkpoint after each."""
    return finished(algorithm__advantage="gae", critic={}, train__checkpoint_every=1, train__num_steps=2)


@pytest.mark.parametrize(("arguments", "step"), [((), 2), (("--step", 1), 1)])
def test_an_export_is_a_model_with_tokenizer_and_card(
    run: Path, tmp_path: Path, arguments: tuple[object, ...], step: int
) -> None:
    folder = tmp_path / "new" / "policy"
    assert bench_cases.run("export", run, folder, *arguments).exit_code == 0
    kept = {"chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"}
    kept |= {"tokenizer.json", "tokenizer_config.json"}
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
    steps = re.findall(r"^- step (\d+): [\d.]+%( \(95%: .*\))?$", card, re.MULTILINE)
    assert [number for number, _ in steps] == (["0", "2"] if step == 2 else ["0"])
    options = card.split("```yaml\n")[1].split("```")[0]
    whole = load_recipe(run / "recipe.yaml").model_dump() | {"output_dir": "runs", "log": LogSection().model_dump()}
    assert Recipe.model_validate(read_yaml(options, "card")[0]).model_dump() == whole, "nothing of the machine"
    assert "critic: {}\n" in options
    assert "whiten_advantages" not in options
    code = card.split("```python\n")[1].split("```")[0]
    exec(code.replace("USER/MODEL", str(folder)).replace("print(", "shown = ("), variables := dict[str, Any]())
    assert (str(variables["prompt"])[:8], variables["prompt"] in variables["shown"]) == ("Compute ", True)
    assert bench_cases.run("export", run, folder).exit_code == 2, "it is not empty any more"


def test_a_card_needs_no_rollouts_and_what_is_beside_an_export_stays(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    shutil.rmtree(copy / "rollouts")
    for name in (".new.writing", ".new.deleting", ".new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").touch()
    assert bench_cases.run("export", copy, tmp_path / "new").exit_code == 0
    assert len(list(tmp_path.rglob("mine.txt"))) == 3
    assert len(list(tmp_path.iterdir())) == 5, "the copy, the export, and nothing else"
    card = model_card(read_run(copy), 2, "peft", load_tokenizer(str(tmp_path / "new")))
    assert "from peft import AutoPeftModelForCausalLM\n" in card, "the class of an adapter"
    assert "prompt = 'Hello'" in card
