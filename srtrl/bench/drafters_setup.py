"""What comparisons of drafters have in common, on a trace or on a live policy."""

from collections.abc import Callable

from srtrl.bench.pricing import StatedCost, parse_curve
from srtrl.bench.rollout_options import RolloutBench
from srtrl.drafters.base import DrafterBase
from srtrl.engine.engine import EngineOptions
from srtrl.model.transformer import Transformer
from srtrl.resolve import resolve_class


def drafter_maker(name: str) -> Callable[[], DrafterBase]:
    """What makes a drafter of that name with its default options.

    Raises:
        ValueError: There is none.
    """
    try:
        drafter: type[DrafterBase] = resolve_class("srtrl.drafters", name, "Drafter")
    except ValueError as error:
        raise ValueError(f"--drafters: {error}") from error
    return drafter


def drafter_options(bench: RolloutBench) -> tuple[EngineOptions, StatedCost | None]:
    """The engine of every contender, in deterministic mode, and the stated cost of its steps."""
    curve = parse_curve(bench.price_as) if bench.price_as else None
    options = EngineOptions(
        slots=bench.slots[0],
        kv_memory_gib=bench.kv_memory_gib,
        deterministic=True,
        draft_budget=bench.draft_budget,
        cost_points=curve.points if curve else None,
    )
    return options, curve


def describe_model(bench: RolloutBench, policy: Transformer) -> str:
    """The model, in a sentence."""
    config = policy.config
    millions = sum(parameter.numel() for parameter in policy.parameters()) / 1e6
    weights = bench.model or f"random weights of the shape `{bench.shape}`"
    return (
        f"Model: {weights}, {millions:,.1f} million parameters ({config.num_hidden_layers} layers of width "
        f"{config.hidden_size}, vocabulary {config.vocab_size:,}), {bench.dtype}, on {policy.device.type}."
    )


def describe_drafters(bench: RolloutBench, curve: StatedCost | None) -> list[str]:
    """How contenders take turns and what the columns mean, in sentences."""
    budget = (
        "the engine chooses the nodes to verify by what a step costs"
        if bench.draft_budget == "auto"
        else f"up to {bench.draft_budget} nodes of each sequence are verified in a step"
    )
    runs = "series of steps, step by step" if bench.mode == "live" else "runs"
    notes = [
        f"Contenders take turns: a warm-up, then {bench.repeats} {runs}. Each has an engine of its own on the same "
        "weights, in deterministic mode. The engine lives on, as in training: what it has measured of the steps' cost "
        f"and of the drafter's estimates stays. Each {'series' if bench.mode == 'live' else 'run'} has a new drafter.",
        f"Drafts: {budget}.",
        f"Seconds are medians. The ratio to `{bench.drafters[0]}` is the geometric mean over pairs of neighbouring "
        "runs, with a 95% interval. A step is one forward pass of the engine; tokens and verified tokens (the root "
        "included) are those of one sequence in one step.",
    ]
    if curve is not None:
        notes.append(
            "Seconds are priced, not measured: each decode step costs what this curve states for its rows, whatever "
            f"the clock says. The curve is an assumption: {curve.note}. Drafting, sampling and committing cost nothing "
            "in it; the shares of time below are those of the clock."
        )
    return notes
