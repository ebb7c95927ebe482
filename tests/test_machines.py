"""Machines on which srtrl cannot run say so in a message, and one without a writable home folder has a cache."""

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest
import torch
from tiny_run import make_recipe

from srtrl import build, caches
from srtrl.caches import cache_folders
from srtrl.cuda import compiler


def test_windows_is_refused_in_a_line() -> None:
    program = "import sys; sys.platform = 'win32'; import srtrl"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stderr.strip().endswith("ImportError: srtrl needs Linux or macOS; on Windows it runs in WSL2")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpus_of_amd_are_refused(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"device: .*AMD.*8\.0 or newer; use device=cpu"):
        build.choose_device(make_recipe(tmp_path, tmp_path, device=device))
    assert build.choose_device(make_recipe(tmp_path, tmp_path, device="cpu")) == torch.device("cpu")


@pytest.mark.parametrize(
    ("compilers", "headers", "named"),
    [({"gcc"}, False, "Python.h"), (set(), True, "a C compiler"), ({"clang"}, True, None), ({"gcc"}, True, None)],
)
def test_a_machine_without_a_compiler_is_refused_before_the_first_rollout(
    compilers: set[str], headers: bool, named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler, "which", lambda name: name if name in compilers else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    if headers:
        (tmp_path / "Python.h").touch()
    if named is None:
        compiler.check_triton()
        return
    with pytest.raises(ValueError, match=f"needs .*{named}.*apt-get install gcc python3-dev.*device=cpu"):
        compiler.check_triton()


@pytest.mark.parametrize(
    ("writable", "given", "expected"),
    [
        ({"home", "package"}, set(), set()),
        ({"home"}, set(), set()),
        ({"package"}, set(), {"TRITON_CACHE_DIR"}),
        (set(), set(), {"NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"}),
        (set(), {"NUMBA_CACHE_DIR"}, {"TRITON_CACHE_DIR"}),
    ],
)
def test_compiled_kernels_have_a_place_where_home_and_package_are_read_only(
    writable: set[str], given: set[str], expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in given:
        monkeypatch.setenv(name, "given")
    package = Path(caches.__file__).parent
    monkeypatch.setattr(caches, "is_writable", lambda path: ("package" if path == package else "home") in writable)
    found = cache_folders()
    assert found.keys() == expected
    assert all(Path(folder).parent.parent == tmp_path for folder in found.values())
    assert cache_folders() == found, "the same in the next process"
