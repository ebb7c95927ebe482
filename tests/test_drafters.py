"""Each drafter on texts made by hand, and all of them on random ones."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from drafter_cases import OTHER, TEXT, chain_of, completion, decode, propose, request, run
from hypothesis import given, settings
from hypothesis import strategies as st

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.history import Drafter as HistoryDrafter
from srtrl.drafters.history import HistoryOptions
from srtrl.drafters.ngram import Drafter as NgramDrafter
from srtrl.drafters.ngram import NgramOptions
from srtrl.drafters.prompt_tries import PromptTrie, PromptTries
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.drafters.srt import SrtOptions
from srtrl.drafters.suffix import Drafter as SuffixDrafter
from srtrl.drafters.suffix import SuffixOptions
from srtrl.recipe_base import Section
from srtrl.recipe_errors import validate_section
from srtrl.rollout.recorded import RecordedPrompt, feed_drafter

BY_CHANCE = 1
"""Tokens of such a text that may be guessed from the text itself."""


# --- ngram


def ngram_by_hand(text: list[int], options: NgramOptions) -> list[int]:
    """What followed the latest earlier occurrence of the longest ending."""
    for n in range(options.max_ngram, options.min_ngram - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if n <= len(text) and text[end - n : end] == text[-n:]:
                return text[end : end + options.max_tokens]
    return []


def test_ngram_drafts_what_followed_the_longest_ending() -> None:
    drafter = NgramDrafter(NgramOptions(min_ngram=1, max_ngram=3, max_tokens=4, acceptance=0.5))
    drafter.start(7, request((5, 6, 7, 8, 9, 1, 7, 2)))
    (tree,) = propose(drafter, [7])
    assert tree.num_nodes == 0
    drafter.observe([7], [[7]])
    (tree,) = propose(drafter, [7])
    assert tree.token_ids.tolist() == [2, 7], "after the latest 7, not after the first"
    drafter.observe([7], [[8]])
    (tree,) = propose(drafter, [7])
    assert tree.token_ids.tolist() == [9, 1, 7, 2]
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    np.testing.assert_allclose(tree.scores, [0.4, 0.16, 0.064, 0.0256], rtol=1e-6)  # 0.5 / (1 + 1 / 4) a token
    (tree,) = propose(drafter, [7], max_nodes=1)
    assert tree.token_ids.tolist() == [9]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=6), max_size=5),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_ngram_is_the_search_by_hand(texts: list[list[list[int]]], min_ngram: int, more: int) -> None:
    options = NgramOptions(min_ngram=min_ngram, max_ngram=min_ngram + more, max_tokens=5)
    drafter = NgramDrafter(options)
    so_far = {index: list(chunks[0]) for index, chunks in enumerate(texts)}
    for index, text in so_far.items():
        drafter.start(index, request(text))
    for step in range(1, 7):
        live = [index for index, chunks in enumerate(texts) if len(chunks) >= step]
        for index, tree in zip(live, propose(drafter, live), strict=True):
            assert tree.token_ids.tolist() == ngram_by_hand(so_far[index], options)
        going_on = [index for index in live if len(texts[index]) > step]
        for index in set(live) - set(going_on):
            drafter.finish(index, None)
        for index in going_on:
            so_far[index] += texts[index][step]
        drafter.observe(going_on, [texts[index][step] for index in going_on])


def test_ngram_options_must_agree() -> None:
    with pytest.raises(ValueError, match="min_ngram is 5, expected at most max_ngram"):
        validate_section(NgramOptions, {"min_ngram": 5}, ("rollout", "drafter_options"))


# --- srt and history


def test_srt_drafts_from_completed_rollouts_of_the_same_prompt_and_purpose() -> None:
    drafter = SrtDrafter(SrtOptions(other_prompts=False))
    assert sum(run(drafter, 0, request(), TEXT)) <= BY_CHANCE
    accepted = run(drafter, 1, request(), TEXT)
    assert sum(accepted) >= 0.8 * len(TEXT)
    assert sum(run(drafter, 2, request((1, 3)), TEXT)) <= BY_CHANCE
    assert sum(run(drafter, 3, request(purpose="eval"), TEXT)) <= BY_CHANCE
    drafter.on_policy_update()
    assert sum(run(drafter, 4, request(), TEXT)) >= 0.8 * len(TEXT)
    assert drafter.expected_tokens(request()) == len(TEXT)
    assert drafter.expected_tokens(request((9,))) is None


def test_srt_learns_phrases_from_other_prompts_of_the_same_purpose() -> None:
    drafter = SrtDrafter()
    assert sum(run(drafter, 0, request(), TEXT)) <= BY_CHANCE
    assert sum(run(drafter, 1, request((1, 3), purpose="eval"), TEXT)) <= BY_CHANCE
    accepted = sum(run(drafter, 2, request((1, 3)), TEXT))
    assert accepted > 0.5 * len(TEXT)
    assert sum(run(SrtDrafter(SrtOptions(rule="paper")), 0, request((1, 3)), TEXT)) <= BY_CHANCE


@pytest.mark.parametrize("online", [True, False])
def test_srt_drafts_from_running_siblings_only_online(online: bool) -> None:
    drafter = SrtDrafter(SrtOptions(online=online))
    for sample in (0, 1):
        drafter.start(sample, request(rng_key=sample))
    decode(drafter, 0, TEXT[:30])
    accepted = sum(decode(drafter, 1, TEXT[:20]))
    assert (accepted > 10) == online
    drafter.finish(0, completion(request(), TEXT[:30]))
    assert sum(decode(drafter, 1, TEXT[20:30])) > 4, "a completed sibling is of use either way"


def test_srt_is_history_when_fed_by_history_alone() -> None:
    """The same completed rollouts, one update later: both build the same trie."""
    srt, history = SrtDrafter(SrtOptions(online=False, coupled=False, other_prompts=False)), HistoryDrafter()
    for drafter in (srt, history):
        run(drafter, 0, request(), TEXT)
        run(drafter, 1, request(), TEXT[:20] + OTHER[:20])
        drafter.on_policy_update()
        drafter.start(2, request())
    for token in TEXT[:20] + OTHER[:10] + TEXT[40:50]:
        (ours,), (theirs,) = propose(srt, [2]), propose(history, [2])
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.scores.tolist() == theirs.scores.tolist()
        for drafter in (srt, history):
            drafter.observe([2], [[token]])


def test_history_knows_nothing_of_its_own_step() -> None:
    drafter = HistoryDrafter()
    run(drafter, 0, request(), TEXT)
    assert sum(run(drafter, 1, request(), TEXT)) == 0
    assert drafter.expected_tokens(request()) is None
    drafter.on_policy_update()
    assert drafter.expected_tokens(request()) == len(TEXT)
    assert sum(run(drafter, 2, request(), TEXT)) >= 0.8 * len(TEXT)


@pytest.mark.parametrize("rule", ["blend", "paper", "authors"])
def test_srt_rules_all_repeat_a_known_text(rule: str) -> None:
    drafter = SrtDrafter(validate_section(SrtOptions, {"rule": rule}, ("rollout", "drafter_options")))
    run(drafter, 0, request(), TEXT)
    assert sum(run(drafter, 1, request(), TEXT)) >= 0.5 * len(TEXT)


@pytest.mark.parametrize(("make", "leaves_out"), [(SrtDrafter, True), (HistoryDrafter, True), (SuffixDrafter, False)])
def test_only_our_own_rule_leaves_out_nodes_that_cannot_pay(make: Callable[[], DrafterBase], leaves_out: bool) -> None:
    drafter = make()
    for sequence_id, token in enumerate([8, 8, 9]):
        run(drafter, sequence_id, request(rng_key=sequence_id), [3, 7, token])
    drafter.on_policy_update()
    drafter.start(9, request(rng_key=9))
    (whole,) = propose(drafter, [9], 32)
    drafter.least_score = float(whole.scores.max() + whole.scores.min()) / 2
    (cut,) = propose(drafter, [9], 32)
    likely = whole.scores >= drafter.least_score
    assert 0 < likely.sum() < whole.num_nodes
    kept = likely if leaves_out else np.ones_like(likely)
    assert cut.token_ids.tolist() == whole.token_ids[kept].tolist()


def test_srt_frees_a_trie_with_its_last_sample() -> None:
    drafter = SrtDrafter()
    for sample in range(3):
        drafter.start(sample, request(rng_key=sample))
    drafter.start(9, request((4, 4)))  # never gets a slot
    assert drafter._tries.num_tries == 0, "nobody has drafted yet"
    decode(drafter, 0, TEXT)
    decode(drafter, 1, OTHER)
    assert drafter._tries.num_tries == 1
    drafter.finish(0, completion(request(), TEXT))
    drafter.finish(1, None)  # the consumer stopped early
    assert drafter._tries.num_tries == 1, "sample 2 waits for it"
    drafter.finish(2, None)
    drafter.finish(9, None)
    assert drafter._tries.num_tries == 0
    assert not drafter._tries.samples
    assert drafter._tries.num_bytes == 0
    assert [rollout.tolist() for rollout in drafter.cache("train").rollouts((1, 2))] == [TEXT]


def test_idle_tries_are_freed_where_memory_is_short_and_rebuilt_when_needed() -> None:
    drafter = SrtDrafter(SrtOptions(cache_memory_gib=3000 / 2**30))
    for prompt in (1, 2):
        for sample in (0, 1):
            drafter.start(10 * prompt + sample, request((prompt,), rng_key=10 * prompt + sample))
        decode(drafter, 10 * prompt, TEXT)
        drafter.finish(10 * prompt, completion(request((prompt,)), TEXT))
    assert drafter._tries.num_tries == 1, "building the second freed the first, which nobody drafted from"
    assert sum(decode(drafter, 11, TEXT)) >= 0.8 * len(TEXT)


@pytest.mark.parametrize("online", [True, False])
def test_a_trie_too_large_is_rebuilt_from_the_newest_texts(online: bool) -> None:
    drafter = SrtDrafter(SrtOptions(max_trie_tokens=512, online=online, max_rollouts=8))
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 50, 100).tolist() for _ in range(6)]
    for index, text in enumerate(texts):
        run(drafter, index, request(), text)
    for sample in range(10, 14):
        drafter.start(sample, request(rng_key=sample))
        decode(drafter, sample, rng.integers(0, 50, 100).tolist())  # online, all of it is more than the trie may hold
        (trie,), _ = drafter._tries.cursors([sample])
        assert trie.num_tokens <= 512
    assert sum(decode(drafter, 10, texts[5][:60])) > 40, "the newest is still known"
    for sample in range(10, 14):
        drafter.finish(sample, None)


def test_rebuilt_cursors_stand_where_their_samples_stand() -> None:
    drafter = SrtDrafter(SrtOptions(max_trie_tokens=128))
    for sample in (0, 1):
        drafter.start(sample, request(rng_key=sample))
    propose(drafter, [0, 1])
    drafter.observe([0, 1], [OTHER[:40], OTHER[:30]])
    before = drafter._tries.cursors([1])
    drafter.observe([0], [TEXT])  # 130 tokens
    assert drafter._tries.cursors([1]) != before, "rebuilt"
    (tree,) = propose(drafter, [1])
    assert OTHER[30] not in chain_of(tree), "of sample 0 only the end was kept"
    drafter.observe([1], [TEXT[45:50]])
    (tree,) = propose(drafter, [1])
    assert chain_of(tree)[:3] == TEXT[50:53]


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=6), st.booleans(), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_a_trie_knows_the_same_however_seldom_drafts_are_wanted(
    steps: list[tuple[int, list[int], bool, bool]],
) -> None:
    """Steps: (sample, its tokens, whether the second drafter is asked now, whether the sample ends)."""
    eager, lazy = SrtDrafter(), SrtDrafter()
    live: dict[int, list[int]] = {}
    for drafter in (eager, lazy):
        drafter.start(99, request(rng_key=99))
    number = dict.fromkeys(range(4), 0)
    for sample, tokens, is_asked, is_last in steps:
        sequence_id = 4 * number[sample] + sample
        for drafter in (eager, lazy):
            if sequence_id not in live:
                drafter.start(sequence_id, request(rng_key=sequence_id))
            drafter.observe([sequence_id], [tokens])
        live.setdefault(sequence_id, []).extend(tokens)
        propose(eager, [*live, 99])
        if is_asked:
            propose(lazy, [*live])
        if is_last:
            number[sample] += 1
            text = live.pop(sequence_id)
            for drafter in (eager, lazy):
                drafter.finish(sequence_id, completion(request(rng_key=sequence_id), text))
    ids = [*live, 99]
    tries, cursors = zip(*(drafter._tries.cursors(ids) for drafter in (eager, lazy)), strict=True)
    assert tries[0][0].num_tokens == tries[1][0].num_tokens
    for ngram in ([a, b, c][:size] for size in (1, 2, 3) for a in range(3) for b in range(3) for c in range(3)):
        assert tries[0][0].count(ngram) == tries[1][0].count(ngram)
    for place in range(len(ids)):
        matches = [trie[place].match_length(at[place]) for trie, at in zip(tries, cursors, strict=True)]
        assert matches[0] == matches[1]


def test_srt_saves_and_loads_its_caches(tmp_path: Path) -> None:
    drafter = SrtDrafter()
    run(drafter, 0, request(), TEXT)
    run(drafter, 1, request((7,), purpose="eval"), OTHER)
    drafter.save(tmp_path)
    read = SrtDrafter()
    run(read, 0, request((8,)), OTHER)
    read.load(tmp_path)
    assert read.cache("train").prompts() == [(1, 2)]
    assert sum(run(read, 1, request(), TEXT)) >= 0.8 * len(TEXT)
    assert sum(run(read, 2, request((7,), purpose="eval"), OTHER)) >= 0.8 * len(TEXT)
    read.load(tmp_path / "of another drafter")
    assert sum(run(read, 3, request(), TEXT)) <= BY_CHANCE


def test_srt_metrics() -> None:
    drafter = SrtDrafter()
    run(drafter, 0, request(), TEXT)
    run(drafter, 1, request(), TEXT)
    assert drafter.expected_tokens(request((5,))) is None
    drafter.start(2, request((5,)))
    decode(drafter, 2, OTHER)
    metrics = drafter.take_metrics()
    assert metrics["engine/cache_hit_rate"] == 1 / 3
    assert metrics["engine/cache_tokens"] == 2 * len(TEXT)
    assert metrics["engine/cache_prompts"] == 1
    assert metrics["engine/cache_bytes"] > drafter.cache("train").num_bytes, "the live trie counts"
    assert metrics["engine/cache_dropped_rollouts"] == metrics["engine/cache_dropped_prompts"] == 0
    drafter.finish(2, None)
    assert "engine/cache_hit_rate" not in drafter.take_metrics()
    assert all(name.startswith("engine/") for name in metrics)


def test_prompts_that_come_next_stay_in_the_cache() -> None:
    drafter = SrtDrafter(SrtOptions(cache_memory_gib=3000 / 2**30))
    drafter.set_next_uses([(0,)])
    for prompt in range(6):
        run(drafter, prompt, request((prompt,)), TEXT)
    assert (0,) in drafter.cache("train").prompts()
    assert drafter.take_metrics()["engine/cache_dropped_prompts"] > 0


# --- suffix


def test_suffix_drafts_from_all_prompts_and_from_the_own_text() -> None:
    drafter = SuffixDrafter()
    run(drafter, 0, request((1,)), TEXT)
    assert sum(run(drafter, 1, request((2,)), TEXT)) >= 0.5 * len(TEXT), "another prompt's response"
    assert sum(run(drafter, 2, request(OTHER), OTHER[5:])) >= 0.5 * len(OTHER), "its own prompt"
    assert sum(run(drafter, 3, request((1,), purpose="eval"), TEXT)) == 0, "evaluation learns from itself alone"


def test_suffix_takes_the_larger_sum_of_scores() -> None:
    drafter = SuffixDrafter()
    run(drafter, 0, request((1,)), [10, 11, 12, 13])
    run(drafter, 1, request((1,)), [10, 11, 12, 14])
    drafter.start(2, request((10, 11, 20, 21, 22, 23, 30, 10, 11, 20, 21, 22, 23)))
    drafter.start(3, request((1,)))
    drafter.observe([2, 3], [[10, 11], [10, 11]])
    own, from_all = propose(drafter, [2, 3])
    assert chain_of(own)[:4] == [20, 21, 22, 23]
    assert chain_of(from_all)[0] == 12


def test_suffix_keeps_the_newest_responses(tmp_path: Path) -> None:
    drafter = SuffixDrafter(SuffixOptions(max_tokens=256))
    rng = np.random.default_rng(4)
    texts = [rng.integers(0, 50, 100).tolist() for _ in range(8)]
    for index, text in enumerate(texts):
        run(drafter, index, request((index,)), text)
    assert sum(run(drafter, 90, request(), texts[0][:50])) < 10
    assert sum(run(drafter, 91, request(), texts[7])) > 40
    drafter.save(tmp_path)
    read = SuffixDrafter(SuffixOptions(max_tokens=256))
    read.load(tmp_path)
    assert sum(run(read, 92, request(), texts[7])) > 40
    assert read.take_metrics()["engine/cache_tokens"] <= 256


def test_drafters_whose_caches_have_other_keys_do_not_read_each_others_files(tmp_path: Path) -> None:
    pairs: list[tuple[SrtDrafter | SuffixDrafter, SrtDrafter | SuffixDrafter]]
    pairs = [(SrtDrafter(), SuffixDrafter()), (SuffixDrafter(), SrtDrafter())]
    for written, read in pairs:
        folder = tmp_path / type(written).__module__
        folder.mkdir()
        run(written, 0, request(), TEXT)
        written.save(folder)
        assert list(folder.iterdir())
        read.load(folder)
        assert read.cache("train").num_prompts == 0


def test_recorded_rollouts_of_a_prompt_are_fed_to_one_trie(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = PromptTries._build

    def counting(self: PromptTries, prompts: Sequence[PromptTrie]) -> None:
        built.append(len(prompts))
        build(self, prompts)

    monkeypatch.setattr(PromptTries, "_build", counting)
    samples = [np.array(text, np.int32) for text in (TEXT, OTHER, TEXT[:30])]
    prompts = [
        RecordedPrompt(prompt_id="0", prompt_token_ids=(1, 2), samples=samples),
        RecordedPrompt(prompt_id="1", prompt_token_ids=(1, 3), samples=[]),
    ]
    drafter = SrtDrafter()
    feed_drafter(drafter, prompts, "train")
    assert built == [], "nobody has drafted yet"
    drafter.start(1000, request((1, 2), rng_key=9))
    drafter.start(1001, request((1, 3), rng_key=9))
    propose(drafter, [1000, 1001])
    assert built == [2], "all texts at once"
    assert [one.tolist() for one in drafter.cache("train").rollouts((1, 2))] == [TEXT, OTHER, TEXT[:30]]
    assert drafter.cache("train").num_prompts == 1


# --- all of them

DRAFTERS: dict[str, Callable[[], DrafterBase]] = {
    "ngram": lambda: NgramDrafter(NgramOptions(min_ngram=1)),
    "suffix": lambda: SuffixDrafter(SuffixOptions(max_tokens=64, min_score=0.01)),
    "history": lambda: HistoryDrafter(HistoryOptions(max_rollouts=2, max_trie_tokens=64)),
    "srt": lambda: SrtDrafter(SrtOptions(max_trie_tokens=64)),
    "srt offline": lambda: SrtDrafter(SrtOptions(max_trie_tokens=64, online=False)),
    "srt paper": lambda: SrtDrafter(SrtOptions(rule="paper")),
    "srt authors": lambda: SrtDrafter(SrtOptions(rule="authors")),
}
Samples = st.lists(
    st.tuples(
        st.integers(0, 1),  # prompt
        st.integers(0, 3),  # rng_key
        st.booleans(),  # a run-ahead?
        st.booleans(),  # given up?
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), max_size=6),  # tokens of each step
    ),
    max_size=5,
)


@pytest.mark.parametrize("name", DRAFTERS)
@settings(max_examples=40, deadline=None)
@given(rounds=st.lists(Samples, min_size=1, max_size=4), max_nodes=st.lists(st.integers(0, 12), min_size=5, max_size=5))
def test_random_texts_give_proper_trees_and_leave_nothing_behind(
    name: str, rounds: list[list[tuple[int, int, bool, bool, list[list[int]]]]], max_nodes: list[int]
) -> None:
    drafter = DRAFTERS[name]()
    first_id = 0
    for samples in rounds:
        requests = [
            request((prompt, 3), rng_key, is_run_ahead=is_run_ahead) for prompt, rng_key, is_run_ahead, _, _ in samples
        ]
        for index, sample_request in enumerate(requests):
            drafter.start(first_id + index, sample_request)
        for step in range(6):
            live = [index for index, sample in enumerate(samples) if len(sample[4]) > step]
            propose(drafter, [first_id + index for index in live], [max_nodes[index] for index in live])
            drafter.observe([first_id + index for index in live], [samples[index][4][step] for index in live])
            for index, (_, _, is_run_ahead, given_up, steps) in enumerate(samples):
                if len(steps) == step + 1:
                    tokens = [token for tokens in steps for token in tokens]
                    ends_well = not (is_run_ahead or given_up)
                    drafter.finish(first_id + index, completion(requests[index], tokens) if ends_well else None)
        for index, sample in enumerate(samples):
            if not sample[4]:
                drafter.finish(first_id + index, None)
        first_id += len(samples)
        drafter.on_policy_update()
    if isinstance(drafter, (SrtDrafter, HistoryDrafter)):
        assert drafter._tries.num_tries == 0
        assert not drafter._tries.samples
        assert drafter.take_metrics()["engine/cache_bytes"] == sum(
            drafter.cache(purpose).num_bytes for purpose in ("train", "eval", "generate")
        ) + sum(shared.num_bytes for shared in getattr(drafter, "_shared", {}).values())


@pytest.mark.parametrize("options", [SrtOptions, HistoryOptions, SuffixOptions, NgramOptions])
def test_every_option_is_documented(options: type[Section]) -> None:
    assert all(field.description for field in options.model_fields.values())
