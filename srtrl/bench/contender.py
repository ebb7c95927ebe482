"""What takes part in a benchmark, and our own decoder as such."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from srtrl.bench.engine_run import EngineRun, RunTime, take_turns
from srtrl.bench.workload import Workload
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.model.transformer import Transformer
from srtrl.types import Completion


class Contender(Protocol):
    """A way to decode a workload."""

    @property
    def name(self) -> str:
        """What tables call it."""

    def run(self, workload: Workload) -> RunTime:
        """Decode the whole workload once."""


class OurDecoder:
    """The engine. It lives as long as a trainer's: made once for a workload, outside the time that counts."""

    def __init__(self, name: str, model: Transformer, options: EngineOptions, *, keeps_engine: bool = False) -> None:
        """Decode with `model` under `options`; `slots` 0 stands for as many as a workload has sequences.

        With `keeps_engine` one engine, made for these options as they are, decodes all workloads.
        """
        self.name = name
        self._model = model
        self._options = options
        self._keeps_engine = keeps_engine
        self.engine: Engine | None = None
        """Made for the latest workload."""
        self._workload: Workload | None = None

    def run(self, workload: Workload) -> RunTime:
        """Decode the whole workload once, log-probs included (the engine always computes them).

        Raises:
            ValueError: The workload does not fit the model or the pages.
        """
        ((time_taken, completions),) = take_turns([self.start(workload)])
        self.check(completions)
        return time_taken

    def start(self, workload: Workload) -> EngineRun:
        """Begin to decode the whole workload once; `check` what comes out.

        Raises:
            ValueError: The workload does not fit the model or the pages.
        """
        engine = self._engine_for(workload)
        self.prepare(engine, workload)
        return EngineRun(engine, workload.requests)

    def prepare(self, engine: Engine, workload: Workload) -> None:
        """What comes before the time that counts; here nothing."""

    def check(self, completions: Sequence[Completion]) -> None:
        """Assert that what was decoded is what should be: each sequence as long as it was told."""
        for completion in completions:
            assert len(completion.token_ids) == completion.request.sampling.max_new_tokens

    def _engine_for(self, workload: Workload) -> Engine:
        if self._keeps_engine:
            self.engine = self.engine or Engine(self._model, self._options)
        elif self.engine is None or self._workload is not workload:
            self.engine = None  # the old cache is freed before the new one is made
            options = replace(
                self._options,
                slots=workload.slots or self._options.slots or len(workload.requests),
                max_sequence_tokens=workload.max_sequence_tokens,
            )
            self.engine = Engine(self._model, options)
            self._workload = workload
        return self.engine
