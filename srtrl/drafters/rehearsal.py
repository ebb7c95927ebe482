"""A short rollout for a drafter to be thrown away: kernels are compiled (or loaded) before a real one needs them.

Otherwise one that is needed seldom, to go on behind a run-ahead that was left, say, is compiled in the middle of some
later rollout: seconds that nobody expects there, and that the draft budget would take for what drafting costs.
"""

from srtrl.drafters.base import DrafterBase
from srtrl.types import Completion, Request, SamplingParams

_PROMPTS = ((1, 2, 3), (1, 2))
_TEXT = [4, 5, 6, 7, 8, 9, 4, 5, 6, 10, 11, 12] * 6
_SAMPLES = (_TEXT, _TEXT[:30] + _TEXT[33:], [13, *_TEXT[2:]], _TEXT[::-1])
"""As the run-ahead said, with a hole, with another beginning, and something else."""
_HISTORY = _TEXT * 100
"""Long enough for several threads to build the tries of two prompts."""
_TOKENS_PER_STEP = 8
_FEW, _MANY = 8, 2048
"""Nodes of a sequence: for one thread, and enough for several."""
_rehearsed: set[type[DrafterBase]] = set()


def rehearse_once(drafter: DrafterBase) -> None:
    """Rehearse with another drafter of the same class and options, the first time that one of this class comes."""
    if drafter.has_kernels and type(drafter) not in _rehearsed:
        _rehearsed.add(type(drafter))
        rehearse(type(drafter)(drafter.options))


def rehearse(drafter: DrafterBase) -> None:
    """Ask of a drafter what rollouts do: run-aheads, samples that follow them or do not, and an epoch later again."""
    next_id = 0
    for is_run_ahead in (True, False, False):
        requests = {
            next_id + index: _request(index, is_run_ahead=is_run_ahead)
            for index in range(len(_SAMPLES) * len(_PROMPTS))
        }
        next_id += len(requests)
        for sequence_id, request in requests.items():
            drafter.expected_tokens(request)
            drafter.start(sequence_id, request)
        texts = {one: _TEXT if is_run_ahead else _SAMPLES[requests[one].sample_index] for one in requests}
        for done in range(0, len(_TEXT), _TOKENS_PER_STEP):
            for num_nodes, ids in ((_MANY, list(requests)), (_FEW, list(requests)[: len(_SAMPLES)])):
                drafter.propose(ids, [0 if is_run_ahead else num_nodes] * len(ids))
            steps = {one: text[done : done + _TOKENS_PER_STEP] for one, text in texts.items()}
            steps = {one: tokens for one, tokens in steps.items() if tokens}
            drafter.observe(list(steps), list(steps.values()))
        for sequence_id, request in requests.items():
            drafter.finish(sequence_id, None if is_run_ahead else _completion(request, _HISTORY))
        drafter.set_next_uses(_PROMPTS)
        drafter.on_policy_update()
        drafter.take_metrics()


def _request(index: int, *, is_run_ahead: bool) -> Request:
    prompt = index // len(_SAMPLES)
    return Request(
        prompt_id="rehearsal",
        prompt_token_ids=_PROMPTS[prompt],
        draw_index=prompt,
        sample_index=index % len(_SAMPLES),
        rng_key=index,
        sampling=SamplingParams(max_new_tokens=len(_TEXT)),
        purpose="train",
        is_run_ahead=is_run_ahead,
    )


def _completion(request: Request, token_ids: list[int]) -> Completion:
    return Completion(
        request=request,
        token_ids=token_ids,
        rollout_logprobs=[0.0] * len(token_ids),
        finish_reason="stop",
        policy_version=0,
    )
