"""A pretrained attention head: its definition, its folders, and that it changes no token."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from attention_head_cases import (
    DIALECTS,
    NUM_LISTED,
    SPECFORGE,
    SPECULATORS,
    Reference,
    add_mtp_layer,
    change_folder,
    make_folder,
)
from engine_cases import Completions, Letters, decode, options, outputs, tiny_policy
from plain_kernels import uniform_noise
from safetensors.torch import load_file
from test_engine_property import varied_requests
from test_turns import converse, turn_requests
from torch import Tensor
from transformers import Qwen2Config
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from srtrl.drafters.base import DrafterBase
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.engine import Engine
from srtrl.engine.runner import EngineOptions
from srtrl.engine.step_inputs import Int32Array, Int64Array
from srtrl.features.attention_drafter import AttentionDrafter, AttentionGuesser
from srtrl.features.attention_head import AttentionHead, load_eagle3, load_mtp
from srtrl.features.draft_head import BEST, Float32Array
from srtrl.features.head_drafter import CpuGuesses
from srtrl.features.run_ahead import RunAhead
from srtrl.model.attention import PackedPlan
from srtrl.model.transformer import Transformer, layer_states
from srtrl.model.weights import load_model, save_model
from srtrl.types import Request

FLAGS: dict[str, dict[str, Any]] = {
    "EAGLE-3": {},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "norms before": {"norm_before_fc": True, "norm_before_residual": True},
}
TOKENS = [7, 3, 3, 60, 0, 12, 25, 31, 5, 44, 3]


@pytest.fixture(scope="module")
def policy() -> Transformer:
    return tiny_policy(num_hidden_layers=4)


def chain(head: AttentionHead, policy: Transformer, tokens: list[int], k: int) -> list[Tensor]:
    """Logits of `k` guesses after `tokens`, the best after the best, from the head's whole text again at each depth."""
    with torch.no_grad():
        streams = torch.empty(len(tokens), len(head.config.reads) * policy.config.hidden_size)
        policy(torch.tensor(tokens), PackedPlan([len(tokens)], "cpu"), layer_states(head.config.reads, streams))
        states, after, found = head.fuse(streams[:-1]), tokens[1:], []
        for _ in range(k):
            outputs, logits = head(states, torch.tensor(after), PackedPlan([len(after)], "cpu"))
            found.append(logits[-1])
            states = torch.cat((states, outputs[-1:]))
            after = [*after, int(head.token_ids[logits[-1].argmax()])]
        return found


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_logits_are_those_of_the_definition(
    dialect: str, flags: dict[str, Any], policy: Transformer, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, policy, dialect, **flags)
    head, reference = load_eagle3(str(folder), policy), Reference(folder, policy)
    head.refresh(policy)
    assert not any(weight.requires_grad for weight in head.parameters())
    for length in (2, len(TOKENS)):
        expected = reference.logits(TOKENS[:length], 4, lambda _, logits: int(reference.listed[logits.argmax()]))
        found = chain(head, policy, TOKENS[:length], 4)
        assert torch.stack(expected).std() > 1
        torch.testing.assert_close(torch.stack(found).double(), torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_both_layouts_and_pickled_weights_are_one_head(policy: Transformer, tmp_path: Path) -> None:
    first, second = (make_folder(tmp_path / dialect, policy, dialect) for dialect in DIALECTS)
    heads = [load_eagle3(str(folder), policy) for folder in (first, second)]
    torch.save(load_file(first / "model.safetensors"), first / "pytorch_model.bin")
    (first / "model.safetensors").unlink()
    heads.append(load_eagle3(str(first), policy))
    for head in heads[1:]:
        assert head.config[1:] == heads[0].config[1:]
        assert torch.equal(head.token_ids, heads[0].token_ids)
        for weight, expected in zip(head.parameters(), heads[0].parameters(), strict=True):
            assert torch.equal(weight, expected)
    assert [head.own_embedding is not None for head in heads] == [False, True, False]
    (first / "pytorch_model.bin").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"pytorch_model.bin: no readable weights"):
        load_eagle3(str(first), policy)


def test_layers_that_are_read_have_a_documented_default(policy: Transformer, tmp_path: Path) -> None:
    for dialect, fields in ((SPECFORGE, {"eagle_config": None}), (SPECULATORS, {})):
        folder = make_folder(tmp_path / dialect, policy, dialect)
        change_folder(folder, fields or {"eagle_aux_hidden_state_layer_ids": None})
        assert load_eagle3(str(folder), policy).config.reads == (2, 2, 1)  # of 4 layers: 2, 4 / 2, 4 - 3


MISTAKES: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({"hidden_size": 40}, {}, r"config.json: hidden_size is 40; expected 36"),
    ({"vocab_size": 62}, {}, r"config.json: vocab_size is 62; expected 61"),
    ({"target_hidden_size": 72}, {}, r"target_hidden_size is 72; expected 36"),
    ({"num_hidden_layers": 2}, {}, r"num_hidden_layers is 2; expected 1"),
    ({"model_type": "deepseek_v3"}, {}, r"model_type is 'deepseek_v3'; supported: llama, qwen3"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 2]}}, {}, r"reads layers that .* 4 layers has not"),
    ({"fc_norm": True}, {}, r"lacks 3 tensors: fc_norm.0.weight, fc_norm.1.weight"),
    ({"num_key_value_heads": 4}, {}, r"k_proj.weight has shape \[16, 72\]; by .*config.json it should be \[32, 72\]"),
    ({}, {"fc.weight": torch.zeros(36, 72)}, r"fc.weight has shape \[36, 72\]"),
    ({}, {"norm.weight": None}, r"lacks 1 tensors: norm.weight"),
    ({}, {"d2t": None}, r"lacks 1 tensors: d2t"),
    ({}, {"d2t": torch.full((NUM_LISTED,), 30)}, r"d2t leads to tokens that are not in the vocabulary"),
    ({}, {"midlayer.self_attn.rotary": torch.zeros(2)}, r"unexpected tensor midlayer.self_attn.rotary"),
)


@pytest.mark.parametrize(("fields", "tensors", "message"), MISTAKES, ids=[message[:30] for *_, message in MISTAKES])
def test_another_policys_head_and_damaged_ones_are_refused_by_name(
    fields: dict[str, Any], tensors: dict[str, Tensor | None], message: str, policy: Transformer, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, policy, SPECFORGE)
    change_folder(folder, fields, tensors)
    with pytest.raises(ValueError, match=message):
        load_eagle3(str(folder), policy)


class CheckedGuesses(CpuGuesses):
    """Compares all guesses with those of the reference, which reads whole texts: so all entries must be right."""

    def launch(self, rows: Int64Array, *noise: Any) -> bool:
        super().launch(rows, *noise)
        tokens, margins = self.wait()
        _, temperatures, rng_keys, positions = noise
        for chain, (key, temperature, position) in enumerate(zip(rng_keys, temperatures, positions, strict=True)):
            self.check(key, float(temperature), int(position), tokens[chain], margins[chain])
        return True

    def watch(self, engine: Engine, reference: Reference) -> None:
        self.engine, self.reference = engine, reference
        self.guesses: dict[tuple[int, int], list[int]] = {}
        """By RNG key and position in the response."""

    def check(
        self, key: np.uint64, temperature: float, position: int, tokens: Int32Array, margins: Float32Array
    ) -> None:
        [slot] = [s.slot for s in self.engine.batch.samples if s is not None and s.request.rng_key == int(key)]
        text = self.engine.batch.token_ids[slot, : self.engine.batch.num_tokens[slot]].tolist()
        expected = self.reference.logits(text, self.k, lambda depth, _: int(tokens[depth, BEST]))
        listed = self.reference.listed
        for depth, logits in enumerate(expected):
            where = torch.from_numpy(np.array([key], np.uint64).view(np.int64)), torch.tensor([position + depth])
            uniform = uniform_noise(*where, self.reference.policy.config.vocab_size)[0, listed]
            noisy = logits / temperature - (-uniform.log()).log() if temperature > 0 else logits
            (first, second), places = noisy.topk(2)
            assert abs(float(first - second) - margins[depth]) < 2e-3, (text, depth)
            if first - second > 2e-3:
                assert tokens[depth, BEST] == listed[places[0]], (text, depth)
        self.guesses[int(key), position] = tokens[:, BEST].tolist()


def attention_engine(
    policy: Transformer, chosen: EngineOptions, folder: Path, *, drafter: DrafterBase | None = None, k: int = 3
) -> tuple[Engine, CheckedGuesses]:
    """An engine whose drafter has the head in a folder, which always runs and whose guesses are checked.

    Run-aheads may take any time.
    """
    head = load_eagle3(str(folder), policy)
    chosen = replace(chosen, state_layers=head.config.reads)
    runner = CpuRunner(policy, chosen)
    guesser = AttentionGuesser(head, runner, chosen)
    headed = AttentionDrafter(drafter or NoDrafter(), guesser, runner, k=k, slots=chosen.slots)
    headed._guesses = guesses = CheckedGuesses(guesser, runner, k=k)
    ahead, always = partial(RunAhead, max_slowdown=1e9), cast(DrafterBase, headed)
    engine = Engine(policy, chosen, tokenizer=Letters(), drafter=always, runner=runner, run_ahead=ahead)
    guesses.watch(engine, Reference(folder, policy))
    return engine, guesses


def plain(policy: Transformer, requests: Sequence[Request]) -> Completions:
    """What is sampled without drafts."""
    return decode(Engine(policy, options(slots=1), tokenizer=Letters()), requests)


@pytest.fixture(scope="module")
def folders(policy: Transformer, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """An EAGLE-3 head in SpecForge's layout, and an EAGLE-3.1 head in that of speculators."""
    path = tmp_path_factory.mktemp("heads")
    return [
        make_folder(path / "3", policy, SPECFORGE),
        make_folder(path / "3.1", policy, SPECULATORS, **FLAGS["EAGLE-3.1"]),
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_tokens_and_guesses_are_those_of_whole_texts(which: int, policy: Transformer, folders: list[Path]) -> None:
    truth = plain(policy, varied_requests())
    for slots, num_pages, drafter in ((5, 10, NoDrafter()), (16, 70, SrtDrafter())):  # with few pages: preemption
        chosen = options(slots=slots, num_pages=num_pages, draft_budget=8)
        engine, guesses = attention_engine(policy, chosen, folders[which], drafter=drafter)
        for _ in range(2):
            assert outputs(decode(engine, varied_requests())) == outputs(truth)
        metrics = engine.take_metrics()
        assert metrics["engine/head_acceptance_depth_1"] > 0
        assert (metrics["engine/preemptions"] > 0) == (num_pages == 10)
        assert len(guesses.guesses) > 60


def test_turns_and_their_observations_leave_no_gap(policy: Transformer, folders: list[Path]) -> None:
    requests = turn_requests(num_samples=2, max_new_tokens=36)
    truth = converse(Engine(policy, options(slots=1), tokenizer=Letters()), requests)
    for num_pages in (40, 70):
        engine, _ = attention_engine(policy, options(slots=5, num_pages=num_pages, draft_budget=8), folders[0])
        assert outputs(converse(engine, requests, np.random.default_rng(0))) == outputs(truth)
        assert engine.take_metrics()["engine/head_acceptance_depth_1"] > 0


def test_a_frozen_head_follows_a_policy_that_learns_and_its_run_aheads(folders: list[Path]) -> None:
    policy = tiny_policy(num_hidden_layers=4)
    engine, guesses = attention_engine(policy, options(slots=8, draft_budget=8), folders[0], drafter=SrtDrafter())
    for seed in range(3):
        ahead = varied_requests(seed + 1)
        found = decode(engine, varied_requests(seed), run_ahead=ahead)
        assert outputs(found) == outputs(plain(policy, varied_requests(seed)))
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(1.02).add_(0.01)
        engine.end_step(has_new_weights=True)
        assert len(guesses.guesses) > 20
        guesses.guesses.clear()
    assert engine.stats.num_run_ahead_tokens > 0


@pytest.mark.parametrize("damage", [torch.nan, 1e30])
def test_no_damage_changes_a_token(damage: float, policy: Transformer, folders: list[Path]) -> None:
    head, chosen = load_eagle3(str(folders[0]), policy), options(slots=5, draft_budget=8, state_layers=(1, 2, 4))
    head.fc.weight.mul_(damage)
    runner = CpuRunner(policy, chosen)
    guesser = AttentionGuesser(head, runner, chosen)
    headed = cast(DrafterBase, AttentionDrafter(SrtDrafter(), guesser, runner, k=3, slots=5))
    engine = Engine(policy, chosen, tokenizer=Letters(), drafter=headed, runner=runner)
    assert outputs(decode(engine, varied_requests())) == outputs(plain(policy, varied_requests()))
    assert engine.take_metrics()["engine/head_steps_share"] > 0.1


def mtp_logits(layer: MtpLayer, policy: Transformer, tokens: list[int], k: int) -> list[Tensor]:
    """Logits of `k` guesses, the best after the best, by the module of `transformers`; without a cache."""
    hidden = policy(torch.tensor(tokens), PackedPlan([len(tokens)], "cpu"))[:-1].double()
    embedding, after, found = policy.embedding.double(), tokens[1:], []
    assert isinstance(layer.config, Qwen2Config)
    rotary = Qwen2RotaryEmbedding(layer.config)
    for _ in range(k):
        positions = torch.arange(len(after))[None]
        mask = torch.full((len(after), len(after)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        angles = tuple(part.double() for part in rotary(hidden[None].float(), positions))
        [outputs] = layer(embedding[after][None], hidden[None], angles, mask, positions, None)
        found.append(policy.head_weight.double() @ outputs[-1])
        hidden, after = torch.cat((hidden, outputs[-1:])), [*after, int(found[-1].argmax())]
    return found


@torch.no_grad()
def test_an_mtp_layer_is_that_of_transformers_and_is_kept(tmp_path: Path) -> None:
    policy = tiny_policy()
    with pytest.raises(ValueError, match=r"lacks 16 tensors: model.mtp_layers.0.*kind mtp is for MiMo-7B"):
        load_mtp(policy)
    layer = add_mtp_layer(policy)
    save_model(policy, tmp_path)
    again = load_model(tmp_path, dtype=torch.float32, device="cpu")
    assert again.carried.keys() == policy.carried.keys()
    assert all(torch.equal(again.carried[name], tensor) for name, tensor in policy.carried.items())
    head = load_mtp(again)
    head.refresh(again)
    hidden, after, found = again(torch.tensor(TOKENS), PackedPlan([len(TOKENS)], "cpu"))[:-1], TOKENS[1:], []
    for _ in range(3):
        outputs, logits = head(hidden, torch.tensor(after), PackedPlan([len(after)], "cpu"))
        found.append(logits[-1].double())
        hidden, after = torch.cat((hidden, outputs[-1:])), [*after, int(logits[-1].argmax())]
    expected = mtp_logits(layer, policy, TOKENS, 3)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_an_mtp_layer_changes_no_token() -> None:
    policy, chosen = tiny_policy(), options(slots=5, num_pages=10, draft_budget=8)
    add_mtp_layer(policy)
    runner = CpuRunner(policy, chosen)
    guesser = AttentionGuesser(load_mtp(policy), runner, chosen)
    headed = cast(DrafterBase, AttentionDrafter(SrtDrafter(), guesser, runner, k=3, slots=5))
    engine = Engine(policy, chosen, tokenizer=Letters(), drafter=headed, runner=runner)
    assert outputs(decode(engine, varied_requests())) == outputs(plain(policy, varied_requests()))
    assert engine.take_metrics()["engine/head_acceptance_depth_1"] > 0
