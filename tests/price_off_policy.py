"""The table of docs/off_policy.md: rollouts with log-normal lengths at a priced GPU, by mode.

    python tests/price_off_policy.py

A random policy drifts from step to step. Every sample has a length of its own, log-normal, the longest 20 times the
median; each step has 32 prompts, new ones or the same. The engine is real, its clock is not: a decode step of N rows takes
1.2 ms + max(0.8 ms, 6.2 us x N), as a model of 1.5B parameters on an H200 (an estimate; the host is not counted).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import torch
from engine_cases import tiny_policy
from environment_cases import TOKENIZER
from test_rank_rollouts import grader_of

from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.draft_budget import MAX_ROWS, StepCost
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.model.attention import PackedPlan
from srtrl.model.transformer import Transformer
from srtrl.rollout.collect import Collector, FixedDraws, collect_rollouts
from srtrl.rollout.partial import PartialDraws, prefix_of
from srtrl.trainer.off_policy import PER_TOKEN, num_accepted
from srtrl.types import Prefix, Prompt, Request, SampleKey, SamplingParams

NUM_PROMPTS, NUM_SAMPLES, NUM_STEPS, MEDIAN, MAX_RATIO = 32, 8, 6, 40, 20
FIXED, MEMORY, PER_ROW = 1.2e-3, 0.8e-3, 6.2e-6
HEAD, DRIFT = 8.0, 0.0013
"""Give an entropy of 0.56 nats and a KL of 2e-4 nats per token from a step to the next."""


class LogNormal(Collector):
    """Ends each sample at a length that its name decides."""

    def requests(self, draws: Sequence[tuple[int, Prompt]]) -> list[Request]:
        return [
            replace(r, sampling=SamplingParams(max_new_tokens=length_of(r.draw_index, r.sample_index)))
            for r in super().requests(draws)
        ]


def length_of(draw: int, sample: int) -> int:
    z = np.random.default_rng((draw, sample)).standard_normal()
    return int(np.clip(MEDIAN * MAX_RATIO ** (z / 2.9), 2, MEDIAN * MAX_RATIO))  # 2.9: one of 256 is beyond


class PricedEngine(Engine):
    """Adds up the price of its steps."""

    seconds = 0.0

    def _record(self, step: Any, trees: Any, *others: Any, **options: Any) -> None:
        num_rows = len(step.slots) + trees.num_nodes + step.num_prompt_rows
        self.seconds += FIXED + max(MEMORY, PER_ROW * num_rows)
        super()._record(step, trees, *others, **options)


def price(mode: str, *, num_known: int, drafts: bool, runs_ahead: bool) -> None:
    """Print a row; `num_known` is the number of prompts, which come again in turn."""
    policy = tiny_policy(max_position_embeddings=2 + MEDIAN * MAX_RATIO, scale=8.0)
    with torch.no_grad():
        policy.head_weight.mul_(HEAD)
    rows = [1, 64, 128, 129, 256, 512, 1024, 2048, MAX_ROWS]
    cost = StepCost(points=[(n, FIXED + max(MEMORY, PER_ROW * n)) for n in rows])
    options = EngineOptions(slots=256, run_ahead_max_slowdown=0.03 if runs_ahead else None)
    engine = PricedEngine(policy, options, drafter=SrtDrafter() if drafts else None, cost=cost)
    noise, new = torch.Generator().manual_seed(0), count()
    earlier: dict[SampleKey, Prefix] = {}
    totals: list[tuple[float, ...]] = []
    with grader_of("test_rank_rollouts:half_tokens") as grader:
        for step in range(NUM_STEPS):
            before = engine.seconds
            numbers = sorted({draw for draw, _ in earlier}) if mode == "partial" else []
            numbers += [next(new) for _ in range(NUM_PROMPTS - len(numbers))]
            draws, ahead = (
                [
                    (
                        n,
                        Prompt(
                            prompt_id=str(n), text="", token_ids=(n % num_known % 61, n % num_known // 61), answer=""
                        ),
                    )
                    for n in some
                ]
                for some in (numbers, range(numbers[-1] + 1, numbers[-1] + 1 + NUM_PROMPTS))
            )
            collector = LogNormal(
                grader,
                TOKENIZER,
                num_samples=NUM_SAMPLES,
                sampling=SamplingParams(max_new_tokens=1),
                seed=0,
                purpose="train",
            )
            run_ahead = collector.run_ahead(ahead) if runs_ahead else []
            if mode == "partial":
                collector.prefixes = earlier
                due = {draw for (draw, _), p in earlier.items() if p.policy_versions[0] <= step - 2}
                some = PartialDraws(draws, num_complete=26, due=due, run_ahead=run_ahead)
                groups = collect_rollouts(engine, collector, some)
                earlier = some.carried
            else:
                if mode == "spec_rl":
                    collector.prefixes, num_tokens = accepted(policy, collector.requests(draws), earlier)
                    engine.seconds += FIXED * (num_tokens > 0) + PER_ROW * num_tokens
                groups = collect_rollouts(engine, collector, FixedDraws(draws, run_ahead=run_ahead))
                earlier = {
                    (r.draw_index % NUM_PROMPTS, r.sample_index): prefix_of(r, None) for g in groups for r in g.rollouts
                }
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            num_stale = sum(int((r.policy_versions < step).sum()) for r in rollouts)
            totals.append((engine.seconds - before, sum(len(r.token_ids) for r in rollouts), num_stale))
            engine.end_step(has_new_weights=True)
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(DRIFT * parameter.std() * torch.randn(parameter.shape, generator=noise))
    seconds, num_tokens, num_stale = np.array(totals[2:]).sum(axis=0)
    name = ", ".join([mode, *["drafts"] * drafts, *["run-ahead"] * runs_ahead])
    prompts = "the same" if num_known == NUM_PROMPTS else "new"
    steps = NUM_STEPS - 2
    print(
        f"| {prompts} | `{name}` | {seconds / steps:.2f} | {num_tokens / steps:,.0f} | {1e6 * seconds / num_tokens:.0f} | "
        f"{num_stale / num_tokens:.0%} |",
        flush=True,
    )


def accepted(
    policy: Transformer, requests: list[Request], earlier: dict[SampleKey, Prefix]
) -> tuple[dict[SampleKey, Prefix], int]:
    """Prefixes by SPEC-RL's rule at lenience 1, shorter than the new sample; and the number of tokens verified."""
    prefixes: dict[SampleKey, Prefix] = {}
    num_tokens = 0
    for request in requests:
        prefix = earlier.get((request.draw_index % NUM_PROMPTS, request.sample_index))
        if prefix is None:
            continue
        tokens = torch.tensor([*request.prompt_token_ids, *prefix.token_ids.tolist()])
        with torch.no_grad():
            hidden = policy(tokens, PackedPlan((len(tokens),), "cpu"))[1:-1]
            logprobs = policy.logits(hidden).log_softmax(-1)
        new = logprobs[torch.arange(len(hidden)), tokens[2:]].numpy()
        num_tokens += len(new)
        length = num_accepted(request.rng_key, new - prefix.rollout_logprobs, 1.0)
        length = min(length, request.sampling.max_new_tokens - 1)
        if length:
            parts = {name: getattr(prefix, name)[:length] for name in PER_TOKEN}
            prefixes[request.draw_index, request.sample_index] = replace(prefix, **parts)
    return prefixes, num_tokens


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(
        "| prompts | mode | step, s | tokens learned from | us per token | stale |\n"
        + "| --- " * 2
        + "| --: " * 4
        + "|"
    )
    for num_known in (3000, NUM_PROMPTS):
        for mode in ("on_policy", "partial", "spec_rl")[: 2 if num_known > NUM_PROMPTS else 3]:
            for drafts, runs_ahead in ((False, False), (True, False), (True, True)):
                price(mode, num_known=num_known, drafts=drafts, runs_ahead=runs_ahead)
