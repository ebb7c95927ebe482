"""What the engine did since it was last asked: counts and seconds under `engine/`."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import DraftTrees
from srtrl.engine.verify import Verified

MAX_DEPTH = 8
"""Acceptance is reported for depths of the draft trees up to this."""

STAGES = {
    "schedule": "draft",
    "propose": "draft",
    "choose": "draft",
    "rows": "forward",
    "forward": "forward",
    "wait": "forward",
    "verify": "sample",
    "commit": "commit",
    "observe": "commit",
    "finish": "commit",
}
"""The stages of a decode step in their order, and the metric `engine/<name>_seconds` in which each is counted."""


class StageClock:
    """Wall-clock seconds of the stages of one decode step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started = self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """The stage that ends now began where the one before it ended."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """From the start of the step to the end of the last stage."""
        return self._last - self.started


@dataclass(slots=True)
class EngineStats:
    """Sums over decode steps. Tokens and drafts are those of primary samples; run-ahead is counted apart."""

    num_steps: int = 0
    num_decodes: int = 0
    """Sequence-steps: how often a primary sample sampled."""
    num_tokens: int = 0
    """Generated tokens."""
    num_prefill_tokens: int = 0
    """Prompt tokens computed, recomputation after preemption included."""
    num_drafts: int = 0
    """Sequence-steps with a draft."""
    num_hits: int = 0
    """Drafts of which at least one node was accepted."""
    num_draft_nodes: int = 0
    num_accepted: int = 0
    tries_by_depth: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(MAX_DEPTH, np.int64))
    """Accepted paths that stood before a drafted continuation of depth 1, 2, ..."""
    accepted_by_depth: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(MAX_DEPTH, np.int64))
    """Those of them that had it."""
    num_run_ahead_rows: int = 0
    run_ahead_seconds: float = 0.0
    """Estimated: cost of the steps less their cost without the run-ahead's rows."""
    saved_seconds: float = 0.0
    """Estimated: cost of the tokens one per step, less what they took."""
    priced_seconds: float = 0.0
    """Cost of the steps by a given cost curve (benchmarks)."""
    max_pages: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage."""

    def add_verified(self, verified: Verified, trees: DraftTrees, num_primaries: int) -> int:
        """Count what the primaries' drafts brought; returns the primaries' tokens.

        `trees` are those that were verified, one for each sequence of `verified`; the primaries come first.
        """
        num_tokens = int(verified.offsets[num_primaries])
        self.num_decodes += num_primaries
        self.num_tokens += num_tokens
        num_nodes = int(trees.offsets[num_primaries])
        if num_nodes:
            sizes = trees.sizes[:num_primaries]
            accepted = verified.num_new[:num_primaries] - 1
            owners = np.repeat(np.arange(num_primaries), sizes)
            # A path that ended before drafted children has tried one depth more than it reached.
            missed = np.zeros(num_primaries, np.int64)
            missed[owners[trees.parents[:num_nodes] == verified.last_nodes[owners]]] = 1
            self.accepted_by_depth += _at_least(accepted)
            self.tries_by_depth += _at_least(accepted + missed)
            self.num_accepted += int(accepted.sum())
            self.num_draft_nodes += num_nodes
            self.num_drafts += int((sizes > 0).sum())
            self.num_hits += int((accepted > 0).sum())
        return num_tokens

    def add_seconds(self, clock: StageClock) -> None:
        """Add one step's time."""
        self.num_steps += 1
        for stage, seconds in clock.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        """Flat metrics; shares and means are over the steps since the last look."""
        steps, decodes, drafts = max(self.num_steps, 1), max(self.num_decodes, 1), max(self.num_drafts, 1)
        metrics = {
            "engine/decode_steps": self.num_steps,
            "engine/tokens": self.num_tokens,
            "engine/tokens_per_decode_step": self.num_tokens / decodes,
            "engine/verified_per_decode_step": 1 + self.num_draft_nodes / decodes,
            "engine/verified_per_token": (decodes + self.num_draft_nodes) / max(self.num_tokens, 1),
            "engine/accepted_per_draft": self.num_accepted / drafts,
            "engine/draft_hit_rate": self.num_hits / drafts,
            "engine/prefill_tokens": self.num_prefill_tokens,
            "engine/slots_in_use_mean": self.num_decodes / steps,
            "engine/pages_in_use_max": self.max_pages,
            "engine/saved_seconds": self.saved_seconds,
            "engine/run_ahead_rows": self.num_run_ahead_rows,
            "engine/run_ahead_seconds": self.run_ahead_seconds,
        }
        for part in dict.fromkeys(STAGES.values()):
            metrics[f"engine/{part}_seconds"] = sum(
                seconds for stage, seconds in self.seconds.items() if STAGES[stage] == part
            )
        if self.seconds.get("wait"):
            total = sum(self.seconds.values())
            metrics["engine/host_seconds"] = total - self.seconds["wait"]
            metrics["engine/host_share"] = metrics["engine/host_seconds"] / total
        if self.priced_seconds:
            metrics["engine/priced_seconds"] = self.priced_seconds
        for depth, (tries, accepted) in enumerate(zip(self.tries_by_depth, self.accepted_by_depth, strict=True), 1):
            if tries:
                metrics[f"engine/acceptance_depth_{depth}"] = float(accepted / tries)
        return metrics


def merge_rank_metrics(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The engine's metrics of a whole run from those of its ranks, each of which has `engine/rank_seconds`.

    Seconds are means over ranks. Shares, rates and numbers per something are means weighted by the sequence-steps of
    each rank. Of the caches, which are the same on all ranks, it is the maximum. Everything else is a sum.
    """
    merged: dict[str, float] = {}
    steps = [row["engine/decode_steps"] * row["engine/slots_in_use_mean"] for row in rows]
    for name in dict.fromkeys(name for row in rows for name in row):
        values, weights = zip(
            *[(row[name], weight) for row, weight in zip(rows, steps, strict=True) if name in row], strict=True
        )
        if name.endswith("_seconds"):
            merged[name] = sum(values) / len(rows)
        elif any(part in name for part in ("_share", "_rate", "_per_", "_depth_", "_confidence")):
            merged[name] = float(np.average(values, weights=weights if sum(weights) else None))
        else:
            merged[name] = max(values) if "/cache_" in name else sum(values)
    slowest = max(row["engine/rank_seconds"] for row in rows)
    merged["engine/ranks_idle_share"] = 1 - merged.pop("engine/rank_seconds") / slowest if slowest else 0.0
    merged["engine/rank_seconds_max"] = slowest
    return merged


def _at_least(depths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[MAX_DEPTH], how many of `depths` are at least 1, 2, ..."""
    counts = np.bincount(np.minimum(depths, MAX_DEPTH), minlength=MAX_DEPTH + 1)
    return counts[::-1].cumsum()[::-1][1:]
