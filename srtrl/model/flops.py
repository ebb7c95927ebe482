"""How many floating-point operations an update needs, to compare its speed with the device's."""

from collections.abc import Sequence

from srtrl.model.transformer import ModelConfig


def model_flops(config: ModelConfig, lengths: Sequence[int], *, num_targets: int | None = None) -> float:
    """Operations of one forward and backward pass over sequences of these lengths, packed without padding.

    A matrix product of [m, k] and [k, n] is 2 m k n operations, and its backward pass two such products:

        forward  = 2 N T + 2 V D R + layers x 4 H E x sum of L (L + 1) / 2
        in all   = 3 x forward

    with N weights of the layers' matrices, T tokens, R tokens whose logits are computed, L tokens of a sequence. The
    last term is attention: q k' and weights x v over the keys that causality leaves. Norms, rotary embedding and
    softmax are left out, and so is what `model.gradient_checkpointing` computes twice: this is what the model needs
    ("model FLOPs"), not what was done.

    Chowdhery et al., "PaLM" (2022), appendix B, which counts L x L of attention, masked half included, and the head for
    every token.

    Args:
        config: shape of the model.
        lengths: tokens of each sequence.
        num_targets: response tokens, for which alone the update computes logits; by default all tokens. 0 for a critic.
    """
    num_tokens = sum(lengths)
    num_targets = num_tokens if num_targets is None else num_targets
    width, attention_width = config.hidden_size, config.num_attention_heads * config.head_dim
    layer_weights = width * (attention_width + 2 * config.num_key_value_heads * config.head_dim)  # q, k, v
    layer_weights += attention_width * width  # output
    layer_weights += 3 * width * config.intermediate_size  # gate, up, down
    num_pairs = sum(length * (length + 1) // 2 for length in lengths)  # (token, token it sees)
    forward = 2 * config.num_hidden_layers * layer_weights * num_tokens
    forward += 2 * config.vocab_size * width * num_targets
    forward += 4 * config.num_hidden_layers * attention_width * num_pairs
    return 3.0 * forward
