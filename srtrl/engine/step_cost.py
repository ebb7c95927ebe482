"""What a decode step costs: seconds by the number of its rows, timed at the start and refreshed while it runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from srtrl.engine.step_cost_kernel import fill_curve, fill_rests, learn_cost, read_curve, rows_within

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
TimeForward = Callable[[int, int, int], float]
"""(rows, context tokens of each row, rows with logits) -> seconds of one forward pass."""

LINEAR_FROM = 3.0
"""Beyond a pass that takes so many times the smallest one's seconds, cost is taken to be linear and not timed."""
DRIFT = 0.002
"""How far costs wander from step to step, as a share of them."""
NOISE = 0.1
"""Standard deviation of a step's seconds, as a share of them."""
HOST_SECONDS = 1e-3
"""Order of a step's work outside the forward pass: of a small policy it is the larger part."""
VERIFY_SHARE = 0.3
"""Order of what verifying adds, as a share of the smallest step."""
FIRST_RECORDS = 16
FIRST_CLIP, CLIP = 3.0, 1.5
"""A step counts as at most so many times the estimate, at the start and later (or so many times less)."""
PRIOR_STEPS, MOST_STEPS = 16, 100
"""Steps that a bucket's deviation from the model counts for at first; steps that it is averaged over."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CostCurve:
    """Seconds by rows at one context: at a bucket's edge, and how much less for each row below it."""

    edges: IntArray
    """[E], ascending."""
    values: FloatArray
    """[2, E]: seconds, never falling; and seconds a row between an edge and the edge before it."""
    tail_slope: float
    """Seconds a row, beyond the last edge."""

    def at(self, num_rows: npt.ArrayLike) -> FloatArray:
        """Seconds of steps of so many rows, [n]."""
        rows = np.asarray(num_rows, np.float64)
        seconds = np.empty_like(rows)
        read_curve(self.edges, self.values, self.tail_slope, rows.ravel(), seconds.ravel())
        return seconds

    def rows_within(self, num_rows: int, more_rows: FloatArray, *, slowdown: float, row_seconds: float) -> int:
        """Return how many rows a step of `num_rows` may have beside: the last of `more_rows` within both limits.

        Args:
            num_rows: Of the step without them.
            more_rows: [n], what is tried, ascending from 0.
            slowdown: Most that they may take together, as a share of the step without them.
            row_seconds: Most that each may take.
        """
        found: int = rows_within(self.edges, self.values, self.tail_slope, num_rows, slowdown, row_seconds, more_rows)
        return found


class StepCost:
    """Seconds of a decode step as a function of its rows and of the context that they read.

    The rows are the roots, the draft nodes and those of prompts; the context is the number of tokens that each row
    reads, summed over the rows. With padding or CUDA graphs the cost is a staircase of the rows.

    The model is a timed curve P of the rows, and what a step has beside its forward pass:

        seconds = (scale x P(bucket of rows) + fixed + per_row x rows + per_token x context) x (1 + its bucket's rest)
                  + verify, if there are draft nodes among the rows

    The five coefficients are followed by a Kalman filter, so that steps of one size teach about the others, too (a busy
    machine is slower at all of them); what is left is averaged bucket by bucket.
    """

    def __init__(self, edges: Sequence[int] | IntArray, *, widest_stair: int) -> None:
        """Make an unknown cost: `probe` must be called before it is asked.

        Args:
            edges: Row counts at which a bucket ends, ascending.
            widest_stair: Buckets of at most so many rows cost about the same at all of them; in wider ones the cost is
                interpolated.
        """
        self.edges = np.asarray(edges, np.int64)
        widths = np.diff(self.edges, prepend=0)
        assert len(widths)
        assert (widths > 0).all()
        self._is_stair = (widths <= widest_stair) & (widths > 1)
        self._log_edges = np.log(self.edges)
        self._fixed_curve: CostCurve | None = None
        self._probed: FloatArray | None = None  # [E], seconds without context
        self._seen = np.zeros(len(self.edges))  # [E], recorded steps
        self._rest = np.zeros(len(self.edges))  # [E], what the model leaves, as a share of it
        self._filled_rest = np.zeros(len(self.edges))  # [E], the same, shrunk, and interpolated where no step was
        self._is_filled = True
        self._num_records = 0
        self._latest: tuple[float, CostCurve] | None = None
        """The latest curve and its context, good until the next record: a step asks for it several times."""

    @classmethod
    def padded_to(cls, multiple: int, max_rows: int) -> "StepCost":
        """Return the (unknown) cost of steps whose rows are padded to a multiple; 1: not padded."""
        return cls(row_edges(multiple, max_rows), widest_stair=multiple)

    @classmethod
    def from_points(cls, points: Sequence[tuple[int, float]]) -> "StepCost":
        """Return a given, fixed cost: (rows, seconds), linear in between and beyond the last two.

        Raises:
            ValueError: Rows do not rise, or a cost is not above 0 or falls.
        """
        for (rows, seconds), (more_rows, more_seconds) in pairwise([(0, 0.0), *points]):
            if more_rows <= rows or more_seconds < seconds or not 0 < more_seconds < float("inf"):
                raise ValueError(
                    f"cost of a step: ({more_rows}, {more_seconds}) follows ({rows}, {seconds}); expected rising rows "
                    "and seconds above 0 that do not fall"
                )
        if not points:
            raise ValueError("cost of a step: expected at least one pair (rows, seconds)")
        cost = cls([rows for rows, _ in points], widest_stair=0)
        seconds_at_points = np.array([seconds for _, seconds in points])
        slopes = _secants(cost.edges, seconds_at_points)
        slopes[0] = 0.0
        tail_slope = slopes[-1] if len(points) > 1 else points[0][1] / points[0][0]
        cost._fixed_curve = CostCurve(
            edges=cost.edges, values=np.stack([seconds_at_points, slopes]), tail_slope=float(tail_slope)
        )
        return cost

    @property
    def is_fixed(self) -> bool:
        """Whether the cost was given, so that what steps really take does not change it."""
        return self._fixed_curve is not None

    @property
    def is_known(self) -> bool:
        """Whether seconds can be asked for."""
        return self.is_fixed or self._probed is not None

    @property
    def max_rows(self) -> int:
        """The last edge: what is beyond is extrapolated."""
        return int(self.edges[-1])

    def probe(
        self,
        time_forward: TimeForward,
        max_rows: int | None = None,
        *,
        max_context_tokens: int = 1024,
        max_seconds: float = 2.0,
        max_passes: int = 30,
    ) -> None:
        """Time forward passes of a few sizes: about doubling ones as long as time allows, and one long context.

        Sizes between them are interpolated, larger ones extrapolated from the last two. At least two sizes are timed.

        Args:
            time_forward: Runs one forward pass; its own result is the only clock.
            max_rows: The largest size to time; by default the last edge.
            max_context_tokens: The longest context that can be run.
            max_seconds: Effort in all; the pass that exceeds it is the last one.
            max_passes: The same, as a number of passes.
        """
        assert not self.is_fixed, "a given cost is not measured"
        effort = _Effort(time_forward, max_seconds, max_passes)
        context = max(1, min(128, max_context_tokens // 4))
        sizes = self._probe_sizes(max_rows or self.max_rows)
        measured: list[tuple[int, float]] = []
        for rows in sizes:
            # A quarter is left for the long context, and no size is begun that would take half of the rest.
            if len(measured) >= 2 and (
                measured[-1][1] > LINEAR_FROM * measured[0][1]
                or not effort.can_afford(4 * measured[-1][1], reserve=0.25)
            ):
                break
            measured.append((rows, effort.time(rows, context)))
        rows, seconds = measured[min(len(measured) - 1, 2)]
        longer = max_context_tokens - context
        per_token = 0.0
        if longer > 0 and effort.can_afford(2 * seconds):
            per_token = max(0.0, (effort.time(rows, max_context_tokens) - seconds) / (rows * longer))
        points = np.array(measured)
        self._set_probed(points[:, 0], np.maximum.accumulate(points[:, 1]), context, per_token)

    @property
    def verify_seconds(self) -> float:
        """What a step with draft nodes takes beside its rows: trees to follow, KV to move, caches to fill again."""
        return 0.0 if self._probed is None else float(self._weights[4])

    def record(self, num_rows: int, context_tokens: float, seconds: float, *, has_drafts: bool = False) -> None:
        """Learn from a real step: its wall time without the time that drafting took."""
        if self.is_fixed or self._probed is None:
            return
        clip = FIRST_CLIP if self._num_records < FIRST_RECORDS else CLIP
        learn_cost(
            self.edges,
            self._probed,
            self._is_stair,
            self._rest,
            self._seen,
            self._weights,
            self._covariance,
            self._drifts,
            self._bounds,
            num_rows,
            context_tokens,
            has_drafts,
            seconds,
            clip,
            NOISE,
            PRIOR_STEPS,
            MOST_STEPS,
        )
        self._num_records += 1
        self._is_filled = False
        self._latest = None

    def curve(self, context_per_row: float = 0.0) -> CostCurve:
        """Return the seconds by rows where each row reads so many tokens."""
        if self._fixed_curve is not None:
            return self._fixed_curve
        if self._latest is None or self._latest[0] != context_per_row:
            self._latest = (context_per_row, self._make_curve(context_per_row))
        return self._latest[1]

    def _make_curve(self, context_per_row: float) -> CostCurve:
        assert self._probed is not None, "the cost of a step is not known: call probe"
        if not self._is_filled:
            fill_rests(self._rest, self._seen, self._log_edges, PRIOR_STEPS, self._filled_rest)
            self._is_filled = True
        values = np.empty((2, len(self.edges)))
        tail_slope = fill_curve(
            self.edges, self._probed, self._filled_rest, self._is_stair, self._weights, context_per_row, values
        )
        return CostCurve(edges=self.edges, values=values, tail_slope=tail_slope)

    def seconds(self, num_rows: int, context_tokens: float = 0.0) -> float:
        """Return the seconds of a step without drafting; `context_tokens` is the sum over its rows."""
        return float(self.curve(context_tokens / max(num_rows, 1)).at(num_rows))

    def seconds_at(self, num_rows: npt.ArrayLike, context_per_row: float = 0.0) -> FloatArray:
        """Return the seconds of steps of several sizes; they never fall with the rows."""
        return self.curve(context_per_row).at(num_rows)

    def saved_seconds(self, num_sequences: int, num_rows: int, num_tokens: int, context_tokens: float = 0.0) -> float:
        """Return what a step's tokens would have cost one a sequence and step, less what they did cost.

        Args:
            num_sequences: Sequences that decoded: the rows of a step without drafts.
            num_rows: Rows of the step that was done.
            num_tokens: Tokens that it gave.
            context_tokens: Sum over its rows.
        """
        curve = self.curve(context_tokens / max(num_rows, 1))
        without, with_drafts = curve.at([num_sequences, num_rows]).tolist()
        if num_rows > num_sequences:
            with_drafts += self.verify_seconds
        saved: float = num_tokens / max(num_sequences, 1) * without - with_drafts
        return saved

    def _probe_sizes(self, max_rows: int) -> list[int]:
        sizes = [int(self.edges[0])]
        for edge in self.edges.tolist():
            if edge >= 2 * sizes[-1] and (edge <= max_rows or len(sizes) < 2):
                sizes.append(edge)
        return sizes if len(sizes) > 1 or len(self.edges) == 1 else [sizes[0], int(self.edges[-1])]

    def _set_probed(self, rows: FloatArray, seconds: FloatArray, context: int, per_token: float) -> None:
        """Set the timed curve, interpolated at all edges, and begin with the model that it is."""
        slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]) if len(rows) > 1 else seconds[0] / rows[0]
        at_edges = np.interp(self.edges, rows, seconds) + slope * np.maximum(self.edges - rows[-1], 0)
        self._probed = np.maximum(at_edges - per_token * context * self.edges, 0.1 * at_edges)
        unit = float(at_edges[0])
        row_seconds = float(at_edges[-1]) / self.max_rows
        self._latest = None
        self._weights = np.array([1.0, 0.0, 0.0, per_token, 0.0])
        host = unit + HOST_SECONDS
        spreads = np.array(
            [0.3, host, 0.3 * row_seconds + 0.02 * unit, per_token + 0.1 * row_seconds / context, VERIFY_SHARE * host]
        )
        self._covariance = np.diag(spreads**2)
        self._drifts = (DRIFT * np.array([1.0, unit, row_seconds, per_token, VERIFY_SHARE * unit])) ** 2
        self._bounds = np.array([0.1, -0.5 * self._probed[0], 0.0, 0.0, 0.0])


class _Effort:
    """Forward passes and their seconds, up to a bound."""

    def __init__(self, time_forward: TimeForward, max_seconds: float, max_passes: int) -> None:
        self._time_forward = time_forward
        self._max_seconds = max_seconds
        self._max_passes = max_passes
        self._seconds = 0.0
        self._num_passes = 0

    def can_afford(self, seconds: float, *, reserve: float = 0.0) -> bool:
        """Whether so many seconds more (of at least two passes) stay within the bound less a reserve."""
        return self._seconds + seconds <= (1 - reserve) * self._max_seconds and self._num_passes + 2 <= self._max_passes

    def time(self, rows: int, context: int) -> float:
        """The faster of two passes: the first of a size may compile or allocate, and either may have been disturbed.

        A probe is paid for by the first rollout, and real steps correct it.
        """
        return min(self._pass(rows, context), self._pass(rows, context))

    def _pass(self, rows: int, context: int) -> float:
        seconds = self._time_forward(rows, context, rows)
        self._num_passes += 1
        self._seconds += seconds
        return seconds


def row_edges(multiple: int, max_rows: int) -> list[int]:
    """Ascending row counts up to at least `max_rows`: 32 multiples, then coarser by a quarter each."""
    edges = [multiple]
    while edges[-1] < max_rows:
        fine = edges[-1] + multiple
        coarse = -(-edges[-1] * 5 // 4 // multiple) * multiple
        edges.append(fine if len(edges) < 32 else max(fine, coarse))
    return edges


def _secants(edges: IntArray, seconds: FloatArray) -> FloatArray:
    """[E], seconds a row between each edge and the one before it (the first: from no rows at all)."""
    return np.diff(seconds, prepend=0.0) / np.diff(edges, prepend=0)
