"""Judges as rewards: a server that speaks OpenAI's protocol, and a sequence classifier of transformers.

srtrl train recipe.yaml 'rewards=[{name: "judges:over_http", options: {url: "http://localhost:8000/v1"}}]'
srtrl train recipe.yaml 'rewards=[{name: "judges:classifier", options: {path: my_reward_model}}]'
"""

import asyncio
import json
import os
import re
import urllib.request
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from srtrl import batched
from srtrl.tasks.reward_input import RewardInput

QUESTION = "Mark this answer from 0 to 10. Reply with the number alone.\n\nQuestion: {}\n\nAnswer: {}"
PLACES = asyncio.Semaphore(16)
"""Maximum number of requests at the same time."""


async def over_http(sample: RewardInput, *, url: str, model: str = "judge") -> float:
    """A chat model's mark from 0 to 10, divided by 10; a sample without a mark is left out of its group."""
    content = QUESTION.format(sample.prompt.text, sample.text)
    body = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": content}]}
    async with PLACES:
        reply = await asyncio.to_thread(_post, f"{url}/chat/completions", body)
    said = reply["choices"][0]["message"]["content"]
    mark = re.search(r"\d+", said)
    if mark is None:
        raise ValueError(f"no mark in {said!r:.80}")
    return min(int(mark[0]), 10) / 10


def _post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('JUDGE_KEY', '')}"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as reply:
        return json.load(reply)


@batched
def classifier(samples: list[RewardInput], *, path: str, label: int = 0, batch_size: int = 32) -> list[float]:
    """The logit that a sequence classifier (most reward models) gives to prompt and completion."""
    tokenizer, model = _load(path)
    scores: list[float] = []
    for start in range(0, len(samples), batch_size):
        texts = [sample.prompt.text + sample.text for sample in samples[start : start + batch_size]]
        inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            scores += model(**inputs).logits[:, label].tolist()
    return scores


@cache
def _load(path: str) -> tuple[Any, Any]:
    return AutoTokenizer.from_pretrained(path), AutoModelForSequenceClassification.from_pretrained(path).eval()
