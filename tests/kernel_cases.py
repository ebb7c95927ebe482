"""What the tests of Triton kernels share: the device they run on, and the cases that are compiled without one."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from srtrl.model.device_plan import AttentionLaunch

KERNEL_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a CUDA device kernels run under Triton's interpreter (see `conftest.py`): keep shapes tiny."""


@dataclass(frozen=True, kw_only=True)
class CompileCase:
    """One kernel with the types and constants that a real model gives it; see `test_triton_compile.py`."""

    name: str
    module: str
    """`srtrl.model.triton_attention`."""
    kernel: str
    """Name of the `@triton.jit` function in it."""
    signature: dict[str, str]
    """Type of each parameter that is no constant, as Triton writes it: `*bf16`, `*i32`, `i32`, `fp32`."""
    constants: Mapping[str, object]
    """Value of each `tl.constexpr` parameter."""
    num_warps: int = 4
    num_stages: int = 2
    options: Mapping[str, object] = field(default_factory=dict)
    """Further compile options, such as `enable_fp_fusion`."""
    fetches_ahead: bool = False
    """Whether its loop is meant to copy into shared memory ahead of use."""


COMPILE_CASES: list[CompileCase] = []

FUSED: dict[str, object] = {"enable_fp_fusion": True}


def _layer_cases() -> list[CompileCase]:
    """The kernels of `triton_layers` at the widths of Qwen2.5-1.5B and Qwen3-8B (norms of heads)."""
    module, cases = "srtrl.model.triton_layers", []
    unfused: dict[str, object] = {"enable_fp_fusion": False}
    for dtype in ("bf16", "fp32"):
        pointer = f"*{dtype}"
        cases += [
            CompileCase(
                name=f"add_rms_norm-{dtype}-{has_update}",
                module=module,
                kernel="add_rms_norm_rows",
                signature=dict.fromkeys(("hidden", "update", "weight", "normed"), pointer) | {"eps": "fp32"},
                constants={"WIDTH": 1536, "BLOCK": 2048, "HAS_UPDATE": has_update, "BY_BITS": False},
                options=unfused,
            )
            for has_update in (False, True)
        ]
        tensors = ("qkv", "rotary", "keys", "values", "q_weight", "k_weight")
        rows = dict.fromkeys(("positions", "write_slots"), "*i32")
        for qk_norm in (False, True):
            heads: dict[str, object] = {"NUM_HEADS": 32 if qk_norm else 12, "NUM_KV_HEADS": 8 if qk_norm else 2}
            cases.append(
                CompileCase(
                    name=f"rope_and_store-{dtype}-{qk_norm}",
                    module=module,
                    kernel="rope_and_store_heads",
                    signature=dict.fromkeys(tensors, pointer) | rows | {"eps": "fp32"},
                    constants=heads
                    | {"HEAD_DIM": 128, "HALF_BLOCK": 64, "HEADS_AT_ONCE": 16, "QK_NORM": qk_norm, "BY_BITS": False},
                    options=unfused,
                )
            )
        cases.append(
            CompileCase(
                name=f"silu_and_mul-{dtype}",
                module=module,
                kernel="silu_and_mul_rows",
                signature={"gate_up": pointer, "out": pointer},
                constants={"WIDTH": 8960, "BLOCK": 1024, "BY_BITS": False},
                options=unfused,
            )
        )
        cases.append(
            CompileCase(
                name=f"move_kv-{dtype}",
                module=module,
                kernel="move_walks",
                signature=dict.fromkeys(("keys", "values"), pointer)
                | dict.fromkeys(("starts", "sources", "targets"), "*i32")
                | {"layer_stride": "i64"},
                constants={"WIDTH": 256, "BLOCK": 256},
                num_warps=1,
                num_stages=1,
                options=FUSED,
            )
        )
    return cases


def _sampling_cases() -> list[CompileCase]:
    """The kernels of `triton_sampling` and `triton_filter` at a vocabulary of 151,936."""
    cases = []
    unfused: dict[str, object] = {"enable_fp_fusion": False}
    for dtype in ("bf16", "fp32"):
        rows = {"logits": f"*{dtype}", "temperatures": "*fp32", "rng_keys": "*i64", "positions": "*i64"}
        cut = {"cut_values": "*fp32", "cut_tokens": "*i32"}
        results = {"forced": "*i32", "out_tokens": "*i32", "out_logprobs": "*fp32"}
        scratch = dict.fromkeys(("best", "maxima", "sums"), "*fp32")
        sizes = dict.fromkeys(("vocab_size", "num_blocks", "row_stride"), "i32")
        for has_cuts in (False, True):
            constants: dict[str, object] = {"HAS_CUTS": has_cuts, "BLOCK": 1024}
            module = "srtrl.engine.triton_sampling"
            cases += [
                CompileCase(
                    name=f"rank_blocks-{dtype}-{has_cuts}",
                    module=module,
                    kernel="rank_blocks",
                    signature=rows | cut | scratch | sizes,
                    constants=constants | {"IN_INTERPRETER": False},
                    options=unfused,
                ),
                CompileCase(
                    name=f"finish_rows-{dtype}-{has_cuts}",
                    module=module,
                    kernel="finish_rows",
                    signature=rows | cut | results | scratch | sizes,
                    constants=constants | {"NUM_BLOCKS": 256},
                    options=unfused,
                ),
            ]
        filters = {"top_k": "*i32", "top_p": "*fp32"}
        cases.append(
            CompileCase(
                name=f"search_cuts-{dtype}",
                module="srtrl.engine.triton_filter",
                kernel="search_cuts",
                signature={"logits": f"*{dtype}", "temperatures": "*fp32"}
                | filters
                | cut
                | dict.fromkeys(("vocab_size", "row_stride"), "i32"),
                constants={"NUM_BITS": 16 if dtype == "bf16" else 32, "BLOCK": 8192},
                num_warps=32,
                options=unfused,
            )
        )
    return cases


def _attention_cases() -> list[CompileCase]:
    """The kernels of `triton_attention` at the heads of Qwen2.5-0.5B (64 wide), -1.5B (128) and odd ones."""
    module, cases = "srtrl.model.triton_attention", []
    tiles = dict.fromkeys(("tiles", "page_tables", "context_lengths"), "*i32")
    modes: dict[str, dict[str, str]] = {
        "attend_positions": {"ancestors": "*i32", "num_words": "i32"},
        "attend_branches": dict.fromkeys(("path_lengths", "path_slots"), "*i32") | {"depth": "i32"},
    }
    results = dict.fromkeys(("partial_ptr", "weight_ptr"), "*fp32") | {"split_keys": "*i32"}
    numbers = {"scale": "fp32"} | dict.fromkeys(("q_stride", "first_tile", "table_width", "num_splits"), "i32")
    for dtype, head_dim, group, block_m, is_split, kernels in (
        ("bf16", 128, 6, 16, True, list(modes)),
        ("bf16", 128, 6, 64, True, list(modes)),
        ("bf16", 64, 7, 64, False, list(modes)),
        ("bf16", 80, 1, 16, True, ["attend_positions"]),
        ("bf16", 256, 4, 32, True, list(modes)),
        ("fp32", 128, 2, 16, True, ["attend_branches"]),
    ):
        pointers = dict.fromkeys(("q_ptr", "keys_ptr", "values_ptr", "out_ptr"), f"*{dtype}")
        heads: dict[str, object] = {"GROUP": group, "KV_HEADS": 2, "E": head_dim, "BLOCK_M": block_m}
        heads["WIDTH"] = 128 if head_dim == 80 else head_dim
        launch = AttentionLaunch(block_m=block_m, num_splits=1 + is_split, deterministic=False)
        key_block = launch.keys_at_once(head_dim, torch.float32 if dtype == "fp32" else torch.bfloat16)
        blocks = {"PAGE_SIZE": 16, "KEY_BLOCK": key_block, "SPLIT": is_split, "WIDE_DOT": dtype == "fp32"}
        cases += [
            CompileCase(
                name=f"{kernel}-{dtype}-{head_dim}-{group}-{block_m}",
                module=module,
                kernel=kernel,
                signature=pointers | results | tiles | modes[kernel] | numbers,
                constants=heads | blocks,
                num_stages=3,
                options=FUSED,
                fetches_ahead=True,
            )
            for kernel in kernels
        ]
    cases.append(
        CompileCase(
            name="combine_splits",
            module=module,
            kernel="combine_splits",
            signature=results
            | {"tiles": "*i32", "out_ptr": "*bf16"}
            | dict.fromkeys(("first_tile", "num_splits"), "i32"),
            constants={"GROUP": 6, "KV_HEADS": 2, "E": 128, "WIDTH": 128, "BLOCK_M": 16, "SPLITS_AT_ONCE": 16},
            num_warps=2,
            options=FUSED,
        )
    )
    stored = dict.fromkeys(("k_ptr", "v_ptr", "keys_ptr", "values_ptr"), "*bf16") | {"write_slots": "*i32"}
    strides = dict.fromkeys(("k_stride", "v_stride"), "i32")
    constants: dict[str, object] = {"KV_HEADS": 2, "E": 128, "BLOCK": 256}
    cases.append(
        CompileCase(
            name="store_rows",
            module=module,
            kernel="store_rows",
            signature=stored | strides,
            constants=constants,
            options=FUSED,
        )
    )
    return cases


COMPILE_CASES += _layer_cases() + _sampling_cases() + _attention_cases()
