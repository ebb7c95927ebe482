"""Simulates one training step on several GPUs, without and with drafts; prints the table of ranks.md.

    python docs/simulate_ranks.py RECIPE RECORDING [--gpu h200] [--gpus 8,64,512] [OVERRIDE ...]

Nothing is measured. The samples of a step have the lengths of the recording, whose prompts come again in turn, and the
mean length of each prompt is known, as after an earlier visit. Samples are dealt to the GPUs and claimed by the rules
of srtrl/features/sharing.py. A GPU gives all of its sequences tokens at one rate, by the curves of
srtrl/run/estimate.py, until one of them ends. Messages of rollouts, rewards and the reading of prompts take no time.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from heapq import heapify, heappop, heappush
from itertools import chain
from pathlib import Path
from statistics import fmean

from srtrl import ranks
from srtrl.bench.recorded import RecordedPrompt, read_recorded
from srtrl.engine.kv_memory import GIB
from srtrl.features.sharing import SeveralRanks, deal
from srtrl.planner import find_config, plan_memory, step_time
from srtrl.recipe.file import load_recipe
from srtrl.recipe.schema import Recipe
from srtrl.run.estimate import StepTime, find_gpu
from srtrl.types import Request


class SimulatedRank(SeveralRanks):
    """A rank whose counters are those of one process."""

    def __init__(self, counters: Counter[str], index: int, lines: Sequence[Sequence[Request]]) -> None:
        self._counters, self._process = counters, partial(ranks.use, index, len(lines))
        super().__init__()
        self.wait_in(lines)

    def add(self, name: str, amount: int = 1) -> int:
        """See `OneRank`."""
        name = name.rpartition("/")[2]
        self._counters[name] += amount
        return self._counters[name] - amount

    def claim(self, count: int) -> Sequence[Request]:
        """See `OneRank`."""
        with self._process():
            return super().claim(count)


def decode(lines: Sequence[Sequence[Request]], slots: int, token_seconds: Callable[[int], float]) -> list[float]:
    """Seconds until each rank has no sample left.

    Args:
        lines: The samples that are dealt to each rank; `max_new_tokens` is a sample's length.
        slots: Sequences that a rank decodes at a time.
        token_seconds: Number of sequences -> seconds in which each gets a token.
    """
    counters: Counter[str] = Counter()
    waiting = [line[slots:] for line in lines]
    of_rank = [SimulatedRank(counters, index, waiting) for index in range(len(lines))]
    ends = [[request.sampling.max_new_tokens for request in line[:slots]] for line in lines]
    """Of each rank: the number of tokens, of those that it gives each sequence, after which a sequence ends."""
    for one in ends:
        heapify(one)
    coming = [(one[0] * token_seconds(len(one)), rank) for rank, one in enumerate(ends) if one]
    heapify(coming)
    busy = [0.0] * len(lines)
    while coming:
        now, rank = heappop(coming)
        busy[rank], mine, num_free = now, ends[rank], 0
        given = mine[0]
        while mine and mine[0] == given:
            heappop(mine)
            num_free += 1
        for request in of_rank[rank].claim(num_free):
            heappush(mine, given + request.sampling.max_new_tokens)
        if mine:
            heappush(coming, (now + (mine[0] - given) * token_seconds(len(mine)), rank))
    return busy


def requests_of(prompts: Sequence[RecordedPrompt], recipe: Recipe) -> tuple[list[Request], dict[int, float | None]]:
    """The samples of a step with their lengths, and what is expected of each draw."""
    requests, expected = [], dict[int, float | None]()
    for draw in range(recipe.rollout.num_prompts):
        prompt = prompts[draw % len(prompts)]
        lengths = [len(sample.tokens) for sample in prompt.samples]
        expected[draw] = fmean(lengths)
        samples = range(recipe.rollout.num_samples)
        requests += [prompt.request(draw, index, lengths[index % len(lengths)]) for index in samples]
    return requests, expected


def row_of(recipe: Recipe, prompts: Sequence[RecordedPrompt], gpu: str, num_gpus: int) -> str:
    """A row of the table."""
    device, gib, _ = find_gpu(gpu)
    config, _ = find_config(recipe.model.path)
    times = step_time(recipe, config, plan_memory(recipe, config, int(gib * GIB), num_gpus), device)
    requests, expected = requests_of(prompts, recipe)
    times = with_lengths(times, prompts, requests)
    lines, rollouts, shares = deal(requests, expected, num_gpus), [], []
    for drafts in (False, True):
        busy = decode(lines, times.slots, cache(partial(times.token_seconds, drafts=drafts)))
        rollouts.append(max(busy))
        shares.append(f"{1 - fmean(busy) / max(busy):.0%}")
    update, (plain, drafted) = times.update_seconds(), rollouts
    cells = [num_gpus, f"{len(requests) / num_gpus:,.4g}", f"{plain:.2f}", f"{drafted:.2f}", f"{plain / drafted:.2f}"]
    cells += [" / ".join(shares), f"{update:.2f}", f"{(plain + update) / (drafted + update):.2f}"]
    return f"| {' | '.join(map(str, cells))} |"


def with_lengths(times: StepTime, prompts: Sequence[RecordedPrompt], requests: Sequence[Request]) -> StepTime:
    """The same GPUs, with sequences as long as those of the recording are on average."""
    lengths = {
        "max_prompt_tokens": round(fmean(len(prompt.prompt_token_ids) for prompt in prompts)),
        "max_new_tokens": round(fmean(request.sampling.max_new_tokens for request in requests)),
    }
    rollout = times.recipe.rollout.model_copy(update=lengths)
    return replace(times, recipe=times.recipe.model_copy(update={"rollout": rollout}))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--gpu", default="h200", help="a name, as `srtrl show-config --gpu` has it")
    parser.add_argument("--gpus", default="8,16,32,64,128,256,512", help="a row for each number")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, options.overrides)
    prompts = [*chain.from_iterable(read_recorded(options.recording, tokenizer=None, max_tokens=2**20))]
    names = ["GPUs", "samples per GPU", "rollout, s", "with drafts, s", "times as fast", "GPUs idle, without / with"]
    names += ["update, s", "step: times as fast"]
    print(f"| {' | '.join(names)} |\n| {'--: | ' * len(names)}".rstrip())
    for count in map(int, options.gpus.split(",")):
        print(row_of(recipe, prompts, options.gpu, count), flush=True)


if __name__ == "__main__":
    main()
