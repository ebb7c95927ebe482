"""Families of models against `transformers`: logits, greedy tokens, the update, and what is saved."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import decode, make_request, options
from family_cases import FAMILIES, make_checkpoint
from model_cases import hf_logits, random_sequences
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from srtrl.cli import app
from srtrl.engine.engine import Engine
from srtrl.features.lora import LoraAdamW
from srtrl.metrics import read_metrics
from srtrl.model.attention import PackedPlan
from srtrl.model.folders import load_tokenizer, locate
from srtrl.model.logprobs import token_logprobs
from srtrl.model.weights import load_model, save_model
from srtrl.recipe.schema import LoraSection
from srtrl.run.step_metrics import model_flops

LENGTHS = (5, 1, 23, 40)


def test_the_table_of_families_has_each_that_is_compared() -> None:
    table = (Path(__file__).parent.parent / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| `(\w+)` \|", table, re.MULTILINE)
    listed = {(name, model_type) for names, model_type in rows[1:] for name in names.split(", ")}
    assert {(name, fields["model_type"]) for name, fields in FAMILIES.items()} <= listed
    compared = {fields["model_type"] for fields in FAMILIES.values()}
    assert {model_type for _, model_type in listed} == compared | {"llama"}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    hf_model: Any = make_checkpoint(name, tmp_path / "hf")
    model = load_model(tmp_path / "hf", dtype=torch.float64, device="cpu")
    sequences = random_sequences(model.config.vocab_size, LENGTHS)
    with torch.no_grad():
        expected = hf_logits(hf_model, sequences)
        logits = model.logits(model(torch.cat(sequences), PackedPlan(LENGTHS, "cpu")))
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)

    prompt = sequences[0].tolist()
    greedy = hf_model.generate(sequences[0][None], do_sample=False, max_new_tokens=30, eos_token_id=None)[0, 5:]
    policy = load_model(tmp_path / "hf", dtype=torch.float32, device="cpu")
    engine = Engine(policy, options(max_sequence_tokens=40))
    (completion,) = decode(engine, [make_request(prompt=prompt, max_new_tokens=30, temperature=0.0)]).values()
    assert completion.response.token_ids.tolist() == greedy.tolist()
    with torch.no_grad():
        hidden = model(torch.cat((sequences[0], greedy)), PackedPlan([35], "cpu"))[4:-1]
        logprobs, _ = token_logprobs(hidden, model.head_weight, greedy, temperature=1.0)
    torch.testing.assert_close(logprobs.float(), torch.tensor(completion.response.rollout_logprobs), rtol=0, atol=5e-5)

    save_model(model, tmp_path / "ours")
    loading: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    loaded, info = loading
    assert set(info.pop("unexpected_keys")) <= model.carried.keys()
    assert not any(info.values()), info  # no missing or mismatched keys
    saved, given = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "hf"))
    for tensor_name, tensor in saved.items():
        original = given.get(tensor_name, given.get(f"language_model.{tensor_name}"))
        assert original is not None
        assert torch.equal(tensor, original.to(tensor))
    assert saved.keys() >= model.carried.keys()
    assert bool(model.carried) == (name == "MiMo-7B")
    linears = {
        key: one.weight for key, one in loaded.named_modules() if isinstance(one, nn.Linear) and key != "lm_head"
    }
    optimizer = LoraAdamW(model, LoraSection(rank=2), seed=0, lr=1e-3)
    assert {one.name: one.weight.shape for one in optimizer.matrices} == {key: w.shape for key, w in linears.items()}
    attention = 4 * 3 * model.config.num_hidden_layers * model.config.num_attention_heads * model.config.head_dim
    assert model_flops(model.config, [1], num_targets=0) == 6 * sum(w.numel() for w in linears.values()) + attention


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_checked_and_trained(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_checkpoint(name, tmp_path / "model", torch.float32, vocab_size=len(load_tokenizer("bundled:tiny")))
    for file in locate("bundled:tiny").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    options = "model.path=model rollout.max_prompt_tokens=24 rollout.max_new_tokens=16 rollout.num_prompts=2"
    options += " rollout.num_samples=4 train.num_steps=2 train.micro_batch_tokens=64 eval.before_and_after=false"
    checked = CliRunner().invoke(app, f"show-config quickstart --check --gpu 2 {options}".split())
    assert "verdict: all names, options and paths are correct; fits a GPU of 2 GiB" in checked.output
    trained = CliRunner().invoke(app, f"train quickstart {options}".split())
    assert trained.exit_code == 0, trained.output
    _, after = (row["logprob_difference/max"] for row in read_metrics(Path("runs/quickstart/metrics.jsonl")))
    assert after < 1e-4
    AutoModelForCausalLM.from_pretrained(Path("runs/quickstart/checkpoints/step_000002"))
