"""srtrl from Python: recipes as dictionaries, functions and rows as arguments, and the notebook of the docs."""

import io
import json
import os
import re
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, DatasetDict

import srtrl
from srtrl.algorithms.losses import ppo_clip
from srtrl.api import in_python
from srtrl.metrics import read_metrics
from srtrl.recipe.file import read_source
from srtrl.tasks.reward_input import RewardInput

DOCS = Path(__file__).resolve().parent.parent / "docs"
ROWS: list[dict[str, Any]] = [{"prompt": f"{number}+1=", "wanted": number % 3} for number in range(12)]


def digits(sample: RewardInput) -> float:
    return sum(character.isdigit() for character in sample.text) / sample.num_tokens


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def recipe(policy: Path) -> dict[str, Any]:
    return {
        "name": "run",
        "device": "cpu",
        "num_threads": 1,
        "model": {"path": policy},
        "rollout": {"num_prompts": 3, "num_samples": 2, "max_prompt_tokens": 32, "max_new_tokens": 8, "slots": 8},
        "train": {"num_steps": 2, "learning_rate": 0.01, "checkpoint_every": 1},
    }


def reward_above(limit: float) -> Any:
    def reward(sample: RewardInput) -> float:
        return float(digits(sample) > limit)

    return reward


def test_a_dictionary_with_functions_and_rows_trains_and_resumes(recipe: dict[str, Any]) -> None:
    """The rewards see the fields of the rows; an argument replaces nothing in the caller's dictionary."""
    seen: list[Any] = []
    steps: list[dict[str, float]] = []

    def wanted(sample: RewardInput) -> torch.Tensor:
        seen.append(sample.prompt.metadata["wanted"])
        return torch.tensor(float(sample.prompt.metadata["wanted"]))

    before = json.dumps(recipe, default=str)
    given: dict[str, Any] = {"rewards": [digits, {"name": wanted, "weight": 0.5}]}
    given["on_step"] = lambda step, row, run: steps.append({"step": step} | row)
    folder = srtrl.train(recipe, rows=ROWS, **given).folder
    assert json.dumps(recipe, default=str) == before
    assert {*seen} == {0, 1, 2}
    assert steps == read_metrics(folder / "metrics.jsonl")
    table = pq.read_table(folder / "rollouts" / "step_000001.parquet").to_pylist()
    assert [row["reward"] for row in table] == [row["reward_digits"] + 0.5 * row["reward_wanted"] for row in table]
    changes = {"train.num_steps": 3, "train.learning_rate": 1e-5}
    again = srtrl.train(recipe, changes, rows=ROWS, resume=True, from_step=1, **given)
    assert (again.num_steps, again.folder) == (3, Path("runs/run").absolute())
    assert steps[2] == steps[0], "it is called again for the step of the checkpoint"
    assert read_metrics(folder / "metrics.jsonl") == steps[2:]
    assert [(row["step"], row["learning_rate"]) for row in steps[3:]] == [(2, 1e-5), (3, 1e-5)]
    with pytest.raises(ValueError, match=r"these options cannot change within a run(.|\n)*task\.options"):
        srtrl.train(recipe, rows=ROWS[1:], resume=True, **given)


def test_recipes_come_from_files_dictionaries_and_recipes(recipe: dict[str, Any]) -> None:
    loaded = srtrl.load_recipe(recipe, rewards=digits, rows=ROWS)
    Path("recipe.json").write_text(loaded.model_dump_json())
    assert srtrl.load_recipe("recipe.json") == srtrl.load_recipe(Path("recipe.json")) == loaded
    assert srtrl.load_recipe(loaded) == loaded
    changes = {"loss": ppo_clip, "kl": {"coefficient": 0.1}}
    values = {"train.num_steps": 5, "algorithm": changes, "train.betas": (0.8, 0.9)}
    algorithm = 'algorithm={loss: "srtrl.algorithms.losses:ppo_clip", kl: {coefficient: 0.1}}'
    overrides = ["train.num_steps=5", algorithm, "train.betas=[0.8, 0.9]"]
    assert srtrl.load_recipe(loaded, values) == srtrl.load_recipe("recipe.json", overrides)
    both = srtrl.load_recipe(loaded, {"rewards": [digits, "format"], "task.options.train": None}, rows=ROWS[:2])
    assert [reward.name for reward in both.rewards] == ["test_api:digits", "format"]
    assert srtrl.load_recipe(both, {"rewards": None}, rewards=digits).rewards == loaded.rewards
    for section, name in ((loaded, "seed"), (loaded.train, "num_steps")):
        with pytest.raises(ValueError, match=rf"`{name}` cannot be set: load_recipe\(recipe, "):
            setattr(section, name, 2)


def test_rows_are_any_dictionaries(recipe: dict[str, Any]) -> None:
    """Equal rows are one file, named after its content."""
    table = Dataset.from_list(ROWS)
    arrays = ({"prompt": row["prompt"], "wanted": np.int64(row["wanted"])} for row in ROWS)
    options = [
        srtrl.load_recipe(recipe, rewards=digits, rows=rows, eval_rows=ROWS[:3]).task.options
        for rows in (ROWS, tuple(ROWS), table, arrays)
    ]
    assert options == [options[0]] * 4
    paths = [Path(*options[0][split]["files"]) for split in ("train", "eval")]
    assert [[json.loads(line) for line in path.read_text().splitlines()] for path in paths] == [ROWS, ROWS[:3]]
    assert set(Path("runs/run").rglob("*")) == {*paths}


def test_messages_name_arguments_and_rows_stay_with_their_run(recipe: dict[str, Any]) -> None:
    """A folder with rows alone is a new one; one that is renamed, and the one after it, have the rows of both."""
    for rows in (ROWS, ROWS[1:]):
        srtrl.train(recipe, {"train.num_steps": 1}, rewards=digits, rows=rows, overwrite=True)
    with pytest.raises(ValueError, match=r"^runs/run exists: resume=True continues that run, overwrite=True renames"):
        srtrl.train(recipe, rewards=digits, rows=ROWS)
    with pytest.raises(ValueError, match=r"^from_step needs resume=True; to begin"):
        srtrl.train(recipe, rewards=digits, rows=ROWS, from_step=1)
    assert in_python("--checkpoint 3: none. `srtrl train x --resume`") == "from_step=3: none. `srtrl train x --resume`"
    assert sorted(path.name for path in Path("runs").iterdir()) == ["run", "run.1"]
    for name in ("run", "run.1"):
        files = read_source(Path(f"runs/{name}/recipe.yaml")).data["task"]["options"]["train"]["files"]
        assert Path(*files).is_file()


def test_a_script_needs_no_guard(recipe: dict[str, Any]) -> None:
    """Grading workers do not run it again: neither of its two runs is renamed, or trained again."""
    script = """
        from srtrl import train
        from srtrl.tasks.reward_input import isolated

        @isolated
        def local(sample):
            return 1.0

        first = RECIPE | {"name": "first"}
        train(first, rewards=["rewards:digits"], rows=ROWS, overwrite=True)
        options = {"problem_field": "prompt", "answer_field": "wanted"}
        second = RECIPE | {"name": "second", "task": {"name": "math", "options": options}}
        train(second, rewards=["correct", "rewards:far"], rows=ROWS, overwrite=True)
        train(RECIPE, rewards=[local], rows=ROWS)
    """
    module = """
        from srtrl.tasks.reward_input import isolated

        def digits(sample):
            return sum(character.isdigit() for character in sample.text) / sample.num_tokens

        @isolated
        def far(sample):
            return 0.5
    """
    Path("rewards.py").write_text(textwrap.dedent(module))
    values = f"RECIPE, ROWS = {json.loads(json.dumps(recipe, default=str))}, {ROWS}\n"
    Path("script.py").write_text(values + textwrap.dedent(script))
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert sorted(path.name for path in Path("runs").iterdir() if path.is_dir()) == ["first", "run", "second"]
    assert [path.suffix for path in Path("runs/run").iterdir()] == [".jsonl"], "it was refused"
    for name in ("first", "second"):
        assert [row["step"] for row in read_metrics(Path("runs", name, "metrics.jsonl"))] == [1, 2]
    assert {row["reward/far"] for row in read_metrics(Path("runs/second/metrics.jsonl"))} == {0.5}
    assert "--overwrite" not in done.stdout
    assert "from_python.run:local is isolated, and workers do not run this program" in done.stderr


def test_functions_of_two_runs_may_have_one_name(recipe: dict[str, Any]) -> None:
    low, high = (
        srtrl.load_recipe(recipe | {"name": name}, rewards=reward_above(limit), rows=ROWS)
        for name, limit in (("low", -1.0), ("high", 2.0))
    )
    for loaded, expected in ((low, 1.0), (high, 0.0)):
        assert loaded.rewards[0].name == f"from_python.{loaded.name}:reward"
        assert read_metrics(srtrl.train(loaded).folder / "metrics.jsonl")[0]["reward/mean"] == expected


CHANGES_THE_PROCESS = """
import os, sys, tempfile
import torch

torch.set_grad_enabled(False)
torch.set_default_dtype(torch.float64)

def digits(sample):
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    sys.stdout.close()
    os.chdir(tempfile.gettempdir())
    return sum(character.isdigit() for character in sample.text) / sample.num_tokens

async def waits(sample):
    if sample.text == "an answer":  # of the trial: while the decoder runs, it may meet the other type
        torch.set_default_dtype(torch.bfloat16)
    return 0.0
"""
PUT_RIGHT = [
    "this program has turned gradients off: put right",
    "process_changes has turned gradients off, set the default dtype torch.float64: put right",
    "the verifier or reward `waits` or the environment has set the default dtype torch.bfloat16: put right",
    "reward `digits` has closed standard output (lines go to standard error), turned gradients off, set 2 threads in "
    "place of 1: put right",
]


def test_what_a_reward_changes_for_the_process_is_put_right(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run stays in its folder and learns what it learns without; each change is one line."""
    Path("process_changes.py").write_text(CHANGES_THE_PROCESS)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    torch.set_grad_enabled(False)
    here, weights = Path.cwd(), []
    for name, rewards in (("plain", [digits]), ("run", ["process_changes:digits", "process_changes:waits"])):
        result = srtrl.train({**recipe, "name": name}, rewards=rewards, rows=ROWS)
        assert result.folder == here / "runs" / name
        weights.append((result.folder / "checkpoints/step_000002/model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert Path.cwd() != here
    assert [line for line in caplog.messages if "put right" in line] == PUT_RIGHT
    assert (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()) == (True, torch.float32, 1)


def answered(completions: list[str], prompts: list[str], wanted: list[int], **columns: list[Any]) -> list[Any]:
    """In the form of TRL: lists, and None where it does not apply."""
    assert not columns
    rows = zip(prompts, completions, wanted, strict=True)
    return [None if number == 0 else number + len(text) * prompt.endswith("=") for prompt, text, number in rows]


def test_a_reward_in_the_form_of_trl_is_taken_as_it_is(recipe: dict[str, Any]) -> None:
    """It is one call, with the fields of the rows as lists; conversations are lists of messages."""
    folder = srtrl.train(recipe, rewards=answered, rows=ROWS).folder
    rows = pq.read_table(folder / "rollouts" / "step_000001.parquet").to_pylist()
    wanted = {row["prompt"]: row["wanted"] for row in ROWS}
    assert [row["reward"] for row in rows] == [
        number and number + len(row["text"]) for row in rows for number in [wanted[row["prompt"]]]
    ]

    def compares(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(one in text) for text, one in zip(completions, answer, strict=True)]

    with pytest.raises(ValueError, match=r"before the run began: .*missing 1 required positional argument: 'answer'"):
        srtrl.train(recipe, {"name": "other"}, rewards=compares, rows=ROWS)


def test_the_result_has_the_figures_of_the_run(recipe: dict[str, Any]) -> None:
    result = srtrl.train(recipe, rewards=digits, rows=ROWS, eval_rows=ROWS[:3])
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    rows[2]["eval/reward"] = rows[0]["eval/reward"] + 1
    (result.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (result.history, result.metrics) == (rows, rows[2])
    for held_out, row in ((result.before, rows[0]), (result.after, rows[2])):
        assert held_out == {name: value for name, value in row.items() if name.startswith("eval/")}
        assert "eval/reward" in held_out
    without = srtrl.train(recipe, {"name": "other"}, rewards=digits, rows=ROWS)
    assert (without.before, without.after) == ({}, {})
    (without.folder / "metrics.jsonl").write_text("")
    assert (without.metrics, without.before) == ({}, {})


def test_a_wrong_key_is_its_text_alone(recipe: dict[str, Any]) -> None:
    """No chain of tracebacks; what a misspelt key means is not also missing; more than ten problems are all shown."""
    names = [f"wrong_{number}" for number in range(14)]
    rollout = recipe["rollout"] | dict.fromkeys(names, 1) | {"num_promts": recipe["rollout"]["num_prompts"]}
    del rollout["num_prompts"]
    with pytest.raises(ValueError, match=r"^15 problems in the recipe:") as caught:
        srtrl.load_recipe(recipe | {"rollout": rollout}, rewards=digits, rows=ROWS)
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1
    assert "rollout.num_promts: unknown key, did you mean `num_prompts`?" in str(caught.value)
    assert "missing" not in str(caught.value)
    assert all(f"rollout.{name}: " in str(caught.value) for name in names)
    with pytest.raises(ValueError, match=r"^override `rollout\.slotz`: rollout\.slotz: unknown key, did") as caught:
        srtrl.generate("bundled:tiny", ["1+1="], overrides={"rollout.slotz": 1})
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


NAMELESS: Any = next(iter([lambda sample: 1.0]))
BAD: list[tuple[dict[str, Any], str]] = [
    ({"recipe": 5}, "expected a recipe: a YAML file, a dictionary or a Recipe, found int"),
    ({"overrides": {"train": None}}, "override `train`: train: should be a section (key: value), found null"),
    ({"overrides": [5]}, "override `5`: expected a text, section.key=value"),
    ({"overrides": {"task": "prompts"}}, 'argument `rows`: task: is "prompts", which has no item `options`'),
    ({"rows": DatasetDict(train=Dataset.from_list(ROWS))}, "item 0 is 'train' (of a DatasetDict take a split"),
    ({"rows": iter(())}, "rows: there are none"),
    ({"rows": [{"prompt": object()}]}, "rows: item 0 is no JSON: 'object' object has no attribute 'tolist'"),
    ({"eval_rows": [5]}, "eval_rows: expected a list"),
    ({"overrides": {"rewards": "correct"}}, "argument `rewards` and override `rewards`: rewards: the recipe has its"),
    ({"overrides": {"rewards": digits}}, 'to replace them, also give the override {"rewards": None}; to add to them,'),
    (
        {"overrides": {"task.options.train": {"files": ["a"]}}},
        "argument `rows` and override `task.options.train`: task",
    ),
    ({"overrides": {"task.options.eval": 1}, "eval_rows": ROWS}, 'also give the override {"task.options.eval": None}'),
    ({"rewards": [NAMELESS]}, f"(test_api.py:{NAMELESS.__code__.co_firstlineno}) has no name: write it with `def`"),
    ({"rewards": [reward_above(0), reward_above(1)]}, "two functions of the recipe are named `reward`: rename one"),
    ({"overrides": {"eval.every_steps": 1}}, "prompts has no held-out problems: give `eval_rows=`, or train without"),
    ({"rewards": []}, "argument `rewards`: rewards: should have at least 1 item"),
    ({"rewards": ["from_python.elsewhere:f"]}, "from_python.elsewhere: it was given to srtrl.train: continue from"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message for _, message in BAD])
def test_a_mistake_in_the_arguments_is_a_message(
    recipe: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        srtrl.load_recipe(**{"recipe": recipe, "rows": ROWS, "rewards": [digits]} | arguments)
    assert "\n" not in str(caught.value)
    places = [Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert places == ["test_api.py", "api.py"]


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    book = json.loads((DOCS / "first_run.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    program = "\n".join(cells)
    smaller = {'"num_steps": 30': '"num_steps": 2', "num_steps + 10": "num_steps + 1", "range(64)": "range(4)"}
    smaller |= {'"num_samples": 8': '"num_samples": 2', '"num_prompts": 16': '"num_prompts": 4'}
    for text, replacement in smaller.items():
        assert program.count(text) == 1, text
        program = program.replace(text, replacement)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, "first_run.ipynb", "exec"), names)
    assert len(names["history"]) == 2
    assert names["result"].num_steps == 2
    assert [row["step"] for row in read_metrics(Path("runs/first_run/metrics.jsonl"))] == [0, 1, 2, 3]
    assert not [name for name in sys.modules if name.startswith("IPython")]
