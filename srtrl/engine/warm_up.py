"""Compilation of a decode step's CPU kernels before the first rollout, so that no rollout waits for it."""

from collections.abc import Callable
from dataclasses import replace

import torch

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.draft_budget import MAX_ROWS, StepCost
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.engine.runner import Runner
from srtrl.model.transformer import Transformer
from srtrl.model.weights import read_config
from srtrl.types import Request, SamplingParams

NUM_TOKENS = 24
"""Length of the samples: enough for drafts."""


@torch.no_grad()
def compile_kernels(
    with_drafts: bool = True, *, wrap: Callable[[DrafterBase, Runner], DrafterBase] | None = None
) -> None:
    """Compile (or load) all CPU kernels of a decode step, by two short rollouts on a model of one layer of zeros.

    `with_drafts`: also those of the drafter `srt`; `wrap`: also those of what is around a drafter.
    """
    config = replace(read_config("bundled:tiny"), num_hidden_layers=1, vocab_size=4)
    policy = Transformer(config, torch.float32, "cpu")
    for parameter in policy.parameters():
        parameter.zero_()
    options = EngineOptions(slots=2, max_sequence_tokens=NUM_TOKENS, num_pages=16)
    cost, runner = StepCost(points=((1, 1.0), (MAX_ROWS, 1.0))), CpuRunner(policy, options)
    drafter = SrtDrafter() if with_drafts else NoDrafter()
    engine = Engine(policy, options, drafter=wrap(drafter, runner) if wrap else drafter, runner=runner, cost=cost)
    first = Request(
        prompt_id="warm-up",
        prompt_token_ids=(1, 2),
        draw_index=0,
        sample_index=0,
        rng_key=0,
        sampling=SamplingParams(max_new_tokens=NUM_TOKENS - 2),
    )
    greedy = replace(first, rng_key=1, sampling=replace(first.sampling, temperature=0.0))  # its phrases are counted
    for _ in range(2):  # the second time with history
        list(engine.generate([first, greedy]))
        engine.end_step(has_new_weights=True)
