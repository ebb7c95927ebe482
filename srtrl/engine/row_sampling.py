"""Which token each row of a step is asked for: the requests of the rows, their noise, and tokens that are given."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.drafters.draft_tree import DraftTrees
from srtrl.engine.sampler import filter_top_k_top_p, sample_rows
from srtrl.engine.sequence import Sequence
from srtrl.engine.tree_rows import root_rows

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(kw_only=True, slots=True, frozen=True)
class RowSampling:
    """How each of N rows is sampled."""

    temperatures: npt.NDArray[np.float32]
    rng_keys: npt.NDArray[np.uint64]
    positions: Int64Array
    """Index of the token within the response."""
    top_k: Int64Array
    top_p: npt.NDArray[np.float64]

    @staticmethod
    def of(sequences: SequenceOf[Sequence]) -> "RowSampling":
        """One row a sequence: its next token."""
        params = [sequence.request.sampling for sequence in sequences]
        return RowSampling(
            temperatures=np.array([param.temperature for param in params], np.float32),
            rng_keys=np.array([sequence.request.rng_key for sequence in sequences], np.uint64),
            positions=np.array([sequence.num_generated for sequence in sequences], np.int64),
            top_k=np.array([param.top_k for param in params], np.int64),
            top_p=np.array([param.top_p for param in params], np.float64),
        )

    @property
    def is_filtered(self) -> npt.NDArray[np.bool_]:
        """[N]: whether top-k or top-p takes tokens away."""
        return (self.top_k > 0) | (self.top_p < 1)

    def take(self, rows: Int64Array | Int32Array, depths: Int32Array | int = 0) -> "RowSampling":
        """Some of the rows, or rows `depths` below them in the draft tree."""
        return RowSampling(
            temperatures=self.temperatures[rows],
            rng_keys=self.rng_keys[rows],
            positions=self.positions[rows] + depths,
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
        )

    def sample(self, logits: Tensor, forced: Int32Array) -> tuple[Int64Array, npt.NDArray[np.float32]]:
        """Tokens and log-probs, [N] each, from `logits` [N, V]; where `forced` [N] is not -1 that token is taken.

        A log-prob is of the tempered distribution without top-k or top-p, and its bits do not depend on other rows.
        """
        token_ids, logprobs = sample_rows(logits, self.temperatures, self.rng_keys, self.positions, forced)
        rows = np.flatnonzero(self.is_filtered)
        if len(rows):
            some, device = self.take(rows), logits.device
            whole = logits[torch.from_numpy(rows).to(device)]
            temperatures, top_k, top_p = (
                torch.from_numpy(array).to(device) for array in (some.temperatures, some.top_k, some.top_p)
            )
            filtered = filter_top_k_top_p(whole, temperatures, top_k, top_p)
            noise = (some.temperatures, some.rng_keys, some.positions)
            token_ids[rows], _ = sample_rows(filtered, *noise, forced[rows])
            _, logprobs[rows] = sample_rows(whole, *noise, token_ids[rows].astype(np.int32))
        return token_ids, logprobs


@dataclass(kw_only=True, slots=True, frozen=True)
class ForcedTokens:
    """Recorded responses that samples repeat, for benchmarks on a trace: each row is sampled, then told its token."""

    by_rng_key: Mapping[int, Int32Array]
    """Responses by `Request.rng_key`. A rng_key that is not here is sampled, and so is what follows a response."""

    def upcoming(self, sequences: SequenceOf[Sequence], trees: DraftTrees) -> Int32Array:
        """[rows]: from its root's row on, a sequence's next recorded tokens; -1 behind the last."""
        forced = no_tokens(trees)
        firsts, sizes = root_rows(trees).tolist(), trees.sizes.tolist()
        for sequence, first, size in zip(sequences, firsts, sizes, strict=True):
            response = self.by_rng_key.get(sequence.request.rng_key)
            if response is not None:
                ahead = response[sequence.num_generated : sequence.num_generated + 1 + size]
                forced[first : first + len(ahead)] = ahead
        return forced


def no_tokens(trees: DraftTrees) -> Int32Array:
    """[rows] of -1: nothing is forced."""
    return np.full(len(trees) + trees.num_nodes, -1, np.int32)
