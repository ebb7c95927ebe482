"""Stated costs of a decode step, for a benchmark that asks what another machine would take."""

from dataclasses import dataclass
from itertools import pairwise

from srtrl.resolve import suggestion


@dataclass(kw_only=True, slots=True, frozen=True)
class StatedCost:
    """Seconds of a decode step by its rows: an assumption, not a measurement."""

    points: tuple[tuple[int, float], ...]
    """(rows, seconds), rows rising."""
    note: str
    """Where it comes from."""


CURVES = {
    "h200-1.5b": StatedCost(
        points=(
            (1, 0.0020),
            (256, 0.0020),
            (320, 0.0020),
            (384, 0.0024),
            (512, 0.0032),
            (1024, 0.0064),
            (2048, 0.0127),
        ),
        note="1.54 thousand million parameters in bfloat16 on one H200, by its data sheet: reading 3.1 GB at 80% of "
        "4.8 TB/s takes 0.8 ms, and a fixed 1.2 ms is added for launches and host work; 2 x 1.54e9 operations a row at "
        "half of the peak of 989 TFLOP/s take 6.2 us, which is more from 320 rows on",
    )
}
"""Named curves: memory-bound and level, then compute-bound and linear."""


def parse_curve(text: str) -> StatedCost:
    """Read the name of a curve, or `ROWS:SECONDS,ROWS:SECONDS,...`.

    Raises:
        ValueError: Neither of the two, rows that do not rise, or a cost that is not above 0 or falls.
    """
    if text in CURVES:
        return CURVES[text]
    if ":" not in text:
        raise ValueError(
            f"--price-as: no curve {text!r}{suggestion(text, CURVES) or ';'} known: {', '.join(CURVES)}; or one of "
            "your own as ROWS:SECONDS,ROWS:SECONDS,..."
        )
    points = []
    for part in text.split(","):
        rows, _, seconds = part.partition(":")
        try:
            points.append((int(rows), float(seconds)))
        except ValueError as error:
            raise ValueError(f"--price-as: expected ROWS:SECONDS like 64:0.002, found {part!r}") from error
    for (before, cost_before), (after, cost_after) in pairwise(points):
        if after <= before or cost_after < cost_before:
            raise ValueError(
                f"--price-as: {after}:{cost_after} follows {before}:{cost_before}; rows must rise and a step with more "
                "rows cannot cost less"
            )
    if points[0][0] < 1 or not all(0 < seconds < float("inf") for _, seconds in points):
        raise ValueError(f"--price-as: expected at least 1 row and seconds above 0, found {text!r}")
    return StatedCost(points=tuple(points), note=f"rows:seconds {text}, given on the command line")
