"""Our decoder against others: workloads, contenders, and what to say about them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from srtrl.bench.comparison import compare_all
from srtrl.bench.contender import Contender, OurDecoder
from srtrl.bench.environment import Environment
from srtrl.bench.peer_hf import HuggingFaceGenerate
from srtrl.bench.rollout_options import Peer, RolloutBench
from srtrl.bench.tables import Document, comparison_values, peer_grid
from srtrl.bench.workload import (
    TAIL_MEDIAN_SHARE,
    TAIL_SIGMA,
    Lengths,
    Workload,
    draw_lengths,
    make_workload,
    random_prompts,
)
from srtrl.engine.engine import EngineOptions
from srtrl.generate import read_prompts
from srtrl.model.transformer import ModelConfig, Transformer
from srtrl.model.weights import load_model, load_tokenizer, read_config

OURS = "srtrl"


def measure_peers(
    bench: RolloutBench, folder: Path, dtype: torch.dtype, device: torch.device, environment: Environment
) -> Document:
    """Our decoder and its peers on rollouts of a model in `folder`.

    Raises:
        ValueError: Model, prompts, lengths and memory do not fit each other.
    """
    workloads = build_workloads(bench, read_config(folder), folder)
    policy = load_model(folder, dtype=dtype, device=device)
    comparisons = compare_all(build_contenders(bench, policy, folder), workloads, bench.plan)
    ratios = [
        {name: comparison.ratio(OURS, to=name) for name in comparison.seconds if name != OURS}
        for comparison in comparisons
    ]
    return Document(
        title=f"Rollouts: {bench.model or bench.shape}, {bench.dtype}, {device.type}, {environment.threads}",
        environment=environment,
        notes=tuple(describe(bench, policy)),
        grids=(peer_grid(OURS, comparisons),),
        values={
            "baseline": OURS,
            "comparisons": [
                comparison_values(comparison, of) for comparison, of in zip(comparisons, ratios, strict=True)
            ],
        },
    )


def spreads(bench: RolloutBench) -> tuple[Lengths, ...]:
    """The spreads of lengths to measure."""
    return ("equal", "long-tailed") if bench.lengths == "both" else (bench.lengths,)


def build_workloads(bench: RolloutBench, config: ModelConfig, folder: Path) -> list[Workload]:
    """The rollouts to measure: each number of sequences, with each spread of lengths.

    Raises:
        ValueError: Prompts that cannot be read or are too few, or a sequence longer than the model was made for.
    """
    num_prompts = -(-max(bench.num_sequences) // bench.num_samples)
    if bench.prompts is not None:
        prompts = encode_prompts(bench.prompts, num_prompts, folder)
    else:
        least, most = bench.prompt_tokens
        prompts = random_prompts(
            num_prompts, shortest=least, longest=most, vocab_size=config.vocab_size, seed=bench.seed
        )
    workloads = []
    for lengths in spreads(bench):
        for count in bench.num_sequences:
            new_tokens = draw_lengths(
                lengths, count, equal=bench.equal_tokens, longest=bench.longest_tokens, seed=bench.seed
            )
            workloads.append(
                make_workload(lengths, new_tokens, prompts, num_samples=bench.num_samples, seed=bench.seed)
            )
    longest = max(workload.max_sequence_tokens for workload in workloads)
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"--equal-tokens, --longest-tokens: the longest prompt and response together are {longest} tokens, but the "
            f"model was made for {config.max_position_embeddings}; lower them, or --prompt-tokens"
        )
    return workloads


def encode_prompts(path: Path, num_prompts: int, folder: Path) -> list[tuple[int, ...]]:
    """Token ids of the first prompts of a file, the texts among them by the tokenizer of the model in `folder`.

    Raises:
        ValueError: A row that cannot be used, too few rows, or a text and no tokenizer.
    """
    sources = read_prompts(path)[:num_prompts]
    if len(sources) < num_prompts:
        raise ValueError(f"--prompts: {path} has {len(sources)} rows, but {num_prompts} different prompts are needed")
    tokenizer = load_tokenizer(folder) if any(source.text for source in sources) else None
    prompts = []
    for source in sources:
        token_ids = tuple(tokenizer.encode(source.text)) if tokenizer and source.text else source.token_ids
        if not token_ids:
            raise ValueError(f"{source.where}: {source.error or 'the prompt is empty; at least one token is needed'}")
        prompts.append(token_ids)
    return prompts


def build_contenders(bench: RolloutBench, policy: Transformer, folder: Path) -> list[Contender]:
    """Our decoder as a training run has it, then the peers."""
    options = EngineOptions(slots=bench.slots[0], kv_memory_gib=bench.kv_memory_gib, deterministic=True)
    peers: dict[Peer, Callable[[], Contender]] = {
        Peer.HF: lambda: HuggingFaceGenerate(folder, dtype=policy.dtype, device=policy.device),
        Peer.NOT_DETERMINISTIC: lambda: OurDecoder(
            f"{OURS}, not deterministic", policy, replace(options, deterministic=False)
        ),
    }
    return [OurDecoder(OURS, policy, options), *(peers[peer]() for peer in bench.peers)]


def describe(bench: RolloutBench, policy: Transformer) -> list[str]:
    """What was measured, in sentences."""
    config = policy.config
    millions = sum(parameter.numel() for parameter in policy.parameters()) / 1e6
    weights = bench.model or f"random weights of the shape `{bench.shape}`"
    least, most = bench.prompt_tokens
    prompts = f"from {bench.prompts}" if bench.prompts else f"random ids, {least} to {most} tokens"
    more = (
        ""
        if bench.precision is None
        else ", a pilot by whose spread there were as many more as bring the interval to "
        f"{bench.precision:.1%} (Stein's two-stage rule)"
    )
    notes = [
        f"Model: {weights}, {millions:,.1f} million parameters ({config.num_hidden_layers} layers of width "
        f"{config.hidden_size}, vocabulary {config.vocab_size:,}), {bench.dtype}, on {policy.device.type}.",
        f"Prompts: {prompts}; {bench.num_samples} sequence{'s' if bench.num_samples > 1 else ''} of each. "
        "Temperature 1, end tokens ignored: every sequence ends at a length drawn beforehand.",
        "A run is a whole rollout, from the prompts to the tokens of all sequences on the host. Contenders take turns, "
        f"the order changing each time: one run each to warm up, then {bench.repeats} each{more}. Seconds are medians. "
        "The ratio is the geometric mean over pairs of neighbouring runs, with a 95% interval. Only tokens within a "
        "sequence's own length count.",
    ]
    if "equal" in spreads(bench):
        notes.append(f"Equal: {bench.equal_tokens} tokens each.")
    if "long-tailed" in spreads(bench):
        median = round(bench.longest_tokens * TAIL_MEDIAN_SHARE)
        notes.append(
            f"Long-tailed: log-normal lengths with median {median}, sigma {TAIL_SIGMA}, cut at {bench.longest_tokens}."
        )
    slots = f"{bench.slots[0]} slots" if bench.slots[0] else "a slot for every sequence"
    notes.append(f"`{OURS}`: deterministic mode, {slots}; computes the log-prob of every token, too.")
    if Peer.HF in bench.peers:
        notes.append(
            f"`{HuggingFaceGenerate.name}`: `generate` on one batch padded on the left, SDPA attention, dynamic cache, "
            "inference mode; no log-probs. The batch goes on until its longest sequence has ended."
        )
    return notes
