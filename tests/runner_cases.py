"""Samples that are decoded step by step through a runner, and what the model itself says of each of their rows."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from kernel_cases import KERNEL_DEVICE
from torch import Tensor

from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.engine.cuda_runner import CudaRunner, CudaStep
from srtrl.engine.rows import BatchArrays, Int64Array, PrefillChunk, StepInputs, StepSize, fill_inputs
from srtrl.engine.runner import RowFilters, Runner, SampledRows
from srtrl.engine.sampling import row_logprobs_reference, sample_rows_reference
from srtrl.model.attention import PackedPlan
from srtrl.model.hf_config import config_from_hf
from srtrl.model.paged_attention import ReferencePlan
from srtrl.model.transformer import Transformer
from srtrl.model.weights import init_model

PAGE_SIZE = 4
MAX_TOKENS = 48
MAX_NODES = 40
PAGES_EACH = 22
"""Of one sample at full length, with draft nodes."""

RunnerFactory = Callable[[Transformer, torch.dtype | None], Runner]
"""Makes a runner of a policy and the dtype to decode in, with the sizes above."""


def runner_policy(**changes: object) -> Transformer:
    """Two layers, with query heads that share key-value heads and norms of heads; large weights, as trained ones are.

    `changes` are fields of its Hugging Face config.
    """
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    policy = init_model(config_from_hf(config | changes), seed=1, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return policy.to(KERNEL_DEVICE)


def cuda_runner(policy: Transformer, decode_dtype: torch.dtype | None = None, **changes: object) -> CudaRunner:
    """A runner as on a CUDA device, where the policy is."""
    values: dict[str, object] = {
        "page_size": PAGE_SIZE,
        "decode_dtype": decode_dtype,
        "deterministic": None,
        "max_sequence_tokens": MAX_TOKENS,
        "max_draft_nodes": MAX_NODES,
        "cuda_graphs": True,
    }
    return CudaRunner(policy, **(values | changes))  # type: ignore[arg-type]


def compute_by_reference(runner: CudaRunner) -> Callable[[CudaStep], None]:
    """What a step of the runner does, from the same inputs, in plain PyTorch."""

    @torch.inference_mode()
    def compute(step: CudaStep) -> None:
        plan = ReferencePlan(runner.cache, step.rows)
        step.hidden.copy_(runner.model(step.rows.token_ids.long(), plan))
        if step.shape.num_sampled:
            logits = runner.model.logits(step.hidden[: step.shape.num_sampled])
            noise = (step.temperatures, step.rng_keys, step.sample_positions.long())
            step.tokens.copy_(sample_rows_reference(logits, *noise))
            step.logprobs.copy_(row_logprobs_reference(logits, step.temperatures, step.tokens.long()))

    return compute


def batch_arrays(**arrays: Any) -> BatchArrays:
    """The arrays that the rows of a step are made from; zeros for those that `fill_inputs` does not read."""
    num_slots = len(arrays["num_tokens"])
    values = {name: np.zeros((num_slots, 1), np.int32) for name in BatchArrays._fields}
    return BatchArrays(**(values | arrays))


class FakeCapturer:
    """Captures a step by keeping it."""

    def start_over(self) -> None:
        """Nothing is shared."""

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        return compute


def random_trees(random: np.random.Generator, sizes: Sequence[int], vocab_size: int = 61) -> DraftTrees:
    """Trees of these sizes, any shape."""
    return DraftTrees.of(
        DraftTree(
            token_ids=random.integers(vocab_size, size=size).astype(np.int32),
            parents=np.array([random.integers(ROOT, node) for node in range(size)], np.int32),
            scores=np.ones(size, np.float32),
        )
        for size in sizes
    )


class Samples:
    """The arrays of a batch, one slot for each prompt, and a runner that decodes them."""

    def __init__(self, runner: Runner, policy: Transformer, prompts: Sequence[Sequence[int]]) -> None:
        num_slots = len(prompts)
        self.runner = runner
        self.oracle = copy.deepcopy(policy).to("cpu")
        """Computes whole sequences, without pages."""
        self.token_ids = np.zeros((num_slots, MAX_TOKENS), np.int32)
        for slot, prompt in enumerate(prompts):
            self.token_ids[slot, : len(prompt)] = prompt
        self.num_tokens = np.array([len(prompt) for prompt in prompts])
        self.num_prompt_tokens = self.num_tokens.copy()
        pages = np.random.default_rng(0).permutation(num_slots * PAGES_EACH).astype(np.int32)
        self.page_table = pages.reshape(num_slots, PAGES_EACH)
        self.rng_keys = np.random.default_rng(1).integers(2**64, size=num_slots, dtype=np.uint64)
        self.temperatures = np.linspace(0.0, 1.5, num_slots, dtype=np.float32)
        runner.allocate_pages(num_slots * PAGES_EACH)

    def inputs(self, slots: Int64Array, trees: DraftTrees, chunks: Sequence[PrefillChunk] = ()) -> StepInputs:
        """A step's inputs, filled in."""
        rows = np.concatenate((trees.sizes + 1, [len(chunk.token_ids) for chunk in chunks])).astype(np.int64)
        ends = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        max_keys = max([*(self.num_tokens[slots] + trees.sizes).tolist(), *ends])
        num_sampled = len(slots) + trees.num_nodes
        size = StepSize(rows_per_sequence=rows, num_sampled=num_sampled, max_keys=max_keys, page_size=PAGE_SIZE)
        inputs = self.runner.inputs_for(size)
        batch = batch_arrays(
            token_ids=self.token_ids,
            num_tokens=self.num_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            page_table=self.page_table,
            rng_keys=self.rng_keys,
            temperatures=self.temperatures,
        )
        fill_inputs(inputs, batch, slots, trees, list(chunks), PAGE_SIZE)
        return inputs

    def step(
        self,
        slots: Sequence[int],
        trees: DraftTrees | None = None,
        chunks: Sequence[PrefillChunk] = (),
        filters: RowFilters | None = None,
    ) -> SampledRows:
        """Decode these slots, by default without drafts, beside prefill chunks."""
        trees = DraftTrees.empty(len(slots)) if trees is None else trees
        self.runner.launch(self.inputs(np.array(slots, np.int64), trees, chunks), filters)
        return self.runner.wait(len(slots) + trees.num_nodes)

    def chunk(self, slot: int, start: int, end: int) -> PrefillChunk:
        """Part of a prompt."""
        return PrefillChunk(token_ids=self.token_ids[slot, start:end], start=start, page_ids=self.page_table[slot])

    def prefill(self) -> SampledRows:
        """All prompts but for their last tokens, which are the roots of the first step."""
        ends = (self.num_tokens - 1).tolist()
        return self.step([], chunks=[self.chunk(slot, 0, end) for slot, end in enumerate(ends) if end])

    def expected_logits(self, slots: Sequence[int], trees: DraftTrees) -> Tensor:
        """[rows, V]: of each root and node as the end of a sequence of its own."""
        sequences = []
        for slot, tree in zip(slots, trees, strict=True):
            committed = self.token_ids[slot, : self.num_tokens[slot]].tolist()
            branches: list[list[int]] = []
            for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
                branches.append([*(committed if parent == ROOT else branches[parent]), token])
            sequences += [committed, *branches]
        lengths = [len(sequence) for sequence in sequences]
        tokens = torch.tensor([token for sequence in sequences for token in sequence])
        with torch.inference_mode():
            hidden = self.oracle(tokens, PackedPlan.from_lengths(lengths, "cpu"))
            return self.oracle.logits(hidden[torch.tensor(lengths).cumsum(0) - 1])

    def check(
        self, found: SampledRows, slots: Sequence[int], trees: DraftTrees | None = None, tolerance: float = 2e-4
    ) -> None:
        """Each row has the token and log-prob that the model gives it."""
        trees = DraftTrees.empty(len(slots)) if trees is None else trees
        logits = self.expected_logits(slots, trees)
        tokens, logprobs = self.sample(logits, slots, trees)
        assert found.token_ids.tolist() == tokens.tolist()
        np.testing.assert_allclose(found.logprobs, logprobs, atol=tolerance)

    def sample(
        self, logits: Tensor, slots: Sequence[int], trees: DraftTrees, filtered: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens (of `filtered` where given) and log-probs of `logits` [rows, V] by definition."""
        owners = np.repeat(np.array(slots), trees.sizes + 1)
        depths = np.concatenate([[len(path_to(tree, node)) for node in range(ROOT, tree.num_nodes)] for tree in trees])
        positions = self.num_tokens[owners] - self.num_prompt_tokens[owners] + depths
        temperatures = torch.from_numpy(self.temperatures[owners])
        keys = torch.from_numpy(self.rng_keys[owners].view(np.int64))
        wanted = logits if filtered is None else filtered
        tokens = sample_rows_reference(wanted, temperatures, keys, torch.from_numpy(positions))
        return tokens, row_logprobs_reference(logits, temperatures, tokens)

    def accept(self, slots: Sequence[int], trees: DraftTrees, paths: Sequence[Sequence[int]]) -> None:
        """Commit a path of nodes in each tree, and a bonus token; the KV of the nodes moves after the root's."""
        sources: list[int] = []
        targets: list[int] = []
        for slot, tree, path in zip(slots, trees, paths, strict=True):
            first = int(self.num_tokens[slot])
            moves = [(first + node, first + level) for level, node in enumerate(path) if node != level]
            sources += [self.kv_index(slot, source) for source, _ in moves]
            targets += [self.kv_index(slot, target) for _, target in moves]
            tokens = [*tree.token_ids[list(path)].tolist(), 7]
            self.token_ids[slot, first : first + len(tokens)] = tokens
            self.num_tokens[slot] += len(tokens)
        self.runner.move_kv(np.array(sources, np.int32), np.array(targets, np.int32))

    def kv_index(self, slot: int, position: int) -> int:
        """Where the KV of a position lies."""
        return int(self.page_table[slot, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE


def path_to(tree: DraftTree, node: int) -> list[int]:
    """The nodes from the first below the root to `node`."""
    path: list[int] = []
    while node != ROOT:
        path.insert(0, node)
        node = int(tree.parents[node])
    return path
