"""Bad input: each incorrect command line gives one message, before any training, and changes no file."""

import json
import math
import os
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from recipe_cases import recipe_text
from typer.testing import CliRunner, Result

from srtrl.cli import app
from srtrl.features.adapters import Adapter, save_adapter
from srtrl.recipe.file import RecipeError, load_recipe
from srtrl.resolve import resolve_class
from srtrl.tasks.row_task import read_prompts

TABLES: dict[str, str] = dict(
    re.findall(r"^# (\w+): .*\n((?:[^#\n].*\n)+)", Path(__file__).with_suffix(".txt").read_text("utf-8"), re.MULTILINE)
)
"""Commands, overrides, combinations of them, what fits, and what other files of tests refuse."""
ABBREVIATIONS = {
    "LONG": "x" * 5_000,
    "BRACKETS": "[" * 100_000,
    "NINES": "9" * 5_000,
    "BYTE": "\udcff",
    "CONTROL": "\x01",
    "HALF": "'o\udcff'",
    "HEADS": "architecture: {hidden_size: 9, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads",
    "ONE_SAMPLE": "rollout.num_samples=1 algorithm.advantage=reinforce_plus_plus",
    "OPTIONS": "algorithm.loss_options",
    "TEACHER": "algorithm.teacher.path=./policy 'rewards=[{name: correct, weight: 0}]'",
    "CHECK": "show-config recipe.yaml --check",
    "EASY": "{name: arithmetic, label: easy}",
    "PROMPTS": """
        'task={name: prompts, options: {train: {files: [prompts.jsonl]}}}' 'rewards=[{name: "flawed:long"}]'
    """,
    "PARTIAL": "rollout.mode=partial algorithm.old_logprobs=recompute",
    "FIXED": "rollout.slots=4 rollout.kv_memory_gib=1 rollout.draft_budget=4 rollout.run_ahead_max_slowdown=null",
}
ADAPTERS: dict[str, tuple[str, str, dict[str, object]]] = {
    "dora": ("./policy", "model.layers.0.self_attn.q_proj", {"use_dora": True}),
    "other": ("./policy", "model.layers.0.self_attn.k_proj", {}),
    "head": ("./policy", "lm_head", {}),
    "orphan": ("./nowhere", "model.layers.0.self_attn.q_proj", {}),
    "ranks": ("./policy", "model.layers.0.self_attn.q_proj", {"r": "x"}),
    "alpha": ("./policy", "model.layers.0.self_attn.q_proj", {"lora_alpha": math.nan}),
    "zero": ("./policy", "model.layers.0.self_attn.q_proj", {"r": 0}),
    "rank": ("./policy", "model.layers.0.self_attn.q_proj", {"r": 8}),
    "itself": ("./itself", "model.layers.0.self_attn.q_proj", {}),
    "chain": ("./circle", "model.layers.0.self_attn.q_proj", {}),
    "circle": ("./chain", "model.layers.0.self_attn.q_proj", {}),
}
"""Folders of adapters: base model, module, and values in the config."""
TEMPLATES: dict[str, object] = {
    "calls": "{% macro call() %}{{ call() }}{% endmacro %}{{ call() }}",
    "number": 5,
    "half": "{{ '\\ud800' }}",
    "named": [{"name": "rag", "template": "{{ messages }}"}, {"name": "tool_use", "template": "{{ tools }}"}],
}
"""Folders of models with such chat templates."""
FLAWED = """
from srtrl.algorithms.advantages import token_level
from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.tasks.base import TaskBase
from srtrl.tasks.reward_input import batched, isolated

def only_loss(logprobs, *_, **__): return -logprobs
def float_metric(logprobs, *_, **__): return -logprobs, {"mine": 0.5}
def scalar(logprobs, *_, **__): return -logprobs.mean(), {}
def detached(logprobs, *_, **__): return -logprobs.detach(), {}
def raises(logprobs, *_, **__): return {}["x"]
def listed(rewards): return rewards.tolist()
def listed_mask(rewards, correct): return [True] * len(rewards)
def detached_sum(token_loss, index, **_): return token_loss.detach().sum()
def no_reduction(token_loss, index, **_): return token_loss
def mean_kl(logprobs, ref_logprobs): return (logprobs - ref_logprobs).mean()
def unmarked_tokens(token_rewards, values, mask, *, group_index, gamma, lam): return token_rewards
def needy_loss(logprobs, old, advantages, index, *, clip_low, clip_high, tau): return -advantages * logprobs / tau, {}
def open_loss(logprobs, old, advantages, index, *, clip_low, clip_high, **options): return -advantages * logprobs, {}
def old_filter(rewards): return rewards[:, 0] > 0
def draws_twice(seed, epoch, statistics): return [0, 1, 2, 1]
def draws_none(seed, epoch, statistics): return []
def draws_beyond(seed, epoch, statistics): return range(51)
def draws_lists(seed, epoch, statistics): return [[0, 1]]
def draws_floats(seed, epoch, statistics): return [0.5, 1.5]
def verl(data_source, solution_str, ground_truth): return 1.0
def long(sample): return sample.num_tokens

def loss(logprobs, old, advantages, index, *, clip_low, clip_high, power=2, floor=0.0):
    if power < 1:
        raise ValueError(f"algorithm.loss_options.power: expected at least 1, found {power}")
    return -advantages * logprobs ** power, {}

@token_level
def wrong_tokens(rewards): return rewards
@token_level
def tokens(token_rewards, values, mask, *, group_index, gamma, lam): return token_rewards
@token_level(needs_values=True)
def with_critic(token_rewards, values, mask, *, group_index, gamma, lam): return token_rewards - values

@batched
async def marked(samples): return [1.0 for _ in samples]

@isolated
@batched
def both_marks(samples): return [1.0 for _ in samples]

class Bare: pass
class Short(TaskBase):
    def __init__(self, options, tokenizer): pass
class Silent(TaskBase): pass
class Deaf(TaskBase):
    def __init__(self, options, **given): raise ValueError("task.options.words: none of them fits")

RATE = 3
class Empty(DrafterBase): pass
class Lists(DrafterBase):
    def propose(self, *_): return [[1, 2]]
class ListsInTrees(DrafterBase):
    def propose(self, *_): return DraftTrees(token_ids=[1], parents=[-1], scores=[0.5], offsets=[0, 1])
"""
"""Functions and classes of a user, most with one mistake each."""


FILES = {
    "empty.jsonl": "",
    "rows.jsonl": '{"prompt": "1"}\n{"text": "2"}\n',
    "prompts.jsonl": '{"prompt": "1+1="}\n',
    "flawed.py": FLAWED,
    "broken.py": "import not_there\n",
    "exits.py": "import sys\nsys.exit(0)\n",
    "hides.py": "def __getattr__(name):\n    raise RuntimeError('no reward')\n",
    "mute.py": "class Mute(BaseException):\n    def __str__(self): raise ValueError\nraise Mute\n",
    "typo.py": "def f(:\n",
    "broken.yaml": "name: [",
    "mine.yaml": "name: mine",
    "nowhere.yaml": recipe_text(path="./nowhere"),
    "many.yaml": recipe_text() + "".join(f"key_{number}: 1\n" for number in range(30)),
    "foreign.svg": "<svg>years of work</svg>",
    "folder/notes.txt": "years of work",
    "foreign/report.html": "<title>mine</title>",
    "silent/metrics.jsonl": "",
    "chat/chat_template.jinja": "{% for x in range(10**9) %}{% endfor %}",
}


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="module")
def place(policy: Path, finished: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder of all cases."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "policy").symlink_to(policy)
    (folder / "link").symlink_to("folder")
    (folder / "folder").mkdir()
    for name in ("run", "foreign", "holes", "quiet", "silent"):
        shutil.copytree(finished(train__num_steps=2), folder / name)
    damaged = ("merges", "chat", "nested", "piped", "gone", "length", "lacking", "words", "wordless", "end")
    for name in (*damaged, *TEMPLATES):
        shutil.copytree(policy, folder / name)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name in ("garbage", "garbage.parquet"):
        (folder / name).write_bytes(bytes(range(255, 10, -1)))
    text = recipe_text(path=policy)
    (folder / "recipe.yaml").write_text(text)
    (folder / "critic.yaml").write_text(text + "\nalgorithm: {advantage: gae}\ncritic: {}\n")
    data = "  options:\n    train:\n      files:\n      - missing.jsonl\n"
    text = text.replace("name: arithmetic", "name: math")
    (folder / "missing.yaml").write_text(text.replace("  options: {num_train: 50, num_eval: 20}\n", data))
    shutil.rmtree(folder / "quiet" / "rollouts")
    (folder / "holes" / "rollouts" / "step_000001.parquet").unlink()
    (folder / "holes" / "rollouts" / "step_000001.parquet").mkdir()
    model = json.loads((policy / "tokenizer.json").read_text())["model"]
    change_json(folder / "merges" / "tokenizer.json", model=model | {"vocab": {}, "merges": [["a", "b"]]})
    for name in ("gone.yaml", "gone.jsonl", "gone/tokenizer.json"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("nowhere")
    for name in ("pipe.yaml", "pipe.jsonl", "piped/generation_config.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    (folder / "lacking" / "model.safetensors").rename(folder / "lacking" / "pytorch_model.bin")
    (folder / "wordless" / "tokenizer.json").unlink()
    (folder / "nested" / "config.json").write_text("[" * 100_000)
    words = {"type": "WordLevel", "vocab": {"1": 0}, "unk_token": "<unk>"}
    change_json(folder / "words" / "tokenizer.json", model=words)
    change_json(folder / "length" / "tokenizer_config.json", model_max_length="x")
    for name, template in TEMPLATES.items():
        (folder / name / "chat_template.jinja").unlink(missing_ok=True)
        change_json(folder / name / "tokenizer_config.json", chat_template=template)
    change_json(folder / "end" / "config.json", eos_token_id=10**12)
    for name, (base, module, values) in ADAPTERS.items():
        tensors = {f"{module}.lora_{kind}": torch.zeros(32, 32) for kind in "AB"}
        save_adapter(Adapter(base=base, rank=32, alpha=1, tensors=tensors), folder / name)
        change_json(folder / name / "adapter_config.json", **values)
    before, paths = Path.cwd(), list(sys.path)
    os.chdir(folder)
    yield folder
    os.chdir(before)
    sys.path[:] = paths


@pytest.fixture(autouse=True)
def _nothing_changes(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def listing() -> dict[str, int]:
        return {str(path): path.lstat().st_mtime_ns for path in place.rglob("*")}

    monkeypatch.setattr("srtrl.build.load_models", Mock(side_effect=AssertionError("training begins")))
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=OSError("no network")))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = listing()
    yield
    assert listing() == before


def written_out(text: str) -> str:
    for name, meaning in ABBREVIATIONS.items():
        text = text.replace(name, meaning)
    return text


def srtrl(command: str) -> Result:
    return CliRunner().invoke(app, shlex.split(written_out(command)))


def refusal(command: str) -> str:
    """The message with which a command is refused."""
    result = srtrl(command)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert len(result.stderr) < 4_200, "20 problems, of up to 210 characters each"
    assert len(re.findall(r"^(?:error|Error): ", result.stderr, re.MULTILINE)) == 1, result.stderr
    return result.stderr


def parsed(table: str) -> list[list[str]]:
    return [line.split(" => ") for line in TABLES[table].splitlines()]


@pytest.mark.parametrize(("command", "message"), parsed("commands"))
def test_bad_input_is_one_message(command: str, message: str) -> None:
    assert message in refusal(command)


@pytest.mark.parametrize(("overrides", "message"), parsed("overrides"))
def test_a_bad_override_is_one_message_that_names_it(overrides: str, message: str) -> None:
    said = refusal(f"train recipe.yaml {overrides}")
    assert message in said
    assert any(f"override `{override}`: " in said for override in shlex.split(written_out(overrides))), said


def test_a_row_that_cannot_be_used_is_named_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for case, reason in parsed("rows"):
        name, options, row = case.split(" | ")
        line = written_out(row).encode(errors="surrogateescape")
        file.write_bytes(b"\n%b\n%b" % (line if "id_field" in options else b"", line))
        checked = resolve_class("srtrl.tasks", name, "Task").Options(
            train={"files": [str(file)]}, **json.loads(options)
        )
        with pytest.raises(ValueError, match=rf"^{file}:3: .*{re.escape(reason)}.*: skip\)$"):
            list(read_prompts(checked, checked.train, "train", Counter()))


@pytest.mark.parametrize("case", re.findall(r"(.*)\n    (.*)\n", TABLES["combinations"]), ids="".join)
def test_a_combination_is_refused_and_its_repair_accepted(case: tuple[str, str]) -> None:
    refused, repair = (shlex.split(written_out(overrides)) for overrides in case[0].split(" => "))
    with pytest.raises(RecipeError) as caught:
        load_recipe(Path("recipe.yaml"), refused)
    (found,) = caught.value.problems
    assert f"{found.key}: {found.message}".startswith(case[1])
    assert load_recipe(Path("recipe.yaml"), [*refused, *repair])


@pytest.mark.parametrize("overrides", TABLES["fitting"].splitlines())
def test_functions_that_fit_pass_the_checks(overrides: str) -> None:
    result = srtrl(f"show-config recipe.yaml {overrides} --check")
    assert (result.exit_code, result.stderr) == (0, "")
