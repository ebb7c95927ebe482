"""Machines on which srtrl cannot run say so in a message, and one without a writable home folder has a cache."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest
import torch
from engine_cases import tiny_policy
from tiny_run import make_recipe

import srtrl
from srtrl import build_models, caches
from srtrl.caches import cache_folders
from srtrl.cuda import compiler
from srtrl.run.machine import choose_device


def test_windows_is_refused_in_a_line() -> None:
    program = "import sys; sys.platform = 'win32'; import srtrl"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stderr.strip().endswith("ImportError: srtrl needs Linux or macOS; on Windows it runs in WSL2")


def test_a_device_or_sharding_that_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"train\.sharding: fsdp2 .* found one: start with torchrun"):
        build_models.shard_model(tiny_policy(), make_recipe(tmp_path, tmp_path, train__sharding="fsdp2"))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("auto", "cuda"):
        with pytest.raises(ValueError, match=r"device: .*AMD.*8\.0 or newer; use device=cpu"):
            choose_device(make_recipe(tmp_path, tmp_path, device=device))
    assert choose_device(make_recipe(tmp_path, tmp_path, device="cpu")) == torch.device("cpu")


def test_a_machine_without_a_compiler_is_refused_before_the_first_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(compiler, "which", {"gcc": "gcc"}.get)
    with pytest.raises(ValueError, match=r"needs .*Python.h.*apt-get install gcc python3-dev.*device=cpu"):
        compiler.check_triton()
    (tmp_path / "Python.h").touch()
    for name in ("gcc", "clang"):
        monkeypatch.setattr(compiler, "which", {name: name}.get)
        compiler.check_triton()
    monkeypatch.setattr(compiler, "which", {}.get)
    with pytest.raises(ValueError, match=r"needs .*a C compiler"):
        compiler.check_triton()


def test_variables_of_libraries_are_set_unless_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """That torch is not imported before it: test_imports.py."""
    of_libraries = ("MKL_", "PYTORCH_", "GOMP_", "OMP_")
    others = {name: value for name, value in os.environ.items() if not name.startswith(of_libraries)}
    ours = {"MKL_CBWR": "AUTO,STRICT", "PYTORCH_ALLOC_CONF": "expandable_segments:True", "GOMP_SPINCOUNT": "10000"}
    first = {"MKL_CBWR": "COMPATIBLE", "PYTORCH_CUDA_ALLOC_CONF": "a", "GOMP_SPINCOUNT": "7"}
    for given in ({}, first, {"MKL_CBWR": "", "PYTORCH_ALLOC_CONF": "b", "OMP_WAIT_POLICY": "active"}):
        monkeypatch.setattr(os, "environ", environment := others | given)
        importlib.reload(srtrl)
        assert {name: environment[name] for name in environment.keys() - others} == (given or ours)


INHERITED = f"kernels/srtrl-{'0123' * 4}"


@pytest.mark.parametrize(
    ("given", "numba", "triton"),
    [
        ({}, "home/.cache/srtrl", None),
        ({"XDG_CACHE_HOME": "caches"}, "caches/srtrl", None),
        ({"XDG_CACHE_HOME": ""}, "home/.cache/srtrl", None),
        ({"NUMBA_CACHE_DIR": "kernels"}, "kernels", None),
        ({"NUMBA_CACHE_DIR": "read_only/kernels"}, "home/.cache/srtrl", None),
        ({"NUMBA_CACHE_DIR": ""}, "home/.cache/srtrl", None),
        ({"NUMBA_CACHE_DIR": INHERITED}, "kernels", None),
        ({"NUMBA_CACHE_DIR": f"{INHERITED}/mine"}, f"{INHERITED}/mine", None),
        ({"HOME": "read_only"}, "temporary/numba", "temporary/triton"),
        ({"HOME": "read_only", "XDG_CACHE_HOME": "caches"}, "caches/srtrl", "temporary/triton"),
        ({"HOME": "read_only", "NUMBA_CACHE_DIR": "kernels"}, "kernels", "temporary/triton"),
        ({"HOME": "read_only", "NUMBA_CACHE_DIR": "read_only"}, "temporary/numba", "temporary/triton"),
        ({"HOME": "read_only", "TRITON_CACHE_DIR": "kernels"}, "temporary/numba", None),
    ],
)
def test_compiled_kernels_have_a_folder_for_their_source(
    given: dict[str, str], numba: str, triton: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first place that is writable; a process that inherits it, of this or another checkout, adds no second."""
    temporary = tmp_path / f"srtrl-kernels-{os.getuid()}"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(caches, "is_writable", lambda path: path.is_absolute() and "read_only" not in path.parts)
    for name in ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "home"} | given).items():
        monkeypatch.setenv(name, str(tmp_path / value) if value else "")
    found = cache_folders()
    folder = tmp_path / numba.replace("temporary", temporary.name) / f"srtrl-{caches.digest()}"
    expected = {"NUMBA_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(temporary / "triton")}
    assert found == {name: expected[name] for name in found}
    assert ("TRITON_CACHE_DIR" in found) == (triton is not None)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    assert cache_folders()["NUMBA_CACHE_DIR"] == str(folder), "the same in a worker and in the next process"


def test_a_folder_is_writable_where_it_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home of a user whom the machine does not know is `~`: no folder."""
    (tmp_path / "read_only").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, _: path.name != "read_only")
    found = [caches.is_writable(tmp_path / folder) for folder in (".", "not/there/yet", "read_only/below")]
    assert [*found, caches.is_writable(Path("~"))] == [True, True, False, False]


KERNEL = """
import sys
import numba
import numpy as np
from srtrl.model.noise import hash_row

@numba.njit(cache=True)
def outer(position):
    return hash_row(np.uint64(7), position)

print(outer(3), *outer.stats.cache_hits.values(), numba.config.CACHE_DIR)
"""


@pytest.mark.parametrize("first", ["import srtrl", "import numba, srtrl"])
def test_an_edit_of_an_inlined_function_is_seen_at_once_and_its_undoing_too(first: str, tmp_path: Path) -> None:
    """Numba alone watches the file of the outer kernel, and would go on with what it has compiled."""
    shutil.copytree(Path(caches.__file__).parent, tmp_path / "srtrl", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "outer.py").write_text(KERNEL)
    noise = tmp_path / "srtrl" / "model" / "noise.py"
    source, times = noise.read_text(), noise.stat()
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    command, found = [sys.executable, "-c", f"{first}\nimport outer"], []
    for text in (source, source.replace("np.uint64(31)", "np.uint64(30)"), source):
        noise.write_text(text)
        os.utime(noise, ns=(times.st_atime_ns, times.st_mtime_ns))
        result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        found.append(result.stdout.split())
    values, hits, folders = zip(*((values[0], values[1:-1], values[-1]) for values in found), strict=True)
    assert values[0] == values[2] != values[1]
    assert hits == ([], [], ["1"])
    assert folders[0] == folders[2] != folders[1]
    assert {Path(folder).parent for folder in folders} == {tmp_path / "kernels"}


def test_what_is_compiled_into_kernels_is_in_the_files_that_name_their_folder() -> None:
    """Functions and numbers that they take from other files of the package."""
    package = Path(caches.__file__).parent
    hashed = {file for file in package.rglob("*.py") if any(line in file.read_bytes() for line in caches.IMPORTS)}
    assert len(hashed) > 20
    for file in hashed:
        body = ast.parse(file.read_text()).body
        origin = {alias.name: node.module for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
        compiled = [node for node in body if isinstance(node, ast.Assign) or getattr(node, "decorator_list", [])]
        used = {node.id for part in compiled for node in ast.walk(part) if isinstance(node, ast.Name)}
        for name in used & origin.keys():
            module = f"{origin[name]}".replace(".", "/")
            if module.startswith("srtrl/") and (name.isupper() or name.islower()):  # the others are types
                assert package.parent / f"{module}.py" in hashed, f"{file}: {name}"
