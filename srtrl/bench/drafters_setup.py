"""What comparisons of drafters have in common, on a trace or on a live policy."""

from collections.abc import Callable, Sequence

from srtrl.bench.comparison import Comparison
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


def drafter_makers(bench: RolloutBench) -> dict[str, Callable[[], DrafterBase]]:
    """Contender -> what makes its drafter; with `--control` the first comes twice.

    Raises:
        ValueError: A drafter is unknown.
    """
    makers = {name: drafter_maker(name) for name in bench.drafters}
    if bench.control:
        first = bench.drafters[0]
        makers[control_name(first)] = makers[first]
    return makers


def control_name(first: str) -> str:
    """What tables call the second of two equal contenders."""
    return f"{first}, again"


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


def describe_drafters(bench: RolloutBench, curve: StatedCost | None, comparisons: Sequence[Comparison]) -> list[str]:
    """How contenders take turns and what the columns mean, in sentences."""
    budget = (
        "the engine chooses the nodes to verify by what a step costs"
        if bench.draft_budget == "auto"
        else f"up to {bench.draft_budget} nodes of each sequence are verified in a step"
    )
    series = "series of steps" if bench.mode == "live" else "runs"
    numbers = [len(next(iter(comparison.seconds.values()))) for comparison in comparisons]
    counts = ", ".join(map(str, numbers if len(set(numbers)) > 1 else numbers[:1]))
    how_many = f"{series} of each" if bench.precision is None else f"{series} of each: {describe_precision(bench)}"
    notes = [
        "All contenders decode side by side: the one with the fewest tokens takes the next decode step. A warm-up, "
        f"then {counts} {how_many}; who is first of equals changes from one to the next. Each has an engine "
        "of its own on the same weights, in deterministic mode. The engine lives on, as in training: what it has "
        "measured of the steps' cost and of the drafter's estimates stays. Each "
        f"{'series' if bench.mode == 'live' else 'run'} has a new drafter.",
        f"Drafts: {budget}.",
        f"Seconds are medians. The ratio to `{bench.drafters[0]}` is the geometric mean over pairs of runs side by "
        "side, with a 95% interval. A step is one forward pass of the engine; tokens and verified tokens (the root "
        "included) are those of one sequence in one step.",
    ]
    if bench.control:
        notes.append(
            f"Control: `{control_name(bench.drafters[0])}` is the same as `{bench.drafters[0]}`. Its ratio is 1, and "
            "the interval beside it says how far this machine's noise reaches."
        )
    if curve is not None:
        notes.append(
            "Seconds are priced, not measured: each decode step costs what this curve states for its rows, whatever "
            f"the clock says. The curve is an assumption: {curve.note}. Drafting, sampling and committing cost nothing "
            "in it; the shares of time below are those of the clock."
        )
    return notes


def describe_precision(bench: RolloutBench) -> str:
    """The rule by which the number of runs was decided."""
    assert bench.precision is not None
    limit = "" if bench.max_minutes is None else f", but no more than {bench.max_minutes:g} minutes' worth"
    return (
        f"the first {bench.repeats} are a pilot whose spread says, once, how many bring the half-width of the interval "
        f"to {bench.precision:.1%} of the ratio{limit} (Stein's two-stage rule: the interval is made from the pilot's "
        "spread, so that it covers as often as it says)"
    )
