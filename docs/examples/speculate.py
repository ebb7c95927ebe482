"""Speculative decoding with known noise, in about 60 lines: the same text in fewer steps.

    python docs/examples/speculate.py

A toy policy writes several samples for one prompt. Each token is argmax(log p + Gumbel noise), and the noise is a hash
of (sample, position, token). So a sample's text is fixed, with any drafts: drafts only decide in how many steps it
is found. A real decoder computes all nodes of a draft tree in one forward pass; here that is one call of `decode_step`.
"""

import hashlib
import math
import random
from collections import Counter, defaultdict

LETTERS, LENGTH, NUM_SAMPLES, MAX_NODES, MAX_CONTEXT = "abcdefgh", 60, 16, 8, 6


def uniform(name: str) -> float:
    """A number strictly between 0 and 1: a hash of the name."""
    return (int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big") + 0.5) / 2**48


def policy(text: str) -> dict[str, float]:
    """Log-probs of the next letter after `text`, a rather sure choice that depends on the last three letters."""
    logits = {letter: random.Random(text[-3:] + letter).gauss(0, 6) for letter in LETTERS}
    total = math.log(sum(math.exp(logit) for logit in logits.values()))
    return {letter: logit - total for letter, logit in logits.items()}


def sample(text: str, key: int) -> str:
    """The letter that sample `key` has after `text`: a function of the policy, the key and the position alone."""
    noisy = {c: p - math.log(-math.log(uniform(f"{key}/{len(text)}/{c}"))) for c, p in policy(text).items()}
    return max(noisy, key=lambda letter: noisy[letter])


def draft(trie: dict[str, Counter[str]], text: str) -> list[str]:
    """A draft tree, as the paths of its nodes: what most often followed the longest known context, best path first."""
    tree: list[str] = []
    paths = [(-1.0, "")]
    while paths and len(tree) < MAX_NODES:
        chance, path = paths.pop(paths.index(min(paths)))
        tree += [path] if path else []
        after = text + path
        contexts = (after[start:] for start in range(max(0, len(after) - MAX_CONTEXT), len(after) + 1))
        followed = next((trie[context] for context in contexts if context in trie), Counter())
        paths += [(chance * count / (followed.total() + 1), path + letter) for letter, count in followed.items()]
    return tree


def decode_step(text: str, key: int, tree: list[str]) -> str:
    """One forward pass over the root and all nodes of a draft tree, then verification: the letters to append."""
    sampled = {path: sample(text + path, key) for path in ["", *tree]}  # a GPU computes these rows together
    accepted = ""
    while accepted in sampled:  # go to the child that has the sampled letter; where there is none, stop
        accepted += sampled[accepted]
    return accepted


def rollout(drafts: bool) -> tuple[list[str], int]:
    """The texts of all samples, one after the other, and the decode steps that they took."""
    trie: dict[str, Counter[str]] = defaultdict(Counter)  # of each context, the letters that followed it
    texts, steps = [], 0
    for key in range(NUM_SAMPLES):
        text = ""
        while len(text) < LENGTH:
            found = decode_step(text, key, draft(trie, text) if drafts else [])[: LENGTH - len(text)]
            for letter in found:
                for start in range(max(0, len(text) - MAX_CONTEXT), len(text) + 1):
                    trie[text[start:]][letter] += 1
                text += letter
            steps += 1
        texts.append(text)
    return texts, steps


if __name__ == "__main__":
    for drafts in (False, True):
        texts, steps = rollout(drafts)
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
        print(f"{'with' if drafts else 'without'} drafts: {steps} decode steps, hash of all texts {digest}")
    print(texts[0], texts[1], sep="\n")
