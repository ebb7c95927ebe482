"""The table of docs/off_policy.md: rollouts with log-normal lengths at a priced GPU, by mode.

    python tests/price_off_policy.py

A random policy drifts from step to step. Every prompt and sample index has a length of its own, log-normal, the longest
20 times the median; each step has 32 prompts, new ones or the same. The engine is real, its clock is not: a decode step
of N rows takes 1.2 ms + max(0.8 ms, 6.2 us x N), as a model of 1.5B parameters on an H200 (an estimate; the host is not
counted).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_cases import tiny_policy
from environment_cases import TOKENIZER
from test_rank_rollouts import grader_of
from tiny_run import make_recipe

from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.draft_budget import MAX_ROWS, StepCost
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.rollout.collect import Collector, FixedDraws, collect_rollouts
from srtrl.rollout.partial import PartialDraws, prefix_of
from srtrl.trainer.off_policy import accept_prefixes
from srtrl.trainer.passes import UpdateContext
from srtrl.types import Prefix, Prompt, Request, SampleKey, SamplingParams

NUM_PROMPTS, NUM_SAMPLES, NUM_STEPS, NUM_WARM_UP, MEDIAN, MAX_RATIO = 32, 8, 6, 2, 40, 20
HEAD, DRIFT = 8.0, 0.0013
"""Give an entropy of 0.56 nats and a KL of 2e-4 nats per token from a step to the next."""


def seconds_of(num_rows: int) -> float:
    return 1.2e-3 + max(0.8e-3, 6.2e-6 * num_rows)


class LogNormal(Collector):
    """Ends each sample at a length that prompt and sample index decide."""

    num_known = 0

    def requests(self, draws: Sequence[tuple[int, Prompt]]) -> list[Request]:
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


def price(mode: str, *, num_known: int, drafts: bool, runs_ahead: bool) -> str:
    """A row; `num_known` is the number of prompts, which come again in turn."""
    policy = tiny_policy(max_position_embeddings=2 + MEDIAN * MAX_RATIO, scale=8.0)
    with torch.no_grad():
        policy.head_weight.mul_(HEAD)
    cost = StepCost(points=[(n, seconds_of(n)) for n in (1, 129, 256, 512, 1024, 2048, MAX_ROWS)])
    options = EngineOptions(slots=256, run_ahead_max_slowdown=0.03 if runs_ahead else None)
    engine = PricedEngine(policy, options, drafter=SrtDrafter() if drafts else None, cost=cost)
    context = UpdateContext(recipe=make_recipe(Path("none"), Path("none"), train__micro_batch_tokens=8192), step=1)
    noise, new, totals = torch.Generator().manual_seed(0), count(), np.zeros(3)
    earlier: dict[SampleKey, Prefix] = {}
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
        shared: dict[str, Any] = {"num_samples": NUM_SAMPLES, "seed": 0, "purpose": "train"}
        with grader_of("test_rank_rollouts:half_tokens") as grader:
            collector = LogNormal(grader, TOKENIZER, sampling=SamplingParams(max_new_tokens=1), **shared)
            collector.num_known = num_known
            run_ahead = collector.run_ahead(ahead) if runs_ahead else []
            fixed = FixedDraws(draws, run_ahead=run_ahead)
            if mode == "partial":
                collector.prefixes = earlier
                due = {draw for (draw, _), p in earlier.items() if p.policy_versions[0] <= step - 2}
                fixed = PartialDraws(draws, num_complete=26, due=due, run_ahead=run_ahead)
            elif mode == "spec_rl" and earlier:
                requests = collector.requests(draws)
                offered = [earlier[r.draw_index % num_known, r.sample_index] for r in requests]
                collector.prefixes = accept_prefixes(requests, offered, policy, context)
                engine.seconds += seconds_of(sum(len(prefix.token_ids) for prefix in offered))
            rollouts = [rollout for group in collect_rollouts(engine, collector, fixed) for rollout in group.rollouts]
        if isinstance(fixed, PartialDraws):
            earlier = fixed.carried
        else:
            earlier = {(r.draw_index % num_known, r.sample_index): prefix_of(r, r.finish_reason) for r in rollouts}
        engine.end_step(has_new_weights=True)
        if step >= NUM_WARM_UP:
            num_stale = sum(int((r.policy_versions < step).sum()) for r in rollouts)
            totals += [engine.seconds - seconds, sum(len(r.token_ids) for r in rollouts), num_stale]
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(DRIFT * parameter.std() * torch.randn(parameter.shape, generator=noise))
    seconds, num_tokens, num_stale = totals / (NUM_STEPS - NUM_WARM_UP)
    name = ", ".join([mode, *["drafts"] * drafts, *["run-ahead"] * runs_ahead])
    prompts = "the same" if num_known == NUM_PROMPTS else "new"
    speed, stale = 1e6 * seconds / num_tokens, num_stale / num_tokens
    return f"| {prompts} | `{name}` | {seconds:.2f} | {num_tokens:,.0f} | {speed:.0f} | {stale:.0%} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(
        "| prompts | mode | step, s | tokens learned from | us per token | stale |\n"
        + "| --- " * 2
        + "| --: " * 4
        + "|"
    )
    for num_known, mode in (
        (3000, "on_policy"),
        (3000, "partial"),
        (32, "on_policy"),
        (32, "partial"),
        (32, "spec_rl"),
    ):
        for drafts, runs_ahead in ((False, False), (True, False), (True, True)):
            print(price(mode, num_known=num_known, drafts=drafts, runs_ahead=runs_ahead), flush=True)
