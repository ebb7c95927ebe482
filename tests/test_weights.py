"""Models in and out: what is read, what is refused and how, and that saved folders are whole."""

import json
import re
import resource
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from test_bad_input import parsed
from torch import Tensor

from srtrl.model import folders
from srtrl.model.folders import end_token_ids, load_tokenizer, locate
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Transformer
from srtrl.model.weights import init_model, load_model, named_tensors, read_config, save_model

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


def test_saving_in_another_dtype_rounds_and_says_so(folder: Path, tmp_path: Path) -> None:
    _edit_json(folder / "config.json", torch_dtype="float32")  # as before transformers 5
    model = _load(folder)
    save_model(model, tmp_path / "half", dtype=torch.bfloat16)
    saved_config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert saved_config["dtype"] == "bfloat16"
    assert "torch_dtype" not in saved_config
    saved = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor.bfloat16()) for name, tensor in named_tensors(model).items())
    with pytest.raises(ValueError, match="already holds weights"):
        save_model(model, tmp_path / "half")
    rounded = _load(folder, torch.bfloat16)
    assert all(torch.equal(saved[name], tensor) for name, tensor in named_tensors(rounded).items())


def test_what_is_beside_the_weights_is_kept_and_end_tokens_are_the_union_of_all_sources(
    folder: Path, shared_data: Path, tmp_path: Path
) -> None:
    source = shared_data / "models" / "stories260K"
    tokenizer = load_tokenizer(source)
    save_model(_load(source), tmp_path / "copy", tokenizer=tokenizer)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "copy" / name).read_text()) == json.loads((source / name).read_text())
    text = "Once upon a time"
    assert load_tokenizer(tmp_path / "copy")(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert end_token_ids(folder, None) == ()
    assert end_token_ids(folder, tokenizer) == (2,)
    _edit_json(folder / "config.json", eos_token_id=7)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 7, 4]}')
    assert end_token_ids(folder, tokenizer) == (2, 4, 7, 9)
    tokenizer.eos_token = "a"  # not the 2 that transformers takes for Llama where the config names none
    model = init_model(config_from_hf(FIELDS | {"vocab_size": 512}), 0, torch.float32, "cpu")
    save_model(model, tmp_path / "new", tokenizer=tokenizer)
    assert end_token_ids(tmp_path / "new", None) == (tokenizer.eos_token_id,) != (2,)


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


def test_what_a_config_asks_for_in_vain_is_refused_by_name(folder: Path) -> None:
    rows = [(json.loads(fields), message) for fields, message in parsed("configs")]
    for names, values, expected in parsed("numbers"):
        cases = [(name, value) for name in names.split() for value in json.loads(values)]
        rows += [({name: value}, f"{name} is {value!r}; expected {expected}") for name, value in cases]
    config = (folder / "config.json").read_text()
    for fields, message in rows:
        _edit_json(folder / "config.json", **fields)
        with pytest.raises(ValueError, match=re.escape(f"config.json: {message}")):
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
    download.side_effect = LocalEntryNotFoundError("no connection\nAdvice of the hub")
    with pytest.raises(ValueError, match=r"someone/other: not a local folder.*no connection\)$"):
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
INDEX, EMBEDDING, NORM = "model.safetensors.index.json", "model.embed_tokens.weight", "model.norm.weight"
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
"""Files that were written, and lost, before the weights are read."""


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
    assert tensors.keys() == new.keys()
    assert all(torch.equal(tensor, new[name]) for name, tensor in tensors.items())


def test_files_that_are_no_whole_save_are_refused(folder: Path) -> None:
    """`place TENSOR FILE` is the index that says so; `more`, `less` and others are shards with other tensors."""
    tensors = load_file(folder / "model.safetensors")
    write_shards(folder, tensors, [A, B])
    first, second = load_file(folder / A), load_file(folder / B)
    save_file(second | {EMBEDDING: tensors[EMBEDDING]}, folder / "more")
    save_file({name: first[name] for name in first if name != EMBEDDING}, folder / "less")
    save_file(second | {"extra": torch.ones(25)}, folder / "extra")
    save_file(first | {EMBEDDING: tensors[EMBEDDING].char()}, folder / "int8")
    save_file(second | {NORM: torch.ones(25)}, folder / "longer")
    files = {"A": A, "B": B, "INDEX": INDEX}
    for row, message in parsed("weights"):
        for file in folder.glob("model*"):
            file.unlink()
        write_shards(folder, tensors, [A, B])
        command = Template(row).substitute(files)
        if command.startswith("place "):
            _, name, place = command.split()
            index = json.loads((folder / INDEX).read_text())
            index["weight_map"][name] = int(place) if place.isdigit() else place
            (folder / INDEX).write_text(json.dumps(index))
        else:
            subprocess.run(command, shell=True, cwd=folder, check=True)
        with pytest.raises(ValueError, match=re.escape(Template(message).substitute(files))):
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
