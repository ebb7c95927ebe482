"""Requirements of every drafter, then each of them on texts made by hand."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_cases import recorded
from drafter_cases import OTHER, TEXT, chain_of, completion, make_drafter, observe, propose, request, run, start
from engine_cases import make_response
from hypothesis import given
from hypothesis import strategies as st
from plain_kernels import uniform_noise

from srtrl.bench.recorded import feed_drafter
from srtrl.drafters.base import DrafterBase, key_of
from srtrl.drafters.draft_tree import DraftTrees, check_trees
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.drafters.srt import SrtOptions
from srtrl.types import TopTokens, num_equal

DOCS = Path(__file__).resolve().parent.parent / "docs"
sys.path.append(str(DOCS / "examples"))
BY_CHANCE = 1
"""Tokens of such a text that may be guessed from the text itself."""

# --- All drafters -----------------------------------------------------------------------------------------------------

DRAFTERS: dict[str, Callable[[], DrafterBase]] = {
    "none": NoDrafter,
    "suffix": lambda: make_drafter("suffix:Drafter", {}),
    "few rollouts": lambda: SrtDrafter(SrtOptions(max_rollouts=2)),
    "srt": SrtDrafter,
}
Samples = st.lists(
    st.tuples(
        st.integers(0, 1),  # prompt
        st.integers(0, 3),  # rng_key
        st.booleans(),  # a text that is decoded early?
        st.booleans(),  # given up?
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), max_size=6),  # tokens of each step
    ),
    max_size=5,
)


@pytest.mark.parametrize("name", DRAFTERS)
@given(rounds=st.lists(Samples, min_size=1, max_size=4), max_nodes=st.lists(st.integers(0, 12), min_size=5, max_size=5))
def test_random_texts_give_proper_trees_and_leave_nothing_behind(
    name: str, rounds: list[list[tuple[int, int, bool, bool, list[list[int]]]]], max_nodes: list[int]
) -> None:
    drafter = DRAFTERS[name]()
    for samples in rounds:
        requests = [request((prompt, 3), rng_key) for prompt, rng_key, *_ in samples]
        start(drafter, dict(enumerate(requests)))
        for step in range(7):
            live = [slot for slot, sample in enumerate(samples) if len(sample[4]) > step]
            propose(drafter, live, [max_nodes[slot] for slot in live])
            observe(drafter, {slot: samples[slot][4][step] for slot in live})
            done = [slot for slot, sample in enumerate(samples) if len(sample[4]) == step]
            ends = [
                completion(requests[slot], [token for tokens in samples[slot][4] for token in tokens]) for slot in done
            ]
            for slot, end in zip(done, ends, strict=True):
                if samples[slot][2]:
                    drafter.learn_texts({key_of(end.request): {end.request.rng_key: end.response.token_ids}})
            given_up = [samples[slot][2] or samples[slot][3] for slot in done]
            drafter.finish(done, [None if up else end for up, end in zip(given_up, ends, strict=True)])
        drafter.end_step()
    if isinstance(drafter, SrtDrafter):
        assert drafter.store.num_bytes == 0
        assert not drafter._live


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_preempted_sample_starts_again_in_another_slot_and_drafts_the_same(name: str) -> None:
    drafter = DRAFTERS[name]()
    run(drafter, request(), TEXT[:40])
    drafter.end_step()
    start(drafter, {0: request(rng_key=1), 3: request((7, 8), rng_key=2)})
    observe(drafter, {0: OTHER[:5], 3: OTHER[20:30]})
    observe(drafter, {3: OTHER[30:32], 0: TEXT[5:9]})
    before = propose(drafter, [3, 0])
    drafter.finish([0], [None])
    start(drafter, {0: request((9,)), 1: request(rng_key=1)})
    observe(drafter, {0: TEXT[:9], 1: [*OTHER[:5], *TEXT[5:9]]})
    after = propose(drafter, [3, 1])
    assert [tree.token_ids.tolist() for tree in before] == [tree.token_ids.tolist() for tree in after]


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_is_learned_from_elsewhere_is_as_good_as_decoded(name: str) -> None:
    drafts = []
    decoding, told = DRAFTERS[name](), DRAFTERS[name]()
    run(decoding, request(), TEXT[:40])
    decoding.end_step()
    feed_drafter(told, [recorded("", (1, 2), [TEXT[:40]])])
    for drafter in (decoding, told):
        start(drafter, {0: request()})
        observe(drafter, {0: TEXT[:12]})
        drafts.append(chain_of(propose(drafter, [0])[0]))
    assert drafts[0] == drafts[1]
    assert drafts[0][:3] == (TEXT[12:15] if name in ("srt", "few rollouts", "suffix") else [])


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    drafter, read = SrtDrafter(), SrtDrafter()
    run(drafter, request(), TEXT)
    run(drafter, request((7,), purpose="eval"), OTHER)
    drafter.end_step()
    drafter.save(tmp_path)
    run(read, request((8,)), OTHER)
    read.load(tmp_path)
    assert run(read, request(), TEXT) >= 0.8 * len(TEXT)
    assert run(read, request((7,), purpose="eval"), OTHER) >= 0.8 * len(TEXT)
    read.load(tmp_path / "of another drafter")
    assert run(read, request(), TEXT) <= BY_CHANCE


# --- Checked trees ----------------------------------------------------------------------------------------------------


def test_incorrect_trees_are_refused() -> None:
    """Two trees: a root with two children, the first of which has one; and a single node."""
    trees = DraftTrees(
        token_ids=np.array([1, 2, 3, 4], np.int32),
        parents=np.array([-1, -1, 0, -1], np.int32),
        scores=np.array([0.5, 0.25, 0.2, 0.9], np.float32),
        offsets=np.array([0, 3, 4]),
    )
    check_trees(trees, np.array([3, 3]), 9, "the drafter my_fork:Drafter")
    changes: list[tuple[str, list[float], str]] = [
        ("token_ids", [1, 2, 3, 9], "i4"),
        ("token_ids", [1, 2, 3], "i4"),
        ("token_ids", [1, 2, 3, 4], "i8"),
        ("parents", [-1, -1, 2, -1], "i4"),
        ("parents", [-1, -2, 0, -1], "i4"),
        ("scores", [0.5, np.nan, 0.2, 0.9], "f4"),
        ("scores", [0.5, 0.25, 0.6, 0.9], "f4"),
        ("offsets", [0, 4], "i8"),
        ("offsets", [0, 0, 4], "i8"),
    ]
    for name, values, dtype in changes:
        changed: Any = {name: np.array(values, dtype)}
        with pytest.raises(
            ValueError, match=r"^the drafter my_fork:Drafter proposed incorrect draft trees; .* below 9"
        ):
            check_trees(replace(trees, **changed), np.array([3, 3]), 9, "the drafter my_fork:Drafter")


# --- srt --------------------------------------------------------------------------------------------------------------


def test_srt_drafts_from_completed_rollouts_of_the_same_prompt_and_purpose() -> None:
    drafter = SrtDrafter(SrtOptions(other_prompts=False))
    assert run(drafter, request(), TEXT) <= BY_CHANCE
    assert run(drafter, request(), TEXT) >= 0.8 * len(TEXT)
    assert run(drafter, request((1, 3)), TEXT) <= BY_CHANCE
    assert run(drafter, request(purpose="eval"), TEXT) <= BY_CHANCE
    drafter.end_step()
    assert run(drafter, request(), TEXT) >= 0.8 * len(TEXT)
    assert drafter.expected_tokens(request()) == len(TEXT)
    assert drafter.expected_tokens(request((9,))) is None
    drafter = SrtDrafter()  # with phrases from other prompts of the same purpose
    run(drafter, request(), TEXT)
    assert run(drafter, request((1, 3), purpose="eval"), TEXT) <= BY_CHANCE
    assert run(drafter, request((1, 3)), TEXT) > 0.5 * len(TEXT)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_drafter_that_defers_proposes_what_another_does_but_for_the_lag(lag: int) -> None:
    """With no lag in all of random texts; with one where nothing that drafts come from is in the newest tokens."""
    rng = np.random.default_rng(lag)
    drafters = [SrtDrafter(SrtOptions(other_prompts=lag == 0)) for _ in range(2)]
    drafters[1].defers = True
    history = rng.permutation(40).tolist() if lag else rng.integers(0, 4, 40).tolist()
    num_nodes = 0
    for drafter in drafters:
        drafter.knows_noise = lag == 0
        start(drafter, {0: request(rng_key=5), 1: request(rng_key=6), 2: request(rng_key=7)})
        observe(drafter, {2: history})
        drafter.learn_deferred()
    begins = [0, 20]
    for _ in range(6):
        trees = []
        for drafter in drafters:
            if not lag:
                drafter.learn_deferred()
            trees.append(propose(drafter, [0, 1]))
            drafter.learn_deferred()
        for tree, other in zip(*trees, strict=True):
            assert tree.token_ids.tolist() == other.token_ids.tolist()
            assert tree.scores.tolist() == other.scores.tolist()
            num_nodes += len(tree.token_ids)
        new = {slot: history[begin : begin + int(rng.integers(1, 4))] for slot, begin in enumerate(begins)}
        for drafter in drafters:
            observe(drafter, new)
        begins = [begin + len(new[slot]) for slot, begin in enumerate(begins)]
    assert num_nodes > 40


def test_nothing_that_was_put_off_is_lost(tmp_path: Path) -> None:
    """Texts learned between two rollouts, and at the end of one, are in checkpoints, counts and the next step."""
    drafters = [SrtDrafter(SrtOptions(other_prompts=False)) for _ in range(4)]
    for drafter in drafters:
        drafter.defers = True
        drafter.learn([completion(request(rng_key=1), TEXT)])
    at_end, counted, saved, loaded = drafters
    at_end.end_step()
    assert counted.take_metrics()["engine/cache_bytes"] > 4 * len(TEXT)
    saved.save(tmp_path)
    loaded.load(tmp_path)
    for drafter in (at_end, counted, saved, loaded):
        assert [one.tokens.tolist() for one in drafter.caches["train"].rollouts(request().prompt_token_ids)] == [TEXT]


def test_a_foreseen_tree_is_the_one_that_would_be_drafted() -> None:
    """For samples that follow a text all the way, leave it early, or just after the most likely path."""
    history = np.random.default_rng(0).permutation(60).tolist()
    drafters = [SrtDrafter(SrtOptions(other_prompts=False)) for _ in range(2)]
    for drafter in drafters:
        drafter.defers, drafter.knows_noise = True, False
        start(drafter, {slot: request(rng_key=slot) for slot in range(4)})
        observe(drafter, {3: history})
        drafter.learn_deferred()
    texts = [history, [*history[:1], *history[30:]], [*history[:4], *history[40:]]]
    ends, num_taken = [0, 0, 0], 0
    for _ in range(6):
        proposals = [propose(drafter, [0, 1, 2]) for drafter in drafters]
        for tree, other in zip(*proposals, strict=True):
            assert (tree.token_ids.tolist(), tree.scores.tolist()) == (other.token_ids.tolist(), other.scores.tolist())
        for drafter in drafters:
            drafter.learn_deferred()
        drafters[0].foresee(np.arange(3), DraftTrees.of(proposals[0]))
        after = drafters[0]._foreseen.after
        new = {}
        for slot, text in enumerate(texts):
            begin, tree = ends[slot], proposals[0][slot]
            ends[slot] += 1 + num_equal(tree.token_ids, np.array(text[begin:], np.int32))
            new[slot] = text[begin : ends[slot]]
            num_taken += after.token_ids[slice(*after.spans[slot])].tolist() == new[slot]
        for drafter in drafters:
            observe(drafter, new)
    assert num_taken > 8


def test_idle_tries_are_freed_where_memory_is_short_and_rebuilt_when_needed() -> None:
    """Tokens of live samples stay, and drafts find them as before."""
    drafter, roomy = (
        SrtDrafter(SrtOptions(cache_memory_gib=bound / 2**30, other_prompts=False)) for bound in (5000, 2**30)
    )
    for one in (drafter, roomy):
        one.learn([completion(request((1,)), TEXT)])
        one.end_step()
        start(one, {3: request((1,), rng_key=1)})
        observe(one, {3: [*TEXT[:9], *OTHER[:7]]})
        for prompt in range(2, 6):
            run(one, request((prompt,)), OTHER)
        start(one, {5: request((1,), rng_key=2)})
        observe(one, {5: TEXT[:8]})
        observe(one, {3: TEXT[7:8]})
    kept = [("train", (1,)), ("train", (5,))]
    assert sorted(drafter._prompts) in (kept, kept[:1]), "the others were freed"
    for tree, expected in zip(propose(drafter, [3, 5]), propose(roomy, [3, 5]), strict=True):
        assert tree.token_ids.tolist() == expected.token_ids.tolist()
        assert tree.scores.tolist() == expected.scores.tolist()
    metrics = drafter.take_metrics()
    assert metrics["engine/cache_bytes"] > drafter.caches["train"].num_bytes, "tries count"


def test_a_preempted_sample_keeps_what_its_tokens_were_drawn_from() -> None:
    drafter = SrtDrafter()
    start(drafter, {0: request(), 1: request(rng_key=1)})
    top = TopTokens(token_ids=np.array([TEXT], np.int32).T, logprobs=np.zeros((len(TEXT), 1), np.float32))
    first = TopTokens(token_ids=top.token_ids[:20], logprobs=top.logprobs[:20])
    observe(drafter, {0: TEXT[:20]}, first)
    drafter.finish([0], [None])
    start(drafter, {2: request()})
    observe(drafter, {2: TEXT[:20]})
    observe(drafter, {2: TEXT[20:]}, TopTokens(token_ids=top.token_ids[20:], logprobs=top.logprobs[20:]))
    drafter.finish([2, 1], [completion(request(), TEXT), None])
    [rollout] = drafter.caches["train"].rollouts((1, 2))
    assert rollout.distributions[:, 0].tolist() == TEXT


# --- Texts that were decoded early ------------------------------------------------------------------------------------


def with_early(text: list[int]) -> SrtDrafter:
    """A drafter after a step in which `text` was decoded early on RNG key 4."""
    drafter = SrtDrafter(SrtOptions(other_prompts=False))
    drafter.knows_noise = False
    drafter.learn_texts({("train", (1, 2)): {4: np.array(text, np.int32)}})
    assert [*drafter.new_texts()] == [("train", (1, 2))]
    drafter.end_step()
    assert not drafter.new_texts()
    return drafter


def num_accepted(drafter: SrtDrafter, **changes: Any) -> int:
    """Number of accepted tokens of a sample whose tokens are those of `TEXT`."""
    return run(drafter, request(**{"rng_key": 4} | changes), TEXT)


def test_early_texts_serve_the_samples_of_their_prompt_in_the_next_step() -> None:
    assert num_accepted(with_early(TEXT)) > 40
    assert num_accepted(with_early(TEXT), rng_key=5) > 40, "they are in the trie, like any text"
    assert num_accepted(with_early(TEXT), prompt=(1, 3)) < 10
    assert num_accepted(with_early(TEXT), purpose="eval") < 10
    old = with_early(TEXT)
    old.end_step()
    assert num_accepted(old) < 10


def test_a_sample_replaces_its_early_text_and_counts_what_it_repeats() -> None:
    drafter = with_early(TEXT)
    text = np.array([*TEXT[:20], *OTHER], np.int32)
    drafter.learn_texts({("train", (1, 2)): {4: text[:3], 5: text}})
    drafter.learn_texts({("train", (1, 2)): {4: text, 5: text[:3]}})  # the longer ones stay
    prefix = make_response(TEXT[:5])
    run(drafter, replace(request(rng_key=4), prefix=prefix), TEXT)
    assert drafter.take_metrics()["engine/text_tokens_repeated"] == (len(TEXT) - 5) + (20 - 5)
    run(drafter, request(rng_key=4), TEXT)
    assert drafter.take_metrics()["engine/text_tokens_repeated"] == 0
    run(drafter, request(rng_key=5), TEXT[:10])
    assert drafter.take_metrics()["engine/text_tokens_repeated"] == 10
    drafter.end_step()
    assert drafter.take_metrics()["engine/text_tokens_repeated"] == 0


# --- suffix -----------------------------------------------------------------------------------------------------------


@given(
    responses=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), max_size=2),
    text=st.lists(st.integers(0, 3), min_size=2, max_size=20),
    max_nodes=st.integers(0, 60),
)
def test_suffix_is_the_published_rule(responses: list[list[int]], text: list[int], max_nodes: int) -> None:
    """The sum of scores is the largest of the trees after each suffix, in all responses or in the sample's text."""
    drafter = make_drafter("suffix:Drafter", {})
    for number, response in enumerate(responses):
        run(drafter, request((number,)), response)
        drafter.end_step()
    start(drafter, {3: request(text[:1])})
    observe(drafter, {3: text[1:]})
    (tree,) = propose(drafter, [3], max_nodes)

    def share(texts: list[list[int]], context: list[int], token: int) -> float:
        following = [
            one[i + len(context)]
            for one in texts
            for i in range(len(one) - len(context))
            if one[i : i + len(context)] == context
        ]
        return following.count(token) / len(following) if following else 0.0

    def best_sum(texts: list[list[int]], context: list[int]) -> float:
        nodes, scores = [(1.0, context)], list[float]()
        while nodes and len(scores) < min(max_nodes, 48, 4 * len(context)) + 1:
            nodes.sort(key=lambda node: -node[0])
            score, path = nodes.pop(0)
            scores.append(score)
            children = [(score * share(texts, path, token), [*path, token]) for token in range(4)]
            nodes += [child for child in children if child[0] >= 0.1]
        return sum(scores[1:])

    sums = [best_sum(responses, text[1:][-size:]) for size in range(1, len(text))]
    sums += [best_sum([text], text[-size:]) for size in range(1, len(text) + 1)]
    assert float(tree.scores.sum()) == pytest.approx(max(sums), abs=1e-5)


def fork_of_the_docs(chances: dict[str, float] | None = None, *, knows_noise: bool) -> dict[str, float]:
    """The scores of the next tokens; `chances`: the policy's distribution there, in the rollouts."""
    drafter = SrtDrafter(SrtOptions(other_prompts=False))
    drafter.knows_noise = knows_noise
    start(drafter, {0: request(rng_key=8)})
    for text in ["6*7=42."] * 3 + ["6*7=48."] * 2 + ["9+31=40."] * 2 + ["8+33=41."]:
        tokens = list(text.encode())
        ids, logprobs = np.tile(tokens, (4, 1)).T.astype(np.int32), np.full((len(text), 4), -np.inf, np.float32)
        logprobs[:, 0] = 0
        if chances and text.startswith("6*7=4"):
            ids[5], logprobs[5] = list("".join(chances).encode()), np.log(list(chances.values()))
        start(drafter, {1: request()})
        observe(drafter, {1: tokens}, TopTokens(token_ids=ids, logprobs=logprobs) if chances else None)
        drafter.finish([1], [completion(request(), tokens)])
    observe(drafter, {0: list(b"6*7=4")})
    (tree,) = propose(drafter, [0], 6)
    nodes = zip(tree.parents.tolist(), tree.token_ids.tolist(), tree.scores.tolist(), strict=True)
    return {chr(token): score for parent, token, score in nodes if parent == -1}


def test_the_fork_of_the_docs_has_these_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of docs/speculation.md, "Three questions, one fork", and the picture."""
    page = (DOCS / "speculation.md").read_text(encoding="utf-8")
    [row] = re.findall(r"^\| score \|(?: \|)* (.*) \|$", page, re.MULTILINE)
    by_counts = fork_of_the_docs(knows_noise=False)
    assert by_counts == pytest.approx(dict(zip("2801", map(float, row.split(" | ")), strict=True)))
    monkeypatch.syspath_prepend(DOCS)
    drawings = import_module("drawings")
    tokens, noise, chances = drawings.FORK_TOKENS, drawings.FORK_KNOWN["noise"], drawings.FORK_KNOWN["p"]
    uniform = uniform_noise(torch.tensor([8]), torch.tensor([5]), 128)[0, [ord(token) for token in tokens]]
    assert (-(-uniform.log()).log()).tolist() == pytest.approx(noise, abs=0.005)
    assert np.argmax(np.log(chances) + noise) == 0, "the first one is drawn as sampled"
    by_noise = fork_of_the_docs(knows_noise=True)
    by_all = fork_of_the_docs(dict(zip(tokens, chances, strict=True)), knows_noise=True)
    for drawn, scores in zip(drawings.FORK_SCORES.values(), (by_counts, by_noise, by_all), strict=True):
        assert [scores[token] for token in tokens] == pytest.approx(drawn, abs=0.0006)
