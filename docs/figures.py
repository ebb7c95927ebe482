"""Figures of docs/off_policy.md and docs/benchmarks.md that no command of srtrl prints.

    python docs/figures.py off-policy
    python docs/figures.py draft-head [--train] [--price] [--stories MODEL] [--prompts N] RECIPE [OVERRIDE ...]
    python docs/figures.py update RECORDING TOKENIZER
    python docs/figures.py step

`off-policy`: rollouts with log-normal lengths at a priced GPU, by mode. A random policy drifts from step to step. Every
prompt and sample index has a length of its own, log-normal, the longest 20 times the median; each step has 32 prompts,
new ones or the same. The engine is real, its clock is not: a decode step of N rows takes 1.2 ms + max(0.8 ms,
6.2 us x N), as a model of 1.5B parameters on an H200 (an estimate; the host is not counted).

`draft-head`: tokens per step of a drafter, of a draft head, and of both on new prompts. `--train` trains the recipe
first, in place of an earlier run of its name. The last N training prompts (64), which its steps must not have seen, are
decoded with each of `SHOWN` draft nodes. `--price` adds what these figures, and those of `BUDGETS`, would give on an
H200. `--stories` is for a folder with stories260K or another model of children's stories: it learns from first
sentences made of `WORDS`.

`update`: rows, operations (`model_flops`) and processor seconds of a policy's update whose sequences share nothing, and
of the one that computes once what they share, in turn. The first steps of two recipes; 8 samples of each of the first 4
prompts of a recording; and 8 random answers of 300 tokens to a random prompt of 1,000. A random model of 4 layers, 384
wide, with 2,048 tokens (token ids are taken modulo that) learns the last two.

`step`: processor seconds of whole training steps of quickstart, without and with what sequences share computed once,
and of TRL's GRPOTrainer (extra `[dev]`) with the same model, prompts, settings and reward, in turn in one process.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from bench_rollout import alternate, compare_pairs
from rich.console import Console

from srtrl.bench.recorded import read_recorded
from srtrl.build import build_drafter, build_parts, run_training
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.draft_budget import MAX_ROWS, StepCost
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.features.head_drafter import HeadDrafter
from srtrl.features.off_policy import PartialDraws, accept_prefixes
from srtrl.features.run_ahead import RunAhead
from srtrl.model.folders import locate
from srtrl.model.noise import make_rng_key
from srtrl.model.published_shapes import SHAPES
from srtrl.recipe.file import load_recipe
from srtrl.recipe.schema import GradingSection, RewardSection
from srtrl.rollout import packing
from srtrl.rollout.collect import Collector, FixedDraws, collect_rollouts
from srtrl.rollout.one_turn import OneTurn
from srtrl.run.step_metrics import update_flops
from srtrl.tasks.arithmetic import is_correct
from srtrl.tasks.base import TaskBase
from srtrl.tasks.grading import Grader
from srtrl.tasks.reward_input import RewardInput
from srtrl.trainer.objective import PolicyLearner
from srtrl.trainer.optimizer import build_optimizer
from srtrl.trainer.passes import UpdateContext
from srtrl.trainer.sampling import train_sampling
from srtrl.trainer.trainer import Trainer
from srtrl.types import Prompt, Request, Response, SampleKey, SamplingParams, TrainSequence

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from engine_cases import init_policy, tiny_policy
from environment_cases import TOKENIZER
from tiny_run import make_recipe

# --- Off-policy modes -------------------------------------------------------------------------------------------------

NUM_PROMPTS, NUM_SAMPLES, NUM_STEPS, NUM_WARM_UP, MEDIAN, MAX_RATIO = 32, 8, 6, 2, 40, 20
HEAD, DRIFT = 8.0, 0.0013
"""Give an entropy of 0.56 nats and a KL of 2e-4 nats per token from a step to the next."""


def seconds_of(num_rows: int) -> float:
    """Price of a decode step."""
    return 1.2e-3 + max(0.8e-3, 6.2e-6 * num_rows)


class Ungraded(TaskBase):
    """A task without a verifier."""

    verifier = None

    def __init__(self) -> None:
        """No prompts."""


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
    run_ahead = partial(RunAhead, max_slowdown=0.03) if runs_ahead else None
    engine = PricedEngine(policy, EngineOptions(slots=256), drafter=drafter, cost=cost, run_ahead=run_ahead)
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
        with Grader(Ungraded(), [RewardSection(name="figures:no_reward")], GradingSection()) as grader:
            collector = LogNormal(grader, OneTurn(TOKENIZER), sampling=SamplingParams(max_new_tokens=1), **shared)
            collector.num_known = num_known
            engine.add_run_aheads(collector.requests(ahead))
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
    engine, checkpoint = trainer.context.engine, trainer.parts.checkpoint
    head = engine.drafter
    assert isinstance(head, HeadDrafter), "the recipe has no draft head"
    assert checkpoint is not None, "the run has no checkpoint"
    trainer.restore(checkpoint)
    sampling = train_sampling(recipe, trainer.context.end_ids)
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
        for draw, prompt in enumerate(trainer.parts.task.train_prompts[-num_prompts:])
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
    """Tokens per second against no drafts, with the best number of draft nodes; 1 if none pays.

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


# --- The update -------------------------------------------------------------------------------------------------------

SPEED = "{times_as_fast:.2f}x ({lowest:.2f} to {highest:.2f})"
Update = tuple[PolicyLearner, Sequence[TrainSequence], UpdateContext]


def first_update(name: str, folder: str) -> Update:
    """Inputs of a recipe's first update; the weights will stay nearly as they are."""
    options = [f"output_dir={folder}", "train.num_steps=1", "train.learning_rate=1e-12", "eval.before_and_after=false"]
    with patch.object(PolicyLearner, "learn", autospec=True, return_value={}) as learn:
        run_training(load_recipe(Path(f"recipes/{name}.yaml"), [*options, "train.max_logprob_difference=1e9"]))
    learner, sequences, context = learn.call_args.args
    return learner, sequences, context


def random_model_update(samples: Iterator[tuple[int, Sequence[int], Sequence[int]]]) -> Update:
    """An update by samples: draw, prompt and answer."""
    options = {"train__learning_rate": 1e-12, "train__max_logprob_difference": 1e9, "train__micro_batch_tokens": 8192}
    recipe = make_recipe(Path("none"), Path("none"), algorithm__kl={}, train__mini_batch_prompts=8, **options)
    sizes: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
    }
    policy = init_policy(scale=1, max_position_embeddings=4096, **sizes)
    optimizer = build_optimizer(policy, learning_rate=1e-12, weight_decay=0.0, betas=(0.9, 0.99))
    sequences = [
        TrainSequence(
            token_ids=np.array([*prompt, *answer]) % 2048,
            targets=np.arange(len(prompt), len(prompt) + len(answer)),
            draw_index=draw,
            rollout_logprobs=np.zeros(len(answer), np.float32),
            advantages=np.full(len(answer), (-1) ** number, np.float32),
        )
        for number, (draw, prompt, answer) in enumerate(samples)
    ]
    return PolicyLearner(policy, optimizer, recipe), sequences, UpdateContext(recipe=recipe, step=1)


def recorded_samples(file: Path, tokenizer: str) -> Iterator[tuple[int, Sequence[int], Sequence[int]]]:
    """Samples of the first prompts of a recording: draw, prompt and answer."""
    [prompts] = read_recorded(file, tokenizer=tokenizer, max_tokens=2048)
    for draw, prompt in enumerate(prompts[:4]):
        yield from ((draw, prompt.prompt_token_ids, sample.tokens.tolist()) for sample in prompt.samples[:8])


def long_prompt() -> Iterator[tuple[int, Sequence[int], Sequence[int]]]:
    """A random prompt and answers."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(2048, size=1000).tolist()
    yield from ((0, prompt, rng.integers(2048, size=300).tolist()) for _ in range(8))


def update_figures(recording: Path, tokenizer: str) -> None:
    """Print the rows of the table of docs/benchmarks.md."""
    torch.set_num_threads(1)
    print("| learned from | samples | rows before | rows | fewer | operations | seconds before | seconds | as fast |")
    print("| --- " + "| --: " * 8 + "|")
    with tempfile.TemporaryDirectory() as folder:
        updates = {f"{name}, first step": first_update(name, folder) for name in ("quickstart", "tools_tiny")}
    updates[f"{recording.stem}, 4 prompts"] = random_model_update(recorded_samples(recording, tokenizer))
    updates["a prompt of 1,000 tokens, 8 answers of 300"] = random_model_update(long_prompt())
    for name, update in updates.items():
        runs = alternate({shares: partial(measure_update, shares, *update) for shares in (False, True)}, repeats=3)
        (rows_before, *_), before = zip(*runs[False], strict=True)
        (rows, *_), after = zip(*runs[True], strict=True)
        cells = [name, len(update[1]), f"{rows_before:,}", f"{rows:,}", f"{rows_before / rows:.2f}x"]
        learner, sequences, context = update
        flops = []
        for some in (lambda several: [0] * len(several), packing.shared_tokens):
            with patch.object(packing, "shared_tokens", some):
                flops.append(update_flops(context.recipe, learner.model.config, sequences))
        cells += [f"{flops[0] / flops[1]:.2f}x", f"{median(before):.2f}", f"{median(after):.2f}"]
        cells.append(SPEED.format(**compare_pairs(before, after)))
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def measure_update(shares: bool, *update: Any) -> tuple[int, float]:
    """Rows and processor seconds."""
    shared_tokens = packing.shared_tokens if shares else lambda some: [0] * len(some)
    with patch.object(packing, "shared_tokens", shared_tokens):
        start = time.process_time()
        PolicyLearner.learn(*update)
        return update[0].num_rows, time.process_time() - start


# --- Whole steps, and TRL's -------------------------------------------------------------------------------------------

NUM_STEPS = 12
"""Measured, after one that warms up."""


class Clock:
    """Processor seconds of the calls of a method."""

    def __init__(self, stack: ExitStack, owner: Any, method: str) -> None:
        self.seconds: list[float] = []
        self._method = getattr(owner, method)
        stack.enter_context(patch.object(owner, method, self))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Measure one."""
        start = time.process_time()
        result = self._method(*arguments, **options)
        self.seconds.append(time.process_time() - start)
        return result


def step_figures() -> None:
    """Print the rows of the table of docs/benchmarks.md."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        options = [f"output_dir={folder}", f"train.num_steps={NUM_STEPS + 2}", "eval.before_and_after=false"]
        trainers: dict[str, Trainer] = {}
        steps, updates = dict[str, Clock](), dict[str, Clock]()
        for name in ("each sequence alone", "what they share once"):
            recipe = load_recipe(Path("recipes/quickstart.yaml"), [*options, f"name=run-{len(trainers)}"])
            trainer = trainers[name] = stack.enter_context(Trainer(build_parts(recipe)))
            trainer.context.engine.warm_up()
            steps[name] = Clock(stack, trainer, "train_step")
            updates[name] = Clock(stack, trainer.parts.policy, "learn")
        trl = trl_trainer(trainer, folder)
        generation = Clock(stack, trl, "_generate_and_score_completions")

        def before_step(number: int) -> None:
            names = list(trainers)
            for name in names if number % 2 else reversed(names):
                shared_tokens = packing.shared_tokens if name == names[1] else lambda some: [0] * len(some)
                with patch.object(packing, "shared_tokens", shared_tokens):
                    trainers[name].train_step(number)

        of_steps = {name: clock.seconds for name, clock in steps.items()}
        of_updates = {name: clock.seconds for name, clock in updates.items()}
        of_steps["TRL"] = []
        trl.add_callback(step_callback(before_step, of_steps["TRL"]))
        trl.train()
    whole_and_rollout = zip(of_steps["TRL"], generation.seconds, strict=True)
    of_updates["TRL"] = [whole - rollout for whole, rollout in whole_and_rollout]
    print("| quickstart | seconds of a step | of its update | step as fast | update as fast |")
    print("| --- " + "| --: " * 4 + "|")
    baseline = next(iter(of_steps))
    for name in of_steps:
        pairs = [(seconds[baseline][1:], seconds[name][1:]) for seconds in (of_steps, of_updates)]
        cells = [name, *(f"{median(seconds):.2f}" for _, seconds in pairs)]
        cells += [SPEED.format(**compare_pairs(*pair)) for pair in pairs]
        print("| " + " | ".join(cells) + " |")


def trl_trainer(ours: Trainer, folder: str) -> Any:
    """TRL's, for the prompts that our trainer draws, in the same order, with all samples of a step in one batch."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    recipe, tokenizer = ours.recipe, ours.context.tokenizer
    rollout, train = recipe.rollout, recipe.train
    draws = [ours.parts.sampler.prompt_of(number) for number in range((NUM_STEPS + 1) * rollout.num_prompts)]
    assert all(tuple(tokenizer(prompt.text)["input_ids"]) == prompt.token_ids for prompt in draws)
    config = GRPOConfig(
        output_dir=f"{folder}/trl",
        max_steps=NUM_STEPS + 1,
        per_device_train_batch_size=rollout.num_prompts * rollout.num_samples,
        num_generations=rollout.num_samples,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        learning_rate=train.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=train.weight_decay,
        beta=recipe.algorithm.kl.coefficient,
        loss_type="grpo",
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
        return [float(is_correct(text, one)) for text, one in zip(completions, answer, strict=True)]

    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(locate(recipe.model.path), dtype=torch.float32),
        args=config,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": prompt.text, "answer": prompt.answer} for prompt in draws]),
    )


def step_callback(before_step: Callable[[int], None], seconds: list[float]) -> Any:
    """For a trainer of transformers, whose processor seconds it appends; steps count from 1."""
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        start = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            before_step(state.global_step + 1)
            self.start = time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds.append(time.process_time() - self.start)

    return Callback()


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
    update = commands.add_parser("update")
    update.add_argument("recording", type=Path)
    update.add_argument("tokenizer")
    commands.add_parser("step")
    options = parser.parse_args()
    if options.command == "off-policy":
        off_policy_figures()
    elif options.command == "update":
        update_figures(options.recording, options.tokenizer)
    elif options.command == "step":
        step_figures()
    else:
        draft_head_figures(options)


if __name__ == "__main__":
    main()
