"""Verification against a walk in plain Python, node by node; and ends inside an accepted path."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srtrl.drafters.draft_tree import EMPTY_TREE, ROOT, DraftTree, DraftTrees
from srtrl.engine.batch import NO_TOKEN, Batch, PromptPages, Sample
from srtrl.engine.page_pool import PagePool
from srtrl.engine.runner import SampledRows
from srtrl.engine.verify import AT_LENGTH, GOES_ON, STOPPED, Verified, plan_moves, verify
from srtrl.types import Request, SamplingParams

PAGE_SIZE = 4
OLD_TOKEN = 25
"""What samples have said before: part of no stop string."""


class Letters:
    """A tokenizer whose token 0 is "A"."""

    def decode(self, token_ids: list[int], /) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)


def tree_of(tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
    return DraftTree(
        token_ids=np.array(tokens, np.int32),
        parents=np.array(parents, np.int32),
        scores=np.ones(len(tokens), np.float32),
    )


def chain(tokens: Sequence[int]) -> DraftTree:
    return tree_of(tokens, range(ROOT, len(tokens) - 1))


def random_tree(random: np.random.Generator, num_nodes: int, vocab_size: int) -> DraftTree:
    """A tree of at most `num_nodes` nodes: siblings that would carry the same token are left out."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(num_nodes):
        pair = int(random.integers(ROOT, len(tokens))), int(random.integers(vocab_size))
        if pair not in set(zip(parents, tokens, strict=True)):
            parents.append(pair[0])
            tokens.append(pair[1])
    return tree_of(tokens, parents)


@dataclass
class Step:
    """What `verify` gets; slots in any order."""

    batch: Batch
    slots: np.ndarray
    trees: DraftTrees
    sampled: SampledRows

    def verify(self) -> Verified:
        return verify(self.batch, self.slots, self.trees, self.sampled, Letters())


def put(batch: Batch, index: int, num_generated: int = 0, trace: Sequence[int] = (), **sampling: Any) -> int:
    """A sample whose last token is the root of its next tree, and its pages; returns its slot."""
    asked = Request(
        prompt_id=f"prompt {index}",
        prompt_token_ids=(1, 2),
        draw_index=index,
        sample_index=0,
        rng_key=index,
        sampling=SamplingParams(**({"max_new_tokens": 50} | sampling)),
    )
    sample = Sample(
        asked,
        PromptPages(np.array([1, 2], np.int32)),
        token_ids=np.full(num_generated, OLD_TOKEN, np.int32),
        logprobs=np.full(num_generated, -0.5, np.float32),
    )
    batch.put(sample)
    num_pages = batch.page_table.shape[1]
    pages = np.random.default_rng(index).permutation(num_pages) + index * num_pages
    batch.set_pages(sample.slot, pages.astype(np.int32))
    if trace:
        batch.set_trace(sample.slot, np.array(trace, np.int32))
    return sample.slot


def step_of(trees: Sequence[DraftTree], tokens: Sequence[int], logprobs: Any = None, **sampling: Any) -> Step:
    """One sample for each tree, all with the same `sampling`, and the sampled tokens of all rows."""
    batch = Batch(len(trees) + 2, 60, PagePool(1, PAGE_SIZE), 40)
    slots = np.array([put(batch, index, **sampling) for index in range(len(trees))], np.int64)
    if logprobs is None:
        logprobs = -np.arange(len(tokens))
    return Step(
        batch,
        slots,
        DraftTrees.of(trees),
        SampledRows(token_ids=np.array(tokens, np.int32), logprobs=np.array(logprobs, np.float32)),
    )


def random_step(seed: int, num_samples: int, vocab_size: int, max_nodes: int, *, share_broken: float = 0.0) -> Step:
    """Samples of all kinds, some with recorded tokens; called twice with one seed it gives equal steps."""
    random = np.random.default_rng(seed)
    batch = Batch(num_samples + 2, 60, PagePool(1, PAGE_SIZE), 40)
    slots = []
    for index in range(num_samples):
        num_generated = int(random.integers(0, 6))
        trace = random.integers(0, vocab_size, int(random.integers(num_generated, num_generated + 6))).tolist()
        slot = put(
            batch,
            index,
            num_generated,
            trace if random.random() < 0.3 else (),
            max_new_tokens=num_generated + int(random.integers(1, 8)),
            end_token_ids=((), (0,), (vocab_size - 1, 0))[random.integers(3)],
            stop_strings=((), (), ("AA", "no such text", "BA"))[random.integers(3)],
        )
        slots.append(slot)
    trees = DraftTrees.of(
        random_tree(random, int(random.integers(0, max_nodes + 1)), vocab_size) for _ in range(num_samples)
    )
    num_rows = num_samples + trees.num_nodes
    logprobs = -random.random(num_rows).astype(np.float32)
    logprobs[random.random(num_rows) < share_broken] = random.choice([np.nan, np.inf, -np.inf])
    sampled = SampledRows(token_ids=random.integers(0, vocab_size, num_rows).astype(np.int32), logprobs=logprobs)
    return Step(batch, random.permutation(np.array(slots, np.int64)), trees, sampled)


def walk(step: Step, b: int) -> tuple[list[int], list[float], list[int], int] | None:
    """The definition: new tokens, their log-probs, accepted nodes and finish; None where logits are not finite."""
    batch, slot, tree = step.batch, int(step.slots[b]), step.trees[b]
    sample = batch.samples[slot]
    assert sample is not None
    sampling = sample.request.sampling
    said = batch.generated(slot).tolist()
    trace = batch.trace_tokens[slot].tolist()
    tokens: list[int] = []
    logprobs: list[float] = []
    accepted: list[int] = []
    while True:
        row = int(step.trees.offsets[b]) + b + 1 + (accepted[-1] if accepted else ROOT)
        index = len(said) + len(tokens)
        token, logprob = int(step.sampled.token_ids[row]), float(step.sampled.logprobs[row])
        if index < len(trace) and trace[index] != NO_TOKEN:
            token = trace[index]
        if not np.isfinite(logprob):
            return None
        tokens.append(token)
        logprobs.append(logprob)
        text = Letters().decode([*said, *tokens])
        if token in sampling.end_token_ids or any(stop in text for stop in sampling.stop_strings):
            return tokens, logprobs, accepted, STOPPED
        if len(said) + len(tokens) == sampling.max_new_tokens:
            return tokens, logprobs, accepted, AT_LENGTH
        node = accepted[-1] if accepted else ROOT
        pairs = list(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True))
        if (node, token) not in pairs:
            return tokens, logprobs, accepted, GOES_ON
        accepted.append(pairs.index((node, token)))


def kv_index(batch: Batch, slot: int, position: int) -> int:
    return int(batch.page_table[slot, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE


def check_as_defined(step: Step) -> list[tuple[int, int]]:
    """Verify the step and compare all that it writes; returns (accepted nodes, finish) of each sample."""
    expected = [walk(step, b) for b in range(len(step.slots))]
    batch, before = step.batch, step.batch.num_tokens[step.slots]
    said = [batch.generated(slot).tolist() for slot in step.slots]
    if None in expected:
        with pytest.raises(FloatingPointError, match="logits are not finite"):
            step.verify()
        return []
    verified = step.verify()
    sources, targets = plan_moves(batch, verified, PAGE_SIZE)
    moves: list[list[tuple[int, int]]] = []
    for b, (slot, found) in enumerate(zip(step.slots.tolist(), expected, strict=True)):
        assert found is not None
        tokens, logprobs, accepted, finish = found
        part = slice(int(verified.offsets[b]), int(verified.offsets[b + 1]))
        assert verified.token_ids[part].tolist() == tokens
        assert verified.nodes[part].tolist() == [*accepted, ROOT]
        assert verified.last_nodes[b] == (accepted[-1] if accepted else ROOT)
        assert verified.finish[b] == finish
        assert batch.generated(slot).tolist() == said[b] + tokens
        assert batch.generated_logprobs(slot).tolist()[len(said[b]) :] == logprobs
        assert batch.num_tokens[slot] == before[b] + len(tokens)
        assert batch.num_computed[slot] == batch.num_tokens[slot] - 1
        root = int(before[b]) - 1
        pairs = [(root + 1 + node, root + depth) for depth, node in enumerate(accepted, 1)]
        moves.append([(kv_index(batch, slot, s), kv_index(batch, slot, t)) for s, t in pairs if s != t])
    assert verified.num_new.tolist() == [len(found[0]) for found in expected if found is not None]
    pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
    assert pairs == [move for group in moves for move in group]
    return [(len(found[2]), found[3]) for found in expected if found is not None]


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    num_samples=st.integers(0, 9),
    vocab_size=st.sampled_from([1, 2, 3, 17]),
    max_nodes=st.sampled_from([0, 1, 12, 40]),
    share_broken=st.sampled_from([0.0, 0.0, 0.03]),
)
def test_the_kernels_do_as_the_definition(
    seed: int, num_samples: int, vocab_size: int, max_nodes: int, share_broken: float
) -> None:
    check_as_defined(random_step(seed, num_samples, vocab_size, max_nodes, share_broken=share_broken))


def test_the_random_steps_hold_long_paths_and_every_kind_of_end() -> None:
    found = [pair for seed in range(100) for pair in check_as_defined(random_step(seed, 9, 2, 40))]
    assert max(num_accepted for num_accepted, _ in found) > 4
    assert {finish for _, finish in found} == {GOES_ON, STOPPED, AT_LENGTH}


PATH = [4, 1, 2, 3, 6]


@pytest.mark.parametrize(
    ("sampling", "num_tokens", "finish"),
    [
        ({}, 6, GOES_ON),
        ({"end_token_ids": (5, 2)}, 3, STOPPED),
        ({"end_token_ids": (7,)}, 6, STOPPED),
        ({"stop_strings": ("no", "CD")}, 4, STOPPED),
        ({"stop_strings": ("B",)}, 2, STOPPED),
        ({"stop_strings": ("CD",), "end_token_ids": (1,)}, 2, STOPPED),
        ({"max_new_tokens": 1}, 1, AT_LENGTH),
        ({"max_new_tokens": 4}, 4, AT_LENGTH),
        ({"max_new_tokens": 4, "end_token_ids": (3,)}, 4, STOPPED),
        ({"max_new_tokens": 6}, 6, AT_LENGTH),
    ],
)
def test_ends_inside_an_accepted_path(sampling: dict[str, Any], num_tokens: int, finish: int) -> None:
    step = step_of([chain(PATH)], [*PATH, 7], **sampling)
    verified = step.verify()
    slot = int(step.slots[0])
    assert verified.token_ids.tolist() == step.batch.generated(slot).tolist() == [*PATH, 7][:num_tokens]
    assert step.batch.generated_logprobs(slot).tolist() == [-index for index in range(num_tokens)]
    assert verified.nodes.tolist() == [*range(num_tokens - 1), ROOT]
    assert verified.last_nodes.tolist() == [num_tokens - 2]
    assert verified.finish.tolist() == [finish]


def test_the_accepted_branch_need_not_be_the_first() -> None:
    tree = tree_of([5, 3, 4, 6, 2], [ROOT, 0, ROOT, 2, 3])  # 4, 6, 2 is the branch of nodes 2, 3, 4
    verified = step_of([tree, EMPTY_TREE], [4, 0, 0, 6, 2, 1, 3]).verify()
    assert verified.offsets.tolist() == [0, 4, 5]
    assert verified.token_ids.tolist() == [4, 6, 2, 1, 3]
    assert verified.nodes.tolist() == [2, 3, 4, ROOT, ROOT]
    assert verified.last_nodes.tolist() == [4, ROOT]


def test_recorded_tokens_are_taken_with_their_own_log_probs_and_the_rest_is_sampled() -> None:
    trees = [chain([3, 4, 6, 2]), tree_of([1, 4, 5], [ROOT, ROOT, 1]), chain([6, 6])]
    tokens = [7, 7, 7, 7, 7, 2, 2, 3, 2, 6, 5, 0]
    batch = Batch(3, 60, PagePool(1, PAGE_SIZE), 40)
    # The first follows two nodes, then leaves the tree; the second ends on a node: what comes next is sampled.
    traces: list[Sequence[int]] = [[1, 1, 3, 4, 5, 2], [4], ()]
    slots = np.array([put(batch, i, 2 if i == 0 else 0, trace) for i, trace in enumerate(traces)], np.int64)
    sampled = SampledRows(token_ids=np.array(tokens, np.int32), logprobs=-np.arange(12).astype(np.float32))
    verified = Step(batch, slots, DraftTrees.of(trees), sampled).verify()
    parts = [verified.token_ids[a:b].tolist() for a, b in zip(verified.offsets[:-1], verified.offsets[1:], strict=True)]
    assert parts == [[3, 4, 5], [4, 3], [6, 5]]
    assert batch.generated_logprobs(int(slots[0])).tolist() == [-0.5, -0.5, 0, -1, -2]
    assert batch.generated_logprobs(int(slots[1])).tolist() == [-5, -7]
    assert verified.nodes.tolist() == [0, 1, ROOT, 1, ROOT, 0, ROOT]


@pytest.mark.parametrize(
    ("broken", "stop_strings", "is_reported"),
    [(0, (), True), (1, (), True), (3, (), True), (4, (), False), (1, ("E",), False), (1, ("EB",), True)],
)
def test_logits_that_are_not_finite_are_reported_where_a_path_visits_them(
    broken: int, stop_strings: tuple[str, ...], is_reported: bool
) -> None:
    tree = tree_of([4, 1, 2, 3], [ROOT, 0, 1, ROOT])
    logprobs = np.zeros(5)
    logprobs[broken] = np.nan
    step = step_of([tree], [4, 1, 2, 7, 7], logprobs, stop_strings=stop_strings)
    if is_reported:
        with pytest.raises(FloatingPointError, match=r"not finite \(prompt 'prompt 0', sample 0\)"):
            step.verify()
    else:
        assert step.verify().token_ids.tolist() == ([4] if stop_strings else [4, 1, 2, 7])
