"""An update that runs out of memory: nothing half done, and a message that says what helps."""

import re
from pathlib import Path

import pytest
import tiny_run
import torch
from accelerate import Accelerator
from update_cases import NUM_GROUPS, make_policy, make_recipe, make_sequences, update

from srtrl.model import transformer
from srtrl.recipe import Recipe
from srtrl.trainer import run_folder
from srtrl.trainer.optimizer import build_optimizer, gradient_holders
from srtrl.trainer.out_of_memory import UpdateMemoryError, explain_out_of_memory
from srtrl.trainer.trainer import how_to_resume

TORCHS_WORDS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.50 GiB is "
    "free. Of the allocated memory 70.00 GiB is allocated by PyTorch. If reserved but unallocated memory is large try "
    "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
)
CUDA = torch.device("cuda")


def run_out_at(call: int | None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the `call`-th layer with a gradient (from 1) run out of memory; the list returned grows with each."""
    calls: list[int] = []
    original = transformer.Layer.after_attention

    def after_attention(self: transformer.Layer, *args: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == call:
                raise torch.OutOfMemoryError(TORCHS_WORDS)
        return original(self, *args)

    monkeypatch.setattr(transformer.Layer, "after_attention", after_attention)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_weight_changes_in_a_mini_batch_that_does_not_fit(
    dtype: torch.dtype, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last layer of the last micro-batch: the two mini-batches before are learned from, the third is not."""
    sequences = make_sequences(make_policy())
    recipe = make_recipe(train__mini_batch_prompts=1, train__micro_batch_tokens=16)
    weights: list[list[torch.Tensor]] = []

    def learn(num_draws: int) -> None:
        policy = make_policy(dtype=dtype, scale=8)
        optimizer = build_optimizer(policy, learning_rate=1e-2, weight_decay=0.0, betas=(0.9, 0.99), eps=1e-8)
        weights.append([*policy.parameters(), *gradient_holders(policy, optimizer)])
        chosen = [sequence for sequence in sequences if sequence.draw_index < num_draws]
        update(policy, optimizer, accelerator, chosen, recipe)

    with monkeypatch.context() as patched:
        calls = run_out_at(None, patched)
        learn(NUM_GROUPS)
    with monkeypatch.context() as patched:
        run_out_at(len(calls), patched)
        with pytest.raises(torch.OutOfMemoryError):
            learn(NUM_GROUPS)
    learn(NUM_GROUPS - 1)
    whole, failed, without_last = weights
    assert all(map(torch.equal, failed, without_last))
    assert not all(map(torch.equal, failed, whole))


def test_a_step_allocates_nothing_of_its_own() -> None:
    """Or it could run out with one group of weights moved and the other not."""
    policy = make_policy(dtype=torch.bfloat16)
    optimizer = build_optimizer(policy, learning_rate=1e-2, weight_decay=0.0, betas=(0.9, 0.99), eps=1e-8)
    addresses = {name: tensor.data_ptr() for state in optimizer.state.values() for name, tensor in state.items()}
    assert set(addresses) == {"step", "exp_avg", "exp_avg_sq"}
    for one in policy.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    assert addresses == {
        name: tensor.data_ptr() for state in optimizer.state.values() for name, tensor in state.items()
    }


def advice(recipe: Recipe, **options: bool) -> list[str]:
    """What the message says would help."""
    with (
        pytest.raises(UpdateMemoryError) as caught,
        explain_out_of_memory("step 3, update", recipe, **options),
    ):
        raise torch.OutOfMemoryError(TORCHS_WORDS)
    text = str(caught.value)
    assert text.startswith("step 3, update: the device's memory is too small. CUDA out of memory. Tried to allocate")
    assert "70.00 GiB is allocated by PyTorch." in text
    assert "PYTORCH_CUDA_ALLOC_CONF" not in text
    return text.partition("What helps:\n")[2].splitlines()


def test_the_message_says_what_helps_and_nothing_that_is_so_already() -> None:
    pages = ["rollout.kv_across_update=release", "rollout.kv_memory_share or rollout.kv_memory_gib lower"]
    common = [
        "train.micro_batch_tokens=500 (now 1000; at least 16, the longest sequence)",
        "model.gradient_checkpointing=true",
    ]
    dtype = ["model.dtype=bfloat16, in a run of its own"]
    for has_engine, expected in ((True, [*common, *pages, *dtype]), (False, [*common, *dtype])):
        found = advice(make_recipe(), has_engine=has_engine)
        assert [line.partition(":")[0].strip() for line in found[: len(expected) - 1]] == expected[:-1]
        assert found[-1].strip().startswith(expected[-1])
    recipe = make_recipe(
        train__micro_batch_tokens=16,
        model={"path": "unused", "dtype": "bfloat16", "gradient_checkpointing": True},
        rollout__kv_across_update="release",
    )
    assert advice(recipe) == [
        "  rollout.max_new_tokens lower: a micro-batch holds at least one whole sequence, and now no more"
    ]


@pytest.mark.parametrize("budget", [16, 1000])
def test_each_option_advised_is_free_in_a_resumed_run_or_named_as_one_that_is_not(budget: int, tmp_path: Path) -> None:
    (tmp_path / "step_000001").mkdir()
    for line in advice(make_recipe(train__micro_batch_tokens=budget)):
        for option in re.findall(r"^  (\w+\.\w+)|or (\w+\.\w+) lower", line):
            name = "".join(option)
            is_free = name in run_folder.FREE_KEYS_ON_CUDA
            assert is_free != (name in how_to_resume(tmp_path, UpdateMemoryError())), name
    assert "start again with --overwrite" in how_to_resume(tmp_path / "empty", UpdateMemoryError())


def test_a_run_on_cuda_may_go_on_with_a_smaller_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_run.make_recipe(tmp_path / "policy", tmp_path)
    with run_folder.open_run_folder(recipe):
        pass
    smaller = tiny_run.make_recipe(tmp_path / "policy", tmp_path, train__micro_batch_tokens=100)
    with pytest.raises(ValueError, match=r"train\.micro_batch_tokens: the run has 200, now 100"):
        run_folder.check_run_folder(smaller, resume=True, overwrite=False)
    monkeypatch.setattr(run_folder, "choose_device", lambda _: torch.device("cuda"))
    run_folder.check_run_folder(smaller, resume=True, overwrite=False)
