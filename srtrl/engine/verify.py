"""Verification: follow the sampled tokens down the draft trees, and write them into the batch.

At the root, and then at each accepted node, the target's token was sampled from that row's logits with the noise of its
position. If a child of the node carries this token, it is accepted and the path continues there; else it ends. So the
tokens are those of sequential decoding for any draft: a draft only decides how many of them one forward pass
gives. The last one is the bonus token, for which no node was needed; an empty tree gives just that.
"""

from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import ROOT, DraftTrees
from srtrl.engine.batch import Batch, ScheduledStep
from srtrl.engine.runner import SampledRows
from srtrl.engine.step_inputs import BatchArrays, Int32Array, Int64Array, kv_index
from srtrl.engine.stopping import StopFinder
from srtrl.model.kernels import inner

Array = npt.NDArray[Any]

RUNNING, STOPPED, MAX_LENGTH, NOT_FINITE = 0, 1, 2, 3
NO_ROW = -1


@dataclass(kw_only=True, slots=True, frozen=True)
class Verified:
    """New tokens of a step, of each of B sequences."""

    slots: Int64Array
    """[B]."""
    token_ids: Int32Array
    """New tokens of all sequences, end to end."""
    offsets: Int64Array
    """[B + 1]: those of sequence b are offsets[b] to offsets[b + 1]. At least one each."""
    nodes: Int32Array
    """The accepted node of each new token; `ROOT` for the last of a sequence, which needed none."""
    finish: npt.NDArray[np.int8]
    """[B], `RUNNING`, `STOPPED` or `MAX_LENGTH`."""
    rows: Int64Array
    """[B], the row of the step that gave the last token; `NO_ROW` where the sample has ended."""

    @property
    def num_new(self) -> Int64Array:
        """[B], new tokens of each sequence: accepted ones and one more."""
        num_new: Int64Array = self.offsets[1:] - self.offsets[:-1]
        return num_new

    def rows_of_tokens(self, trees: DraftTrees) -> Int64Array:
        """The row of the step that gave each new token; `trees` are those that were verified."""
        parents = np.concatenate([[ROOT], self.nodes[:-1]])  # a sequence begins where another has ended: at its root
        roots = trees.offsets[:-1] + np.arange(len(trees))
        rows: Int64Array = np.repeat(roots, self.num_new) + 1 + parents
        return rows


def rows_that_stay(step: ScheduledStep, trees: DraftTrees, verified: Verified) -> tuple[Int64Array, Int32Array]:
    """The rows of a verified step that are no rejected drafts, and the token after each (`DrafterBase.computed`)."""
    prompts = len(step.slots) + trees.num_nodes + np.arange(step.num_prompt_rows)
    texts = [np.append(chunk.token_ids[1:], np.int32(chunk.next_token)) for chunk in step.chunks]
    rows = np.concatenate([verified.rows_of_tokens(trees), prompts])
    return rows, np.concatenate([verified.token_ids, *texts])


def verify(
    batch: Batch, slots: Int64Array, trees: DraftTrees, sampled: SampledRows, stop_finder: StopFinder | None = None
) -> Verified:
    """Append the step's tokens and log-probs to the batch.

    Args:
        batch: Where the tokens go; `num_tokens` and `num_computed` move on.
        slots: [B], the decoding sequences.
        trees: One for each, as verified.
        sampled: For each sequence in turn the root's row, then its nodes' rows.
        stop_finder: For stop strings.

    Raises:
        FloatingPointError: A sampled row's logits are not finite (the policy has diverged or its weights are broken).
    """
    assert len(trees) == len(slots)
    assert len(slots) + trees.num_nodes == len(sampled.token_ids)
    nodes_of_trees = (trees.token_ids, trees.parents, trees.offsets)
    followed = _follow_trees(batch.arrays, slots, nodes_of_trees, (sampled.token_ids, sampled.logprobs))
    token_ids, nodes, offsets, finish, rows = followed
    verified = Verified(slots=slots, token_ids=token_ids, offsets=offsets, nodes=nodes, finish=finish, rows=rows)
    if batch.has_stop_strings[slots].any():
        assert stop_finder is not None
        verified = _cut_at_stop_strings(batch, verified, stop_finder)
    if (finish == NOT_FINITE).any():
        sample = batch.samples[int(slots[finish == NOT_FINITE][0])]
        assert sample is not None
        raise FloatingPointError(
            f"the policy's logits are not finite (prompt {sample.request.prompt_id!r}, sample "
            f"{sample.request.sample_index}): the weights have diverged or are broken"
        )
    batch.num_computed[slots] = batch.num_tokens[slots] - 1
    return verified


@numba.njit(cache=True, nogil=True)
def _follow_trees(
    batch: BatchArrays, slots: Array, trees: tuple[Array, Array, Array], sampled: tuple[Array, Array]
) -> tuple[Array, Array, Array, Array, Array]:
    """See `verify`; returns the fields of `Verified` but the slots."""
    node_tokens, parents, offsets = trees
    row_tokens, row_logprobs = sampled
    new_tokens, new_nodes = np.empty((2, len(row_tokens)), np.int32)
    new_offsets, last_rows = np.zeros(len(slots) + 1, np.int64), np.empty(len(slots), np.int64)
    finish, num_new = np.empty(len(slots), np.int8), 0
    for b in range(len(slots)):
        slot, first = slots[b], offsets[b] + b
        node, position, reason = ROOT, batch.num_tokens[slot], RUNNING
        while True:
            row, index = first + 1 + node, position - batch.num_prompt_tokens[slot]
            token, logprob = row_tokens[row], row_logprobs[row]
            batch.token_ids[slot, position], batch.logprobs[slot, index] = token, logprob
            position += 1
            reason = _finish_reason(token, logprob, position, batch.max_tokens[slot], batch.end_tokens[slot])
            child = _child(node, token, node_tokens, parents, offsets[b], offsets[b + 1]) if reason == RUNNING else ROOT
            new_tokens[num_new], new_nodes[num_new] = token, child
            num_new += 1
            if child == ROOT:
                break
            node = child
        batch.num_tokens[slot] = position
        new_offsets[b + 1] = num_new
        finish[b] = reason
        last_rows[b] = row if reason == RUNNING else NO_ROW
    return new_tokens[:num_new], new_nodes[:num_new], new_offsets, finish, last_rows


@inner
def _finish_reason(token: int, logprob: float, num_tokens: int, max_tokens: int, end_tokens: Array) -> int:
    """Whether a sample ends with this token, and why."""
    if not np.isfinite(logprob):
        return NOT_FINITE
    for end_token in end_tokens:
        if end_token == token:
            return STOPPED
    return MAX_LENGTH if num_tokens == max_tokens else RUNNING


@inner
def _child(node: int, token: int, node_tokens: Array, parents: Array, begin: int, end: int) -> int:
    """The child of `node` (in the tree from `begin` to `end`) that carries `token`; `ROOT` where there is none."""
    for child in range(begin + node + 1, end):  # parents come before their children
        if parents[child] == node and node_tokens[child] == token:
            return int(child - begin)
    return ROOT


def _cut_at_stop_strings(batch: Batch, verified: Verified, stop_finder: StopFinder) -> Verified:
    """Take back what sequences got after the token that completed a stop string, and let them end there."""
    owners = np.repeat(np.arange(len(verified.slots)), verified.num_new)
    may_end = stop_finder.may_end[verified.token_ids] & batch.has_stop_strings[verified.slots][owners]
    if not may_end.any():
        return verified
    keep = np.ones(len(verified.token_ids), np.bool_)
    finish = verified.finish
    for b in np.unique(owners[may_end]).tolist():
        slot, begin, end = int(verified.slots[b]), int(verified.offsets[b]), int(verified.offsets[b + 1])
        sample = batch.samples[slot]
        assert sample is not None
        stops = sample.request.sampling.stop_strings
        text = batch.generated(slot)[sample.turn_start :]
        min_cut = 1 if finish[b] == NOT_FINITE else 0  # of NaN logits the token means nothing
        for cut in range(end - begin - 1, min_cut - 1, -1):  # tokens that would be taken back
            if stop_finder.ends(stops, text[: len(text) - cut]):
                batch.num_tokens[slot] -= cut
                keep[end - cut : end] = False
                finish[b], verified.rows[b] = STOPPED, NO_ROW
                verified.nodes[end - cut - 1] = ROOT
                break
    kept = np.concatenate([[0], keep.cumsum()])
    return replace(
        verified, token_ids=verified.token_ids[keep], offsets=kept[verified.offsets], nodes=verified.nodes[keep]
    )


def plan_moves(batch: Batch, verified: Verified, page_size: int) -> Int32Array:
    """Places of the KV of accepted paths, and where it belongs: right after its root, in the order of depth.

    Nodes are numbered by depth at least, so a path's moves only go towards the root, and none writes what a later one
    of the same path reads.

    Returns:
        [n, 3], path by path: KV index now and then, and at a path's first move the number of its moves, else 0.
    """
    arrays = batch.arrays
    where = (verified.slots, verified.offsets, verified.nodes)
    return _plan_moves(*where, arrays.num_tokens, arrays.page_table, page_size)


@numba.njit(cache=True, nogil=True)
def _plan_moves(
    slots: Int64Array,
    offsets: Int64Array,
    nodes: Int32Array,
    num_tokens: Int64Array,
    page_table: Int32Array,
    page_size: int,
) -> Int32Array:
    """See `plan_moves`."""
    moves = np.empty((len(nodes), 3), np.int32)
    num = 0
    for b in range(len(slots)):
        slot, num_new, first = slots[b], offsets[b + 1] - offsets[b], num
        after_root = num_tokens[slot] - num_new
        for level in range(num_new):
            node = nodes[offsets[b] + level]
            if node not in (ROOT, level):
                moves[num, 0] = kv_index(page_table, slot, after_root + node, page_size)
                moves[num, 1] = kv_index(page_table, slot, after_root + level, page_size)
                moves[num, 2] = 0
                num += 1
        if num > first:
            moves[first, 2] = num - first
    return moves[:num]
