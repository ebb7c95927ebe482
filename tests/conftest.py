"""Fixtures and paths that several test files use."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from srtrl.model.cpu_threads import set_cpu_threads

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: tests of kernels run them on the CPU

if find_spec("triton") is None:  # there is none for macOS, no CUDA path to test, and no kernel that has the sandbox
    collect_ignore_glob = [
        *("test_triton_*", "test_gpu_*", "test_cuda_runner*"),
        *("test_engine_cuda*", "test_recipe_memory*", "test_python_sandbox*"),
    ]

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a CUDA device, the tests of kernels run on it: they are among those of `pytest -m gpu` there."""
    if torch.cuda.is_available():
        for item in items:
            if isinstance(item, pytest.Function) and hasattr(item.module, "KERNEL_DEVICE"):
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the real data; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("SRTRL_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}: set SRTRL_SHARED_DATA to its folder")
    return folder


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny tensors gain nothing from threads, and lose much on a busy machine; tests of threads set their own."""
    set_cpu_threads(1)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The test's parameter, as the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny random policy that the tests of training start from; they only read it."""
    from tiny_run import make_policy

    return make_policy(tmp_path_factory.mktemp("model") / "policy")
