"""Functions of one plain training step and one decode step: how much there is to read. `pytest -s` prints them."""

import ast
import inspect
import re
import sys
import textwrap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tiny_run import make_recipe, train

from srtrl.recipe.schema import Recipe

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "srtrl"
PAGE = (REPOSITORY / "docs" / "walkthrough.md").read_text(encoding="utf-8")
CORE = ("algorithms", "model", "drafters", "engine", "rollout", "trainer", "types.py")
MAX_LINES = 2_680
"""Code lines that a reader of both steps has before them."""
PLAIN: dict[str, Any] = {
    "rollout__drafter": "none",
    "algorithm": {},
    "eval": {"before_and_after": False},
    "train__num_steps": 2,
    "train__checkpoint_every": 2,
}

Functions = dict[tuple[str, str], int]
"""File in the package and qualified name -> code lines."""


class Walk:
    """For `sys.setprofile`: the code of the package that is entered inside one call of a function, in order."""

    def __init__(self, within: str, number: int) -> None:
        """Walk of the `number`-th call, from 1, of the function with the qualified name `within`."""
        self.within, self.number = within, number
        self.entered: list[CodeType] = []
        self._call: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_qualname == self.within and event == "call":
            self.number -= 1
            self._call = frame if self.number == 0 else self._call
        if self._call is not None and event == "call" and Path(code.co_filename).is_relative_to(PACKAGE):
            self.entered.append(code)
        if frame is self._call and event == "return":
            self._call = None

    def functions(self) -> Functions:
        """Without comprehensions, which are part of their functions."""
        assert self.entered, f"{self.within} was not called"
        codes = [code for code in dict.fromkeys(self.entered) if not code.co_name.startswith("<")]
        return {(str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname): lines_of(code) for code in codes}


def lines_of(code: CodeType) -> int:
    """Lines of a function without docstring, comments and blank lines."""
    source = textwrap.dedent(inspect.getsource(code))
    [function] = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    docstring = f'"""{ast.get_docstring(function, clean=False)}"""'
    lines = [line.strip() for line in source.replace(docstring, "", 1).splitlines()]
    return sum(bool(line) and not line.startswith("#") for line in lines)


def walk(folder: Path, policy: Path, within: str, number: int, **changes: Any) -> Functions:
    """The functions that are entered inside one call of a function, in a run with these changes."""
    recorded = Walk(within, number)
    run_with_profile(recorded, make_recipe(policy, folder, **PLAIN | changes))
    return recorded.functions()


def run_with_profile(profile: Any, recipe: Recipe) -> None:
    """Train; `profile` is told of each call."""
    sys.setprofile(profile)
    try:
        train(recipe)
    finally:
        sys.setprofile(None)


def test_a_training_step_and_a_decode_step_are_read_in_one_sitting(policy: Path, tmp_path: Path) -> None:
    training = walk(tmp_path / "none", policy, "Trainer.train_step", 1)
    decoding = walk(tmp_path / "srt", policy, "Engine.step", 5, rollout__drafter="srt", rollout__draft_budget=4)
    for name, functions in (("training step", training), ("decode step with drafts", decoding)):
        files = {file for file, _ in functions}
        print(f"{name}: {len(functions)} functions of {len(files)} files, {sum(functions.values()):,} code lines")
        for (file, function), lines in functions.items():
            print(f"  {lines:4} {file} {function}")
    core = {place: lines for place, lines in (training | decoding).items() if place[0].split("/")[0] in CORE}
    print(f"the plain core's part of both: {len(core)} functions, {sum(core.values()):,} code lines")
    assert 1_000 < sum(core.values()) <= MAX_LINES
    stated = re.search(r"both steps: about ([\d,]+) code lines", PAGE)
    assert stated is not None
    assert abs(int(stated[1].replace(",", "")) - sum(core.values())) < 0.1 * MAX_LINES, "write the new number"
    assert not any(file.startswith(("features/", "cuda/", "environments/")) for file, _ in training | decoding)


def test_the_frames_to_the_loss_are_those_of_the_page(policy: Path, tmp_path: Path) -> None:
    stacks: list[list[str]] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "_clipped" and not stacks:
            frames = [one.frame.f_code for one in inspect.getouterframes(frame)]
            ours = [code.co_qualname for code in frames if Path(code.co_filename).is_relative_to(PACKAGE)]
            stacks.append([name for name in reversed(ours) if not name.startswith("<")])

    run_with_profile(look, make_recipe(policy, tmp_path, **PLAIN))
    [sentence] = re.findall(r"there are eight frames: (.*?)\.\n\n", PAGE, re.DOTALL)
    named = re.findall(r"`([\w.]+)`", sentence)
    assert len(named) == 8
    assert ["train", *stacks[0]] == named


def test_the_code_of_the_page_is_that_of_the_source() -> None:
    blocks = re.findall(r"```python\n# (srtrl/\S+\.py) (\S+)\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 6
    for file, name, block in blocks:
        tree: Any = ast.parse(text := (REPOSITORY / file).read_text(encoding="utf-8"))
        for part in name.split("."):
            [tree] = [node for node in tree.body if getattr(node, "name", None) == part]
        source = [line.strip() for line in text.splitlines()[tree.lineno - 1 : tree.end_lineno]]
        position = None  # of the next line of the source; None after lines that are left out
        for line in map(str.strip, block.strip().splitlines()):
            if line == "...":
                position = None
                continue
            found = source.index(line) if position is None else position
            assert source[found] == line, f"{file} {name}: {line}"
            position = found + 1
