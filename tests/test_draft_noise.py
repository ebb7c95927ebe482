"""Drafts that know the noise: trust is learned from such samples alone.

Such drafts are those of the twin in `test_texts.py`.
"""

from dataclasses import replace

import numpy as np
import torch
from drafter_cases import decode, request, run, start
from hypothesis import example, given
from hypothesis import strategies as st
from plain_kernels import uniform_noise

from srtrl.drafters.srt import Drafter, SrtOptions
from srtrl.drafters.trust import REACHED
from srtrl.model.noise import make_rng_key
from srtrl.types import TopTokens

OPTIONS = SrtOptions(other_prompts=False)
VOCAB, LENGTH, NUM_SAMPLES, NUM_TOP = 20, 60, 24, 8
CHANCES = np.random.default_rng(0).dirichlet(np.full(VOCAB, 0.12), VOCAB + 1)
"""[last token, next token] of a known policy, with an entropy of about 1 nat; the last row is of the beginning."""
KEYS = [make_rng_key(0, "train", 0, index) for index in range(NUM_SAMPLES)]


def sampled_texts() -> list[list[int]]:
    """Samples of the known policy, by their keys' noise."""
    signed = np.array(KEYS, np.uint64).view(np.int64)
    texts = []
    for key in signed.tolist():
        noise = uniform_noise(torch.full((LENGTH,), key), torch.arange(LENGTH), VOCAB).numpy()
        text, last = [], VOCAB
        for position in range(LENGTH):
            last = int(np.argmax(np.log(CHANCES[last]) - np.log(-np.log(noise[position]))))
            text.append(last)
        texts.append(text)
    return texts


def top_of(text: list[int]) -> TopTokens:
    """Likely tokens of the policy in place of each token."""
    rows = CHANCES[[VOCAB, *text[:-1]]]
    ids = np.argsort(-rows, axis=1)[:, :NUM_TOP]
    return TopTokens(
        token_ids=ids.astype(np.int32), logprobs=np.log(np.take_along_axis(rows, ids, 1)).astype(np.float32)
    )


def taught(*, knows_noise: bool, temperature: float = 1.0) -> Drafter:
    """A drafter after all samples."""
    drafter = Drafter(OPTIONS)
    drafter.knows_noise = knows_noise
    for key, text in zip(KEYS, sampled_texts(), strict=True):
        one = request(rng_key=key)
        run(drafter, replace(one, sampling=replace(one.sampling, temperature=temperature)), text)
        drafter.end_step()
    return drafter


def test_probabilities_of_other_prompts_tell_more_than_their_tokens() -> None:
    """Each prompt has one sample: its drafts come from the table of all prompts."""
    accepted = []
    for with_top in (False, True):
        drafter = Drafter()
        accepted.append(
            [
                run(drafter, request(prompt=(number,), rng_key=key), text, top=top_of(text) if with_top else None)
                for number, (key, text) in enumerate(zip(KEYS, sampled_texts(), strict=True))
            ]
        )
    assert sum(accepted[1]) > 1.1 * sum(accepted[0])
    assert sum(accepted[1][:4]) > 1.3 * sum(accepted[0][:4]), "most of all where little is known"


def test_trust_is_learned_where_tokens_follow_the_noise() -> None:
    for knows_noise, temperature in ((False, 1.0), (True, 0.0)):
        drafter = taught(knows_noise=knows_noise, temperature=temperature)
        assert not drafter._trust["train"].any()
    assert taught(knows_noise=True)._trust["train"][:, REACHED].sum() > 100


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(0, 2**64 - 1), st.integers(1, 4))
@example([1, 2, 2, 1, 2, 2, 1, 2, 2], 7869436380294478804, 4)
def test_what_any_sample_teaches_is_a_number(text: list[int], rng_key: int, max_nodes: int) -> None:
    """Shares of a token are subtracted from 1: what is left is no weight below 0."""
    drafter = Drafter(OPTIONS)
    start(drafter, {0: request(rng_key=rng_key)})
    decode(drafter, 0, text, max_nodes=max_nodes)
    assert (drafter._trust["train"] >= 0).all()
