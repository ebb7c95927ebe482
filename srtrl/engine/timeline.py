"""One decode step as a timeline shows it."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class DecodeStep:
    """What one decode step worked on."""

    seconds: float
    """Since the start of the rollout stage, at the end of the decode step."""
    num_primaries: int
    """Samples of the training step that sampled, one a slot; those whose prompt is still computed do not."""
    num_run_ahead: int
    """The same of samples that are decoded ahead."""
    num_waiting: int
    """Samples of the training step that have no slot."""
    num_rows: int
    """Tokens that were verified: drafts, and the root of each sequence."""
    num_prefill: int
    """Prompt tokens, and those of preempted samples, that were computed beside them."""
    num_tokens: int
    """Tokens that the samples of the training step got."""
