"""The options of `srtrl bench rollout`: their names and help, and which of them go together. Nothing heavy here."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from srtrl.bench.run_plan import RunPlan


class Peer(StrEnum):
    """What our decoder is compared with."""

    HF = "hf"
    """`transformers`' `generate`."""
    NOT_DETERMINISTIC = "not-deterministic"
    """Our decoder without the deterministic mode."""


Mode = Literal["peers", "trace", "live"]
"""Against other decoders; drafters on recorded rollouts; drafters on a policy that samples for itself."""

LengthsChoice = Literal["both", "equal", "long-tailed"]

# --- All modes ---
ModelName = Annotated[str | None, typer.Option(help="Hugging Face folder or hub name, in place of a shape.")]
ModelShape = Annotated[str, typer.Option(help="Random weights of this shape.")]
Slots = Annotated[
    str, typer.Option(metavar="N[,N...]", help="Sequences that srtrl decodes at once, one comparison each; 0: all.")
]
KvMemory = Annotated[float, typer.Option(help="Most memory of one KV cache of srtrl.")]
Repeats = Annotated[int, typer.Option(min=1, help="Runs of each contender, after one to warm up.")]
Precision = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Go on until the ratios' 95% intervals reach at most SHARE to either side: the --repeats runs are a pilot "
        "that decides once how many there will be.",
    ),
]
MaxMinutes = Annotated[
    float | None, typer.Option(help="With --precision: at most about so long for each number of slots or sequences.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts, lengths and sampling.")]
Dtype = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the weights.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; by default torch's own choice.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every run to this file, too.")]
WriteDocs = Annotated[
    Path | None, typer.Option(help="Put the result into this Markdown file, in place of an older one.")
]

# --- Against other decoders ---
Peers = Annotated[
    list[Peer] | None, typer.Option(help="Compare with this only; may be given more than once. [default: all]")
]
Sequences = Annotated[str, typer.Option(metavar="N,N,...", help="Sequences of a rollout.")]
Spread = Annotated[
    LengthsChoice,
    typer.Option(help="How lengths are spread; of a live policy `both` stands for its own end tokens."),
]
EqualTokens = Annotated[int, typer.Option(min=1, help="New tokens of each sequence, where equal.")]
LongestTokens = Annotated[int, typer.Option(min=8, help="Most new tokens, where long-tailed.")]
Samples = Annotated[
    int | None,
    typer.Option(min=1, help="Sequences of one prompt, as in a group of GRPO. [default: 1; of a live policy 8]"),
]
PromptsFile = Annotated[
    Path | None,
    typer.Option(
        help="File of JSON rows, as of `srtrl generate`; by default random token ids, for a live policy the task "
        "`arithmetic`."
    ),
]
PromptTokens = Annotated[tuple[int, int], typer.Option(metavar="LEAST MOST", help="Lengths of the random prompts.")]

# --- Drafters ---
Drafters = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME,...",
        help="Compare these drafters with the first of them, on a trace or a live policy (--model), in place of "
        "other decoders. [default of a trace: none,srt]",
    ),
]
Control = Annotated[
    bool,
    typer.Option("--control", help="Compare the first drafter with itself, too: the interval should cover 1."),
]
PromptsUsed = Annotated[
    str | None,
    typer.Option(
        metavar="N[,N...]",
        help="Use the first N prompts; or one N for each number of slots. [default: all of a trace, 32 when live]",
    ),
]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of each sample. [default: all of a trace, 96 when live]")
]
DraftBudget = Annotated[
    str | None, typer.Option(metavar="auto|N", help="Draft nodes of a sequence in a step. [default: auto]")
]
PriceAs = Annotated[
    str | None,
    typer.Option(
        metavar="CURVE",
        help="Price decode steps by a stated cost in place of the clock: ROWS:SECONDS,ROWS:SECONDS,... or the name of "
        "a curve.",
    ),
]

# --- Drafters on a trace ---
Trace = Annotated[
    Path | None,
    typer.Option(help="Recorded rollouts that the decoder is made to sample; JSONL, or Parquet of a run of srtrl."),
]
TokenizerFolder = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="DIR", help="Folder or hub name of the tokenizer, for a trace of texts."),
]
History = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Share of each prompt's samples that the drafter has seen before. [default: 0]"),
]
TraceNote = Annotated[str | None, typer.Option(metavar="TEXT", help="What the trace is, for the report.")]

# --- Drafters on a live policy ---
Epochs = Annotated[int | None, typer.Option(min=1, help="Visits to each prompt. [default: 3]")]
StepPrompts = Annotated[
    int | None, typer.Option(min=1, help="Prompts of one step; an epoch is then several. [default: all]")
]
PolicyChange = Annotated[
    float | None,
    typer.Option(
        metavar="SIGMA",
        help="Between steps, add noise to all weights, SIGMA times as large as they spread, as updates do. "
        "[default: 0]",
    ),
]
RunAhead = Annotated[
    str | None,
    typer.Option(
        metavar="MODE,...",
        help="Let idle slots decode the next step's prompts: off, uncoupled, coupled; each is a contender. "
        "[default: off]",
    ),
]

_OPTIONS_OF: dict[tuple[Mode, ...], tuple[str, ...]] = {
    ("peers",): ("peer", "sequences", "equal_tokens", "longest_tokens", "prompt_tokens"),
    ("peers", "live"): ("samples", "lengths", "prompts"),
    ("peers", "trace"): ("model_shape",),
    ("trace",): ("trace", "tokenizer_folder", "history", "trace_note"),
    ("trace", "live"): ("drafters", "control", "prompts_used", "max_tokens", "draft_budget", "price_as"),
    ("live",): ("epochs", "step_prompts", "policy_change", "run_ahead"),
}
"""Modes -> parameters of the command that these alone heed."""
_MODE_WORDS: dict[Mode, str] = {
    "peers": "comparing srtrl with other decoders (no --drafters and no --trace)",
    "trace": "--trace",
    "live": "--drafters on a live policy (--model and no --trace)",
}


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutBench:
    """What `srtrl bench rollout` was asked for; the options above say what the fields are."""

    mode: Mode
    model: str | None
    """A model to load; None for random weights of `shape`."""
    shape: str
    slots: tuple[int, ...]
    """0: as many as sequences."""
    kv_memory_gib: float
    repeats: int
    precision: float | None
    max_minutes: float | None
    seed: int
    dtype: str
    device: str
    num_threads: int | None
    peers: tuple[Peer, ...]
    num_sequences: tuple[int, ...]
    lengths: LengthsChoice
    equal_tokens: int
    longest_tokens: int
    num_samples: int
    prompts: Path | None
    prompt_tokens: tuple[int, int]
    drafters: tuple[str, ...]
    control: bool
    num_prompts: tuple[int, ...] | None
    """One for all numbers of slots, or one for each; None: the mode's default."""
    max_tokens: int | None
    draft_budget: Literal["auto"] | int
    price_as: str | None
    trace: Path | None
    tokenizer: str | None
    history: float
    trace_note: str | None
    num_epochs: int
    step_prompts: int | None
    policy_change: float
    run_ahead: tuple[str, ...]

    @property
    def plan(self) -> RunPlan:
        """How many runs count."""
        most = float("inf") if self.max_minutes is None else 60 * self.max_minutes
        return RunPlan(repeats=self.repeats, precision=self.precision, max_seconds=most)

    def num_prompts_at(self, slots_index: int) -> int | None:
        """Prompts to use in the comparison of that number of slots."""
        if self.num_prompts is None:
            return None
        return self.num_prompts[slots_index] if len(self.num_prompts) > 1 else self.num_prompts[0]


def choose_mode(given: AbstractSet[str]) -> Mode:
    """What is to be measured, by the names of the parameters that the user gave.

    Raises:
        ValueError: Two of them exclude each other.
    """
    if "peer" in given and given & {"drafters", "trace"}:
        other = "drafters" if "drafters" in given else "trace"
        raise ValueError(
            f"--peer and --{other} exclude each other: the one compares srtrl with other decoders, the other drafters "
            "with each other; leave one out"
        )
    mode: Mode = "trace" if "trace" in given else "live" if "drafters" in given else "peers"
    if mode == "live" and "model" not in given:
        raise ValueError("--drafters: give recorded rollouts with --trace FILE, or a policy that samples with --model")
    for modes, names in _OPTIONS_OF.items():
        unheeded = [name for name in names if name in given and mode not in modes]
        if unheeded:
            option = "--tokenizer" if unheeded[0] == "tokenizer_folder" else f"--{unheeded[0].replace('_', '-')}"
            words = "; or ".join(_MODE_WORDS[one] for one in modes)
            raise ValueError(f"{option} has no meaning here: it is for {words}")
    return mode


def parse_counts(option: str, text: str, least: int = 1) -> tuple[int, ...]:
    """Read `8,32,128`; equal numbers count once.

    Raises:
        ValueError: It is something else, or a number is below `least`.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise ValueError(f"{option}: expected counts like 8,32,128, found {text!r}")
    return tuple(dict.fromkeys(int(part) for part in parts))


def parse_prompts_used(text: str | None, num_slots: int) -> tuple[int, ...] | None:
    """Read `N`, or as many counts as there are numbers of slots (they may repeat).

    Raises:
        ValueError: It is something else.
    """
    if text is None:
        return None
    counts = tuple(count for part in text.split(",") for count in parse_counts("--prompts-used", part))
    if len(counts) not in (1, num_slots):
        raise ValueError(
            f"--prompts-used: expected one number, or {num_slots}, one for each of --slots; found {len(counts)}"
        )
    return counts


def parse_names(option: str, text: str, known: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Read `a,b,c`, each name once, each one of `known` where that is given.

    Raises:
        ValueError: An empty list, an unknown name, or one that comes twice.
    """
    names = tuple(part.strip() for part in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"{option}: expected names, each once, like none,srt; found {text!r}")
    unknown = [name for name in names if known is not None and name not in known]
    if unknown:
        raise ValueError(f"{option}: {unknown[0]!r} is none of {', '.join(known or ())}")
    return names


def parse_draft_budget(text: str | None) -> Literal["auto"] | int:
    """Read `auto` or a number.

    Raises:
        ValueError: It is neither.
    """
    if text is None or text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ValueError(f"--draft-budget: expected auto or a number of nodes, found {text!r}")
    return int(text)


def check_output(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written before anything is measured, not after.

    Raises:
        ValueError: It is a folder, or in none.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option}: {path} is a folder; expected a file to write")
    if not path.parent.is_dir():
        raise ValueError(f"{option}: there is no folder {path.parent} to write {path.name} into; make it first")
