"""The time of a token in an update of Qwen2.5-1.5B on an H100, computed; prints the table of docs/performance.md.

    python docs/update_time.py

Needs no GPU and no weights, but Triton. The operations of one micro-batch run on tensors without content (PyTorch's
device `meta`), kernels are not launched, and what all of them read and write is added up, each operand once. Matrix
products and attention take the time of their arithmetic, everything else that of its bytes. The update of the weights
(AdamW), once for several micro-batches, is not in it.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton import knobs
from triton.runtime.jit import JITFunction

from srtrl.cuda.update import FusedSoftmax, fuse_update
from srtrl.model.hf_config import config_from_hf
from srtrl.model.logprobs import token_logprobs
from srtrl.model.published_shapes import SHAPES
from srtrl.model.transformer import Transformer
from srtrl.run.step_metrics import model_flops

LENGTHS, PROMPT = [1024] * 16, 128
"""A micro-batch of grpo_math: tokens of each sequence, and of its prompt."""
PEAK, PRODUCTS = 990e12, 650e12
"""Operations per second in bfloat16: of the data sheet, and those that large matrix products reach."""
BANDWIDTH = 2.7e12
"""Bytes per second, 80% of the data sheet's 3.35e12."""
ATTENTION = 350e12, 280e12
"""Operations per second of FlashAttention 2, forward and backward."""
BYTES_OF_A_SUM = 10
"""Per weight and micro-batch: a bfloat16 gradient is added to a float32 sum."""


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of each operation by its name, and the arithmetic of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        operands = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        results = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
        if name in {"mm", "addmm", "addmm_"}:
            left, right = operands[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        elif name in {"gather", "scatter_add_", "index_select", "embedding"}:  # a few rows, or numbers, of the first
            self.bytes[name] += 2 * operands[-1].nbytes + (0 if name == "scatter_add_" else results[0].nbytes)
        elif not func.is_view and not name.startswith(("empty", "new_empty")):
            self.bytes[name] += sum(one.nbytes for one in (*operands, *results))
        return found


class _Attention(torch.autograd.Function):
    """Sizes alone; its time is computed apart."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.new_empty(q.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(one.new_empty(one.shape) for one in ctx.saved_tensors)


class _Norm(torch.autograd.Function):
    """PyTorch's kernel on CUDA, one for each direction: it reads and writes once, backward it reads two tensors."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *_: Any) -> Tensor:
        ctx.save_for_backward(hidden)
        return torch.neg(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return torch.mul(gradients[0], ctx.saved_tensors[0]), None, None, None


class Plan:
    """Positions of the micro-batch."""

    positions = torch.zeros(sum(LENGTHS), dtype=torch.int64, device="meta")
    num_positions = max(LENGTHS)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """`AttentionPlan.attend`."""
        return _Attention.apply(q, k, v)  # type: ignore[no-any-return, no-untyped-call]


def row_of(name: str, prepare: Callable[[Transformer], None], recomputes: bool) -> str:
    """The row of the table: megabytes and microseconds of a token, and the share of the peak."""
    config = config_from_hf(SHAPES["qwen2.5-1.5b"])
    policy = Transformer(config, torch.bfloat16, "meta")
    policy.gradient_checkpointing = recomputes
    prepare(policy)
    num_tokens = sum(LENGTHS)
    targets = torch.zeros(num_tokens - PROMPT * len(LENGTHS), dtype=torch.int64, device="meta")
    work = Work()

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        tensors = {id(one): one for one in args if isinstance(one, Tensor)}.values()
        work.bytes[kernel.__name__] += sum(one.nbytes for one in tensors)
        if kernel.__name__ == "softmax_gradient_rows":
            work.bytes[kernel.__name__] += args[0].nbytes  # the logits are written, too

    JITFunction.run = launch
    with work:
        hidden = policy(Plan.positions, Plan())[: len(targets)]
        options: dict[str, Any] = {"temperature": 1.0, "softmax": policy.softmax}
        logprobs, _ = token_logprobs(hidden, policy.head_weight, targets, **options)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
    work.bytes["sums of gradients"] = BYTES_OF_A_SUM * sum(one.numel() for one in policy.parameters())
    num_bytes = sum(work.bytes.values())
    pairs = sum(length * (length + 1) / 2 for length in LENGTHS)
    forward = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    attention = forward * (1 + recomputes) / ATTENTION[0] + 2.5 * forward / ATTENTION[1]
    parts = [work.flops / PRODUCTS, attention, num_bytes / BANDWIDTH]
    share = model_flops(config, LENGTHS, num_targets=len(targets)) / PEAK / sum(parts)
    cells = [f"{num_bytes / num_tokens / 1e6:.1f}", *(f"{1e6 * one / num_tokens:.1f}" for one in (*parts, sum(parts)))]
    return " | ".join([f"| {name}", *cells, f"{share:.0%} |"])


def fuse_softmax(policy: Transformer) -> None:
    """The kernels of the log-probs alone."""
    policy.softmax = FusedSoftmax()


def main() -> None:
    """Print the table."""
    functional.rms_norm = _Norm.apply
    knobs.runtime.interpret = True  # no device is asked
    print("| update | MB | products | attention | the rest | us per token | of the peak |\n| --- |" + " --: |" * 6)
    for recomputes, added in ((False, ""), (True, ", gradient checkpointing")):
        print(row_of(f"PyTorch's operations alone{added}", lambda _: None, recomputes))
        print(row_of(f"log-probs by a kernel{added}", fuse_softmax, recomputes))
        print(row_of(f"and the gated activation and the rotation{added}", fuse_update, recomputes))


if __name__ == "__main__":
    main()
