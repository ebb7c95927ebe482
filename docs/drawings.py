"""Writes drawings/*.svg: plain SVG, dark where the reader's browser is (`prefers-color-scheme`).

    python docs/drawings.py

The samples are those of walkthrough.md: one prompt's of the first step of recipes/quickstart.yaml.
"""

from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from pathlib import Path

FOLDER = Path(__file__).with_name("drawings")
GROUND, INK, GREY, LINE = "#f6f8fa", "#1f2328", "#59636e", "#8c959f"
WHITE, SHADE, GREEN, BLUE, ORANGE, PATH = "#ffffff", "#d8dee4", "#9be0a8", "#b6d8fb", "#ffd8a8", "#1a7f37"
DARK = {GROUND: "#161b22", INK: "#e6edf3", GREY: "#9da7b3", LINE: "#6e7681", PATH: "#3fb950"} | {
    WHITE: "#0d1117",
    SHADE: "#30363d",
    GREEN: "#1b5e2b",
    BLUE: "#1f4a7d",
    ORANGE: "#7a4a12",
}
"""Colour -> the one in its place on a dark page."""
SAMPLES = (
    "9+6=15⏎15*8=120Answ120+2=122⏎A: 12|8∎",
    "9+6=15⏎15*8=120⏎120+2=122⏎A: 122∎",
    "9+6=15⏎15*8=130⏎130+2=132⏎A: 132∎",
    "9+6=15⏎15*8=120⏎120+2=122⏎A: 122∎",
    "9+6=15⏎15*8=120⏎120&2=122⏎A: 122∎",
    "9+6=15⏎15*8=100Q100+2=102⏎Asw 102∎",
    "9+6=15⏎#5*8=120⏎120+2=122⏎A: 122∎",
    "9+6=15⏎15*8=1O0⏎160+2=172⏎A: 132∎",
)
"""One character for each token but for `Answ` and `sw` (noise that the policy has learned); A: the token `Answer`."""

DECODED = (
    ("1",),
    ("0", "-", "4", "=", "6", "⏎", "6", "+", "1", "1", "=", "1", "7", "⏎", "1"),
    ("7", "-", "1", "2", "=", "5", "⏎", "Answer", ":", " ", "5", "∎"),
)
"""The tokens of each decode step of a sample of the quickstart: the first of the last step's group of its prompt.

A report shows such steps; this one is decoded with drafts from the eight rollouts of the first epoch.
"""

FORK_TOKENS = "8201"
FORK_KNOWN = {
    "rollouts": (2.0, 3.0, 0.0, 0.0),
    "noise": (0.65, 0.28, -0.15, 0.76),
    "p": (0.45, 0.40, 0.08, 0.04),
}
FORK_SCORES = {
    "counts": (0.250, 0.375, 0.075, 0.038),
    "+ noise": (0.295, 0.330, 0.055, 0.057),
    "+ noise + p": (0.486, 0.339, 0.047, 0.056),
}
"""The fork of speculation.md for a sample with the RNG key 8: what is known of each token, and the drafter's scores.

A test compares them with the drafter.
"""


class Svg:
    """A drawing of this width and height in pixels."""

    def __init__(self, title: str, width: int, height: int) -> None:
        rules = "".join(
            f"[{name}='{light}']{{{name}:{dark}}}" for light, dark in DARK.items() for name in ("fill", "stroke")
        )
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            f"<style>@media (prefers-color-scheme: dark) {{{rules}}}</style>",
            '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, text: str = "", fill: str = WHITE) -> None:
        """A rectangle with lines of text in its middle."""
        self.lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{LINE}"/>'
        )
        rows = text.split("\n")
        for row, part in enumerate(rows):
            self.text(x + width / 2, y + height / 2 + 5 + 16 * (row - (len(rows) - 1) / 2), part, anchor="middle")

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", fill: str = INK, size: int = 13) -> None:
        """A line of text on the baseline y."""
        self.lines.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-size="{size}">{escape(text)}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], *, head: bool = True, bold: bool = False) -> None:
        """A line through the points, with an arrow's head at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = ' marker-end="url(#head)"' if head else ""
        self.lines.append(
            f'<polyline points="{path}" fill="none" stroke="{PATH if bold else GREY}" '
            f'stroke-width="{3 if bold else 1.3}"{end}/>'
        )

    def save(self, name: str) -> None:
        """Write the file."""
        (FOLDER / f"{name}.svg").write_text("\n".join([*self.lines, "</svg>"]) + "\n", encoding="utf-8")


def shown(token: str) -> str:
    """The token in a box."""
    return "\\n" if token == "⏎" else token


def training_step() -> None:
    """The stages of a training step."""
    svg = Svg("One training step", 820, 330)
    stages = [
        ("draws\n32 prompts", WHITE),
        ("rollouts\n32 x 8 samples", BLUE),
        ("grades\none per sample", WHITE),
        ("advantages\none per token", WHITE),
        ("update\nmini-batches", ORANGE),
    ]
    for number, (text, fill) in enumerate(stages):
        x = 20 + 160 * number
        svg.box(x, 130, 126, 56, text, fill)
        if number:
            svg.line([(x - 34, 158), (x - 2, 158)])
    svg.box(180, 30, 126, 46, "drafter\ntries of tokens", GREEN)
    svg.line([(220, 78), (220, 128)])
    svg.text(214, 108, "draft trees", anchor="end", fill=GREY)
    svg.line([(266, 130), (266, 80)])
    svg.text(274, 108, "accepted tokens", fill=GREY)
    svg.box(340, 240, 286, 46, "one set of weights\n(decoder and optimizer use the same)", SHADE)
    svg.line([(723, 188), (723, 263), (630, 263)])
    svg.text(716, 224, "optimizer step", anchor="end", fill=GREY)
    svg.line([(340, 263), (243, 263), (243, 190)])
    svg.text(252, 224, "next decode step", fill=GREY)
    svg.box(500, 30, 126, 46, "reference\n(KL), or critic", WHITE)
    svg.line([(563, 78), (563, 128)])
    svg.text(
        20,
        312,
        "Then: rollouts/*.parquet, an evaluation if due, a row of metrics.jsonl, a checkpoint if due.",
        fill=GREY,
    )
    svg.save("training_step")


def packed_batch() -> None:
    """Three sequences end to end, two of them with one prompt, and where each response token is predicted."""
    svg = Svg("A packed batch", 820, 264)
    sequences, index = ((3, 4, 0), (3, 6, 3), (4, 3, 0)), 0  # prompt, response, tokens of the sequence before
    path: list[int] = []
    left, cell = 96.0, 32.0
    svg.text(20, 82, "token_ids")
    svg.text(20, 98, "[T], T = 20", fill=GREY)
    svg.text(20, 182, "target_ids")
    svg.text(20, 198, "[R], R = 13", fill=GREY)
    num_targets = 0
    for number, (num_prompt, num_response, num_shared) in enumerate(sequences):
        start, num_added = left + cell * index, num_prompt + num_response - num_shared
        path = [*path[:num_shared], *range(index, index + num_added)]
        svg.text(start + cell * num_added / 2, 40, f"sequence {number}", anchor="middle", fill=GREY)
        svg.line([(start + 3, 48), (start + cell * num_added - 3, 48)], head=False)
        for place in range(num_shared, num_prompt + num_response):
            is_response = place >= num_prompt
            svg.box(left + cell * index, 60, cell, 40, str(index), BLUE if is_response else SHADE)
            if is_response:
                x = left + cell * 4 + cell * num_targets
                svg.line([(left + cell * (path[place - 1] + 0.5), 101), (x + cell / 2, 158)])
                svg.box(x, 160, cell, 40, str(index), BLUE)
                num_targets += 1
            index += 1
    caption = "Grey: prompt. Blue: response. A line leads from hidden_index, the token before, to its next token."
    svg.text(20, 232, caption, fill=GREY)
    svg.text(20, 250, "Sequence 1 has the prompt of sequence 0.", fill=GREY)
    svg.save("packed_batch")


def draft_of(prefix: str, others: Sequence[str], limit: int) -> list[tuple[str, float]]:
    """Up to `limit` paths of a draft tree, with the share of the texts' matches that go on so.

    The match is the longest end of the prefix, of at least 3 tokens, that the texts contain. (The drafter `srt` joins
    matches of several lengths.)
    """
    for start in range(max(len(prefix) - 2, 0)):
        end = prefix[start:]
        found = [text[at + len(end) :] for text in others for at in range(len(text)) if text.startswith(end, at)]
        if any(found):
            counts = Counter(text[:stop] for text in found for stop in range(1, len(text) + 1))
            best = sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
            return [(path, count / len(found)) for path, count in best[:limit]]
    return []


def two_ways() -> None:
    """A sample without drafts, one token in each decode step, and with them."""
    tokens = [token for step in DECODED for token in step]
    svg = Svg("The same sample without and with drafts", 820, 262)
    starts = [20 + 25.5 * number + 42 * ("Answer" in tokens[:number]) for number in range(len(tokens) + 1)]
    text = "".join(tokens).replace("⏎", "\n").removesuffix("∎")
    digest = f"same text, same sha256: {sha256(text.encode()).hexdigest()[:12]}"

    def row(y: float, first: int, part: Sequence[str], fill: str) -> None:
        for at, token in enumerate(part, first):
            svg.box(starts[at], y, starts[at + 1] - starts[at], 28, shown(token), fill)

    svg.text(20, 30, f"Without drafts: {len(tokens)} decode steps")
    svg.text(800, 30, digest, anchor="end", fill=GREY)
    row(56, 0, tokens, SHADE)
    for at in range(len(tokens)):
        svg.text((starts[at] + starts[at + 1]) / 2, 51, str(at + 1), anchor="middle", fill=GREY, size=10)
    svg.text(20, 122, f"With drafts: {len(DECODED)} decode steps")
    svg.text(800, 122, digest, anchor="end", fill=GREY)
    first = 0
    for number, part in enumerate(DECODED):
        y, end = 138 + 36.0 * number, first + len(part)
        row(y, first, part, GREEN)
        is_last = end == len(tokens)
        x = starts[first] - 8 if is_last else starts[end] + 8
        svg.text(x, y + 19, f"step {number + 1}", anchor="end" if is_last else "start", fill=GREY)
        first = end
    svg.save("two_ways")


def draft_tree() -> None:
    """The draft of sample 3 after its second line's `=`."""
    svg = Svg("A draft tree with its accepted path", 820, 310)
    prefix, sampled = SAMPLES[3][:12], SAMPLES[3][12:]
    tree = draft_of(prefix, [*SAMPLES[:3], *SAMPLES[4:]], 14)
    lanes: dict[str, int] = {"": 0}
    for path, _ in tree:  # a parent is before its children; its first child has its lane
        lane = lanes[path[:-1]]
        is_first = not any(other[:-1] == path[:-1] and other != "" for other in lanes)
        lanes[path] = lane if is_first else max(lanes.values()) + 1

    def place(path: str) -> tuple[float, float]:
        return 130 + 74.0 * len(path), 96 + 48.0 * lanes[path]

    for path, _ in tree:
        (x, y), (to_x, to_y) = place(path[:-1]), place(path)
        svg.line(
            [(x, y), (x + 30, to_y), (to_x, to_y)] if y != to_y else [(x, y), (to_x, to_y)],
            head=False,
            bold=sampled.startswith(path),
        )
    svg.box(20, 80, 128, 32, "15*8=", SHADE)
    accepted = [path for path, _ in tree if sampled.startswith(path)]
    for path, score in tree:
        x, y = place(path)
        svg.box(x - 16, y - 16, 32, 32, shown(path[-1]), GREEN if path in accepted else WHITE)
        svg.text(x, y - 20, f"{score:.1f}", anchor="middle", fill=GREY, size=11)
    x, y = place(accepted[-1])
    svg.line([(x + 16, y), (x + 52, y)])
    svg.box(x + 54, y - 16, 32, 32, shown(sampled[len(accepted)]), ORANGE)
    svg.text(
        20, 34, "One decode step: the sequence's last token and all nodes of the tree go through the policy together."
    )
    svg.text(
        20,
        54,
        "Green: sampled tokens that the draft has, accepted. "
        f"Orange: the token sampled after them. {len(accepted) + 1} tokens in one step.",
    )
    svg.text(
        20,
        294,
        "Above a node: share of earlier samples that continue so. \\n: a line break. White nodes are dropped.",
        fill=GREY,
    )
    svg.save("draft_tree")


def fork() -> None:
    """Draw the scores of the next token's candidates by counts, noise and distribution."""
    svg = Svg("A fork with its guesses", 820, 300)
    svg.text(20, 32, "A sample has 6*7=4. Which token comes next? The longest bar of a column is drafted first.")
    places = [94 + 44.0 * number for number in range(len(FORK_TOKENS))]
    svg.box(20, 138, 70, 32, "6*7=4", SHADE)
    for y, token in zip(places, FORK_TOKENS, strict=True):
        is_sampled = token == FORK_TOKENS[0]
        svg.line([(90, 154), (110, y), (132, y)], head=False, bold=is_sampled)
        svg.box(132, y - 16, 32, 32, token, ORANGE if is_sampled else WHITE)
    formats = {"rollouts": ".0f", "noise": "+.2f", "p": ".2f"}
    for x, (name, values) in zip((190, 400, 610), FORK_KNOWN.items(), strict=True):
        svg.text(x, 66, name, fill=GREY)
        for y, value in zip(places, values, strict=True):
            svg.text(x, y + 5, format(value, formats[name]))
    for x, (name, scores) in zip((270, 480, 670), FORK_SCORES.items(), strict=True):
        svg.text(x, 66, name, fill=GREY)
        for y, score in zip(places, scores, strict=True):
            svg.box(x, y - 12, 130 * score, 24, fill=GREEN if score == max(scores) else WHITE)
            svg.text(x + 130 * score + 6, y + 5, f"{score:.3f}")
    caption = "Rollouts: earlier ones that are equal so far and go on with the token. Noise: this sample's own."
    svg.text(20, 270, caption, fill=GREY, size=12)
    caption = "p: the policy's, at the newest of them. Orange: sampled, for it has the largest log p + noise."
    svg.text(20, 288, caption, fill=GREY, size=12)
    svg.save("fork")


def decode(num_slots: int, limit: int) -> list[list[tuple[int, int, int]]]:
    """[slot] -> (decode step, sample, tokens) of the samples decoded with drafts from the others' tokens so far."""
    done, waiting = [0] * len(SAMPLES), list(range(len(SAMPLES)))
    slots: list[int | None] = [None] * num_slots
    rows: list[list[tuple[int, int, int]]] = [[] for _ in slots]
    step = 0
    while waiting or any(sample is not None for sample in slots):
        slots = [waiting.pop(0) if sample is None and waiting else sample for sample in slots]
        texts = [text[:num] for text, num in zip(SAMPLES, done, strict=True)]
        for slot, sample in enumerate(slots):
            if sample is None:
                continue
            prefix, rest = texts[sample], SAMPLES[sample][done[sample] :]
            paths = [path for path, _ in draft_of(prefix, texts[:sample] + texts[sample + 1 :], limit) if path]
            num_new = min(1 + max((len(path) for path in paths if rest.startswith(path)), default=0), len(rest))
            done[sample] += num_new
            rows[slot].append((step, sample, num_new))
            if done[sample] == len(SAMPLES[sample]):
                slots[slot] = None
        step += 1
    return rows


def decode_timeline() -> None:
    """All samples in four slots, step by step."""
    rows = decode(4, 8)
    num_steps = 1 + max(step for row in rows for step, _, _ in row)
    cell = 700 / num_steps
    svg = Svg("A decode timeline", 820, 290)
    num_tokens = sum(len(text) for text in SAMPLES)
    num_decodes = sum(len(row) for row in rows)
    svg.text(
        20,
        34,
        f"Eight samples of one prompt in four slots: {num_tokens} tokens in {num_steps} decode steps, "
        f"{num_tokens / num_decodes:.1f} tokens per sequence and step.",
    )
    for slot, row in enumerate(rows):
        y = 76 + 42.0 * slot
        svg.text(20, y + 20, f"slot {slot}")
        for step, sample, num in row:
            svg.box(
                90 + cell * step,
                y,
                cell,
                30,
                "" if num == 1 else str(num),
                GREEN if num > 1 else SHADE if sample % 2 else BLUE,
            )
        for sample in sorted({sample for _, sample, _ in row}):
            first = next(step for step, other, _ in row if other == sample)
            svg.text(90 + cell * first, y - 3, f"sample {sample}", fill=GREY, size=10)
    svg.text(
        20,
        258,
        "Decode steps from left to right. Green: several tokens in one step, their number in the box.",
        fill=GREY,
    )
    svg.text(
        20, 276, "Blue, grey: one token. Drafts come from the tokens that the other samples have by then.", fill=GREY
    )
    svg.save("decode_timeline")


def main() -> None:
    """Write all drawings."""
    FOLDER.mkdir(exist_ok=True)
    for draw in (two_ways, training_step, packed_batch, draft_tree, fork, decode_timeline):
        draw()


if __name__ == "__main__":
    main()
