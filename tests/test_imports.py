"""Packages import only from those above them, and no files import each other in a circle."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "srtrl"
LAYERS = (
    ("types", "resolve", "metrics", "statistics"),
    ("recipe",),
    ("ranks",),
    ("algorithms",),
    ("model",),
    ("drafters",),
    ("engine",),
    ("tasks",),
    ("environments",),
    ("rollout",),
    ("run",),
    ("trainer",),
    ("checks",),
    ("evaluation", "report", "bench"),
    ("warm_start",),
    ("cli", "generation", "api", "__main__"),
)
"""In the order of imports: a file imports from its own row and those above; `TYPE_CHECKING` makes no difference."""


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


def cycles_of(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules each of which reaches the others."""
    reached: dict[str, set[str]] = {}
    for start, imported in graph.items():
        seen: set[str] = set()
        waiting = list(imported)
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += graph[name]
        reached[start] = seen
    found: list[set[str]] = []
    for name in graph:
        circle = {other for other in reached[name] if name in reached[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def layer_of(name: str) -> int:
    """Row of `LAYERS`; of a file directly in the package its own row."""
    part = name.split(".")[1]
    for number, layer in enumerate(LAYERS):
        if part in layer:
            return number
    raise AssertionError(f"{name} has no row in LAYERS")


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return graph_of({module_name(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))})


def test_no_files_import_each_other_in_a_circle(graph: dict[str, set[str]]) -> None:
    assert cycles_of(graph) == []


def test_packages_import_from_those_above_them_only(graph: dict[str, set[str]]) -> None:
    upward = {
        (name, target)
        for name, targets in graph.items()
        for target in targets
        if name != "srtrl" and layer_of(target) > layer_of(name)
    }
    assert upward == set()


def test_the_search_sees_circles_in_functions_and_for_type_checkers() -> None:
    sources = {
        "srtrl": "",
        "srtrl.a": "from srtrl.b import thing",
        "srtrl.b": "def thing():\n    import srtrl.c\n",
        "srtrl.c": "from srtrl import a",
        "srtrl.d": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from srtrl.e import x\n",
        "srtrl.e": "from srtrl.d import y",
        "srtrl.f": "from srtrl import a",
    }
    assert cycles_of(graph_of(sources)) == [{"srtrl.a", "srtrl.b", "srtrl.c"}, {"srtrl.d", "srtrl.e"}]
