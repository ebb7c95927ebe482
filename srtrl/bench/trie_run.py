"""The token trie's benchmark, from its files to its document."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from srtrl.bench.environment import read_environment
from srtrl.bench.tables import Document, Grid
from srtrl.drafters.suffix_automaton import START_TOKEN, TokenTrie, TrieCursors
from srtrl.drafters.trie_draft import BLEND, draft_trees
from srtrl.model.cpu_threads import set_cpu_threads
from srtrl.rollout.recorded import RecordedPrompt, Tokens, load_recorded_tokenizer, read_recorded

MAX_TOKENS = 4000
LEAST_TOKENS = 10_000
"""A trie's tokens: prompts are put together until there are so many, for tries of that size are what is asked about."""
NUM_CONSTANT = 10_000
STEP_TOKENS = 4
NUM_SEQUENCES, NUM_NODES = 128, 8


def measure(files: Sequence[Path], *, tokenizer: str | None, repeats: int, num_threads: int) -> Document:
    """Run the benchmark.

    Raises:
        ValueError: A file that cannot be read.
    """
    set_cpu_threads(num_threads)
    loaded = load_recorded_tokenizer(tokenizer) if tokenizer is not None else None
    rows = []
    for file in files:
        prompts = read_recorded(file, tokenizer=loaded, max_tokens=MAX_TOKENS).prompts()
        texts = _together(prompts)
        rows.append(_insertion_row(f"{file.name}, whole rollouts", texts, repeats))
        rows.append(_draft_row(f"{file.name}, {NUM_SEQUENCES} drafts of up to {NUM_NODES} nodes", prompts, repeats))
    constant = np.zeros(NUM_CONSTANT, np.int32)
    rows.append(_insertion_row("a constant sequence, at once", [[constant]], repeats))
    for drafts in (False, True):
        name = f"the same, {STEP_TOKENS} tokens a call{', a draft after each' if drafts else ''}"
        seconds = _median(partial(_insert_in_steps, constant, drafts=drafts), repeats)
        rows.append((name, f"{NUM_CONSTANT:,}", f"{NUM_CONSTANT / seconds / 1e6:.2f}", "", ""))
    grid = Grid(
        columns=("what", "tokens a trie", "million tokens/s", "ms a batch", "bytes a token"),
        rows=tuple(rows),
    )
    return Document(
        title="The token trie",
        environment=read_environment(torch.device("cpu")),
        notes=(
            f"Medians of {repeats} runs. Insertion uses one core: prompts are put together until a trie has at "
            f"least {LEAST_TOKENS:,} tokens, and each trie is filled from empty. Bytes are those allocated. The last "
            "two rows call from Python for every four tokens.",
            f"A batch of drafts is one call for {NUM_SEQUENCES} samples of up to 32 prompts, each trie "
            "holding the first half of its prompt's samples, 32 tokens into one of the others; scores of at least "
            "0.01.",
        ),
        grids=(grid,),
        values={"rows": [list(row) for row in rows]},
    )


def _together(prompts: Sequence[RecordedPrompt]) -> list[list[Tokens]]:
    """The rollouts of as many prompts as make a large trie, for each trie."""
    tries: list[list[Tokens]] = [[]]
    for prompt in prompts:
        if sum(map(len, tries[-1])) >= LEAST_TOKENS:
            tries.append([])
        tries[-1] += prompt.samples
    return tries


def _insertion_row(name: str, texts: Sequence[Sequence[Tokens]], repeats: int) -> tuple[str, ...]:
    def insert() -> list[TokenTrie]:
        tries = [TokenTrie() for _ in texts]
        for trie, rollouts in zip(tries, texts, strict=True):
            for rollout in rollouts:
                trie.insert(rollout)
        return tries

    tries = insert()
    num_tokens = sum(trie.num_tokens for trie in tries)
    num_bytes = sum(trie.num_bytes for trie in tries)
    seconds = _median(insert, repeats)
    return (
        name,
        f"{num_tokens // len(tries):,}",
        f"{num_tokens / seconds / 1e6:.2f}",
        "",
        f"{num_bytes / num_tokens:.0f}",
    )


def _draft_row(name: str, prompts: Sequence[RecordedPrompt], repeats: int) -> tuple[str, ...]:
    """Time one batch, over and over: drafting changes nothing."""
    tries, starts = [], []
    for prompt in prompts[:32]:
        trie = TokenTrie()
        half = len(prompt.samples) // 2
        for sample in prompt.samples[:half]:
            trie.insert(sample)
        for index in range(NUM_SEQUENCES // min(32, len(prompts))):
            sample = prompt.samples[half + index % (len(prompt.samples) - half)]
            tries.append(trie)
            starts.append(np.insert(sample[:32], 0, START_TOKEN))
    slots = np.arange(len(tries))
    cursors = TrieCursors()
    cursors.start(slots, tries, inserts=True)
    cursors.extend(slots, np.concatenate(starts), np.cumsum([0, *map(len, starts)]))
    nodes = np.full(len(tries), NUM_NODES)
    seconds = _median(lambda: draft_trees(cursors.arrays, slots, nodes, BLEND, 0.01), 20 * repeats)
    mean_tokens = sum(trie.num_tokens for trie in tries) // len(tries)
    return name, f"{mean_tokens:,}", "", f"{1e3 * seconds:.2f}", ""


def _insert_in_steps(tokens: Tokens, *, drafts: bool) -> None:
    slots = np.zeros(1, np.int64)
    cursors = TrieCursors()
    cursors.start(slots, [TokenTrie()], inserts=True)
    for first in range(0, len(tokens), STEP_TOKENS):
        part = tokens[first : first + STEP_TOKENS]
        cursors.extend(slots, part, np.array([0, len(part)]))
        if drafts:
            draft_trees(cursors.arrays, slots, np.full(1, NUM_NODES), BLEND, 0.01)


def _median(work: Callable[[], object], repeats: int) -> float:
    """Seconds of a call, the first of which does not count."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times)
