"""The policy update on the device: tokens a second against the measured matmul rate, and memory.

And how far the decoder's log-probs are from the update's.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from srtrl.bench.cuda.limits import TERA
from srtrl.bench.cuda.plan import GpuBench
from srtrl.bench.cuda.report import SectionReport
from srtrl.bench.drafter_tables import aligned
from srtrl.bench.tables import Grid
from srtrl.bench.workload import make_workload, random_prompts
from srtrl.engine.engine import Engine
from srtrl.model.transformer import CompiledLayers, ModelConfig, Transformer, model_flops
from srtrl.model.weights import load_model
from srtrl.recipe import Recipe
from srtrl.trainer.optimizer import build_optimizer
from srtrl.trainer.update import compute_logprobs, logprob_difference, update_policy
from srtrl.types import TrainSequence

GOAL_MFU = 0.4
GOAL_MEAN, GOAL_KL = 0.01, 1e-3
GIB = 2**30
NO_LIMIT = 1e9
SHARPNESS = 6.0
"""The final norm of random weights is multiplied by this: their entropy is then nearer to a trained policy's."""


@dataclass(kw_only=True, slots=True, frozen=True)
class UpdateCase:
    """One way to run the update."""

    dtype: torch.dtype
    """Of the weights; float32 computes under bfloat16 autocast."""
    checkpointing: bool
    compiled: bool

    def __str__(self) -> str:
        weights = "bf16 weights + fp32 masters" if self.dtype == torch.bfloat16 else "fp32 weights, bf16 autocast"
        options = ", checkpointing" * self.checkpointing + ", compiled" * self.compiled
        return weights + options

    @property
    def mixed_precision(self) -> str:
        """As in `model.mixed_precision` of a recipe."""
        return "no" if self.dtype == torch.bfloat16 else "bf16"


CASES = (
    UpdateCase(dtype=torch.bfloat16, checkpointing=False, compiled=False),
    UpdateCase(dtype=torch.float32, checkpointing=False, compiled=False),
    UpdateCase(dtype=torch.bfloat16, checkpointing=True, compiled=False),
    UpdateCase(dtype=torch.bfloat16, checkpointing=False, compiled=True),
    UpdateCase(dtype=torch.float32, checkpointing=True, compiled=False),
    UpdateCase(dtype=torch.float32, checkpointing=False, compiled=True),
)
"""In order of importance."""
NUM_TIMED = 3
"""Updates of a case that count, after one to warm up."""


@contextmanager
def accelerator_of(mixed_precision: str, device: torch.device) -> Iterator[Accelerator]:
    """Make an Accelerator; accelerate keeps one precision a process, so it is made to forget it."""
    AcceleratorState._reset_state(True)
    try:
        yield Accelerator(cpu=device.type == "cpu", mixed_precision=mixed_precision)
    finally:
        AcceleratorState._reset_state(True)


def update_recipe(
    num_prompts: int, micro_batch_tokens: int, *, learning_rate: float = 1e-6, eps: float = 1e-8
) -> Recipe:
    """A recipe for `update_policy`: GRPO, two samples a prompt, one optimizer step a batch."""
    return Recipe.model_validate(
        {
            "name": "bench-gpu",
            "model": {"path": "unused"},
            "task": {"name": "unused"},
            "rollout": {"num_prompts": num_prompts, "num_samples": 2, "max_prompt_tokens": 1, "max_new_tokens": 1},
            "train": {
                "num_steps": 1,
                "micro_batch_tokens": micro_batch_tokens,
                "max_logprob_difference": NO_LIMIT,
                "learning_rate": learning_rate,
                "eps": eps,
            },
        }
    )


def random_sequences(config: ModelConfig, num_sequences: int, length: int) -> list[TrainSequence]:
    """Random tokens, a quarter of them prompt, with the log-probs of a uniform policy."""
    random = np.random.default_rng(0)
    num_prompt = max(1, length // 4)
    num_response = length - num_prompt
    return [
        TrainSequence(
            token_ids=random.integers(config.vocab_size, size=length),
            num_prompt_tokens=num_prompt,
            draw_index=index // 2,
            rollout_logprobs=np.full(num_response, -math.log(config.vocab_size), np.float32),
            advantages=np.full(num_response, random.standard_normal(), np.float32),
        )
        for index in range(num_sequences)
    ]


def measure_update(bench: GpuBench, report: SectionReport) -> None:
    """The section: each case in its turn, and the best of them against the goal."""
    assert bench.limits is not None, "the section `limits` comes first"
    sizes = bench.sizes
    rates: dict[str, float] = {}
    cells: list[tuple[str, ...]] = []
    for case in CASES:
        if bench.time_left() < 0:
            report.add(str(case), "not run: time")
            continue
        bench.tell(f"update: {case}")
        try:
            seconds, peak = time_update(bench, case)
        except torch.OutOfMemoryError as error:
            report.add(str(case), f"out of memory: {str(error).splitlines()[0]}")
            continue
        num_tokens = sizes.num_micro_batches * sizes.update_tokens
        rate = _flops(bench) / seconds
        rates[str(case)] = share = rate / bench.limits.matmul_rate
        report.add(
            str(case),
            f"{num_tokens / seconds:,.0f} tokens/s, {rate / TERA:.0f} TFLOP/s, {share:.0%}, peak {peak / GIB:.1f} GiB",
        )
        cells.append(
            (
                str(case),
                f"{seconds:.3f}",
                f"{num_tokens / seconds:,.0f}",
                f"{rate / TERA:.0f}",
                f"{share:.1%}",
                f"{peak / GIB:.1f}",
            )
        )
        report.grids[:] = [_grid(cells)]
        report.values.setdefault("cases", []).append(
            {"case": str(case), "seconds": seconds, "tokens": num_tokens, "mfu": share, "peak_bytes": peak}
        )
    if rates:
        best = max(rates, key=lambda name: rates[name])
        report.add(
            f"the fastest: {best}",
            f"{rates[best]:.1%} of the measured matmul rate",
            f"at least {GOAL_MFU:.0%}",
            bench.judge(rates[best] >= GOAL_MFU),
        )
    report.notes.append(
        f"`update_policy` on {sizes.num_micro_batches} micro-batches of {sizes.update_tokens} tokens in sequences of "
        f"{sizes.update_lengths}, three quarters of them response; log-probs, clipping and AdamW included. A warm-up, "
        f"then the median of {NUM_TIMED}. The share is model FLOPs (`model_flops`: nothing that is computed twice "
        "counts) of the measured rate. Peak memory is what the update took beside what was there before."
    )


def time_update(bench: GpuBench, case: UpdateCase) -> tuple[float, int]:
    """Median seconds of an update, and the most bytes that it had on the device beside what was there before."""
    sizes, device = bench.sizes, bench.device
    is_cuda = device.type == "cuda"
    folder = bench.policy_folder
    bench.free_memory()
    before = 0
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    policy = load_model(folder, dtype=case.dtype, device=device)
    policy.gradient_checkpointing = case.checkpointing
    if case.compiled:
        policy.compiled_layers = CompiledLayers("eager" if bench.smoke else "inductor")
    sequences = _sequences(bench)
    recipe = update_recipe(len(sequences) // 2, sizes.update_tokens)
    optimizer = optimizer_for(policy, recipe)
    seconds = []
    with accelerator_of(case.mixed_precision, device) as accelerator:
        for _ in range(1 + NUM_TIMED):
            bench.synchronise()
            started = time.perf_counter()
            update_policy(policy, optimizer, accelerator, sequences, recipe=recipe, step=1, kl_coefficient=0.0)
            bench.synchronise()
            seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated(device) - before if is_cuda else 0
    return median(seconds[1:]), peak


def optimizer_for(policy: Transformer, recipe: Recipe) -> torch.optim.Optimizer:
    """As in training."""
    train = recipe.train
    return build_optimizer(
        policy,
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        betas=train.betas,
        eps=train.eps,
    )


def _sequences(bench: GpuBench) -> list[TrainSequence]:
    sizes = bench.sizes
    count = sizes.num_micro_batches * sizes.update_tokens // sizes.update_lengths
    return random_sequences(bench.policy.config, count, sizes.update_lengths)


def _flops(bench: GpuBench) -> float:
    sequences = _sequences(bench)
    return model_flops(
        bench.policy.config,
        [len(sequence.token_ids) for sequence in sequences],
        num_targets=sum(len(sequence.rollout_logprobs) for sequence in sequences),
    )


def _grid(cells: Sequence[tuple[str, ...]]) -> Grid:
    return Grid(
        caption="The update",
        columns=("weights", "seconds", "tokens/s", "TFLOP/s", "of the matmul rate", "peak GiB"),
        alignments=aligned(0, 5, 0),
        rows=tuple(cells),
        group_by=0,
    )


def measure_logprobs(bench: GpuBench, report: SectionReport) -> None:
    """The section: decode, then compute the same tokens' log-probs as the update does, with the same weights."""
    sizes, policy = bench.sizes, bench.policy
    prompts = random_prompts(
        sizes.logprob_sequences, shortest=8, longest=8, vocab_size=policy.config.vocab_size, seed=1
    )
    new_tokens = [sizes.logprob_tokens] * len(prompts)
    workload = make_workload("equal", new_tokens, prompts, num_samples=1, seed=1)
    options = bench.engine_options(slots=len(prompts), max_sequence_tokens=workload.max_sequence_tokens)
    with torch.no_grad():
        policy.final_norm.mul_(SHARPNESS)
    try:
        completions = list(Engine(policy, options).generate(workload.requests))
        sequences = [
            TrainSequence(
                token_ids=np.array([*completion.request.prompt_token_ids, *completion.token_ids], np.int64),
                num_prompt_tokens=len(completion.request.prompt_token_ids),
                draw_index=completion.request.draw_index,
                rollout_logprobs=np.array(completion.rollout_logprobs, np.float32),
                advantages=np.zeros(len(completion.token_ids), np.float32),
            )
            for completion in completions
        ]
        with accelerator_of("no", bench.device) as accelerator:
            trainer = compute_logprobs(
                policy, sequences, accelerator, micro_batch_tokens=sizes.update_tokens, temperature=1.0
            )
    finally:
        with torch.no_grad():
            policy.final_norm.div_(SHARPNESS)
    found = logprob_difference(sequences, trainer, max_difference=NO_LIMIT, where="bench gpu")
    mean, most, kl = (found[f"logprob_difference/{name}"] for name in ("mean", "max", "kl"))
    count = sum(len(sequence.rollout_logprobs) for sequence in sequences)
    report.add(
        f"mean absolute difference over {count} tokens",
        f"{mean:.2g} (at most {most:.2g})",
        f"at most {GOAL_MEAN:g}",
        bench.judge(mean <= GOAL_MEAN),
    )
    report.add("KL of the same tokens", f"{kl:.2g}", f"at most {GOAL_KL:g}", bench.judge(kl <= GOAL_KL))
    report.values["difference"] = {"mean": mean, "max": most, "kl": kl, "tokens": count}
    entropy = -float(np.mean(np.concatenate([sequence.rollout_logprobs for sequence in sequences])))
    report.notes.append(
        f"bfloat16 on both sides; the weights are random, the final norm {SHARPNESS:g} times as large, which gives the "
        f"tokens a mean log-prob of {-entropy:.2f}. A trained policy's differences may be others."
    )
