"""A draft head: a small recurrent net that guesses the next tokens from the policy's last hidden state, for any text.

s(0) is the final hidden state that the last token was sampled from, and s(i + 1) = norm(s(i) + MLP(fc[s(i); e])), with
e the embedding of the token after s(i). The policy's own output head, on a short list of frequent tokens, makes logits
of each state, and the guess is argmax(logit / temperature + noise), with the noise that will decide the token itself.
There is no KV cache and no prefill. The recurrence is that of Hydra (arXiv 2402.05109) and ReDrafter (2403.09919).

Letters: B sequences, D model width, I width of the MLP, L listed tokens, K depths.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from srtrl.drafters.draft_tree import ROOT, DraftTrees
from srtrl.engine.runner import Runner
from srtrl.engine.step_inputs import Int32Array, Int64Array
from srtrl.model.cpu_threads import use_kernel_threads
from srtrl.model.noise import hash_row, uniform_of
from srtrl.model.transformer import Transformer, rms_norm

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]

REFUSED = -1
"""Token of a row whose logits are not finite."""
BEST, SECOND = 0, 1
EPS = 1e-6


class Guesser(Protocol):
    """A head, as the decoder needs it."""

    token_ids: Tensor
    """[L] int64, the tokens that it can guess."""

    def refresh(self, policy: Transformer) -> None:
        """A rollout begins: take over the policy's weights."""

    def aim(self, runner: Runner, rows: Int64Array) -> Tensor:
        """Get ready for `unroll` after these rows of the last step.

        Returns:
            States of all rows of that step, at an address that stays: those of `rows` are for `unroll`.
        """

    def unroll(self, hidden: Tensor, last: Tensor, k: int, take_best: Callable[[int, Tensor], Tensor]) -> None:
        """See `DraftHead.unroll`."""


class DraftHead(nn.Module):
    """The head's own weights, and its views of the policy's: these are frozen, and follow each update."""

    def __init__(self, policy: Transformer, dtype: torch.dtype, *, vocabulary: int, seed: int) -> None:
        """A fresh head, which predicts what s(0) predicts at every depth.

        Args:
            policy: Its weights are not read yet: `refresh` must follow.
            dtype: Of the policy's hidden states.
            vocabulary: Maximum number of listed tokens.
            seed: Of the weights.
        """
        super().__init__()
        width, generator = policy.config.hidden_size, torch.Generator().manual_seed(seed)
        hidden = -(-8 * width // 3)  # I

        def matrix(rows: int, columns: int) -> nn.Parameter:
            device = "meta" if policy.device.type == "meta" else "cpu"  # the same for any device
            weights = torch.randn(rows, columns, generator=generator, device=device) / math.sqrt(columns)
            return nn.Parameter(weights.to(dtype=dtype, device=policy.device))

        self.fc = matrix(width, 2 * width)
        self.gate_up = matrix(2 * hidden, width)
        self.down = nn.Parameter(torch.zeros_like(matrix(width, hidden)))
        self.norm = nn.Parameter(torch.ones(width, dtype=dtype, device=policy.device))
        self.counts = torch.zeros(policy.config.vocab_size, dtype=torch.int64)
        """[V], how often each token came in prompts and responses; on the CPU."""
        self.num_listed = min(vocabulary, policy.config.vocab_size)
        # Written in place: CUDA graphs hold their addresses.
        self.token_ids: Tensor
        """[L] int64, ascending."""
        self.output: Tensor
        """[L, D], rows of the policy's output head."""
        self.register_buffer("token_ids", torch.arange(self.num_listed, device=policy.device), persistent=False)
        self.register_buffer("output", self.fc.new_zeros(self.num_listed, width), persistent=False)

    def count(self, token_ids: npt.NDArray[np.int64]) -> None:
        """Tokens of prompts or responses, which make the list."""
        self.counts += torch.from_numpy(np.bincount(token_ids, minlength=len(self.counts)))

    @torch.no_grad()
    def refresh(self, policy: Transformer) -> None:
        """Make the list anew, and take over the policy's weights."""
        order = self.counts.argsort(descending=True, stable=True)  # of equals the first
        self.token_ids.copy_(order[: self.num_listed].sort().values)
        self.read(policy)

    def read(self, policy: Transformer) -> None:
        """Take over the policy's current embedding and output head."""
        self.embedding = policy.embedding.detach()  # [V, D]
        torch.index_select(policy.head_weight.detach(), 0, self.token_ids, out=self.output)

    def aim(self, runner: Runner, rows: Int64Array) -> Tensor:
        """See `Guesser`: the final hidden states."""
        return runner.hidden

    def embed(self, token_ids: Tensor) -> Tensor:
        """Normalised embeddings of `token_ids` [B]: [B, D]."""
        return functional.rms_norm(functional.embedding(token_ids, self.embedding), self.norm.shape, None, EPS)

    def forward(self, state: Tensor, embedded: Tensor) -> Tensor:
        """s(i) / |s(0)| and the token after it -> s(i + 1) / |s(0)|, [B, D] each; |s| is the root mean square."""
        gate, up = functional.linear(
            functional.linear(torch.cat((state, embedded), dim=-1), self.fc), self.gate_up
        ).chunk(2, dim=-1)
        return rms_norm(state + functional.linear(functional.silu(gate) * up, self.down), self.norm, EPS)

    def logits(self, state: Tensor, length: Tensor) -> Tensor:
        """Logits of the listed tokens, [B, L], of states [B, D] in units of `length` [B, 1]."""
        return functional.linear(state * length, self.output)

    def unroll(self, hidden: Tensor, last: Tensor, k: int, take_best: Callable[[int, Tensor], Tensor]) -> None:
        """Guess K tokens in a row from final hidden states [B, D] and the tokens after them [B].

        `take_best` gets a depth and its logits [B, L], and returns the tokens [B] that the next depth follows.
        """
        length = length_of(hidden)
        state = hidden / length
        for depth in range(k):
            state = self(state, self.embed(last))
            last = take_best(depth, self.logits(state, length))


def length_of(hidden: Tensor) -> Tensor:
    """Root mean square of hidden states [B, D]: [B, 1], at least `EPS`."""
    return hidden.float().square().mean(dim=-1, keepdim=True).sqrt().clamp(min=EPS).to(hidden.dtype)


@torch.inference_mode()
def draft_chains(
    head: Guesser,
    hidden: Tensor,
    token_ids: Int32Array,
    temperatures: Float32Array,
    rng_keys: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    *,
    k: int,
) -> tuple[Int32Array, Float32Array]:
    """Guess the next tokens, each from the best guess before it.

    Args:
        head: Refreshed.
        hidden: States that the sequences' last tokens were sampled from, as the head's `unroll` takes them.
        token_ids: [B], these last tokens.
        temperatures: [B]; 0 has no noise.
        rng_keys: [B].
        positions: [B], index in the response of the first token that is guessed.
        k: K.

    Returns:
        The best token and the second best, [B, K, 2], `REFUSED` where logits are not finite and after that; and how
        much better the best one is, [B, K], in nats, noise included.
    """
    tokens = np.empty((len(token_ids), k, 2), np.int32)
    margins = np.empty((len(token_ids), k), np.float32)

    def take_best(depth: int, logits: Tensor) -> Tensor:
        use_kernel_threads(8 * logits.numel())
        noise, found = (temperatures, rng_keys, positions + depth), (tokens[:, depth], margins[:, depth])
        _take_best(logits.float().numpy(), *noise, head.token_ids.numpy(), *found)
        return torch.from_numpy(np.maximum(tokens[:, depth, BEST], 0)).long()

    head.unroll(hidden, torch.from_numpy(token_ids).long(), k, take_best)
    tokens[np.logical_or.accumulate(tokens[..., BEST] == REFUSED, axis=1)] = REFUSED
    return tokens, margins


@numba.njit(parallel=True, cache=True, nogil=True)
def _take_best(
    logits: Array, temperatures: Array, rng_keys: Array, positions: Array, listed: Array, tokens: Array, margins: Array
) -> None:
    """Fill `tokens` [B, 2] and `margins` [B]; see `draft_chains`."""
    for b in numba.prange(len(logits)):
        is_noisy, row_key = temperatures[b] > 0, hash_row(rng_keys[b], positions[b])
        divisor = np.float64(temperatures[b]) if is_noisy else 1.0
        best, second, high, low = REFUSED, REFUSED, -np.inf, -np.inf
        for i in range(len(listed)):
            value = logits[b, i] / divisor
            if not np.isfinite(value):
                best, second = REFUSED, REFUSED
                break
            if is_noisy:
                uniform = uniform_of(row_key, listed[i])
                if 1.0 - uniform >= math.exp(value - low):  # -log(u) is larger still: it cannot reach the second
                    continue
                value -= math.log(-math.log(uniform))
            if value > high:
                best, second, high, low = listed[i], best, value, high
            elif value > low:
                second, low = listed[i], value
        tokens[b, BEST], tokens[b, SECOND], margins[b] = best, second, high - low if second != REFUSED else np.inf


def merge_chains(
    trees: DraftTrees, owners: Array, tokens: Int32Array, chances: Float32Array, max_nodes: Array, min_score: float
) -> DraftTrees:
    """Add the guesses of a head to the trees of a drafter, each tree's nodes in order of falling score again.

    A path that both have is accepted with the chance 1 - (1 - a)(1 - b).

    Args:
        trees: Of B sequences.
        owners: [C], ascending: the trees of the sequences with guesses.
        tokens: [C, K, 2], of `draft_chains`.
        chances: [C, K, 2]: the chance that the guess is accepted, and so are all above it.
        max_nodes: [B], largest number of nodes; the lowest scores are left out.
        min_score: Smallest score of a node that is added.
    """
    if not len(owners):
        return trees
    room = trees.num_nodes + tokens.size
    token_ids, parents, scores = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.float32)
    offsets, nodes = np.zeros(len(trees) + 1, np.int64), (token_ids, parents, scores)
    given = trees.token_ids, trees.parents, trees.scores
    _merge(given, trees.offsets, owners, tokens, chances, max_nodes, min_score, nodes, offsets)
    num = offsets[-1]
    return DraftTrees(token_ids=token_ids[:num], parents=parents[:num], scores=scores[:num], offsets=offsets)


@numba.njit(cache=True, nogil=True)
def _merge(
    given: tuple[Array, Array, Array],
    given_offsets: Array,
    owners: Array,
    tokens: Array,
    chances: Array,
    max_nodes: Array,
    min_score: float,
    nodes: tuple[Array, Array, Array],
    offsets: Array,
) -> None:
    """Fill `nodes` (tokens, parents, scores) and `offsets`; see `merge_chains`."""
    given_tokens, given_parents, given_scores = given
    chain = 0
    for b in range(len(max_nodes)):
        begin, end, start = given_offsets[b], given_offsets[b + 1], offsets[b]
        num = end - begin
        token_ids, parents, scores = nodes[0][start:], nodes[1][start:], nodes[2][start:]
        token_ids[:num], parents[:num] = given_tokens[begin:end], given_parents[begin:end]
        scores[:num] = given_scores[begin:end]
        if chain < len(owners) and owners[chain] == b:
            num = _add_chain(token_ids, parents, scores, num, tokens[chain], chances[chain], min_score)
            _sort_nodes(token_ids[:num], parents[:num], scores[:num])
            chain += 1
        offsets[b + 1] = start + min(num, max_nodes[b])


@numba.njit(cache=True, nogil=True)
def _add_chain(
    token_ids: Array, parents: Array, scores: Array, num: int, tokens: Array, chances: Array, min_score: float
) -> int:
    """Add the guesses [K, 2] for one sequence to its tree of `num` nodes; returns their number then."""
    above = ROOT
    for depth in range(len(tokens)):
        parent = above
        for kind in (SECOND, BEST):
            token, chance = tokens[depth, kind], chances[depth, kind]
            if token == REFUSED or chance < min_score:
                continue
            node = 0
            while node < num and (parents[node] != parent or token_ids[node] != token):
                node += 1
            if node == num:
                token_ids[node], parents[node], scores[node] = token, parent, chance
                num += 1
            else:
                scores[node] = 1 - (1 - scores[node]) * (1 - chance)
            if kind == BEST:
                above = node
        if above == parent:
            break
    return num


@numba.njit(cache=True, nogil=True)
def _sort_nodes(token_ids: Array, parents: Array, scores: Array) -> None:
    """Sort a tree's nodes by score; parents stay before their children, whose scores are no higher."""
    order = np.argsort(-scores, kind="mergesort")
    places = np.argsort(order)
    token_ids[:], scores[:], parents[:] = token_ids[order], scores[order], parents[order]
    for node in range(len(parents)):
        if parents[node] != ROOT:
            parents[node] = places[parents[node]]
