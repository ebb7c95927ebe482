"""GRPO in about 100 lines of torch: what `srtrl train quickstart` does, without its trainer and without its decoder.

    python docs/examples/grpo.py 52

It prints the mean reward of each step. The model is `transformers`' Llama with the bundled weights. The problems, the
order of the prompts and the noise of each token are those of the quickstart, so the first step has the same samples
and the curve follows the quickstart's. S samples of a step, P prompt tokens (padded on the left), L response tokens.
"""

import sys

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, LlamaForCausalLM

from srtrl.engine.sampling import sample_rows_reference
from srtrl.model.folders import locate
from srtrl.model.noise import make_rng_key
from srtrl.tasks.arithmetic import ArithmeticOptions, draw_expressions, is_correct

NUM_PROMPTS, NUM_SAMPLES, NUM_TRAIN, MAX_NEW_TOKENS = 32, 8, 1536, 96
LEARNING_RATE, CLIP, MAX_GRAD_NORM = 2e-4, 0.2, 1.0
MICRO_BATCH = 64  # samples

torch.set_num_threads(1)
folder = locate("bundled:tiny")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
problems = draw_expressions(ArithmeticOptions(num_train=NUM_TRAIN), "train")


@torch.no_grad()
def decode(prompts: Tensor, mask: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sample a response to each of `prompts` [S, P]; token = argmax(logits + Gumbel noise of (key, position)).

    Returns:
        Tokens [S, L], their log-probs [S, L], and which of them belong to the response [S, L]: all up to the end token.
    """
    cache, tokens, logprobs, kept = DynamicCache(), [], [], []
    running = torch.ones(len(prompts), dtype=torch.bool)
    inputs, positions = prompts, (mask.cumsum(1) - 1).clamp(min=0)
    for place in range(MAX_NEW_TOKENS):
        output = model(inputs, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1)
        logits = output.logits[:, -1]  # [S, V]
        token = sample_rows_reference(logits, torch.ones(len(logits)), keys, torch.full_like(keys, place))  # [S]
        tokens.append(token)
        logprobs.append(logits.log_softmax(-1).gather(1, token[:, None])[:, 0])
        kept.append(running)
        running = running & (token != tokenizer.eos_token_id)
        if not running.any():
            break
        inputs, positions = token[:, None], positions[:, -1:] + 1
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
    return torch.stack(tokens, 1), torch.stack(logprobs, 1), torch.stack(kept, 1)


def response_logprobs(prompts: Tensor, prompt_mask: Tensor, tokens: Tensor, kept: Tensor) -> Tensor:
    """Log-probs of the response tokens by the model as it is now, [S, L], with gradient."""
    mask = torch.cat((prompt_mask, kept.long()), dim=1)  # [S, P + L]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = torch.cat((prompts, tokens), dim=1)
    logits = model(inputs, attention_mask=mask, position_ids=positions, logits_to_keep=tokens.shape[1] + 1).logits
    logprobs: Tensor = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]
    return logprobs


def train_step(step: int) -> float:
    """One step of GRPO: sample, grade, compare within each group, update. Returns the mean reward."""
    draws = range(step * NUM_PROMPTS, (step + 1) * NUM_PROMPTS)  # the step's places in the order of the whole run
    order = np.concatenate([np.random.default_rng((0, e)).permutation(NUM_TRAIN) for e in (0, 1)])
    chosen = [problems[order[draw]] for draw in draws for _ in range(NUM_SAMPLES)]
    texts = [f"Compute {problem.text}.\n" for problem in chosen]
    batch = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    names = [make_rng_key(0, "train", draw, sample) for draw in draws for sample in range(NUM_SAMPLES)]
    keys = torch.from_numpy(np.array(names, np.uint64).view(np.int64))
    prompts, prompt_mask = batch["input_ids"], batch["attention_mask"]
    tokens, old_logprobs, kept = decode(prompts, prompt_mask, keys)

    ended = (row[mine] for row, mine in zip(tokens, kept, strict=True))
    responses = [str(tokenizer.decode(row, skip_special_tokens=True)) for row in ended]
    correct = [is_correct(text, str(problem.value)) for text, problem in zip(responses, chosen, strict=True)]
    rewards = torch.tensor(correct).double().view(NUM_PROMPTS, NUM_SAMPLES)
    centered = rewards - rewards.mean(dim=1, keepdim=True)
    advantages = (centered / (rewards.std(dim=1, keepdim=True) + 1e-6)).float().view(-1, 1)  # [S, 1]

    for first in range(0, len(tokens), MICRO_BATCH):
        rows = slice(first, first + MICRO_BATCH)
        logprobs = response_logprobs(prompts[rows], prompt_mask[rows], tokens[rows], kept[rows])
        ratio = (logprobs - old_logprobs[rows]).exp()  # near 1 here; with several updates per rollout it moves away
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        token_loss = -torch.minimum(ratio * advantages[rows], clipped * advantages[rows]) * kept[rows]
        loss = (token_loss.sum(1) / kept[rows].sum(1)).sum() / len(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return rewards.mean().item()


if __name__ == "__main__":
    for step in range(int(sys.argv[1])):
        print(f"step {step + 1}  reward {train_step(step):.4f}", flush=True)
