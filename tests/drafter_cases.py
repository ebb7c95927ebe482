"""Drafters driven by hand: requests, and a step that proposes, checks and observes as the engine does."""

from collections.abc import Mapping, Sequence

import numpy as np
from bench_cases import recorded
from engine_cases import make_request, make_response

from srtrl.bench.recorded import feed_drafter
from srtrl.bench.replay_loop import count_accepted
from srtrl.drafters.base import DrafterBase, Int32Array, end_to_end
from srtrl.drafters.draft_tree import ROOT, DraftTree, check_trees
from srtrl.resolve import resolve_class
from srtrl.types import Completion, Purpose, Request, TopTokens

VOCAB = 1000
TEXT = list(np.random.default_rng(1).integers(0, 50, 60).tolist())
OTHER = list(np.random.default_rng(2).integers(0, 50, 60).tolist())


def make_drafter(name: str, history: Mapping[tuple[int, ...], Int32Array], **options: object) -> DrafterBase:
    """A drafter by its name in a recipe that has seen these responses, [number, L] by prompt."""
    drafter_class = resolve_class("srtrl.drafters", name, "Drafter")
    drafter: DrafterBase = drafter_class(drafter_class.Options(**options))
    prompts = [recorded(str(number), *texts) for number, texts in enumerate(history.items())]
    feed_drafter(drafter, prompts)
    return drafter


def request(prompt: Sequence[int] = (1, 2), rng_key: int = 0, *, purpose: Purpose = "train") -> Request:
    return make_request(prompt=prompt, rng_key=rng_key, purpose=purpose, max_new_tokens=1000)


def completion(request: Request, tokens: Sequence[int]) -> Completion:
    return Completion(request=request, response=make_response(tokens))


def start(drafter: DrafterBase, requests: Mapping[int, Request]) -> None:
    drafter.start(np.array(list(requests), np.int64), list(requests.values()))


def propose(
    drafter: DrafterBase, slots: Sequence[int], max_nodes: int | Sequence[int] = 8, min_score: float = 0.0
) -> list[DraftTree]:
    """Draft, and check what the engine relies on."""
    limits = np.array([max_nodes] * len(slots) if isinstance(max_nodes, int) else max_nodes, np.int64)
    trees = drafter.propose(np.array(slots, np.int64), limits, min_score)
    check_trees(trees, limits, VOCAB, "the drafter")
    for tree in trees:
        siblings = list(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True))
        assert len(set(siblings)) == len(siblings), "two children of a node carry the same token"
        scores = tree.scores.tolist()
        assert scores == sorted(scores, reverse=True)
        above = [1.0 if parent == ROOT else scores[parent] for parent in tree.parents]
        assert all(0 <= score <= limit for score, limit in zip(scores, above, strict=True))
    return list(trees)


def observe(drafter: DrafterBase, tokens: Mapping[int, Sequence[int]], top: TopTokens | None = None) -> None:
    observed = np.array(list(tokens), np.int64), *end_to_end(list(tokens.values()))
    if top is None:
        drafter.observe(*observed)
    else:
        drafter.observe_top(*observed, top)


def decode(
    drafter: DrafterBase, slot: int, tokens: Sequence[int], *, max_nodes: int = 8, top: TopTokens | None = None
) -> int:
    """Decode a live sample to the given tokens by drafts and verification; returns the number of accepted tokens.

    `top`: what was likely in place of each token.
    """
    num_accepted = done = 0
    while done < len(tokens):
        (tree,) = propose(drafter, [slot], max_nodes)
        emitted = tokens[done : done + count_accepted(tree, tokens[done:]) + 1]
        rows = slice(done, done + len(emitted))
        of_emitted = None if top is None else TopTokens(token_ids=top.token_ids[rows], logprobs=top.logprobs[rows])
        observe(drafter, {slot: emitted}, of_emitted)
        num_accepted += len(emitted) - 1
        done += len(emitted)
    return num_accepted


def random_draft(random: np.random.Generator, max_nodes: int, vocab_size: int = 4) -> DraftTree:
    """As drafters make them: siblings carry distinct tokens, and scores fall."""
    nodes: list[tuple[float, int, int]] = []  # score, parent, token
    for _ in range(random.integers(0, max_nodes + 1)):
        parent, token = int(random.integers(ROOT, len(nodes))), int(random.integers(0, vocab_size))
        if (parent, token) not in [node[1:] for node in nodes]:
            above = nodes[parent][0] if parent != ROOT else 1.0
            nodes.append((above * random.choice([0.5, 0.9, 1.0]), parent, token))
    order = sorted(range(len(nodes)), key=lambda node: -nodes[node][0])
    return DraftTree(
        token_ids=np.array([nodes[node][2] for node in order], np.int32),
        parents=np.array([order.index(p) if p != ROOT else ROOT for p in (nodes[n][1] for n in order)], np.int32),
        scores=np.array([nodes[node][0] for node in order], np.float32),
    )


def run(
    drafter: DrafterBase, request: Request, tokens: Sequence[int], *, slot: int = 0, top: TopTokens | None = None
) -> int:
    """A whole sample, from start to finish; returns the number of accepted tokens."""
    drafter.expected_tokens(request)
    start(drafter, {slot: request})
    num_accepted = decode(drafter, slot, tokens, top=top)
    drafter.finish([slot], [completion(request, tokens)])
    return num_accepted


def chain_of(tree: DraftTree) -> list[int]:
    """Tokens of the path that always takes the best child."""
    tokens: list[int] = []
    node = ROOT
    for index, (token, parent) in enumerate(zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)):
        if parent == node:
            tokens.append(token)
            node = index
    return tokens
