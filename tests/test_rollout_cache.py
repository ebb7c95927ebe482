"""The rollout cache: what is kept, what goes first, and the file."""

from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from srtrl.drafters.distributions import NO_DISTRIBUTIONS, SIZE, unknown
from srtrl.drafters.rollout_cache import KEPT_SHARE, PROMPT_BYTES, ROLLOUT_BYTES, TOKEN_BYTES, RolloutCache

ROOMY = 1 << 40


def as_lists(cache: RolloutCache) -> dict[tuple[int, ...], list[list[int]]]:
    return {prompt: [rollout.tokens.tolist() for rollout in cache.rollouts(prompt)] for prompt in cache.prompts()}


def size_of(num_prompt_tokens: int, *lengths: int) -> int:
    """Bytes of one prompt and its rollouts."""
    return PROMPT_BYTES + TOKEN_BYTES * (num_prompt_tokens + sum(lengths)) + ROLLOUT_BYTES * len(lengths)


def test_every_prompt_is_trimmed_before_the_least_recently_added_to_is_dropped() -> None:
    room_for_two_each = 4 * size_of(1, 5, 5)
    cache = RolloutCache(max_rollouts=8, max_bytes=room_for_two_each)
    for prompt in range(4):
        for rollout in range(8):
            cache.add((prompt,), [rollout] * 5)
    assert all(rollouts[-1] == [7] * 5 for rollouts in as_lists(cache).values())
    assert {len(rollouts) for rollouts in as_lists(cache).values()} <= {1, 2, 3}, "3: added since memory was short"
    assert len(cache._rollouts) == 4
    assert 0.8 * room_for_two_each < cache.num_bytes <= room_for_two_each
    cache = RolloutCache(max_rollouts=8, max_bytes=int(4 * size_of(1, 5) / KEPT_SHARE) + 1)
    for prompt in (0, 1, 2, 3, 0, 5):
        cache.add((prompt,), [prompt] * 5)
    assert set(as_lists(cache)) == {(0,), (2,), (3,), (5,)}


def test_distributions_are_dropped_before_rollouts() -> None:
    cache = RolloutCache(max_rollouts=8, max_bytes=2 * (size_of(1, 5, 5) + 5 * 4 * SIZE))
    for number in range(4):
        cache.add((number % 2,), [number] * 5, unknown(5))
    assert as_lists(cache) == {(0,): [[0] * 5, [2] * 5], (1,): [[1] * 5, [3] * 5]}
    assert [len(one.distributions) for prompt in cache.prompts() for one in cache.rollouts(prompt)] == [0, 0, 0, 5]


Additions = st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 9), max_size=30)), max_size=60)


@given(Additions, st.integers(0, 6000))
@example([(0, [0]), (0, [0, 0])], 648)
def test_the_accounts_agree_with_the_contents(additions: list[tuple[int, list[int]]], max_bytes: int) -> None:
    cache = RolloutCache(max_rollouts=3, max_bytes=max_bytes)
    for number, (prompt, tokens) in enumerate(additions):
        cache.add((prompt,), tokens, unknown(len(tokens)) if number % 2 else NO_DISTRIBUTIONS)
        held = as_lists(cache)
        known = [one.distributions.nbytes for prompt in cache.prompts() for one in cache.rollouts(prompt)]
        for key, rollouts in held.items():
            assert cache.mean_tokens(key) == sum(map(len, rollouts)) / len(rollouts)
        assert cache.num_bytes == sum(size_of(1, *map(len, rollouts)) for rollouts in held.values()) + sum(known)
        assert cache.num_bytes <= max_bytes
        newest = {
            key: [
                tokens
                for prompt, tokens in additions[: number + 1]
                if (prompt,) == key and tokens and size_of(1, len(tokens)) <= max_bytes  # others never came to stay
            ]
            for key in held
        }
        assert all(newest[key][-len(rollouts) :] == rollouts for key, rollouts in held.items())


def filled() -> RolloutCache:
    cache = RolloutCache(max_rollouts=3, max_bytes=ROOMY)
    for prompt, tokens in [((1, 2), [3, 4]), ((5,), [6]), ((), [7, 8, 9]), ((1, 2), [5, 6, 7])]:
        cache.add(prompt, tokens)
    return cache


def test_save_and_load(tmp_path: Path) -> None:
    cache = filled()
    cache.save(tmp_path / "a.safetensors")
    filled().save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    RolloutCache(max_rollouts=3, max_bytes=ROOMY).save(tmp_path / "empty.safetensors")
    read = RolloutCache(max_rollouts=3, max_bytes=ROOMY)
    for name in ("a", "empty"):
        read.load(tmp_path / f"{name}.safetensors")
        assert as_lists(read) == as_lists(cache)
        assert read.prompts() == cache.prompts()
        assert read.num_bytes == cache.num_bytes
    narrower = RolloutCache(max_rollouts=1, max_bytes=ROOMY)
    narrower.load(tmp_path / "a.safetensors")
    assert as_lists(narrower) == {(5,): [[6]], (): [[7, 8, 9]], (1, 2): [[5, 6, 7]]}
