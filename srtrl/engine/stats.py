"""Counts and seconds of decode steps, reported under `engine/`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import DraftTrees
from srtrl.engine.batch import ScheduledStep
from srtrl.engine.verify import Verified

MAX_DEPTH = 8
"""Acceptance is reported for depths of the draft trees up to this."""

STAGES = {
    "schedule": "schedule",
    "propose": "drafting",
    "choose": "drafting",
    "rows": "forward",
    "forward": "forward",
    "wait": "forward",
    "verify": "sample",
    "commit": "drafting",
    "observe": "drafting",
    "finish": "schedule",
}
"""The stages of a decode step in their order, and the metric `engine/<name>_seconds` in which each is counted.

Only drafts need those of `drafting`.
"""
STAGE_NUMBERS = {stage: number for number, stage in enumerate(STAGES)}


class StageClock:
    """Wall-clock seconds of the stages of one decode step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """The stage that ends now began where the one before it ended."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """From the start of the step to the end of the last stage."""
        return sum(self.seconds.values())


@dataclass(slots=True)
class EngineStats:
    """Sums over decode steps. Tokens and drafts are those of primary samples; run-aheads are counted apart."""

    num_steps: int = 0
    num_decodes: int = 0
    """Sequence-steps: how often a primary sample sampled."""
    num_tokens: int = 0
    """Generated tokens."""
    num_prefill_tokens: int = 0
    """Prompt tokens computed, recomputation after preemption included."""
    num_drafts: int = 0
    """Sequence-steps with a draft of at least one node."""
    num_draft_nodes: int = 0
    accepted_by_depth: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(MAX_DEPTH, np.int64))
    """[MAX_DEPTH], drafts of which at least 1, 2, ... nodes were accepted."""
    num_run_ahead_steps: int = 0
    """Steps without primaries: only the next two are counted of them."""
    num_run_ahead_rows: int = 0
    num_run_ahead_tokens: int = 0
    num_draws: int = 0
    """Draws whose first sample was added."""
    num_known_draws: int = 0
    """Those of them whose prompt had rollouts to draft from."""
    max_pages: int = 0
    num_slots: int = 0
    num_pages: int = 0
    num_preemptions: int = 0
    num_graphs_dropped: int = 0
    seconds: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(STAGES)))
    """By stage, in the order of `STAGES`."""

    def add_step(self, step: ScheduledStep, trees: DraftTrees, verified: Verified, clock: StageClock) -> None:
        """Count one step.

        `trees` are those that were verified, one for each sequence of `verified`; the primaries come first.
        """
        num = step.num_primaries
        self.num_run_ahead_rows += len(step.slots) - num
        self.num_run_ahead_tokens += int(verified.offsets[-1] - verified.offsets[num])
        if step.is_run_ahead:
            self.num_run_ahead_steps += 1
            return
        self.num_steps += 1
        self.num_decodes += num
        self.num_tokens += int(verified.offsets[num])
        self.num_prefill_tokens += step.num_prompt_rows
        num_nodes = int(trees.offsets[num])
        if num_nodes:
            accepted = verified.num_new[:num] - 1
            counts = np.bincount(np.minimum(accepted, MAX_DEPTH), minlength=MAX_DEPTH + 1)
            self.accepted_by_depth += counts[::-1].cumsum()[::-1][1:]
            self.num_draft_nodes += num_nodes
            self.num_drafts += int((trees.sizes[:num] > 0).sum())
        for stage, seconds in clock.seconds.items():
            self.seconds[STAGE_NUMBERS[stage]] += seconds

    def metrics(self, num_ranks: int = 1) -> dict[str, float]:
        """Flat metrics of this many engines; seconds are means over them."""
        decodes, drafts = max(self.num_decodes, 1), max(self.num_drafts, 1)
        metrics = {
            "engine/slots": self.num_slots,
            "engine/pages": self.num_pages,
            "engine/preemptions": self.num_preemptions,
            "engine/decode_steps": self.num_steps,
            "engine/tokens": self.num_tokens,
            "engine/tokens_per_decode_step": self.num_tokens / decodes,
            "engine/verified_per_decode_step": 1 + self.num_draft_nodes / decodes,
            "engine/prefill_tokens": self.num_prefill_tokens,
            "engine/slots_in_use_mean": num_ranks * self.num_decodes / max(self.num_steps, 1),
            "engine/pages_in_use_max": self.max_pages,
            "engine/run_ahead_rows": self.num_run_ahead_rows,
            "engine/run_ahead_tokens": self.num_run_ahead_tokens,
        }
        for depth, num_drafts in enumerate(self.accepted_by_depth.tolist(), 1):
            metrics[f"engine/acceptance_depth_{depth}"] = num_drafts / drafts
        seconds = dict(zip(STAGES, (self.seconds / num_ranks).tolist(), strict=True))
        for part in dict.fromkeys(STAGES.values()):
            metrics[f"engine/{part}_seconds"] = sum(seconds[stage] for stage in STAGES if STAGES[stage] == part)
        if seconds["wait"]:
            metrics["engine/graphs_dropped"] = self.num_graphs_dropped
            metrics["engine/host_share"] = 1 - seconds["wait"] / sum(seconds.values())
        return metrics


def add_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """The sums of several engines."""
    return EngineStats(
        **{field.name: sum(getattr(part, field.name) for part in parts) for field in fields(EngineStats)}
    )
