"""The policy update on a CUDA device: kernels for what plain PyTorch reads and writes several times.

Log-probs. The logits [C, V] of a chunk, in the type of the weights, are read once in the forward pass: a program takes
one row and carries along the largest logit so far and, relative to it, the sum of e**logit, and of its products with
the logits for the entropy. The backward pass computes the logits again, as plain PyTorch does, reads them once and
writes their gradient over them. So nothing [C, V] is float32, and nothing that is saved is overwritten.

The MLP's gated activation. Of its passes only the rows of the fused projection are kept, [T, 2 I]; plain PyTorch keeps
the activated half, too.

The rotation. Forward and backward are one kernel, for the gradient is rotated back; plain PyTorch launches four for
each, of which those that multiply all heads of a row by its cosines are slow.

Each kernel rounds where PyTorch's operations round. Letters: `srtrl/model/logprobs.py`.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from srtrl.cuda.jit import jit
from srtrl.cuda.layers import GELU_SCALE, HEADS_AT_ONCE, gated, load_gates, partner_lanes, rounded
from srtrl.model.logprobs import Slopes, Softmax
from srtrl.model.transformer import Layer, Style, Transformer

_MINUS_INFINITY = tl.constexpr(float("-inf"))
_READ_AT_ONCE = 2048  # logits of a row by the program of `softmax_rows`
_WRITTEN_AT_ONCE = 2048  # logits of a row by one program of `softmax_gradient_rows`
_GATES_AT_ONCE = 1024  # of a row by one program of `gated_gradient_rows`


def fuse_update(model: Transformer) -> None:
    """Let the passes of the update through `model`, which is on a CUDA device, use the kernels of this file."""
    model.softmax = FusedSoftmax()
    for layer in model.layers:
        cast(Layer, layer).gated, cast(Layer, layer).rotate = fused_gated, fused_rotate


class FusedSoftmax(Softmax):
    """See `Softmax`; weights are float32 or of a half type."""

    def forward(
        self, hidden: Tensor, head_weight: Tensor, target_ids: Tensor, temperature: float, *, has_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `Softmax`."""
        logits = functional.linear(hidden, head_weight)  # [C, V]
        num_rows, vocab_size = logits.shape
        assert logits.is_contiguous()
        logprobs = logits.new_empty(num_rows, dtype=torch.float32)
        entropy = torch.empty_like(logprobs) if has_entropy else None
        softmax_rows[(num_rows,)](
            *(logits, target_ids.contiguous(), logprobs, logprobs if entropy is None else entropy),
            *(temperature, vocab_size),
            **_softmax_options(_READ_AT_ONCE, vocab_size, temperature, has_entropy=has_entropy),
        )
        return logprobs, entropy

    def gradient(
        self, hidden: Tensor, head_weight: Tensor, target_ids: Tensor, temperature: float, slopes: Slopes
    ) -> Tensor:
        """See `Softmax`."""
        logits = functional.linear(hidden, head_weight)  # [C, V]
        num_rows, vocab_size = logits.shape
        assert logits.is_contiguous()
        chosen = logits.gather(-1, target_ids[:, None])  # before it is overwritten
        has_entropy = slopes.entropy is not None
        options = _softmax_options(_WRITTEN_AT_ONCE, vocab_size, temperature, has_entropy=has_entropy)
        entropy = slopes.probs if slopes.entropy is None else slopes.entropy.contiguous()
        softmax_gradient_rows[(num_rows, triton.cdiv(vocab_size, options["BLOCK"]))](
            *(logits, target_ids.contiguous(), chosen, slopes.logprobs, slopes.target.contiguous(), slopes.probs),
            *(entropy, temperature, vocab_size),
            **options,
        )
        return logits


def _softmax_options(at_once: int, vocab_size: int, temperature: float, *, has_entropy: bool) -> dict[str, Any]:
    return {
        "TEMPERED": temperature != 1,
        "HAS_ENTROPY": has_entropy,
        "BLOCK": min(at_once, triton.next_power_of_2(vocab_size)),
        "num_warps": 4,
        "enable_fp_fusion": True,
    }


@jit
def load_tempered(
    logits: tl.tensor, tokens: tl.tensor, end: tl.tensor, temperature: tl.tensor, TEMPERED: tl.constexpr
) -> tl.tensor:
    """Logits of `tokens` over the temperature, float32; -inf from `end` on."""
    scaled = tl.load(logits + tokens, mask=tokens < end, other=_MINUS_INFINITY).to(tl.float32)
    return tl.div_rn(scaled, temperature) if TEMPERED else scaled  # as exact as the decoder's


@jit
def softmax_rows(
    logits: tl.tensor,
    target_ids: tl.tensor,
    logprobs: tl.tensor,
    entropies: tl.tensor,
    temperature: tl.tensor,
    vocab_size: tl.tensor,
    TEMPERED: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row. Each lane has sums of its own, so that a block costs one reduction, that of its maximum."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab_size
    chosen = load_tempered(logits, tl.load(target_ids + row), vocab_size, temperature, TEMPERED)
    highest = tl.full((), _MINUS_INFINITY, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)  # of e**(logit - highest)
    weighted = tl.zeros([BLOCK], tl.float32)  # of (logit - highest) e**(logit - highest)
    for first in tl.range(0, vocab_size, BLOCK, num_stages=3):
        tokens = first + tl.arange(0, BLOCK)
        scaled = load_tempered(logits, tokens, vocab_size, temperature, TEMPERED)
        new_highest = tl.maximum(highest, tl.max(scaled, axis=0))
        moved = tl.where(highest == _MINUS_INFINITY, 0.0, highest - new_highest)
        difference = scaled - tl.where(new_highest == _MINUS_INFINITY, 0.0, new_highest)
        weights = tl.exp(difference)
        if HAS_ENTROPY:
            # A logit of -inf, which lanes after the vocabulary have, adds 0.
            weighted = (weighted + moved * total) * tl.exp(moved) + tl.where(weights > 0, difference, 0.0) * weights
        total = total * tl.exp(moved) + weights
        highest = new_highest
    all_weights = tl.sum(total, axis=0)
    tl.store(logprobs + row, chosen - highest - tl.log(all_weights))
    if HAS_ENTROPY:
        tl.store(entropies + row, tl.log(all_weights) - tl.sum(weighted, axis=0) / all_weights)


@jit
def softmax_gradient_rows(
    logits: tl.tensor,
    target_ids: tl.tensor,
    chosen_logits: tl.tensor,
    logprobs: tl.tensor,
    target_slopes: tl.tensor,
    prob_slopes: tl.tensor,
    entropy_slopes: tl.tensor,
    temperature: tl.tensor,
    vocab_size: tl.tensor,
    TEMPERED: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (rows, blocks): the gradient in the place of the logits.

    A token's log-prob is that of the target and the difference of their logits: exact for the target itself.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab_size
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    chosen = load_tempered(chosen_logits, row, row + 1, temperature, TEMPERED)
    scaled = load_tempered(logits, tokens, vocab_size, temperature, TEMPERED)
    token_logprobs = scaled - chosen + tl.load(logprobs + row)
    probs = tl.exp(token_logprobs)
    factor = tl.load(prob_slopes + row)
    if HAS_ENTROPY:
        factor = factor - tl.load(entropy_slopes + row) * tl.where(probs > 0, token_logprobs, 0.0)
    gradient = probs * factor
    gradient += tl.where(tokens == tl.load(target_ids + row), tl.load(target_slopes + row), 0.0)
    if TEMPERED:
        gradient = tl.div_rn(gradient, temperature)
    tl.store(logits + tokens, gradient, mask=tokens < vocab_size)


def fused_gated(gate_up: Tensor, style: Style) -> Tensor:
    """`transformer.gated`, differentiable: [T, I] of [T, 2 I]."""
    return cast(Tensor, _Gated.apply(gate_up, style))  # type: ignore[no-untyped-call]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, style: Style) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.style = style
        return gated(gate_up, style)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        num_rows, width = slopes.shape
        gradient = torch.empty_like(gate_up)
        block = min(_GATES_AT_ONCE, triton.next_power_of_2(width))
        gated_gradient_rows[(num_rows, triton.cdiv(width, block))](
            *(gate_up, slopes.contiguous(), gradient),
            WIDTH=width,
            BLOCK=block,
            IS_GELU=ctx.style.activation == "gelu_tanh",
            num_warps=4,
            enable_fp_fusion=False,
        )
        return gradient, None


@jit
def gated_gradient_rows(
    gate_up: tl.tensor,
    slopes: tl.tensor,
    gradient: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
) -> None:
    """One program per row and block; a of the activation x sigmoid(a) is that of `load_gates`."""
    dtype: tl.constexpr = gate_up.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate, up, argument = load_gates(gate_up + row * 2 * WIDTH, columns, WIDTH, IS_GELU)
    slope = tl.load(slopes + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    rise = GELU_SCALE * (1.0 + 0.134145 * gate * gate) if IS_GELU else 1.0  # of the argument
    divisor = 1.0 + tl.exp(-argument)
    share = tl.div_rn(1.0, divisor)
    activated = rounded(tl.div_rn(gate, divisor), dtype)
    derivative = share * (1.0 + gate * (1.0 - share) * rise)
    target = gradient + row * 2 * WIDTH + columns
    tl.store(target, rounded(slope * up, dtype) * derivative, mask=inside)
    tl.store(target + WIDTH, slope * activated, mask=inside)


def fused_rotate(heads: Tensor, cosines: Tensor, sines: Tensor, rotary_dim: int, style: Style) -> Tensor:
    """`transformer.rotate`, differentiable by `heads` [T, H, E]."""
    return cast(Tensor, _Rotation.apply(heads, cosines, sines, rotary_dim, style))  # type: ignore[no-untyped-call]


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor, rotary_dim: int, style: Style) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        ctx.rotary_dim, ctx.style = rotary_dim, style
        return _rotated(heads, cosines, sines, rotary_dim, style, is_back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        gradient = _rotated(slopes.contiguous(), cosines, sines, ctx.rotary_dim, ctx.style, is_back=True)
        return gradient, None, None, None, None


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor, rotary_dim: int, style: Style, *, is_back: bool) -> Tensor:
    num_rows, num_heads, head_dim = heads.shape
    assert heads.stride()[1:] == (head_dim, 1)
    assert cosines.stride() == sines.stride()
    out = heads.new_empty(heads.shape)
    at_once = min(HEADS_AT_ONCE, triton.next_power_of_2(num_heads))
    rotate_heads[(num_rows, triton.cdiv(num_heads, at_once))](
        *(heads, cosines, sines, out, heads.stride(0), cosines.stride(0)),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(head_dim),
        HEADS_AT_ONCE=at_once,
        ROTARY=rotary_dim,
        INTERLEAVED=style.interleaved,
        IS_BACK=is_back,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@jit
def rotate_heads(
    heads: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    angle_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IS_BACK: tl.constexpr,
) -> None:
    """One program per row and group of heads; back, the sines of a pair change places, which is their sign."""
    dtype: tl.constexpr = heads.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)[:, None]
    lanes = tl.arange(0, BLOCK)[None, :]
    is_lane = lanes < HEAD_DIM
    inside = (head < NUM_HEADS) & is_lane
    source = heads + row * stride + head * HEAD_DIM
    x = tl.load(source + lanes, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(source + partner_lanes(lanes, ROTARY, INTERLEAVED), mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + row * angle_stride + lanes, mask=is_lane, other=0.0).to(tl.float32)
    sine = tl.load(sines + row * angle_stride + lanes, mask=is_lane, other=0.0).to(tl.float32)
    turned = rounded(partner * (-sine if IS_BACK else sine), dtype)
    tl.store(out + (row * NUM_HEADS + head) * HEAD_DIM + lanes, rounded(x * cosine, dtype) + turned, mask=inside)
