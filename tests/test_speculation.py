"""Faults of drafters, and the exact distribution. Tokens with each drafter: test_reference.py."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from drafter_cases import make_drafter
from engine_cases import (
    PROMPTS,
    FakeDrafter,
    decode,
    make_request,
    options,
    outputs,
    requests_for,
    tiny_policy,
)
from scipy.stats import chisquare

from srtrl.drafters.base import DrafterBase, Int64Array
from srtrl.drafters.draft_tree import ROOT, DraftTrees
from srtrl.engine.engine import Engine
from srtrl.model.attention import PackedPlan
from srtrl.model.noise import make_rng_key
from srtrl.model.transformer import Transformer
from srtrl.types import Completion


@pytest.mark.parametrize("draft_budget", [0, 2])
def test_a_drafter_that_fails_at_an_end_says_so_and_the_next_rollout_is_whole(draft_budget: int) -> None:
    class Failing(FakeDrafter):
        def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
            super().finish(slots, completions)
            if 3 <= len(self.ends) < 10:
                self.ends += [self.ends[0]] * 10  # once
                raise OSError("no room for what it said")

    requests = requests_for(PROMPTS[:4], max_new_tokens=12)
    engine = Engine(tiny_policy(), options(slots=4, draft_budget=draft_budget), drafter=(drafter := Failing()))
    with pytest.raises(OSError, match="no room"):
        decode(engine, requests)
    assert engine.pool.num_used == 0
    assert not drafter.live
    expected = decode(Engine(tiny_policy(), options(slots=1)), requests)
    assert outputs(decode(engine, requests)) == outputs(expected)


def test_a_drafter_that_breaks_its_promises_is_named() -> None:
    """For every promise: `test_incorrect_trees_are_refused`."""

    class Wild(DrafterBase):
        def propose(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
            tokens = np.full(len(slots), 61, np.int32)
            scores, offsets = np.ones(len(slots), np.float32), np.arange(len(slots) + 1)
            return DraftTrees(token_ids=tokens, parents=tokens * 0 + ROOT, scores=scores, offsets=offsets)

    engine = Engine(tiny_policy(), options(), drafter=Wild())
    message = r"test_speculation\..*Wild proposed incorrect draft trees; .* below 61, the size of the vocabulary"
    with pytest.raises(ValueError, match=message):
        decode(engine, requests_for())
    assert engine.pool.num_used == 0


def exact_distribution(policy: Transformer, prompt: tuple[int, ...], length: int) -> np.ndarray:
    """[V ** length] float64: probability of each continuation, by the policy's softmax in float64."""
    vocab_size = policy.config.vocab_size
    probabilities = np.ones(1)
    contexts: list[tuple[int, ...]] = [()]
    for _ in range(length):
        sequences = [[*prompt, *context] for context in contexts]
        token_ids = torch.tensor([token for sequence in sequences for token in sequence])
        plan = PackedPlan([len(sequence) for sequence in sequences], "cpu")
        last = torch.tensor(np.cumsum([len(sequence) for sequence in sequences]) - 1)
        with torch.no_grad():
            logits = policy.logits(policy(token_ids, plan)[last])
        following = logits.double().softmax(-1).numpy()  # [contexts, V]
        probabilities = (probabilities[:, None] * following).ravel()
        contexts = [(*context, token) for context in contexts for token in range(vocab_size)]
    return probabilities


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_samples_with_a_full_cache_have_the_exact_distribution() -> None:
    """No equality with a reference run: with drafts that are often wrong, the distribution itself is right.

    A correct engine fails with one seed in 1,000; probabilities that are 3% off pass with fewer than one in 10,000.
    """
    num_samples, vocab_size, length, prompt = 400_000, 8, 3, (5, 3)
    policy = tiny_policy(scale=3.0, vocab_size=vocab_size)
    exact = exact_distribution(policy, prompt, length)
    assert abs(exact.sum() - 1) < 1e-6
    texts = np.random.default_rng(0).integers(0, vocab_size, (64, length), np.int32)
    drafter = make_drafter("srt", {prompt: texts}, max_rollouts=64)
    drafter.knows_noise = False
    engine = Engine(policy, options(slots=256, prefill_chunk_tokens=512, draft_budget=6), drafter=drafter)
    counts = np.zeros(len(exact), np.int64)
    for first in range(0, num_samples, 20_000):
        requests = [
            make_request(0, index, prompt, rng_key=make_rng_key(0, "train", 0, index), max_new_tokens=length)
            for index in range(first, first + 20_000)
        ]
        for completion in engine.generate(requests):
            counts[np.ravel_multi_index(tuple(completion.response.token_ids.tolist()), (vocab_size,) * length)] += 1
    metrics = engine.take_metrics()
    assert metrics["engine/verified_per_decode_step"] > 2
    assert 0.02 < metrics["engine/acceptance_depth_1"] < 0.98
    expected = exact * num_samples
    assert expected.min() > 10  # enough in every cell for chi-square
    assert chisquare(counts, expected * num_samples / expected.sum()).pvalue > 0.001
    # The test can fail: a policy whose probabilities are 3% off would not pass.
    tilted = expected * np.where(np.arange(len(exact)) % 2, 1.03, 0.97)
    assert chisquare(counts, tilted * num_samples / tilted.sum()).pvalue < 0.001
