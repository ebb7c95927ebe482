"""Folders of models and tokenizers, and the tokenizer; nothing here imports torch, which takes seconds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import huggingface_hub

from srtrl.resolve import Caught, regular_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUNDLED_FOLDER = Path(__file__).parent / "bundled"
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
ADAPTER_CONFIG = "adapter_config.json"
EXPECTED = "a folder that exists, bundled:NAME, or the name of a hub model that this machine can reach"
HUB_NAME = re.compile(r"([\w.-]+/)?[\w.-]+", re.ASCII)
"""NAME, or OWNER/NAME."""


def locate(path: str | Path) -> Path:
    """Folder of a model or tokenizer: `bundled:NAME`, a local folder, or a hub name (downloaded to the hub's cache).

    That of an adapter is the folder of its base model.

    Raises:
        ValueError: There is no such bundled model, local folder or hub repository, or the hub cannot be reached.
    """
    adapter = find_adapter(path)
    return _find_folder(path if adapter is None else base_of(adapter))


def find_adapter(path: str | Path) -> Path | None:
    """The folder at `path`, found as by `locate`, where it holds an adapter and no model; else None."""
    folder = _find_folder(path)
    return folder if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file() else None


def base_of(adapter: Path) -> str:
    """The base model that the adapter in a folder names, as for `locate`; ValueError where that is no model."""
    base = read_json(file := adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or find_adapter(base) is not None:  # a chain of adapters, or a circle
        raise ValueError(f"{file}: base_model_name_or_path is {base!r}; expected a model that is no adapter itself")
    return base


def base_name(path: str | Path) -> str:
    """The name of the model at `path` in an adapter's config: that of the hub, or the absolute path of a folder."""
    if (adapter := find_adapter(path)) is not None:
        return base_name(base_of(adapter))
    is_local = str(path).startswith("bundled:") or Path(path).expanduser().is_dir()
    return str(locate(path).resolve()) if is_local else str(path)


def _find_folder(path: str | Path) -> Path:
    """See `locate`."""
    name = str(path)
    if name.startswith("bundled:"):
        folder = BUNDLED_FOLDER / name.removeprefix("bundled:")
        if not folder.is_dir() or folder.parent != BUNDLED_FOLDER:
            bundled = sorted(entry.name for entry in BUNDLED_FOLDER.glob("*/"))
            raise ValueError(f"{name}: no such bundled model; bundled are: {', '.join(bundled)}")
        return folder
    folder = Path(path).expanduser()
    if folder.is_dir():
        for file in folder.glob("*.*"):
            if file.suffix in (".json", ".jinja", ".safetensors", ".model", ".txt"):
                regular_file(file)
        return folder
    if folder.exists():
        raise ValueError(f"{name}: a file; expected a folder in Hugging Face layout (config.json, *.safetensors, ...)")
    if is_local(name):
        raise ValueError(f"{name}: there is no such folder; expected {EXPECTED}")
    try:
        snapshot = huggingface_hub.snapshot_download(
            name,
            allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
            ignore_patterns=["*/*", "consolidated*"],  # other formats of the same weights
        )
    except (OSError, ValueError) as error:  # every error of the hub and of the network is one of the two
        reason = re.split(r"\n|(?<=\.) ", str(error))[0]  # advice of the hub's library follows
        raise ValueError(
            f"{name}: not a local folder, and it could not be downloaded from the Hugging Face hub; expected "
            f"{EXPECTED} ({type(error).__name__}: {reason})"
        ) from error
    return Path(snapshot)


def is_local(path: str) -> bool:
    """Whether a path of a model is a folder, existing or not; else it is a name on the hub."""
    is_path = path.startswith(("bundled:", ".", "/", "~")) or not HUB_NAME.fullmatch(path)
    return is_path or Path(path).exists()


def has_tokenizer(path: str | Path) -> bool:
    """Whether there is a tokenizer in the folder at `path` (see `locate`)."""
    folder = locate(path)
    return any((folder / name).is_file() for name in _VOCABULARY_FILES)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Tokenizer of the model or tokenizer folder at `path` (see `locate`).

    Raises:
        ValueError: No such folder, or no tokenizer in it that `transformers` reads.
    """
    folder = locate(path)
    if not has_tokenizer(folder):  # transformers would make an empty tokenizer
        raise ValueError(f"{folder}: no tokenizer in this folder; expected one of {', '.join(_VOCABULARY_FILES)}")
    with Caught() as caught:  # damaged files raise anything
        import transformers

        name = "TokenizersBackend" if _has_plain_tokenizer(folder) else "AutoTokenizer"
        loaded = getattr(transformers, name).from_pretrained(folder, trust_remote_code=False)
        loaded.decode(loaded("")["input_ids"])  # values of other types than they should have are noticed here
        return cast("PreTrainedTokenizerBase", loaded)
    reason = f"{caught.error} ({type(caught.error).__name__})"
    raise ValueError(f"{folder}: transformers reads no tokenizer from this folder: {reason}") from caught.error


def _has_plain_tokenizer(folder: Path) -> bool:
    """Whether `AutoTokenizer` would choose the class `TokenizersBackend`; to ask it takes two seconds of imports."""
    config, tokenizer = (
        read_json(file) if (file := folder / name).is_file() else {}
        for name in ("config.json", "tokenizer_config.json")
    )
    is_named = tokenizer.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in tokenizer
    return is_named and (folder / "tokenizer.json").is_file() and config.get("model_type") == "llama"


def end_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Tokens that end a response: those of the generation config, of the config and of the tokenizer, sorted.

    Raises:
        ValueError: No such folder, or an `eos_token_id` that is neither an integer nor a list of integers.
    """
    folder = locate(path)
    ids = set()
    for file in (folder / "config.json", folder / "generation_config.json"):
        value = read_json(file).get("eos_token_id") if file.is_file() else None
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and abs(token) < 2**31 for token in values):
            raise ValueError(f"{file}: eos_token_id is {value!r}; expected an integer or a list of integers")
        ids.update(values)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError, which names the file, if it has none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
        raise ValueError(f"{file}: no readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, found a {type(value).__name__}")
    return value
