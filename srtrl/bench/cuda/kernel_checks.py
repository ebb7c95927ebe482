"""Kernels of the decoder against their references: tree attention, sampling, and the whole forward pass."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from srtrl.bench.cuda.plan import GpuBench
from srtrl.bench.cuda.report import SectionReport
from srtrl.bench.shapes import SHAPES
from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.engine.rows import build_rows
from srtrl.engine.sampling import row_logprobs_reference, sample_rows_reference
from srtrl.engine.sequence import PromptPages, Sequence
from srtrl.model.device_plan import (
    FIXED_SPLIT_KEYS,
    AttentionLaunch,
    AttentionScratch,
    DevicePlan,
    choose_block_m,
    choose_split_keys,
)
from srtrl.model.device_rows import RowSizes, count_words, fill_rows, make_tiles, view_rows
from srtrl.model.hf_config import config_from_hf
from srtrl.model.paged_attention import Int32Array, KVCache, PagedPlan, PagedRows, ReferenceRows
from srtrl.model.transformer import ModelConfig, Transformer
from srtrl.types import Request, SamplingParams

PAGE_SIZE = 16
MAX_NODES = 40
NUM_PADDING = 3
"""Rows, tiles and page tables of padding behind the real ones."""


def distance(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; NaN where anything is NaN."""
    wide, reference = found.detach().cpu().double(), expected.detach().cpu().double()
    return float((wide - reference).norm() / reference.norm())


@dataclass(kw_only=True, slots=True, frozen=True)
class StepRows:
    """The rows of one decode step: random trees below sequences of given lengths."""

    token_ids: Int32Array
    rows: PagedRows
    num_pages: int

    @staticmethod
    def draw(contexts: tuple[int, ...], sizes: tuple[int, ...], vocab_size: int) -> "StepRows":
        """For each sequence its tokens, root included, and how many nodes its tree has."""
        random = np.random.default_rng(5)
        pages_each = [-(-(context + size) // PAGE_SIZE) for context, size in zip(contexts, sizes, strict=True)]
        pages = random.permutation(sum(pages_each)).tolist()
        sequences = []
        for context, count in zip(contexts, pages_each, strict=True):
            sequence = _sequence(random.integers(vocab_size, size=context).tolist())
            sequence.set_pages(pages[:count])
            del pages[:count]
            sequences.append(sequence)
        trees = DraftTrees.of(_random_tree(random, size, vocab_size) for size in sizes)
        token_ids, rows = build_rows(sequences, trees, [], PAGE_SIZE)
        return StepRows(token_ids=token_ids, rows=rows, num_pages=sum(pages_each))

    def cache(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, token_major: bool) -> KVCache:
        """Random keys and values, the same for every device and layout."""
        cache = KVCache(
            num_layers=config.num_hidden_layers,
            num_pages=self.num_pages,
            page_size=PAGE_SIZE,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
            token_major=token_major,
        )
        generator = torch.Generator().manual_seed(6)
        for pages in (cache.key_pages, cache.value_pages):
            drawn = torch.randn(pages.shape, generator=generator).to(torch.bfloat16)
            pages.copy_(drawn)
        return cache

    def plan(
        self, cache: KVCache, config: ModelConfig, launch: AttentionLaunch, *, rows_at_once: int | None
    ) -> DevicePlan:
        """The device's plan of the step, padding behind every array, its output poisoned."""
        rows = self.rows
        multiple = rows_at_once or 1
        num_rows = -(-(len(rows.positions) + NUM_PADDING) // multiple) * multiple
        per_tile = launch.rows_per_tile(config.num_attention_heads // config.num_key_value_heads)
        tiles = make_tiles(rows.row_tables, rows.context_lengths, per_tile)
        deterministic = launch.deterministic
        sizes = RowSizes(
            num_rows=num_rows,
            num_tables=len(rows.page_tables) + NUM_PADDING,
            table_width=rows.page_tables.shape[1] + NUM_PADDING,
            depth=rows.path_slots.shape[1] if deterministic else 0,
            num_words=0 if deterministic else count_words(MAX_NODES),
            num_tiles=len(tiles.tile_rows) + NUM_PADDING,
        )
        buffer = torch.zeros(sizes.num_elements, dtype=torch.int32)
        split_keys = choose_split_keys(longest=int(tiles.tile_keys.max()), launch=launch)
        fill_rows(view_rows(buffer, sizes), rows, rows_per_tile=per_tile, split_keys=split_keys)
        device = cache.key_pages.device
        lanes = AttentionScratch.lanes_for(
            num_tiles=sizes.num_tiles, num_kv_heads=config.num_key_value_heads, launch=launch
        )
        scratch = AttentionScratch(
            num_rows=num_rows,
            num_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            num_lanes=lanes,
            dtype=cache.key_pages.dtype,
            device=device,
        )
        scratch.out[: len(rows.positions)] = float("nan")  # what is not written shows
        return DevicePlan(
            cache,
            view_rows(buffer.to(device), sizes),
            num_positions=int(rows.positions.max()) + 1,
            launch=launch,
            scratch=scratch,
            rows_at_once=rows_at_once,
        )


def check_attention(bench: GpuBench, report: SectionReport) -> None:
    """Tree attention, with one split and several, free and deterministic, in bfloat16 and float32."""
    config = replace(bench.policy.config, num_hidden_layers=1)
    contexts, sizes = ((3, 70), (9, 4)) if bench.smoke else ((1, 700, 64, 2100, 333), (40, 0, 17, 9, 33))
    step = StepRows.draw(contexts, sizes, config.vocab_size)
    num_rows = len(step.rows.positions)
    generator = torch.Generator().manual_seed(7)
    shapes = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
    given = [torch.randn(num_rows, count, config.head_dim, generator=generator).to(torch.bfloat16) for count in shapes]
    oracle_cache = step.cache(config, torch.float64, torch.device("cpu"), token_major=False)
    expected = ReferenceRows(oracle_cache, step.rows).attend(0, *(tensor.double() for tensor in given))
    group = config.num_attention_heads // config.num_key_value_heads
    splits = -(-(max(contexts) + MAX_NODES) // FIXED_SPLIT_KEYS)
    launches = {
        "free, 1 split": (False, 1),
        "free, 4 splits": (False, 4),
        "deterministic": (True, splits),
    }
    for dtype, bound in ((torch.bfloat16, 1e-2), (torch.float32, 1e-5)):
        for name, (deterministic, num_splits) in launches.items():
            block_m = choose_block_m(
                rows_per_sequence=8, group=group, head_dim=config.head_dim, deterministic=deterministic
            )
            launch = AttentionLaunch(block_m=block_m, num_splits=num_splits, deterministic=deterministic)
            cache = step.cache(config, dtype, bench.device, token_major=True)
            plan = step.plan(cache, config, launch, rows_at_once=None)
            padding = len(plan.rows.positions) - num_rows
            q, k, v = (_padded(tensor, padding).to(bench.device, dtype) for tensor in given)
            found = plan.attend(0, q, k, v)[:num_rows]
            what = f"tree attention, {_short(dtype)}, {name}"
            report.check(what, distance(found, expected), bound, f"{num_rows} rows")


def check_sampling(bench: GpuBench, report: SectionReport) -> None:
    """Tokens that must be those of the reference, and their log-probs; some temperatures 0, some tokens forced."""
    from srtrl.engine.triton_sampling import SamplingScratch, sample_rows_triton

    num_rows, vocab_size = 6 if bench.smoke else 48, bench.policy.config.vocab_size
    random = np.random.default_rng(8)
    generator = torch.Generator().manual_seed(8)
    logits = (4 * torch.randn(num_rows, vocab_size, generator=generator)).to(torch.bfloat16)
    temperatures = torch.tensor(random.choice([0.0, 0.6, 1.0, 1.3], num_rows), dtype=torch.float32)
    rng_keys = torch.from_numpy(random.integers(-(2**63), 2**63 - 1, num_rows))
    positions = torch.from_numpy(random.integers(0, 5000, num_rows))
    forced = torch.full((num_rows,), -1, dtype=torch.int32)
    forced[::5] = 7
    sampled = sample_rows_reference(logits, temperatures, rng_keys, positions)
    expected = torch.where(forced >= 0, forced.long(), sampled)
    expected_logprobs = row_logprobs_reference(logits.double(), temperatures, expected)
    device = bench.device
    tokens = torch.full((num_rows,), -7, dtype=torch.int32, device=device)
    logprobs = torch.full((num_rows,), float("nan"), device=device)
    scratch = SamplingScratch.allocate(num_rows, vocab_size, device)
    given, taken = (logits.to(device), temperatures.to(device)), forced.to(device)
    sample_rows_triton(*given, rng_keys.to(device), positions.to(device), taken, tokens, logprobs, scratch)
    num_wrong = int((tokens.cpu() != expected).sum())
    report.check("sampling, tokens", num_wrong, 0, f"of {num_rows} rows of {vocab_size} logits")
    report.check("sampling, log-probs", float((logprobs.cpu() - expected_logprobs).abs().max()), 1e-4)


def check_forward(bench: GpuBench, report: SectionReport) -> None:
    """`fused_forward` over draft trees against `Transformer.forward`: two families, two types, two modes."""
    bounds = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
    cases = list(product(bounds, (False, True)))
    contexts, sizes = ((3, 20), (3, 5)) if bench.smoke else ((5, 300, 64), (13, 33, 0))
    for shape in (bench.sizes.shape, "qwen3-4b"):
        config = _few_layers(shape, bench)
        oracle = _random_model(config)
        step = StepRows.draw(contexts, sizes, config.vocab_size)
        cache = step.cache(config, torch.float64, torch.device("cpu"), token_major=False)
        with torch.inference_mode():
            expected = oracle(torch.from_numpy(step.token_ids).long(), PagedPlan(cache, step.rows))
        for dtype, deterministic in cases[:: len(cases) - 1] if bench.smoke else cases:
            model = Transformer(config, dtype, bench.device).requires_grad_(False)
            model.load_state_dict(oracle.state_dict())
            found = _fused(model, step, bench, deterministic=deterministic)
            mode = "deterministic" if deterministic else "free"
            what = f"forward pass, {config.model_type}, {_short(dtype)}, {mode}"
            report.check(what, distance(found, expected), bounds[dtype])


def _fused(model: Transformer, step: StepRows, bench: GpuBench, *, deterministic: bool) -> Tensor:
    """Hidden states of the step's real rows, by the device's forward pass."""
    from srtrl.engine.buckets import ROWS_AT_ONCE
    from srtrl.model.fused_forward import fused_forward, rotary_table

    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    block_m = choose_block_m(rows_per_sequence=8, group=group, head_dim=config.head_dim, deterministic=deterministic)
    launch = AttentionLaunch(block_m=block_m, num_splits=1, deterministic=deterministic)
    cache = step.cache(config, model.dtype, bench.device, token_major=True)
    rows_at_once = 8 if bench.smoke else ROWS_AT_ONCE
    plan = step.plan(cache, config, launch, rows_at_once=rows_at_once if deterministic else None)
    num_rows = len(step.token_ids)
    token_ids = _padded(torch.from_numpy(step.token_ids), len(plan.rows.positions) - num_rows)
    with torch.inference_mode():
        table = rotary_table(model, plan.num_positions)
        return fused_forward(model, token_ids.to(bench.device), plan, rotary=table)[:num_rows]


def _few_layers(shape: str, bench: GpuBench) -> ModelConfig:
    """Two layers of a shape, with a small vocabulary; in a smoke test one, and narrow."""
    narrow = {"hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
    fields = SHAPES[shape] | {"hidden_act": "silu", "num_hidden_layers": 2, "vocab_size": 1024}
    if bench.smoke:
        fields |= narrow | {"head_dim": 16, "vocab_size": 64, "num_hidden_layers": 1}
    return config_from_hf(fields, shape)


def _random_model(config: ModelConfig) -> Transformer:
    """A float64 model on the CPU whose weights are numbers of bfloat16: in every type they are the same."""
    generator = torch.Generator().manual_seed(9)
    model = Transformer(config, torch.float64, "cpu").requires_grad_(False)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        weights = 1 + 0.2 * drawn if name.endswith("norm") else drawn / parameter.shape[-1] ** 0.5
        parameter.copy_(weights.to(torch.bfloat16))
    return model


def _sequence(token_ids: list[int]) -> Sequence:
    request = Request(
        prompt_id="",
        prompt_token_ids=tuple(token_ids),
        draw_index=0,
        sample_index=0,
        rng_key=0,
        sampling=SamplingParams(max_new_tokens=1),
    )
    return Sequence(token_ids=token_ids, sequence_id=0, request=request, prompt=PromptPages([]))


def _random_tree(random: np.random.Generator, num_nodes: int, vocab_size: int) -> DraftTree:
    parents = [int(random.integers(ROOT, node)) if node else ROOT for node in range(num_nodes)]
    return DraftTree(
        token_ids=np.arange(num_nodes, dtype=np.int32) % vocab_size,
        parents=np.array(parents, np.int32),
        scores=np.ones(num_nodes, np.float32),
    )


def _padded(rows: Tensor, count: int) -> Tensor:
    return torch.cat((rows, rows.new_zeros((count, *rows.shape[1:]))))


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
