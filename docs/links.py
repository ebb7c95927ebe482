"""Write the line of each function and class that a page links to, such as [`Engine.step`](srtrl/engine/engine.py#L140).

Run `python docs/links.py` after code has moved; a test says when.
"""

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[`([A-Za-z_][\w.]*)`\]\(([^)#\s]+\.py)(?:#L\d+)?\)")


def line_of(source: str, name: str) -> int | None:
    """The line where a dotted name is defined: a class or function, or an assignment to it; None if there is none."""
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        found = next((child for child in ast.walk(node) if child is not node and part in _names(child)), None)
        if found is None:
            return None
        node = found
    assert isinstance(node, ast.stmt)
    return node.lineno


def _names(node: ast.AST) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def with_lines(page: Path) -> str:
    """The text of a page, its links to names with the lines that they have now."""

    def link(match: re.Match[str]) -> str:
        name, target = match[1], match[2]
        path = page.parent / target
        line = line_of(path.read_text(encoding="utf-8"), name) if path.is_file() and not name.endswith(".py") else None
        return match[0] if line is None else f"[`{name}`]({target}#L{line})"

    return LINK.sub(link, page.read_text(encoding="utf-8"))


def pages() -> list[Path]:
    """All pages of this folder; the README links to packages, not to lines."""
    return sorted((REPOSITORY / "docs").rglob("*.md"))


if __name__ == "__main__":
    for page in pages():
        page.write_text(with_lines(page), encoding="utf-8")
