"""Engines that decode as on a CUDA device, tiny enough for Triton's interpreter, and what their tests share."""

from collections.abc import Callable, Sequence

import torch
from engine_cases import options, tiny_policy
from kernel_cases import KERNEL_DEVICE
from srtrl.engine.buckets import StepShape
from srtrl.engine.device_runner import DeviceRunner
from srtrl.engine.device_step import StepTensors, write_logits
from srtrl.engine.graphs import EagerSteps
from srtrl.model.device_plan import DevicePlan

from srtrl.drafters.base import DrafterBase
from srtrl.engine.engine import Engine
from srtrl.engine.sampling import make_rng_key, row_logprobs_reference, sample_rows_reference
from srtrl.engine.stopping import Tokenizer
from srtrl.model.transformer import Transformer
from srtrl.types import Request, SamplingParams

VOCAB_SIZE = 23
PROMPTS = ((5,), (1, 2, 3, 4, 5, 6, 7), (3, 3, 3, 3))


def device_policy(device: str = KERNEL_DEVICE, dtype: torch.dtype = torch.float32) -> Transformer:
    """One layer, with query heads that share key-value heads, on the device that runs kernels."""
    policy = tiny_policy(
        dtype,
        hidden_size=32,
        vocab_size=VOCAB_SIZE,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
    )
    return policy.to(device)


def device_requests(
    prompts: Sequence[tuple[int, ...]] = PROMPTS, *, num_samples: int = 2, max_new_tokens: int = 8, **sampling: object
) -> list[Request]:
    """`num_samples` requests a prompt; token 0 ends a sample."""
    return [
        Request(
            prompt_id=str(draw),
            prompt_token_ids=prompt,
            draw_index=draw,
            sample_index=sample,
            rng_key=make_rng_key(0, "train", draw, sample),
            sampling=SamplingParams(max_new_tokens=max_new_tokens, end_token_ids=(0,), **sampling),  # type: ignore[arg-type]
        )
        for draw, prompt in enumerate(prompts)
        for sample in range(num_samples)
    ]


def device_engine(
    policy: Transformer,
    *,
    drafter: DrafterBase | None = None,
    tokenizer: Tokenizer | None = None,
    kernels: bool = False,
    **changes: object,
) -> Engine:
    """An engine on the device path; without `kernels` its steps on a CPU are computed in plain PyTorch, for speed."""
    wanted = {"deterministic": True, "as_on_cuda": True, "max_sequence_tokens": 32, "slots": 4}
    engine = Engine(policy, options(**(wanted | changes)), drafter=drafter, tokenizer=tokenizer)
    if not kernels and KERNEL_DEVICE == "cpu":
        runner_of(engine).executor = EagerSteps(compute_of(runner_of(engine)))
    return engine


def runner_of(engine: Engine) -> DeviceRunner:
    """The engine's runner, as what it is."""
    assert isinstance(engine.runner, DeviceRunner)
    return engine.runner


def shapes_of(engine: Engine) -> set[StepShape]:
    """Shapes of the steps that were run."""
    return {shape for shape, _ in runner_of(engine)._memory._steps}


def compute_of(runner: DeviceRunner) -> Callable[[StepTensors], None]:
    """`DeviceStep.compute`; on a CPU what it does, from the same inputs, without kernels."""
    if KERNEL_DEVICE != "cpu":
        return runner.device_step.compute

    @torch.inference_mode()
    def compute(step: StepTensors) -> None:
        inputs, num_logits = step.device, step.shape.num_logits
        plan = DevicePlan(
            runner.cache,
            inputs.rows,
            num_positions=runner.planner.max_positions,
            launch=step.shape.launch,
            scratch=step.attention,
            use_kernels=False,
        )
        step.hidden.copy_(runner.model(inputs.token_ids.long(), plan))
        if num_logits:
            logits = step.hidden.new_empty(num_logits, VOCAB_SIZE)
            write_logits(step.hidden[:num_logits], runner.model.head_weight, logits, None)
            sampled = sample_rows_reference(logits, inputs.temperatures, inputs.rng_keys, inputs.places.long())
            tokens = torch.where(inputs.forced >= 0, inputs.forced.long(), sampled)
            step.tokens.copy_(tokens)
            step.logprobs.copy_(row_logprobs_reference(logits, inputs.temperatures, tokens))

    return compute
