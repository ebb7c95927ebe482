"""Verification against a walk in plain Python, node by node; and what the engine counts of it."""

from dataclasses import dataclass

import numpy as np
import pytest
from engine_cases import Letters, make_request
from hypothesis import given
from hypothesis import strategies as st
from runner_cases import kv_index, random_trees

from srtrl.drafters.draft_tree import ROOT, DraftTrees
from srtrl.engine.batch import Batch, PromptPages, Sample, ScheduledStep
from srtrl.engine.page_pool import PagePool
from srtrl.engine.runner import SampledRows
from srtrl.engine.stats import MAX_DEPTH, EngineStats, StageClock
from srtrl.engine.stopping import StopFinder
from srtrl.engine.verify import MAX_LENGTH, RUNNING, STOPPED, Verified, plan_moves, verify

PAGE_SIZE = 4


@dataclass
class Step:
    """Arguments of `verify`; slots in any order."""

    batch: Batch
    slots: np.ndarray
    trees: DraftTrees
    sampled: SampledRows

    def verify(self) -> Verified:
        finder = StopFinder(Letters(), 200)
        for sample in self.batch.samples:
            if sample is not None:
                finder.add(sample.request.sampling.stop_strings)
        return verify(self.batch, self.slots, self.trees, self.sampled, finder)


def random_step(seed: int, num_samples: int, vocab_size: int, max_nodes: int, *, share_broken: float = 0.0) -> Step:
    """Samples of all kinds; called twice with one seed it gives equal steps."""
    random = np.random.default_rng(seed)
    batch = Batch(num_samples + 2, 60, PagePool(1, PAGE_SIZE), 40)
    num_pages = batch.page_table.shape[1]
    for index in range(num_samples):
        num_generated = int(random.integers(0, 6))
        asked = make_request(
            index,
            max_new_tokens=num_generated + int(random.integers(1, 8)),
            end_token_ids=((), (0,), (vocab_size - 1, 0))[random.integers(3)],
            stop_strings=((), (), ("AA", "no such text", "BA"))[random.integers(3)],
        )
        sample = Sample(
            asked,
            PromptPages(np.array(asked.prompt_token_ids, np.int32)),
            token_ids=np.full(num_generated, 25, np.int32),  # part of no stop string
            logprobs=np.full(num_generated, -0.5, np.float32),
        )
        batch.put(sample)
        pages = random.permutation(num_pages) + index * num_pages
        batch.set_pages(sample.slot, pages.astype(np.int32))
    slots = random.permutation(num_samples)
    trees = random_trees(random, random.integers(0, max_nodes + 1, num_samples), vocab_size)
    num_rows = num_samples + trees.num_nodes
    logprobs = -random.random(num_rows).astype(np.float32)
    logprobs[random.random(num_rows) < share_broken] = random.choice([np.nan, np.inf, -np.inf])
    token_ids = random.integers(0, vocab_size, num_rows).astype(np.int32)
    parent_rows = np.repeat(trees.offsets[:-1] + np.arange(num_samples) + 1, trees.sizes) + trees.parents
    is_right = random.random(trees.num_nodes) < 0.5
    token_ids[parent_rows[is_right]] = trees.token_ids[is_right]
    sampled = SampledRows(token_ids=token_ids, logprobs=logprobs)
    return Step(batch, slots, trees, sampled)


def walk(step: Step, b: int) -> tuple[list[int], list[float], list[int], int] | None:
    """The definition: new tokens, their log-probs, accepted nodes and finish; None if logits are not finite."""
    batch, slot, tree = step.batch, int(step.slots[b]), step.trees[b]
    sample = batch.samples[slot]
    assert sample is not None
    sampling = sample.request.sampling
    said = batch.generated(slot).tolist()
    tokens: list[int] = []
    logprobs: list[float] = []
    accepted: list[int] = []
    while True:
        row = int(step.trees.offsets[b]) + b + 1 + (accepted[-1] if accepted else ROOT)
        token, logprob = int(step.sampled.token_ids[row]), float(step.sampled.logprobs[row])
        if not np.isfinite(logprob):
            return None
        tokens.append(token)
        logprobs.append(logprob)
        text = Letters().decode([*said, *tokens])
        if token in sampling.end_token_ids or any(stop in text for stop in sampling.stop_strings):
            return tokens, logprobs, accepted, STOPPED
        if len(said) + len(tokens) == sampling.max_new_tokens:
            return tokens, logprobs, accepted, MAX_LENGTH
        node = accepted[-1] if accepted else ROOT
        pairs = list(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True))
        if (node, token) not in pairs:
            return tokens, logprobs, accepted, RUNNING
        accepted.append(pairs.index((node, token)))


def check_as_defined(step: Step) -> list[tuple[int, int]]:
    """Verify the step and compare all that it writes; returns (accepted nodes, finish) of each sample."""
    expected = [walk(step, b) for b in range(len(step.slots))]
    batch, before = step.batch, step.batch.num_tokens[step.slots]
    said = [batch.generated(slot).tolist() for slot in step.slots]
    if None in expected:
        with pytest.raises(FloatingPointError, match=r"logits are not finite \(prompt '\d', sample 0\)"):
            step.verify()
        return []
    verified = step.verify()
    planned = plan_moves(batch, verified, PAGE_SIZE)
    moves: list[list[int]] = []
    for b, (slot, found) in enumerate(zip(step.slots.tolist(), expected, strict=True)):
        assert found is not None
        tokens, logprobs, accepted, finish = found
        part = slice(int(verified.offsets[b]), int(verified.offsets[b + 1]))
        assert verified.token_ids[part].tolist() == tokens
        assert verified.nodes[part].tolist() == [*accepted, ROOT]
        assert verified.finish[b] == finish
        assert batch.generated(slot).tolist() == said[b] + tokens
        assert batch.logprobs[slot, len(said[b]) : len(batch.generated(slot))].tolist() == logprobs
        assert batch.num_tokens[slot] == before[b] + len(tokens)
        assert batch.num_computed[slot] == batch.num_tokens[slot] - 1
        pages, root = batch.pages(slot), int(before[b]) - 1
        pairs = [(root + 1 + node, root + depth) for depth, node in enumerate(accepted, 1) if node + 1 != depth]
        for number, pair in enumerate(pairs):
            source, target = (kv_index(pages, position, PAGE_SIZE) for position in pair)
            moves.append([source, target, 0 if number else len(pairs)])
    assert verified.num_new.tolist() == [len(found[0]) for found in expected if found is not None]
    assert planned.tolist() == moves
    return [(len(found[2]), found[3]) for found in expected if found is not None]


@given(
    st.builds(
        random_step,
        seed=st.integers(0, 10**6),
        num_samples=st.integers(0, 9),
        vocab_size=st.sampled_from([1, 2, 3, 17]),
        max_nodes=st.sampled_from([0, 1, 12, 40]),
        share_broken=st.sampled_from([0.0, 0.0, 0.03]),
    )
)
def test_the_kernels_do_as_the_definition(step: Step) -> None:
    check_as_defined(step)


def test_long_paths_and_every_kind_of_end_are_as_defined() -> None:
    found = [pair for seed in range(100) for pair in check_as_defined(random_step(seed, 9, 2, 40))]
    assert max(num_accepted for num_accepted, _ in found) > 4
    assert {finish for _, finish in found} == {RUNNING, STOPPED, MAX_LENGTH}


@pytest.mark.parametrize("max_nodes", [0, 1, 30])
def test_statistics_count_the_primaries_paths_as_one_by_one(max_nodes: int) -> None:
    stats = EngineStats()
    paths: list[int] = []
    sizes: list[int] = []
    for seed in range(20):
        step, num_primaries = random_step(seed, 6, 3, max_nodes), seed % 7
        scheduled = ScheduledStep(slots=step.slots, num_primaries=num_primaries)
        stats.add_step(scheduled, step.trees, verified := step.verify(), StageClock())
        paths += (verified.num_new[:num_primaries] - 1).tolist()
        sizes += step.trees.sizes[:num_primaries].tolist()
    assert (stats.num_decodes, stats.num_tokens) == (len(paths), len(paths) + sum(paths))
    assert (stats.num_drafts, stats.num_draft_nodes) == (sum(size > 0 for size in sizes), sum(sizes))
    assert stats.accepted_by_depth.tolist() == [sum(path > depth for path in paths) for depth in range(MAX_DEPTH)]
    assert (sum(paths) > 0) == (max_nodes > 0)
