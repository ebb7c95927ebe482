"""Drafters driven by hand: requests, and a step that proposes, checks and observes as the engine does."""

from collections.abc import Sequence

import numpy as np

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_tree import ROOT, DraftTree
from srtrl.types import Completion, Purpose, Request, SamplingParams

VOCAB = 1000
TEXT = list(np.random.default_rng(1).integers(0, 50, 60).tolist())
OTHER = list(np.random.default_rng(2).integers(0, 50, 60).tolist())


def request(
    prompt: Sequence[int] = (1, 2), rng_key: int = 0, *, purpose: Purpose = "train", is_run_ahead: bool = False
) -> Request:
    return Request(
        prompt_id=str(prompt),
        prompt_token_ids=tuple(prompt),
        draw_index=0,
        sample_index=0,
        rng_key=rng_key,
        sampling=SamplingParams(max_new_tokens=1000),
        purpose=purpose,
        is_run_ahead=is_run_ahead,
    )


def completion(request: Request, tokens: Sequence[int]) -> Completion:
    return Completion(
        request=request,
        token_ids=list(tokens),
        rollout_logprobs=[0.0] * len(tokens),
        finish_reason="stop",
        policy_version=0,
    )


def propose(drafter: DrafterBase, sequence_ids: Sequence[int], max_nodes: int | Sequence[int] = 8) -> list[DraftTree]:
    """Draft, and check what the engine relies on."""
    most = [max_nodes] * len(sequence_ids) if isinstance(max_nodes, int) else list(max_nodes)
    trees = drafter.propose(sequence_ids, most)
    assert len(trees) == len(sequence_ids)
    assert len(trees.token_ids) == len(trees.parents) == len(trees.scores) == trees.offsets[-1]
    for tree, at_most in zip(trees, most, strict=True):
        tree.check(VOCAB)
        assert tree.num_nodes <= at_most
        scores = tree.scores.tolist()
        assert scores == sorted(scores, reverse=True)
        above = [1.0 if parent == ROOT else scores[parent] for parent in tree.parents]
        assert all(0 <= score <= limit for score, limit in zip(scores, above, strict=True))
    return list(trees)


def decode(drafter: DrafterBase, sequence_id: int, tokens: Sequence[int], *, max_nodes: int = 8) -> list[int]:
    """Decode a live sample to the given tokens by drafts and verification; returns the accepted tokens of each step."""
    accepted = []
    done = 0
    while done < len(tokens):
        (tree,) = propose(drafter, [sequence_id], max_nodes)
        path = walk(tree, tokens[done:])
        emitted = tokens[done : done + len(path) + 1]
        drafter.observe([sequence_id], [list(emitted)])
        accepted.append(len(emitted) - 1)
        done += len(emitted)
    return accepted


def walk(tree: DraftTree, tokens: Sequence[int]) -> list[int]:
    """Nodes of the tree that carry the tokens, from the root on, as far as they go."""
    path: list[int] = []
    children = {
        (int(parent), int(token)): node
        for node, (parent, token) in enumerate(zip(tree.parents, tree.token_ids, strict=True))
    }
    for token in tokens:
        node = children.get((path[-1] if path else ROOT, token))
        if node is None:
            break
        path.append(node)
    return path


def run(drafter: DrafterBase, sequence_id: int, request: Request, tokens: Sequence[int]) -> list[int]:
    """A whole sample, from start to finish."""
    if not request.is_run_ahead:
        drafter.expected_tokens(request)
    drafter.start(sequence_id, request)
    accepted = decode(drafter, sequence_id, tokens)
    drafter.finish(sequence_id, None if request.is_run_ahead else completion(request, tokens))
    return accepted


def chain_of(tree: DraftTree) -> list[int]:
    """Tokens of the path that always takes the best child."""
    tokens: list[int] = []
    node = ROOT
    for index, (token, parent) in enumerate(zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)):
        if parent == node:
            tokens.append(token)
            node = index
    return tokens
