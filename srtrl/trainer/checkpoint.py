"""Checkpoints: written beside, made durable, then renamed; a killed run finds the last one whole.

A checkpoint is a folder `step_000010` that `transformers` loads as a model, with `optimizer.pt` and `state.json` for
the trainer, `critic/` and `critic_optimizer.pt` where there is a critic, and the drafter's files (its rollouts, so that
speculation resumes as good as it was). `manifest.json` has size and SHA-256 of each file, and of the rows of
`metrics.jsonl` up to there: a resume compares them. Nothing random is stored: learning rate, data order, sampling
noise and the seed of the global generators are functions of (seed, step).
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from srtrl.metrics import sync_folder, write_atomic
from srtrl.model.attention import HALF_DTYPES
from srtrl.model.value_model import save_value_model
from srtrl.model.weights import save_model
from srtrl.trainer.sharding import load_whole_state, reshard, unshard, whole_state
from srtrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.drafters.base import DrafterBase
    from srtrl.model.transformer import Transformer
    from srtrl.trainer.critic import Critic

FORMAT = 2
"""Version of the layout; a resume refuses another one."""
OPTIMIZER = "optimizer.pt"
"""Moments and, for a bfloat16 model, its float32 master weights: the model's own files are for whoever decodes it."""
CRITIC_FOLDER = "critic"
CRITIC_OPTIMIZER = "critic_optimizer.pt"
MANIFEST = "manifest.json"


class Entry(TypedDict):
    """A file, or its first bytes, in the manifest."""

    sha256: str
    size: int


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerState:
    """What a run must know, beside the weights, to resume."""

    step: int
    """Training steps done."""
    policy_version: int
    """Policy updates done; differs from `step` where a step had nothing to learn from."""
    num_draws: int
    """Draws of the data order that these steps have used; with dynamic sampling no function of `step`."""
    kl_coefficient: float
    """The KL coefficient of the next step; the recipe's where it is not adaptive."""
    prompts_sha256: str = ""
    """`prompts_digest` of the training prompts; empty in checkpoints of earlier versions, which have no manifest."""
    format: int = FORMAT


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint of `step`."""
    return f"step_{step:06d}"


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in a `checkpoints` folder, or None."""
    found = list_checkpoints(folder)
    return found[-1] if found else None


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first (one being written has a name that begins with a dot)."""
    found = [path for path in folder.glob("step_*") if path.is_dir() and path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def checkpoint_to_resume(folder: Path, step: int | None = None) -> Path | None:
    """The newest checkpoint of a `checkpoints` folder, or that of `step`, with all files as they were written.

    Returns:
        None where there is no checkpoint at all.

    Raises:
        ValueError: it is damaged (the message names the file and the newest intact one before it), is no folder of its
            own, or there is none of that step.
    """
    for path in folder.glob("step_*"):
        if path.is_symlink() or not path.is_dir():
            kind = "a link" if path.is_symlink() else "a file"
            raise ValueError(f"--resume: {path} is {kind}; expected the folder of a checkpoint: move it away")
    found = list_checkpoints(folder)
    if step is not None:
        known = ", ".join(path.name for path in found) or "none"
        found = [path for path in found if int(path.name[5:]) <= step]
        if not found or int(found[-1].name[5:]) != step:
            raise ValueError(f"--checkpoint {step}: {folder} has no {checkpoint_name(step)}; there: {known}")
    if not found:
        return None
    if (damage := find_damage(found[-1])) is None:
        return found[-1]
    intact = next((path for path in reversed(found[:-1]) if find_damage(path) is None), None)
    advice = "no checkpoint before it is intact: restore the file from a copy, or begin again with --overwrite"
    if intact is not None:
        advice = f"{intact} before it is intact: --resume --checkpoint {int(intact.name[5:])} continues from that one"
    raise ValueError(f"{damage}, so {found[-1]} is damaged; {advice}")


def find_damage(checkpoint: Path, *, policy_only: bool = False) -> str | None:
    """What is not as it was written: a file of the checkpoint, or the rows of `metrics.jsonl` up to its step.

    With `policy_only`, rows, optimizers and critic, which only training reads, are left out. None where all is well,
    and for a checkpoint of an earlier version, which has no manifest.

    Raises:
        ValueError: there is no manifest and no state.
    """
    manifest, log = checkpoint / MANIFEST, checkpoint.parent.parent / "metrics.jsonl"
    if not manifest.is_file():
        return f"{manifest} is missing" if read_state(checkpoint).prompts_sha256 else None
    try:
        files, rows = _read_manifest(checkpoint)
    except (ValueError, LookupError, TypeError) as error:
        return f"{manifest} cannot be read ({type(error).__name__}: {error})"
    if policy_only:
        files = {name: entry for name, entry in files.items() if not name.startswith((OPTIMIZER, CRITIC_FOLDER))}
    elif not log.is_file() or _entry(log, rows["size"]) != rows:
        return f"{log} has not all rows as they were written"
    damaged = (name for name in files if not (checkpoint / name).is_file() or _entry(checkpoint / name) != files[name])
    return next((f"{checkpoint / name} is missing or not as it was written" for name in damaged), None)


def check_policy(checkpoint: Path) -> None:
    """Refuse a checkpoint whose policy is not as it was written; `ValueError` names the file."""
    if damage := find_damage(checkpoint, policy_only=True):
        raise ValueError(f"{damage}, so {checkpoint} is damaged: take another checkpoint, or restore the file")


def _read_manifest(checkpoint: Path) -> tuple[dict[str, Entry], Entry]:
    """The entries of the files, and of the rows of `metrics.jsonl`; LookupError and the like where it has none."""
    record = json.loads((checkpoint / MANIFEST).read_bytes())
    return dict(record["files"]), {"sha256": record["log"]["sha256"], "size": int(record["log"]["size"])}


def _entry(file: Path, num_bytes: int | None = None) -> Entry:
    """Size and SHA-256 of a file, or of its first `num_bytes`."""
    with io.BytesIO(file.read_bytes()[:num_bytes]) if num_bytes is not None else file.open("rb") as stream:
        return {"sha256": hashlib.file_digest(stream, "sha256").hexdigest(), "size": stream.seek(0, io.SEEK_END)}


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """SHA-256 of the prompts in order, by their token ids and answers."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((tuple(prompt.token_ids), prompt.answer)).encode())
    return digest.hexdigest()


def check_prompts(checkpoint: Path, digest: str) -> None:
    """Refuse to resume on other training prompts than those of the checkpoint; `digest` is that of `prompts_digest`."""
    if read_state(checkpoint).prompts_sha256 not in ("", digest):
        raise ValueError(
            "--resume: the data of task.options has changed: the training prompts or their answers are not those that "
            f"{checkpoint} has seen; restore them, or begin a new run with name=OTHER model.path={checkpoint}"
        )


def num_log_bytes(checkpoint: Path) -> int | None:
    """Bytes of the rows of `metrics.jsonl` up to an intact checkpoint; None for one of an earlier version."""
    return _read_manifest(checkpoint)[1]["size"] if (checkpoint / MANIFEST).is_file() else None


def drop_checkpoints(folder: Path, after: int | None) -> None:
    """Delete what a killed run left half-written or half-deleted, and checkpoints later than step `after`, if given."""
    for path in folder.glob(".step_*"):
        shutil.rmtree(path)
    for path in list_checkpoints(folder):
        if after is not None and int(path.name[5:]) > after:
            delete_folder(path)


def save_checkpoint(
    folder: Path,
    state: TrainerState,
    *,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    drafter: DrafterBase,
    keep: int,
    critic: Critic | None = None,
    is_main: bool = True,
) -> Path:
    """Write the checkpoint of `state.step` into `folder`, then delete all but the newest `keep`.

    Weights and optimizer state keep their dtype, so that loading gives the same bits. All ranks call this, with `model`
    unsharded; the main one writes, and what it writes does not depend on their number or on sharding.

    Raises:
        OSError: the disk is full or refuses; earlier checkpoints are untouched.
    """
    final = folder / checkpoint_name(state.step)
    is_half = model.dtype in HALF_DTYPES
    moments = whole_state(optimizer, model, is_half=is_half, keep=is_main)
    critic_moments: dict[str, Any] = {}
    if critic is not None:
        critic_moments = whole_state(critic.optimizer, critic.model, is_half=is_half, keep=is_main)
        unshard(critic.model)
    if is_main:
        _write(final, state, model, moments, tokenizer, end_ids, drafter, critic, critic_moments)
        for old in list_checkpoints(folder)[:-keep]:
            delete_folder(old)
    if critic is not None:
        reshard(critic.model)
    return final


def _write(
    final: Path,
    state: TrainerState,
    model: Transformer,
    moments: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    drafter: DrafterBase,
    critic: Critic | None,
    critic_moments: dict[str, Any],
) -> None:
    with written_beside(final) as temporary:
        save_policy(temporary, model=model, tokenizer=tokenizer, end_ids=end_ids)
        torch.save(moments, temporary / OPTIMIZER)
        if critic is not None:
            save_value_model(critic.model, temporary / CRITIC_FOLDER)
            torch.save(critic_moments, temporary / CRITIC_OPTIMIZER)
        drafter.save(temporary)
        write_atomic(temporary / "state.json", json.dumps(asdict(state), indent=2) + "\n")
        files = [path for path in sorted(temporary.rglob("*")) if path.is_file()]
        entries = {str(path.relative_to(temporary)): _entry(path) for path in files}
        manifest = {"log": _entry(final.parent.parent / "metrics.jsonl"), "files": entries}
        write_atomic(temporary / MANIFEST, json.dumps(manifest, indent=2) + "\n")


@contextmanager
def written_beside(final: Path) -> Iterator[Path]:
    """A new folder to write into; where that succeeds it is made durable and becomes `final`, in place of an old one.

    So `final` is whole or as it was before.
    """
    temporary = final.with_name(f".{final.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    for path in (*temporary.rglob("*"), temporary):
        sync_folder(path)  # files as well
    if final.exists():
        delete_folder(final)
    temporary.rename(final)
    sync_folder(final.parent)


def save_policy(
    folder: Path,
    *,
    model: Transformer,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    dtype: torch.dtype | None = None,
) -> None:
    """Write weights, config, tokenizer and end tokens: a folder that srtrl and `transformers` load."""
    save_model(model, folder, tokenizer=tokenizer, dtype=dtype)
    generation = dict(model.config.hf_generation_config or {"pad_token_id": tokenizer.pad_token_id})
    generation["eos_token_id"] = end_ids[0] if len(end_ids) == 1 else list(end_ids)
    write_atomic(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer's state in a checkpoint folder.

    Raises:
        ValueError: it cannot be read, or was written by another version of the layout.
    """
    file = checkpoint / "state.json"
    try:
        record = dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{file} cannot be read ({error})") from error
    if record.get("format") != FORMAT:
        raise ValueError(
            f"{file}: format {record.get('format')!r}, but this version of srtrl reads {FORMAT}; "
            f"begin a new run from its weights with name=OTHER model.path={checkpoint}"
        )
    return TrainerState(**record)


def load_training_state(
    checkpoint: Path, optimizer: torch.optim.Optimizer, critic: Critic | None = None
) -> TrainerState:
    """Put the optimizers' states back; the weights are loaded like any model's.

    Raises:
        ValueError: written by another version of the layout, or for another model.
    """
    _load_optimizer(optimizer, checkpoint / OPTIMIZER)
    if critic is not None:
        _load_optimizer(critic.optimizer, checkpoint / CRITIC_OPTIMIZER)
    return read_state(checkpoint)


def _load_optimizer(optimizer: torch.optim.Optimizer, file: Path) -> None:
    optimizer.state.clear()  # or the old moments and the new would be on the device together
    try:
        load_whole_state(optimizer, torch.load(file, map_location="cpu", weights_only=True))
    except (ValueError, RuntimeError, OSError, EOFError, UnpicklingError) as error:  # the last four: a damaged file
        raise ValueError(
            f"{file}: {error}; begin a new run from its weights with name=OTHER model.path={file.parent}"
        ) from error


def delete_folder(folder: Path) -> None:
    """Rename first: a kill while deleting must not leave half a folder under a complete one's name."""
    doomed = folder.with_name(f".{folder.name}.deleting")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)
