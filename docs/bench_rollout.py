"""Drafters in whole rollouts, from the prompts to all tokens on the host.

    python docs/bench_rollout.py [--trace FILE [--tokenizer DIR]] [--drafters none,srt] [--slots 8,32] ...

A model of the named shape with random weights samples recorded rollouts (`--trace`) or generated ones; each drafter has
seen the share `--history` of each prompt's samples before. Weights are random because the seconds of a forward pass do
not depend on their values, and acceptance is that of the recorded (or generated) tokens, which replace those that the
engine samples; each run was checked to give exactly these. Whole rollouts alternate, after one of each to warm up, each
with a new drafter; the engines live on, as in training. Seconds are medians, `times as fast` is the median over pairs
of runs, beside the lowest and the highest pair.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar, cast

import numpy as np
import torch

from srtrl.bench.recorded import RecordedPrompt, RecordedSample, Tokens, feed_drafter, merge_prompts, read_recorded
from srtrl.bench.replay import check_history, format_cell
from srtrl.build import PREFILL_TOKENS, build_runner
from srtrl.drafters.base import resolve_drafter
from srtrl.engine.draft_budget import StepCost
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.engine.runner import RowFilters, Runner, SampledRows
from srtrl.engine.step_inputs import StepInputs
from srtrl.engine.warm_up import compile_kernels
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.model.hf_config import config_from_hf
from srtrl.model.published_shapes import SHAPES
from srtrl.model.transformer import Transformer
from srtrl.model.weights import init_model
from srtrl.run.machine import describe_machine
from srtrl.types import Completion, Request

Row = Mapping[str, Any]
"""Column -> value. A list is for programs alone and has no column."""

# --- The workload -----------------------------------------------------------------------------------------------------

NUM_PROMPTS, NUM_SAMPLES = 128, 16
NUM_WORDINGS = 3
"""Wordings of each generated prompt: each of its samples follows one of them."""
NEW_TOKEN = 0.03
"""Chance, at each token of a generated sample, that it is another one than that of the wording."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Trace:
    """Recorded rollouts, some of which a drafter has seen before while the others are decoded once more."""

    history: tuple[RecordedPrompt, ...]
    """Rollouts that the drafter has seen: the first samples of each prompt."""
    requests: tuple[Request, ...]
    """Requests to decode, by prompt; `draw_index` is the prompt's number."""
    responses: dict[int, Tokens]
    """RNG key of a request -> the tokens that it shall get."""

    @property
    def max_sequence_tokens(self) -> int:
        """The longest prompt and response together."""
        return max(len(request.prompt_token_ids) + request.sampling.max_new_tokens for request in self.requests)


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


def generated_prompts(max_tokens: int, vocab_size: int) -> list[RecordedPrompt]:
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
    trace: Path | None, vocab_size: int, *, tokenizer: str | None, max_tokens: int | None
) -> list[RecordedPrompt]:
    """Load the rollouts of `--trace`, or generate some if none is given; exit if they cannot be used."""
    if trace is None:
        return generated_prompts(max_tokens or 128, vocab_size)
    recording = read_recorded(trace, tokenizer=tokenizer, max_tokens=max_tokens or sys.maxsize)
    prompts = merge_prompts(chain.from_iterable(recording))
    if any(sample.extensions for prompt in prompts for sample in prompt.samples):
        sys.exit(f"--trace: {trace} has samples of several turns; `srtrl replay` counts their decode steps")
    texts = (text for prompt in prompts for text in (prompt.prompt_token_ids, *(one.tokens for one in prompt.samples)))
    if (largest := max(int(max(text)) for text in texts)) >= vocab_size:
        sys.exit(f"--trace: token id {largest} is not in the vocabulary of {vocab_size}: choose another --model-shape")
    return prompts


# --- One rollout ------------------------------------------------------------------------------------------------------


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
        self.prepared: list[bool] = []
        """Whether each step ran without compiling a kernel or capturing a graph."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, inputs: StepInputs, filters: RowFilters | None) -> None:
        """See `Runner`."""
        self._inputs = inputs
        self.runner.launch(inputs, filters)
        self.prepared.append(self.runner.was_prepared)

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
    pages = slots * -(-(max_sequence_tokens + options.max_draft_nodes) // options.page_size)
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
    prepared = fmean(cast(TraceRunner, engine.runner).prepared)
    return {"seconds": seconds, "prepared": prepared, **engine.take_metrics()}


def check_completions(completions: Sequence[Completion], trace: Trace) -> None:
    """Assert that each completion is the recorded one, token for token."""
    assert len(completions) == len(trace.requests), "not all samples were decoded"
    for completion in completions:
        expected = trace.responses[completion.request.rng_key]
        assert np.array_equal(completion.response.token_ids, expected), "the tokens are not those of the trace"


# --- Runs by turns, and their table -----------------------------------------------------------------------------------

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


def alternate(candidates: Mapping[Key, Callable[[], Result]], repeats: int) -> dict[Key, list[Result]]:
    """Run each candidate once to warm up, then `repeats` times, one after the other; each turn in reversed order.

    What slows the machine down for a while slows all candidates of a turn down, and cancels in ratios.
    """
    results: dict[Key, list[Result]] = {name: [] for name in candidates}
    for turn in range(repeats + 1):
        for name in list(candidates)[:: 1 if turn % 2 == 0 else -1]:
            started = time.perf_counter()
            result = candidates[name]()
            label = f"{name}, {f'run {turn} of {repeats}' if turn else 'warm-up'}"
            print(f"{label}: {time.perf_counter() - started:.3f} s", file=sys.stderr, flush=True)
            results[name] += [result] if turn else []
    return results


def compare_pairs(baseline: Sequence[float], seconds: Sequence[float]) -> dict[str, float]:
    """How many times as fast the second candidate is as the first, whose i-th runs were of the same turn.

    Returns:
        The median over the pairs of runs, and the lowest and the highest pair.
    """
    ratios = [first / second for first, second in zip(baseline, seconds, strict=True)]
    return {"times_as_fast": median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def rows_of(runs: dict[str, list[dict[str, float]]], num_slots: int, trace: Trace) -> list[Row]:
    """A row for each drafter; the first one is the baseline."""
    rows: list[Row] = []
    baseline = [run["seconds"] for run in next(iter(runs.values()))]
    num_tokens = sum(request.sampling.max_new_tokens for request in trace.requests)
    for name, of_name in runs.items():
        seconds = [run["seconds"] for run in of_name]
        row = {
            "slots": num_slots,
            "sequences": len(trace.requests),
            "drafter": name,
            "seconds": median(seconds),
            "tokens_per_second": num_tokens / median(seconds),
            "ms_per_step": 1000 * median(seconds) / fmean(run["engine/decode_steps"] for run in of_name),
            "tokens_per_step": fmean(run["engine/tokens_per_decode_step"] for run in of_name),
            "prepared_share": fmean(run["prepared"] for run in of_name),
            "verified_per_step": fmean(run["engine/verified_per_decode_step"] for run in of_name),
        }
        ratios = compare_pairs(baseline, seconds) if rows else {}
        rows.append(row | ratios | {"runs": of_name})
    return rows


def publish(title: str, rows: Sequence[Row], about: str, device: torch.device, *, as_json: bool) -> None:
    """Print the figures: as JSON, or as a section of Markdown with what was measured (`about`) and on what machine."""
    command, machine = f"python {shlex.join(sys.argv)}", describe_machine(device)
    if as_json:
        print(json.dumps({"title": title, "command": command, "machine": machine, "rows": rows}))
    else:
        print("\n\n".join([f"## {title}", f"`{command}`", f"{machine}.", about.strip(), format_table(rows)]))


def format_table(rows: Sequence[Row]) -> str:
    """A Markdown table whose cells are aligned, so that it is one on a terminal, too."""
    columns = []
    for name in dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list)):
        cells = [name.replace("_", " "), *(format_cell(row.get(name)) for row in rows)]
        width = max(map(len, cells))
        cells.insert(1, "-" * (width - 1) + ":")
        columns.append([cell.rjust(width) for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="recorded rollouts: a run's folder, Parquet of one, or JSONL")
    parser.add_argument("--tokenizer", help="of their texts: a folder or a hub name")
    parser.add_argument("--drafters", default="none,srt", help="the first is the baseline")
    parser.add_argument("--history", type=float, default=0.0, help="share of samples seen before, below 1")
    parser.add_argument("--prompts-used", type=int, help="only the first prompts; by default all of the trace, or 1")
    parser.add_argument("--max-tokens", type=int, help="maximum number of tokens of a sample; with no trace 128")
    parser.add_argument("--slots", help="sequences decoded at a time, as 8,32; by default all")
    parser.add_argument("--model-shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, help="CPU threads; by default torch's own choice")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each, alternating, after one to warm up")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    check_history(options.history)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    set_cpu_threads(options.threads)
    config = config_from_hf(SHAPES[options.model_shape], options.model_shape)
    prompts = load_prompts(options.trace, config.vocab_size, tokenizer=options.tokenizer, max_tokens=options.max_tokens)
    num_prompts = options.prompts_used or (None if options.trace else 1)
    workload = share_out(prompts[:num_prompts], history=options.history)
    policy = init_model(config, 0, getattr(torch, options.dtype), device, drawn_on=device)
    slots = [int(count) for count in options.slots.split(",")] if options.slots else [len(workload.requests)]
    rows: list[Row] = []
    for num_slots in slots:
        candidates = {}
        for name in options.drafters.split(","):
            prefill = PREFILL_TOKENS[device.type]
            engine = make_engine(policy, num_slots, workload.max_sequence_tokens, prefill_chunk_tokens=prefill)
            candidates[name] = partial(run_engine, engine, name, workload)
        rows += rows_of(alternate(candidates, options.repeats), num_slots, workload)
    source = f"Drafters on a trace: {options.trace.name}" if options.trace else "Rollouts: generated"
    where = f"{options.model_shape}, {options.dtype}, {device.type}, {torch.get_num_threads()} threads"
    title = f"{source}, {options.history:g} as history, {where}"
    publish(title, rows, (__doc__ or "").partition("...")[2], device, as_json=options.json)


if __name__ == "__main__":
    main()
