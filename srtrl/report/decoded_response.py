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


def last_rollout(run: Run) -> tuple[str, RecordedPrompt, int]:
    """A late rollout of the prompt that has the most.

    That is the first sample of the last step that sampled the prompt; if no step before it did, the last sample.

    Returns:
        Its name, all rollouts of the prompt by step, draw and sample, and how many of them come before it.

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
    return f"step {steps[-1]}, sample {0 if len(steps) > 1 else num_earlier}", whole, num_earlier


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


def decoded_response(name: str, prompt: RecordedPrompt, num_earlier: int, decode: Decode) -> DecodedResponse:
    """Decode the rollout after the first `num_earlier` of its prompt again, with a drafter that knows these."""
    drafter, sample = Drafter(), prompt.samples[num_earlier]
    feed_drafter(drafter, [replace(prompt, samples=prompt.samples[:num_earlier])])
    replay = _LoggedReplay(drafter)
    replay.run([[replace(prompt, samples=[sample])]])
    steps = [sample.tokens[:1].tolist(), *replay.steps]
    return DecodedResponse(
        name=name,
        prompt_id=prompt.prompt_id,
        num_earlier=num_earlier,
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
