"""Candidates for the next node of a draft tree, in order; references to a list, as of `heapq`, would be counted."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from srtrl.model.kernels import inlined, inner, makes_arrays

Int32Array = npt.NDArray[np.int32]


class Frontier(NamedTuple):
    """The best of what may become the next node, the best one last: as many as there is room for nodes."""

    numbers: Int32Array
    """[room, 2]: token id and parent."""
    scores: npt.NDArray[np.float64]


@makes_arrays
def make_frontier(room: int) -> Frontier:
    """No candidate yet."""
    return Frontier(np.empty((room, 2), np.int32), np.empty(room))


@inlined
def _is_before(frontier: Frontier, i: int, score: float, token: int, parent: int) -> bool:
    """Whether an entry becomes a node before another: by score, then by token and parent."""
    if frontier.scores[i] != score:
        return bool(frontier.scores[i] > score)
    other, other_parent = frontier.numbers[i, 0], frontier.numbers[i, 1]
    return bool(other < token or (other == token and other_parent < parent))


@inlined
def _move_candidate(frontier: Frontier, source: int, target: int) -> None:
    frontier.scores[target] = frontier.scores[source]
    frontier.numbers[target, 0], frontier.numbers[target, 1] = frontier.numbers[source, 0], frontier.numbers[source, 1]


@inner
def put_candidate(frontier: Frontier, num: int, score: float, token: int, parent: int) -> int:
    """Put an entry among `num` others, of which the last in order makes room; returns their number."""
    if num == len(frontier.scores):
        if _is_before(frontier, 0, score, token, parent):
            return num
        num -= 1
        for i in range(num):
            _move_candidate(frontier, i + 1, i)
    place = num
    while place > 0 and _is_before(frontier, place - 1, score, token, parent):
        _move_candidate(frontier, place - 1, place)
        place -= 1
    frontier.scores[place] = score
    frontier.numbers[place, 0], frontier.numbers[place, 1] = token, parent
    return num + 1
