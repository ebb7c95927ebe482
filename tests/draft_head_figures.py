"""Tokens per step of a drafter, of a draft head, and of both on new prompts; for docs/benchmarks.md, no test.

    python tests/draft_head_figures.py [--train] [--price] [--stories MODEL] [--prompts N] RECIPE [OVERRIDE ...]

`--train` trains the recipe first, in place of an earlier run of its name. The last N training prompts (64), which its
steps must not have seen, are decoded with each of `SHOWN` draft nodes. `--price` adds what these figures, and those of
`BUDGETS`, would give on an H200. `--stories` is for a folder with stories260K or another model of children's stories:
it learns from first sentences made of `WORDS`.
"""

import argparse
import json
from itertools import product
from pathlib import Path

from rich.console import Console

from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.engine.head_drafts import NoHeadDrafts
from srtrl.engine.sampling import make_rng_key
from srtrl.model.shapes import SHAPES
from srtrl.recipe.file import load_recipe
from srtrl.tasks.reward_input import RewardInput
from srtrl.trainer.build import build_drafter, train_sampling
from srtrl.trainer.trainer import Trainer, run_training
from srtrl.types import Request

BUDGETS, SHOWN = (1, 2, 4, 8, 16), (2, 4, 8)
SOURCES = ("srt", "head", "both", "srt without phrases", "both without phrases")
WORDS = (
    ("girl", "boy", "cat", "dog", "bird", "bear", "frog", "mouse"),
    ("Lily", "Tom", "Mia", "Ben", "Sue", "Max", "Anna", "Jack"),
    ("park", "forest", "garden", "house", "town", "beach", "zoo", "farm"),
    ("ball", "hat", "book", "cake", "box", "flower", "stone", "kite"),
)
SENTENCES = "Once upon a time, there was a little {} named {}. One day, they went to the {} and found a {}."
PRICES = {"1.5B": ("qwen2.5-1.5b", 0.8e-3, 6.2e-6), "7B": ("qwen2.5-7b", 4.0e-3, 25.7e-6)}
"""Shape, and seconds of a step's memory and of the arithmetic of a row; beside 1.2 ms that each step takes."""
Figures = dict[tuple[str, int], tuple[float, float]]
"""By source and budget: tokens and verified tokens per step."""


def short_sentences(sample: RewardInput) -> float:
    """A reward for stories."""
    return sample.text.count(".") / max(1, len(sample.text.split()))


def story_overrides(model: str, folder: Path) -> list[str]:
    """Overrides that make a recipe learn stories; writes their first sentences."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "first_sentences.jsonl"
    rows = (json.dumps({"prompt": SENTENCES.format(*words)}) for words in product(*WORDS))
    file.write_text("\n".join(rows), encoding="utf-8")
    task = f"task={{name: prompts, options: {{train: {{files: [{file}]}}}}}}"
    rewards = "rewards=[{name: 'draft_head_figures:short_sentences'}]"
    rest = ("eval={before_and_after: false}", "rollout.draft_head.vocabulary=512", "name=draft_head_stories")
    return [f"model.path={model}", task, rewards, *rest]


def measure(path: Path, overrides: list[str], num_prompts: int, budgets: tuple[int, ...]) -> Figures:
    """Decode new prompts of a run that has ended."""
    recipe = load_recipe(path, overrides)
    trainer = Trainer(recipe, resume=True, console=Console(quiet=True))
    engine, head, checkpoint = trainer.engine, trainer.engine.head_drafts, trainer.checkpoint
    assert head.is_on, "the recipe has no draft head"
    assert checkpoint is not None, "the run has no checkpoint"
    sampling = train_sampling(recipe, trainer.end_ids)
    requests = [
        Request(
            prompt_id=prompt.prompt_id,
            prompt_token_ids=prompt.token_ids,
            draw_index=draw,
            sample_index=sample,
            rng_key=make_rng_key(recipe.seed, "train", 10**6 + draw, sample),
            sampling=sampling,
            purpose="train",
        )
        for draw, prompt in enumerate(trainer.task.train_prompts[-num_prompts:])
        for sample in range(recipe.rollout.num_samples)
    ]
    no_phrases = load_recipe(path, [*overrides, "rollout.drafter_options={other_prompts: false}"])
    figures: Figures = {}
    for source, budget in product(SOURCES, budgets):
        drafter = build_drafter(no_phrases if "without" in source else recipe)
        engine.drafter = NoDrafter() if source == "head" else drafter
        engine.drafter.load(checkpoint)
        engine.head_drafts = NoHeadDrafts() if source.startswith("srt") else head
        engine.control.fixed = budget
        list(engine.generate(requests))
        metrics = engine.take_metrics()
        figures[source, budget] = metrics["engine/tokens_per_decode_step"], metrics["engine/verified_per_decode_step"]
    return figures


def price(figures: Figures, size: str, source: str, num_sequences: int) -> float:
    """Tokens per second against no drafts, with the best number of draft nodes; 1 where none pays.

    A head takes three times its weights at 80% of 4.8 TB/s or its products at 60% of 990 TFLOP/s, 50 launches of 2.5 us
    and 20 us for the graph; nothing of it is hidden.
    """
    shape, memory, per_row = PRICES[size]
    width = int(SHAPES[shape]["hidden_size"])
    num_weights = 2 * width**2 + 3 * width * -(-8 * width // 3) + 16_384 * width
    seconds = 1.2e-3 if source == "srt" else 1.345e-3
    seconds += 3 * max(2 * num_weights / 3.84e12, 2 * num_weights * num_sequences / 594e12) * (source != "srt")
    plain = (1.2e-3 + max(memory, per_row * num_sequences)) / num_sequences
    per_token = (
        (seconds + max(memory, per_row * num_sequences * verified)) / (num_sequences * tokens)
        for tokens, verified in (figures[source, budget] for budget in BUDGETS)
    )
    return max(1.0, plain / min(per_token))


def main() -> None:
    """Print the rows of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--price", action="store_true")
    parser.add_argument("--stories", metavar="MODEL")
    parser.add_argument("--prompts", type=int, default=64)
    options = parser.parse_args()
    overrides = options.overrides
    if options.stories:
        output = Path(load_recipe(options.recipe, overrides).output_dir)
        overrides = [*story_overrides(options.stories, output), *overrides]
    if options.train:
        run_training(load_recipe(options.recipe, overrides), overwrite=True)
    figures = measure(options.recipe, overrides, options.prompts, BUDGETS if options.price else SHOWN)
    policy = Path(load_recipe(options.recipe, overrides).model.path).name
    for budget in SHOWN:
        cells = ["{:.2f}@{:.1f}".format(*figures[source, budget]) for source in SOURCES]
        cells.insert(3, f"{figures['both', budget][0] / figures['srt', budget][0] - 1:+.0%}")
        print("|", " | ".join([policy, str(budget), *cells]), "|")
    for size, num in product(PRICES, (8, 64, 256)) if options.price else ():
        cells = [f"{price(figures, size, source, num):.2f}" for source in SOURCES[:3]]
        print("|", " | ".join([size, str(num), *cells]), "|")


if __name__ == "__main__":
    main()
