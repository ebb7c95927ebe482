"""The fused forward pass against `Transformer.forward`, both over one paged cache and one step with draft trees."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import KERNEL_DEVICE
from model_cases import CASES, ModelCase, load_ours, make_hf_model
from torch import Tensor
from torch.nn import functional

from srtrl.model.device_plan import AttentionLaunch, AttentionScratch, DevicePlan, choose_block_m, choose_split_keys
from srtrl.model.device_rows import RowSizes, fill_rows, view_rows
from srtrl.model.fused_forward import fused_forward, linear, rotary_table
from srtrl.model.paged_attention import KVCache, PagedRows
from srtrl.model.transformer import Transformer

PAGE_SIZE, NUM_PAGES, MAX_POSITIONS = 4, 16, 40

PARENTS = ((-1, 0, 0, -1), (), (-1,))
"""Draft trees of three decoding sequences; the fourth sequence is a prompt being prefilled."""
CONTEXTS = (9, 6, 3, 0)
"""Position of each root, and of the prompt's first token."""
PROMPT_ROWS = 5


def paged_rows() -> PagedRows:
    """A step: root and nodes of each sequence, then the prompt's rows; pages of each sequence apart."""
    page_tables = np.random.default_rng(0).permutation(NUM_PAGES).astype(np.int32).reshape(4, 4)
    rows: dict[str, list[Any]] = {f.name: [] for f in fields(PagedRows) if f.name != "page_tables"}

    def slot(sequence: int, position: int) -> int:
        return int(page_tables[sequence, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE

    def add(sequence: int, position: int, write: int, context: int, path: list[int]) -> None:
        rows["positions"].append(position)
        rows["write_slots"].append(slot(sequence, write))
        rows["row_tables"].append(sequence)
        rows["context_lengths"].append(context)
        rows["path_slots"].append([*path, *[0] * (3 - len(path))])
        rows["path_lengths"].append(len(path))

    for sequence, parents in enumerate(PARENTS):
        root = CONTEXTS[sequence]
        add(sequence, root, root, root + 1, [])
        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), slot(sequence, root + 1 + node)])
            add(sequence, root + len(paths[-1]), root + 1 + node, root + 1, paths[-1])
    for position in range(PROMPT_ROWS):
        add(3, position, position, position + 1, [])
    positions = np.array(rows.pop("positions"), np.int64)
    arrays = {name: np.array(values, np.int32) for name, values in rows.items()}
    return PagedRows(page_tables=page_tables, positions=positions, **arrays)


def make_plan(model: Transformer, deterministic: bool, num_rows: int, rows_at_once: int | None = None) -> DevicePlan:
    """A plan of the step above with padding rows, over a cache of its own, that attends by the reference."""
    config = model.config
    cache = KVCache(
        num_layers=config.num_hidden_layers,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
        device=KERNEL_DEVICE,
        token_major=True,
    )
    generator = torch.Generator().manual_seed(1)
    for pages in (cache.key_pages, cache.value_pages):
        pages.copy_(torch.randn(pages.shape, generator=generator))
    group = config.num_attention_heads // config.num_key_value_heads
    block_m = choose_block_m(rows_per_sequence=2, group=group, head_dim=config.head_dim, deterministic=deterministic)
    launch = AttentionLaunch(block_m=block_m, num_splits=1, deterministic=deterministic)
    sizes = RowSizes(
        num_rows=num_rows,
        num_tables=5,
        table_width=4,
        depth=3 if deterministic else 0,
        num_words=0 if deterministic else 1,
        num_tiles=num_rows,
    )
    buffer = torch.zeros(sizes.num_elements, dtype=torch.int32)
    split_keys = choose_split_keys(longest=14, launch=launch)
    fill_rows(view_rows(buffer, sizes), paged_rows(), rows_per_tile=launch.rows_per_tile(group), split_keys=split_keys)
    scratch = AttentionScratch(
        num_rows=num_rows,
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        num_lanes=0,
        dtype=model.dtype,
        device=KERNEL_DEVICE,
    )
    return DevicePlan(
        cache,
        view_rows(buffer.to(KERNEL_DEVICE), sizes),
        num_positions=MAX_POSITIONS,
        launch=launch,
        scratch=scratch,
        rows_at_once=rows_at_once,
        use_kernels=False,
    )


def num_real_rows() -> int:
    return sum(1 + len(parents) for parents in PARENTS) + PROMPT_ROWS


def tokens_for(model: Transformer, num_rows: int) -> Tensor:
    tokens = torch.randint(model.config.vocab_size, (num_rows,), generator=torch.Generator().manual_seed(2))
    return tokens.to(KERNEL_DEVICE)


def run(model: Transformer, plan: DevicePlan) -> Tensor:
    tokens = tokens_for(model, len(plan.positions)).int()
    return fused_forward(model, tokens, plan, rotary=rotary_table(model, MAX_POSITIONS))[: num_real_rows()]


def load_case(case: ModelCase, dtype: torch.dtype, folder: Path, num_layers: int = 2) -> Transformer:
    shallow = case.fields | {"num_hidden_layers": num_layers}
    hf_model = make_hf_model(ModelCase(case.name, case.family, shallow), torch.float32)
    return load_ours(hf_model, folder, dtype).to(KERNEL_DEVICE)


# Llama with biases everywhere, Qwen2 (biases of the projection), Qwen3 (norms of queries and keys).
@pytest.mark.parametrize("case", [CASES[2], CASES[8], CASES[13]], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_hidden_states_are_those_of_the_eager_model(
    case: ModelCase, dtype: torch.dtype, deterministic: bool, tmp_path: Path
) -> None:
    model = load_case(case, dtype, tmp_path)
    num_rows = num_real_rows() + 3
    plan, eager_plan = (make_plan(model, deterministic, num_rows) for _ in range(2))
    hidden = run(model, plan)
    with torch.inference_mode():
        expected = model(tokens_for(model, num_rows), eager_plan)[: num_real_rows()]
    assert float(expected.float().std()) > 0.1
    # Sums of the norms differ in their order; in bfloat16 a sum that rounds the other way is carried through layers.
    tolerance = 2e-5 if dtype == torch.float32 else 0.12
    torch.testing.assert_close(hidden, expected, rtol=0, atol=tolerance)
    if dtype == torch.bfloat16:
        error = (hidden - expected).float()
        assert float(error.pow(2).mean().sqrt()) < 0.01
    for pages, eager_pages in (
        (plan.cache.key_pages, eager_plan.cache.key_pages),
        (plan.cache.value_pages, eager_plan.cache.value_pages),
    ):
        torch.testing.assert_close(pages, eager_pages, rtol=0, atol=tolerance)


def test_a_row_does_not_depend_on_how_many_there_are_where_products_have_one_shape(tmp_path: Path) -> None:
    model = load_case(CASES[13], torch.bfloat16, tmp_path, num_layers=1)
    few, many = (run(model, make_plan(model, True, num_rows, rows_at_once=16)) for num_rows in (16, 32))
    assert torch.equal(few, many)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_in_chunks_have_one_shape(has_bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator).to(KERNEL_DEVICE, dtype) for shape in ((24, 10), (7, 10), (7,))
    )
    expected = functional.linear(hidden, weight, bias if has_bias else None)
    shapes = []
    name = "addmm" if has_bias else "mm"
    product = getattr(torch, name)

    def record(*args: Tensor, out: Tensor) -> Tensor:
        shapes.append(args[-2].shape[0])
        result: Tensor = product(*args, out=out)
        return result

    monkeypatch.setattr(torch, name, record)
    chunked = linear(hidden, weight, bias if has_bias else None, 8)
    assert shapes == [8, 8, 8]
    torch.testing.assert_close(chunked, expected)
    with pytest.raises(AssertionError, match="multiple"):
        linear(hidden[:20], weight, None, 8)


def test_products_at_once_are_those_of_the_model() -> None:
    hidden, weight = torch.randn(5, 10), torch.randn(7, 10)
    assert torch.equal(linear(hidden, weight, None, None), functional.linear(hidden, weight))


def test_the_decoders_rotary_table_has_the_models_bits_and_stays(tmp_path: Path) -> None:
    model = load_case(CASES[1], torch.bfloat16, tmp_path)
    table = rotary_table(model, MAX_POSITIONS)
    kept = table.clone()
    cosines, sines = model.rotary.rows(torch.arange(MAX_POSITIONS, device=table.device), 300, torch.bfloat16)
    assert torch.equal(table, torch.cat((cosines, sines), dim=-1)[:, 0])
    model.rotary.rows(torch.arange(5, device=table.device), 1000, torch.float32)
    assert torch.equal(table, kept)
