"""The product against docs/examples/reference.py, the whole method on one page: the oracle of decoder and update.

    python tests/test_reference.py

writes the problems that the page reads, docs/examples/problems.jsonl.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from drafter_cases import make_drafter
from engine_cases import PROMPTS, Letters, decode, init_policy, make_response, options, requests_for
from tiny_run import train
from torch import Tensor
from update_cases import NO_LIMIT, RecordingSGD, distance, make_recipe, update

from srtrl.build import build_tokenizer
from srtrl.engine.draft_budget import StepCost
from srtrl.engine.engine import Engine
from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model, named_tensors, save_model
from srtrl.recipe.file import load_recipe
from srtrl.report.runs import read_rollouts, read_run
from srtrl.tasks.base import load_task
from srtrl.tasks.order import DataOrder
from srtrl.trainer.credit import CreditAssigner, train_sequences
from srtrl.types import Grade, Prompt, Rollout, RolloutGroup

REPOSITORY = Path(__file__).resolve().parent.parent
QUICKSTART = REPOSITORY / "recipes" / "quickstart.yaml"
sys.path.append(str(REPOSITORY / "docs" / "examples"))
page: Any = import_module("reference")

# --- The quickstart ---------------------------------------------------------------------------------------------------


def quickstart_problems(num_steps: int = 2) -> str:
    """The prompts of the quickstart's first steps in the order in which they are drawn, a line each."""
    recipe = load_recipe(QUICKSTART, ())
    prompts = load_task(recipe, build_tokenizer(recipe)).train_prompts
    order = DataOrder(len(prompts), recipe.seed)
    drawn = [prompts[order.prompt_of(draw)] for draw in range(num_steps * recipe.rollout.num_prompts)]
    rows = [{"prompt": one.text, "token_ids": list(one.token_ids), "answer": one.answer} for one in drawn]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def test_the_problems_of_the_page_are_those_of_the_quickstart() -> None:
    assert page.PROBLEMS.read_text() == quickstart_problems()


def run_quickstart(output: Path, num_prompts: int) -> Path:
    """Two steps of the quickstart; returns the folder of the run."""
    sizes = (f"rollout.num_prompts={num_prompts}", "train.num_steps=2")
    overrides = (*sizes, f"output_dir={output}", "eval.before_and_after=false")
    return train(load_recipe(QUICKSTART, overrides)).folder


def test_two_steps_of_the_page_have_the_tokens_and_rewards_of_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The samples of the second step are those of an updated policy."""
    monkeypatch.setattr(page, "NUM_PROMPTS", 3)
    monkeypatch.setattr(page, "update", Mock(wraps=page.update))
    monkeypatch.setattr(page, "PROBLEMS", tmp_path / "problems.jsonl")
    lines = quickstart_problems().splitlines(keepends=True)
    page.PROBLEMS.write_text("".join(lines[:6]))
    page.main()
    run = read_run(run_quickstart(tmp_path, num_prompts=3))
    assert len(run.rollout_files) == len(page.update.call_args_list) == 2
    for file, call in zip(run.rollout_files.values(), page.update.call_args_list, strict=True):
        rows = read_rollouts(file, ["prompt_token_ids", "token_ids", "reward"]).to_pylist()
        found = [(row["prompt_token_ids"], row["token_ids"], row["reward"]) for row in rows]
        groups = call.args[2]
        assert len(found) == 24
        assert found == [
            (group.prompt, sample.tokens, reward)
            for group in groups
            for sample, reward in zip(group.samples, group.rewards, strict=True)
        ]
        assert len({reward for *_, reward in found}) == 2


# --- Models of three families ----------------------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},  # biases of queries, keys and values
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 10},  # norms of heads
}


@pytest.fixture(scope="session")
def folders(make_once: Callable[[str, Callable[[Path], object]], Path]) -> Callable[[str], Path]:
    """`folders(name)`: the folder of a random model, its biases and norms random, too."""

    def make(name: str, folder: Path) -> None:
        policy = init_policy(1, scale=6, vocab_size=61, rope_theta=1e4, **MODELS[name])
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn(len(parameter), generator=generator), alpha=0.3)
        save_model(policy, folder)

    return lambda name: make_once(f"page-{name}", lambda folder: make(name, folder))


# --- Decoding ---------------------------------------------------------------------------------------------------------

END = 0
NONSENSE = np.array([[7] * 40, [END] * 40, [3, 4] * 20, range(40)], np.int32)
"""History that no policy would write: long repetitions, end tokens in the middle, anything."""
FEW_PAGES = {"slots": 7, "num_pages": 9}
"""So few that samples are preempted."""


Sampled = tuple[list[int], list[float], str]
"""Tokens, log-probs, and why the sample ended."""


@cache
def page_samples(folder: Path, temperature: float, seed: int) -> dict[tuple[int, int], Sampled]:
    """Samples by the page, by (draw, sample)."""
    model, samples = page.Model(folder), {}
    memories: dict[tuple[int, ...], Any] = {}
    for request in requests_for(temperature=temperature, seed=seed):
        memory = memories.setdefault(request.prompt_token_ids, page.Memory())
        prompt, limit = list(request.prompt_token_ids), request.sampling.max_new_tokens
        lengths = {"end_token": END, "max_new_tokens": limit, "temperature": temperature}
        sample = page.decode(model, prompt, request.rng_key, memory, **lengths)
        reason = "stop" if sample.tokens[-1] == END else "length"
        samples[request.draw_index, request.sample_index] = sample.tokens, sample.logprobs, reason
    return samples


def cut(sample: Sampled, stops: Sequence[str]) -> Sampled:
    """A sample that ends with the token that completes a stop string."""
    tokens, logprobs, reason = sample
    text = Letters().decode(tokens)
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    size = min(ends, default=len(tokens))
    return tokens[:size], logprobs[:size], "stop" if ends else reason


@pytest.mark.parametrize(
    ("model", "temperature", "seed", "has_stops", "drafter", "nonsense", "speed", "sizes"),
    [
        # `speed`: tokens per decode step once all is known, at least; `nonsense`: what the drafter knows at first
        ("llama", 1.0, 0, False, "none", False, 1.0, {"slots": 1}),
        ("llama", 1.0, 0, False, "none", False, 1.0, {"slots": 40, "page_size": 1, "prefill_chunk_tokens": 1}),
        ("llama", 1.0, 0, False, "srt", False, 1.5, {"slots": 64}),
        ("llama", 1.0, 0, True, "srt", False, 1.0, FEW_PAGES),
        ("llama", 0.0, 0, False, "srt", True, 1.0, {"slots": 3, "page_size": 16, "draft_budget": "auto"}),
        ("llama", 0.7, 3, False, "srt", True, 1.0, {"slots": 4, "max_draft_nodes": 1}),
        ("qwen2", 1.0, 0, False, "srt", False, 1.1, {"slots": 16, "draft_budget": 40, "max_draft_nodes": 40}),
        ("qwen2", 1.0, 0, False, "suffix:Drafter", True, 1.0, FEW_PAGES),
        ("qwen2", 0.7, 1, True, "suffix:Drafter", False, 1.0, {"slots": 5, "page_size": 1}),
        ("qwen3", 0.7, 0, False, "srt", False, 1.1, {"slots": 2, "draft_budget": 1, "prefill_chunk_tokens": 40}),
        ("qwen3", 0.0, 0, False, "none", False, 1.0, FEW_PAGES),
        ("qwen3", 0.7, 1, True, "drafter:Drafter", False, 2.0, {"slots": 8}),
    ],
)
def test_the_decoder_gives_the_tokens_of_the_page(
    folders: Callable[[str], Path],
    model: str,
    temperature: float,
    seed: int,
    has_stops: bool,
    drafter: str,
    nonsense: bool,
    speed: float,
    sizes: dict[str, Any],
) -> None:
    """Twice: the second time with all that the drafter has learned from the first."""
    folder = folders(model)
    whole = page_samples(folder, temperature, seed)
    longest = max((Letters().decode(tokens) for tokens, *_ in whole.values()), key=len)
    stops = ("B", longest[3:5]) if has_stops else ()
    expected = {key: cut(sample, stops) for key, sample in whole.items()}
    assert {reason for *_, reason in expected.values()} == {"stop", "length"} or temperature == 0
    policy = load_model(folder, dtype=torch.float32, device="cpu")
    history = dict.fromkeys(PROMPTS, NONSENSE) if nonsense else {}
    cost = StepCost(points=((8, 1.0), (64, 1.5)))
    engine = Engine(policy, options(**sizes), tokenizer=Letters(), drafter=make_drafter(drafter, history), cost=cost)
    requests = requests_for(temperature=temperature, seed=seed, stop_strings=stops)
    for order in (requests, requests[::-1]):
        completions = decode(engine, order)
        engine.drafter.learn(list(completions.values()))
        engine.end_step(has_new_weights=False)
        assert completions.keys() == expected.keys()
        for key, (tokens, logprobs, reason) in expected.items():
            found = completions[key].response
            assert (found.token_ids.tolist(), found.finish_reason) == (tokens, reason)
            assert found.rollout_logprobs.tolist() == pytest.approx(logprobs, abs=1e-5)
        metrics = engine.take_metrics()
        assert (metrics["engine/preemptions"] > 0) == ("num_pages" in sizes)
        assert not getattr(engine.drafter, "live", None), "no sample is believed to be live"
    assert metrics["engine/tokens_per_decode_step"] >= speed
    assert metrics["engine/acceptance_depth_1"] > 0.5 or speed < 1.5


# --- The update -------------------------------------------------------------------------------------------------------


def random_groups(model: Any) -> list[Any]:
    """Groups of the page: samples that are equal, begin alike, are short; two of one prompt, and one of equal rewards.

    Their log-probs are those of the model and noise, so that some tokens are clipped.
    """
    rng = np.random.default_rng(0)
    text, other = rng.integers(1, 61, size=(2, 12)).tolist()
    responses = [
        ([3, 1, 4, 1], [text, text, text[:5], text[:4] + other]),
        ([3, 1, 4, 1], [other, text[:9], [END], text]),
        ([7], [other, other[:6] + text, text[::-1]]),
        ([8, 9], [text, other[:2]]),
    ]
    groups = []
    for prompt, texts in responses:
        samples = []
        for tokens in texts:
            logprobs = page.response_logprobs(model, prompt, tokens).detach().numpy()
            old = logprobs + rng.normal(0, 0.3, len(tokens))
            samples.append(page.Sample(tokens, old.astype(np.float32).tolist(), num_steps=0))
        groups.append(page.Group(prompt, samples, rng.integers(0, 3, len(texts)).astype(float).tolist()))
    groups[-1].rewards = [1.0, 1.0]
    return groups


def page_gradient(model: Any, groups: list[Any]) -> dict[str, Tensor]:
    """Gradients that the page's update gives the optimizer, by name."""
    page.update(model, Mock(), groups)
    return {name: weight.grad for name, weight in model.weights.items() if weight.grad is not None}


def product_gradient(policy: Transformer, groups: list[Any], **changes: Any) -> tuple[dict[str, Tensor], float]:
    """Gradients that the product gives the optimizer, by name, and the computed rows as a share of all tokens."""
    recipe = make_recipe(
        rollout={"num_prompts": len(groups), "num_samples": 4, "max_new_tokens": 20, "max_prompt_tokens": 6},
        algorithm={"clip_low": page.CLIP, "clip_high": page.CLIP},
        **changes,
    )
    rollout_groups = []
    for draw, group in enumerate(groups):
        prompt = Prompt(prompt_id=str(group.prompt), text="", token_ids=tuple(group.prompt), answer="")
        rollouts = [
            Rollout(
                prompt=prompt,
                draw_index=draw,
                sample_index=index,
                response=make_response(sample.tokens, sample.logprobs),
                text="",
                policy_version=0,
                grade=Grade(reward=reward, parts={}, outcome="correct"),
            )
            for index, (sample, reward) in enumerate(zip(group.samples, group.rewards, strict=True))
        ]
        rollout_groups.append(RolloutGroup(prompt=prompt, draw_index=draw, rollouts=rollouts))
    credit = CreditAssigner(recipe).assign_credit(rollout_groups, train_sequences(rollout_groups))
    optimizer = RecordingSGD(policy)
    metrics = update(policy, optimizer, credit.sequences, recipe)
    computed = [sequence for sequence in credit.sequences if sequence.advantages.any()]
    assert metrics["tokens/update"] == sum(len(sequence.token_ids) for sequence in computed)
    assert min(metrics["clip_share/low"], metrics["clip_share/high"]) > 0
    for parameter, gradient in zip(policy.parameters(), optimizer.gradients[0], strict=True):
        parameter.data = gradient
    return named_tensors(policy), metrics["tokens/update_rows"] / metrics["tokens/update"]


@pytest.mark.parametrize(
    ("model", "dtype", "tolerance", "micro_batch_tokens", "checkpointing", "max_norm", "most_rows"),
    [
        ("llama", torch.float64, 1e-6, 1000, False, NO_LIMIT, 0.6),
        ("llama", torch.float64, 1e-6, 40, True, 0.01, 0.8),
        ("qwen2", torch.float64, 1e-6, 60, False, NO_LIMIT, 0.8),
        ("qwen3", torch.float64, 1e-6, 30, True, NO_LIMIT, 1.0),
        ("qwen3", torch.float64, 1e-6, 1000, True, NO_LIMIT, 0.6),
        ("llama", torch.float32, 1e-5, 60, True, NO_LIMIT, 0.8),
        ("qwen2", torch.bfloat16, 0.05, 40, False, NO_LIMIT, 0.8),
        ("qwen3", torch.bfloat16, 0.05, 1000, True, 0.01, 0.6),
    ],
)
def test_the_update_has_the_gradient_of_the_page(
    folders: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    dtype: torch.dtype,
    tolerance: float,
    micro_batch_tokens: int,
    checkpointing: bool,
    max_norm: float,
    most_rows: float,
) -> None:
    """In bfloat16 the gradient of the float32 masters; what samples share is computed once in a micro-batch."""
    folder = folders(model)
    monkeypatch.setattr(page, "MAX_GRAD_NORM", max_norm)
    policy = load_model(folder, dtype=dtype, device="cpu")
    policy.gradient_checkpointing = checkpointing
    exact = page.Model(folder, torch.float64)
    if dtype == torch.bfloat16:
        exact.weights = {
            name: weight.detach().bfloat16().double().requires_grad_() for name, weight in exact.weights.items()
        }
    groups = random_groups(exact)
    expected = page_gradient(exact, groups)
    found, rows = product_gradient(
        policy,
        groups,
        train__micro_batch_tokens=micro_batch_tokens,
        train__max_grad_norm=max_norm,
    )
    names = sorted(expected)
    assert sorted(found) == names
    assert distance([found[name] for name in names], [expected[name] for name in names]) < tolerance
    assert rows < most_rows or most_rows == 1


if __name__ == "__main__":
    page.PROBLEMS.write_text(quickstart_problems())
