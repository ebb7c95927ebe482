"""The whole method on one page of plain PyTorch: sample with drafts, verify, remember, grade, update.

    python docs/examples/reference.py

It imports nothing of srtrl. It does the first two steps of `srtrl train quickstart`: it samples the same tokens, prints
the mean reward and how many tokens a decode step gives, and makes the same GRPO update. That takes about 20 seconds.
What srtrl adds is speed: all samples of a step in one batch, pages of keys and values, kernels, and drafts that are
chosen by more than counts. The product is tested against this page (tests/test_reference.py, which also writes the
problems: `python tests/test_reference.py`).

Sizes in brackets: N rows of a forward pass, C tokens in the cache, H heads, D numbers of a head, V tokens of the
vocabulary, R tokens of a response.
"""

import hashlib
import heapq
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

HERE = Path(__file__).resolve().parent
POLICY = HERE.parents[1] / "srtrl" / "model" / "bundled" / "tiny"
PROBLEMS = HERE / "problems.jsonl"
SEED, NUM_PROMPTS, NUM_SAMPLES, MAX_NEW_TOKENS = 0, 32, 8, 96
LEARNING_RATE, CLIP, MAX_GRAD_NORM = 2e-4, 0.2, 1.0

# --- 1. The model -----------------------------------------------------------------------------------------------------
# A transformer of the Llama family. It takes any rows, in any order: each row has a token, a position in its text, and
# a mask that says which other rows it sees. A text is rows that see all rows before them. A draft tree is rows that see
# the text and their ancestors. The keys and values of tokens that were computed before are in the cache.

Array = np.ndarray[Any, Any]
Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [H, C, D] each."""


class Model:
    """A folder of weights as Hugging Face publishes them: Llama, Qwen2 (biases) and Qwen3 (norms of heads)."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: weight.to(dtype).requires_grad_() for name, weight in load_weights(folder).items()}
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    def forward(self, tokens: Tensor, positions: Tensor, sees: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """Logits [N, V] of the rows, and the cache with their keys and values at its end; `sees` is [N, C + N] bool."""
        x, new_cache = self.weights["model.embed_tokens.weight"][tokens], []
        for layer in range(self.config["num_hidden_layers"]):
            attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
            h = self.norm(x, f"model.layers.{layer}.input_layernorm")
            queries, keys, values = (self.heads(h, f"{attention}{part}") for part in "qkv")  # [H, N, D]
            queries, keys = self.rotate(queries, positions), self.rotate(keys, positions)
            if cache is not None:
                keys, values = torch.cat((cache[layer][0], keys), 1), torch.cat((cache[layer][1], values), 1)
            new_cache.append((keys, values))
            inputs = (queries[None], keys[None], values[None])
            seen = functional.scaled_dot_product_attention(*inputs, attn_mask=sees, enable_gqa=True)[0]  # [H, N, D]
            x = x + self.linear(seen.transpose(0, 1).flatten(1), f"{attention}o_proj")
            h = self.norm(x, f"model.layers.{layer}.post_attention_layernorm")
            gated = functional.silu(self.linear(h, f"{mlp}gate_proj")) * self.linear(h, f"{mlp}up_proj")
            x = x + self.linear(gated, f"{mlp}down_proj")
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return self.norm(x, "model.norm") @ head.T, new_cache

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A product with a matrix, and a bias if there is one."""
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last dimension."""
        return functional.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def heads(self, x: Tensor, name: str) -> Tensor:
        """Queries, keys or values as heads, [H, N, D]; Qwen3 norms each head of the queries and keys."""
        states = self.linear(x, f"{name}_proj")
        heads = states.view(len(x), states.shape[1] // self.head_dim, self.head_dim).transpose(0, 1)
        return self.norm(heads, f"{name}_norm") if f"{name}_norm.weight" in self.weights else heads

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding: the numbers i and i + D/2 of a head turn by an angle that grows with the position."""
        theta = self.config.get("rope_theta") or self.config["rope_parameters"]["rope_theta"]
        speeds = 1.0 / theta ** (torch.arange(0, self.head_dim, 2) / self.head_dim)  # [D / 2]
        angles = positions[:, None] * speeds  # [N, D / 2]
        cos, sin = torch.cat((angles, angles), 1).cos().to(x.dtype), torch.cat((angles, angles), 1).sin().to(x.dtype)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


def load_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by name."""
    return {name: weight for file in sorted(folder.glob("*.safetensors")) for name, weight in load_file(file).items()}


def text_mask(size: int) -> Tensor:
    """Each row sees itself and all rows before it, [N, N]."""
    return torch.ones(size, size, dtype=torch.bool).tril()


# --- 2. Sampling with known noise -------------------------------------------------------------------------------------
# The token is the argmax of logits + Gumbel noise, which is exactly a sample of the softmax. The noise does not come
# from a generator with a state. It is a hash of (sample, position, token). So a token depends on its logits and on its
# place alone: not on the other rows of the pass, and not on the number of tokens that were guessed with it. This is why
# drafts change no token.

GOLDEN, MIX_1, MIX_2 = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


def make_key(draw: int, sample: int) -> int:
    """The key of a sample: a hash of the run's seed, the place of its prompt in the run, and its place in the group."""
    name = f"{SEED}/train/{draw}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def mix(bits: Array) -> Array:
    """SplitMix64: 64 bits that look random, for any 64 bits."""
    bits = (bits ^ (bits >> np.uint64(30))) * MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * MIX_2
    mixed: Array = bits ^ (bits >> np.uint64(31))
    return mixed


def gumbel_noise(key: int, position: int, vocab_size: int) -> Array:
    """The noise of all tokens at a position of a sample's response, [V]."""
    row = mix(mix(np.array([position], np.uint64) + GOLDEN) ^ np.uint64(key))
    bits = mix(row + np.arange(1, vocab_size + 1, dtype=np.uint64) * GOLDEN) >> np.uint64(12)
    noise: Array = -np.log(-np.log((bits + 0.5) * 2.0**-52))
    return noise


def sample_token(logits: Tensor, key: int, position: int, temperature: float) -> int:
    """The token at a position of a sample's response; the most likely one at temperature 0."""
    if temperature == 0:
        return int(logits.argmax())
    return int(np.argmax((logits / temperature).double().numpy() + gumbel_noise(key, position, len(logits))))


# --- 3. The drafter ---------------------------------------------------------------------------------------------------
# Samples of a prompt resemble each other, in a step and across epochs. So remember, for each short run of tokens, what
# followed it in earlier samples of this prompt. A draft continues the longest run that is known. It is a tree: where
# two tokens have followed, both may be guessed. A wrong guess costs time, and nothing else.

CONTEXTS, MAX_NODES = (16, 12, 8, 6, 4, 3, 2, 1), 8


class Memory:
    """Counts of the tokens that followed each context in the texts of a prompt."""

    def __init__(self) -> None:
        self.followed: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def learn(self, text: list[int]) -> None:
        """Add a text: prompt and response."""
        for end in range(1, len(text)):
            for length in CONTEXTS:
                if length <= end:
                    self.followed[tuple(text[end - length : end])][text[end]] += 1

    def counts_after(self, text: list[int]) -> Counter[int]:
        """How often each token has followed the longest end of the text that is known."""
        for length in CONTEXTS:
            context = tuple(text[-length:])
            if len(context) == length and context in self.followed:
                return self.followed[context]
        return Counter()

    def draft(self, text: list[int], max_nodes: int) -> list[tuple[int, int]]:
        """The nodes of a draft tree, (token, row of its parent); row 0 is the text's last token, node i is row i + 1.

        The most likely path comes first: the chance of a node is its parent's times the share of its token.
        """
        nodes: list[tuple[int, int]] = []
        open_nodes = [(-1.0, 0, 0, text)]  # minus the chance, row of the parent, token, and the text that ends in it
        while open_nodes and len(nodes) <= max_nodes:
            chance, parent, _, path = heapq.heappop(open_nodes)
            nodes.append((path[-1], parent))
            counts = self.counts_after(path)
            for token, count in counts.items():
                share = count / (counts.total() + 1)
                heapq.heappush(open_nodes, (chance * share, len(nodes) - 1, token, [*path, token]))
        return nodes[1:]


# --- 4. Decoding ------------------------------------------------------------------------------------------------------
# One forward pass computes the last token of the text and all nodes of its draft tree. Then the token after the last
# one is sampled, as if there were no drafts. If a child has this token, its row has been computed already: go there and
# sample again. If none has it, the step ends. So a step gives at least one token, and all its tokens are those that are
# sampled without drafts.


@dataclass
class Sample:
    """A response, the log-probs that its tokens had when they were sampled, and the decode steps that it took."""

    tokens: list[int]
    logprobs: list[float]
    num_steps: int


@torch.no_grad()
def decode(
    model: Model,
    prompt: list[int],
    key: int,
    memory: Memory,
    *,
    end_token: int,
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float = 1.0,
    max_nodes: int = MAX_NODES,
) -> Sample:
    """One sample of the prompt's response; it ends with `end_token` or after `max_new_tokens`."""
    text, logprobs, num_steps, is_over = list(prompt), [], 0, False
    size = len(prompt) - 1  # the prompt's last token is the root of the first step
    _, cache = model.forward(torch.tensor(prompt[:-1], dtype=torch.long), torch.arange(size), text_mask(size), None)
    while not is_over:
        nodes, num_cached = memory.draft(text, max_nodes), len(text) - 1
        tokens = torch.tensor([text[-1], *(token for token, _ in nodes)])
        depths, sees = [0], torch.eye(len(tokens), dtype=torch.bool)  # a row sees itself ...
        for row, (_, parent) in enumerate(nodes, start=1):
            sees[row] |= sees[parent]  # ... and what its parent sees ...
            depths.append(depths[parent] + 1)
        sees = torch.cat((torch.ones(len(tokens), num_cached, dtype=torch.bool), sees), 1)  # ... and the text before
        logits, cache = model.forward(tokens, num_cached + torch.tensor(depths), sees, cache)
        row, accepted = 0, [0]
        while True:
            text.append(sample_token(logits[row], key, len(text) - len(prompt), temperature))
            logprobs.append(float((logits[row] / (temperature or 1)).log_softmax(-1)[text[-1]]))
            is_over = text[-1] == end_token or len(text) - len(prompt) == max_new_tokens
            child = next((i for i, node in enumerate(nodes, start=1) if node == (text[-1], row)), None)
            if is_over or child is None:
                break
            row = child
            accepted.append(child)
        kept = torch.tensor([*range(num_cached), *(num_cached + row for row in accepted)])  # without the other nodes
        cache = [(keys[:, kept], values[:, kept]) for keys, values in cache]
        num_steps += 1
    memory.learn(text)
    return Sample(text[len(prompt) :], logprobs, num_steps)


# --- 5. GRPO ----------------------------------------------------------------------------------------------------------
# A sample whose reward is above the mean of its group becomes more likely, the others become less likely. The clip
# stops a token once its probability has changed by a fifth since it was sampled; with one update per rollout the ratio
# is 1 and nothing is clipped.


def response_logprobs(model: Model, prompt: list[int], response: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probs of the response's tokens by the model as it is now, [R], with gradient."""
    tokens = torch.tensor([*prompt, *response])
    logits, _ = model.forward(tokens[:-1], torch.arange(len(tokens) - 1), text_mask(len(tokens) - 1), None)
    logprobs = (logits[len(prompt) - 1 :] / temperature).log_softmax(-1)  # [R, V]
    return logprobs.gather(1, tokens[len(prompt) :, None])[:, 0]


def group_advantages(rewards: list[float]) -> Tensor:
    """How many standard deviations each reward of a group is above its mean, [S]; zeros where all are equal."""
    numbers = torch.tensor(rewards, dtype=torch.float64)
    return ((numbers - numbers.mean()) / (numbers.std() + 1e-6)).float()


def sample_loss(logprobs: Tensor, old_logprobs: Tensor, advantage: Tensor) -> Tensor:
    """PPO's clipped loss, the mean over the tokens of a sample."""
    ratio = (logprobs - old_logprobs).exp()  # [R]
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


@dataclass
class Group:
    """A prompt with its samples and their rewards."""

    prompt: list[int]
    samples: list[Sample]
    rewards: list[float]


def update(model: Model, optimizer: torch.optim.Optimizer, groups: list[Group]) -> None:
    """One optimizer step: the gradient of the mean loss of all samples, its norm clipped."""
    num_samples = sum(len(group.samples) for group in groups)
    for group in groups:
        for sample, advantage in zip(group.samples, group_advantages(group.rewards), strict=True):
            logprobs = response_logprobs(model, group.prompt, sample.tokens)
            loss = sample_loss(logprobs, torch.tensor(sample.logprobs), advantage)
            (loss / num_samples).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.weights.values(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()


# --- A training step --------------------------------------------------------------------------------------------------


def load_vocabulary(folder: Path) -> dict[int, str]:
    """The text of each token; the file writes a space as Ġ and a newline as Ċ."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return {token: text.replace("Ġ", " ").replace("Ċ", "\n") for text, token in vocabulary.items()}


def sample_group(model: Model, vocabulary: dict[int, str], problem: dict[str, Any], draw: int) -> Group:
    """Sample the responses of a prompt and grade them: 1 for the right answer, else 0."""
    memory, samples, rewards = Memory(), [], []
    for number in range(NUM_SAMPLES):
        end_token, key = model.config["eos_token_id"], make_key(draw, number)
        sample = decode(model, problem["token_ids"], key, memory, end_token=end_token)
        text = "".join(vocabulary[token] for token in sample.tokens if token != end_token)
        samples.append(sample)
        rewards.append(float(text.rpartition("Answer:")[2].strip() == problem["answer"]))
    return Group(problem["token_ids"], samples, rewards)


def main() -> None:
    """The quickstart's first two steps."""
    torch.set_num_threads(1)
    model, vocabulary = Model(POLICY), load_vocabulary(POLICY)
    optimizer = torch.optim.AdamW(model.weights.values(), lr=LEARNING_RATE, weight_decay=0.0)
    problems = [json.loads(line) for line in PROBLEMS.read_text().splitlines()]
    for start in range(0, len(problems), NUM_PROMPTS):
        draws = range(start, start + NUM_PROMPTS)
        groups = [sample_group(model, vocabulary, problems[draw], draw) for draw in draws]
        update(model, optimizer, groups)
        samples = [sample for group in groups for sample in group.samples]
        mean = sum(sum(group.rewards) for group in groups) / len(samples)
        speed = sum(len(sample.tokens) for sample in samples) / sum(sample.num_steps for sample in samples)
        print(f"step {start // NUM_PROMPTS + 1}: mean reward {mean:.4f}, {speed:.2f} tokens per decode step")


if __name__ == "__main__":
    main()
