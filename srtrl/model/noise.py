"""A sample's RNG key, and the noise by which tokens are sampled, on the CPU: a hash of (key, position, token).

Each number is of one entry of the vocabulary, so that a drafter can compute the noise of the tokens that it considers.
`docs/examples/reference.py` has it in NumPy, and the tests in plain PyTorch (`tests/plain_kernels.py`).
"""

import hashlib

import numba
import numpy as np

from srtrl.types import Purpose

GOLDEN = 0x9E3779B97F4A7C15
"""Increment of the SplitMix64 sequence (Steele, Lea and Flood 2014)."""
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
"""Multipliers of the SplitMix64 finaliser."""
_GOLDEN = np.uint64(GOLDEN)
_MIX_1 = np.uint64(MIX_1)
_MIX_2 = np.uint64(MIX_2)


@numba.njit(inline="always")
def _mix(bits: np.uint64) -> np.uint64:
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))


@numba.njit(inline="always")
def hash_row(rng_key: np.uint64, position: int) -> np.uint64:
    """The row key of a position of a sample's response: a hash of (RNG key, position)."""
    return _mix(_mix(np.uint64(position) + _GOLDEN) ^ rng_key)


@numba.njit(inline="always")
def uniform_of(row_key: np.uint64, token: int) -> float:
    """The uniform number of a token, strictly between 0 and 1. With more than 52 bits it could round to 1."""
    bits = _mix(row_key + np.uint64(token + 1) * _GOLDEN)
    return (np.float64(bits >> np.uint64(12)) + 0.5) * 2.0**-52


def make_rng_key(seed: int, purpose: Purpose, draw_index: int, sample_index: int) -> int:
    """Return the unsigned 64-bit RNG key of one sample: a hash of everything that names it.

    In training `draw_index` is the draw's place in the data order of the whole run, and no draw is sampled in two
    steps. So the names of all samples that a run ever learns from differ, and so do their rng_keys, but for collisions
    of the hash (of n samples, n^2 / 2^65: 3e-6 for ten million). Two draws of one prompt are two draws. Names of other
    purposes differ in their second part: evaluation shares no noise with training. What is decoded early has, on
    purpose, the name of its sample.
    """
    name = f"{seed}/{purpose}/{draw_index}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
