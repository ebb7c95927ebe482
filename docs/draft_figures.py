"""Tokens per decode step of drafts at equal verified tokens: what the policy's distributions give them.

    python docs/draft_figures.py recipes/quickstart.yaml task.options.num_train=96 train.num_steps=12
    python docs/draft_figures.py --stories MODEL        # the folder of stories260K

A run is recorded with the most likely tokens that the sampler reports; of stories260K two steps of 12 prompts and 8
samples, of which the second counts. It is decoded again, step by step, as `srtrl replay` does, with several minimum
scores, once with these tokens and once without. The figures at 3.6, 9 and 17 verified tokens per step are interpolated
in the logarithm of the verified tokens.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import numpy as np
import torch

from srtrl.bench.recorded import RecordedPrompt, RecordedSample, Recording
from srtrl.bench.replay_loop import LiveSample, Replay
from srtrl.build import run_training
from srtrl.drafters.base import Int32Array, Int64Array
from srtrl.drafters.srt import Drafter, SrtOptions
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.engine.warm_up import compile_kernels
from srtrl.model.folders import load_tokenizer
from srtrl.model.noise import make_rng_key
from srtrl.model.weights import load_model
from srtrl.recipe.file import load_recipe
from srtrl.types import Completion, Request, SamplingParams, TopTokens

SCORES = (0.45, 0.13, 0.05, 0.02, 0.006, 0.002)
TARGETS = (3.6, 9.0, 17.0)
MAX_NODES = 48
SENTENCES = (
    "Once upon a time, there was a little girl named Lily.",
    "Once upon a time, there was a boy named Tim.",
    "One day, a big dog went to the park.",
    "Tom and Mia were playing in the garden.",
    "Once there was a small bird who lived in a tree.",
    "Sara liked to draw pictures with her mom.",
    "Ben had a red ball that he loved very much.",
    "It was a sunny day and the children went outside.",
    "There was an old man who had a shiny car.",
    "A cat saw a mouse in the kitchen.",
    "Anna and her dad went to the beach.",
    "The little bear was very hungry.",
)
Places = dict[int, dict[int, TopTokens]]
"""RNG key -> position -> what was likely there, one row."""


class Recorder(Drafter):
    """The drafter, which keeps what it is told of the samples of training."""

    places: ClassVar[Places] = defaultdict(dict)
    steps: ClassVar[list[list[Completion]]] = [[]]

    def observe_top(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array, top: TopTokens) -> None:
        """See `DrafterBase`."""
        for b, slot in enumerate(slots.tolist()):
            of_sample, first = self.places[int(self._noise.rng_keys[slot])], int(self._noise.positions[slot])
            for number, i in enumerate(range(offsets[b], offsets[b + 1])):
                rows = slice(i, i + 1)
                of_sample[first + number] = TopTokens(token_ids=top.token_ids[rows], logprobs=top.logprobs[rows])
        super().observe_top(slots, token_ids, offsets, top)

    def learn(self, completions: Sequence[Completion]) -> None:
        """See `DrafterBase`."""
        super().learn(completions)
        self.steps[-1] += [one for one in completions if one.request.purpose == "train"]

    def end_step(self) -> None:
        """See `DrafterBase`."""
        super().end_step()
        self.steps.append([])


def recording() -> Recording:
    """Rollouts that `Recorder` has kept."""
    made = []
    for step in filter(None, Recorder.steps):
        prompts: dict[tuple[int, ...], RecordedPrompt] = {}
        for one in sorted(step, key=lambda one: (one.request.draw_index, one.request.sample_index)):
            ids, response = one.request.prompt_token_ids, one.response
            prompt = RecordedPrompt(prompt_id=one.request.prompt_id, prompt_token_ids=ids, samples=[])
            prompts.setdefault(ids, prompt).samples.append(
                RecordedSample(tokens=response.token_ids, extensions=response.extensions, rng_key=one.request.rng_key)
            )
        made.append(list(prompts.values()))
    return made


class ReplayWithTops(Replay):
    """Reports to the drafter what the sampler has reported."""

    def _observe(self, samples: Sequence[LiveSample], num_tokens: Sequence[int]) -> None:
        rows = [
            Recorder.places[one.sample.rng_key or 0].get(one.num_committed + i)
            for one, count in zip(samples, num_tokens, strict=True)
            for i in range(count)
        ]
        found = [row for row in rows if row is not None]
        if len(found) == len(rows):  # else they were put in between two turns
            top = TopTokens(
                token_ids=np.concatenate([row.token_ids for row in found]),
                logprobs=np.concatenate([row.logprobs for row in found]),
            )
            drafter, plain = self._drafter, self._drafter.observe

            def observe(slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
                drafter.observe = plain  # type: ignore[method-assign]
                drafter.observe_top(slots, token_ids, offsets, top)

            drafter.observe = observe  # type: ignore[method-assign]
            super()._observe(samples, num_tokens)
        else:
            super()._observe(samples, num_tokens)


def measure(steps: Recording, replay_class: type[Replay], first: int) -> list[float]:
    """Tokens per step at `TARGETS`, of the steps from `first` on."""
    points = [(0.0, 1.0)]
    for score in SCORES:
        replay = replay_class(Drafter(SrtOptions(min_score=score)), draft_budget=MAX_NODES)
        before = replay.run(steps[:first]) if first else replay.counts
        sums = np.array([before.num_sequence_steps, before.num_nodes, before.num_tokens])
        after = replay.run(steps[first:])
        num_steps, nodes, tokens = np.array([after.num_sequence_steps, after.num_nodes, after.num_tokens]) - sums
        points.append((float(np.log(1 + nodes / num_steps)), float(tokens / num_steps)))
    logs, tokens_per_step = zip(*sorted(points), strict=True)
    return [float(np.interp(np.log(target), logs, tokens_per_step, right=np.nan)) for target in TARGETS]


def record_stories(folder: str) -> None:
    """Two steps of the same prompts, without an update."""
    tokenizer, model = load_tokenizer(folder), load_model(folder, dtype=torch.float32, device="cpu")
    engine = Engine(model, EngineOptions(max_sequence_tokens=160), drafter=Recorder(), compile_kernels=compile_kernels)
    sampling = SamplingParams(max_new_tokens=112, end_token_ids=(tokenizer.eos_token_id,))
    for step in range(2):
        requests = [
            Request(
                prompt_id=str(draw),
                prompt_token_ids=tuple(tokenizer.encode(sentence)),
                draw_index=draw,
                sample_index=index,
                rng_key=make_rng_key(0, "train", draw, index),
                sampling=sampling,
                purpose="train",
            )
            for draw, sentence in enumerate(SENTENCES)
            for index in range(8 * step, 8 * step + 8)
        ]
        list(engine.generate(requests))
        engine.end_step(has_new_weights=False)


def main() -> None:
    """Print a row of figures for each rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stories", metavar="MODEL")
    parser.add_argument("--first", type=int, default=0, metavar="STEP", help="the first step that counts, from 0")
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    first = options.first
    if options.stories:
        record_stories(options.stories)
        first = 1
    else:
        with TemporaryDirectory() as folder:
            ours = [f"output_dir={folder}", "rollout.drafter=draft_figures:Recorder", "eval.before_and_after=false"]
            run_training(load_recipe(Path(options.recipe), [*ours, *options.overrides]))
    steps = recording()
    for name, replay_class in (("tokens alone", Replay), ("with distributions", ReplayWithTops)):
        print(name, *(f"{value:.3f}" for value in measure(steps, replay_class, first)))


if __name__ == "__main__":
    import draft_figures  # the module that the recipe names, not this one, which is `__main__`

    draft_figures.main()
