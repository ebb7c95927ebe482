"""Packing against a loop over tokens, for random sequences and budgets."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srtrl.rollout.packing import PER_TOKEN, PackedBatch, pack
from srtrl.types import TrainSequence


def make_sequence(num_prompt: int, num_response: int, seed: int, with_optional: bool = True) -> TrainSequence:
    rng = np.random.default_rng(seed)
    names = PER_TOKEN if with_optional else ("rollout_logprobs", "advantages", "old_logprobs")
    per_token: dict[str, Any] = {name: rng.standard_normal(num_response).astype(np.float32) for name in names}
    return TrainSequence(
        token_ids=rng.integers(1000, size=num_prompt + num_response),
        targets=np.arange(num_prompt, num_prompt + num_response),
        draw_index=seed,
        **per_token,
    )


@st.composite
def sequences_and_budget(draw: st.DrawFn) -> tuple[list[TrainSequence], int]:
    shapes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=12))
    with_optional = draw(st.booleans())
    sequences = [make_sequence(*shape, seed, with_optional) for seed, shape in enumerate(shapes)]
    return sequences, draw(st.integers(max(sum(shape) for shape in shapes), 60))


def naive_rows(sequences: list[TrainSequence], batch: PackedBatch, first: int) -> list[list[float]]:
    """What the rows [R] of a micro-batch must be, token by token; `first` is its first sequence."""
    rows: list[list[float]] = []
    position = 0
    for index in range(first, first + len(batch.lengths)):
        sequence = sequences[index]
        for offset, token_id in enumerate(sequence.token_ids):
            assert batch.token_ids[position] == token_id
            response_token = offset - sequence.num_prompt_tokens
            if response_token >= 0:
                arrays = [getattr(sequence, name) for name in PER_TOKEN]
                numbers = [float(array[response_token]) for array in arrays if array is not None]
                rows.append([position - 1, int(token_id), index, *numbers])
            position += 1
    assert position == len(batch.token_ids)
    return rows


@settings(deadline=None)  # the machine may be busy
@given(sequences_and_budget())
def test_every_token_is_packed_once_in_order_with_the_right_indices(case: tuple[list[TrainSequence], int]) -> None:
    sequences, max_tokens = case
    first = 0
    batches = list(pack(sequences, max_tokens, "cpu"))
    for batch in batches:
        columns = [batch.hidden_index, batch.target_ids, batch.sequence_index]
        columns += [column for name in PER_TOKEN if (column := getattr(batch, name)) is not None]
        rows = [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        assert rows == naive_rows(sequences, batch, first)
        for name in PER_TOKEN:
            assert (getattr(batch, name) is None) == (getattr(sequences[0], name) is None)
        first += len(batch.lengths)
    assert first == len(sequences)
    assert max(sum(batch.lengths) for batch in batches) <= max_tokens
    for batch, following in pairwise(batches):
        assert sum(batch.lengths) + following.lengths[0] > max_tokens, "it could take the next sequence"


def test_a_micro_batch_is_made_when_it_is_asked_for() -> None:
    """The device holds one at a time; what is wrong with a later sequence is said before the first is made."""
    sequences = [make_sequence(1, 2, seed) for seed in range(5)]
    batches = pack(sequences, 6, "cpu")
    assert isinstance(batches, Iterator)
    assert [batch.lengths for batch in batches] == [(3, 3), (3, 3), (3,)]
    assert list(pack([], 8, "cpu")) == []
    message = r"sequence 5 has 7 tokens, more than the 6 .*micro_batch_tokens to at least 7"
    with pytest.raises(ValueError, match=message):
        pack([*sequences, make_sequence(3, 4, 5)], 6, "cpu")
