"""Verification: sample the target's tokens along the draft tree.

At the root, and then at each accepted node, the target's token is sampled from that node's logits with the noise of
its position. If a child of the node carries this token, go on there; else stop. So the tokens are those of sequential
decoding whatever was drafted: a draft only decides how many of them one forward pass gives. The last one is the bonus
token, for which no node was needed; an empty tree gives just that. Sampling goes along the walk, not over all nodes.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from srtrl.drafters.draft_tree import ROOT, DraftTree
from srtrl.engine.sampler import filter_top_k_top_p, row_logprobs_reference, sample_rows
from srtrl.engine.sequence import Sequence
from srtrl.engine.stopping import Tokenizer, finish_reason
from srtrl.types import FinishReason


@dataclass(slots=True, eq=False)
class Walk:
    """One sequence's way through its draft tree."""

    sequence: Sequence
    children: dict[tuple[int, int], int]
    """(node, token) -> child node."""
    first_row: int
    """Row of the root's logits; node i has row `first_row + 1 + i`."""
    node: int = ROOT
    accepted: list[int] = field(default_factory=list)
    """Accepted nodes, from the root down."""
    finish: FinishReason | None = None


def verify_trees(
    sequences: SequenceOf[Sequence], trees: SequenceOf[DraftTree], logits: Tensor, tokenizer: Tokenizer | None
) -> list[Walk]:
    """Sample along each sequence's tree and append the tokens and log-probs to the sequence.

    Args:
        sequences: Samples whose last token is the root of their tree.
        trees: One a sequence.
        logits: [rows, V]; for each sequence in turn the root's row, then its nodes' rows.
        tokenizer: For stop strings.

    Returns:
        One walk a sequence, with its accepted nodes and whether the sample has ended.

    Raises:
        FloatingPointError: A row of logits is not finite (the policy has diverged or its weights are broken).
    """
    walks = []
    row = 0
    for sequence, tree in zip(sequences, trees, strict=True):
        pairs = zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
        walks.append(Walk(sequence, {pair: node for node, pair in enumerate(pairs)}, row))
        row += 1 + tree.num_nodes
    assert row <= len(logits)
    active = walks
    while active:
        rows = [walk.first_row + 1 + walk.node for walk in active]
        # Without drafts the rows are all rows: no copy of the logits.
        chosen = logits[:row] if len(rows) == row else logits[torch.tensor(rows, device=logits.device)]
        token_ids, logprobs = _sample(active, chosen)
        active = [
            walk
            for walk, token, logprob in zip(active, token_ids, logprobs, strict=True)
            if _advance(walk, token, logprob, tokenizer)
        ]
    return walks


def _advance(walk: Walk, token: int, logprob: float, tokenizer: Tokenizer | None) -> bool:
    """Append the token; True where a child carries it, so that the walk goes on."""
    sequence = walk.sequence
    sequence.token_ids.append(token)
    sequence.rollout_logprobs.append(logprob)
    walk.finish = finish_reason(sequence, tokenizer)
    child = walk.children.get((walk.node, token))
    if walk.finish is not None or child is None:
        return False
    walk.node = child
    walk.accepted.append(child)
    return True


def _sample(walks: SequenceOf[Walk], logits: Tensor) -> tuple[list[int], list[float]]:
    """One token and log-prob a walk, from `logits` [len(walks), V]."""
    requests = [walk.sequence.request for walk in walks]
    temperatures = np.array([request.sampling.temperature for request in requests], np.float32)
    streams = np.array([request.stream for request in requests], np.uint64)
    positions = np.array([walk.sequence.num_generated for walk in walks], np.int64)
    is_filtered = any(request.sampling.top_k > 0 or request.sampling.top_p < 1 for request in requests)
    if is_filtered:
        temperature = torch.from_numpy(temperatures).to(logits.device)
        top_k = torch.tensor([request.sampling.top_k for request in requests], device=logits.device)
        top_p = torch.tensor([request.sampling.top_p for request in requests], device=logits.device)
        filtered = filter_top_k_top_p(logits, temperature, top_k, top_p)
        token_ids, _ = sample_rows(filtered, temperatures, streams, positions)
        chosen = torch.from_numpy(token_ids).to(logits.device)
        logprobs = row_logprobs_reference(logits, temperature, chosen).cpu().numpy()
    else:
        token_ids, logprobs = sample_rows(logits, temperatures, streams, positions)
    if not np.isfinite(logprobs).all():
        bad = requests[int(np.flatnonzero(~np.isfinite(logprobs))[0])]
        raise FloatingPointError(
            f"the policy's logits are not finite (prompt {bad.prompt_id!r}, sample {bad.sample_index}): "
            "the weights have diverged or are broken"
        )
    return token_ids.tolist(), logprobs.tolist()
