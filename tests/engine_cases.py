"""Tiny random policies, requests and drafters for the engine's tests."""

from collections.abc import Sequence

import numpy as np
import torch

from srtrl.drafters.base import DrafterBase, Int32Array, Int64Array
from srtrl.drafters.draft_tree import EMPTY_TREE, ROOT, DraftTree, DraftTrees
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.engine.sampling import make_rng_key
from srtrl.model.hf_config import config_from_hf
from srtrl.model.transformer import Transformer
from srtrl.model.weights import init_model
from srtrl.types import Completion, Request, SamplingParams

PROMPTS = ((5,), (1, 2, 3, 4, 5, 6, 7, 8, 9), tuple(range(10, 27)), (3, 3, 3, 3), tuple(range(20, 36)))


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
    config = {
        "model_type": model_type,
        "architectures": [
            {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[model_type]
        ],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size + 5,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        **sizes,
    }
    model = init_model(config_from_hf(config), seed=1, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return model.to(dtype)


def requests_for(
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    *,
    num_samples: int = 3,
    max_new_tokens: int = 24,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[Request]:
    """`num_samples` requests a prompt, of various length limits; token 0 ends a sample."""
    return [
        Request(
            prompt_id=str(draw),
            prompt_token_ids=prompt,
            draw_index=draw,
            sample_index=sample,
            rng_key=make_rng_key(seed, "train", draw, sample),
            sampling=SamplingParams(
                max_new_tokens=max(1, max_new_tokens - 3 * draw), temperature=temperature, end_token_ids=(0,)
            ),
        )
        for draw, prompt in enumerate(prompts)
        for sample in range(num_samples)
    ]


def decode(engine: Engine, requests: Sequence[Request]) -> dict[tuple[int, int], Completion]:
    """Completions by (draw, sample); integrity is checked after every step."""
    completions: dict[tuple[int, int], Completion] = {}
    for request in requests:
        engine.add(request)
    while engine.scheduler.has_work:
        for completion in engine.step():
            completions[completion.request.draw_index, completion.request.sample_index] = completion
        engine.scheduler.check_integrity()
    assert len(completions) == len(requests)
    return completions


def outputs(
    completions: dict[tuple[int, int], Completion],
) -> dict[tuple[int, int], tuple[list[int], list[float], str]]:
    """What must be equal, bit by bit, whatever the engine did to get there."""
    return {key: (c.token_ids, c.rollout_logprobs, c.finish_reason) for key, c in sorted(completions.items())}


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


class KnowingDrafter(DrafterBase):
    """Drafts trees around the tokens that will be sampled (known from an earlier run): right, wrong and in between.

    `accuracy` 1 drafts the truth on a branch that is not the first; 0 drafts nonsense; between, the truth for a while.
    """

    def __init__(self, truth: dict[tuple[int, int], Completion], *, accuracy: float, vocab_size: int = 61) -> None:
        super().__init__()
        self.truth = truth
        self.accuracy = accuracy
        self.vocab_size = vocab_size
        self.random = np.random.default_rng(0)
        self.requests: dict[int, Request] = {}
        self.committed: dict[int, list[int]] = {}

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        for slot, request in zip(slots.tolist(), requests, strict=True):
            assert slot not in self.requests
            self.requests[slot], self.committed[slot] = request, []

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        for b, slot in enumerate(slots.tolist()):
            self.committed[slot] += token_ids[offsets[b] : offsets[b + 1]].tolist()

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        for slot, completion in zip(slots, completions, strict=True):
            assert completion is None or completion.token_ids == self.committed[slot]
            del self.requests[slot], self.committed[slot]

    def propose(self, slots: Int64Array, max_nodes: Int64Array) -> DraftTrees:
        return DraftTrees.of(self._tree(*pair) for pair in zip(slots.tolist(), max_nodes.tolist(), strict=True))

    def _tree(self, slot: int, max_nodes: int) -> DraftTree:
        request = self.requests[slot]
        ahead = self.truth[request.draw_index, request.sample_index].token_ids[len(self.committed[slot]) :]
        tokens: list[int] = []
        parents: list[int] = []
        on_truth = ROOT
        for right in ahead[: int(self.random.integers(0, 6))]:
            wrong = int(self.random.integers(0, self.vocab_size))
            if wrong != right:  # the wrong sibling comes first, and has a child of its own
                tokens += [wrong, (wrong + 1) % self.vocab_size]
                parents += [on_truth, len(tokens) - 2]
            if self.random.random() >= self.accuracy:
                break
            tokens.append(right)
            parents.append(on_truth)
            on_truth = len(tokens) - 1
        if not tokens:
            return EMPTY_TREE
        return DraftTree(
            token_ids=np.array(tokens, np.int32),
            parents=np.array(parents, np.int32),
            scores=np.ones(len(tokens), np.float32),
        ).first(max_nodes)


class Listener(DrafterBase):
    """Drafts nothing; checks that it hears of each sample once, from start to finish, and before it is asked."""

    uses_run_aheads = True

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Request] = {}
        self.heard: dict[int, list[int]] = {}
        """Slot -> tokens."""
        self.said: dict[int, list[int]] = {}
        """RNG key of a run-ahead -> what it has said."""
        self.said_before: dict[int, list[int]] = {}
        """RNG key of a sample -> what its run-ahead had said when the sample came."""
        self.ends: list[Completion] = []
        self.num_asked = 0

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        for slot, request in zip(slots.tolist(), requests, strict=True):
            assert slot not in self.live
            if request.is_run_ahead:
                assert request.rng_key not in self.said
                self.said[request.rng_key] = []
            elif request.rng_key in self.said:
                assert all(one.rng_key != request.rng_key for one in self.live.values()), "the run-ahead goes on"
                self.said_before.setdefault(request.rng_key, list(self.said[request.rng_key]))
            self.live[slot], self.heard[slot] = request, []

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        assert len(token_ids) == offsets[-1]
        for b, slot in enumerate(slots.tolist()):
            tokens = token_ids[offsets[b] : offsets[b + 1]].tolist()
            self.heard[slot] += tokens
            if self.live[slot].is_run_ahead:
                self.said[self.live[slot].rng_key] += tokens

    def propose(self, slots: Int64Array, max_nodes: Int64Array) -> DraftTrees:
        self.num_asked += 1
        assert not any(self.live[slot].is_run_ahead for slot in slots.tolist())
        return DraftTrees.empty(len(slots))

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        for slot, completion in zip(slots, completions, strict=True):
            request, heard = self.live.pop(slot), self.heard.pop(slot)
            if completion is not None:
                assert completion.request == request
                assert completion.token_ids == heard
                assert not request.is_run_ahead
                self.ends.append(completion)
