"""Models in and out: what is read, what is refused and how, and that saved folders are whole."""

import json
import math
import os
import re
import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from model_cases import CASES, ModelCase, hf_logits, load_ours, make_hf_model, random_sequences
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from srtrl.model import folders
from srtrl.model.folders import end_token_ids, load_tokenizer, locate
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Transformer
from srtrl.model.weights import init_model, load_model, named_tensors, read_config, save_model

LENGTHS = (30, 7)
FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A loadable folder of a small tied Llama, written by us."""
    save_model(init_model(config_from_hf(FIELDS), 0, torch.float32, "cpu"), tmp_path / "model")
    return tmp_path / "model"


def _load(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    return load_model(folder, dtype=dtype, device="cpu")


def _edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def _edit_json(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_saved_models_are_the_same_in_transformers_and_here(case: ModelCase, tmp_path: Path) -> None:
    hf_model = make_hf_model(case, torch.float32)
    is_sharded = "-bias" in case.name
    model = load_ours(hf_model, tmp_path / "hf", torch.float32, 3000 if is_sharded else 10**9)
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == is_sharded
    save_model(model, tmp_path / "ours")

    loading: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    loaded, info = loading
    assert not any(info.values()), info  # no missing, unexpected or mismatched keys
    sequences = random_sequences(case.fields["vocab_size"], LENGTHS)
    with torch.no_grad():
        assert torch.equal(hf_logits(loaded, sequences), hf_logits(hf_model, sequences))
    again = _load(tmp_path / "ours")
    assert again.config == model.config
    pairs = zip(again.named_parameters(), model.named_parameters(), strict=True)
    assert all(name == other and torch.equal(weight, same) for (name, weight), (other, same) in pairs)


def test_saving_in_another_dtype_rounds_and_says_so(folder: Path, tmp_path: Path) -> None:
    _edit_json(folder / "config.json", torch_dtype="float32")  # as before transformers 5
    model = _load(folder)
    save_model(model, tmp_path / "half", dtype=torch.bfloat16)
    saved_config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert saved_config["dtype"] == "bfloat16"
    assert "torch_dtype" not in saved_config
    assert AutoConfig.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
    saved = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor.bfloat16()) for name, tensor in named_tensors(model).items())
    with pytest.raises(ValueError, match="already holds weights"):
        save_model(model, tmp_path / "half")
    rounded = _load(folder, torch.bfloat16)
    assert all(torch.equal(saved[name], tensor) for name, tensor in named_tensors(rounded).items())


def test_saving_keeps_the_config_and_the_generation_config(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "models" / "stories260K"
    tokenizer = load_tokenizer(source)
    save_model(_load(source), tmp_path, tokenizer=tokenizer)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((source / name).read_text())
    text = "Once upon a time"
    assert load_tokenizer(tmp_path)(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_end_tokens_are_the_union_of_all_sources(folder: Path, shared_data: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "models" / "stories260K")
    tokenizer.eos_token = "a"  # not the 2 that transformers takes for Llama where the config names none
    model = init_model(config_from_hf(FIELDS | {"vocab_size": 512}), 0, torch.float32, "cpu")
    save_model(model, tmp_path / "new", tokenizer=tokenizer)
    assert end_token_ids(tmp_path / "new", None) == (tokenizer.eos_token_id,) != (2,)
    tokenizer = load_tokenizer(shared_data / "models" / "stories260K")
    assert end_token_ids(folder, None) == ()
    assert end_token_ids(folder, tokenizer) == (2,)
    _edit_json(folder / "config.json", eos_token_id=7)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 7, 4]}')
    assert end_token_ids(folder, tokenizer) == (2, 4, 7, 9)
    _edit_json(folder / "config.json", eos_token_id="</s>")
    with pytest.raises(ValueError, match=r"config\.json: eos_token_id is '</s>'"):
        end_token_ids(folder, tokenizer)


def test_tied_head_in_the_file_is_read_only_if_it_is_the_embedding(folder: Path) -> None:
    before = _load(folder)
    _edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}))
    _edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(_load(folder).head_weight, before.embedding)
    assert torch.equal(_load(folder, torch.bfloat16).head_weight, before.embedding.bfloat16())
    _edit_tensors(folder, lambda t: t["lm_head.weight"].add_(1e-3))
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor lm_head\.weight differs"):
        _load(folder)
    _edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    _edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lack 1 of 75 tensors: lm_head\.weight"):
        _load(folder)


HYBRID: dict[str, Any] = {"model_type": "granitemoehybrid", "mamba_n_heads": 4, "mamba_d_head": 12}
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mixtral"}, "model_type is 'mixtral'; supported: llama, qwen2, qwen3, mistral"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
    ({"layer_types": ["chunked_attention"] * 8}, "layer_types is .*; supported: full_attention, sliding_attention"),
    (HYBRID | {"layer_types": ["attention"] * 8}, "num_local_experts is 8; supported: 0"),
    (
        HYBRID | {"num_local_experts": 0, "position_embedding_type": "rope"},
        "layer_types is .*'linear_attention'.*; supported: full_attention",
    ),
    ({"quantization_config": {"x": 1}}, "quantization_config is {'x': 1}; supported: none: save dequantized weights"),
    ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters is .*'proportional'.*; supported: rope_"),
    ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_parameters is .* for the whole head"),
    ({"rope_parameters": {"mrope_section": [1, 2]}}, "rope_parameters is .*mrope_section.*, without mrope_section"),
    ({"auto_map": 5, "rope_scaling": {"rope_type": "x", "factor": 4.0}}, "rope_parameters is"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3; supported: divisors of 4 heads"),
    ({"head_dim": 7}, "transformers cannot read this config: .*head_dim"),
    ({"rms_norm_eps": None}, "transformers cannot read this config: .*rms_norm_eps"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling: factor is 0; expected a number"),
    ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters: rope_theta is 'x'; expected a number"),
]
NUMBERS: list[tuple[str, list[Any], str]] = [
    ("vocab_size hidden_size intermediate_size", [True, 24.0, "4", [40], 0, 2**31], "an integer from 1 to 1,048,576"),
    ("num_hidden_layers num_attention_heads num_key_value_heads", [True, "4", -4, 10**9], "an integer from 1 to 1,024"),
    ("max_position_embeddings sliding_window", ["4", 0, 2**31], "an integer from 1 to 2,147,483,647"),
    ("rms_norm_eps", ["1e-6", math.nan, -1, 2], "a number from 1e-12 to 1"),
    ("rope_theta", [None, True, math.inf, 0, 1e300], "a number from 1e-12 to 1,000,000,000,000"),
]


def test_what_a_config_asks_for_in_vain_is_refused_by_name(folder: Path) -> None:
    config = (folder / "config.json").read_text()
    numbers = [
        ({name: value}, re.escape(f"{name} is {value!r}; expected {expected}"))
        for names, values, expected in NUMBERS
        for name in names.split()
        for value in values
    ]
    for fields, message in [*UNSUPPORTED, *numbers]:
        _edit_json(folder / "config.json", **fields)
        with pytest.raises(ValueError, match=rf"config\.json: {message}"):
            _load(folder)
        (folder / "config.json").write_text(config)


def test_initial_weights_are_of_their_seed_alone() -> None:
    config = config_from_hf(FIELDS | {"hidden_size": 128, "mlp_bias": True})
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model, same, other = (init_model(config, seed, torch.float32, "cpu") for seed in (3, 3, 4))
    rounded = init_model(config, 3, torch.bfloat16, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    tensors = named_tensors(model)
    assert all(torch.equal(tensor, named_tensors(same)[name]) for name, tensor in tensors.items())
    assert all(torch.equal(tensor.bfloat16(), named_tensors(rounded)[name]) for name, tensor in tensors.items())
    assert not torch.equal(model.embedding, other.embedding)
    for name, tensor in tensors.items():
        if "norm" in name or "bias" in name:
            assert torch.equal(tensor, torch.full_like(tensor, "norm" in name))
        else:
            std = 0.02 / (2 * 8) ** 0.5 if "o_proj" in name or "down_proj" in name else 0.02
            assert abs(tensor.std().item() / std - 1) < 0.06  # 4 standard errors of the smallest tensor
            assert abs(tensor.mean().item()) < 0.1 * std


def test_bundled_models_and_hub_names_are_found_or_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "BUNDLED_FOLDER", tmp_path)
    assert locate(f"bundled:{folder.name}") == folder
    for name in ("bundled:", f"bundled:../{tmp_path.name}"):
        with pytest.raises(ValueError, match="no such bundled model; bundled are: model"):
            locate(name)
    download = Mock(return_value=str(folder))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert _load(Path("someone/model")).config == read_config(folder)
    assert download.call_args.args == ("someone/model",)
    assert "*.bin" not in download.call_args.kwargs["allow_patterns"]
    download.side_effect = LocalEntryNotFoundError("no connection")
    with pytest.raises(ValueError, match=r"someone/other: not a local folder.*no connection"):
        read_config("someone/other")


def write_shards(folder: Path, tensors: dict[str, Tensor], names: Sequence[str]) -> None:
    """Save tensors in files of these names with an index, in place of a single file."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    of = {name: names[place * len(names) // len(tensors)] for place, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name in of if of[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": of}))


def shard_names(count: int, stem: str = "model") -> list[str]:
    return [f"{stem}-{part + 1:05}-of-{count:05}.safetensors" for part in range(count)]


A, B = shard_names(2)
NORM, EMBEDDING, INDEX = "model.norm.weight", "model.embed_tokens.weight", "model.safetensors.index.json"
SAVES: dict[str, list[tuple[str, list[str]]]] = {
    "shards of another save": [("old", shard_names(3)), ("new", shard_names(2))],
    "a part of them": [("old", shard_names(3)), ("lost", shard_names(3)[:1]), ("new", shard_names(4))],
    "other names": [("new", shard_names(2, "model.safetensors"))],
    "any names": [("new", ["b.safetensors", "a.safetensors"])],
    "one file": [("new", ["weights.safetensors"])],
    "the single file, named": [("new", ["model.safetensors"])],
    "no index": [("new", shard_names(3)), ("lost", [INDEX])],
    "the single file, and an index": [("old", shard_names(3)), ("lost", shard_names(3)[1:2]), ("single", [])],
    "the single file, and shards": [("old", shard_names(3)), ("lost", [INDEX]), ("single", [])],
}
"""What was written, and lost, before the weights are read."""


@pytest.mark.parametrize("kind", SAVES)
def test_the_weights_of_the_last_save_are_read(kind: str, folder: Path) -> None:
    new = load_file(folder / "model.safetensors")
    old = {name: torch.randn_like(tensor) for name, tensor in new.items()}
    for what, names in SAVES[kind]:
        if what == "lost":
            (folder / names[0]).unlink()
        elif what == "single":
            save_file(new, folder / "model.safetensors")
        else:
            write_shards(folder, old if what == "old" else new, names)
    tensors = named_tensors(_load(folder))
    assert set(tensors) == set(new)
    assert all(torch.equal(tensor, new[name]) for name, tensor in tensors.items())


IN_INDEX: list[tuple[str, object, str]] = [
    (NORM, "nowhere.safetensors", f"{INDEX} names files that are missing: nowhere.safetensors"),
    (NORM, f"../{B}", f"{INDEX}: the file of {NORM} is '../{B}'; expected the name of a file in this folder"),
    (NORM, "/etc/passwd", f"{INDEX}: the file of {NORM} is '/etc/passwd'; expected the name of a file"),
    (NORM, "..", f"{INDEX} names files that are missing: .."),
    (NORM, 3, f"{INDEX}: the file of {NORM} is 3; expected the name of a file"),
    (EMBEDDING, B, f"{B}: lacks tensor {EMBEDDING}, which"),
    ("extra", "config.json", "config.json: no readable safetensors file"),
]
"""A tensor and its file in the index of two shards, and the message."""
DAMAGES = {
    f"lose {B}": f"{INDEX} names files that are missing: {B}; is the download complete?",
    f"link {B}": f"{B}: a link to nowhere, which is not there",
    f"pipe {B}": f"{B}: a pipe, a socket or a device; expected a regular file",
    f"cut {B}": f"{B}: no readable safetensors file",
    f"link {INDEX}": f"{INDEX}: a link to nowhere, which is not there",
    f"put {EMBEDDING} {B}": f"{B}: tensor {EMBEDDING} is there twice, for {A} holds it too",
    f"put {EMBEDDING} {B}, drop {EMBEDDING} {A}": f"{A}: lacks tensor {EMBEDDING}, which",
    f"put extra {B}": f"{B}: unexpected tensor extra (a llama has none of this name)",
    f"put {EMBEDDING} {A} int8": f"{EMBEDDING} is torch.int8; supported: unquantised",
    f"put {NORM} {B} longer": f"{B}: tensor {NORM} has shape [25]; by",
    f"copy {A} model.safetensors": f"holds model.safetensors and the files of {INDEX}: delete one of the two saves",
    f"lose {INDEX}, lose {B}": f"no {INDEX}, and its model-*-of-*.safetensors are not one whole save",
    f"lose {INDEX}, copy {B} {shard_names(3)[2]}": "its model-*-of-*.safetensors are not one whole save",
    f"write {INDEX} {{": f"{INDEX}: no readable JSON",
    f"write {INDEX} []": f"{INDEX}: expected a JSON object, found a list",
    f"write {INDEX} {{}}": f"{INDEX}: weight_map is None; expected the file of each tensor",
    f'write {INDEX} {{"weight_map":{{}}}}': f"{INDEX}: weight_map is {{}}; expected",
    f'write {INDEX} {{"weight_map":["a"]}}': f"{INDEX}: weight_map is ['a']; expected",
}
"""Of two shards with an index, and the message."""


def damage(folder: Path, name: str, *more: str) -> None:
    """What a row of the table does; `more` begins with the file, but for tensors."""
    file = folder / (more[1] if name in ("put", "drop") else more[0])
    tensors = load_file(file) if name in ("put", "drop") else {}
    match name, *more:
        case "lose", _:
            file.unlink()
        case "link", _:
            file.unlink()
            file.symlink_to("nowhere")
        case "pipe", _:
            file.unlink()
            os.mkfifo(file)
        case "cut", _:
            file.write_bytes(file.read_bytes()[:-100])
        case "copy", _, other:
            shutil.copy(file, folder / other)
        case "write", _, text:
            file.write_text(text)
        case "drop", tensor_name, _:
            save_file({key: tensor for key, tensor in tensors.items() if key != tensor_name}, file)
        case "put", tensor_name, _, *kind:
            shape = (100, 24) if tensor_name == EMBEDDING else (25,)
            save_file(tensors | {tensor_name: torch.ones(shape, dtype=torch.int8 if kind == ["int8"] else None)}, file)


def test_files_that_are_no_whole_save_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    write_shards(folder, tensors, [A, B])
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    rows = {steps: (message, [step.split() for step in steps.split(", ")]) for steps, message in DAMAGES.items()}
    for name, file, message in IN_INDEX:
        rows[message] = (message, [["write", INDEX, json.dumps({"weight_map": weight_map | {name: file}})]])
    for message, steps in rows.values():
        for file in folder.glob("model*"):
            file.unlink()
        write_shards(folder, tensors, [A, B])
        for step in steps:
            damage(folder, *step)
        with pytest.raises(ValueError, match=re.escape(message)):
            _load(folder)


def test_a_full_disk_while_saving_is_an_os_error(tmp_path: Path) -> None:
    """A limit on the size of files, which safetensors meets as it meets a full disk."""
    model = init_model(config_from_hf(FIELDS), 0, torch.float32, "cpu")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=f"{tmp_path / 'model'}: .*File too large"):
            save_model(model, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
