"""Packages import only from those above them in README's table of folders, and no import cycles between files."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "srtrl"
LAYERS = (
    ("recipe", "recipe_*", "types", "metrics", "resolve", "ranks"),
    ("algorithms",),
    ("model",),
    ("drafters",),
    ("engine",),
    ("tasks",),
    ("environments",),
    ("rollout",),
    ("trainer",),
    ("evaluation", "report", "bench"),
    ("cli", "complete", "completer", "checks", "api", "__main__"),
)
"""From the top of the table down; the last ones, though in the root, are commands that use all the others."""
KNOWN_UPWARD = {("srtrl.evaluation.settings", "srtrl.checks")}
"""Files (importing, imported) that still import from below: to be resolved, not to be added to."""


def module_name(path: Path) -> str:
    """`srtrl.engine.engine`; a package is its `__init__`."""
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported_names(tree: ast.AST) -> set[str]:
    """Modules, or names within modules, that a file imports anywhere but for type checkers."""
    found: set[str] = set()
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif is_type_checking(node):
            assert isinstance(node, ast.If)
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)
    return found


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
        for pattern in layer:
            if part == pattern or (pattern.endswith("*") and part.startswith(pattern[:-1])):
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
    assert upward - KNOWN_UPWARD == set()


def test_the_search_sees_cycles_in_functions_and_not_those_for_type_checkers() -> None:
    sources = {
        "srtrl": "",
        "srtrl.a": "from srtrl.b import thing",
        "srtrl.b": "def thing():\n    import srtrl.c\n",
        "srtrl.c": "from srtrl import a",
        "srtrl.d": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from srtrl.e import x\n",
        "srtrl.e": "from srtrl.d import y",
    }
    assert cycles_of(graph_of(sources)) == [{"srtrl.a", "srtrl.b", "srtrl.c"}]
