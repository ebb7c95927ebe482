"""A rollout's decode steps with drafts from its prompt's earlier rollouts."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from srtrl.bench.recorded import RecordedPrompt, feed_drafter, merge_prompts, read_recorded
from srtrl.bench.replay_loop import LiveSample, Replay
from srtrl.drafters.srt import Drafter
from srtrl.engine.stopping import decode
from srtrl.model.folders import load_tokenizer
from srtrl.report.runs import Run, steps_by_prompt
from srtrl.run.steps import latest_checkpoint

END_SIGN = "∎"
"""Stands for special tokens: mostly the end of a response."""

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PromptHistory:
    """Rollouts of one prompt, and a later one."""

    earlier: RecordedPrompt
    """By step, draw and sample; no sample where the prompt has only one rollout."""
    later: RecordedPrompt
    """One sample, after all of `earlier`: of a later step, or else their sibling."""
    later_name: str


def read_history(run: Run) -> PromptHistory:
    """Read the rollouts of the prompt that has the most.

    The first sample of the last step that sampled the prompt is the later rollout. If no step before it did, its last
    sample is the later rollout and the others are the earlier ones.

    Raises:
        ValueError: The prompt has other tokens in another step.
    """
    steps_of = steps_by_prompt(run.rollout_files)
    prompt_id = max(steps_of, key=lambda name: (len(steps_of[name]), steps_of[name][-1]))
    steps = steps_of[prompt_id]
    recordings = [read_recorded(run.rollout_files[step], tokenizer=None, max_tokens=sys.maxsize) for step in steps]
    found = [prompt for [prompts] in recordings for prompt in prompts if prompt.prompt_id == prompt_id]
    whole, *others = merge_prompts(found)
    if others or len(found) != len(steps):
        raise ValueError(f"{run.folder / 'rollouts'}: prompt {prompt_id} has other tokens in another step")
    num_earlier = sum(len(prompt.samples) for prompt in found[:-1]) or len(whole.samples) - 1
    return PromptHistory(
        earlier=replace(whole, samples=whole.samples[:num_earlier]),
        later=replace(whole, samples=[whole.samples[num_earlier]]),
        later_name=f"step {steps[-1]}, sample {0 if len(steps) > 1 else num_earlier}",
    )


class _LoggedReplay(Replay):
    """A replay of one sample that keeps the tokens of each decode step."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.steps: list[list[int]] = []

    def _decode_step(self, live: Sequence[LiveSample]) -> None:
        start, num_tokens = live[0].num_committed, self.counts.num_tokens
        super()._decode_step(live)
        self.steps.append(live[0].sample.tokens[start : start + self.counts.num_tokens - num_tokens].tolist())


@dataclass(kw_only=True, slots=True, frozen=True)
class DecodedResponse:
    """A response in the decode steps that it takes with drafts from the prompt's earlier rollouts."""

    name: str
    prompt_id: str
    num_earlier: int
    """Rollouts that the drafts came from."""
    pieces: list[list[str]]
    """Texts of the tokens of each step; the first token is of the prompt's forward pass, a step of its own."""

    @property
    def num_tokens(self) -> int:
        """Decoded tokens of the response; observations of an environment are read, and do not count."""
        return sum(map(len, self.pieces))


def decoded_response(history: PromptHistory, decode: Decode) -> DecodedResponse:
    """Decode the later rollout again, with a drafter that knows the earlier ones."""
    drafter = Drafter()
    feed_drafter(drafter, [history.earlier])
    replay = _LoggedReplay(drafter)
    replay.run([[history.later]])
    steps = [history.later.samples[0].tokens[:1].tolist(), *replay.steps]
    return DecodedResponse(
        name=history.later_name,
        prompt_id=history.later.prompt_id,
        num_earlier=len(history.earlier.samples),
        pieces=[[on_one_line(decode([token_id])) for token_id in token_ids] for token_ids in steps],
    )


# --- Text -------------------------------------------------------------------------------------------------------------


def text_decoder(run: Run) -> Decode:
    """A function from tokens to their text, with `END_SIGN` for special tokens.

    The tokenizer is that of the run's newest checkpoint, else of its recipe's model.

    Raises:
        ValueError: It cannot be loaded.
    """
    of_run = latest_checkpoint(run.folder / "checkpoints") or run.recipe.model.tokenizer or run.recipe.model.path
    tokenizer = load_tokenizer(str(of_run))
    special = sorted(tokenizer.all_special_tokens, key=len, reverse=True)

    def spell(token_ids: Sequence[int]) -> str:
        text = decode(tokenizer, token_ids, clean_up_tokenization_spaces=False)
        for token in special:
            text = text.replace(token, END_SIGN)
        return text

    return spell


def on_one_line(text: str) -> str:
    """The text on one line, line ends shown."""
    return "".join("⏎" if character == "\n" else character if character.isprintable() else "·" for character in text)
