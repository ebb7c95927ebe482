"""How a draft head learns: in the policy's own update, from hidden states that its forward passes have made anyway.

From half of the sampled tokens the head is unrolled K tokens, on those that were sampled. At each depth it learns the
policy's distribution at that token, its most likely tokens alone, by cross-entropy (as SkyRL's MTP heads do). Hidden
states and the policy's weights are detached and the backward pass is the head's own, so that the policy's gradient has
the bits that it has without a head. Letters: R response tokens of a micro-batch, D model width, L listed tokens.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from srtrl.drafters.draft_head import DraftHead, length_of
from srtrl.model.logprobs import chunk_tokens
from srtrl.model.transformer import Transformer
from srtrl.ranks.processes import Ranks
from srtrl.recipe.schema import Recipe
from srtrl.rollout.packing import PackedBatch
from srtrl.run.checkpoint import DRAFT_HEAD, load_tensors
from srtrl.trainer.optimizer import MasterWeightAdamW, build_optimizer, gradient_holders, state_tensors
from srtrl.trainer.passes import sum_gradients
from srtrl.types import TrainSequence

STRIDE = 2
"""It is unrolled from one token in this many."""
NUM_TARGETS = 256
"""Most likely tokens of the policy that are learned; their probabilities are divided by their sum."""
DEPTH_DECAY = 0.6
"""Weight of a depth, by that of the one before it: 0.51, 0.31 and 0.18 of three."""
BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0


class DraftHeadLearner:
    """A head's optimizer, and its gradients between two steps of it."""

    def __init__(self, head: DraftHead, policy: Transformer, recipe: Recipe) -> None:
        """`recipe` has the section `rollout.draft_head`."""
        section = recipe.rollout.draft_head
        assert section is not None, "the recipe has no draft head"
        self.head = head
        self.policy = policy
        self.temperature = recipe.rollout.temperature
        self.optimizer = build_optimizer(head, learning_rate=section.learning_rate, weight_decay=0.0, betas=BETAS)
        weights = torch.tensor([DEPTH_DECAY**depth for depth in range(section.k)])
        self.weights: list[float] = (weights / weights.sum()).tolist()
        self._sums = torch.zeros(2, dtype=torch.float64, device=policy.device)
        """Loss, and tokens that it was unrolled from, in the present mini-batch."""
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []

    def add_gradients(self, hidden: Tensor, packed: PackedBatch, num_tokens: Tensor) -> None:
        """Add the gradients of a micro-batch.

        Args:
            hidden: The policy's final hidden states, which the response tokens were sampled from, [R, D], detached.
            packed: The micro-batch.
            num_tokens: Response tokens of the whole mini-batch, a scalar.
        """
        if not packed.weight:  # another rank's
            return
        head, last = self.head, len(hidden) - 1
        head.read(self.policy)  # gathered now, where it is sharded
        chunk = chunk_tokens(head.num_listed)
        targets, target_ids = self._targets(hidden, chunk)
        for rows in torch.arange(0, len(hidden), STRIDE, device=hidden.device).split(chunk):
            length = length_of(hidden[rows])
            state, loss = hidden[rows] / length, self._sums.new_zeros((), dtype=targets.dtype)
            for depth, weight in enumerate(self.weights, 1):
                state = head(state, packed.target_ids[(rows + depth - 1).clamp(max=last)])
                after = (rows + depth).clamp(max=last)
                # Not across what an environment said, and not into the next sample.
                follows = packed.hidden_index[after] == packed.hidden_index[rows] + depth
                logprobs = self._tempered(head.logits(state, length)).log_softmax(-1).gather(-1, target_ids[after])
                loss = loss - weight * ((targets[after] * logprobs).sum(-1) * follows).sum()
            (loss * STRIDE / num_tokens).backward()  # type: ignore[no-untyped-call]
            self._sums[0] += loss.detach()
            self._sums[1] += len(rows)

    def step(self, ranks: Ranks, place: str) -> None:
        """One step of the head's AdamW; all ranks call it, and take the same one. `place` names it in errors."""
        holders = gradient_holders(self.head, self.optimizer)
        sum_gradients(self.head, holders, ranks)
        ranks.sum([self._sums], f"the loss of the draft head, {place}")
        self._norms.append(torch.nn.utils.clip_grad_norm_(holders, MAX_GRAD_NORM))
        if all(holder.grad is not None for holder in holders):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._losses.append(self._sums[0] / self._sums[1])
        self._sums.zero_()

    def end_update(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Count the tokens of a training step, and return its metrics: means over its optimizer steps."""
        for sequence in sequences:
            self.head.count(sequence.token_ids)
        metrics = {
            f"draft_head/{name}": float(torch.stack(values).mean())
            for name, values in (("loss", self._losses), ("grad_norm", self._norms))
        }
        self._losses, self._norms = [], []
        return metrics

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds of it: its own memory, to be read and written."""
        weights = {f"{name}.weight": parameter.detach() for name, parameter in self.head.named_parameters()}
        return {"counts": self.head.counts, **weights, **state_tensors(self.optimizer, self.policy.dtype)}

    def load(self, checkpoint: Path) -> None:
        """Take back what a checkpoint holds; a head that the run did not have then stays fresh."""
        if (checkpoint / DRAFT_HEAD).is_dir():
            load_tensors(checkpoint, DRAFT_HEAD, self.tensors())
            if isinstance(self.optimizer, MasterWeightAdamW):
                self.optimizer.write_weights()

    @torch.no_grad()
    def _targets(self, hidden: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        """Probabilities of the policy's most likely listed tokens, and their indices in the list, [R, NUM_TARGETS]."""
        size = min(NUM_TARGETS, self.head.num_listed)
        tops = [self._tempered(functional.linear(rows, self.head.output)).topk(size) for rows in hidden.split(chunk)]
        return torch.cat([top.values.softmax(-1) for top in tops]), torch.cat([top.indices for top in tops])

    def _tempered(self, logits: Tensor) -> Tensor:
        """Logits in float32 (float64 stays) over the temperature."""
        return (logits if logits.dtype == torch.float64 else logits.float()) / self.temperature
