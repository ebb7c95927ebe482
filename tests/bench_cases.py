"""A simple drafter, recorded rollouts, and the commands under test, for tests of the benchmark and of `replay`."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from typer.testing import CliRunner, Result

from srtrl.bench.recorded import Extensions, RecordedPrompt, RecordedSample
from srtrl.cli import app
from srtrl.drafters.base import DrafterBase, Int32Array, Int64Array
from srtrl.drafters.draft_tree import DraftTree, DraftTrees
from srtrl.recipe.schema import Section
from srtrl.types import Completion, Request

REPEATER = "bench_cases:Repeater"


def tree_of(token_ids: Sequence[int], parents: Sequence[int], scores: Sequence[float]) -> DraftTree:
    return DraftTree(
        token_ids=np.array(token_ids, np.int32),
        parents=np.array(parents, np.int32),
        scores=np.array(scores, np.float32),
    )


class RepeatOptions(Section):
    """How often."""

    num_repeats: int = 2
    """Length of the draft."""


class Repeater(DrafterBase):
    """Drafts the last token again and again, with scores 1/2, 1/4, ..., and keeps a log of its calls."""

    Options = RepeatOptions

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        assert isinstance(self.options, RepeatOptions)
        self.num_repeats = self.options.num_repeats
        self.log: list[str] = []
        self.names: dict[int, str] = {}
        self.last: dict[int, int] = {}

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        for slot, request in zip(slots.tolist(), requests, strict=True):
            assert slot not in self.names
            num_turns = len(request.prefix.extensions) if request.prefix else 0
            self.names[slot] = f"{request.prompt_id}{request.sample_index}" + "'" * num_turns
            self.log.append(f"start {self.names[slot]}")

    def propose(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
        self.log.append(" ".join(["propose", *(self.names[slot] for slot in slots.tolist())]))
        sizes = np.where(np.isin(slots, list(self.last)), np.minimum(max_nodes, self.num_repeats), 0).tolist()
        return DraftTrees.of(
            tree_of([self.last.get(slot, 0)] * size, range(-1, size - 1), [0.5 ** (d + 1) for d in range(size)])
            for slot, size in zip(slots.tolist(), sizes, strict=True)
        )

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        for row, slot in enumerate(slots.tolist()):
            tokens = token_ids[offsets[row] : offsets[row + 1]].tolist()
            self.last[slot] = tokens[-1]
            self.log.append(f"observe {self.names[slot]}: {tokens}")

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        for slot, completion in zip(slots, completions, strict=True):
            self.log.append(f"finish {self.names.pop(slot)}: {completion and completion.response.token_ids.tolist()}")

    def learn(self, completions: Sequence[Completion]) -> None:
        self.log += [f"learn {one.request.prompt_id}: {one.response.token_ids.tolist()}" for one in completions]

    def calls(self, *kinds: str) -> str:
        """Those parts of the log that begin with one of these words, in one line."""
        return ", ".join(entry for entry in self.log if entry.startswith(kinds))

    def end_step(self) -> None:
        self.log.append("update")

    def take_metrics(self) -> dict[str, float]:
        return {"engine/num_calls": float(len(self.log))}


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def recorded(
    name: str, prompt: Sequence[int], samples: Iterable[Sequence[int] | Int32Array], extensions: Extensions = ()
) -> RecordedPrompt:
    """A prompt whose samples have these tokens, all with the same extensions."""
    arrays = [RecordedSample(tokens=np.array(sample, np.int32), extensions=extensions) for sample in samples]
    return RecordedPrompt(prompt_id=name, prompt_token_ids=tuple(prompt), samples=arrays)


def run(*arguments: object) -> Result:
    """`srtrl` with these arguments; its tables may be wide."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def printed(*arguments: object) -> str:
    """Output of a command that succeeds."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout
