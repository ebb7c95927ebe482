"""The house rules that a program can check: who may import whom, and what must stay quick to import."""

import ast
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "srtrl"
FILES = sorted(PACKAGE.rglob("*.py"))

HEAVY = ("torch", "transformers", "datasets", "accelerate", "math_verify", "matplotlib", "numba", "scipy", "pandas")
LIGHT_MODULES = (
    "srtrl",
    "srtrl.types",
    "srtrl.recipe.schema",
    "srtrl.recipe.file",
    "srtrl.resolve",
    "srtrl.metrics",
    "srtrl.cli",
)


def test_algorithms_import_nothing_of_ours() -> None:
    for file in (PACKAGE / "algorithms").glob("*.py"):
        ours = re.findall(r"^\s*(?:from|import) (srtrl\.(?!algorithms)\S+)", file.read_text(encoding="utf-8"), re.M)
        assert ours == [], file


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
            # Without the signature, which for a command is the documentation of its options.
            (f"{file.relative_to(REPOSITORY)}:{node.lineno} {node.name}", node.end_lineno - node.body[0].lineno + 1, 80)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef) and node.end_lineno
        ]
        too_long += [f"{what}: {size} lines" for what, size, most in sizes if size > most]
    assert not too_long
