"""What takes part in a benchmark, and our own decoder as such."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from srtrl.bench.workload import Workload
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.model.transformer import Transformer
from srtrl.types import Completion, Request


@dataclass(kw_only=True, slots=True, frozen=True)
class RunTime:
    """One rollout of a workload, from the prompts to all tokens on the host."""

    seconds: float
    num_tokens: int
    """Generated tokens, padding apart."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What our engine counted; nothing of other decoders."""


class Contender(Protocol):
    """A way to decode a workload."""

    @property
    def name(self) -> str:
        """What tables call it."""

    def run(self, workload: Workload) -> RunTime:
        """Decode the whole workload once."""


class OurDecoder:
    """The engine. It lives as long as a trainer's: made once for a workload, outside the time that counts."""

    def __init__(self, name: str, model: Transformer, options: EngineOptions) -> None:
        """Decode with `model` under `options`; `slots` 0 stands for as many as a workload has sequences."""
        self.name = name
        self._model = model
        self._options = options
        self.engine: Engine | None = None
        """Made for the latest workload."""
        self._workload: Workload | None = None

    def run(self, workload: Workload) -> RunTime:
        """Decode the whole workload once, log-probs included (the engine always computes them).

        Raises:
            ValueError: The workload does not fit the model or the pages.
        """
        engine = self._engine_for(workload)
        self.prepare(engine, workload)
        time_taken, completions = timed_run(engine, workload.requests)
        self.check(completions)
        return time_taken

    def prepare(self, engine: Engine, workload: Workload) -> None:
        """What comes before the time that counts; here nothing."""

    def check(self, completions: Sequence[Completion]) -> None:
        """Assert that what was decoded is what should be: each sequence as long as it was told."""
        for completion in completions:
            assert len(completion.token_ids) == completion.request.sampling.max_new_tokens

    def _engine_for(self, workload: Workload) -> Engine:
        if self.engine is None or self._workload is not workload:
            self.engine = None  # the old cache is freed before the new one is made
            options = replace(
                self._options,
                slots=workload.slots or self._options.slots or len(workload.requests),
                max_sequence_tokens=workload.max_sequence_tokens,
            )
            self.engine = Engine(self._model, options)
            self._workload = workload
        return self.engine


def timed_run(
    engine: Engine, requests: Sequence[Request], run_ahead: Sequence[Request] = ()
) -> tuple[RunTime, list[Completion]]:
    """Decode the requests; where the engine's options state a cost of its steps, the seconds are priced by it."""
    engine.take_metrics()
    started = time.perf_counter()
    completions = list(engine.generate(requests, run_ahead=run_ahead))
    seconds = time.perf_counter() - started
    metrics = engine.take_metrics()
    if engine.options.cost_points is not None:
        seconds = metrics["engine/priced_seconds"]
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    return RunTime(seconds=seconds, num_tokens=num_tokens, metrics=metrics), completions
