"""`repeatable: true`: what is set and when, what is refused at the start, and two runs with the same bits.

Recipes that are refused are in test_bad_input.txt.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, Operations, is_here
from tiny_run import SMALL, assert_same_run, make_policy, make_recipe, train

from srtrl import build, build_models
from srtrl.metrics import read_metrics
from srtrl.recipe.schema import Recipe
from srtrl.run.repeatable import MEMORY, WORKSPACE, fix_workspace, fixed_order

REPOSITORY = Path(__file__).resolve().parent.parent
NOT_DETERMINISTIC = {"bincount", "histc", "kthvalue", "median", "nll_loss_forward", "put_"}
"""Operations that torch refuses on CUDA, where algorithms must be deterministic; beside them sums of floats so far."""
TRAINING: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"critic": {"learning_rate": 0.01}, "algorithm__advantage": "gae"},
    "lora and a draft head": {"model__lora": {"rank": 4}, "rollout__draft_head": {"k": 2, "vocabulary": 64}},
}
imitated = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")


@pytest.fixture(autouse=True)
def _no_workspace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The variable is not set, and is again after the test what it was."""
    monkeypatch.setenv(WORKSPACE, "")
    monkeypatch.delenv(WORKSPACE)
    yield
    assert not torch.are_deterministic_algorithms_enabled()


def repeatable_recipe(policy: Path, folder: Path, device: str, **changes: Any) -> Recipe:
    """Recipe of a run of two steps; a prompt comes again in the second one."""
    values: dict[str, Any] = {
        "repeatable": True,
        "device": device,
        "rollout__draft_budget": 3,
        "rollout__run_ahead_max_slowdown": None,
        "train__num_steps": 2,
        "task__options": {"num_train": 3, "num_eval": 2, "min_operations": 1, "max_operations": 1},
        "eval": {"before_and_after": False},
    }
    return make_recipe(policy, folder, **(SMALL | values | changes))


def test_a_fixed_order_ends_with_the_block() -> None:
    def found() -> tuple[bool, bool, bool]:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.are_deterministic_algorithms_enabled(), warns, MEMORY.fill_uninitialized_memory

    def raise_for(settings: tuple[bool, bool, bool]) -> None:
        raise KeyError(settings)

    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.raises(KeyError, match="True, False, False"), fixed_order():
        raise_for(found())
    assert found() == (True, True, True)
    torch.use_deterministic_algorithms(False)
    with fixed_order():
        assert found() == (True, False, False)
    assert found() == (False, False, True)


@pytest.mark.parametrize("was_used", [False, True])
@pytest.mark.parametrize("given", [None, ":16:8", ":0:0"])
def test_workspaces_are_fixed_before_cuda_is_used(
    monkeypatch: pytest.MonkeyPatch, given: str | None, was_used: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: was_used)
    if given is not None:
        monkeypatch.setenv(WORKSPACE, given)
    if given == ":0:0" or (given is None and was_used):
        with pytest.raises(ValueError, match=rf"^repeatable: .* {WORKSPACE} .* found {given or 'nothing'}: set it"):
            fix_workspace()
        assert os.environ.get(WORKSPACE) == given
    else:
        fix_workspace()
        assert os.environ[WORKSPACE] == (given or ":4096:8")


@imitated
def test_the_workspace_is_fixed_before_weights_are_loaded(
    device: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(*_: object) -> None:
        raise ValueError(f"loading with {os.environ.get(WORKSPACE)}")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(build_models, "build_policy", load)
    policy = make_policy(tmp_path / "policy")
    with pytest.raises(ValueError, match="loading with None"):
        train(repeatable_recipe(policy, tmp_path, "cuda", repeatable=False))
    with pytest.raises(ValueError, match="loading with :4096:8"):
        train(repeatable_recipe(policy, tmp_path, "cuda"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"repeatable: true on CUDA .* is for one process"):
        build.build_parts(repeatable_recipe(policy, tmp_path, "cuda"))


def test_on_a_cpu_nothing_is_set(tmp_path: Path) -> None:
    policy, settings = make_policy(tmp_path / "policy"), []
    for is_on in (True, False):
        recipe = repeatable_recipe(policy, tmp_path / str(is_on), "cpu", repeatable=is_on, rollout__slots="auto")
        build.run_training(
            recipe,
            on_step=lambda *_: settings.append((torch.are_deterministic_algorithms_enabled(), WORKSPACE in os.environ)),
        )
    assert settings == 4 * [(False, False)]
    assert_same_run(tmp_path / "True" / "run", tmp_path / "False" / "run")


@pytest.fixture
def refusing(device: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The imitated device; if algorithms must be deterministic it refuses what torch refuses on a real one."""
    compute = Operations.__torch_dispatch__

    def refuse_or_compute(mode: Operations, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, (first, *_) = func.overloadpacket.__name__, args or (None,)
        if torch.are_deterministic_algorithms_enabled() and isinstance(first, torch.Tensor) and is_here(first):
            assert name not in NOT_DETERMINISTIC, name
            assert name != "cumsum" or not first.is_floating_point(), name
        return compute(mode, func, types, args, kwargs)

    monkeypatch.setattr(Operations, "__torch_dispatch__", refuse_or_compute)
    return device


@imitated
@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINING)
def test_two_runs_on_a_device(refusing: FakeCuda, case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its memory has other contents, and its steps take other times, from run to run."""
    monkeypatch.setenv(WORKSPACE, ":4096:8")
    policy, settings = make_policy(tmp_path / "policy", num_hidden_layers=1), []
    for name in ("a", "b"):
        build.run_training(
            repeatable_recipe(policy, tmp_path / name, "cuda", **TRAINING[case]),
            on_step=lambda *_: settings.append(torch.are_deterministic_algorithms_enabled()),
        )
    assert settings == 4 * [True]
    assert not refusing.findings
    assert_same_run(tmp_path / "a" / "run", tmp_path / "b" / "run", beside=("memory/",))


@pytest.mark.gpu
def test_two_runs_on_a_gpu_give_the_same_bits(tmp_path: Path) -> None:
    """In processes of their own, all at the same time, so that they differ in what depends on time."""
    options = [
        *("device=cuda", "repeatable=true", "rollout.slots=16", "rollout.kv_memory_gib=0.5", "rollout.draft_budget=4"),
        *("rollout.run_ahead_max_slowdown=null", "rollout.num_prompts=8", "rollout.num_samples=8"),
        *("task.options.num_train=16", "train.num_steps=4", "train.micro_batch_tokens=2048"),
        *("eval.before_and_after=false", "train.mini_batch_prompts=4", "train.max_logprob_difference=1"),
    ]

    def train_there(dtype: str, run: str) -> str:
        changes = [*options, f"name={dtype}-{run}", f"output_dir={tmp_path}", f"model.dtype={dtype}"]
        command = [sys.executable, "-m", "srtrl", "train", "recipes/quickstart.yaml", *changes]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(
            command, check=False, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=110
        )
        return f"{done.stdout[-1000:]}{done.stderr[-2000:]}" if done.returncode else ""

    with ThreadPoolExecutor() as pool:
        errors = pool.map(train_there, 2 * ["float32", "bfloat16"], "aabb")
        assert list(errors) == ["", "", "", ""]
    for dtype in ("float32", "bfloat16"):
        rows = read_metrics(tmp_path / f"{dtype}-a" / "metrics.jsonl")
        assert rows[-1]["engine/tokens_per_decode_step"] > 1, "no draft was accepted"
        assert_same_run(tmp_path / f"{dtype}-a", tmp_path / f"{dtype}-b", beside=("memory/",))
