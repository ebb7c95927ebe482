"""Training steps side by side: one works at a time, rollouts keep pace with each other, updates come last."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from srtrl.bench.side_by_side import SLICE_TOKENS, side_by_side
from srtrl.engine.engine import Engine
from srtrl.engine.stats import EngineStats


@dataclass
class Decoder:
    """An engine whose steps give some tokens, and the rest of a training step; they write down what they do."""

    name: str
    tokens_per_step: int
    log: list[tuple[str, str, int]]
    num_tokens: int = 6000
    fails_at: int | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    after_step: Callable[[], None] | None = None

    @property
    def has_work(self) -> bool:
        return self.stats.num_tokens < self.num_tokens

    def work(self) -> None:
        self.log.append((self.name, "begin", 0))
        while self.has_work:
            self.stats.num_tokens = min(self.stats.num_tokens + self.tokens_per_step, self.num_tokens)
            self.log.append((self.name, "decode", self.stats.num_tokens))
            if self.fails_at is not None and self.stats.num_tokens >= self.fails_at:
                raise ValueError(f"{self.name} fails")
            assert self.after_step is not None
            self.after_step()
        self.log.append((self.name, "update", 0))
        self.log.append((self.name, "end", 0))


def decode(*decoders: Decoder) -> list[float]:
    engines = [cast(Engine, decoder) for decoder in decoders]
    threads: list[Any] = []
    try:
        return side_by_side(engines, [decoder.work for decoder in decoders], set_threads=lambda: threads.append(1))
    finally:
        assert len(threads) == len(decoders)
        assert all(decoder.after_step is None for decoder in decoders)


@pytest.mark.parametrize("paces", [(64, 230), (230, 64), (64, 64, 300), (3000, 10)])
def test_rollouts_keep_pace_and_updates_follow_one_by_one(paces: tuple[int, ...]) -> None:
    log: list[tuple[str, str, int]] = []
    waited = decode(*(Decoder(str(index), pace, log) for index, pace in enumerate(paces)))
    assert len(waited) == len(paces)
    assert all(seconds >= 0 for seconds in waited)
    done = dict.fromkeys(map(str, range(len(paces))), 0)
    for name, what, num_tokens in log:
        if what == "decode":
            behind = min(tokens for tokens in done.values())
            assert done[name] < behind + SLICE_TOKENS, "who is a slice ahead waits"
            done[name] = num_tokens
    whats = [what for _, what, _ in log]
    first_update = whats.index("update")
    assert "decode" not in whats[first_update:]
    assert whats[first_update:] == ["update", "end"] * len(paces), "one by one"
    assert sorted(name for name, what, _ in log if what == "end") == sorted(done)


def test_one_alone_never_waits_for_long() -> None:
    log: list[tuple[str, str, int]] = []
    (waited,) = decode(Decoder("0", 100, log))
    assert [what for _, what, _ in log] == ["begin", *["decode"] * 60, "update", "end"]
    assert waited < 1


@pytest.mark.parametrize("fails_at", [1, 3000, 6000])
def test_an_error_ends_neither_the_others_nor_goes_unheard(fails_at: int) -> None:
    log: list[tuple[str, str, int]] = []
    with pytest.raises(ValueError, match="1 fails"):
        decode(Decoder("0", 100, log), Decoder("1", 100, log, fails_at=fails_at), Decoder("2", 100, log))
    assert [name for name, what, _ in log if what == "end"] == ["0", "2"]
