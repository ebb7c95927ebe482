"""Mini-batches of whole draws against a naive cut, and what the descent over them shares between policy and critic."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from update_cases import fresh_accelerator

from srtrl.rollout.packing import PackedBatch
from srtrl.trainer.update import MiniBatch, NonFiniteError, TokenMeans, mini_batches, run_optimizer_steps
from srtrl.types import TrainSequence


def make_sequence(draw_index: int, token_id: int = 0, num_response: int = 2) -> TrainSequence:
    """A sequence that is known by the token before its response."""
    return TrainSequence(
        token_ids=np.full(num_response + 1, token_id),
        num_prompt_tokens=1,
        draw_index=draw_index,
        rollout_logprobs=np.zeros(num_response, np.float32),
        advantages=np.zeros(num_response, np.float32),
    )


def make_draws(sizes: dict[int, int]) -> list[TrainSequence]:
    """`sizes[draw_index]` sequences of each draw, with token ids 0, 1, 2, ..."""
    draws = [draw_index for draw_index, size in sizes.items() for _ in range(size)]
    return [make_sequence(draw_index, token_id) for token_id, draw_index in enumerate(draws)]


def token_ids(batch: MiniBatch) -> list[int]:
    return [int(sequence.token_ids[0]) for sequence in batch.sequences]


def draws_of(batch: MiniBatch) -> list[int]:
    return list(dict.fromkeys(sequence.draw_index for sequence in batch.sequences))


ragged_draws = st.dictionaries(st.integers(0, 1000), st.integers(1, 4), min_size=1, max_size=12)


@settings(deadline=None)  # the machine may be busy
@given(ragged_draws, st.integers(1, 14), st.integers(1, 4), st.integers(0, 3), st.integers(1, 5))
def test_every_epoch_has_every_draw_once_and_whole(
    sizes: dict[int, int], size: int, num_epochs: int, seed: int, step: int
) -> None:
    sizes = dict(sorted(sizes.items()))
    sequences = make_draws(sizes)
    found = list(mini_batches(sequences, size=size, num_epochs=num_epochs, seed=seed, step=step))
    per_epoch = -(-len(sizes) // size)
    places = [(epoch, number) for epoch in range(num_epochs) for number in range(per_epoch)]
    assert [(batch.epoch, batch.number) for batch in found] == places
    for epoch in range(num_epochs):
        batches = [batch for batch in found if batch.epoch == epoch]
        assert sorted(id for batch in batches for id in token_ids(batch)) == list(range(len(sequences)))
        for batch in batches[:-1]:
            assert len(draws_of(batch)) == size
        for batch in batches:
            assert len(batch.sequences) == sum(sizes[draw] for draw in draws_of(batch)), "a draw was cut"
            assert token_ids(batch) == sorted(token_ids(batch)), "packing would depend on the draw"
    first = [id for batch in found[:per_epoch] for id in token_ids(batch)]
    assert first == list(range(len(sequences))), "the first epoch is in data order"


def test_later_epochs_have_a_seeded_order_of_their_own() -> None:
    sequences = make_draws(dict.fromkeys(range(100, 120), 3))

    def orders(seed: int, step: int) -> list[str]:
        found = list(mini_batches(sequences, size=4, num_epochs=3, seed=seed, step=step))
        return [str([token_ids(batch) for batch in found if batch.epoch == epoch]) for epoch in range(3)]

    assert orders(0, 5) == orders(0, 5)
    assert orders(0, 5)[0] == orders(1, 6)[0]
    distinct = {*orders(0, 5), orders(0, 6)[1], orders(1, 5)[1]}
    assert len(distinct) == 5, "epochs, steps and seeds must have orders of their own"


def test_draws_that_are_gone_take_no_place() -> None:
    """Filters drop draws, overlong filtering parts of draws or all samples of one."""
    sequences = make_draws({0: 2, 3: 1, 4: 2, 9: 1, 11: 2})
    sizes = [len(batch.sequences) for batch in mini_batches(sequences, size=2, num_epochs=1, seed=0, step=1)]
    assert sizes == [3, 3, 2]
    assert list(mini_batches([], size=2, num_epochs=3, seed=0, step=1)) == []


def test_token_means_are_over_tokens_and_not_over_micro_batches() -> None:
    means = TokenMeans("algorithm.loss")
    means.add({"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([1.0, 1.0, 0.0])})
    means.add({"a": torch.tensor([10.0]), "b": torch.tensor([0.0])})
    assert means.result() == {"a": 4.0, "b": 0.5}
    assert TokenMeans("algorithm.loss").result() == {}


@pytest.mark.parametrize(
    "later", [{}, {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}]
)
def test_a_metric_of_some_micro_batches_only_is_refused(later: dict[str, Tensor]) -> None:
    """Its sum would be divided by the tokens of all: silently too small."""
    means = TokenMeans("critic.value_loss")
    means.add({"a": torch.ones(3), "b": torch.ones(3)})
    name = "a" if not later else "c" if "c" in later else "b"
    with pytest.raises(ValueError, match=rf"critic\.value_loss must return the same metrics .*`{name}` for some only"):
        means.add(later)


# ---- run_optimizer_steps: by hand on a model of one number ----


class OneNumber(nn.Module):
    """w, whose loss is (w - target)^2 / 2 averaged over the tokens of a mini-batch; a token's id is its target."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def loss(self, packed: PackedBatch, sequence_lengths: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        error = self.w - packed.target_ids  # [R]
        return (error.square() / 2).sum() / sequence_lengths.sum(), {"error": error.detach()}


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with fresh_accelerator() as accelerator:
        yield accelerator


@pytest.mark.parametrize("micro_batch_tokens", [5, 7, 100])
@pytest.mark.parametrize("max_grad_norm", [1e9, 0.5])
def test_descent_by_hand(micro_batch_tokens: int, max_grad_norm: float, accelerator: Accelerator) -> None:
    sequences = [make_sequence(draw, draw + 2, num_response=1 + draw) for draw in range(4)]
    batches = list(mini_batches(sequences, size=2, num_epochs=2, seed=0, step=1))
    model = OneNumber(1.0)
    checked: list[tuple[str, float]] = []
    metrics = run_optimizer_steps(
        model,
        torch.optim.SGD(model.parameters(), lr=123.0),
        accelerator,
        batches,
        model.loss,
        micro_batch_tokens=micro_batch_tokens,
        max_grad_norm=max_grad_norm,
        learning_rate=lambda number: 0.1 * (number + 1),
        loss_option="algorithm.loss",
        where="step 3",
        check=lambda batch, where: checked.append((where, model.w.item())),
    )
    w, losses, norms, errors = 1.0, [], [], []
    for number, batch in enumerate(batches):
        targets = np.concatenate([sequence.token_ids[1:] for sequence in batch.sequences])
        where, weight = checked[number]
        assert where == f"step 3, epoch {number // 2 + 1}, mini-batch {number % 2 + 1}"
        assert weight == pytest.approx(w, rel=1e-5)
        losses.append(np.mean((w - targets) ** 2 / 2))
        errors += (w - targets).tolist()
        gradient = w - targets.mean()
        norms.append(abs(gradient))
        w -= 0.1 * (number + 1) * float(np.clip(gradient, -max_grad_norm, max_grad_norm))
    assert model.w.item() == pytest.approx(w, rel=1e-5)  # clipping adds 1e-6 to the norm
    assert metrics == {
        "loss": pytest.approx(np.mean(losses), rel=1e-5),
        "error": pytest.approx(np.mean(errors), rel=1e-5),
        "grad_norm": pytest.approx(np.mean(norms), rel=1e-5),
        "learning_rate": pytest.approx(0.4),
    }
    assert model.w.grad is None, "gradients must not outlive the update"


def test_what_a_check_raises_comes_before_the_step(accelerator: Accelerator) -> None:
    model = OneNumber(1.0)

    def refuse(batch: MiniBatch, where: str) -> None:
        raise RuntimeError(f"{where}: {len(batch.sequences)} refused")

    def run(start: float, check: bool) -> None:
        with torch.no_grad():
            model.w.fill_(start)
        run_optimizer_steps(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            accelerator,
            mini_batches(make_draws({0: 2}), size=1, num_epochs=1, seed=0, step=1),
            model.loss,
            micro_batch_tokens=100,
            max_grad_norm=1.0,
            learning_rate=lambda _: 1.0,
            loss_option="algorithm.loss",
            where="step 1",
            check=refuse if check else None,
        )

    with pytest.raises(RuntimeError, match="step 1, epoch 1, mini-batch 1: 2 refused"):
        run(1.0, check=True)
    assert model.w.item() == 1.0
    with pytest.raises(NonFiniteError, match="step 1, epoch 1, mini-batch 1: the loss is inf"):
        run(1e200, check=False)
    assert model.w.item() == 1e200


def test_an_update_of_nothing_is_the_callers_mistake(accelerator: Accelerator) -> None:
    model = OneNumber(1.0)
    with pytest.raises(AssertionError, match="no mini-batch"):
        run_optimizer_steps(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            accelerator,
            [],
            model.loss,
            micro_batch_tokens=100,
            max_grad_norm=1.0,
            learning_rate=lambda _: 1.0,
            loss_option="algorithm.loss",
            where="step 1",
        )
