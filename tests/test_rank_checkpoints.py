"""Checkpoints of several ranks: written by all, read by any number, sharded or not; an error of one leaves the old."""

import hashlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import test_checkpoint
import torch
from rank_cases import FORKED, run_ranks
from test_checkpoint import ADAMW, contents, save
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from srtrl import ranks
from srtrl.features.critic import CRITIC_OPTIMIZER, ValueModel
from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model
from srtrl.ranks import RankError
from srtrl.ranks.sharding import shard, unshard
from srtrl.run import checkpoint
from srtrl.run.checkpoint import OPTIMIZER, find_damage
from srtrl.run.steps import latest_checkpoint
from srtrl.trainer.optimizer import MasterAdamW, build_optimizer

pytestmark = FORKED
Writer = tuple[int, str, torch.dtype]
"""Number of ranks, how they share the state, and the type of the models: bfloat16 has masters."""
WHOLE: list[Writer] = [(1, "ddp", torch.float32), (1, "ddp", torch.bfloat16)]
SHARED: list[Writer] = [(2, "ddp", torch.float32), (2, "fsdp2", torch.bfloat16), (3, "fsdp2", torch.float32)]
STEP = "checkpoints/step_000001"


@dataclass(frozen=True)
class Trained:
    """Policy and critic, and their optimizers."""

    models: tuple[Transformer, ValueModel]
    optimizers: tuple[MasterAdamW, MasterAdamW]

    @property
    def tensors(self) -> dict[tuple[str, str], Tensor]:
        """Each tensor of the two optimizers by name."""
        parts = zip((OPTIMIZER, CRITIC_OPTIMIZER), self.optimizers, strict=True)
        states = [(owner, optimizer.tensors(self.models[0].dtype)) for owner, optimizer in parts]
        return {(owner, name): tensor for owner, state in states for name, tensor in state.items()}

    def load(self, path: Path) -> None:
        for name, optimizer in zip((OPTIMIZER, CRITIC_OPTIMIZER), self.optimizers, strict=True):
            optimizer.load(self.models[0].dtype, path, name)


def make_trained(policy: Path, dtype: torch.dtype, sharding: str) -> Trained:
    """The critic's head of one row leaves some ranks without a part."""
    model, body = (load_model(policy, dtype=dtype, device="cpu") for _ in range(2))
    models = model, ValueModel(body)
    if sharding == "fsdp2":
        for one in models:
            shard(one)
    optimizers = build_optimizer(models[0], **ADAMW), build_optimizer(models[1], **ADAMW)
    unshard(model)
    return Trained(models, optimizers)


def numbers_of(name: tuple[str, str], shape: torch.Size) -> Tensor:
    """Content of a tensor: a function of its name."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(repr(name).encode()).digest()[:6]))
    return torch.randn(shape, generator=generator)


@torch.no_grad()
def write(policy: Path, folder: Path) -> None:
    """A checkpoint of each kind of this number of ranks."""
    for writer in (one for one in WHOLE + SHARED if one[0] == ranks.count()):
        _, sharding, dtype = writer
        trained = make_trained(policy, dtype, sharding)
        for name, tensor in trained.tensors.items():
            full = numbers_of(name, tensor.shape)
            if isinstance(tensor, DTensor):
                full = distribute_tensor(full, tensor.device_mesh, tensor.placements)
            tensor.copy_(full)
        save(policy, folder / str(writer) / "checkpoints", 1, **vars(trained))


def read(policy: Path, folder: Path) -> int:
    """Compare each checkpoint that is there, loaded by this number of ranks; returns the number of tensors."""
    count = 0
    for sharding in ("ddp", "fsdp2") if ranks.count() > 1 else ("ddp",):
        for path, dtype in ((folder / str(writer), writer[2]) for writer in WHOLE + SHARED):
            if not path.exists():
                continue  # three ranks have not written
            trained = make_trained(policy, dtype, sharding)
            trained.load(path / STEP)
            for name, tensor in trained.tensors.items():
                found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                assert torch.equal(found, numbers_of(name, tensor.shape)), (path, sharding, name)
                count += 1
            if isinstance(trained.optimizers[0], MasterAdamW):
                masters = trained.optimizers[0].master_of
                assert all(torch.equal(one, master.bfloat16()) for one, master in masters.items())
    return count


@pytest.fixture
def written(policy: Path, make_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """Folder of the checkpoints of one rank and of two; tests only read it."""

    def make(folder: Path) -> None:
        write(policy, folder)
        run_ranks(2, write, policy, folder)

    return make_once("rank_checkpoints", make)


def check_shares(folder: Path, writer: Writer) -> None:
    """Each rank has written its share of an optimizer once."""
    path, whole = folder / str(writer) / STEP, folder / str((1, "ddp", writer[2])) / STEP
    assert find_damage(path) is None
    sizes = sizes_of(path)
    assert (len(sizes), len(sizes_of(whole))) == (writer[0], 1)
    assert sum(sizes) == sum(sizes_of(whole))
    assert max(sizes) < 1.1 * sum(sizes) / len(sizes)


def test_any_number_of_ranks_reads_what_others_have_written(policy: Path, written: Path) -> None:
    """All numbers have the same bits (compared in `read`)."""
    assert min(read(policy, written), *run_ranks(2, read, policy, written)) > 200
    for writer in SHARED[:2]:
        check_shares(written, writer)


@pytest.mark.slow
def test_three_ranks_read_and_write(policy: Path, written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written, tmp_path / "written"))
    run_ranks(3, write, policy, folder)
    assert min(*run_ranks(3, read, policy, folder), *run_ranks(2, read, policy, folder)) > 200
    check_shares(folder, SHARED[-1])


def sizes_of(path: Path) -> list[int]:
    """Numbers in each file of the optimizers' state."""
    return [sum(one.numel() for one in safetensors.torch.load_file(file).values()) for file in files_of(path)]


def files_of(path: Path) -> list[Path]:
    return sorted((path / "optimizer").iterdir())


def test_large_states_are_written_in_several_files(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host need not hold all of it."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 50_000)
    write(policy, tmp_path)
    path = tmp_path / str(WHOLE[1]) / STEP
    trained = make_trained(policy, torch.bfloat16, "ddp")
    sizes = [file.stat().st_size for file in files_of(path)]
    assert len(sizes) > 3
    assert max(sizes) < 50_000 + 4 * max(one.numel() for one in trained.models[0].parameters()) + 10_000
    trained.load(path)
    assert all(torch.equal(one, numbers_of(name, one.shape)) for name, one in trained.tensors.items())


# --- Errors -----------------------------------------------------------------------------------------------------------


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def fail(policy: Path, folder: Path) -> list[str]:
    """The errors of checkpoints if one rank fails at a time."""
    checkpoints = folder / "checkpoints"
    options = {"keep": 1, **vars(make_trained(policy, torch.bfloat16, "fsdp2"))}
    before = contents(save(policy, checkpoints, 1, **options))
    ranks.gather(0, "the first checkpoint")
    found = []
    for owner, name, index in (
        (safetensors.torch, "save", 1),  # the optimizer's
        (test_checkpoint, "save_value_model", 0),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if ranks.index() == index:
                patch.setattr(owner, name, no_space)
            with pytest.raises((OSError, RankError), match="No space left on device") as caught:
                save(policy, checkpoints, 2, **options)
        found.append(str(caught.value))
    with pytest.raises((ValueError, RankError), match="disk of output_dir") as refused:
        save(policy, checkpoints if ranks.is_main() else folder / "elsewhere" / "checkpoints", 2, **options)
    found.append(str(refused.value))
    assert latest_checkpoint(checkpoints) == folder / STEP
    assert contents(folder / STEP) == before
    ranks.gather(0, "the comparison")
    save(policy, checkpoints, 2, **options)
    assert find_damage(checkpoints / "step_000002") is None
    return found


def test_an_error_of_one_rank_is_raised_on_all_and_leaves_the_last_checkpoint(policy: Path, tmp_path: Path) -> None:
    first, second = run_ranks(2, fail, policy, tmp_path)
    full, in_optimizer = "[Errno 28] No space left on device", first[0]
    assert re.fullmatch(rf"{re.escape(full)}: '{tmp_path}/checkpoints/\.srtrl_\w+/optimizer'", in_optimizer)
    assert (first[1], second[:2]) == (full, [f"rank 0 of 2: {in_optimizer}", f"rank 0 of 2: {full}"])
    assert re.match(rf"{tmp_path}/elsewhere/checkpoints/\.srtrl_\w+ of rank 0 is not here", second[2])
    assert first[2] == f"rank 1 of 2: {second[2]}"
