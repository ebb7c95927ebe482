"""The house rules that a program can check: who may import whom, and what must stay quick to import."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "srtrl"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = {
    "recipe": 0,
    "recipe_algorithm": 0,
    "recipe_base": 0,
    "recipe_conflicts": 0,
    "recipe_errors": 0,
    "recipe_fields": 0,
    "recipe_file": 0,
    "types": 0,
    "metrics": 0,
    "resolve": 0,
    "model": 1,
    "drafters": 2,
    "engine": 3,
    "tasks": 4,
    "rollout": 5,
    "algorithms": 6,
    "trainer": 7,
    "cli": 8,
    "checks": 8,
    "generate": 8,
    "bench": 8,
    "report": 8,
    "evaluation": 8,
}
"""The table of DESIGN.md: root file or package -> layer. Imports go to a lower number, or stay inside the package."""

HEAVY = ("torch", "transformers", "datasets", "accelerate", "math_verify", "matplotlib", "numba", "scipy", "pandas")
LIGHT_MODULES = (
    "srtrl",
    "srtrl.types",
    "srtrl.recipe",
    "srtrl.recipe_file",
    "srtrl.resolve",
    "srtrl.metrics",
    "srtrl.cli",
)


def room_of(module: str) -> str:
    """The root file or package of ours that a module belongs to: "srtrl.model.weights" -> "model"."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imported_modules(file: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of ours in a file, those inside functions and type-checking blocks included."""
    package = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names if name.name.split(".")[0] == "srtrl")
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            if module == "srtrl":
                yield from ((node.lineno, f"srtrl.{name.name}") for name in node.names)
            elif module.startswith("srtrl."):
                yield node.lineno, module


def test_every_file_has_a_layer() -> None:
    rooms = {file.relative_to(PACKAGE).with_suffix("").parts[0] for file in FILES} - {"__init__"}
    assert rooms <= set(LAYERS), "add new rooms to DESIGN's table and to LAYERS"


def test_imports_go_downwards_only() -> None:
    wrong = []
    for file in FILES:
        room = file.relative_to(PACKAGE).with_suffix("").parts[0]
        for line, module in imported_modules(file):
            target = room_of(module)
            inside = target == room or LAYERS.get(room) == LAYERS.get(target) in (0, 8)
            if target != "__version__" and not inside and LAYERS[target] >= LAYERS.get(room, -1):
                wrong.append(f"{file.relative_to(REPOSITORY)}:{line} imports {module}")
    assert not wrong


def test_algorithms_import_nothing_of_ours() -> None:
    wrong = [
        f"{file.name}:{line} imports {module}"
        for file in (PACKAGE / "algorithms").glob("*.py")
        for line, module in imported_modules(file)
        if room_of(module) != "algorithms"
    ]
    assert not wrong


def test_the_import_reader_sees_each_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", tmp_path)
    file = tmp_path / "srtrl" / "model" / "weights.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import torch, srtrl.engine\nfrom srtrl import cli\nfrom srtrl.trainer.update import x\n"
        "def f():\n    from ..tasks import base\n    from .attention import y\n"
    )
    assert list(imported_modules(file)) == [
        (1, "srtrl.engine"),
        (2, "srtrl.cli"),
        (3, "srtrl.trainer.update"),
        (5, "srtrl.tasks"),
        (6, "srtrl.model.attention"),
    ]


def test_the_command_line_imports_nothing_heavy() -> None:
    program = f"import sys, {', '.join(LIGHT_MODULES)}; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_readme_lists_every_folder() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"\[`(\w+)/`\]\(srtrl/(\w+)\)", readme)
    assert all(name == target for name, target in listed)
    packages = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert {name for name, _ in listed} == packages


def test_no_file_is_a_drawer_for_everything() -> None:
    names = {"utils", "util", "helpers", "helper", "misc", "common"}
    assert not [file for file in FILES if file.stem in names]


def test_files_and_functions_stay_readable() -> None:
    too_long = []
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        sizes = [(str(file.relative_to(REPOSITORY)), text.count("\n"), 500)]
        sizes += [
            (f"{file.relative_to(REPOSITORY)}:{node.lineno} {node.name}", (node.end_lineno or 0) - node.lineno + 1, 80)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef)
        ]
        too_long += [f"{what}: {size} lines" for what, size, most in sizes if size > most]
    assert not too_long
