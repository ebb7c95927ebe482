"""Tiny random policies, requests, a tokenizer and a drafter for the engine's tests."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from page_cases import check_pages

from srtrl.drafters.base import DrafterBase, Int32Array, Int64Array, TextsByKey
from srtrl.drafters.draft_tree import EMPTY_TREE, ROOT, DraftTree, DraftTrees
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.model.hf_config import config_from_hf
from srtrl.model.noise import make_rng_key
from srtrl.model.transformer import Transformer
from srtrl.model.weights import init_model
from srtrl.types import Completion, Purpose, Request, Response, SamplingParams

PROMPTS = ((5,), (1, 2, 3, 4, 5, 6, 7, 8, 9), tuple(range(10, 27)), (3, 3, 3, 3), tuple(range(20, 36)))

Completions = dict[tuple[int, int], Completion]
"""By (draw, sample)."""
Outputs = dict[tuple[int, int], tuple[list[int], list[float], str | None]]
"""Tokens, log-probs and finish reason by (draw, sample)."""


def init_policy(seed: int = 0, dtype: torch.dtype = torch.float32, *, scale: float = 8, **config: Any) -> Transformer:
    """A random policy of 2 layers; `scale` multiplies its matrices, so that the distributions are far from uniform."""
    fields = {
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    model = init_model(config_from_hf(fields | config), seed, dtype, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return model


def tiny_policy(
    dtype: torch.dtype = torch.float32,
    *,
    hidden_size: int = 36,
    model_type: str = "qwen2",
    scale: float = 6.0,
    vocab_size: int = 61,
    **sizes: int,
) -> Transformer:
    """A random policy, its widths no multiple of 16; `scale` makes its distributions uneven, as trained ones are.

    `sizes` are further fields of its config, in place of those below.
    """
    config = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size + 5, "model_type": model_type}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "tie_word_embeddings": False}
    length = {"vocab_size": vocab_size, "max_position_embeddings": 256}
    return init_policy(1, torch.float32, scale=scale, **(config | heads | length | sizes)).to(dtype)


class Letters:
    """A tokenizer of one letter for each token; token 0 is "A"."""

    def decode(self, token_ids: list[int], /) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)

    def convert_ids_to_tokens(self, ids: list[int], /) -> list[str]:
        return [self.decode([token]) for token in ids]


def make_request(
    draw: int = 0,
    sample: int = 0,
    prompt: Iterable[int] = (1, 2),
    *,
    rng_key: int = 0,
    purpose: Purpose = "train",
    **sampling: Any,
) -> Request:
    """A request; `sampling` are the fields of its `SamplingParams`."""
    return Request(
        prompt_id=str(draw),
        prompt_token_ids=tuple(prompt),
        draw_index=draw,
        sample_index=sample,
        rng_key=rng_key,
        sampling=SamplingParams(**sampling),
        purpose=purpose,
    )


def requests_for(
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    *,
    num_samples: int = 3,
    max_new_tokens: int = 24,
    temperature: float = 1.0,
    seed: int = 0,
    **sampling: Any,
) -> list[Request]:
    """`num_samples` requests for each prompt, of various length limits; token 0 ends a sample.

    `sampling` are further fields of their `SamplingParams`.
    """
    return [
        make_request(
            draw,
            sample,
            prompt,
            rng_key=make_rng_key(seed, "train", draw, sample),
            max_new_tokens=max(1, max_new_tokens - 3 * draw),
            temperature=temperature,
            end_token_ids=(0,),
            **sampling,
        )
        for draw, prompt in enumerate(prompts)
        for sample in range(num_samples)
    ]


def decode(
    engine: Engine,
    requests: Sequence[Request],
    *,
    run_ahead: Sequence[Request] = (),
    before_step: Callable[[], None] = lambda: None,
) -> Completions:
    """A rollout, with integrity checked before every step; nothing is left after it. `before_step` may add requests."""
    completions: Completions = {}
    with engine.rollout("train"):
        for request in requests:
            engine.add(request)
        engine.add_run_aheads(run_ahead)
        while True:
            check_pages(engine.scheduler)
            before_step()
            if not engine.has_work:
                break
            for completion in engine.step():
                key = completion.request.draw_index, completion.request.sample_index
                assert key not in completions
                completions[key] = completion
    assert len(completions) >= len(requests)
    assert not engine.has_work
    assert engine.pool.num_used == 0
    return completions


def outputs(completions: Completions) -> Outputs:
    """Outputs that must be equal, bit by bit, no matter how the engine decoded them."""
    responses = {key: completion.response for key, completion in sorted(completions.items())}
    return {key: (r.token_ids.tolist(), r.rollout_logprobs.tolist(), r.finish_reason) for key, r in responses.items()}


def make_response(tokens: Sequence[int], logprobs: Sequence[float] = (), version: int = 0, **changes: Any) -> Response:
    """A response that has ended, with log-probs of 0 by default."""
    return Response(
        token_ids=np.array(tokens, np.int32),
        rollout_logprobs=np.array(logprobs or [0] * len(tokens), np.float32),
        policy_versions=np.full(len(tokens), version, np.int32),
        **{"finish_reason": "stop"} | changes,
    )


def options(**changes: object) -> EngineOptions:
    """Engine options for the tiny policies."""
    values: dict[str, object] = {
        "slots": 8,
        "page_size": 4,
        "max_sequence_tokens": 64,
        "prefill_chunk_tokens": 7,
        "draft_budget": 16,
        "max_draft_nodes": 16,
    }
    return EngineOptions(**(values | changes))  # type: ignore[arg-type]


class FakeDrafter(DrafterBase):
    """Checks all that the engine says to a drafter; drafts around the tokens that will be sampled where it knows them.

    `truth`: completions of an earlier run; without it all trees are empty. `accuracy` 1 drafts the truth on a branch
    that is not the first; 0 drafts nonsense; between, the truth for a while.
    """

    uses_texts = True

    def __init__(self, truth: Mapping[tuple[int, int], Completion] | None = None, *, accuracy: float = 1.0) -> None:
        super().__init__()
        self.truth = truth
        self.accuracy = accuracy
        self.random = np.random.default_rng(0)
        self.live: dict[int, Request] = {}
        self.committed: dict[int, list[int]] = {}
        """Slot -> tokens."""
        self.said: dict[int, list[int]] = {}
        """RNG key -> tokens of its run-ahead."""
        self.ends: list[Completion] = []
        self.num_proposals = 0

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        for slot, request in zip(slots.tolist(), requests, strict=True):
            assert slot not in self.live
            self.committed[slot] = []
            assert all(one.rng_key != request.rng_key for one in self.live.values()), "its run-ahead has not ended"
            self.live[slot] = request

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        assert len(token_ids) == offsets[-1]
        for b, slot in enumerate(slots.tolist()):
            self.committed[slot] += token_ids[offsets[b] : offsets[b + 1]].tolist()

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        for slot, completion in zip(slots, completions, strict=True):
            request, committed = self.live.pop(slot), self.committed.pop(slot)
            if completion is not None:
                assert (completion.request, completion.response.token_ids.tolist()) == (request, committed)
                self.ends.append(completion)

    def learn_texts(self, texts: TextsByKey) -> None:
        for by_rng_key in texts.values():
            self.said |= {rng_key: text.tolist() for rng_key, text in by_rng_key.items()}

    def propose(self, slots: Int64Array, max_nodes: Int64Array, min_score: float) -> DraftTrees:
        self.num_proposals += 1
        return DraftTrees.of(self._tree(*pair) for pair in zip(slots.tolist(), max_nodes.tolist(), strict=True))

    def _tree(self, slot: int, max_nodes: int) -> DraftTree:
        if self.truth is None:
            return EMPTY_TREE
        request = self.live[slot]
        response = self.truth[request.draw_index, request.sample_index].response
        ahead = response.token_ids.tolist()[len(self.committed[slot]) :]
        tokens: list[int] = []
        parents: list[int] = []
        on_truth = ROOT
        for right in ahead[: int(self.random.integers(0, 6))]:
            wrong = int(self.random.integers(0, 60))
            if wrong != right:  # the wrong sibling comes first, and has a child of its own
                tokens += [wrong, wrong + 1]
                parents += [on_truth, len(tokens) - 2]
            if self.random.random() >= self.accuracy:
                break
            tokens.append(right)
            parents.append(on_truth)
            on_truth = len(tokens) - 1
        return DraftTree(
            token_ids=np.array(tokens[:max_nodes], np.int32),
            parents=np.array(parents[:max_nodes], np.int32),
            scores=np.ones(len(tokens[:max_nodes]), np.float32),
        )
