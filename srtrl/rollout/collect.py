"""Groups of graded rollouts from the engine: a completion goes to the graders while the others still decode.

What comes back depends on the policy, the seed and the data order alone: groups are in data order and samples sorted,
never in the order in which they finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from srtrl.engine.sampler import stream_of
from srtrl.engine.stopping import cut_at_stop_string
from srtrl.rollout.stage_timer import StageTimer
from srtrl.types import Completion, Grade, Prompt, Purpose, Request, Rollout, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from srtrl.engine.engine import Engine
    from srtrl.tasks.grading import Grader


@dataclass(kw_only=True, slots=True, frozen=True)
class CollectProgress:
    """How far a collection is, for progress bars."""

    num_done: int
    """Completions so far."""
    num_total: int
    num_tokens: int
    """Response tokens so far, of finished completions."""


def collect_rollouts(
    engine: Engine,
    grader: Grader,
    tokenizer: PreTrainedTokenizerBase,
    draws: Sequence[tuple[int, Prompt]],
    *,
    num_samples: int,
    sampling: SamplingParams,
    seed: int,
    purpose: Purpose,
    step: int,
    run_ahead: Sequence[Request] = (),
    on_progress: Callable[[CollectProgress], None] | None = None,
    timer: StageTimer | None = None,
) -> list[RolloutGroup]:
    """Decode and grade `num_samples` samples of every draw.

    Args:
        engine: Decodes; its policy is not changed.
        grader: Grades beside the decoder.
        tokenizer: Turns response tokens into the text that is graded.
        draws: `(draw_index, prompt)`, draw indices distinct; the same prompt may be drawn twice.
        num_samples: Samples of each draw.
        sampling: How each sample is decoded.
        seed: The run's seed; with `purpose`, `step`, draw and sample index it makes each sample's random stream.
        purpose: `train` or `eval`: they never share noise.
        step: Training step of the streams.
        run_ahead: What idle slots may decode meanwhile (see `run_ahead.py`); none of it comes back.
        on_progress: Called after each completion.
        timer: Counts decoding as `rollout` and waiting for the last graders as `grading`.

    Returns:
        One group a draw, sorted by draw index; rollouts sorted by sample index.

    Raises:
        ValueError: A request that the engine can never serve (see `Engine.check_request`), before anything is decoded.
    """
    timer = timer if timer is not None else StageTimer()
    requests = sample_requests(draws, num_samples=num_samples, sampling=sampling, seed=seed, purpose=purpose, step=step)
    assert all(request.is_run_ahead for request in run_ahead), "a request to learn from among the run-aheads"
    streams = {request.stream for request in requests}
    assert streams.isdisjoint(one.stream for one in run_ahead), "a run-ahead has the stream of a sample of this step"
    prompts = dict(draws)
    completions: dict[tuple[int, int], Completion] = {}
    texts: dict[tuple[int, int], str] = {}
    tickets = {}
    num_tokens = 0
    with timer.stage("rollout"):
        for completion in engine.generate(requests, run_ahead=run_ahead):
            assert not completion.request.is_run_ahead, "a run-ahead must never be learned from"
            key = (completion.request.draw_index, completion.request.sample_index)
            assert key not in completions, f"the engine finished draw {key[0]}, sample {key[1]} twice"
            completions[key] = completion
            texts[key] = response_text(tokenizer, completion.token_ids, sampling.stop_strings)
            tickets[key] = grader.submit(
                prompts[key[0]], texts[key], completion.finish_reason, len(completion.token_ids)
            )
            num_tokens += len(completion.token_ids)
            if on_progress is not None:
                on_progress(CollectProgress(num_done=len(completions), num_total=len(requests), num_tokens=num_tokens))
    assert len(completions) == len(requests), f"{len(completions)} completions of {len(requests)} requests"
    keys = sorted(completions)
    with timer.stage("grading"):
        grades = dict(zip(keys, grader.collect([tickets[key] for key in keys]), strict=True))
    return _groups(prompts, completions, texts, grades)


def sample_requests(
    draws: Sequence[tuple[int, Prompt]],
    *,
    num_samples: int,
    sampling: SamplingParams,
    seed: int,
    purpose: Purpose,
    step: int,
) -> list[Request]:
    """One request a sample, sorted by (draw, sample); the engine chooses its own admission order."""
    assert len({draw_index for draw_index, _ in draws}) == len(draws), "draw indices must be distinct"
    return [
        Request(
            prompt_id=prompt.prompt_id,
            prompt_token_ids=prompt.token_ids,
            draw_index=draw_index,
            sample_index=sample_index,
            stream=stream_of(seed, purpose, step, draw_index, sample_index),
            sampling=sampling,
            purpose=purpose,
        )
        for draw_index, prompt in sorted(draws, key=lambda draw: draw[0])
        for sample_index in range(num_samples)
    ]


def response_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], stop_strings: Sequence[str]) -> str:
    """The response as text: without special tokens, cut before the first stop string."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    assert isinstance(text, str)
    return cut_at_stop_string(text, stop_strings)


def _groups(
    prompts: dict[int, Prompt],
    completions: dict[tuple[int, int], Completion],
    texts: dict[tuple[int, int], str],
    grades: dict[tuple[int, int], Grade],
) -> list[RolloutGroup]:
    rollouts: dict[int, list[Rollout]] = {draw_index: [] for draw_index in sorted(prompts)}
    for key in sorted(completions):
        completion = completions[key]
        rollouts[key[0]].append(
            Rollout(
                prompt=prompts[key[0]],
                draw_index=key[0],
                sample_index=key[1],
                token_ids=completion.token_ids,
                rollout_logprobs=completion.rollout_logprobs,
                text=texts[key],
                finish_reason=completion.finish_reason,
                policy_version=completion.policy_version,
                grade=grades[key],
            )
        )
    return [
        RolloutGroup(prompt=prompts[draw_index], draw_index=draw_index, rollouts=group)
        for draw_index, group in rollouts.items()
    ]
