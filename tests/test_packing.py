"""Packing against a loop over tokens, for random sequences and budgets."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srtrl.rollout.packing import PER_TOKEN, PackedBatch, pack, sharing_order
from srtrl.types import TrainSequence


def make_sequence(
    num_prompt: int, num_response: int, seed: int, names: Sequence[str] = PER_TOKEN, size: int = 1, vocab_size: int = 99
) -> TrainSequence:
    """The one of number `seed`, of draws of `size`; `names` are the numbers of tokens that it has."""
    rng = np.random.default_rng(seed)
    per_token: dict[str, Any] = {name: rng.standard_normal(num_response).astype(np.float32) for name in names}
    return TrainSequence(
        token_ids=rng.integers(vocab_size, size=num_prompt + num_response),
        targets=np.arange(num_prompt, num_prompt + num_response),
        draw_index=seed // size,
        **per_token,
    )


@st.composite
def sequences_and_budget(draw: st.DrawFn) -> tuple[list[TrainSequence], int]:
    shapes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=12))
    names = draw(st.sampled_from([PER_TOKEN, ("rollout_logprobs", "advantages", "old_logprobs")]))
    size, vocab_size = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 99]))
    sequences = [make_sequence(*shape, seed, names, size, vocab_size) for seed, shape in enumerate(shapes)]
    if draw(st.booleans()):
        sequences = [sequences[index] for index in sharing_order(sequences)]
    return sequences, draw(st.integers(max(sum(shape) for shape in shapes), 60))


def naive_rows(sequences: list[TrainSequence], batch: PackedBatch, first: int) -> list[list[float]]:
    """Expected rows [R] of a micro-batch, token by token; `first` is its first sequence."""
    rows: list[list[float]] = []
    path: list[int] = []
    tokens: list[int] = []  # and path: of the sequence before
    place, num_rows = 0, 0
    for index in range(first, first + len(batch.plan.lengths)):
        sequence, before = sequences[index], tokens
        tokens = [int(token_id) for token_id in sequence.token_ids]
        common = [*takewhile(lambda pair: pair[0] == pair[1], zip(before, tokens[:-1], strict=False))]
        path = [*path[: len(common)], *range(num_rows, num_rows + len(tokens) - len(common))]
        num_rows = path[-1] + 1
        assert batch.token_ids[path].tolist() == tokens
        assert batch.plan.positions[path].tolist() == list(range(len(tokens)))
        for number, target in enumerate(sequence.targets):
            arrays = [getattr(sequence, name) for name in PER_TOKEN]
            numbers = [float(array[number]) for array in arrays if array is not None]
            rows.append([path[target - 1], place + target - 1, tokens[target], index, *numbers])
        place += len(tokens)
    assert num_rows == len(batch.token_ids)
    return rows


@settings(deadline=None)  # the machine may be busy
@given(sequences_and_budget())
def test_every_token_is_packed_once_in_order_with_the_right_indices(case: tuple[list[TrainSequence], int]) -> None:
    sequences, max_tokens = case
    first = 0
    batches = list(pack(sequences, max_tokens, "cpu"))
    for batch in batches:
        columns = [batch.hidden_index, batch.places, batch.target_ids, batch.sequence_index]
        columns += [column for name in PER_TOKEN if (column := getattr(batch, name)) is not None]
        rows = [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        assert rows == naive_rows(sequences, batch, first)
        for name in PER_TOKEN:
            assert (getattr(batch, name) is None) == (getattr(sequences[0], name) is None)
        first += len(batch.plan.lengths)
    assert first == len(sequences)
    assert max(len(batch.token_ids) for batch in batches) <= max_tokens
    draws = [sequence.draw_index for sequence in sequences]
    for batch, following in pairwise(batches):
        first, end = following.first_sequence, following.first_sequence + 1
        if draws[first] != draws[first - 1]:  # a draw that fits a micro-batch is not divided
            end_of_draw = first + draws[first:].count(draws[first])
            end = end_of_draw if num_rows(sequences[first:end_of_draw]) <= max_tokens else end
        assert num_rows(sequences[batch.first_sequence : end]) > max_tokens, "it could take the next sequence or draw"


def num_rows(sequences: list[TrainSequence]) -> int:
    """Number of rows of these in one micro-batch."""
    [packed] = pack(sequences, 1000, "cpu")
    return len(packed.token_ids)


def test_a_micro_batch_is_made_when_it_is_asked_for() -> None:
    """The device holds one at a time; what is wrong with a later sequence is said before the first is made."""
    sequences = [make_sequence(1, 2, seed) for seed in range(5)]
    batches = pack(sequences, 6, "cpu")
    assert isinstance(batches, Iterator)
    assert [batch.plan.lengths for batch in batches] == [(3, 3), (3, 3), (3,)]
    assert list(pack([], 8, "cpu")) == []
    with pytest.raises(ValueError, match=r"sequence 5 has 7 tokens, more than the 6 .*_tokens to at least 7"):
        pack([*sequences, make_sequence(3, 4, 5)], 6, "cpu")
