"""Bad input: whatever is wrong with options, recipes and files, a command says so once and leaves nothing behind.

Each case is a command line that must fail before any training: exit code 2 (a mistake of the user) or 1 (the machine
refuses), one message, no traceback, and no file or folder made or changed.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from recipe_cases import recipe_text
from tiny_run import make_recipe, train
from typer.testing import CliRunner

from srtrl.cli import app
from srtrl.recipe.fields import fields_of
from srtrl.recipe.schema import Recipe

HUGE, LONG = "9" * 30, "x" * 5000
INTEGERS = ("", "x", "1.5", "1e20", "nan", "-1", HUGE)
NUMBERS = ("", "x", "nan", "-1", "0x10")

GENERATE = "generate policy --prompt 1+1= --max-new-tokens 2"
EVAL = "eval policy --task arithmetic task.options={num_train:|5,num_eval:|5} rollout.max_prompt_tokens=32"
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    GENERATE: {
        "--samples": ("", "x", "0", "1.5", HUGE),
        "--temperature": ("", "x", "nan", "-1"),
        "--max-new-tokens": ("", "x", "0", "4294967296"),
        "--prompt": ("",),
        "--prompts": ("", "nowhere", "folder", "garbage", "garbage.parquet", "empty.parquet"),
        "--chat": ("",),
        "--no-such-option": ("1",),
        "rollout.drafter=": ("x", "os:system", "os", "no_such_module:D", "base"),
        "device=": ("gpu",),
        "rollout.slots=": ("0", "1000000000"),
    },
    "generate policy": {"": ("",), "--prompts": ("empty.jsonl",)},
    "generate --prompt 1": {
        "": ("nowhere/at/all", "garbage", "folder", "bundled:", "bundled:x", "bundled:../..", "/", "run/checkpoints"),
    },
    EVAL: {
        "--task": ("", "x", "os:system", "math", "prompts", ":", "no_such_module:Task", "os:nothing"),
        "--recipe": ("", "nowhere", "folder", "garbage"),
        "--step": ("1", "x", HUGE),
        "--suite": ("", "x", "folder", "garbage", "nowhere.yaml"),
        "--only": ("x",),
        "--data": ("x",),
        "--output": ("", "nowhere/rows.jsonl", "folder", "rows.txt", "garbage/rows.jsonl", f"{LONG}.jsonl"),
        "rollout.drafter=os:system": ("",),
    },
    "eval run": {"--step": ("0", "-1", "7", "x", HUGE), "--suite": ("x",), "task.name=x": ("",), "rewards=1": ("",)},
    "eval": {"folder": ("",), "nowhere": ("",), "--check-grader": ("",), "--import-from-here": ("",)},
    "report": {"nowhere": ("",), "folder": ("",), "garbage": ("",), "policy": ("",), "\0": ("",), LONG: ("",)},
    "rollouts run": {
        "--step": (*INTEGERS, "0", "9"),
        "--prompt": ("", "x"),
        "--sort": ("x",),
        "--limit": ("0", "x"),
    },
    "trie run": {
        "--step": (*INTEGERS, "0", "9"),
        "--prompt": ("", "x"),
        "--depth": INTEGERS[:-1],
        "--nodes": INTEGERS[:-1],
        "--tokenizer": ("", "nowhere/at/all", "folder", "garbage"),
    },
    "compare run": {
        "--metric": ("", "x"),
        "--out": ("", "folder", "nowhere/x.svg", "curve.png"),
        "nowhere": ("",),
        "folder": ("",),
    },
    "export run": {"garbage": ("",), "policy": ("",), "garbage/x": ("",), f"new/{LONG}": ("",), "\0": ("",)},
    "export run new": {"--step": (*INTEGERS, "0", "9")},
    "bench": {"x": ("",), "../cli": ("",), "os:system": ("",)},
    "bench rollout": {
        "--slots": ("0", "x", "-1", "1000000000", HUGE, "1,,2"),
        "--drafters": ("x", "os:system", "none,none", ","),
        "--model": ("nowhere/at/all", "folder", "garbage"),
        "--model-shape": ("", "x"),
        "--trace": ("nowhere", "folder", "garbage"),
        "--repeats": ("0", "x"),
        "--history": ("nan", "2", "-1"),
        "--json": ("nowhere/x.json", "folder"),
    },
    "bench host": {"--slots": ("0", "1000000000"), "--device-ms": ("", "x", "1:nan"), "--trace": ("garbage",)},
    "bench ranks --prompts 1 --samples 1": {
        "--ranks": ("0", "1000000000", "x"),
        "--price-as": ("", "1:nan"),
        "--lengths": ("", "nowhere", "folder", "garbage"),
        "--bandwidth": ("nan", "0", "x"),
    },
    "replay": {"nowhere": ("",), "folder": ("",), "garbage": ("",), "empty.jsonl": ("",)},
    "replay run": {
        "--drafter": ("x", "os:system"),
        "--drafter-options": ("x", "x=1", "=", "min_score=2"),
        "--draft-budget": ("-1", "x", HUGE),
        "--history": ("x", "nan", "2", "-1"),
        "--slots": ("0", "x", "1000000000", HUGE),
        "--max-tokens": ("0", "x"),
    },
    "show-config": {"nowhere": ("",), "folder": ("",), "garbage": ("",), "\0": ("",), LONG: ("",)},
    "train": {"nowhere": ("",), "folder": ("",), "garbage": ("",), "run": ("",), "--resume folder": ("",)},
    "train recipe.yaml": {
        "--resume --overwrite": ("",),
        "--checkpoint": INTEGERS,
        "--change": ("x", "train.learning_rate=1"),
        "x": ("",),
        "=": ("",),
        "a=": ("",),
        ".=1": ("",),
        "name=": ("../x", "a/b", "[]", ".", f"'{'x' * 300}'", "a b", '"\\0"'),
        "output_dir=": ("garbage", "garbage/x", '"\\0"', "1"),
        "seed=": ("-1", HUGE, "1.5", "true"),
        "model.path=": ("./nowhere", "garbage", "folder", "1", "bundled:x", "~nobody/x", '"\\0"', "run"),
        "model.tokenizer=": ("./nowhere", "garbage", "./folder", "bundled:x", "1", '""'),
        "critic={path:": ("|./nowhere}", "|garbage}", "|./folder}"),
        "task.name=": ("os:system", "x", "no_such_module:Task", '""', '":"', "base", "rows"),
        "task.options=": ("{x:|1}", "{num_train:|0}", "{num_train:|4294967296}", "[]", "{max_operand:|.nan}"),
        "rewards=": (
            "[]",
            "1",
            "[{}]",
            "[{name:|x}]",
            "[{name:|os:nothing}]",
            "[{name:|exits:reward}]",
            "[{name:|stops:reward}]",
            "[{name:|length,weight:|.inf}]",
        ),
        "algorithm.loss_options=": ("{x:|1}", "[]"),
        "algorithm.filters=": ("[x]", "x", "[os:nothing]"),
        "log.trackers=": ("[x]", "x"),
        "log.tracker_options=": ("{wandb:|{}}", "[]"),
        "rollout.drafter=": ("os:system", "x", "os:nothing", "builtins:dict"),
        "rollout.drafter_options=": ("{x:|1}", "{min_score:|.nan}"),
        "device=": ("tpu", "1"),
    },
    "train recipe.yaml warm_start={output:|out,train_tokenizer_vocab_size:|300}": {"": ("",)},
    "warm-start recipe.yaml": {
        "": ("",),
        "warm_start={output:": ("|garbage}", "|folder}", "|link}", '|"\\0"}', "|garbage/x}"),
        "--overwrite warm_start={output:": ("|folder}", "|policy}", "|link}", "|garbage}"),
    },
}
"""Command line -> options (or further arguments) -> bad values; `|` is a space."""

FILES: dict[str, bytes] = {
    "not UTF-8": b"\xff\xfe\x00",
    "a null byte": b"name: \x00",
    "an alias bomb": b"a: &a [x,x,x,x]\nb: &b [*a,*a,*a,*a]\nc: [*b,*b,*b,*b]\n",
    "deep": b"[" * 100_000,
    "a deep mapping": b"{a: " * 10_000,
    "tags": b"name: !!python/object/apply:os.system [echo]\n",
    "a list as key": b"? [1, 2]\n: 3\n",
    "a number as key": b"1: 2\n",
    "a key twice": b"name: a\nname: b\n",
    "two documents": b"name: a\n---\nname: b\n",
    "a tab": b"name:\n\t- x\n",
    "a huge integer": b"seed: " + b"9" * 100_000,
    "half a surrogate": b'name: "\\ud800"\n',
    "merge keys": b"<<: {name: a}\n",
    "empty": b"",
    "a text": b"just text",
    "null": b"null\n",
    "binary": b"name: !!binary aGVsbG8=\n",
    "a date": b"name: 2024-01-01\n",
    "an open quote": b'name: "x\n',
    "a long key": b"x" * 5000 + b": 1\n",
    "other trainer": b"lr: 1\nmodel: {}\nrollout: []\n",
}
"""Recipe files."""


MODELS: dict[str, dict[str, object]] = {
    "endless": {"num_hidden_layers": 10**9},
    "wide": {"hidden_size": 10**12},
    "text": {"vocab_size": "x"},
    "end": {"eos_token_id": 10**12},
    "code": {"auto_map": {"AutoModelForCausalLM": "os.system"}},
}
"""Folders of models with such values in their config."""


def values_of_fields() -> Iterator[str]:
    """For each key of a recipe an override of another type; for each count and number also one that is too large."""
    for name, info in fields_of(Recipe).items():
        key, kind = name.replace(".N", ".0"), str(info.annotation)
        if "Any" not in kind:
            yield f"{key}={{a: [1]}}"
        if re.search(r"\bint\b", kind) and key != "seed":
            yield from (f"{key}=4294967296", f"{key}=-1")
        if re.search(r"\bfloat\b", kind):
            yield from (f"{key}=.nan", f"{key}=.inf")


def command_lines() -> Iterator[list[str]]:
    for command, options in OPTIONS.items():
        for option, values in options.items():
            for value in values:
                words = [word for word in f"{command} {option}".split(" ") if word]
                if option.endswith(("=", ":")):
                    words[-1] += value
                elif value or (option.startswith("--") and option not in FLAGS):
                    words.append(value)
                yield [word.replace("|", " ") for word in words]
    for override in values_of_fields():
        yield ["show-config", "recipe.yaml", override]
    for name in FILES:
        yield ["show-config", f"{name}.yaml"]
    for name in MODELS:
        yield ["generate", name, "--prompt", "1"]


FLAGS = ("--chat", "--check-grader", "--import-from-here", "--resume --overwrite", "--resume folder")
CASES = list(command_lines())


@pytest.fixture(scope="module")
def place(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder of all cases."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "policy").symlink_to(policy)
    (folder / "folder").mkdir()
    (folder / "folder" / "notes.txt").write_text("years of work")
    (folder / "link").symlink_to("folder")
    (folder / "recipe.yaml").write_text(recipe_text("critic: {}\n", path=policy).replace("critic: {}\n", ""))
    for name, content in FILES.items():
        (folder / f"{name}.yaml").write_bytes(content)
    for name in ("garbage", "garbage.parquet"):
        (folder / name).write_bytes(bytes(range(255, 10, -1)))
    for name in ("empty.jsonl", "empty.parquet"):
        (folder / name).touch()
    train(make_recipe(policy, folder, train__num_steps=1, eval__before_and_after=False, eval__every_steps=None))
    (folder / "exits.py").write_text("import sys\nsys.exit(0)\n")
    (folder / "stops.py").write_text("raise AssertionError('not here')\n")
    for name, values in MODELS.items():
        config = json.loads((policy / "config.json").read_text())
        (shutil.copytree(policy, folder / name) / "config.json").write_text(json.dumps(config | values))
    before, paths = Path.cwd(), list(sys.path)
    os.chdir(folder)
    yield folder
    os.chdir(before)
    sys.path[:] = paths


def listing(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("words", CASES, ids=lambda words: " ".join(words)[:100].encode("unicode_escape").decode())
def test_bad_input_is_one_message(words: list[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srtrl.trainer.trainer.Trainer", Mock(side_effect=AssertionError("training begins")))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = listing(place)
    result = CliRunner().invoke(app, words)
    assert result.exit_code in (1, 2), (result.exit_code, result.output)
    assert isinstance(result.exception, SystemExit), result.exception
    assert len(re.findall(r"^(?:error|Error): ", result.stderr, re.MULTILINE)) == 1, result.stderr
    assert "Traceback" not in result.output
    assert listing(place) == before
