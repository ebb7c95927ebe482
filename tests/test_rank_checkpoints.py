"""Checkpoints of several ranks: written by all, read by any number, sharded or not; an error of one leaves the old.

One run of two ranks and one of three do everything (`everything`); the tests read their results.
"""

import hashlib
import re
from collections.abc import Iterator
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
                continue  # its ranks come later
            _, optimizer, critic = make_trained(policy, dtype, sharding)
            load(path / STEP, dtype, optimizer, critic)
            for name, tensor in state_of(optimizer, critic, dtype):
                found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                assert torch.equal(found, numbers_of(name, tensor.shape)), (path, sharding, name)
                count += 1
            if isinstance(optimizer, MasterWeightAdamW):
                assert all(torch.equal(one, master.bfloat16()) for one, master in optimizer.master_of.items())
    return count


def everything(ranks: Ranks, policy: Path, folder: Path) -> dict[str, Any]:
    """Runs on each rank."""
    write(ranks, policy, folder)
    ranks.gather(0, "what is written")
    found: dict[str, Any] = {"read": read(ranks, policy, folder)}
    if ranks.count == 2:
        found |= {sharding: fail(ranks, policy, folder / sharding, sharding) for sharding in ("ddp", "fsdp2")}
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the checkpoints."""
    return tmp_path_factory.mktemp("written")


@pytest.fixture(scope="module", autouse=True)
def results(policy: Path, written: Path) -> dict[int, list[dict[str, Any]]]:
    """What each rank returns, by the number of ranks; one process reads what more of them have written, too."""
    write(ONE_RANK, policy, written)
    found = {count: run_ranks(count, everything, policy, written) for count in (2, 3)}
    return {1: [{"read": read(ONE_RANK, policy, written)}], **found}


def test_any_number_of_ranks_reads_what_others_have_written(results: dict[int, list[dict[str, Any]]]) -> None:
    """All numbers have the same bits (compared in `read`)."""
    assert min(found["read"] for ranks in results.values() for found in ranks) > 200


@pytest.mark.parametrize("writer", SHARED, ids=str)
def test_each_rank_writes_its_share_of_an_optimizer_once(written: Path, writer: Writer) -> None:
    path, whole = written / str(writer) / STEP, written / str((1, "ddp", writer[2])) / STEP
    assert find_damage(path) is None
    sizes = sizes_of(path)
    assert (len(sizes), len(sizes_of(whole))) == (writer[0], 1)
    assert sum(sizes) == sum(sizes_of(whole))
    assert max(sizes) < 1.1 * sum(sizes) / len(sizes)
    damaged = files_of(path)[-1]
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1])
    assert find_damage(path, policy_only=True) is None
    assert find_damage(path) == f"{damaged} is missing or not as manifest.json lists it"
    damaged.write_bytes(data)


def sizes_of(path: Path) -> list[int]:
    """Numbers in each file of the optimizers' state."""
    return [sum(one.numel() for one in safetensors.torch.load_file(file).values()) for file in files_of(path)]


def files_of(path: Path) -> list[Path]:
    return sorted((path / "optimizer").iterdir())


@pytest.mark.parametrize("index", [0, 1])
def test_a_lost_part_is_no_number(policy: Path, written: Path, tmp_path: Path, index: int) -> None:
    """Also where there is no manifest to compare with."""
    path = written / str(SHARED[-1]) / STEP
    _, optimizer, critic = make_trained(policy, torch.float32, "ddp")
    files = files_of(path)
    kept = files[index].rename(tmp_path / "kept")
    try:
        with pytest.raises(ValueError, match=r"/optimizer: (parts of its|its) .*name=OTHER model\.path="):
            load(path, torch.float32, optimizer, critic)
    finally:
        kept.rename(files[index])


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


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_an_error_of_one_rank_is_raised_on_all_and_leaves_the_last_checkpoint(
    written: Path, results: dict[int, list[dict[str, Any]]], sharding: str
) -> None:
    first, second = (found[sharding] for found in results[2])
    folder, full = written / sharding, "[Errno 28] No space left on device"
    in_optimizer = first[0]
    assert re.fullmatch(rf"{re.escape(full)}: '{folder}/checkpoints/\.srtrl_\w+/optimizer'", in_optimizer)
    assert first[1:3] == [full, f"rank 1 of 2: {full}"]
    assert second[:3] == [f"rank 0 of 2: {in_optimizer}", f"rank 0 of 2: {full}", full]
    assert re.match(rf"{folder}/elsewhere/checkpoints/\.srtrl_\w+ of rank 0 is not here", second[3])
    assert first[3] == f"rank 1 of 2: {second[3]}"
