"""Checkpoints: written beside, made durable, then renamed; a killed run finds the last one whole.

A checkpoint is a folder `step_000010` that `transformers` loads as a model, with `optimizer/` and `state.json` for
the trainer, `critic/` and `critic_optimizer/` where there is a critic, and the drafter's files (its rollouts, so that
speculation resumes as good as it was). `manifest.json` has size and CRC-32 of each file, and of the rows of
`metrics.jsonl` up to there: a resume compares them. Nothing random is stored: learning rate, data order, sampling
noise and the seed of the global generators are functions of (seed, step).

Each rank writes its share of the optimizers' states, through torch.distributed.checkpoint: safetensors files, whose
headers say which part of a tensor they hold, and no pickle. Any number of ranks, sharded or not, reads what it needs.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import torch
from torch import Tensor

from srtrl import ranks
from srtrl.files import named_in_errors, new_folder, shown_path, temporary_beside, write_atomic
from srtrl.model.files import weight_files
from srtrl.model.folders import find_adapter, locate
from srtrl.model.weights import save_model
from srtrl.run.steps import checkpoint_name, list_checkpoints, numbered, step_of
from srtrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.model.transformer import Transformer
    from srtrl.recipe.schema import Recipe

FORMAT = 6
"""Version of the layout, of the drafter's files too; a resume refuses another one."""
OPTIMIZER = "optimizer"
"""Moments, and masters or adapters that learn (of a bfloat16 model, and of LoRA): the other files are for decoding."""
ONLY_TRAINING = (OPTIMIZER, "critic", "draft_head")
"""Beginnings of the names of folders that nobody else reads."""
STATE = "state.json"
MANIFEST = "manifest.json"
CHANGED = (
    "--resume: {what} are not those that {checkpoint} has seen; restore them, or begin a new run with name=OTHER "
    "model.path={checkpoint}"
)
BLOCK_BYTES = 2**20
"""Bytes that are read at a time for a checksum."""
FILE_BYTES = 4 * 2**30
"""Bytes of an optimizer's state per file number: each rank writes its part of them, which it holds in memory."""


class Entry(TypedDict):
    """A file, or its first bytes, in the manifest."""

    crc32: int
    size: int


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerState:
    """The state that a run needs, beside the weights, to resume."""

    step: int
    """Training steps done."""
    policy_version: int
    """Policy updates done; differs from `step` where a step had nothing to learn from."""
    num_draws: int
    """Draws of the data order that these steps have used; with dynamic sampling no function of `step`."""
    prompts_sha256: str = ""
    """See `digest_prompts`."""
    model_sha256: str = ""
    """See `digest_models`."""
    teacher_sha256: str = ""
    """See `digest_models`; empty while there was no teacher."""
    format: int = FORMAT


def checkpoint_to_resume(folder: Path, step: int | None = None) -> Path | None:
    """The newest checkpoint of a `checkpoints` folder, or that of `step`, with all files as they were written.

    Returns:
        None where there is no checkpoint at all.

    Raises:
        ValueError: it is damaged (the message names the file and the newest intact one before it), is no folder of its
            own, or there is none of that step.
    """
    for path in numbered(folder):
        if path.is_symlink() or not path.is_dir():
            kind = "a link" if path.is_symlink() else "a file"
            raise ValueError(f"--resume: {path} is {kind}; expected the folder of a checkpoint: move it away")
    checkpoints = list_checkpoints(folder)
    if step is not None:
        names = ", ".join(path.name for path in checkpoints) or "none"
        checkpoints = [path for path in checkpoints if step_of(path) <= step]
        if not checkpoints or step_of(checkpoints[-1]) != step:
            raise ValueError(
                f"--checkpoint {step}: {shown_path(folder)} has no {checkpoint_name(step)}; there: {names}"
            )
    if not checkpoints:
        return None
    *earlier, last = checkpoints
    if (damage := find_damage(last)) is None:
        return last
    intact = next((path for path in reversed(earlier) if find_damage(path) is None), None)
    advice = "no checkpoint before it is intact: restore the file from a copy, or begin again with --overwrite"
    if intact is not None:
        advice = f"{intact} before it is intact: --resume --checkpoint {step_of(intact)} continues from that one"
    raise ValueError(f"{damage}, so {last} is damaged; {advice}")


def find_damage(checkpoint: Path, *, policy_only: bool = False) -> str | None:
    """Find a part that has changed: a file of the checkpoint, or the rows of `metrics.jsonl` up to its step.

    With `policy_only`, rows, optimizers and critic, which only training reads, are left out. None where all is well,
    and for the policy of an earlier version, which has another manifest or none.

    Raises:
        ValueError: there is no manifest of this version, and no state or one of an earlier version.
    """
    manifest, log = checkpoint / MANIFEST, checkpoint.parent.parent / "metrics.jsonl"
    try:
        files, rows = _read_manifest(checkpoint)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        if policy_only and _read_record(checkpoint).get("format") != FORMAT:
            return None
        read_state(checkpoint)  # raises for an earlier version
        return f"{manifest} cannot be read ({type(error).__name__}: {error})"
    if policy_only:
        files = {name: entry for name, entry in files.items() if not name.startswith(ONLY_TRAINING)}
    elif not log.is_file() or _entry(log, rows["size"]) != rows:
        return f"{log} has not all rows as {manifest} lists them"
    damaged = (name for name in files if not (checkpoint / name).is_file() or _entry(checkpoint / name) != files[name])
    return next((f"{checkpoint / name} is missing or not as {MANIFEST} lists it" for name in damaged), None)


def check_policy(checkpoint: Path) -> None:
    """Refuse a checkpoint whose policy is not as it was written; `ValueError` names the file."""
    if damage := find_damage(checkpoint, policy_only=True):
        raise ValueError(f"{damage}, so {checkpoint} is damaged: take another checkpoint, or restore the file")


def _read_manifest(checkpoint: Path) -> tuple[dict[str, Entry], Entry]:
    """The entries of the files, and of the rows of `metrics.jsonl`; LookupError and the like where some are missing."""
    record = json.loads((checkpoint / MANIFEST).read_bytes())
    return dict(record["files"]), Entry(crc32=record["log"]["crc32"], size=record["log"]["size"])


def _entry(file: Path, num_bytes: int | None = None) -> Entry:
    """Size and CRC-32 of a file, or of its first `num_bytes`."""
    entry: Entry = {"crc32": 0, "size": 0}
    with file.open("rb") as stream:
        blocks = iter(partial(stream.read, BLOCK_BYTES), b"") if num_bytes is None else [stream.read(num_bytes)]
        for block in blocks:
            entry = {"crc32": zlib.crc32(block, entry["crc32"]), "size": entry["size"] + len(block)}
    return entry


def digest_prompts(prompts: Iterable[Prompt], checkpoint: Path | None) -> str:
    """SHA-256 of the prompts in order, by their token ids and answers; `ValueError` if it is not the checkpoint's."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((tuple(prompt.token_ids), prompt.answer)).encode())
    if checkpoint is not None and read_state(checkpoint).prompts_sha256 != digest.hexdigest():
        what = "the data of task.options has changed: the training prompts or their answers"
        raise ValueError(CHANGED.format(what=what, checkpoint=checkpoint))
    return digest.hexdigest()


def digest_models(recipe: Recipe, checkpoint: Path | None) -> dict[str, str]:
    """SHA-256 of `model.path` and of `algorithm.teacher.path`, which a run needs beside its checkpoints: see the state.

    A resume uses the model that the run began with as the reference, and as what LoRA adapts; otherwise, its digest is
    what the checkpoint has.

    Raises:
        ValueError: a model is not the checkpoint's.
    """
    state, teacher = None if checkpoint is None else read_state(checkpoint), recipe.algorithm.teacher
    model_sha256, teacher_sha256 = ("", "") if state is None else (state.model_sha256, state.teacher_sha256)
    if state is None or recipe.model.lora is not None or recipe.has_reference:
        model_sha256 = _digest_model("model.path", recipe.model.path, model_sha256, checkpoint)
    if teacher is not None:
        teacher_sha256 = _digest_model("algorithm.teacher.path", teacher.path, teacher_sha256, checkpoint)
    return {"model_sha256": model_sha256, "teacher_sha256": teacher_sha256}


def _digest_model(option: str, path: str, known: str, checkpoint: Path | None) -> str:
    """SHA-256 of the config and the weights of the model (and the adapter) at `path`; must be `known`, if not empty."""
    folder, digest = locate(path), hashlib.sha256()
    adapter = find_adapter(path)
    adapter_files = sorted(adapter.glob("adapter_*")) if adapter else []
    for file in (folder / "config.json", *weight_files(folder), *adapter_files):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").hexdigest().encode())
    if known and known != digest.hexdigest():
        what = f"{option} has changed: config and weights that the run started with, {folder},"
        raise ValueError(CHANGED.format(what=what, checkpoint=checkpoint))
    return digest.hexdigest()


def num_log_bytes(checkpoint: Path) -> int:
    """Bytes of the rows of `metrics.jsonl` up to an intact checkpoint."""
    return _read_manifest(checkpoint)[1]["size"]


class Part(Protocol):
    """Something that a checkpoint holds: it writes files of its own names into the folder, and reads them."""

    def save(self, folder: Path, /) -> None:
        """Write what later steps go on from; on the main rank."""

    def load(self, folder: Path, /) -> None:
        """Take back what `save` has written, on all ranks; ValueError where it cannot be used."""


def save_checkpoint(
    folder: Path,
    state: TrainerState,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    parts: Sequence[Part],
    keep: int,
    best: int | None = None,
) -> Path:
    """Write the checkpoint of `state.step` into `folder`, then delete all but the newest `keep` and that of `best`.

    Weights and `tensors` keep their dtype, so that loading gives the same bits. All ranks call this, with models that
    are whole. Each writes a part of `tensors`, and the main one all else.

    Args:
        folder: The run's `checkpoints`.
        state: The trainer's.
        tensors: By the name of their folder: the state of each optimizer, and what else the ranks share.
        parts: All else, the policy among them (`PolicyFiles`).
        keep: Number of checkpoints that stay.
        best: A step whose checkpoint stays, too.

    Raises:
        OSError: the disk is full or refuses, on any rank; earlier checkpoints are untouched.
        ValueError: a rank does not see the files of another one.
    """
    final = folder / checkpoint_name(state.step)
    with _new_folder(final) as temporary:
        for name, shared in tensors.items():
            _save_tensors(shared, temporary / name)
        if ranks.is_main():
            for part in parts:
                part.save(temporary)
            write_atomic(temporary / STATE, json.dumps(asdict(state), indent=2) + "\n")
            _write_manifest(temporary, folder.parent / "metrics.jsonl")
    if ranks.is_main():
        for old in list_checkpoints(folder)[:-keep]:
            if step_of(old) != best:
                delete(old)
    return final


def _write_manifest(folder: Path, log: Path) -> None:
    """The manifest of the files in `folder`, of all ranks."""
    files = {str(path.relative_to(folder)): _entry(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    write_atomic(folder / MANIFEST, json.dumps({"log": _entry(log), "files": files}, indent=2) + "\n")


@contextmanager
def _new_folder(final: Path) -> Iterator[Path]:
    """`metrics.new_folder` for all ranks, which write into one folder; `final` is there when all have written."""
    with ExitStack() as stack:
        made = ranks.on_main(lambda: stack.enter_context(new_folder(final)), f"making a folder beside {final}")
        temporary = final.with_name(made.name)
        with ranks.synchronized(f"finding {temporary}"):
            if not temporary.is_dir():
                raise ValueError(f"{temporary} of rank 0 is not here: all ranks must share the disk of output_dir")
        with ranks.synchronized(f"writing {temporary}"):
            yield temporary
        ranks.on_main(stack.close, f"renaming {final}")


def _save_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors: each rank its parts, and a share of those that all have; OSError on all ranks if one has it."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    sums = accumulate(tensor.nbytes for tensor in tensors.values())
    number_of = {name: 1 + total // FILE_BYTES for name, total in zip(tensors, sums, strict=True)}
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=number_of, save_distributed=True)
    with named_in_errors(folder), _errors_as_they_were(), ranks.waiting(f"writing {folder}"):
        save(dict(tensors), storage_writer=writer)


@contextmanager
def _errors_as_they_were() -> Iterator[None]:
    """Around torch.distributed.checkpoint: raise the error of the first rank that failed; no warning of one process."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            raise error.failures[min(error.failures)][0] from error


@dataclass(kw_only=True, slots=True, frozen=True)
class PolicyFiles:
    """The policy as a `Part`: a folder that srtrl and `transformers` load, which the trainer reads at its start."""

    model: Transformer
    tokenizer: PreTrainedTokenizerBase
    end_ids: Sequence[int]
    """Token ids that end a response."""
    dtype: torch.dtype | None = None
    """Of the files; by default the model's."""

    def save(self, folder: Path) -> None:
        """Write weights, config, tokenizer and end tokens."""
        save_model(self.model, folder, tokenizer=self.tokenizer, dtype=self.dtype)
        generation = dict(self.model.config.hf_generation_config or {"pad_token_id": self.tokenizer.pad_token_id})
        generation["eos_token_id"] = self.end_ids[0] if len(self.end_ids) == 1 else list(self.end_ids)
        write_atomic(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")

    def load(self, folder: Path) -> None:
        """See `Part`."""


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer's state in a checkpoint folder.

    Raises:
        ValueError: it cannot be read, or was written by another version of the layout.
    """
    record = _read_record(checkpoint)
    if record.get("format") != FORMAT:
        raise ValueError(
            f"{checkpoint / STATE}: format {record.get('format')!r}, but this version of srtrl reads {FORMAT}; "
            f"begin a new run from its weights with name=OTHER model.path={checkpoint}"
        )
    return TrainerState(**record)


def _read_record(checkpoint: Path) -> dict[str, Any]:
    """The content of `state.json`, in any version of the layout."""
    file = checkpoint / STATE
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read ({error})") from error


def load_tensors(checkpoint: Path, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Read the state of the optimizer in the folder `name` into these tensors; each rank reads what it needs alone.

    Raises:
        ValueError: it is of another model.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    folder = checkpoint / name
    reader = HuggingFaceStorageReader(str(folder))
    try:
        saved = reader.read_metadata().state_dict_metadata
        for key in sorted(tensors.keys() | saved.keys()):
            _check_saved(key, tensors.get(key), saved.get(key))
        with _errors_as_they_were():
            load(dict(tensors), storage_reader=reader, no_dist=True)
    except ValueError as error:
        raise ValueError(
            f"{folder}: {error}; begin a new run from its weights with name=OTHER model.path={checkpoint}"
        ) from error


def _check_saved(name: str, tensor: Tensor | None, saved: Any) -> None:
    """Refuse a tensor that only the model or only the checkpoint has, or that differs in shape."""
    if saved is None or tensor is None:
        lacking = "it" if saved is None else "this model"
        raise ValueError(f"{lacking} has no {name}: it is of another model, or of another model.dtype")
    if tensor.shape != saved.size:
        raise ValueError(f"its {name} has shape {list(saved.size)}, this model's {list(tensor.shape)}")


def delete(path: Path) -> None:
    """Delete a file or a folder; renamed first, so that a kill leaves no half folder under a complete one's name."""
    path = path.rename(temporary_beside(path))
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
