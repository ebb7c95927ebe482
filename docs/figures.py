"""Figures of docs/off_policy.md and docs/benchmarks.md that no command of srtrl prints.

    python docs/figures.py off-policy
    python docs/figures.py draft-head [--train] [--price] [--stories MODEL] [--prompts N] RECIPE [OVERRIDE ...]

`off-policy`: rollouts with log-normal lengths at a priced GPU, by mode. A random policy drifts from step to step. Every
prompt and sample index has a length of its own, log-normal, the longest 20 times the median; each step has 32 prompts,
new ones or the same. The engine is real, its clock is not: a decode step of N rows takes 1.2 ms + max(0.8 ms,
6.2 us x N), as a model of 1.5B parameters on an H200 (an estimate; the host is not counted).

`draft-head`: tokens per step of a drafter, of a draft head, and of both on new prompts. `--train` trains the recipe
first, in place of an earlier run of its name. The last N training prompts (64), which its steps must not have seen, are
decoded with each of `SHOWN` draft nodes. `--price` adds what these figures, and those of `BUDGETS`, would give on an
H200. `--stories` is for a folder with stories260K or another model of children's stories: it learns from first
sentences made of `WORDS`.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from srtrl.build import build_drafter, build_parts, run_training
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.draft_budget import MAX_ROWS, StepCost
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.features.head_drafter import HeadDrafter
from srtrl.features.partial import PartialDraws
from srtrl.features.run_ahead import RunAhead
from srtrl.features.spec_rl import accept_prefixes
from srtrl.model.noise import make_rng_key
from srtrl.model.shapes import SHAPES
from srtrl.recipe.file import load_recipe
from srtrl.recipe.schema import GradingSection, RewardSection
from srtrl.rollout.collect import Collector, FixedDraws, collect_rollouts
from srtrl.rollout.turns import Turns
from srtrl.tasks.grading import Grader
from srtrl.tasks.reward_input import RewardInput
from srtrl.trainer.passes import UpdateContext
from srtrl.trainer.sampling import train_sampling
from srtrl.trainer.trainer import Trainer
from srtrl.types import Prompt, Request, Response, SampleKey, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from engine_cases import tiny_policy
from environment_cases import TOKENIZER
from tiny_run import make_recipe

# --- Off-policy modes -------------------------------------------------------------------------------------------------

NUM_PROMPTS, NUM_SAMPLES, NUM_STEPS, NUM_WARM_UP, MEDIAN, MAX_RATIO = 32, 8, 6, 2, 40, 20
HEAD, DRIFT = 8.0, 0.0013
"""Give an entropy of 0.56 nats and a KL of 2e-4 nats per token from a step to the next."""


def seconds_of(num_rows: int) -> float:
    """Price of a decode step."""
    return 1.2e-3 + max(0.8e-3, 6.2e-6 * num_rows)


class Ungraded:
    """A task without a verifier."""

    verifier = None


def no_reward(sample: RewardInput) -> float:
    """A reward that costs nothing."""
    return 0.0


async def slow_judge(sample: RewardInput) -> float:
    """A reward that takes five seconds, elsewhere."""
    await asyncio.sleep(5)
    return float(len(sample.text) % 3)


class LogNormal(Collector):
    """Ends each sample at a length that prompt and sample index decide."""

    num_known = 0

    def requests(self, draws: Sequence[tuple[int, Prompt]]) -> list[Request]:
        """The requests of some draws, each with its length."""
        requests = []
        for request in super().requests(draws):
            z = np.random.default_rng((request.draw_index % self.num_known, request.sample_index)).standard_normal()
            length = int(np.clip(MEDIAN * MAX_RATIO ** (z / 2.9), 2, MEDIAN * MAX_RATIO))  # one of 256 z is beyond 2.9
            requests.append(replace(request, sampling=SamplingParams(max_new_tokens=length)))
        return requests


class PricedEngine(Engine):
    """Adds up the price of its steps."""

    seconds = 0.0

    def _record(self, step: Any, trees: Any, *others: Any, **options: Any) -> None:
        self.seconds += seconds_of(len(step.slots) + trees.num_nodes + step.num_prompt_rows)
        super()._record(step, trees, *others, **options)


def price_mode(mode: str, *, num_known: int, drafts: bool, runs_ahead: bool) -> str:
    """A row; `num_known` is the number of prompts, which come again in turn."""
    policy = tiny_policy(max_position_embeddings=2 + MEDIAN * MAX_RATIO, scale=8.0)
    with torch.no_grad():
        policy.head_weight.mul_(HEAD)
    cost = StepCost(points=[(n, seconds_of(n)) for n in (1, 129, 256, 512, 1024, 2048, MAX_ROWS)])
    drafter = SrtDrafter() if drafts else None
    background = partial(RunAhead, max_slowdown=0.03) if runs_ahead else None
    engine = PricedEngine(policy, EngineOptions(slots=256), drafter=drafter, cost=cost, background=background)
    context = UpdateContext(recipe=make_recipe(Path("none"), Path("none"), train__micro_batch_tokens=8192), step=1)
    noise, new, totals = torch.Generator().manual_seed(0), count(), np.zeros(3)
    earlier: dict[SampleKey, Response] = {}
    for step in range(NUM_STEPS):
        seconds = engine.seconds
        numbers = sorted({draw for draw, _ in earlier}) if mode == "partial" else []
        numbers += [next(new) for _ in range(NUM_PROMPTS - len(numbers))]
        draws, ahead = (
            [
                (n, Prompt(prompt_id=str(n), text="", token_ids=(n % num_known % 61, n % num_known // 61), answer=""))
                for n in some
            ]
            for some in (numbers, range(numbers[-1] + 1, numbers[-1] + 1 + NUM_PROMPTS))
        )
        shared: dict[str, Any] = {"num_samples": NUM_SAMPLES, "seed": 0, "purpose": "train", "policy_version": step}
        with Grader(Ungraded(), [RewardSection(name="figures:no_reward")], GradingSection(), 1) as grader:  # type: ignore[arg-type]
            collector = LogNormal(grader, Turns(TOKENIZER), sampling=SamplingParams(max_new_tokens=1), **shared)
            collector.num_known = num_known
            engine.add_background(collector.requests(ahead))
            fixed = FixedDraws(draws)
            if mode == "partial":
                collector.prefixes = earlier
                due = {draw for (draw, _), p in earlier.items() if p.policy_versions[0] <= step - 2}
                fixed = PartialDraws(draws, num_complete=26, due=due)
            elif mode == "spec_rl" and earlier:
                requests = collector.requests(draws)
                offered = [earlier[r.draw_index % num_known, r.sample_index] for r in requests]
                collector.prefixes = accept_prefixes(requests, offered, policy, context)
                engine.seconds += seconds_of(sum(len(prefix.token_ids) for prefix in offered))
            rollouts = [rollout for group in collect_rollouts(engine, collector, fixed) for rollout in group.rollouts]
        if isinstance(fixed, PartialDraws):
            earlier = fixed.carried
        else:
            earlier = {(r.draw_index % num_known, r.sample_index): r.response for r in rollouts}
        engine.end_step(has_new_weights=True)
        if step >= NUM_WARM_UP:
            num_stale = sum(int((r.response.policy_versions < step).sum()) for r in rollouts)
            totals += [engine.seconds - seconds, sum(len(r.response.token_ids) for r in rollouts), num_stale]
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(DRIFT * parameter.std() * torch.randn(parameter.shape, generator=noise))
    seconds, num_tokens, num_stale = totals / (NUM_STEPS - NUM_WARM_UP)
    name = ", ".join([mode, *["drafts"] * drafts, *["run-ahead"] * runs_ahead])
    prompts = "the same" if num_known == NUM_PROMPTS else "new"
    speed, stale = 1e6 * seconds / num_tokens, num_stale / num_tokens
    return f"| {prompts} | `{name}` | {seconds:.2f} | {num_tokens:,.0f} | {speed:.0f} | {stale:.0%} |"


# --- A draft head -----------------------------------------------------------------------------------------------------

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
    rewards = "rewards=[{name: 'figures:short_sentences'}]"
    rest = ("eval={before_and_after: false}", "rollout.draft_head.vocabulary=512", "name=draft_head_stories")
    return [f"model.path={model}", task, rewards, *rest]


def measure_head(path: Path, overrides: list[str], num_prompts: int, budgets: tuple[int, ...]) -> Figures:
    """Decode new prompts of a run that has ended."""
    recipe = load_recipe(path, overrides)
    trainer = Trainer(build_parts(recipe, resume=True), console=Console(quiet=True))
    engine, head, checkpoint = trainer.engine, trainer.engine.drafter, trainer.checkpoint
    assert isinstance(head, HeadDrafter), "the recipe has no draft head"
    assert checkpoint is not None, "the run has no checkpoint"
    trainer.restore(checkpoint)
    sampling = train_sampling(recipe, trainer.rollout_context.end_ids)
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
        drafter.load(checkpoint)
        head.inner, head.cost = NoDrafter() if source == "head" else drafter, None
        engine.drafter = drafter if source.startswith("srt") else head
        engine.control.fixed = budget
        list(engine.generate(requests))
        metrics = engine.take_metrics()
        figures[source, budget] = metrics["engine/tokens_per_decode_step"], metrics["engine/verified_per_decode_step"]
    return figures


def price_head(figures: Figures, size: str, source: str, num_sequences: int) -> float:
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


def off_policy_figures() -> None:
    """Print the rows of the table of docs/off_policy.md."""
    torch.set_num_threads(1)
    print("| prompts | mode | step, s | tokens learned from | us per token | stale |")
    print("| --- " * 2 + "| --: " * 4 + "|")
    modes = ((3000, "on_policy"), (3000, "partial"), (32, "on_policy"), (32, "partial"), (32, "spec_rl"))
    for num_known, mode in modes:
        for drafts, runs_ahead in ((False, False), (True, False), (True, True)):
            print(price_mode(mode, num_known=num_known, drafts=drafts, runs_ahead=runs_ahead), flush=True)


def draft_head_figures(options: argparse.Namespace) -> None:
    """Print the rows of the tables of docs/benchmarks.md."""
    overrides = options.overrides
    if options.stories:
        output = Path(load_recipe(options.recipe, overrides).output_dir)
        overrides = [*story_overrides(options.stories, output), *overrides]
    if options.train:
        run_training(load_recipe(options.recipe, overrides), overwrite=True)
    figures = measure_head(options.recipe, overrides, options.prompts, BUDGETS if options.price else SHOWN)
    policy = Path(load_recipe(options.recipe, overrides).model.path).name
    for budget in SHOWN:
        cells = ["{:.2f}@{:.1f}".format(*figures[source, budget]) for source in SOURCES]
        cells.insert(3, f"{figures['both', budget][0] / figures['srt', budget][0] - 1:+.0%}")
        print("|", " | ".join([policy, str(budget), *cells]), "|")
    for size, num in product(PRICES, (8, 64, 256)) if options.price else ():
        cells = [f"{price_head(figures, size, source, num):.2f}" for source in SOURCES[:3]]
        print("|", " | ".join([size, str(num), *cells]), "|")


def main() -> None:
    """Print the figures that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("off-policy")
    head = commands.add_parser("draft-head")
    head.add_argument("recipe", type=Path)
    head.add_argument("overrides", nargs="*")
    head.add_argument("--train", action="store_true")
    head.add_argument("--price", action="store_true")
    head.add_argument("--stories", metavar="MODEL")
    head.add_argument("--prompts", type=int, default=64)
    options = parser.parse_args()
    if options.command == "off-policy":
        off_policy_figures()
    else:
        draft_head_figures(options)


if __name__ == "__main__":
    main()
