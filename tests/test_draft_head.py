"""A draft head changes no token, whatever it guesses: random, untrained, trained, or none that is finite."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import Completions, Letters, decode, options, outputs, tiny_policy
from test_engine_property import varied_requests

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_head import DraftHead
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.engine import Engine
from srtrl.model.transformer import Transformer


def make_head(policy: Transformer, kind: str) -> DraftHead:
    """An untrained head, or one with weights that no training gives; it lists 50 of 61 tokens."""
    head = DraftHead(policy, vocabulary=50, hidden=24, seed=0)
    with torch.no_grad():
        if kind == "random":
            head.down.normal_(generator=torch.Generator().manual_seed(1))
        if kind == "garbage":
            head.norm[3] = torch.nan
        if kind == "infinite":
            head.fc.fill_(1e38)
            head.down.fill_(1e38)
    return head


@pytest.fixture(scope="module")
def plain() -> tuple[Transformer, Completions]:
    policy = tiny_policy()
    return policy, decode(Engine(policy, options(slots=1), tokenizer=Letters()), varied_requests())


@pytest.mark.parametrize("drafter", [NoDrafter, SrtDrafter])
@pytest.mark.parametrize("kind", ["untrained", "random", "garbage", "infinite"])
def test_tokens_are_those_without_drafts(
    kind: str, drafter: type[DrafterBase], plain: tuple[Transformer, Completions]
) -> None:
    policy, truth = plain
    accepted = 0.0
    for slots, spare in ((2, 0), (5, 8), (16, 60)):  # with few pages samples are preempted
        chosen = options(slots=slots, num_pages=10 + spare, draft_budget=8)
        engine = Engine(policy, chosen, tokenizer=Letters(), drafter=drafter(), draft_head=make_head(policy, kind))
        for _ in range(2):
            assert outputs(decode(engine, varied_requests())) == outputs(truth)
        metrics = engine.take_metrics()
        assert metrics["engine/head_steps_share"] > 0.1
        accepted += metrics["engine/head_acceptance_depth_1"]
        if spare == 0:
            assert metrics["engine/preemptions"] > 0
    assert (accepted > 0) == (kind in ("untrained", "random"))
