"""The house rules that a program can check: who may import whom, and what must stay quick to import and readable."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "srtrl"
README = REPOSITORY / "README.md"
FILES = sorted(PACKAGE.rglob("*.py"))
HEAVY = (
    *("torch", "torch._dynamo", "torch.distributed.tensor", "transformers", "transformers.models.auto", "accelerate"),
    *("datasets", "math_verify", "matplotlib", "numba", "pandas", "pyarrow", "scipy", "sympy", "tensorboard"),
)
"""What takes tenths of a second, or seconds, to import."""
LIGHT_MODULES = "srtrl, srtrl.types, srtrl.recipe.schema, srtrl.recipe.file, srtrl.resolve, srtrl.metrics"
IMPORTED_BY = {
    "--help": set(),
    "train --help": set(),
    "show-config quickstart": set(),
    "compare RUN": set(),
    "rollouts RUN": {"pyarrow"},
    # They decode a rollout again: a tokenizer, and the drafter's kernels.
    "trie RUN": {"pyarrow", "transformers", "numba", "scipy"},
    "report RUN": {"pyarrow", "transformers", "numba", "scipy", "matplotlib"},
    # Losses are tried, prompts are tokenised, and the classes of drafters hold kernels; Numba imports SciPy.
    "show-config quickstart --check": {"torch", "transformers", "numba", "scipy"},
    "generate bundled:tiny rollout.max_new_tokens=1 --prompt 1+2": {"torch", "transformers", "numba", "scipy"},
}
"""Arguments of the command line, and what it imports of `HEAVY` at most; RUN is the folder of a run."""
LAYERS = (
    ("types", "resolve", "metrics", "statistics"),
    ("recipe",),
    ("ranks",),
    ("algorithms",),
    ("model",),
    ("drafters",),
    ("engine",),
    ("tasks",),
    ("rollout",),
    ("environments",),
    ("run",),
    ("trainer",),
    ("cuda",),
    ("features",),
    ("build",),
    ("checks", "planner"),
    ("evaluation", "report", "bench"),
    ("warm_start",),
    ("cli", "generation", "api", "__main__"),
)
"""In the order of imports: a file imports from its own row and those above; `TYPE_CHECKING` makes no difference."""
PLAIN_CORE = ("algorithms", "model", "drafters", "engine", "rollout", "trainer")
"""A reader of plain GRPO needs these; a test above keeps `features` out of them."""
NAMES_OF_FEATURES = (
    "critic",
    "lora",
    "spec_rl",
    "spec-rl",
    "off_policy",
    "run_ahead",
    "run-ahead",
    "ahead of",
    "runs ahead",
    "partial rollout",
    "features/",
    "srtrl.features",
)


def module_name(path: Path) -> str:
    """`srtrl.engine.engine`; a package is its `__init__`."""
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imported_names(tree: ast.AST) -> set[str]:
    """Modules, or names within modules, that a file imports anywhere: in functions and for type checkers, too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def graph_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports."""
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        targets = {
            imported if imported in sources else imported.rpartition(".")[0]
            for imported in imported_names(ast.parse(source))
        }
        graph[name] = (targets & set(sources)) - {name, "srtrl"}
    return graph


def layer_of(name: str) -> int:
    """Row of `LAYERS`; of a file directly in the package its own row."""
    part = name.split(".")[1]
    for number, layer in enumerate(LAYERS):
        if part in layer:
            return number
    raise AssertionError(f"{name} has no row in LAYERS")


def test_files_import_from_those_above_them_only_and_in_no_circle() -> None:
    graph = graph_of({module_name(path): path.read_text() for path in FILES})
    TopologicalSorter(graph).prepare()  # raises a CycleError
    upward = {
        (name, target)
        for name, targets in graph.items()
        for target in targets
        if name != "srtrl" and layer_of(target) > layer_of(name)
    }
    assert upward == set()


def test_the_plain_core_does_not_name_what_a_recipe_may_add() -> None:
    """Files of it say nothing of these, not even in a docstring; what they offer is for anyone."""
    files = [file for package in PLAIN_CORE for file in (PACKAGE / package).glob("*.py")]
    assert len(files) > 30
    named = {(file.name, word) for file in files for word in NAMES_OF_FEATURES if word in file.read_text().lower()}
    assert named == set()


def test_the_search_sees_circles_in_functions_and_for_type_checkers() -> None:
    sources = {
        "srtrl": "",
        "srtrl.a": "from srtrl.b import thing",
        "srtrl.b": "def thing():\n    import srtrl.c\n",
        "srtrl.c": "from srtrl import d",
        "srtrl.d": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from srtrl.a import x\n",
    }
    for missing in ("srtrl.b", "srtrl.d"):
        TopologicalSorter(graph_of(sources | {missing: ""})).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(graph_of(sources)).prepare()


def test_algorithms_import_nothing_of_ours() -> None:
    for file in (PACKAGE / "algorithms").glob("*.py"):
        ours = re.findall(r"^\s*(?:from|import) (srtrl\.(?!algorithms)\S+)", file.read_text(encoding="utf-8"), re.M)
        assert ours == [], file


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(one, marks=pytest.mark.slow if "torch" in names else ()) for one, names in IMPORTED_BY.items()],
)
def test_commands_import_what_they_need(arguments: str, finished: Callable[..., Path]) -> None:
    words = [str(finished()) if word == "RUN" else word for word in arguments.split()]
    program = (
        f"import sys, {LIGHT_MODULES}\nfrom srtrl.cli import app\napp({words!r}, standalone_mode=False)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    imported = set(ast.literal_eval(result.stdout.splitlines()[-1]))
    assert imported <= IMPORTED_BY[arguments]


def with_counts(readme: str) -> tuple[str, set[str]]:
    """The README with the lines of Python of each row of its tree, in tens; and the folders that it lists."""
    listed: set[str] = set()

    def counted(row: re.Match[str]) -> str:
        folders = re.findall(r"\[`(\w+)/`\]\(srtrl/(\w+)\)", row[1])
        assert all(name == target for name, target in folders)
        listed.update(name for name, _ in folders)
        files = [file for name, _ in folders for file in (PACKAGE / name).rglob("*.py")]
        num_lines = sum(file.read_text(encoding="utf-8").count("\n") for file in files or PACKAGE.glob("*.py"))
        return f"| {row[1]} | {row[2]} | {round(num_lines, -1):,} |"

    return re.sub(r"^\| ((?:\(root\)|\[`\w+/`\]).*?) \| (.*) \| [\d,]+ \|$", counted, readme, flags=re.M), listed


def test_the_readme_lists_every_folder_and_its_lines() -> None:
    """Off by more than a tenth: `python tests/test_imports.py` writes the lines."""
    readme = README.read_text(encoding="utf-8")
    written, listed = with_counts(readme)
    assert listed == {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    counts = [
        [int(count.replace(",", "")) for count in re.findall(r" \| ([\d,]+) \|$", text, re.M)]
        for text in (readme, written)
    ]
    assert counts[0] == pytest.approx(counts[1], rel=0.1)


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


if __name__ == "__main__":
    README.write_text(with_counts(README.read_text(encoding="utf-8"))[0], encoding="utf-8")
