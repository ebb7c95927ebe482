"""How an engine decodes: what it holds, what it drafts, what it promises."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineOptions:
    """See `RolloutSection` of the recipe for the meaning of the fields of the same name."""

    slots: int = 64
    page_size: int = 16
    num_pages: int | None = None
    kv_memory_gib: float | Literal["auto"] = "auto"
    kv_memory_share: float = 0.5
    kv_reserved_bytes: int = 0
    """Memory of the device that the update will take beside what it has already; for `kv_memory_gib` auto."""
    kv_across_update: Literal["keep", "release"] = "keep"
    cuda_graphs: bool = True
    prefill_chunk_tokens: int = 512
    deterministic: bool | None = None
    """None: on a CPU, where it is nearly free."""
    max_sequence_tokens: int | None = None
    """Longest prompt and response together; by default what the model was made for."""
    draft_budget: Literal["auto"] | int = "auto"
    max_draft_nodes: int = 128
    """Largest number of draft nodes of one sequence in one step."""
    run_ahead_max_slowdown: Literal["auto"] | float = "auto"
