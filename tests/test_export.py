"""`srtrl export`: a folder that others load, its model card, and the upload."""

from pathlib import Path
from typing import Any

import bench_cases
import pytest
import torch
from recipe_cases import recipe_text
from tiny_run import make_recipe, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from srtrl.model.weights import load_model
from srtrl.recipe.file import read_yaml
from srtrl.recipe.schema import Recipe
from srtrl.report.export import model_card


@pytest.fixture(scope="module")
def run(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with a critic, whose weights are not the policy's, and a checkpoint after each."""
    changes: dict[str, Any] = {"algorithm__advantage": "gae", "critic": {}, "train__checkpoint_every": 1}
    return train(make_recipe(policy, tmp_path_factory.mktemp("runs"), train__num_steps=2, **changes)).folder


def export(*arguments: object, exit_code: int = 0) -> str:
    result = bench_cases.run("export", *arguments)
    assert result.exit_code == exit_code, result.output
    return result.output


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
    rows = [line.split(" | ")[0] for line in card.splitlines() if line.startswith("| ")]
    assert rows == ["| step", "| ---:", *(f"| {number}" for number in range(step + 1))]
    recipe = Recipe.model_validate(read_yaml(card.split("```yaml\n")[1].split("```")[0], "card")[0])
    assert (recipe.seed, recipe.output_dir) == (7, "runs")
    assert "the model is in" not in export(run, folder, exit_code=2)


def test_the_card_of_a_long_run_has_some_rows_and_its_last_evaluation() -> None:
    text = recipe_text("log: {tracker_options: {wandb: {id: secret}}}\n", path="Qwen/Qwen2.5-0.5B")
    rows = [{"step": step, "reward/mean": 0.5} for step in range(20_001)]
    rows[19_999] |= {"eval/accuracy": 0.12345, "eval/reward": 0.5}
    card = model_card(Recipe.model_validate(read_yaml(text, "card")[0]), rows, 20_000)
    table = [line for line in card.splitlines() if line.startswith("| ")]
    assert table[0] == "| step | reward/mean | eval/accuracy | eval/reward |"
    assert table[2] == "| 0 | 0.5 |  |  |"
    assert table[-2:] == ["| 19999 | 0.5 | 0.1235 | 0.5 |", "| 20000 | 0.5 |  |  |"]
    assert len(table) == 2 + 14
    assert "base_model: Qwen/Qwen2.5-0.5B" in card
    assert "secret" not in card


def test_what_cannot_be_exported(run: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    assert "full exists and is not an empty folder" in export(run, tmp_path / "full", exit_code=2)
    assert "no checkpoint of step 7; there: step_000001" in export(run, tmp_path / "new", "--step", 7, exit_code=2)
    assert "is not the folder of a run" in export(tmp_path, tmp_path / "new", exit_code=2)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("refusal", "message"), [(None, ""), (OSError("401: who are you?"), "401: who are you?")])
def test_the_upload(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Exception | None, message: str
) -> None:
    calls: list[tuple[str, object]] = []

    class FakeHub:
        def create_repo(self, name: str, **_: object) -> None:
            calls.append(("create", name))

        def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
            calls.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir())[0]))
            if refusal is not None:
                raise refusal

    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    said = export(run, tmp_path / "out", "--push-to-hub", "me/sums", exit_code=2 if refusal else 0)
    assert calls == [("create", "me/sums"), ("me/sums", "README.md")]
    expected = f"--push-to-hub me/sums: {message}" if refusal else "uploaded: https://huggingface.co/me/sums"
    assert expected in said
    assert (tmp_path / "out" / "model.safetensors").is_file()
