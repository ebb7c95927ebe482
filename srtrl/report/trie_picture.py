"""A drawing of a prompt's trie: the text runs to the right, a later rollout's way on top as far as it goes.

Written as SVG by hand: labels are in the reader's fonts, so that any script can be shown.
"""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from srtrl.report.drawing import BLUE, GREY, ORANGE, Chart
from srtrl.report.trie_view import END_SIGN, Branch, Decode, TrieView, describe_history, one_line

NUM_BRANCHES = 60
LONGEST_WAY = 1000.0
"""Pixels from the left up to which a branch may begin: what is farther is counted, not drawn."""
LABEL_CHARACTERS = 24
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
CHARACTER, ROW, GAP, MARGIN = 7.2, 30.0, 44.0, 12.0
"""Pixels: a character's width, from row to row, between a branch and the next, around the picture."""
PADDING = 6.0
DIGIT = 6.2
"""Width of a character of the small numbers."""
HEIGHT = 20.0
"""Of a branch's box."""
WIDEST_EDGE = 9.0


@dataclass(slots=True)
class _Box:
    """A branch and its place."""

    branch: Branch
    label: str
    left: float
    right: float
    middle: float
    parent: "_Box | None"
    children: list[Branch]
    """Those that are drawn."""

    @property
    def num_hidden(self) -> int:
        """Rollouts that go on in ways that are not drawn."""
        drawn = sum(child.count for child in self.children)
        return self.branch.num_hidden + sum(child.count for child in self.branch.children) - drawn

    @property
    def hidden(self) -> str:
        """What is written of them."""
        return f"+{self.num_hidden}" if self.num_hidden else ""

    @property
    def end(self) -> float:
        """Where the box and what is written behind it end."""
        return self.right + (4 + DIGIT * len(self.hidden) if self.hidden else 0)


def draw_trie(view: TrieView, decode: Decode) -> Chart:
    """Draw the branches of the view, the later rollout's way highlighted."""
    boxes = list(_place(view.root, decode))
    width = max(box.end for box in boxes) + MARGIN
    height = max(box.middle for box in boxes) + ROW / 2 + MARGIN
    most = max(1, view.root.count)
    # What the later rollout took is drawn last, over the rest.
    ordered = sorted(boxes, key=lambda box: box.branch.is_taken)
    parts = [_edge(box, most) for box in ordered] + [_box(box) for box in ordered]
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="{FONT}" font-size="12">' + "".join(parts) + "</svg>"
    )
    later = view.history.later
    note = (
        f"Prompt {view.history.prompt_id}: how {describe_history(view.history)} begin, with the number that took each "
        f"branch. Orange: the way of step {later.step}, sample {later.sample_index}; dashed: what it alone has "
        f"({END_SIGN} ends a response, +N counts rollouts that go on beyond the picture). Drafts do not end with the "
        "dashed box: the trie knows what followed any piece of text, wherever it stood."
    )
    return Chart("Trie of a prompt", note, svg, is_wide=True)


def _place(root: Branch, decode: Decode) -> Iterator[_Box]:
    """All boxes, parents first. The first child stands in its parent's row, each other one in a new row."""
    start = _make_box(root, "start", MARGIN, 0, None)
    yield start
    stack = [(start, iter(start.children))]
    num_rows = 0
    is_first = True
    while stack:
        parent, children = stack[-1]
        child = next(children, None)
        if child is None:
            stack.pop()
            is_first = False
            continue
        num_rows += not is_first
        is_first = True
        box = _make_box(
            child, one_line(decode(child.token_ids), LABEL_CHARACTERS), parent.right + GAP, num_rows, parent
        )
        yield box
        stack.append((box, iter(box.children)))


def _make_box(branch: Branch, label: str, left: float, row: int, parent: _Box | None) -> _Box:
    right = left + _width(label) + 2 * PADDING
    children = branch.children if right + GAP <= LONGEST_WAY else []
    return _Box(branch, label, left, right, MARGIN + ROW / 2 + row * ROW, parent, children)


def _edge(box: _Box, most: int) -> str:
    """The line from the parent, with the number of rollouts that went along it."""
    if box.parent is None:
        return ""
    begin, end, colour = box.parent.right, box.left, _colour(box.branch)
    thickness = max(1.2, WIDEST_EDGE * box.branch.count / most)
    bend = (begin + end) / 2
    dashes = "" if box.branch.count else ' stroke-dasharray="4 3"'
    line = (
        f'<path d="M{begin:.1f},{box.parent.middle:.1f} C{bend:.1f},{box.parent.middle:.1f} {bend:.1f},'
        f'{box.middle:.1f} {end:.1f},{box.middle:.1f}" fill="none" stroke="{colour}" '
        f'stroke-opacity="{0.9 if box.branch.is_taken else 0.3}" stroke-width="{thickness:.1f}"{dashes}/>'
    )
    if not box.branch.count:
        return line
    # The number stands left of the box on a white ground, so that it can be read over any line.
    number = str(box.branch.count)
    right = end - 3
    width = DIGIT * len(number) + 4
    return (
        line + f'<rect x="{right - width + 2:.1f}" y="{box.middle - 7:.1f}" width="{width:.1f}" height="14" rx="3" '
        'fill="white" fill-opacity="0.85"/>'
        f'<text x="{right:.1f}" y="{box.middle + 3.5:.1f}" text-anchor="end" font-size="10" fill="{GREY}">'
        f"{number}</text>"
    )


def _box(box: _Box) -> str:
    """The label in its box, and behind it how many rollouts go on in ways that are not drawn."""
    taken, new = box.branch.is_taken, box.parent is not None and box.branch.count == 0
    fill = "#fff7ed" if taken else "#f8fafc"
    dashes = ' stroke-dasharray="4 3"' if new else ""
    shape = (
        f'<rect x="{box.left:.1f}" y="{box.middle - HEIGHT / 2:.1f}" width="{box.right - box.left:.1f}" '
        f'height="{HEIGHT:.0f}" rx="5" fill="{fill}" stroke="{_colour(box.branch) if taken else "#cbd5e1"}"{dashes}/>'
    )
    colour = GREY if box.parent is None else "#0f172a"
    hidden = ""
    if box.hidden:
        base = box.middle + (HEIGHT / 2 + 6 if box.children else 4)
        hidden = f'<text x="{box.right + 4:.1f}" y="{base:.1f}" font-size="10" fill="{GREY}">{box.hidden}</text>'
    return shape + _text(box.label, box.left + PADDING, box.middle + 4, colour) + hidden


def _text(label: str, left: float, base: float, colour: str) -> str:
    """Text that is as wide as its box, whatever the font."""
    fit = f' textLength="{_width(label):.1f}" lengthAdjust="spacingAndGlyphs"' if label else ""
    return f'<text x="{left:.1f}" y="{base:.1f}" fill="{colour}" xml:space="preserve"{fit}>{escape(label)}</text>'


def _colour(branch: Branch) -> str:
    return ORANGE if branch.is_taken else BLUE


def _width(label: str) -> float:
    """Pixels of a text in a monospaced font; wide characters take the room of two."""
    return CHARACTER * sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in label)
