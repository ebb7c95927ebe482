"""Verification: sample the target's tokens along the draft tree.

At the root, and then at each accepted node, the target's token is sampled from that node's logits with the noise of
its position. If a child of the node carries this token, go on there; else stop. So the tokens are those of sequential
decoding whatever was drafted: a draft only decides how many of them one forward pass gives. The last one is the bonus
token, for which no node was needed; an empty tree gives just that.

Three ways, one result: `walk_by_depth` is the definition; on a CPU `walk_on_cpu` does it in one kernel; on other
devices all rows are sampled at once, for a round trip at each depth would cost more, and the host walks along them
(`follow_rows`; `walk_all_rows` is both).
"""

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.drafters.draft_tree import ROOT, DraftTrees
from srtrl.engine.row_sampling import ForcedTokens, RowSampling, no_tokens
from srtrl.engine.sampler import logit_bits
from srtrl.engine.sequence import Sequence
from srtrl.engine.stopping import Tokenizer, finish_reason
from srtrl.engine.tree_rows import node_depths, node_rows, root_rows
from srtrl.engine.verify_kernel import follow_trees, walk_trees
from srtrl.model.cpu_threads import WORK_PER_THREAD, use_kernel_threads
from srtrl.types import FinishReason

MANY = 16
"""From so many walks on, which of them have ended is looked up for all at once."""


@dataclass(slots=True, eq=False)
class Walk:
    """One sequence's way through its draft tree."""

    sequence: Sequence
    accepted: list[int] = field(default_factory=list)
    """Accepted nodes, from the root down: one less than the tokens that the step gave."""
    finish: FinishReason | None = None

    @property
    def emitted(self) -> list[int]:
        """The tokens that the step gave: accepted ones and the bonus token, or the end of the sample among them."""
        return self.sequence.token_ids[-1 - len(self.accepted) :]


@dataclass(kw_only=True, slots=True, frozen=True)
class Verification:
    """What one step verifies."""

    sequences: SequenceOf[Sequence]
    """B samples whose last token is the root of their tree."""
    trees: DraftTrees
    """One a sequence."""
    logits: Tensor
    """[rows, V]; for each sequence in turn the root's row, then its nodes' rows."""
    tokenizer: Tokenizer | None
    """For stop strings."""
    forced: ForcedTokens | None = None
    """Tokens to take whatever is sampled; the log-probs are theirs."""

    def upcoming(self) -> npt.NDArray[np.int32]:
        """See `ForcedTokens.upcoming`."""
        return no_tokens(self.trees) if self.forced is None else self.forced.upcoming(self.sequences, self.trees)


def verify_trees(
    sequences: SequenceOf[Sequence],
    trees: DraftTrees,
    logits: Tensor,
    tokenizer: Tokenizer | None,
    forced: ForcedTokens | None = None,
) -> list[Walk]:
    """Sample along each sequence's tree and append the tokens and log-probs to the sequence.

    Args:
        sequences: See `Verification`, also for the others.
        trees: One a sequence.
        logits: [rows, V].
        tokenizer: For stop strings.
        forced: For benchmarks on a trace.

    Returns:
        One walk a sequence, with its accepted nodes and whether the sample has ended.

    Raises:
        FloatingPointError: A row of logits is not finite (the policy has diverged or its weights are broken).
    """
    assert len(sequences) == len(trees)
    assert len(trees) + trees.num_nodes == len(logits)
    if not sequences:
        return []
    step = Verification(sequences=sequences, trees=trees, logits=logits, tokenizer=tokenizer, forced=forced)
    rows = RowSampling.of(sequences)
    if logits.device.type != "cpu":
        return walk_all_rows(step, rows)
    return walk_by_depth(step, rows) if rows.is_filtered.any() else walk_on_cpu(step, rows)


def walk_by_depth(step: Verification, rows: RowSampling) -> list[Walk]:
    """All walks together, one token at a time: sample the rows that they have reached. `rows` are the roots'."""
    walks = [Walk(sequence) for sequence in step.sequences]
    children = []
    for tree in step.trees:
        pairs = zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
        children.append({pair: node for node, pair in enumerate(pairs)})
    forced, firsts = step.upcoming(), root_rows(step.trees)
    nodes = np.full(len(walks), ROOT)
    active = np.arange(len(walks))
    for depth in range(len(step.logits)):
        reached = torch.from_numpy(firsts[active] + 1 + nodes[active]).to(step.logits.device)
        # Without drafts these are all rows: no copy of the logits.
        logits = step.logits if len(reached) == len(step.logits) else step.logits[reached]
        tokens, logprobs = rows.take(active, depth).sample(logits, forced[firsts[active] + depth])
        go_on = []
        for b, token, logprob in zip(active.tolist(), tokens.tolist(), logprobs.tolist(), strict=True):
            walk = walks[b]
            walk.finish = _append(walk.sequence, token, logprob, step.tokenizer)
            child = children[b].get((int(nodes[b]), token))
            if walk.finish is None and child is not None:
                nodes[b] = child
                walk.accepted.append(child)
                go_on.append(b)
        if not go_on:
            break
        active = np.array(go_on)
    return walks


def walk_on_cpu(step: Verification, rows: RowSampling) -> list[Walk]:
    """`walk_by_depth` in one kernel, for requests without top-k and top-p; it samples only what the walks visit."""
    assert not rows.is_filtered.any()
    trees = step.trees
    steps = _Steps.of(trees)
    limits, end_tokens = token_limits(step.sequences), _end_tokens(step.sequences)
    # At least one row a walk, and no thread without a walk.
    use_kernel_threads(len(trees) * min(WORK_PER_THREAD, 8 * step.logits.shape[1]))
    walk_trees(
        logit_bits(step.logits),
        trees.token_ids,
        trees.parents,
        trees.offsets,
        rows.temperatures,
        rows.rng_keys,
        rows.positions,
        limits,
        end_tokens,
        step.upcoming(),
        steps.token_ids,
        steps.logprobs,
        steps.nodes,
        steps.counts,
    )
    return steps.append_to(step.sequences, trees, step.tokenizer, limits, end_tokens)


def walk_all_rows(step: Verification, rows: RowSampling) -> list[Walk]:
    """`walk_by_depth` for any device: all rows are sampled there at once, and the host walks."""
    trees = step.trees
    owners = np.repeat(np.arange(len(trees)), 1 + trees.sizes)  # [rows]
    depths = np.zeros(len(owners), np.int32)
    depths[node_rows(trees)] = node_depths(trees)
    forced = step.upcoming()[root_rows(trees)[owners] + depths]
    row_tokens, row_logprobs = rows.take(owners, depths).sample(step.logits, forced)
    return follow_rows(step.sequences, trees, row_tokens, row_logprobs, step.tokenizer)


def follow_rows(
    sequences: SequenceOf[Sequence],
    trees: DraftTrees,
    row_tokens: npt.NDArray[np.int64],
    row_logprobs: npt.NDArray[np.float32],
    tokenizer: Tokenizer | None,
) -> list[Walk]:
    """Walk where all rows were sampled before; `row_tokens` and `row_logprobs` [rows] as `Verification.logits`.

    Raises:
        FloatingPointError: See `verify_trees`.
    """
    steps = _Steps.of(trees)
    limits, end_tokens = token_limits(sequences), _end_tokens(sequences)
    follow_trees(
        row_tokens,
        row_logprobs,
        trees.token_ids,
        trees.parents,
        trees.offsets,
        limits,
        end_tokens,
        steps.token_ids,
        steps.logprobs,
        steps.nodes,
        steps.counts,
    )
    return steps.append_to(sequences, trees, tokenizer, limits, end_tokens)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Steps:
    """What a kernel has walked: the tokens of sequence b begin at its root's row of the arrays."""

    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    nodes: npt.NDArray[np.int32]
    """The node that carries the token; the last token of a walk has none."""
    counts: npt.NDArray[np.int64]
    """[B], tokens."""

    @staticmethod
    def of(trees: DraftTrees) -> "_Steps":
        num_rows = len(trees) + trees.num_nodes
        return _Steps(
            token_ids=np.zeros(num_rows, np.int64),
            logprobs=np.zeros(num_rows, np.float32),
            nodes=np.zeros(num_rows, np.int32),
            counts=np.zeros(len(trees), np.int64),
        )

    def append_to(
        self,
        sequences: SequenceOf[Sequence],
        trees: DraftTrees,
        tokenizer: Tokenizer | None,
        limits: npt.NDArray[np.int64],
        end_tokens: npt.NDArray[np.int64],
    ) -> list[Walk]:
        """Append the tokens to the sequences, up to where each ends.

        The kernels stop at end tokens and at the length limit, so that only stop strings need a look at each token.
        """
        walks = []
        token_ids, logprobs, nodes = self.token_ids.tolist(), self.logprobs.tolist(), self.nodes.tolist()
        firsts = root_rows(trees)
        ends = firsts + self.counts
        has_ended = self._have_ended(ends - 1, limits, end_tokens)
        for sequence, first, end, ended in zip(sequences, firsts.tolist(), ends.tolist(), has_ended, strict=True):
            last = end - 1
            finish = None
            if sequence.request.sampling.stop_strings:
                for last in range(first, end):
                    finish = _append(sequence, token_ids[last], logprobs[last], tokenizer)
                    if finish is not None:
                        break
            elif ended:
                sequence.token_ids.extend(token_ids[first:last])
                sequence.rollout_logprobs.extend(logprobs[first:last])
                finish = _append(sequence, token_ids[last], logprobs[last], tokenizer)
            else:
                sequence.token_ids.extend(token_ids[first:end])
                sequence.rollout_logprobs.extend(logprobs[first:end])
            walks.append(Walk(sequence, nodes[first:last], finish))
        return walks

    def _have_ended(
        self, lasts: npt.NDArray[np.int64], limits: npt.NDArray[np.int64], end_tokens: npt.NDArray[np.int64]
    ) -> list[bool]:
        """[B], whether a walk's last token (of the row `lasts`) ends its sample or is broken; stop strings aside."""
        if len(lasts) < MANY:
            return [True] * len(lasts)  # to look at each one is faster
        ended = (self.counts == limits) | (end_tokens == self.token_ids[lasts][:, None]).any(axis=1)
        ended |= ~np.isfinite(self.logprobs[lasts])
        known: list[bool] = ended.tolist()
        return known


def _append(sequence: Sequence, token: int, logprob: float, tokenizer: Tokenizer | None) -> FinishReason | None:
    """Append a token; returns whether the sample ends with it, and why."""
    if not math.isfinite(logprob):
        request = sequence.request
        raise FloatingPointError(
            f"the policy's logits are not finite (prompt {request.prompt_id!r}, sample {request.sample_index}): "
            "the weights have diverged or are broken"
        )
    sequence.token_ids.append(token)
    sequence.rollout_logprobs.append(logprob)
    return finish_reason(sequence, tokenizer)


def token_limits(sequences: SequenceOf[Sequence]) -> npt.NDArray[np.int64]:
    """[B], tokens that each sample may still have."""
    # `num_remaining` without the calls: this is every step's work.
    return np.array([s.request.sampling.max_new_tokens - len(s.rollout_logprobs) for s in sequences], np.int64)


def _end_tokens(sequences: SequenceOf[Sequence]) -> npt.NDArray[np.int64]:
    """[B, E], end tokens of each sample, padded with -1."""
    ends = [sequence.request.sampling.end_token_ids for sequence in sequences]
    index = {end: i for i, end in enumerate(set(ends))}
    table = np.full((len(index), max(map(len, index))), -1, np.int64)
    for end, i in index.items():
        table[i, : len(end)] = end
    return table[[index[end] for end in ends]] if len(index) > 1 else table.repeat(len(ends), axis=0)
