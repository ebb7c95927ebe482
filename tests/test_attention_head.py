"""A pretrained attention head: its definition, its folders, and that it changes no token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attention_head_cases import DIALECTS, NUM_LISTED, SPECFORGE, SPECULATORS, Reference, change_folder, make_folder
from engine_cases import tiny_policy
from safetensors.torch import load_file
from torch import Tensor

from srtrl.features.attention_head import AttentionHead, load_eagle3
from srtrl.model.attention import PackedPlan
from srtrl.model.transformer import LayerStates, Transformer

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
        policy(torch.tensor(tokens), PackedPlan([len(tokens)], "cpu"), streams := LayerStates(head.config.reads))
        states, after, found = head.fuse(streams.joined[:-1]), tokens[1:], []
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


def test_flags_change_what_a_head_computes(policy: Transformer, tmp_path: Path) -> None:
    logits = []
    for flags in FLAGS.values():
        head = load_eagle3(str(make_folder(tmp_path, policy, SPECFORGE, **flags)), policy)
        head.refresh(policy)
        logits.append(chain(head, policy, TOKENS, 3)[-1])
    assert all((logits[i] - logits[j]).abs().max() > 0.1 for i in range(3) for j in range(i))


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
