"""Names of functions and classes: ours by place, the user's by `package.module:attribute`."""

import sys
from pathlib import Path

import pytest

from srtrl.resolve import list_functions, list_modules, resolve_class, resolve_function

OWN = """\
from math import sqrt

def gspo(x): return x + 1
def gspo_tokens(x): return x
def _hidden(x): return x

class Task: pass
"""


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of the user's in the current folder, that is not on the import path."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "losses.py").write_text(OWN)
    (package / "empty.py").write_text("raise AssertionError('must not be imported')\n")
    (package / "base.py").write_text("class Task:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return name


def test_a_users_function_is_found_in_the_current_folder_after_installed_packages(own_package: str) -> None:
    assert resolve_function("srtrl.resolve", f"{own_package}.losses:gspo")(1) == 2
    assert sys.path[-1] == str(Path.cwd())
    assert list_functions(sys.modules[f"{own_package}.losses"]) == ["gspo", "gspo_tokens"]
    with pytest.raises(ValueError, match="`sqrt` is not in"):
        resolve_function(f"{own_package}.losses", "sqrt")  # only public functions of the module itself


def test_classes_are_found_without_importing_other_modules(own_package: str) -> None:
    resolve_function("srtrl.resolve", f"{own_package}.losses:gspo")  # puts the folder on the path
    assert list_modules(own_package, "Task") == ["losses"]
    assert resolve_class(own_package, "losses", "Task").__module__ == f"{own_package}.losses"
    assert resolve_class("srtrl.tasks", f"{own_package}.losses:Task", "Task").__name__ == "Task"
