"""Checkpoints of several ranks: written by all, read by any number, sharded or not; an error of one leaves the old."""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from rank_cases import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.model.transformer import Transformer
from srtrl.model.value_model import ValueModel
from srtrl.model.weights import load_model, load_tokenizer
from srtrl.ranks.processes import ONE_RANK, RankError, Ranks
from srtrl.ranks.sharding import shard, unshard
from srtrl.recipe.schema import CriticSection
from srtrl.run import checkpoint
from srtrl.run.checkpoint import (
    CRITIC_OPTIMIZER,
    OPTIMIZER,
    TrainerState,
    find_damage,
    latest_checkpoint,
    save_checkpoint,
)
from srtrl.trainer.critic import Critic, ValueObjective
from srtrl.trainer.optimizer import MasterWeightAdamW, build_optimizer, load_state, state_tensors

pytestmark = pytest.mark.xdist_group("ranks")
ADAMW: dict[str, Any] = {"learning_rate": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-6}
Writer = tuple[int, str, torch.dtype]
"""Number of ranks, how they share the state, and the type of the models: bfloat16 has masters."""
WHOLE: list[Writer] = [(1, "ddp", torch.float32), (1, "ddp", torch.bfloat16)]
SHARED: list[Writer] = [(2, "ddp", torch.float32), (2, "fsdp2", torch.bfloat16), (3, "fsdp2", torch.float32)]
STEP = "checkpoints/step_000001"


def make_trained(policy: Path, dtype: torch.dtype, sharding: str) -> tuple[Transformer, torch.optim.Optimizer, Critic]:
    """Policy, critic (whose head of one row leaves some ranks without a part) and their optimizers."""
    model, critic = load_model(policy, dtype=dtype, device="cpu"), load_model(policy, dtype=dtype, device="cpu")
    value_model = ValueModel(critic)
    if sharding == "fsdp2":
        shard(model)
        shard(value_model)
    optimizer = build_optimizer(model, **ADAMW)
    value_optimizer = build_optimizer(value_model, **ADAMW)
    unshard(model)
    return model, optimizer, Critic(objective=ValueObjective(value_model, CriticSection()), optimizer=value_optimizer)


def state_of(optimizer: torch.optim.Optimizer, critic: Critic, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the two optimizers by name."""
    for owner, one in (("policy", optimizer), ("critic", critic.optimizer)):
        for name, tensor in state_tensors(one, dtype).items():
            yield f"{owner} {name}", tensor


def numbers_of(name: str, shape: torch.Size) -> Tensor:
    """What a tensor holds: a function of its name."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]))
    return torch.randn(shape, generator=generator)


@torch.no_grad()
def write(ranks: Ranks, policy: Path, folder: Path) -> None:
    """A checkpoint of each kind of this number of ranks."""
    for writer in (one for one in WHOLE + SHARED if one[0] == ranks.count):
        _, sharding, dtype = writer
        model, optimizer, critic = make_trained(policy, dtype, sharding)
        for name, tensor in state_of(optimizer, critic, dtype):
            full = numbers_of(name, tensor.shape)
            if isinstance(tensor, DTensor):
                full = distribute_tensor(full, tensor.device_mesh, tensor.placements)
            tensor.copy_(full)
        save(folder / str(writer), 1, policy, model, optimizer, critic, ranks)


def save(
    folder: Path,
    step: int,
    policy: Path,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    critic: Critic,
    ranks: Ranks,
) -> Path:
    """A checkpoint in `folder/checkpoints`, of a run without rows."""
    if ranks.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").touch()
    return save_checkpoint(
        folder / "checkpoints",
        TrainerState(step=step, policy_version=step, num_draws=step),
        model=model,
        tensors={
            OPTIMIZER: state_tensors(optimizer, model.dtype),
            CRITIC_OPTIMIZER: state_tensors(critic.optimizer, model.dtype),
        },
        tokenizer=load_tokenizer(str(policy)),
        end_ids=[0],
        drafter=NoDrafter(),
        keep=1,
        critic=critic.model,
        ranks=ranks,
    )


def load(path: Path, dtype: torch.dtype, optimizer: torch.optim.Optimizer, critic: Critic) -> None:
    load_state(optimizer, dtype, path, OPTIMIZER)
    load_state(critic.optimizer, dtype, path, CRITIC_OPTIMIZER)


def read(ranks: Ranks, policy: Path, folder: Path) -> int:
    """Compare each checkpoint that is there, loaded by this number of ranks; returns the number of tensors."""
    count = 0
    for sharding in ("ddp", "fsdp2") if ranks.count > 1 else ("ddp",):
        for path, dtype in ((folder / str(writer), writer[2]) for writer in WHOLE + SHARED):
            if not path.exists():
                continue  # three ranks have not written
            _, optimizer, critic = make_trained(policy, dtype, sharding)
            load(path / STEP, dtype, optimizer, critic)
            for name, tensor in state_of(optimizer, critic, dtype):
                found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                assert torch.equal(found, numbers_of(name, tensor.shape)), (path, sharding, name)
                count += 1
            if isinstance(optimizer, MasterWeightAdamW):
                assert all(torch.equal(one, master.bfloat16()) for one, master in optimizer.master_of.items())
    return count


@pytest.fixture
def written(policy: Path, make_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """Folder of the checkpoints of one rank and of two; tests only read it."""

    def make(folder: Path) -> None:
        write(ONE_RANK, policy, folder)
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
    assert min(read(ONE_RANK, policy, written), *run_ranks(2, read, policy, written)) > 200
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


def test_a_lost_part_is_no_number(policy: Path, written: Path, tmp_path: Path) -> None:
    """Also where there is no manifest to compare with."""
    path = Path(shutil.copytree(written / str(SHARED[1]), tmp_path / "written")) / STEP
    _, optimizer, critic = make_trained(policy, torch.bfloat16, "ddp")
    *_, damaged = files_of(path)
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1])
    assert find_damage(path, policy_only=True) is None
    assert find_damage(path) == f"{damaged} is missing or not as manifest.json lists it"
    damaged.write_bytes(data)
    for file in files_of(path):
        kept = file.rename(tmp_path / "kept")
        with pytest.raises(ValueError, match=r"/optimizer: (parts of its|its) .*name=OTHER model\.path="):
            load(path, torch.bfloat16, optimizer, critic)
        kept.rename(file)


def test_large_states_are_written_in_several_files(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host need not hold all of it."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 50_000)
    write(ONE_RANK, policy, tmp_path)
    path = tmp_path / str(WHOLE[1]) / STEP
    model, optimizer, critic = make_trained(policy, torch.bfloat16, "ddp")
    sizes = [file.stat().st_size for file in files_of(path)]
    assert len(sizes) > 3
    assert max(sizes) < 50_000 + 4 * max(one.numel() for one in model.parameters()) + 10_000
    load(path, torch.bfloat16, optimizer, critic)
    assert all(
        torch.equal(one, numbers_of(name, one.shape)) for name, one in state_of(optimizer, critic, torch.bfloat16)
    )


# --- Errors -----------------------------------------------------------------------------------------------------------


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def fail(ranks: Ranks, policy: Path, folder: Path, sharding: str) -> list[str]:
    """The errors of checkpoints where one rank fails at a time."""
    model, optimizer, critic = make_trained(policy, torch.bfloat16, sharding)
    before = contents(save(folder, 1, policy, model, optimizer, critic, ranks))
    ranks.gather(0, "the first checkpoint")
    found = []
    for owner, name, index in (
        (safetensors.torch, "save", 1),  # the optimizer's
        (checkpoint, "save_value_model", 0),
        (checkpoint, "_entry", 1),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if ranks.index == index:
                patch.setattr(owner, name, no_space)
            with pytest.raises((OSError, RankError), match="No space left on device") as caught:
                save(folder, 2, policy, model, optimizer, critic, ranks)
        found.append(str(caught.value))
    with pytest.raises((ValueError, RankError), match="disk of output_dir") as refused:
        save(folder if ranks.is_main else folder / "elsewhere", 2, policy, model, optimizer, critic, ranks)
    found.append(str(refused.value))
    assert latest_checkpoint(folder / "checkpoints") == folder / STEP
    assert contents(folder / STEP) == before
    ranks.gather(0, "the comparison")
    save(folder, 2, policy, model, optimizer, critic, ranks)
    assert find_damage(folder / "checkpoints" / "step_000002") is None
    return found


def contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*.*")}


@pytest.mark.parametrize("sharding", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_an_error_of_one_rank_is_raised_on_all_and_leaves_the_last_checkpoint(
    policy: Path, tmp_path: Path, sharding: str
) -> None:
    first, second = run_ranks(2, fail, policy, tmp_path, sharding)
    full, in_optimizer = "[Errno 28] No space left on device", first[0]
    assert re.fullmatch(rf"{re.escape(full)}: '{tmp_path}/checkpoints/\.srtrl_\w+/optimizer'", in_optimizer)
    assert first[1:3] == [full, f"rank 1 of 2: {full}"]
    assert second[:3] == [f"rank 0 of 2: {in_optimizer}", f"rank 0 of 2: {full}", full]
    assert re.match(rf"{tmp_path}/elsewhere/checkpoints/\.srtrl_\w+ of rank 0 is not here", second[3])
    assert first[3] == f"rank 1 of 2: {second[3]}"
