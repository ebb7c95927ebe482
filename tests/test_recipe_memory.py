"""Memory of a training step, computed: the recipes for one GPU fit, the docs say how, and what does not fit is told."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from runner_cases import cuda_runner, runner_policy
from typer.testing import CliRunner

from srtrl import meta_update, planner
from srtrl.build import number_of_slots
from srtrl.cli import app
from srtrl.engine.kv_memory import GIB, GRAPH_BYTES
from srtrl.model.transformer import Transformer
from srtrl.model.weights import init_model
from srtrl.planner import KV_CACHE, MemoryPlan, find_config, plan_memory
from srtrl.recipe.file import load_recipe
from srtrl.recipe.schema import ModelSection, Recipe

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "performance.md"
PARTS = "weights | masters | moments | reference | {}decoder's buffers | {}gradients | activations"
RECIPES = ("grpo_gsm8k", "grpo_math", "ppo_math", "dapo_math17k", "lora_math_7b")
KINDS = {"all weights": "model.lora=null", "LoRA": "model.lora.base=device", "LoRA, base: host": "model.lora.base=host"}
"""Kind of training -> an override of recipes/lora_math_7b.yaml."""
GPUS_GIB = (24, 48, 80)


def test_the_tables_in_the_docs_are_what_is_computed() -> None:
    """To write them again: `python tests/test_recipe_memory.py`."""
    text = DOCS.read_text(encoding="utf-8")
    for line in (*recipe_table(), *model_table("7B", kinds=["LoRA"])):
        assert f"\n{line}\n" in text


def test_the_rows_of_the_page_of_gpus_are_what_is_computed() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:8 x )?)(\d+) GiB .*\| `(\w+) ?(.*?)`.*\| ([\d.]+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(rows) == 6
    for several, gpu_gib, name, overrides, total, slots in rows:
        recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", overrides.split())
        plan = plan_of(recipe, int(gpu_gib), num_gpus=8 if several else 1)
        assert plan.fits, name
        assert [*gib(plan.total), str(plan.slots)] == [total, slots], name


@pytest.mark.slow
def test_all_rows_of_the_tables_in_the_docs_are_what_is_computed() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert with_tables(text) == text


def with_tables(text: str) -> str:
    """The text of the docs with both tables computed again; an empty line ends each."""
    for first, *rows in (recipe_table(), model_table("3B", "7B", "14B")):
        before, _, after = text.partition(f"{first}\n| --- ")
        text = f"{before}{first}\n| --- {'| --: ' * (first.count('|') - 2)}|\n"
        text += "\n".join(rows) + after[after.index("\n\n") :]
    return text


def recipe_table() -> Iterator[str]:
    """The recipes for a GPU of 80 GB; each fits."""
    yield f"| recipe | {PARTS.format('critic | ', 'KV cache | ')} | sum | slots |"
    for name in RECIPES:
        plan = plan_of(load_recipe(ROOT / "recipes" / f"{name}.yaml"), 80)
        assert plan.fits, name
        yield row(f"`{name}`", *gib(*plan.parts.values(), plan.total), plan.slots)


def model_table(*sizes: str, kinds: Iterable[str] = KINDS) -> Iterator[str]:
    """Larger models: memory without KV cache, and the KV cache on GPUs of three sizes."""
    yield row("model, training", PARTS.format("", ""), "sum", *(f"KV cache on {gpu_gib} GiB" for gpu_gib in GPUS_GIB))
    for size, kind in product(sizes, kinds):
        path = f"model.path=Qwen/Qwen2.5-{size}-Instruct"
        recipe = load_recipe(ROOT / "recipes" / "lora_math_7b.yaml", [KINDS[kind], path])
        plans = [plan_of(recipe, gpu_gib) for gpu_gib in GPUS_GIB]
        needed = [plans[-1].parts[name] for name in plans[-1].parts if name not in (KV_CACHE, "critic")]
        rooms = [min(plan.parts[KV_CACHE], plan.limit - plan.without_kv) for plan in plans]
        caches = [gib(room)[0] if room >= plans[0].smallest_kv else "-" for room in rooms]
        yield row(f"{size}, {kind}", *gib(*needed, sum(needed)), *caches)


def plan_of(recipe: Recipe, gpu_gib: int, num_gpus: int = 1) -> MemoryPlan:
    return plan_memory(recipe, find_config(recipe.model.path)[0], gpu_gib * GIB, num_gpus)


def gib(*sizes: int) -> list[str]:
    return [f"{size / GIB:.1f}" for size in sizes]


def row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


SHOWN = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").rstrip().split("\n\n")
"""A command, and below it parts of its output."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(one, id=one.partition("\n")[0], marks=pytest.mark.slow if "grpo_math.yaml" in one else ())
        for one in SHOWN
    ],
)
def test_show_config_says_whether_a_step_fits_and_what_would_help(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passed = "verdict: all names, options and paths are correct;"
    command, *parts = case.format(recipes=ROOT / "recipes", passed=passed).split("\n    ")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart" / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", Mock(side_effect=OSError("no network")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == (2 if parts[0].startswith("error") else 0)
    for part in parts:
        assert part in result.output
    assert not ("does not fit" in result.output and "time: " in result.output), "no time of a step that does not fit"


OPTIONS: list[dict[str, Any]] = [
    {"gradient_checkpointing": "half"},
    {},
    {"gradient_checkpointing": True},
    {"lora": {"rank": 8}, "dtype": "float32"},
]


@pytest.mark.parametrize("options", [OPTIONS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in OPTIONS[1:])])
def test_a_few_layers_tell_the_activations_of_all(options: dict[str, Any]) -> None:
    section = ModelSection(**{"path": "x", "dtype": "bfloat16", **options})
    for num_layers in (6, 7):
        config = replace(find_config("Qwen/Qwen2.5-0.5B")[0], num_hidden_layers=num_layers)
        found = meta_update.activation_bytes(config, section.model_dump_json(), 9000, 12_000)
        assert found == meta_update.peak_bytes(config, section, 9000, 12_000)


@pytest.mark.parametrize("vocab_size", [5_000, 50_000])
def test_the_decoders_buffers_are_counted_by_the_model(vocab_size: int) -> None:
    """All that a runner holds beside the KV cache, but for its few MB of inputs and tables of rotation."""
    config = replace(runner_policy().config, vocab_size=vocab_size)
    policy = init_model(config, 0, torch.bfloat16, "cpu")
    runner = cuda_runner(policy, slots=512)
    held = [runner._logits, runner.hidden, runner._attention.means, runner._attention.log_weights]
    counted = planner.decoder_bytes(policy, has_graphs=False)
    assert sum(one.nbytes for one in held) <= counted < 1.2 * sum(one.nbytes for one in held)
    assert planner.decoder_bytes(policy, has_graphs=True) == counted + GRAPH_BYTES


def test_slots_are_as_given_or_what_the_kv_cache_holds() -> None:
    def slots(*overrides: str, free: int | None = 10**10, **changes: int) -> int:
        recipe = load_recipe(ROOT / "recipes" / "grpo_math.yaml", overrides)
        policy = Transformer(find_config(recipe.model.path)[0], torch.bfloat16, "meta")
        return number_of_slots(recipe, policy, free, **changes)

    of_one = 28_672 * 1152  # bytes of a quarter of 512 + 4096 tokens
    assert slots("rollout.slots=7") == slots("rollout.slots=7", free=None) == 7
    assert slots(free=None) == 64
    assert slots() == 5 * 10**9 // of_one
    assert slots(reserved_bytes=10**9) == slots(free=9 * 10**9) == int(4.5e9) // of_one
    assert slots("rollout.kv_memory_gib=2") == 2 * 2**30 // of_one
    assert slots(free=10**12) == 128 * 5
    assert [slots(free=10**12, num_samples=number) for number in (900, 2000)] == [900, 1024]
    assert slots(free=10**6) == 1


if __name__ == "__main__":
    DOCS.write_text(with_tables(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
