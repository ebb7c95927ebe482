"""What the engine did since the last look: counts and seconds, reported under `engine/`."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import ROOT, DraftTrees
from srtrl.engine.verify import Walk

MAX_DEPTH = 8
"""Acceptance is reported for the first so many depths of the draft trees."""


@dataclass(slots=True, kw_only=True)
class StepSeconds:
    """Wall-clock seconds of the parts of one decode step."""

    draft: float
    """Scheduling, drafting and choosing the nodes."""
    forward: float
    sample: float
    """Sampling, verification and stop checks."""
    commit: float
    """Moving accepted KV, telling the drafter, taking finished samples out."""
    waited: float = 0.0
    """Of `forward`: the host did nothing but wait for a CUDA device."""

    @property
    def total(self) -> float:
        """The whole step."""
        return self.draft + self.forward + self.sample + self.commit


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
    """Walks that stood before a drafted continuation of depth 1, 2, ..."""
    accepted_by_depth: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(MAX_DEPTH, np.int64))
    """Those of them that went on."""
    num_run_ahead_rows: int = 0
    run_ahead_seconds: float = 0.0
    """Estimated: cost of the steps less their cost without the run-ahead's rows."""
    saved_seconds: float = 0.0
    """Estimated: what the tokens would have cost one a step, less what they cost."""
    priced_seconds: float = 0.0
    """What the steps would have taken by a given cost curve (benchmarks)."""
    max_pages: int = 0
    seconds: StepSeconds = field(default_factory=lambda: StepSeconds(draft=0, forward=0, sample=0, commit=0))

    def add_walks(self, walks: SequenceOf[Walk], trees: DraftTrees, num_primaries: int) -> int:
        """Count what the primaries' drafts brought; returns the primaries' tokens.

        `trees` are those that were verified, one a walk; the primaries come first.
        """
        self.num_decodes += num_primaries
        self.num_tokens += num_primaries
        if not trees.num_nodes:
            return num_primaries  # no draft, nothing accepted: most steps where drafts do not pay
        last_nodes = np.array([walk.accepted[-1] if len(walk.accepted) else ROOT for walk in walks[:num_primaries]])
        reached = np.array([len(walk.accepted) for walk in walks[:num_primaries]], np.int64)
        sizes = trees.sizes[:num_primaries]
        num_nodes = int(sizes.sum())
        owners = np.repeat(np.arange(num_primaries), sizes)
        # A walk that stopped before drafted children has tried one depth more than it reached.
        is_child = trees.parents[:num_nodes] == last_nodes[owners] if num_nodes else np.empty(0, bool)
        missed = np.bincount(owners[is_child], minlength=num_primaries) > 0
        self.accepted_by_depth += _at_least(reached)
        self.tries_by_depth += _at_least(reached + missed)
        num_accepted = int(reached.sum())
        self.num_tokens += num_accepted
        self.num_accepted += num_accepted
        self.num_draft_nodes += num_nodes
        self.num_drafts += int((sizes > 0).sum())
        self.num_hits += int((reached > 0).sum())
        return num_primaries + num_accepted

    def add_seconds(self, seconds: StepSeconds) -> None:
        """Add one step's time."""
        self.num_steps += 1
        self.seconds = StepSeconds(
            draft=self.seconds.draft + seconds.draft,
            forward=self.seconds.forward + seconds.forward,
            sample=self.seconds.sample + seconds.sample,
            commit=self.seconds.commit + seconds.commit,
            waited=self.seconds.waited + seconds.waited,
        )

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
            "engine/draft_seconds": self.seconds.draft,
            "engine/forward_seconds": self.seconds.forward,
            "engine/sample_seconds": self.seconds.sample,
            "engine/commit_seconds": self.seconds.commit,
            "engine/saved_seconds": self.saved_seconds,
            "engine/run_ahead_rows": self.num_run_ahead_rows,
            "engine/run_ahead_seconds": self.run_ahead_seconds,
        }
        if self.seconds.waited:
            host_seconds = self.seconds.total - self.seconds.waited
            metrics["engine/host_seconds"] = host_seconds
            metrics["engine/host_share"] = host_seconds / self.seconds.total
        if self.priced_seconds:
            metrics["engine/priced_seconds"] = self.priced_seconds
        for depth, (tries, accepted) in enumerate(zip(self.tries_by_depth, self.accepted_by_depth, strict=True), 1):
            if tries:
                metrics[f"engine/acceptance_depth_{depth}"] = float(accepted / tries)
        return metrics


def _at_least(depths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[MAX_DEPTH], how many of `depths` are at least 1, 2, ..."""
    counts = np.bincount(np.minimum(depths, MAX_DEPTH), minlength=MAX_DEPTH + 1)
    return counts[::-1].cumsum()[::-1][1:]
