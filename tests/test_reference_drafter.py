"""The drafter of docs/speculation.md: the tokens of decoding without drafts, in fewer steps."""

import re
from pathlib import Path
from typing import Any

import pytest
from engine_cases import decode, options, outputs, requests_for, tiny_policy

from srtrl.engine.engine import Engine

PAGE = Path(__file__).resolve().parent.parent / "docs" / "speculation.md"


@pytest.fixture
def drafter() -> Any:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["Drafter"]()


def test_it_saves_steps_and_changes_no_token(drafter: Any) -> None:
    policy, requests = tiny_policy(), requests_for(temperature=0.5)
    expected = outputs(decode(Engine(policy, options()), requests))
    engine = Engine(policy, options(num_pages=40), drafter=drafter)
    assert outputs(decode(engine, requests)) == expected
    engine.take_metrics()
    assert outputs(decode(engine, requests)) == expected, "now every prompt is known"
    assert engine.take_metrics()["engine/tokens_per_decode_step"] > 2
    assert not drafter.live
