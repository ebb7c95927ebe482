"""What the engines of a benchmark decode: prompts, and the tokens that each sample gets."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np

from srtrl.bench.measure import Row, compare_pairs
from srtrl.bench.recorded import RecordedPrompt, RecordedSample, Tokens, feed_drafter, merge_prompts, read_recorded
from srtrl.build import build_runner
from srtrl.drafters.base import resolve_drafter
from srtrl.engine.draft_budget import StepCost
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.engine.rows import StepInputs
from srtrl.engine.runner import RowFilters, Runner, SampledRows
from srtrl.engine.warm_up import compile_kernels
from srtrl.model.transformer import ModelConfig, Transformer
from srtrl.types import Completion, Request

COUNTED = ("engine/decode_steps", "engine/tokens_per_decode_step", "engine/verified_per_decode_step")
"""Metrics of the table."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Trace:
    """Recorded rollouts, some of which a drafter has seen before while the others are decoded once more."""

    history: tuple[RecordedPrompt, ...]
    """What the drafter has seen: of each prompt its first samples."""
    requests: tuple[Request, ...]
    """What is decoded, by prompt; `draw_index` is the prompt's number."""
    responses: dict[int, Tokens]
    """RNG key of a request -> the tokens that it shall get."""

    @property
    def max_sequence_tokens(self) -> int:
        """The longest prompt and response together."""
        return max(len(request.prompt_token_ids) + request.sampling.max_new_tokens for request in self.requests)

    @property
    def num_tokens(self) -> int:
        """Generated tokens of one rollout."""
        return sum(request.sampling.max_new_tokens for request in self.requests)


def share_out(prompts: Sequence[RecordedPrompt], *, history: float) -> Trace:
    """Let the first `history` (0 to 1) of each prompt's samples be seen before, and the others be decoded."""
    seen, requests, responses = [], [], {}
    for draw, prompt in enumerate(prompts):
        known, others = prompt.split(history)
        seen.append(known)
        for index, sample in enumerate(others.samples):
            requests.append(prompt.request(draw, index, len(sample.tokens)))
            responses[requests[-1].rng_key] = sample.tokens
    return Trace(history=tuple(seen), requests=tuple(requests), responses=responses)


NUM_PROMPTS, NUM_SAMPLES = 128, 16
NUM_WORDINGS = 3
"""Of each generated prompt: each of its samples follows one of them."""
NEW_TOKEN = 0.03
"""Chance, at each token of a generated sample, that it is another one than that of the wording."""


def generated_prompts(*, max_tokens: int, vocab_size: int) -> list[RecordedPrompt]:
    """Rollouts that repeat each other about as the samples of one prompt do: `NUM_SAMPLES` of each.

    With half of them as history, `srt` reaches about the tokens per step that it reaches on recorded mathematics.
    """
    generator = np.random.default_rng(0)
    made = []
    for number in range(NUM_PROMPTS):
        prompt = tuple(generator.integers(0, vocab_size, generator.integers(32, 129)).tolist())
        wordings = generator.integers(0, vocab_size, (NUM_WORDINGS, max_tokens))
        samples = []
        for _ in range(NUM_SAMPLES):
            length = int(np.clip(generator.lognormal(np.log(0.6 * max_tokens), 0.3), 8, max_tokens))
            wording = wordings[generator.integers(NUM_WORDINGS), :length]
            is_new = generator.random(length) < NEW_TOKEN
            tokens = np.where(is_new, generator.integers(0, vocab_size, length), wording)
            samples.append(RecordedSample(tokens=tokens.astype(np.int32)))
        made.append(RecordedPrompt(prompt_id=str(number), prompt_token_ids=prompt, samples=samples))
    return made


def load_prompts(
    trace: Path | None, config: ModelConfig, *, tokenizer: str | None, max_tokens: int
) -> list[RecordedPrompt]:
    """What a benchmark decodes: the rollouts of `--trace`, or generated ones where none is given.

    Raises:
        ValueError: The trace cannot be read, or is not for the model.
    """
    if trace is None:
        return generated_prompts(max_tokens=max_tokens, vocab_size=config.vocab_size)
    recording = read_recorded(trace, tokenizer=tokenizer, max_tokens=max_tokens)
    prompts = merge_prompts(chain.from_iterable(recording))
    if any(sample.extensions for prompt in prompts for sample in prompt.samples):
        raise ValueError(
            f"--trace: {trace} has samples of several turns, which benchmarks cannot decode again; "
            f"`srtrl replay {trace}` counts their decode steps"
        )
    texts = (text for prompt in prompts for text in (prompt.prompt_token_ids, *(one.tokens for one in prompt.samples)))
    largest = max(int(max(text)) for text in texts)
    if largest >= config.vocab_size:
        raise ValueError(
            f"--trace: token id {largest} is not in the model's vocabulary of {config.vocab_size}; choose a "
            "--model-shape of the family that the tokenizer belongs to"
        )
    return prompts


class TraceRunner:
    """A runner in which samples that were recorded get the recorded tokens in place of the sampled ones."""

    def __init__(self, runner: Runner, responses: Mapping[int, Tokens]) -> None:
        """`responses`: RNG key -> tokens."""
        self.runner = runner
        keys = sorted(responses)
        self._keys = np.array(keys, np.uint64)
        self._lengths = np.array([len(responses[key]) for key in keys], np.int64)
        self._starts = self._lengths.cumsum() - self._lengths
        self._tokens = np.concatenate([responses[key] for key in keys])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, inputs: StepInputs, filters: RowFilters | None) -> None:
        """See `Runner`."""
        self._inputs = inputs
        self.runner.launch(inputs, filters)

    def wait(self, num_sampled: int) -> SampledRows:
        """See `Runner`."""
        sampled = self.runner.wait(num_sampled)
        keys = self._inputs.rng_keys[:num_sampled].view(np.uint64)
        numbers = np.minimum(self._keys.searchsorted(keys), len(self._keys) - 1)
        # Draft nodes may be after the end of a response; what is sampled there is not used.
        positions = np.minimum(self._inputs.sample_positions[:num_sampled], self._lengths[numbers] - 1)
        recorded = self._tokens[self._starts[numbers] + positions]
        tokens = np.where(self._keys[numbers] == keys, recorded, sampled.token_ids)
        return SampledRows(token_ids=tokens.astype(np.int32), logprobs=sampled.logprobs)


def make_engine(
    policy: Transformer,
    slots: int,
    max_sequence_tokens: int,
    *,
    runner: Runner | None = None,
    cost: StepCost | None = None,
    **changes: Any,
) -> Engine:
    """An engine that has pages for whole sequences with their drafts in all slots; `changes` are `EngineOptions`."""
    options = EngineOptions(slots=slots, max_sequence_tokens=max_sequence_tokens, **changes)
    longest = max_sequence_tokens + options.max_draft_nodes
    pages = slots * -(-longest // options.page_size)
    options, runner = replace(options, num_pages=pages), runner or build_runner(policy, options)
    return Engine(policy, options, runner=runner, cost=cost, compile_kernels=compile_kernels)


def prepare(engine: Engine, drafter_name: str, trace: Trace) -> None:
    """Let the engine sample the trace, with a new drafter that has seen the history and nothing else."""
    engine.drafter = resolve_drafter("--drafters", drafter_name)()
    engine.drafter.knows_noise = False
    feed_drafter(engine.drafter, trace.history)
    inner = engine.runner.runner if isinstance(engine.runner, TraceRunner) else engine.runner
    engine.runner = cast(Runner, TraceRunner(inner, trace.responses))
    engine.take_metrics()


def run_engine(engine: Engine, drafter: str, trace: Trace) -> dict[str, float]:
    """One rollout, from the prompts to all tokens on the host: its seconds, and the engine's counts."""
    prepare(engine, drafter, trace)
    started = time.perf_counter()
    completions = list(engine.generate(trace.requests))
    seconds = time.perf_counter() - started
    check_completions(completions, trace)
    return {"seconds": seconds, **engine.take_metrics()}


def check_completions(completions: Sequence[Completion], trace: Trace) -> None:
    """Assert that each completion is the recorded one, token for token."""
    assert len(completions) == len(trace.requests), "not all samples were decoded"
    for completion in completions:
        expected = trace.responses[completion.request.rng_key]
        assert np.array_equal(completion.response.token_ids, expected), "the tokens are not those of the trace"


def rows_of(runs: dict[str, list[dict[str, float]]], num_slots: int, trace: Trace) -> list[Row]:
    """A row for each drafter; the first one is the baseline."""
    rows: list[Row] = []
    baseline: list[float] = []
    for name, of_name in runs.items():
        seconds = [run["seconds"] for run in of_name]
        median = statistics.median(seconds)
        num_steps, *means = (statistics.fmean(run[metric] for run in of_name) for metric in COUNTED)
        row: dict[str, Any] = {
            "slots": num_slots,
            "sequences": len(trace.requests),
            "drafter": name,
            "seconds": median,
            "tokens_per_second": trace.num_tokens / median,
            "ms_per_step": 1000 * median / num_steps,
            "tokens_per_step": means[0],
            "verified_per_step": means[1],
        }
        if baseline:
            row |= compare_pairs(baseline, seconds)
        baseline = baseline or seconds
        rows.append(row | {"runs": of_name})
    return rows
