"""Which run-aheads a training step offers to idle slots: their rng_keys, their order, and that none is a sample's."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tiny_run import make_policy, make_recipe

from srtrl.drafters.srt import Drafter
from srtrl.engine.sampling import make_rng_key
from srtrl.metrics import read_metrics
from srtrl.rollout.collect import Collector, collect_rollouts, sample_requests
from srtrl.rollout.run_ahead import run_ahead_requests
from srtrl.trainer import sampling
from srtrl.trainer.run_folder import check_run_folder
from srtrl.trainer.trainer import run_training
from srtrl.types import Prompt, Request, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=9, temperature=0.7, end_token_ids=(0,))
NEXT = [(draw, Prompt(prompt_id=f"n{draw}", text="", token_ids=(2, draw), answer="")) for draw in range(3, 7)]


def samples_of(draws: list[tuple[int, Prompt]]) -> list[Request]:
    return sample_requests(draws, num_samples=2, sampling=SAMPLING, seed=3, purpose="train")


def test_the_next_steps_samples_are_decoded_on_their_very_rng_keys() -> None:
    found = run_ahead_requests(NEXT, num_samples=2, sampling=SAMPLING, seed=3)
    assert all(request.is_run_ahead for request in found)
    assert [(r.sample_index, r.draw_index) for r in found] == [(s, d) for s in range(2) for d in range(3, 7)]
    plain = {replace(request, is_run_ahead=False).rng_key: replace(request, is_run_ahead=False) for request in found}
    assert plain == {request.rng_key: request for request in samples_of(NEXT)}
    assert found[5].rng_key == make_rng_key(3, "train", 4, 1)


def test_the_trainer_looks_one_step_ahead_and_says_what_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[list[Request], list[Request]]] = []
    next_uses: list[list[tuple[int, ...]]] = []

    def collect(engine: Any, collector: Collector, draws: Any, run_ahead: Any = ()) -> Any:
        names = ("num_samples", "sampling", "seed", "purpose")
        options: dict[str, Any] = {name: getattr(collector, name) for name in names}
        assert collector.purpose == "train"
        steps.append((sample_requests(draws, **options), list(run_ahead)))
        return collect_rollouts(engine, collector, draws, run_ahead=run_ahead)

    monkeypatch.setattr(sampling, "collect_rollouts", collect)
    monkeypatch.setattr(Drafter, "set_next_uses", lambda self, prompts: next_uses.append(list(prompts)), raising=False)
    recipe = make_recipe(
        make_policy(tmp_path / "policy"), tmp_path, train__num_steps=3, rollout__run_ahead_max_slowdown=100.0
    )
    run_training(recipe, resume=False, overwrite=False)
    changed = {"run_ahead": "off", "run_ahead_max_slowdown": 0.5, "draft_budget": 3}
    other = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=changed)})
    check_run_folder(other, resume=True, overwrite=False)  # none of these changes what is learned
    assert len(steps) == 3
    for (_, ahead), (following, _) in pairwise(steps):
        assert len(ahead) == 16
        assert sorted(ahead, key=lambda one: one.rng_key) == sorted(
            (replace(request, is_run_ahead=True) for request in following), key=lambda one: one.rng_key
        )
    assert steps[-1][1] == []  # the last step has no next one
    drawn = [request.prompt_token_ids for requests, _ in steps for request in requests if request.sample_index == 0]
    assert next_uses == [drawn[:10], drawn[4:], drawn[8:]]  # an epoch of 10 prompts, as far as the run goes


@pytest.mark.parametrize(
    ("drafter", "draft_budget", "run_ahead"), [("ngram", 4, "next_step"), ("srt", 0, "next_step"), ("srt", 4, "off")]
)
def test_nothing_runs_ahead_where_nobody_drafts_from_it_or_it_is_off(
    tmp_path: Path, drafter: str, draft_budget: int, run_ahead: str
) -> None:
    recipe = make_recipe(
        make_policy(tmp_path / "policy"),
        tmp_path,
        rollout__drafter=drafter,
        rollout__draft_budget=draft_budget,
        rollout__run_ahead=run_ahead,
        rollout__run_ahead_max_slowdown=1e9,
        train__num_steps=2,
    )
    rows = read_metrics(run_training(recipe).folder / "metrics.jsonl")
    assert {row["engine/run_ahead_rows"] for row in rows if row["step"]} == {0}
