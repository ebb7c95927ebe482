"""Is another library's attention taken? Only where it runs, agrees, follows its inputs and is faster."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from backend_cases import (
    CPU,
    OUR_SECONDS,
    FakeBackend,
    FakeStopwatch,
    FrozenBackend,
    NanPaddingBackend,
    RaisingBackend,
    ShiftedBackend,
    small_planner,
)

from srtrl.engine import attention_choice, attention_probe
from srtrl.engine.attention_choice import MARGIN, SIZES, choose_backends, choose_by_time, describe, probe_device, tell
from srtrl.engine.attention_probe import (
    LAYERS,
    TRIAL,
    HostStopwatch,
    PlainStep,
    Probe,
    Timing,
    find_fault,
    probe_backends,
    random_cache,
    time_step,
)
from srtrl.engine.buckets import MAX_GRAPH_ROWS
from srtrl.model.attention_backends import OURS, PlainAttention

LENGTHS = (8, 40)


def make_step(num_sequences: int = 3, most_keys: int = 40, num_layers: int = 1) -> PlainStep:
    planner = small_planner()
    steps = [(num_sequences, most_keys)]
    cache = random_cache(planner, steps, dtype=torch.bfloat16, device=CPU, num_layers=num_layers)
    return PlainStep(planner, cache, num_sequences, most_keys, use_kernels=False)


def run_probe(
    *backends: FakeBackend, sizes: tuple[int, ...] = (1, 3), with_ours_alone: bool = False, **reasons: str
) -> Probe:
    return probe_backends(
        small_planner(),
        {**{backend.name: backend for backend in backends}, **reasons},
        dtype=torch.bfloat16,
        device=CPU,
        watch=FakeStopwatch(*backends, num_layers=LAYERS),
        sizes=sizes,
        lengths=LENGTHS,
        with_ours_alone=with_ours_alone,
        use_kernels=False,
    )


# --- Does it run, does it agree? --------------------------------------------------------------------------------------


def test_a_step_is_that_of_a_bucket() -> None:
    """Three sequences are padded to four; lengths change, their place does not."""
    step = make_step()
    assert step.shape.num_rows == 4
    assert step.shape.launch.backend is None
    place, before = step._rows.context_lengths.data_ptr(), step._rows.context_lengths.tolist()
    assert before[3] == 0
    assert all(20 <= length <= 40 for length in before[:3])
    step.draw_lengths()
    assert step._rows.context_lengths.data_ptr() == place
    assert step._rows.context_lengths.tolist() != before
    assert step.num_keys == sum(step._rows.context_lengths.tolist())


def test_sequences_share_pages_only_beyond_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = small_planner()
    wanted = functools.partial(random_cache, planner, dtype=torch.bfloat16, device=CPU, num_layers=1)
    cache = wanted([(1, 40), (3, 8)])
    assert cache.key_pages.shape[1] == 10
    tables = PlainStep(planner, wanted([(3, 40)]), 3, 40)._page_tables
    assert len(set(tables.flatten().tolist())) == 30
    monkeypatch.setattr(attention_probe, "MAX_LAYER_BYTES", 12 * 2 * 4 * 2 * 16 * 2)
    tables = PlainStep(planner, wanted([(3, 40)]), 3, 40)._page_tables
    assert len(set(tables.flatten().tolist())) == 12
    assert all(len(set(table.tolist())) == 10 for table in tables)


def test_a_right_backend_has_no_fault() -> None:
    backend = FakeBackend()
    assert find_fault(backend, make_step(), HostStopwatch()) is None
    assert backend.num_calls == 2, "launched, and captured"
    assert backend.rows == [4, 4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here: see test_gpu_attention")
def test_the_kernel_itself_is_what_a_backend_is_compared_with() -> None:
    """Interpreted: the step is laid out as the kernel reads it, before and after lengths are drawn anew."""
    planner = small_planner()
    cache = random_cache(planner, [(3, 40)], dtype=torch.float32, device=CPU, num_layers=1)
    step = PlainStep(planner, cache, 3, 40)
    assert find_fault(FakeBackend(), step, HostStopwatch()) is None
    assert find_fault(ShiftedBackend(-1), step, HostStopwatch()) is not None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Paged KV cache block size must be divisible by 256\nException raised from mha_varlen_fwd at ..."),
        NotImplementedError("not for this device"),
        TypeError("unexpected keyword argument 'block_table'"),
        ValueError("Expect query and key/value to have the same number of heads"),
        AssertionError("page_table is not supported with cu_seqlens_k"),
        AttributeError("module has no attribute 'fwd_kvcache'"),
        ImportError("No module named 'cutlass'"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_a_library_raises_is_a_reason(error: Exception) -> None:
    fault = find_fault(RaisingBackend(error), make_step(), HostStopwatch())
    assert fault == f"it failed on 3 sequences of up to 40 keys: {str(error).splitlines()[0]}"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyError("a mistake of ours"), OSError()])
def test_other_errors_say_nothing_of_a_backend(error: Exception) -> None:
    with pytest.raises(type(error)):
        find_fault(RaisingBackend(error), make_step(), HostStopwatch())


@pytest.mark.parametrize("backend", [ShiftedBackend(-1), ShiftedBackend(1), NanPaddingBackend()])
@pytest.mark.parametrize("most_keys", [9, TRIAL[1], 4096])
def test_wrong_numbers_are_found(backend: FakeBackend, most_keys: int) -> None:
    """A single key too few or too many, at every length; and padding that would poison what comes behind."""
    step = make_step(TRIAL[0], most_keys)
    for _ in range(3):
        assert find_fault(backend, step, HostStopwatch()) == f"it gave other numbers than our kernel on {step}"


def test_a_graph_that_does_not_follow_its_inputs_is_found() -> None:
    fault = find_fault(FrozenBackend(), make_step(), HostStopwatch())
    assert fault is not None
    assert fault.startswith("captured in a graph it gave other numbers")


def test_what_cannot_be_captured_is_a_reason() -> None:
    class NoGraphs(HostStopwatch):
        def capture(self, work: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when rng_key is capturing")

    fault = find_fault(FakeBackend(), make_step(), NoGraphs())
    assert fault is not None
    assert "not permitted when rng_key is capturing" in fault


# --- Is it faster? ----------------------------------------------------------------------------------------------------


def test_turns_alternate_and_a_layers_median_is_kept() -> None:
    order: list[str] = []

    class Watch(FakeStopwatch):
        def seconds(self, work: Callable[[], None]) -> float:
            taken = super().seconds(work)
            order.append(OURS if taken == OUR_SECONDS * 2 else "varlen")
            return taken if len(order) != 9 else 100 * taken  # one disturbance

    backend = FakeBackend("varlen", lambda num_rows: 0.5)
    step = make_step(num_layers=2)
    timing = time_step({"varlen": backend}, step, Watch(backend, num_layers=2))
    assert order[:4] in ([OURS, "varlen", "varlen", OURS], ["varlen", OURS, OURS, "varlen"])
    assert order.count(OURS) == order.count("varlen") == 11
    assert timing.seconds == {OURS: OUR_SECONDS, "varlen": 0.5}
    assert timing.ratio("varlen") == 0.5
    assert timing.num_keys == step.num_keys


def test_a_faulty_backend_is_dropped_and_the_others_are_timed() -> None:
    good, bad = FakeBackend("varlen"), ShiftedBackend(-1, "flash")
    probe = run_probe(good, bad)
    assert probe.usable == {"varlen": good}
    assert probe.reasons["flash"].startswith("it gave other numbers")
    assert [(one.num_sequences, one.most_keys) for one in probe.timings] == [(1, 8), (1, 40), (3, 8), (3, 40)]
    assert all(set(one.seconds) == {OURS, "varlen"} for one in probe.timings)


def test_a_backend_that_fails_on_a_later_step_is_dropped() -> None:
    class NotForMany(FakeBackend):
        def compute(self, q: torch.Tensor, *arguments: object) -> torch.Tensor:
            if len(q) > 4:
                raise RuntimeError("too many")
            return super().compute(q, *arguments)  # type: ignore[arg-type]

    probe = run_probe(NotForMany(), sizes=(1, 5))
    assert probe.usable == {}
    assert probe.reasons == {"varlen": "it failed on 5 sequences of up to 8 keys: too many"}
    assert len(probe.timings) == 3, "nothing is left to time"


def test_nothing_is_timed_where_there_is_nothing_to_compare() -> None:
    probe = run_probe(flash="not installed")
    assert probe == Probe(usable={}, reasons={"flash": "not installed"}, timings=())
    alone = run_probe(flash="not installed", with_ours_alone=True)
    assert [set(one.seconds) for one in alone.timings] == [{OURS}] * 4


# --- Which is taken? --------------------------------------------------------------------------------------------------


def timings_of(*ratios: tuple[dict[str, float], dict[str, float]]) -> tuple[Timing, ...]:
    """For each of `SIZES` the times at two lengths; ours is 1."""
    return tuple(
        Timing(num_sequences=size, most_keys=most_keys, num_keys=most_keys, seconds={OURS: 1.0, **seconds})
        for (size, _), pair in zip(SIZES, ratios, strict=True)
        for most_keys, seconds in zip(LENGTHS, pair, strict=True)
    )


def test_the_faster_one_is_taken_where_it_is_faster_at_every_length() -> None:
    varlen, flash = FakeBackend("varlen"), FakeBackend("flash")
    timings = timings_of(
        ({"varlen": 0.5, "flash": 2.0}, {"varlen": 1.1, "flash": 2.0}),
        ({"varlen": 0.8, "flash": 0.6}, {"varlen": 0.9, "flash": 0.93}),
        ({"varlen": 0.8, "flash": 0.6}, {"varlen": 0.94, "flash": 0.7}),
        ({"varlen": 0.96, "flash": 0.97}, {"varlen": 0.5, "flash": 0.6}),
    )
    probe = Probe(usable={"varlen": varlen, "flash": flash}, reasons={}, timings=timings)
    choice = choose_by_time(probe)
    assert [backend for _, backend in choice.classes] == [None, varlen, flash, None]
    assert choice.backend_for(4) is None
    assert choice.backend_for(5) is varlen
    assert choice.backend_for(128) is flash
    assert choice.backend_for(129) is None
    assert choice.backend_for(MAX_GRAPH_ROWS + 1) is None
    assert describe(choice, probe) == (
        "decode steps without drafts attend by triton up to 4 rows, varlen up to 32 rows, flash up to 128 rows, triton "
        f"up to {MAX_GRAPH_ROWS} rows; varlen took 0.50 to 1.10 of the time of triton; flash took 0.60 to 2.00 of the "
        "time of triton"
    )


@pytest.mark.parametrize(("ratio", "is_taken"), [(1 - MARGIN - 0.001, True), (1 - MARGIN + 0.001, False)])
def test_the_margin_decides(ratio: float, is_taken: bool) -> None:
    backend = FakeBackend()
    timings = timings_of(*[({"varlen": ratio}, {"varlen": ratio})] * len(SIZES))
    choice = choose_by_time(Probe(usable={"varlen": backend}, reasons={}, timings=timings))
    assert {taken for _, taken in choice.classes} == {backend if is_taken else None}


# --- The option -------------------------------------------------------------------------------------------------------

Found = dict[str, PlainAttention | str]


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Found], None]]:
    """Backends that an engine finds; the steps it times are tiny, by the clock of the fakes."""

    def use(found: Found) -> None:
        fakes = [backend for backend in found.values() if isinstance(backend, FakeBackend)]
        monkeypatch.setattr(attention_choice, "find_backends", lambda names, **_: {name: found[name] for name in names})
        monkeypatch.setattr(attention_choice, "HostStopwatch", lambda: FakeStopwatch(*fakes, num_layers=LAYERS))
        monkeypatch.setattr(attention_choice, "SIZES", ((1, 1), (3, MAX_GRAPH_ROWS)))
        monkeypatch.setattr(attention_choice, "LENGTHS", (8, 40, 1000))
        monkeypatch.setattr(attention_choice, "probe_backends", functools.partial(probe_backends, use_kernels=False))
        probe_device.cache_clear()

    yield use
    probe_device.cache_clear()


def test_auto_takes_what_is_measured_to_be_faster(find: Callable[[Found], None]) -> None:
    backend = FakeBackend("varlen", lambda num_rows: 2.0 if num_rows == 1 else 0.8)
    find({"varlen": backend, "flash": "no package has it"})
    planner = small_planner()
    choice, note = choose_backends("auto", planner, dtype=torch.bfloat16, device=CPU)
    assert choice.classes == ((1, None), (MAX_GRAPH_ROWS, backend))
    assert note == (
        f"decode steps without drafts attend by triton up to 1 rows, varlen up to {MAX_GRAPH_ROWS} rows; varlen took "
        "0.80 to 2.00 of the time of triton; flash cannot: no package has it"
    )
    calls = backend.num_calls
    assert choose_backends("auto", planner, dtype=torch.bfloat16, device=CPU) == (choice, note)
    assert backend.num_calls == calls, "one probe for all engines of a kind"
    choose_backends("auto", replace(planner, page_size=8), dtype=torch.bfloat16, device=CPU)
    assert backend.num_calls > calls, "another kind"


def test_the_choice_is_logged_once(find: Callable[[Found], None], caplog: pytest.LogCaptureFixture) -> None:
    find({"varlen": "torch is too old", "flash": "no package has it"})
    tell.cache_clear()
    with caplog.at_level("INFO", logger="srtrl.engine.attention_choice"):
        for _ in range(2):
            _, note = choose_backends("auto", small_planner(), dtype=torch.bfloat16, device=CPU)
    assert [record.getMessage() for record in caplog.records] == [note]
    assert note == (
        "decode steps without drafts attend by triton; varlen cannot: torch is too old; flash cannot: no package has it"
    )


def test_a_library_that_is_asked_for_is_taken_fast_or_slow(find: Callable[[Found], None]) -> None:
    backend = FakeBackend("varlen", lambda num_rows: 3.0)
    find({"varlen": backend, "flash": "no package has it"})
    choice, note = choose_backends("varlen", small_planner(), dtype=torch.bfloat16, device=CPU)
    assert choice.classes == ((MAX_GRAPH_ROWS, backend),)
    assert note == "decode steps without drafts attend by varlen; varlen took 3.00 to 3.00 of the time of triton"
    with pytest.raises(ValueError, match=r"rollout\.attention: flash cannot attend here: no package has it\. Set it"):
        choose_backends("flash", small_planner(), dtype=torch.bfloat16, device=CPU)


def test_one_that_is_wrong_is_refused_with_what_is_wrong(find: Callable[[Found], None]) -> None:
    find({"varlen": ShiftedBackend(1), "flash": RaisingBackend(RuntimeError("divisible by 256"))})
    with pytest.raises(ValueError, match=r"varlen cannot attend here: it gave other numbers.*Set it to auto"):
        choose_backends("varlen", small_planner(), dtype=torch.bfloat16, device=CPU)
    with pytest.raises(ValueError, match=r"flash cannot attend here: it failed on .*: divisible by 256"):
        choose_backends("flash", small_planner(), dtype=torch.bfloat16, device=CPU)
    choice, note = choose_backends("auto", small_planner(), dtype=torch.bfloat16, device=CPU)
    assert {backend for _, backend in choice.classes} == {None}
    assert note is not None
    assert note.startswith("decode steps without drafts attend by triton; varlen cannot: it gave other numbers")


def test_without_memory_for_the_probe_our_kernel_attends(find: Callable[[Found], None]) -> None:
    find({"varlen": RaisingBackend(torch.OutOfMemoryError("no memory")), "flash": "no package has it"})
    choice, note = choose_backends("auto", small_planner(), dtype=torch.bfloat16, device=CPU)
    assert {backend for _, backend in choice.classes} == {None}
    assert note is not None
    assert "varlen cannot: the device had not the memory to try it" in note
    with pytest.raises(ValueError, match="had not the memory"):
        choose_backends("varlen", small_planner(), dtype=torch.bfloat16, device=CPU)


def test_nothing_is_tried_for_our_kernel_and_in_deterministic_mode(find: Callable[[Found], None]) -> None:
    backend = FakeBackend()
    find({"varlen": backend, "flash": backend})
    assert choose_backends("triton", small_planner(), dtype=torch.bfloat16, device=CPU)[0].classes == ()
    planner = small_planner(deterministic=True)
    assert choose_backends("auto", planner, dtype=torch.bfloat16, device=CPU)[0].classes == ()
    with pytest.raises(ValueError, match=r"rollout\.attention: flash .*rollout\.deterministic to false"):
        choose_backends("flash", planner, dtype=torch.bfloat16, device=CPU)
    assert backend.num_calls == 0
