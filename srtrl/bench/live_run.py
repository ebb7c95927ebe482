"""Drafters on a policy that samples for itself: epochs over the same prompts, with or without run-ahead.

Each contender has an engine and a drafter of its own and learns from what it has decoded, as in training. Contenders
take turns step by step. All must sample the same tokens: that is checked after every step.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from srtrl.bench.comparison import Comparison, RunTeller
from srtrl.bench.drafter_tables import merge_steps, ratios_of, run_ahead_grid, speed_grid, time_grid
from srtrl.bench.drafters_setup import (
    control_name,
    describe_drafters,
    describe_model,
    drafter_maker,
    drafter_options,
)
from srtrl.bench.engine_run import EngineRun, RunTime, take_turns
from srtrl.bench.environment import Environment
from srtrl.bench.live_workload import (
    DEFAULT_PROMPTS,
    LiveWorkload,
    PolicyChanges,
    make_live_workload,
)
from srtrl.bench.rollout_options import RolloutBench
from srtrl.bench.run_plan import RunPlan
from srtrl.bench.tables import Document, comparison_values
from srtrl.bench.workload import TAIL_SIGMA
from srtrl.drafters.base import DrafterBase
from srtrl.engine.engine import Engine, EngineOptions
from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model
from srtrl.types import Completion


class LiveDecoder:
    """Our engine with a drafter that lives for a series of steps."""

    def __init__(
        self,
        name: str,
        model: Transformer,
        options: EngineOptions,
        *,
        make_drafter: Callable[[], DrafterBase],
        run_ahead: str,
    ) -> None:
        self.name = name
        self.engine = Engine(model, options)
        self._make_drafter = make_drafter
        self._run_ahead = run_ahead

    def begin(self) -> None:
        """A series of steps begins: a new drafter."""
        self.engine.speculation.use(self._make_drafter())

    def start(self, workload: LiveWorkload, step: int) -> EngineRun:
        """Begin to decode one step."""
        self.engine.drafter.set_next_uses(workload.next_uses(step))
        return EngineRun(self.engine, workload.requests(step), workload.run_ahead(self._run_ahead, step))


def measure_live(
    bench: RolloutBench, folder: Path, dtype: torch.dtype, device: torch.device, environment: Environment
) -> Document:
    """Drafters on the policy in `folder`.

    Raises:
        ValueError: Prompts, policy, options and memory do not fit each other, or a drafter is unknown.
    """
    makers = {name: drafter_maker(name) for name in bench.drafters}
    counts = [bench.num_prompts_at(index) or DEFAULT_PROMPTS for index in range(len(bench.slots))]
    workloads = [make_live_workload(bench, count, folder) for count in counts]
    policy = load_model(folder, dtype=dtype, device=device)
    changes = PolicyChanges(policy, bench.policy_change, bench.seed)
    options, curve = drafter_options(bench)
    by_step: list[Comparison] = []
    whole: list[Comparison] = []
    lengths: list[int] = []
    num_later_tokens = []
    num_runs = sum(bench.repeats * workload.num_steps + 1 for workload in workloads) * len(contender_names(bench))
    with RunTeller(num_runs) as teller:
        for slots, workload in zip(bench.slots, workloads, strict=True):
            num_slots = slots or workload.step_prompts * workload.num_samples
            at_slots = replace(options, slots=num_slots, max_sequence_tokens=workload.max_sequence_tokens)
            contenders = [
                LiveDecoder(name, policy, at_slots, make_drafter=makers[drafter], run_ahead=run_ahead)
                for name, (drafter, run_ahead) in contender_names(bench).items()
            ]
            steps = run_series(contenders, workload, bench.plan, changes, teller.tell, lengths)
            by_step += steps
            whole.append(merge_steps(steps))
            num_later_tokens.append(sum(step.num_tokens for step in steps[1:]))
    grids = [speed_grid(by_step, caption="Step by step"), speed_grid(whole, caption="All steps together")]
    grids.append(time_grid(whole))
    if bench.run_ahead != ("off",):
        grids.append(run_ahead_grid(whole, num_later_tokens))
    slots_text = ", ".join(dict.fromkeys(comparison.labels["slots"] for comparison in whole))
    run_ahead_text = "" if bench.run_ahead == ("off",) else ", run-ahead"
    priced = f", priced as {bench.price_as}" if bench.price_as else ""
    return Document(
        title=f"Drafters on a live policy{run_ahead_text}: {bench.model}, {bench.dtype}, {device.type}, "
        f"{environment.threads}, {slots_text} slots{priced}",
        environment=environment,
        notes=(
            describe_model(bench, policy),
            *describe_live(bench, workloads, lengths, changes.kls),
            *describe_drafters(bench, curve, whole),
        ),
        grids=tuple(grids),
        values={
            "baseline": next(iter(contender_names(bench))),
            "kl_per_token": changes.kls,
            "comparisons": [comparison_values(comparison, ratios_of(comparison)) for comparison in whole],
            "steps": [comparison_values(comparison, ratios_of(comparison)) for comparison in by_step],
        },
    )


def contender_names(bench: RolloutBench) -> dict[str, tuple[str, str]]:
    """Contender -> its drafter and run-ahead; `none` never drafts and has no use for run-ahead."""
    names = {
        drafter if run_ahead == "off" else f"{drafter}, {run_ahead}": (drafter, run_ahead)
        for drafter in bench.drafters
        for run_ahead in (("off",) if drafter == "none" else bench.run_ahead)
    }
    if bench.control:
        first = next(iter(names))
        names[control_name(first)] = names[first]
    return names


def run_series(
    contenders: Sequence[LiveDecoder],
    workload: LiveWorkload,
    plan: RunPlan,
    changes: PolicyChanges,
    on_run: Callable[[str], None],
    num_tokens: list[int],
) -> list[Comparison]:
    """Run all steps several times, the contenders side by side, after one step each to warm up.

    The series are equal: same rng_keys, same changes of the policy, new drafters.

    Args:
        contenders: On the same weights, with different names.
        workload: What they decode.
        plan: How many series count; with a precision, that of each step's ratios.
        changes: What happens to the weights between steps.
        on_run: Told after each run what it was.
        num_tokens: Gets the length of each response of a series.

    Returns:
        One comparison a step; its i-th seconds are of series i.

    Raises:
        AssertionError: Two runs of a step sampled different tokens.
    """
    steps = [_StepRuns(contenders) for _ in range(workload.num_steps)]
    for contender in contenders:
        contender.begin()
    runs = take_turns([contender.start(workload, 1) for contender in contenders])
    for contender, (run, _) in zip(contenders, runs, strict=True):
        on_run(f"{contender.name}, warm-up: {run.seconds:.3f} s")
    started = time.perf_counter()
    series, num_series = 0, plan.repeats
    while series < num_series:

        def tell(text: str, which: str = f"series {series + 1} of {num_series}") -> None:
            on_run(f"{which}, {text}")

        _run_once(contenders if series % 2 == 0 else contenders[::-1], workload, changes, steps, tell)
        series += 1
        if series == plan.repeats:
            pilots = [runs_of_step.seconds() for runs_of_step in steps]
            num_series = plan.num_runs(pilots, time.perf_counter() - started)
    num_tokens += [len(completion.token_ids) for runs_of_step in steps for completion in runs_of_step.completions]
    word = "epoch" if workload.step_prompts == len(workload.prompts) else "step"
    slots = str(contenders[0].engine.options.slots)
    return [
        runs_of_step.comparison({"slots": slots, word: str(step)}, plan)
        for step, runs_of_step in enumerate(steps, start=1)
    ]


def _run_once(
    contenders: Sequence[LiveDecoder],
    workload: LiveWorkload,
    changes: PolicyChanges,
    steps: "Sequence[_StepRuns]",
    on_run: Callable[[str], None],
) -> None:
    """One series: all steps, with new drafters."""
    for contender in contenders:
        contender.begin()
    with changes.series() as generator:
        for step, runs in enumerate(steps, start=1):
            for contender in contenders:
                contender.engine.on_policy_update()
            results = take_turns([contender.start(workload, step) for contender in contenders])
            for contender, (run, completions) in zip(contenders, results, strict=True):
                runs.add(contender.name, run, completions)
                on_run(f"{contender.name}, step {step}: {run.seconds:.3f} s")
            changes.change(generator, runs.completions)


class _StepRuns:
    """The runs of one step, which must all sample the same."""

    def __init__(self, contenders: Sequence[LiveDecoder]) -> None:
        self.completions: list[Completion] = []
        """Of the first run."""
        self._runs: dict[str, list[RunTime]] = {contender.name: [] for contender in contenders}

    def add(self, name: str, run: RunTime, completions: Sequence[Completion]) -> None:
        """Note a run of a contender; asserts that its tokens and log-probs are those of the first."""
        completions = sorted(completions, key=lambda one: (one.request.draw_index, one.request.sample_index))
        if not self.completions:
            self.completions = completions
        for completion, first in zip(completions, self.completions, strict=True):
            assert completion.token_ids == first.token_ids, f"{name} sampled other tokens"
            assert completion.rollout_logprobs == first.rollout_logprobs, f"{name} has other log-probs"
        self._runs[name].append(run)

    def seconds(self) -> dict[str, list[float]]:
        """Contender -> seconds of its runs so far."""
        return {name: [run.seconds for run in runs] for name, runs in self._runs.items()}

    def comparison(self, labels: dict[str, str], plan: RunPlan) -> Comparison:
        """The contenders on this step."""
        lengths = [len(completion.token_ids) for completion in self.completions]
        return Comparison(
            lengths="sampled",
            num_sequences=len(lengths),
            num_tokens=sum(lengths),
            longest=max(lengths),
            seconds=self.seconds(),
            metrics={name: [run.metrics for run in runs] for name, runs in self._runs.items()},
            labels=labels,
            num_pilot=plan.num_pilot,
        )


def describe_live(
    bench: RolloutBench,
    workloads: Sequence[LiveWorkload],
    lengths: Sequence[int],
    kls: Sequence[float],
) -> list[str]:
    """What is decoded, in sentences; `lengths` are the tokens of all responses."""
    workload = workloads[0]
    source = f"prompts of {bench.prompts}" if bench.prompts else "problems of the task `arithmetic`"
    ends = {
        "both": f"End tokens are heeded, at most {workload.sampling.max_new_tokens} tokens",
        "equal": "End tokens are not heeded",
        "long-tailed": f"End tokens are not heeded, lengths are log-normal (sigma {TAIL_SIGMA}), cut at "
        f"{workload.sampling.max_new_tokens}",
    }[bench.lengths]
    counts = " or ".join(dict.fromkeys(str(len(workload.prompts)) for workload in workloads))
    per_step = f", {workload.step_prompts} prompts a step" if workload.step_prompts < len(workload.prompts) else ""
    notes = [
        f"The policy samples for itself: {counts} {source}, {workload.num_samples} samples each, visited "
        f"{bench.num_epochs} time{'s' if bench.num_epochs > 1 else ''} on new RNG key{per_step}. {ends}: "
        f"{statistics.median(lengths):.0f} in the median, "
        f"{statistics.fmean(lengths):.0f} on average, {max(lengths)} at most.",
        f"Same tokens: in each series all contenders sampled the same {sum(lengths):,} tokens with the same log-probs "
        "(checked with `==` after each step).",
    ]
    if bench.policy_change:
        notes.append(
            f"Between steps the policy changes as by an update: noise of {bench.policy_change:g} times their spread "
            f"on all weights, a KL of {statistics.fmean(kls):.1e} a token on average (measured)."
        )
    else:
        notes.append("The policy does not change between steps.")
    if bench.run_ahead != ("off",):
        notes.append(
            "Run-ahead: idle slots decode samples of the next step; `coupled` on the RNG key that these samples "
            "will have, `uncoupled` on others. Tokens accepted from it are those that samples took along the text on "
            "their own key, as a share of the tokens of all steps but the first, which has nothing to follow; other "
            "text that was decoded ahead serves in the trie."
        )
    return notes
