"""The checks of `srtrl bench gpu` hold where all is well, and see what is not; on the CPU, kernels interpreted."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from srtrl.bench.cuda import identity, update_checks
from srtrl.bench.cuda.drafter import ScriptedDrafter
from srtrl.bench.cuda.identity import check_identity
from srtrl.bench.cuda.kernel_checks import check_attention, check_forward, check_sampling, distance
from srtrl.bench.cuda.plan import SMOKE, GpuBench
from srtrl.bench.cuda.report import SectionReport
from srtrl.bench.cuda.update_checks import check_logprobs, check_packed_attention, check_training_step
from srtrl.drafters.draft_tree import ROOT
from srtrl.model import device_plan
from srtrl.model.device_rows import DeviceRows
from srtrl.trainer.update import update_policy
from srtrl.types import Request

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here: see test_gpu_bench")


@pytest.fixture
def tiny(tmp_path: Path) -> GpuBench:
    return GpuBench(device=torch.device("cpu"), sizes=SMOKE, smoke=True, trace=None, tokenizer=None, folder=tmp_path)


def verdicts(check: Callable[[GpuBench, SectionReport], None], bench: GpuBench) -> list[str]:
    found = SectionReport(name="x", title="X")
    check(bench, found)
    return [row.verdict for row in found.rows]


def test_the_distance_is_relative_and_of_nan_it_is_nan() -> None:
    assert distance(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert math.isnan(distance(torch.tensor([math.nan, 4.0]), torch.tensor([3.0, 4.0])))


@interpreted
def test_a_wrong_mask_is_seen(tiny: GpuBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference in place of the kernel, first as it is, then blind to the last node of each branch."""
    right = device_plan.attend_tree_reference

    def attend(
        q: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows, out: Tensor, *, is_blind: bool, **_: object
    ) -> None:
        if is_blind:
            rows = replace(rows, ancestors=rows.ancestors & ~1, path_lengths=(rows.path_lengths - 1).clamp(min=0))
        right(q, keys, values, rows, out)

    for is_blind in (False, True):
        monkeypatch.setattr(
            "srtrl.model.triton_attention.attend_tree", lambda *a, is_blind=is_blind, **k: attend(*a, is_blind=is_blind)
        )
        assert set(verdicts(check_attention, tiny)) == {"FAILED" if is_blind else "ok"}


@interpreted
def test_sampling_by_other_noise_is_seen(tiny: GpuBench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(check_sampling, tiny) == ["ok", "ok"]
    from srtrl.engine import triton_sampling

    right = triton_sampling.sample_rows_triton

    def shifted(logits: Tensor, temperatures: Tensor, rng_keys: Tensor, positions: Tensor, *others: Any) -> None:
        right(logits, temperatures, rng_keys, positions + 1, *others)

    monkeypatch.setattr(triton_sampling, "sample_rows_triton", shifted)
    assert verdicts(check_sampling, tiny) == ["FAILED", "FAILED"]


def test_other_tokens_and_other_bits_are_seen(tiny: GpuBench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(verdicts(check_identity, tiny)) == {"ok"}
    right = identity._decode

    def nudged(bench: GpuBench, variant: identity.Variant, *others: object) -> identity.Outputs:
        outputs = right(bench, variant, *others)  # type: ignore[arg-type]
        if variant.drafter == "wrong":
            return {
                rng_key: (tokens, [value + 1e-7 for value in found]) for rng_key, (tokens, found) in outputs.items()
            }
        if variant.slots == 1:
            return {rng_key: ([*tokens, 0], found) for rng_key, (tokens, found) in outputs.items()}
        return outputs

    monkeypatch.setattr(identity, "_decode", nudged)
    assert verdicts(check_identity, tiny) == ["ok", "FAILED", "FAILED", "FAILED", "ok", "FAILED"]


def test_checks_of_the_update_hold_on_the_cpu_itself(tiny: GpuBench) -> None:
    for check in (check_packed_attention, check_logprobs, check_training_step):
        assert set(verdicts(check, tiny)) == {"ok"}


def test_a_wrong_gradient_is_seen(tiny: GpuBench, monkeypatch: pytest.MonkeyPatch) -> None:
    right = update_policy
    calls: list[int] = []

    def scaled(policy: object, optimizer: torch.optim.Optimizer, *others: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 2:  # the device's turn
            for group in optimizer.param_groups:
                group["eps"] *= 1.1
        return right(policy, optimizer, *others, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(update_checks, "update_policy", scaled)
    assert verdicts(check_training_step, tiny) == ["ok", "ok", "FAILED"]


# --- The drafter of the checks ----------------------------------------------------------------------------------------


def test_the_scripted_drafter_puts_the_right_token_behind_a_wrong_one() -> None:
    request = Request(
        prompt_id="p",
        prompt_token_ids=(1,),
        draw_index=0,
        sample_index=0,
        rng_key=3,
        sampling=None,  # type: ignore[arg-type]
    )
    drafter = ScriptedDrafter({3: [5, 6, 7]}, is_right=True, vocab_size=8)
    drafter.start(0, request)
    drafter.observe([0], [[5]])
    (tree,) = drafter.propose([0], [8])
    tree.check(8)
    assert (tree.token_ids.tolist(), tree.parents.tolist()) == ([7, 6, 0, 7], [ROOT, ROOT, 1, 1])
    wrong = ScriptedDrafter({3: [5, 6, 7]}, is_right=False, vocab_size=8)
    wrong.start(0, request)
    (tree,) = wrong.propose([0], [2])
    tree.check(8)
    assert tree.token_ids.tolist() == [6, 7]


@pytest.mark.slow
@interpreted
def test_the_forward_pass_on_the_interpreter(tiny: GpuBench) -> None:
    assert verdicts(check_forward, tiny) == ["ok"] * 4
