"""Fixtures and paths that several test files use."""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

from srtrl.engine.warm_up import compile_kernels
from srtrl.features.head_drafter import wrap_for_warm_up
from srtrl.model.cpu_threads import set_cpu_threads

if TYPE_CHECKING:
    from fake_cuda import FakeCuda

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: tests of kernels run them on the CPU

if find_spec("triton") is None:  # there is none for macOS, no CUDA path to test, and no kernel that has the sandbox
    collect_ignore_glob = [
        *("test_triton_*", "test_gpu_*", "test_cuda_*", "test_flash*"),
        *("test_engine_cuda*", "test_fake_cuda*", "test_recipe_memory*", "test_python_sandbox*", "test_repeatable*"),
    ]

REPOSITORY = Path(__file__).resolve().parent.parent


hypothesis.settings.register_profile("default", max_examples=25, deadline=None)
hypothesis.settings.register_profile("thorough", max_examples=200, deadline=None)  # of `make test-slow`
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the CPU kernels, or find them in the cache, before the workers start: else each would compile them."""
    if not hasattr(session.config, "workerinput") and not session.config.option.collectonly:
        set_cpu_threads(1)
        compile_kernels(wrap=wrap_for_warm_up)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a fixture of their module run in one worker, all others in whichever is free.

    Where there is a CUDA device, the tests of kernels run on it: they are among those of `pytest -m gpu` there.
    """
    for item in items:
        assert isinstance(item, pytest.Function)
        if torch.cuda.is_available() and hasattr(item.module, "KERNEL_DEVICE"):
            item.add_marker(pytest.mark.gpu)
        if (shared := shared_fixtures(item)) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {shared}"))


def shared_fixtures(item: pytest.Function) -> str:
    """The parameters of a test's fixtures that are made once for its module, or "" where it has no such fixtures."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    found = {each.argname: each for fixtures in item._fixtureinfo.name2fixturedefs.values() for each in fixtures}
    return " ".join(f"{name}={parameters.get(name)}" for name, each in sorted(found.items()) if each.scope == "module")


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


@pytest.fixture
def device() -> Iterator["FakeCuda"]:
    """A CUDA device; without one a fake, whose findings a test looks at."""
    from fake_cuda import any_cuda  # needs Triton, which macOS has not

    with any_cuda() as found:
        yield found


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of pytest that all its workers share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def make_once(common: Path) -> Callable[[str, Callable[[Path], object]], Path]:
    """`make_once(name, make)`: a folder that `make` has written, once for all workers; tests only read it."""

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder = common / "once" / name
        folder.parent.mkdir(exist_ok=True)
        with (folder.parent / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = folder.parent / f"{name}.done"
            if not done.exists():
                make(folder)
                done.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def policy(make_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """Folder of the tiny random policy that the tests of training start from; they only read it."""
    from tiny_run import make_policy

    return make_once("policy", make_policy)


@pytest.fixture(scope="session")
def finished(policy: Path, make_once: Callable[[str, Callable[[Path], object]], Path]) -> Callable[..., Path]:
    """`finished(**changes)`: the folder of a run of `make_recipe(policy, ..., **changes)`, trained once for all tests.

    They only read it; a test that changes something copies it first.
    """
    from tiny_run import make_recipe, train

    def run(**changes: Any) -> Path:
        key = hashlib.sha256(repr(sorted(changes.items())).encode()).hexdigest()[:16]
        folder = make_once(key, lambda folder: train(make_recipe(policy, folder, **changes)))
        return folder / "run"

    return run
