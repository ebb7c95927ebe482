"""Verification: the kernels against the definition, bit by bit, and ends inside an accepted path."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from srtrl.drafters.draft_tree import EMPTY_TREE, ROOT, DraftTree, DraftTrees
from srtrl.engine import sampler
from srtrl.engine.row_sampling import ForcedTokens, RowSampling
from srtrl.engine.sampling import sample_rows, sample_rows_by_torch
from srtrl.engine.sequence import PromptPages
from srtrl.engine.sequence import Sequence as Sample
from srtrl.engine.verify import Verification, Walk, verify_trees, walk_all_rows, walk_by_depth, walk_on_cpu
from srtrl.types import Request, SamplingParams

Walker = Callable[[Verification, RowSampling], list[Walk]]
WALKERS = (walk_by_depth, walk_on_cpu, walk_all_rows)


class Letters:
    """A tokenizer whose token 0 is "A"."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)


def sample_of(index: int, num_generated: int = 0, **sampling: Any) -> Sample:
    """A sample whose last token is the root of its next tree."""
    request = Request(
        prompt_id=f"prompt {index}",
        prompt_token_ids=(1, 2),
        draw_index=index,
        sample_index=0,
        rng_key=(index + 1) * 0x9E3779B97F4A7C15 % 2**64,
        sampling=SamplingParams(**({"max_new_tokens": 100} | sampling)),
    )
    return Sample(
        token_ids=[1, 2] + [1] * num_generated,
        sequence_id=index,
        request=request,
        prompt=PromptPages([1, 2]),
        rollout_logprobs=[-0.5] * num_generated,
    )


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


def tree_of(tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
    tree = DraftTree(
        token_ids=np.array(tokens, np.int32),
        parents=np.array(parents, np.int32),
        scores=np.ones(len(tokens), np.float32),
    )
    tree.check(1000)
    return tree


def chain(tokens: Sequence[int]) -> DraftTree:
    return tree_of(tokens, range(ROOT, len(tokens) - 1))


def results(walks: Sequence[Walk]) -> list[tuple[list[int], list[float], list[int], str | None]]:
    """All that a step does to its samples."""
    return [(w.sequence.token_ids, w.sequence.rollout_logprobs, w.accepted, w.finish) for w in walks]


def random_step(seed: int, num_samples: int, vocab_size: int, max_nodes: int, dtype: torch.dtype) -> Verification:
    """Samples of all kinds but filtered ones; called twice with one seed it gives equal steps."""
    random = np.random.default_rng(seed)
    samples = []
    for i in range(num_samples):
        num_generated = int(random.integers(0, 6))
        samples.append(
            sample_of(
                i,
                num_generated,
                max_new_tokens=num_generated + int(random.integers(1, 8)),
                temperature=float(random.choice([0.0, 0.4, 1.0, 1.7])),
                end_token_ids=((), (0,), (vocab_size - 1, 0))[random.integers(3)],
                stop_strings=((), (), ("AA", "no such text", "BA"))[random.integers(3)],
            )
        )
    trees = DraftTrees.of(
        random_tree(random, int(random.integers(0, max_nodes + 1)), vocab_size) for _ in range(num_samples)
    )
    logits = torch.from_numpy(random.normal(size=(num_samples + trees.num_nodes, vocab_size)) * 2).to(dtype)
    return Verification(sequences=samples, trees=trees, logits=logits, tokenizer=Letters())


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    num_samples=st.integers(1, 9),
    vocab_size=st.sampled_from([1, 2, 3, 17]),
    max_nodes=st.sampled_from([0, 1, 12, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_kernels_walk_as_the_definition(
    seed: int, num_samples: int, vocab_size: int, max_nodes: int, dtype: torch.dtype
) -> None:
    found = []
    for walker in WALKERS:
        step = random_step(seed, num_samples, vocab_size, max_nodes, dtype)
        found.append(results(walker(step, RowSampling.of(step.sequences))))
    assert found[1] == found[0]
    assert found[2] == found[0]
    step = random_step(seed, num_samples, vocab_size, max_nodes, dtype)
    assert results(verify_trees(step.sequences, step.trees, step.logits, step.tokenizer)) == found[0]


def test_the_random_steps_hold_long_walks_and_every_kind_of_end() -> None:
    lengths, ends = [], []
    for seed in range(100):
        step = random_step(seed, 9, 2, 40, torch.float32)
        for walk in walk_on_cpu(step, RowSampling.of(step.sequences)):
            lengths.append(len(walk.accepted))
            ends.append((walk.finish, walk.sequence.token_ids[-1] in walk.sequence.request.sampling.end_token_ids))
    assert max(lengths) > 4
    assert {(None, False), ("stop", False), ("stop", True), ("length", False)} <= set(ends)


def sampled_path(tokens: Sequence[int], vocab_size: int = 8) -> Tensor:
    """Logits [len(tokens) + 1, V] of a chain of `tokens` that is what will be sampled, and of a bonus token 7."""
    logits = torch.zeros(len(tokens) + 1, vocab_size)
    logits[torch.arange(len(tokens) + 1), torch.tensor([*tokens, 7])] = 60.0
    return logits


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize(
    ("sampling", "num_tokens", "finish"),
    [
        ({}, 6, None),
        ({"end_token_ids": (5, 2)}, 3, "stop"),
        ({"end_token_ids": (7,)}, 6, "stop"),
        ({"stop_strings": ("no", "CD")}, 4, "stop"),
        ({"stop_strings": ("B",)}, 2, "stop"),
        ({"stop_strings": ("CD",), "end_token_ids": (1,)}, 2, "stop"),
        ({"max_new_tokens": 1}, 1, "length"),
        ({"max_new_tokens": 4}, 4, "length"),
        ({"max_new_tokens": 4, "end_token_ids": (3,)}, 4, "stop"),
        ({"max_new_tokens": 6}, 6, "length"),
    ],
)
def test_ends_inside_an_accepted_path(
    walker: Walker, sampling: dict[str, Any], num_tokens: int, finish: str | None
) -> None:
    path = [4, 1, 2, 3, 6]
    step = Verification(
        sequences=[sample_of(0, **sampling)],
        trees=DraftTrees.of([chain(path)]),
        logits=sampled_path(path),
        tokenizer=Letters(),
    )
    (walk,) = walker(step, RowSampling.of(step.sequences))
    assert walk.sequence.generated_token_ids == [*path, 7][:num_tokens]
    assert len(walk.sequence.rollout_logprobs) == num_tokens
    assert walk.accepted == list(range(num_tokens - 1))
    assert walk.finish == finish


@pytest.mark.parametrize("walker", WALKERS)
def test_the_accepted_branch_need_not_be_the_first(walker: Walker) -> None:
    tree = tree_of([5, 3, 4, 6, 2], [ROOT, 0, ROOT, 2, 3])  # 4, 6, 2 is the branch of nodes 2, 3, 4
    logits = torch.zeros(6 + 1, 8)
    logits[[0, 3, 4, 5, 6], [4, 6, 2, 1, 3]] = 60.0
    step = Verification(
        sequences=[sample_of(0), sample_of(1)], trees=DraftTrees.of([tree, EMPTY_TREE]), logits=logits, tokenizer=None
    )
    first, second = walker(step, RowSampling.of(step.sequences))
    assert first.sequence.generated_token_ids == [4, 6, 2, 1]
    assert first.accepted == [2, 3, 4]
    assert second.sequence.generated_token_ids == [3]
    assert second.accepted == []


def filtered_step(filtered: bool) -> Verification:
    step = random_step(3, 8, 5, 20, torch.bfloat16)
    samples = list(step.sequences)
    if filtered:
        samples[2] = sample_of(2, top_k=1)
        samples[5] = sample_of(5, top_p=0.5, temperature=0.7)
    return Verification(sequences=samples, trees=step.trees, logits=step.logits, tokenizer=Letters())


def test_a_filtered_request_changes_nothing_for_the_others() -> None:
    plain = filtered_step(False)
    expected = results(verify_trees(plain.sequences, plain.trees, plain.logits, plain.tokenizer))
    mixed = filtered_step(True)
    found = results(verify_trees(mixed.sequences, mixed.trees, mixed.logits, mixed.tokenizer))
    others = [0, 1, 3, 4, 6, 7]
    assert [found[i] for i in others] == [expected[i] for i in others]
    again = filtered_step(True)
    assert results(walk_all_rows(again, RowSampling.of(again.sequences))) == found
    root = mixed.logits[mixed.trees.offsets[2] + 2].float()
    assert found[2][0][2] == int(root.argmax())
    assert found[2][1][0] == pytest.approx(float(root.log_softmax(0).max()), abs=1e-5)  # without the filter


@pytest.mark.parametrize("walker", WALKERS)
def test_forced_tokens_are_taken_with_their_own_log_probs_and_the_rest_is_sampled(walker: Walker) -> None:
    def step_of(forced: ForcedTokens | None) -> Verification:
        logits = torch.from_numpy(np.random.default_rng(0).normal(size=(3 + 9, 8))).to(torch.bfloat16)
        return Verification(
            sequences=[sample_of(0, 2), sample_of(1), sample_of(2, temperature=0.5)],
            trees=DraftTrees.of([chain([3, 4, 6, 2]), tree_of([1, 4, 5], [ROOT, ROOT, 1]), chain([6, 6])]),
            logits=logits,
            tokenizer=None,
            forced=forced,
        )

    free = step_of(None)
    expected = results(walker(free, RowSampling.of(free.sequences)))
    rng_keys = [sample.request.rng_key for sample in free.sequences]
    forced = ForcedTokens(
        by_rng_key={
            rng_keys[0]: np.array([1, 1, 3, 4, 5, 2], np.int32),  # follows two nodes, then leaves the tree
            rng_keys[1]: np.array([4], np.int32),  # ends on a node: what comes next is sampled
        }
    )
    step = step_of(forced)
    found = walker(step, RowSampling.of(step.sequences))
    assert found[0].sequence.generated_token_ids[2:] == [3, 4, 5]
    assert found[0].accepted == [0, 1]
    logprobs = step.logits.float().log_softmax(-1)
    taken = logprobs[torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])].tolist()
    assert found[0].sequence.rollout_logprobs[2:] == pytest.approx(taken, abs=1e-6)
    assert found[1].sequence.generated_token_ids[0] == 4
    assert found[1].accepted[0] == 1
    assert results(found)[2] == expected[2]
    row, position = 5 + 2, np.array([1])
    token, logprob = sample_rows(
        step.logits[row, None], np.ones(1, np.float32), np.array(rng_keys[1:2], np.uint64), position
    )
    assert found[1].sequence.generated_token_ids[1] == token[0]
    assert found[1].sequence.rollout_logprobs[1] == logprob[0]


@pytest.mark.parametrize("walker", WALKERS)
def test_logits_that_are_not_finite_are_reported_where_a_walk_visits_them(walker: Walker) -> None:
    path = [4, 0, 2]  # of a row of NaN token 0 is taken: the walk could go on
    for broken, visited in ((1, True), (4, False)):
        logits = torch.cat([sampled_path(path), torch.zeros(1, 8)])
        logits[broken] = torch.nan
        step = Verification(
            sequences=[sample_of(7)],
            trees=DraftTrees.of([tree_of([*path, 3], [ROOT, 0, 1, ROOT])]),
            logits=logits,
            tokenizer=None,
        )
        if visited:
            with pytest.raises(FloatingPointError, match=r"not finite \(prompt 'prompt 7', sample 0\)"):
                walker(step, RowSampling.of(step.sequences))
        else:
            assert walker(step, RowSampling.of(step.sequences))[0].accepted == [0, 1, 2]


def test_a_step_without_samples() -> None:
    assert verify_trees([], DraftTrees.empty(0), torch.empty(0, 8), None) == []


def test_rows_sampled_by_torch_in_parts_are_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.normal(size=(23, 50)).astype(np.float32)) * 3
    temperatures = random.choice([0.0, 0.5, 1.0], 23).astype(np.float32)
    rng_keys = random.integers(0, 2**64, 23, dtype=np.uint64)
    positions = random.integers(0, 1000, 23)
    forced = np.where(random.random(23) < 0.3, random.integers(0, 50, 23), -1).astype(np.int32)
    expected = sample_rows(logits, temperatures, rng_keys, positions, forced)
    arrays = (temperatures, rng_keys.view(np.int64), positions, forced)
    monkeypatch.setattr(sampler, "MAX_NOISE", 5 * 50)  # five rows at once
    token_ids, logprobs = sample_rows_by_torch(logits, *(torch.from_numpy(array) for array in arrays))
    assert token_ids.tolist() == expected[0].tolist()
    assert np.allclose(logprobs, expected[1], atol=1e-6)
    assert (token_ids[forced >= 0] == forced[forced >= 0]).all()
