"""What the engine did since the last look: counts and seconds, reported under `engine/`."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from srtrl.drafters.draft_tree import DraftTree
from srtrl.engine.scheduler import ScheduledStep
from srtrl.engine.verify import Walk


@dataclass(slots=True)
class EngineStats:
    """Sums over decode steps."""

    num_steps: int = 0
    num_decodes: int = 0
    """Sequence-steps: how often a sequence sampled."""
    num_tokens: int = 0
    """Generated tokens."""
    num_prefill_tokens: int = 0
    """Prompt tokens computed, recomputation after preemption included."""
    num_draft_nodes: int = 0
    num_accepted: int = 0
    max_pages: int = 0
    draft_seconds: float = 0.0
    """Scheduling and drafting."""
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    commit_seconds: float = 0.0

    def add_step(
        self,
        scheduled: ScheduledStep,
        trees: SequenceOf[DraftTree],
        walks: SequenceOf[Walk],
        *,
        num_pages_used: int,
        seconds: tuple[float, float, float, float],
    ) -> None:
        """Add one step; `seconds` are those of drafting, forward pass, sampling and commit."""
        num_accepted = sum(len(walk.accepted) for walk in walks)
        self.num_steps += 1
        self.num_decodes += len(walks)
        self.num_tokens += len(walks) + num_accepted
        self.num_accepted += num_accepted
        self.num_draft_nodes += sum(tree.num_nodes for tree in trees)
        self.num_prefill_tokens += sum(chunk.count for chunk in scheduled.prefills)
        self.max_pages = max(self.max_pages, num_pages_used)
        self.draft_seconds += seconds[0]
        self.forward_seconds += seconds[1]
        self.sample_seconds += seconds[2]
        self.commit_seconds += seconds[3]

    def metrics(self, *, num_slots: int, num_pages: int, num_preemptions: int) -> dict[str, float]:
        """Flat metrics; shares and means are over the steps since the last look."""
        steps, decodes = max(self.num_steps, 1), max(self.num_decodes, 1)
        return {
            "engine/decode_steps": self.num_steps,
            "engine/tokens": self.num_tokens,
            "engine/tokens_per_decode_step": self.num_tokens / decodes,
            "engine/verified_per_decode_step": 1 + self.num_draft_nodes / decodes,
            "engine/prefill_tokens": self.num_prefill_tokens,
            "engine/slots_in_use_mean": self.num_decodes / steps,
            "engine/slots": num_slots,
            "engine/pages_in_use_max": self.max_pages,
            "engine/pages": num_pages,
            "engine/preemptions": num_preemptions,
            "engine/draft_seconds": self.draft_seconds,
            "engine/forward_seconds": self.forward_seconds,
            "engine/sample_seconds": self.sample_seconds,
            "engine/commit_seconds": self.commit_seconds,
        }
