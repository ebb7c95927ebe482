"""The rehearsal: every drafter can do it, and a rollout behind it finds all kernels compiled."""

import subprocess
import sys
from pathlib import Path

import pytest

from srtrl.drafters import rehearsal
from srtrl.drafters.base import DrafterBase
from srtrl.drafters.history import Drafter as HistoryDrafter
from srtrl.drafters.ngram import Drafter as NgramDrafter
from srtrl.drafters.rehearsal import rehearse, rehearse_once
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.drafters.srt import SrtOptions
from srtrl.drafters.suffix import Drafter as SuffixDrafter

COMPILED = """
from numba.core.dispatcher import Dispatcher

def compiled():
    kernels = {one for module in modules for one in vars(module).values() if isinstance(one, Dispatcher)}
    return {kernel.py_func.__qualname__: len(kernel.signatures) for kernel in kernels}
"""

CHECK = """
import importlib, pkgutil, sys
import srtrl.drafters
from srtrl.drafters.rehearsal import rehearse
from srtrl.drafters.srt import Drafter
from drafter_cases import completion, decode, request

names = [found.name for found in pkgutil.iter_modules(srtrl.drafters.__path__)]
modules = [importlib.import_module("srtrl.drafters." + name) for name in names]

rehearse(Drafter())
before = compiled()
assert sum(before.values()) > 5, before
drafter = Drafter()
text = [7, 8, 9, 7, 8, 20, 21, 22, 23, 24, 25, 26, 27, 28] * 4
ahead = request(rng_key=3, is_run_ahead=True)
drafter.start(0, ahead)
drafter.observe([0], [text])
drafter.finish(0, None)
drafter.on_policy_update()
for sequence_id, said in enumerate([text, text[:20] + text[23:], text[::-1], text], start=1):
    sample = request(rng_key=3)
    drafter.start(sequence_id, sample)
    decode(drafter, sequence_id, said)
    drafter.finish(sequence_id, completion(sample, said))
drafter.take_metrics()
assert compiled() == before, {name: count for name, count in compiled().items() if count != before.get(name)}
"""

CHECK_CHOICE = """
from srtrl.drafters.srt import Drafter
from srtrl.engine import budget_kernel, calibration, step_cost_kernel
from srtrl.engine.budget import rehearse_choice
from srtrl.engine.engine import Engine
from engine_cases import options, requests_for, tiny_policy

modules = (budget_kernel, calibration, step_cost_kernel)
rehearse_choice()
before = compiled()
assert min(before[name] for name in ("choose_nodes", "keep_nodes", "learn_cost", "rows_within")) == 1, before
engine = Engine(tiny_policy(), options(draft_budget="auto", slots=2), drafter=Drafter())
for rollout in range(2):
    list(engine.generate(requests_for(temperature=0.0)))
    engine.speculation.wants_run_aheads()
    engine.on_policy_update()
assert engine.take_metrics()["engine/draft_asked_share"] > 0
assert compiled() == before, {name: count for name, count in compiled().items() if count != before.get(name)}
"""


@pytest.mark.parametrize("drafter", [SrtDrafter, HistoryDrafter, SuffixDrafter, NgramDrafter])
def test_drafters_can_rehearse(drafter: type[DrafterBase]) -> None:
    assert drafter.has_kernels
    rehearse(drafter())


@pytest.mark.parametrize("rule", ["paper", "authors", "blend"])
@pytest.mark.parametrize("online", [False, True])
def test_the_default_drafter_can_with_any_options(rule: str, online: bool) -> None:
    options = SrtOptions.model_validate({"rule": rule, "online": online, "coupled": online, "cache_memory_gib": 0.0})
    drafter = SrtDrafter(options)
    rehearse(drafter)
    assert not drafter._tries.samples, "every sample has ended"
    assert drafter.cache("train").num_rollouts == 0, "there is no memory for them"


@pytest.mark.parametrize("check", [CHECK, CHECK_CHOICE])
def test_a_rollout_behind_it_compiles_nothing(check: str) -> None:
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-c", COMPILED + check]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_each_class_does_it_once_and_never_the_drafter_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DrafterBase] = []
    monkeypatch.setattr(rehearsal, "rehearse", seen.append)
    monkeypatch.setattr(rehearsal, "_rehearsed", set())
    options = SrtOptions(max_rollouts=3)
    drafter = SrtDrafter(options)
    for one in (drafter, SrtDrafter(), DrafterBase()):
        rehearse_once(one)
    (twin,) = seen
    assert isinstance(twin, SrtDrafter)
    assert twin is not drafter
    assert twin.options == options
