"""The house rules that a program can check: who may import whom, what is quick to import, readable and small."""

import ast
import io
import math
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from mutations import MUTATIONS, unseen_faults

from srtrl.recipe.fields import fields_of, section_in
from srtrl.recipe.file import read_yaml
from srtrl.recipe.schema import Recipe

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "srtrl"
WALKTHROUGH = REPOSITORY / "docs" / "walkthrough.md"
PROJECT = REPOSITORY / "pyproject.toml"
FILES = sorted(PACKAGE.rglob("*.py"))
HEAVY = (
    *("torch", "torch._dynamo", "torch.distributed.tensor", "transformers", "transformers.models.auto", "accelerate"),
    *("datasets", "math_verify", "matplotlib", "numba", "pandas", "pyarrow", "scipy", "sympy", "tensorboard"),
)
"""Modules that take tenths of a second, or seconds, to import."""
LIGHT_MODULES = "srtrl, srtrl.types, srtrl.recipe.schema, srtrl.recipe.file, srtrl.resolve, srtrl.files, srtrl.metrics"
IMPORTED_BY = {
    "--help": set(),
    "train --help": set(),
    "show-config quickstart": set(),
    "compare RUN": set(),
    "rollouts RUN": {"pyarrow"},
    # It decodes a rollout again: a tokenizer, and the drafter's kernels.
    "report RUN": {"pyarrow", "transformers", "numba", "scipy", "matplotlib"},
    # Losses are tried, prompts are tokenised, and the classes of drafters hold kernels; Numba imports SciPy.
    "show-config quickstart --check": {"torch", "transformers", "numba", "scipy"},
    "generate bundled:tiny rollout.max_new_tokens=1 --prompt 1+2": {"torch", "transformers", "numba", "scipy"},
}
"""Arguments of the command line, and what it imports of `HEAVY` at most; RUN is the folder of a run."""
LAYERS = (
    ("algorithms",),
    ("types", "resolve", "files", "metrics", "statistics"),
    ("recipe",),
    ("ranks",),
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
    ("build_models",),
    ("meta_update",),
    ("build",),
    ("checks", "planner"),
    ("evaluation", "report", "bench"),
    ("warm_start",),
    ("cli", "generation", "live_run", "api", "__main__"),
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
    "partial rollout",
    "features/",
    "srtrl.features",
)
"""Run-ahead and ranks are not among them: the core has a stand-in for each (`NoRunAhead`, `OneRank`)."""


NOT_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)
NOT_IN_A_RECIPE = {
    "output_dir": "where a run goes is not the recipe's business: a user gives it",
    "repeatable": "two runs on one GPU, to be compared bit by bit (docs/exactness.md)",
    "model.tokenizer": "of policies whose folder has none (docs/logging.md)",
    "model.lora.base": "memory of a GPU: the planner proposes it (docs/lora.md)",
    "algorithm.opsm": "drops samples that the policy has left (docs/algorithms/options.md)",
    "algorithm.drift": "a pull towards the policy that sampled (docs/algorithms/options.md)",
    "algorithm.teacher.clip": "bounds a token (docs/algorithms/distillation.md)",
    "algorithm.teacher.coefficient": "beside rewards (docs/algorithms/distillation.md)",
    "data.order": "a curriculum, or prompts without a signal passed over (docs/data.md)",
    "train.num_passes": "in place of a number of steps (docs/data.md)",
    "grading.timeout_seconds": "a judge or a verifier that takes longer (docs/grading.md)",
    "rollout.stop_strings": "of policies that were not trained to end (docs/tools.md)",
    "rollout.drafter_options": "a drafter of one's own (docs/extending.md)",
    "rollout.run_ahead_max_slowdown": "turns run-aheads off (docs/speculation.md)",
    "rollout.kv_memory_gib": "what to lower where memory is short (docs/gpu.md)",
    "rollout.cuda_graphs": "stays until a GPU has run (docs/performance.md)",
    "algorithm.advantage_options": "an advantage of one's own (docs/extending.md)",
    "algorithm.filter_options": "a filter of one's own (docs/extending.md)",
    "train.sharding": "several GPUs (docs/ranks.md)",
    "train.keep_best": "needs evaluations during the run (docs/logging.md)",
    "train.attention": "stays until a GPU has run (docs/performance.md)",
    "train.max_logprob_difference": "what to raise for a policy that rounds more (docs/exactness.md)",
    "eval.before_and_after": "saves two evaluations (docs/evaluation.md)",
    "log.trackers": "needs packages of the user's choice (docs/logging.md)",
    "log.project": "needs a tracker (docs/logging.md)",
}
"""Options that no recipe in `recipes/` sets, each with its reason, and the page that has it."""


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


def with_counts(page: str) -> tuple[str, set[str]]:
    """A page with the lines of Python of each row of its tables, in tens, and their sums; and the folders it lists."""
    listed: set[str] = set()
    total = 0

    def counted(row: re.Match[str]) -> str:
        nonlocal total
        if row[1] == "sum":
            shown, total = total, 0
            return f"| sum | {row[2]} | {round(shown, -1):,} |"
        folders = re.findall(r"\[`(\w+)/`\]\(\.\./srtrl/(\w+)\)", row[1])
        assert all(name == target for name, target in folders)
        listed.update(name for name, _ in folders)
        files = [file for name, _ in folders for file in (PACKAGE / name).rglob("*.py")]
        num_lines = sum(file.read_text(encoding="utf-8").count("\n") for file in files or PACKAGE.glob("*.py"))
        total += num_lines
        return f"| {row[1]} | {row[2]} | {round(num_lines, -1):,} |"

    rows = r"^\| (sum|\(root\)|\[`\w+/`\].*?) \| (.*) \| [\d,]+ \|$"
    return re.sub(rows, counted, page, flags=re.M), listed


def test_the_walkthrough_lists_every_folder_and_its_lines() -> None:
    """Off by more than a tenth: `python tests/test_imports.py` writes the lines."""
    page = WALKTHROUGH.read_text(encoding="utf-8")
    written, listed = with_counts(page)
    assert listed == {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    counts = [
        [int(count.replace(",", "")) for count in re.findall(r" \| ([\d,]+) \|$", text, re.M)]
        for text in (page, written)
    ]
    assert len(counts[0]) == 20, "17 rows and three sums"
    assert counts[0] == pytest.approx(counts[1], rel=0.1)


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


def code_lines(path: Path) -> int:
    """Lines of a file without blank ones, comments and docstrings (strings that stand alone)."""
    text = path.read_text(encoding="utf-8")
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - strings)


def sizes() -> dict[str, int]:
    """Code lines of each package (`root`: the files of srtrl/ itself), of the plain core, of tests/ and of docs/."""
    groups = {"root": [*PACKAGE.glob("*.py")]}
    groups |= {path.parent.name: [*path.parent.rglob("*.py")] for path in sorted(PACKAGE.glob("*/__init__.py"))}
    groups["core"] = [path for package in PLAIN_CORE for path in groups[package]]
    groups |= {name: [*(REPOSITORY / name).rglob("*.py")] for name in ("tests", "docs")}
    return {name: sum(map(code_lines, paths)) for name, paths in groups.items()}


def with_budgets(project: str) -> str:
    """The text of pyproject.toml with the budgets of what is reached: 1% more, at least 10 lines."""
    rows = [f"{name} = {max(lines + 10, math.ceil(1.01 * lines))}" for name, lines in sizes().items()]
    return re.sub(r"(?<=^\[tool\.srtrl\.budgets\]\n)(\w+ = \d+\n)*", "\n".join([*rows, ""]), project, flags=re.M)


def test_no_part_has_more_code_lines_than_its_budget() -> None:
    """The budgets are a table in pyproject.toml; `python tests/test_imports.py` writes those of what is reached."""
    budgets, lines = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["srtrl"]["budgets"], sizes()
    assert budgets.keys() == lines.keys(), "tool.srtrl.budgets: a part is missing, or is there no more"
    exceeded = [
        f"{part}: {lines[part]} code lines, budget {most}" for part, most in budgets.items() if lines[part] > most
    ]
    advice = "remove what is not needed; a commit that raises a budget says what it bought"
    assert not exceeded, f"{'; '.join(exceeded)} (tool.srtrl.budgets in pyproject.toml): {advice}"


def test_every_option_is_set_by_a_recipe_or_has_a_reason() -> None:
    recipes = [read_yaml(path.read_text(encoding="utf-8"), path.name) for path in REPOSITORY.glob("recipes/*.yaml")]
    keys = {re.sub(r"\.\d+\.", ".N.", key) for _, lines in recipes for key in lines}
    options = {key for key, field in fields_of(Recipe).items() if not section_in(field.annotation)}
    assert options - keys - NOT_IN_A_RECIPE.keys() == set(), "set it in a recipe, or give the reason above"
    assert NOT_IN_A_RECIPE.keys() - (options - keys) == set(), "a recipe sets it, or there is no such option"
    for key, reason in NOT_IN_A_RECIPE.items():
        pages = [REPOSITORY / page for page in re.findall(r"docs/\w+\.md", reason)]
        name = key.rpartition(".")[2]
        assert all(name in page.read_text(encoding="utf-8") for page in pages), f"{key}: its page does not name it"


def test_every_fault_of_the_table_has_its_place() -> None:
    counts = {name: (PACKAGE / row["file"]).read_text("utf-8").count(row["old"]) for name, row in MUTATIONS.items()}
    assert counts == dict.fromkeys(MUTATIONS, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_fault_of_the_table_is_seen() -> None:
    assert unseen_faults() == []


if __name__ == "__main__":
    PROJECT.write_text(with_budgets(PROJECT.read_text(encoding="utf-8")), encoding="utf-8")
    WALKTHROUGH.write_text(with_counts(WALKTHROUGH.read_text(encoding="utf-8"))[0], encoding="utf-8")
