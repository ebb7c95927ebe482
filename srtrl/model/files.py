"""The files of a model folder: which safetensors files hold its weights, and how they are read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from srtrl.model.folders import read_json

_SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def weight_files(folder: Path) -> Sequence[Path]:
    """The safetensors files of a model folder: those that its index names, or the single file, as in `transformers`.

    Shards without an index are read if they are all of one save. Other files are those of earlier saves.

    Raises:
        ValueError: there are no weights, a file that the index names is missing, or there are two whole saves.
    """
    single, named = folder / _SINGLE_FILE, sorted(set(read_index(folder).values()))
    missing = ", ".join(file.name for file in named if not file.is_file())
    if single.is_file() and (missing or not named):
        return [single]
    if missing:
        raise ValueError(f"{folder / INDEX_FILE} names files that are missing: {missing}; is the download complete?")
    if single.is_file() and single not in named:  # which is the newer one?
        raise ValueError(f"{folder}: holds {_SINGLE_FILE} and the files of {INDEX_FILE}: delete one of the two saves")
    if named:
        return named
    files = sorted(folder.glob("model-*-of-*.safetensors"))
    numbers = [[*map(int, re.findall(r"[0-9]+", file.stem))] for file in files]
    if not files:
        convert = "convert it once: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        raise ValueError(f"{folder}: no safetensors weights; another format (pytorch_model.bin) is not read; {convert}")
    if numbers != [[index + 1, len(files)] for index in range(len(files))]:
        raise ValueError(f"{folder}: no {INDEX_FILE}, and its model-*-of-*.safetensors are not one whole save")
    return files


def read_index(folder: Path) -> dict[str, Path]:
    """The file of each tensor by the index of a model's folder; empty where there is none."""
    if not ((index := folder / INDEX_FILE).exists() or index.is_symlink()):
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map is {weight_map!r:.80}; expected the file of each tensor")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: the file of {name} is {file!r:.80}; expected the name of a file in this folder")
    return {name: folder / file for name, file in weight_map.items()}


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """An open safetensors file.

    Raises:
        ValueError: it is not readable.
    """
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file}: no readable safetensors file ({error}); is the download complete? .bin files are not read"
        ) from error


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a safetensors file by name, one at a time.

    Raises:
        ValueError: the file is not readable, or a tensor is not of a floating-point type.
    """
    with opened(file) as tensors:
        for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
            tensor = tensors.get_tensor(name)
            if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                raise ValueError(
                    f"{file}: tensor {name} is {tensor.dtype}; supported: unquantised weights "
                    "(float32, bfloat16, float16, float64)"
                )
            yield name, tensor


@contextmanager
def full_disk_as_os_error(path: Path) -> Iterator[None]:
    """Raise what safetensors cannot write as the OSError that it was."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
