"""The buffers of a step: what is written on the host is what the device reads, and padding is harmless."""

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from srtrl.engine.buckets import ROWS_AT_ONCE, BucketPlanner, longest_keys
from srtrl.engine.row_sampling import RowSampling
from srtrl.engine.rows import dummy_rows
from srtrl.engine.step_buffers import (
    NO_TOKEN,
    HostInputs,
    ResultBuffer,
    StagingBuffer,
    StepInputs,
    fill_inputs,
    num_elements,
    view_inputs,
)
from srtrl.model.device_plan import choose_split_keys

CPU = torch.device("cpu")


def planner(deterministic: bool) -> BucketPlanner:
    return BucketPlanner(
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        page_size=4,
        max_positions=80,
        max_draft_nodes=40,
        num_multiprocessors=4,
        deterministic=deterministic,
        rows_at_once=ROWS_AT_ONCE,
    )


def tensors_of(inputs: StepInputs) -> dict[str, torch.Tensor]:
    own = {field.name: getattr(inputs, field.name) for field in fields(inputs) if field.name != "rows"}
    return own | {field.name: getattr(inputs.rows, field.name) for field in fields(inputs.rows)}


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 10**6),
    num_sequences=st.integers(1, 9),
    more_rows=st.integers(0, 30),
    context=st.integers(1, 30),
    deterministic=st.booleans(),
    is_forced=st.booleans(),
)
def test_the_device_reads_what_was_filled_in_and_padding_does_nothing(
    seed: int, num_sequences: int, more_rows: int, context: int, deterministic: bool, is_forced: bool
) -> None:
    random = np.random.default_rng(seed)
    num_rows = num_sequences + more_rows
    rows = dummy_rows(num_rows, context, num_sequences, 200, 4)
    counts = np.bincount(rows.row_tables)
    shape = planner(deterministic).shape(
        counts, num_logits=num_rows, table_width=rows.page_tables.shape[1], depth=rows.path_slots.shape[1]
    )
    staging = StagingBuffer(num_elements(shape, num_sequences), CPU)
    staging.host.random_(generator=torch.Generator().manual_seed(seed))  # what an earlier step left there
    token_ids = random.integers(0, 1000, num_rows).astype(np.int32)
    sampling = RowSampling(
        temperatures=random.random(num_rows, np.float32),
        rng_keys=random.integers(0, 1 << 64, num_rows, np.uint64),
        positions=random.integers(0, 1000, num_rows),
        top_k=np.zeros(num_rows, np.int64),
        top_p=np.ones(num_rows),
    )
    forced = random.integers(-1, 1000, num_rows).astype(np.int32) if is_forced else None
    longest = longest_keys(counts, rows.context_lengths)
    fill_inputs(
        HostInputs.of(view_inputs(staging.host, shape, num_sequences)),
        token_ids,
        rows,
        sampling,
        forced,
        rows_per_tile=shape.launch.rows_per_tile(2),
        split_keys=choose_split_keys(longest=longest, launch=shape.launch),
    )
    staging.upload(len(staging))
    found = {
        name: tensor.numpy() for name, tensor in tensors_of(view_inputs(staging.device, shape, num_sequences)).items()
    }
    assert (found["token_ids"][:num_rows] == token_ids).all()
    assert (found["rng_keys"][:num_rows].view(np.uint64) == sampling.rng_keys).all()
    assert (found["places"][:num_rows] == sampling.positions).all()
    assert (found["temperatures"][:num_rows] == sampling.temperatures).all()
    assert (found["forced"][:num_rows] == (NO_TOKEN if forced is None else forced)).all()
    for name in ("positions", "write_slots", "context_lengths", "path_lengths"):
        assert (found[name][:num_rows] == getattr(rows, name)).all()
    width = rows.page_tables.shape[1]
    assert (found["page_tables"][:, :width] == rows.page_tables).all()
    assert found["tiles"][:, 1].sum() == num_rows
    assert found["tiles"][:, 3].max() == longest <= shape.launch.num_splits * found["split_keys"][0]
    # Padding: tokens of the vocabulary, nothing written, nothing seen, nothing attended, no noise.
    assert (found["token_ids"][num_rows:] == 0).all()
    assert (found["write_slots"][num_rows:] == -1).all()
    assert (found["forced"][num_rows:] == NO_TOKEN).all()
    for name in ("positions", "context_lengths", "path_lengths", "temperatures", "rng_keys", "places"):
        assert (found[name][num_rows:] == 0).all()
    num_tiles = int(np.count_nonzero(found["tiles"][:, 1]))
    assert (found["tiles"][num_tiles:] == 0).all()


def test_no_address_depends_on_how_many_sequences_there_are() -> None:
    shape = planner(deterministic=False).shape(np.array([3, 1]), num_logits=4, table_width=9, depth=2)
    buffer = torch.zeros(num_elements(shape, 8), dtype=torch.int32)
    few, many = (tensors_of(view_inputs(buffer, shape, count)) for count in (2, 8))
    for name, tensor in few.items():
        if tensor.numel() == 0:
            continue
        assert tensor.data_ptr() == many[name].data_ptr()
        assert tensor.stride() == many[name].stride()
        assert (tensor.data_ptr() - buffer.data_ptr()) % 128 == 0
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in many.values() if t.numel())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] <= buffer.data_ptr() + buffer.nbytes


def test_a_step_of_prompts_alone_has_no_rows_to_sample() -> None:
    shape = planner(deterministic=False).shape(np.array([5]), num_logits=0, table_width=3, depth=0)
    inputs = view_inputs(torch.zeros(num_elements(shape, 1), dtype=torch.int32), shape, 1)
    assert len(inputs.rng_keys) == len(inputs.forced) == 0
    assert len(inputs.token_ids) == 8


def test_results_that_nobody_wants_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class NeverArrives:
        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            raise AssertionError("waited")

    results = ResultBuffer(16, CPU)
    monkeypatch.setattr(results, "_arrived", NeverArrives())
    for num_logits in (0, 8):
        results.start_fetch(num_logits)
        tokens, logprobs = results.wait(num_logits, 0)
        assert len(tokens) == len(logprobs) == 0
    with pytest.raises(AssertionError, match="waited"):
        results.wait(8, 1)


def test_results_come_back_as_they_were_written() -> None:
    results = ResultBuffer(16, CPU)
    for num_logits, num_real in ((16, 16), (8, 5), (1, 1)):
        tokens, logprobs = results.views(num_logits)
        tokens.copy_(torch.arange(num_logits))
        logprobs.copy_(-torch.arange(num_logits) / 3)
        results.start_fetch(num_logits)
        found_tokens, found_logprobs = results.wait(num_logits, num_real)
        assert found_tokens.dtype == np.int64
        assert found_tokens.tolist() == list(range(num_real))
        assert found_logprobs.tolist() == logprobs[:num_real].tolist()
        tokens.zero_()
        assert found_tokens.tolist() == list(range(num_real)), "a copy: the next step writes there"


def test_shapes_differ_where_a_launch_does() -> None:
    shape = planner(deterministic=False).shape(np.array([1]), num_logits=1, table_width=3, depth=0)
    assert shape == replace(shape)
    assert len({shape, replace(shape), replace(shape, launch=replace(shape.launch, num_splits=7))}) == 2
