"""Plans and times for several GPUs: bytes of real shards, curves against measurements, and a simulation of ranks."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import printed
from critic_cases import make_value_model
from rank_cases import FORKED, run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from update_cases import make_policy, make_recipe, make_sequences

from srtrl import meta_update, planner
from srtrl.bench.recorded import RecordedPrompt
from srtrl.build import build_columns
from srtrl.build_models import Models
from srtrl.engine.kv_memory import GIB
from srtrl.features.lora import LoraAdamW
from srtrl.planner import find_config, plan_memory
from srtrl.ranks.sharding import shard
from srtrl.recipe.file import load_recipe
from srtrl.recipe.schema import LoraSection, ModelSection
from srtrl.run.estimate import GPUS, StepTime, count_weights
from srtrl.trainer.optimizer import build_optimizer
from srtrl.trainer.passes import UpdateContext, fill

ROOT = Path(__file__).parents[1]
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
OPTIMIZER: dict[str, Any] = {"learning_rate": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.99)}


def times_of(*overrides: str, num_gpus: int = 1, gpu: str = "h200") -> StepTime:
    recipe = load_recipe(Path("grpo_math"), overrides)
    config = find_config(recipe.model.path)[0]
    return planner.step_time(recipe, config, plan_memory(recipe, config, 139 * GIB, num_gpus), GPUS[gpu])


# --- Bytes ------------------------------------------------------------------------------------------------------------


def model_of(kind: str, dtype: torch.dtype) -> nn.Module:
    return make_value_model(dtype=dtype) if kind == "critic" else make_policy(dtype=dtype, tied=kind == "tied")


def num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in tensors)


def sharded_bytes(kind: str, dtype: torch.dtype) -> tuple[int, int, int]:
    """Weights, moments and gradients of a rank, of which the first one has the largest parts."""
    model = model_of(kind, dtype)
    shard(model)
    optimizer = build_optimizer(model, **OPTIMIZER)
    weights = list(model.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return num_bytes(weights), num_bytes(moments), num_bytes([one.grad for one in weights if one.grad is not None])


@FORKED
@pytest.mark.parametrize(
    ("kind", "dtype", "count"),
    [
        ("policy", torch.float32, 2),
        ("policy", torch.bfloat16, 3),
        ("tied", torch.bfloat16, 2),
        ("tied", torch.float32, 3),
        ("critic", torch.float32, 2),
        ("critic", torch.bfloat16, 3),
    ],
)
def test_the_plan_has_the_bytes_of_real_shards(kind: str, dtype: torch.dtype, count: int) -> None:
    """19 tokens and layers of 8 and 12: neither 2 nor 3 divides all rows."""
    config = make_policy(tied=kind == "tied").config
    kept, gradients, _ = planner._learner_bytes(
        config, ModelSection(path="x", dtype="float32"), count, is_critic=kind == "critic"
    )
    assert kept["masters"] == 0
    assert (kept["weights"], kept["moments"], gradients) == run_ranks(count, sharded_bytes, kind, dtype)[0]


def sharded_lora_bytes() -> list[int]:
    """A and B, their moments and gradients, and W0, of a rank."""
    model = make_policy(dtype=torch.bfloat16)
    shard(model)
    optimizer = LoraAdamW(model, LoraSection(rank=2), seed=0, dtype=torch.bfloat16)
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    bases = [part.base for part in optimizer.matrices]
    return [num_bytes(optimizer.holders(model)), num_bytes(states), optimizer.gradient_bytes, num_bytes(bases)]


@FORKED
def test_the_plan_has_the_bytes_of_sharded_lora() -> None:
    section = ModelSection(path="x", dtype="float32", lora=LoraSection(rank=2))
    kept, gradients, base = planner._learner_bytes(make_policy().config, section, 2)
    found = run_ranks(2, sharded_lora_bytes)
    assert found[0][:3] == found[1][:3] == [kept["masters"], kept["moments"], gradients]
    assert found[0][3] + found[1][3] == base, "of both, in bfloat16: twice a part in float32, halved"


def gathered_after_the_reference() -> list[str]:
    """Names of the reference's weights that are whole after its pass."""
    recipe = make_recipe(algorithm__kl={"coefficient": 0.1}, train__sharding="fsdp2")
    policy, reference = make_policy(), make_policy(seed=3).requires_grad_(False)
    shard(reference)
    optimizer = build_optimizer(policy, **OPTIMIZER)
    models = Models(
        policy=policy,
        reference=reference,
        teacher=None,
        optimizer=optimizer,
        critic=None,
        draft_head=None,
        attention_head=None,
    )
    [column] = build_columns(recipe, models)
    filled = fill(column, make_sequences(make_policy(scale=8)), UpdateContext(recipe=recipe, step=1))
    assert all(sequence.ref_logprobs is not None for sequence in filled)
    return [name for name, weight in reference.named_parameters() if not isinstance(weight, DTensor)]


@FORKED
def test_a_reference_is_sharded_again_after_its_pass() -> None:
    assert run_ranks(2, gathered_after_the_reference) == [[], []]


def test_data_parallel_plans_are_those_of_one_gpu_and_sharded_ones_shrink() -> None:
    recipe = load_recipe(Path("grpo_math"))
    config = find_config(recipe.model.path)[0]
    for num_gpus in (2, 8, 512):
        assert plan_memory(recipe, config, 80 * GIB, num_gpus).parts == plan_memory(recipe, config, 80 * GIB).parts
    sharded = load_recipe(Path("grpo_math"), ["train.sharding=fsdp2"])
    weights = [weight.shape for weight in meta_update.make_policy(config, recipe.model).parameters()]
    for num_gpus in (2, 7, 512):
        plan = plan_memory(sharded, config, 80 * GIB, num_gpus)
        part = 4 * sum(-(-rows // num_gpus) * torch.Size(others).numel() for rows, *others in weights)
        assert [plan.parts[name] for name in ("masters", "reference", "gradients")] == [part] * 3
        assert plan.parts["moments"] == 2 * part + 4 * len(weights)
        assert plan.parts["weights"] == plan_memory(recipe, config, 80 * GIB).parts["weights"]


def test_a_large_teacher_gathers_its_own_layers() -> None:
    """Two layers and all outside them in bfloat16, without gradients; one of the policy's size changes nothing."""
    small, large = (["train.sharding=fsdp2", f"algorithm.teacher.path=Qwen/Qwen2.5-{size}"] for size in ("1.5B", "14B"))
    beside, plain, own = (
        plan_memory(load_recipe(Path("grpo_math"), given), find_config("Qwen/Qwen2.5-1.5B")[0], 80 * GIB, 8).parts
        for given in (large, small[:1], small)
    )
    assert own["activations"] == plain["activations"]
    policy = meta_update.make_policy(find_config("Qwen/Qwen2.5-1.5B")[0], load_recipe(Path("grpo_math")).model)
    shape = replace(find_config("Qwen/Qwen2.5-14B")[0], num_hidden_layers=2)
    two_layers = count_weights(meta_update.make_policy(shape, ModelSection(path="x")))
    assert beside["activations"] - plain["activations"] == 2 * two_layers - planner._gathered_bytes(policy)


# --- What is printed --------------------------------------------------------------------------------------------------


def test_the_check_plans_for_several_gpus() -> None:
    checked = partial(printed, "show-config", "grpo_math", "--check")
    eight = checked("--gpus", "8", "--gpu", "h100", "eval.num_problems=500")
    assert "(computed for 8 x H100, without drafts and evaluations)\n  rollout 20 s, or " in eight
    assert re.search(
        r"with drafts as on recorded mathematics; update \d+ s; evaluation .* \(computed, not measured", eight
    )
    assert "memory of a training step on each of 8 GPUs of 79 GiB (--gpu h100), computed:" in eight
    assert checked("--gpus", "1", "--gpu", "80") == checked("--gpu", "80")
    large = checked("--gpus", "8", "--gpu", "h100", "model.path=Qwen/Qwen3-8B")
    assert large.startswith("disk: "), "no time of a step that does not fit"
    assert "advice: with train.sharding=fsdp2 it fits, with " in large


# --- Times ------------------------------------------------------------------------------------------------------------


def test_the_curve_of_a_decode_step_is_within_a_sixth_of_what_was_measured() -> None:
    """The tables of one H200 in docs/benchmarks.md; their rows with drafts have fewer sequences than slots."""
    on_gpu = BENCHMARKS[BENCHMARKS.index("## On a GPU") : BENCHMARKS.index("## Drafters on a trace")]
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) \| ([\d.]+) \| [\d.]+ \| .*\|$", on_gpu, re.MULTILINE)
    assert len(rows) == 9
    times = times_of("rollout.max_prompt_tokens=212", "rollout.max_new_tokens=600")
    for sequences, num_rows, measured in rows:
        if sequences == num_rows:
            on_device = 1000 * times.token_seconds(int(sequences), drafts=False) - 0.25 - 0.0028 * int(sequences)
            assert on_device == pytest.approx(float(measured), rel=1 / 6)
    rows = re.findall(r"^\| (\d+)[^|]*\| (none|`srt`) \| ([\d,]+) \| ([\d.]+) \| \d+% \|", on_gpu, re.MULTILINE)
    given = dict(zip(("8", "64", "256", "512"), (9.2, 5.4, 4.8, 1.4), strict=True))
    assert "Tokens per step with `srt`: 9.2, 5.4, 4.8 and 1.4; verified 16, 7.2, 5.8 and 1.6." in BENCHMARKS
    assert len(rows) == 8
    times = times_of("rollout.max_prompt_tokens=112", "rollout.max_new_tokens=400")
    for slots, drafter, per_second, milliseconds in rows:
        rate = given[slots] if drafter != "none" else 1.0
        step = float(milliseconds) / 1000
        sequences = float(per_second.replace(",", "")) * step / rate  # on average in a step
        if (slots, drafter) != ("512", "`srt`"):  # there drafts hardly pay, and the curve has none
            found = times.token_seconds(round(sequences), drafts=drafter != "none") * rate
            assert found == pytest.approx(step, rel=1 / 6), (slots, drafter)


def test_a_step_is_what_the_curves_say() -> None:
    changes = ["rollout.num_prompts=16", "rollout.num_samples=8", "rollout.slots=10", "rollout.max_prompt_tokens=100"]
    changes += ["rollout.max_new_tokens=1000", "train.mini_batch_prompts=8", "train.micro_batch_tokens=9216"]
    changes += ["train.num_epochs=1", "algorithm.kl.coefficient=0.1"]
    one, four = times_of(*changes), times_of(*changes, num_gpus=4)
    weights = sum(weight.numel() for weight in one.policy.parameters())
    step = one.token_seconds(10, drafts=False)
    assert one.token_seconds(10, drafts=True) < step
    read = 2 * weights * 16 * 100 / (0.6 * 989e12)
    last = one.token_seconds(8, drafts=False)
    assert one.rollout_seconds(16, 8, drafts=False) == pytest.approx(1000 * (12 * step + last) + read)
    last = four.token_seconds(2, drafts=False)
    assert four.rollout_seconds(16, 8, drafts=False) == pytest.approx(1000 * (3 * step + last) + read / 4)
    update = 8 * weights * 16 * 8100 / (0.32 * 989e12)
    assert one.update_seconds() == pytest.approx(update)
    # Eight micro-batches of each of two mini-batches: two of each for a GPU, then the gradients of each are summed.
    assert four.update_seconds() == pytest.approx(update / 4 + 2 * 2 * 0.75 * 4 * weights / 450e9)
    many = replace(four, num_gpus=16)
    assert many.update_seconds() == pytest.approx(update / 8 + 2 * 2 * 15 / 16 * 4 * weights / 50e9)
    sharded = times_of(*changes, "train.sharding=fsdp2", num_gpus=16)
    assert sharded.update_seconds() == pytest.approx(update / 8), "messages hide behind passes"
    faster = replace(sharded, device=GPUS["b200"])
    assert faster.update_seconds() == pytest.approx(2 * 15 / 16 * (3 * 2 + 4) * weights / 50e9)
    assert replace(four, num_gpus=1).update_seconds() == one.update_seconds()


# --- The simulation ---------------------------------------------------------------------------------------------------


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module("simulate_ranks")


def lines_of(*lengths: list[int]) -> list[list[Any]]:
    prompt = RecordedPrompt(prompt_id="p", prompt_token_ids=(1,), samples=[])
    return [
        [prompt.request(rank, index, length) for index, length in enumerate(line)] for rank, line in enumerate(lengths)
    ]


def test_simulated_ranks_claim_what_waits_on_others(simulation: Any) -> None:
    """By hand: with a slot each, the first rank ends at 10 and 20 and takes 40 of the other, which ends at 80."""
    assert simulation.decode(lines_of([10, 10], [40, 40, 40]), 1, lambda _: 1.0) == [60.0, 80.0]
    assert simulation.decode(lines_of([10, 10, 5]), 2, lambda number: 1.0 + number) == [3 * 10 + 2 * 5.0]
    assert simulation.decode(lines_of([7], []), 4, lambda _: 0.5) == [3.5, 0.0]


def test_the_table_of_the_page_is_what_the_command_prints(
    simulation: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "ranks.md").read_text(encoding="utf-8")
    [command] = re.findall(r"`python docs/(simulate_ranks\.py .*?)`", page)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [*command.split(), "--gpus", "64,512"])
    simulation.main()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert [line for line in printed if f"\n{line}\n" not in page] == []
