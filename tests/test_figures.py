"""Figures of the documentation that need no run: token ids, advantages, and figures that two pages state."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

from srtrl.algorithms.advantages import group_relative
from srtrl.model.folders import load_tokenizer
from srtrl.recipe.file import load_recipe
from srtrl.resolve import resolve_class
from srtrl.tasks.base import load_task
from srtrl.tasks.order import DataOrder

REPOSITORY = Path(__file__).resolve().parent.parent
WALKTHROUGH = (REPOSITORY / "docs" / "walkthrough.md").read_text(encoding="utf-8")
RESULTS = (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8")
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (REPOSITORY / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def found(pattern: str, page: str) -> list[str]:
    """The groups of the only match."""
    [match] = re.finditer(pattern, page)
    return [*match.groups()]


def test_the_walkthrough_follows_a_draw_from_its_prompt_to_its_advantages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt of draw 5 of quickstart and its tokens, a response's tokens, and the answers' rewards."""
    recipe = load_recipe(Path("quickstart"), ["task.options.num_train=1024"])  # as the page says
    tokenizer = load_tokenizer(recipe.model.path)
    prompts = load_task(recipe, tokenizer).train_prompts
    prompt = prompts[DataOrder(len(prompts), recipe.seed).prompt_of(5)]
    text, number, prompt_ids = found(r"`(Compute .*)` and a line break are (\d+) tokens, `([\d ]+)`", WALKTHROUGH)
    assert (prompt.text, list(prompt.token_ids)) == (f"{text}\n", [*map(int, prompt_ids.split())])
    num_prompt, rollout = int(number), recipe.rollout
    assert len(prompt.token_ids) == num_prompt

    [block] = re.findall(r"Sample 3 is\n\n +```text\n(.*?)```", WALKTHROUGH, re.DOTALL)
    lines = [re.split(r"  +", line.strip()) for line in block.strip().splitlines()]
    text, ids = "\n".join(line for line, _ in lines), [int(number) for _, part in lines for number in part.split()]
    assert ids == [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    assert tokenizer.decode(ids[13]) == "2", "the least certain token, the 14th"

    answers, rewards = found(r"the samples end in (.*), so the rewards are ([\d, ]+)\.", WALKTHROUGH)
    ends = re.split(", | and ", answers)
    graded = [float(answer == prompt.answer) for answer in ends]
    assert graded == [float(reward) for reward in rewards.split(", ")]
    monkeypatch.syspath_prepend(REPOSITORY / "docs")
    assert [re.findall(r" (\S+)∎$", sample)[0] for sample in import_module("drawings").SAMPLES] == ends
    values = torch.tensor(graded, dtype=torch.float64)
    advantages = group_relative(values[None])[0].tolist()

    for sentence in (
        "step 1, draw 5; all of it is in\n`runs/walk/rollouts/",
        f"--prompt {prompt.prompt_id}`",
        f"The answer is {prompt.answer}.",
        f"(quickstart: {rollout.num_prompts} x {rollout.num_samples} =\n{rollout.num_prompts * rollout.num_samples})",
        f"{len(ids)} tokens; {tokenizer.eos_token_id} ends the response",
        f"has {num_prompt} + {len(ids)} = {num_prompt + len(ids)} tokens",
        f"the mean is {values.mean():.3f}, the standard deviation {values.std():.4f}.",
        f" = {max(advantages):.4f} for each of their tokens, the other",
        f" {min(advantages):.4f}.",
    ):
        assert sentence in WALKTHROUGH


def test_results_have_equal_weights_and_ratios_of_their_prices() -> None:
    tables = re.findall(r"^### .*?\n\n(.*?)\n(?:\n|$)", RESULTS, re.DOTALL | re.MULTILINE)
    assert len(tables) == 4
    for table in tables:
        rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
        assert len({row[-1] for row in rows}) == 1, "the hash of the weights"
        prices = [found(r"([\d,]+) ms \(([\d.]+)x\)", row[3]) for row in rows]
        for (name, *_), (price, ratio) in zip(rows, prices, strict=True):
            assert name == "suffix" or resolve_class("srtrl.drafters", name, "Drafter")
            assert abs(int(prices[0][0].replace(",", "")) / int(price.replace(",", "")) - float(ratio)) < 0.006


def test_the_readme_has_the_figures_of_the_benchmarks() -> None:
    on_a_gpu = found(r"one H200, .* \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", README)
    assert f"| {' / '.join(f'{ratio}x' for ratio in on_a_gpu)}; " in BENCHMARKS
    before, after = found(r"before training: ([\d.]+%) .*\n.*after step 52: +([\d.]+%) ", README)
    assert f"held-out accuracy {before} to {after}" in BENCHMARKS


def test_files_and_recipes_that_commands_of_the_pages_name_are_there() -> None:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    named = {
        name
        for page in pages
        if page.name not in ("CHANGELOG.md", "LOG.md")
        for name in re.findall(
            r"(?<![\w./])((?:recipes|docs|srtrl|tests)/[\w/-]+\.(?:py|yaml|md|svg|ipynb|json))\b",
            page.read_text(encoding="utf-8"),
        )
    }
    assert len(named) > 20
    assert sorted(name for name in named if not (REPOSITORY / name).exists()) == []
