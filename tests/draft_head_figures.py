"""Tokens per step of a run's drafter, of its draft head, and of both: `python tests/draft_head_figures.py RECIPE ...`.

After the recipe come overrides, as for `srtrl train`; the run must be there. Decodes the last 64 training prompts,
which its steps must not have seen, with `rollout.draft_budget` 1, 2, 4, 8 and 16. For docs/benchmarks.md; no test.
"""

import sys
from pathlib import Path

from rich.console import Console

from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.engine.head_drafts import NoHeadDrafts
from srtrl.engine.sampling import make_rng_key
from srtrl.recipe.file import load_recipe
from srtrl.trainer.build import build_drafter, train_sampling
from srtrl.trainer.trainer import Trainer
from srtrl.types import Request

NUM_PROMPTS, BUDGETS = 64, (1, 2, 4, 8, 16)


def main(recipe_path: str, *overrides: str) -> None:
    recipe = load_recipe(Path(recipe_path), list(overrides))
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
        for draw, prompt in enumerate(trainer.task.train_prompts[-NUM_PROMPTS:])
        for sample in range(recipe.rollout.num_samples)
    ]
    for source in ("drafter", "head", "both"):
        for budget in BUDGETS:
            engine.drafter = NoDrafter() if source == "head" else build_drafter(recipe)
            engine.drafter.load(checkpoint)
            engine.head_drafts = NoHeadDrafts() if source == "drafter" else head
            engine.control.fixed = budget
            list(engine.generate(requests))
            metrics = engine.take_metrics()
            tokens, verified = (metrics[f"engine/{name}_per_decode_step"] for name in ("tokens", "verified"))
            print(f"{source} {budget}: {tokens:.3f}@{verified:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
