"""Deterministic mode on the device: the same tokens and the same bits whatever drafts, slots and graphs there are."""

from collections.abc import Mapping
from dataclasses import dataclass

from srtrl.bench.cuda.drafter import ScriptedDrafter
from srtrl.bench.cuda.plan import GpuBench
from srtrl.bench.cuda.report import SectionReport
from srtrl.bench.workload import make_workload, random_prompts
from srtrl.drafters.base import DrafterBase
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.types import Request

DRAFT_NODES = 8
"""Of a sequence in a step, whether they pay or not: what is checked is that they change nothing."""

Outputs = Mapping[int, tuple[list[int], list[float]]]
"""Stream -> tokens and log-probs."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Variant:
    """One way to decode the same samples."""

    drafter: str
    slots: int
    cuda_graphs: bool

    def __str__(self) -> str:
        return f"{self.drafter}, {self.slots} slots, {'graphs' if self.cuda_graphs else 'no graphs'}"


def check_identity(bench: GpuBench, report: SectionReport) -> None:
    """Every variant against the first."""
    requests = _requests(bench)
    few, many = max(1, len(requests) // 4), len(requests)
    first, *others = [
        Variant(drafter="none", slots=many, cuda_graphs=True),
        Variant(drafter="right", slots=many, cuda_graphs=True),
        Variant(drafter="wrong", slots=many, cuda_graphs=True),
        Variant(drafter="none", slots=few, cuda_graphs=True),
        Variant(drafter="srt", slots=few, cuda_graphs=True),
        Variant(drafter="none", slots=many, cuda_graphs=False),
        Variant(drafter="right", slots=few, cuda_graphs=False),
    ]
    expected = _decode(bench, first, requests, {})
    for variant in others:
        what = f"identical to {first.drafter}, {first.slots} slots: {variant}"
        if bench.time_left() < 0:
            report.add(what, "not run: time")
            continue
        found = _decode(bench, variant, requests, expected)
        num_tokens = sum(found[rng_key][0] != expected[rng_key][0] for rng_key in expected)
        num_logprobs = sum(found[rng_key][1] != expected[rng_key][1] for rng_key in expected)
        report.check(what, max(num_tokens, num_logprobs), 0, f"{num_tokens} by tokens, {num_logprobs} by log-probs")


def _requests(bench: GpuBench) -> tuple[Request, ...]:
    """Groups of four samples, prompts of several lengths, and responses, too."""
    num_prompts, longest = (1, 9) if bench.smoke else (4, 90)
    prompts = random_prompts(
        num_prompts, shortest=3, longest=longest, vocab_size=bench.policy.config.vocab_size, seed=2
    )
    new_tokens = [bench.sizes.check_tokens + index % 3 for index in range(4 * num_prompts)]
    return make_workload("equal", new_tokens, prompts, num_samples=4, seed=2).requests


def _decode(bench: GpuBench, variant: Variant, requests: tuple[Request, ...], truth: Outputs) -> Outputs:
    options = EngineOptions(
        slots=variant.slots,
        kv_memory_gib=bench.kv_memory_gib,
        deterministic=True,
        cuda_graphs=variant.cuda_graphs,
        # In a smoke test the CPU's own path: the interpreter would take a minute a step.
        draft_budget=DRAFT_NODES,
        prefill_chunk_tokens=min(64, bench.sizes.prefill_tokens),
        max_sequence_tokens=max(len(r.prompt_token_ids) + r.sampling.max_new_tokens for r in requests),
    )
    texts = {rng_key: tokens for rng_key, (tokens, _) in truth.items()}
    vocab_size = bench.policy.config.vocab_size
    makers: dict[str, DrafterBase] = {
        "none": NoDrafter(),
        "srt": SrtDrafter(),
        "right": ScriptedDrafter(texts, is_right=True, vocab_size=vocab_size),
        "wrong": ScriptedDrafter(texts, is_right=False, vocab_size=vocab_size),
    }
    bench.free_memory()
    engine = Engine(bench.policy, options, drafter=makers[variant.drafter])
    outputs = {
        completion.request.rng_key: (completion.token_ids, completion.rollout_logprobs)
        for completion in engine.generate(requests)
    }
    tokens_per_step = engine.take_metrics()["engine/tokens_per_decode_step"]
    if variant.drafter == "right":
        assert tokens_per_step > 1.5, f"right drafts were hardly accepted: {tokens_per_step:.2f} tokens a step"
    return outputs
