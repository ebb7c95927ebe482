"""How a draft head learns: in the policy's own update, from hidden states that its forward passes have made anyway.

From half of the sampled tokens the head is unrolled K tokens, on those that were sampled. At each depth it learns the
policy's distribution at that token, its most likely tokens alone: by a little cross-entropy, as SkyRL's MTP heads do,
and mostly by total variation, for a draft is accepted as often as the two distributions agree (as DSpark's heads).
Hidden states and the policy's weights are detached and the backward pass is the head's own, so that the policy's
gradient has the bits that it has without a head. Letters: R response tokens, D model width.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from srtrl import ranks
from srtrl.features.draft_head import DraftHead, length_of
from srtrl.model.logprobs import chunk_tokens
from srtrl.model.transformer import Transformer
from srtrl.recipe.schema import Recipe
from srtrl.rollout.packing import PackedBatch
from srtrl.run.checkpoint import load_tensors
from srtrl.trainer.optimizer import build_optimizer
from srtrl.trainer.passes import NonFiniteError, sum_gradients
from srtrl.types import TrainSequence

MAX_TOKENS = 16384
"""Tokens of a mini-batch that each rank keeps: at most 0.3 GB with a width of 4,096 in bfloat16."""
NUM_STEPS = 32
"""Steps of the head's optimizer per step of the policy's: the head begins with nothing. See docs/LOG.md."""
STRIDE = 2
"""It is unrolled from one token in this many."""
NUM_TARGETS = 256
"""Most likely tokens of the policy that are learned; their probabilities are divided by their sum."""
CROSS_ENTROPY, TOTAL_VARIATION = 0.25, 0.75
"""Their weights in the loss."""
DEPTH_DECAY = 0.6
"""Weight of a depth, by that of the one before it: 0.51, 0.31 and 0.18 of three."""
BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0


class Texts(NamedTuple):
    """Training data of the head: R response tokens, and the policy's outputs for them. Nothing is differentiable."""

    hidden: Tensor
    """[R, D], the final hidden states that they were sampled from."""
    places: Tensor
    """[R], where these are: two tokens are of one turn of one sample if they are as far apart as their places."""
    embedded: Tensor
    """[R, D], embeddings of the tokens."""
    targets: Tensor
    """[R, NUM_TARGETS], probabilities of the policy's most likely listed tokens."""
    target_ids: Tensor
    """[R, NUM_TARGETS], their indices in the list."""


class DraftHeadLearner:
    """A head's optimizer, and what it learns from between two steps of the policy."""

    folder = "draft_head"

    def __init__(self, head: DraftHead, policy: Transformer, recipe: Recipe) -> None:
        """A learner of `head` beside the policy; `recipe` has the section `rollout.draft_head`."""
        section = recipe.rollout.draft_head
        assert section is not None, "the recipe has no draft head"
        self.head = head
        self.policy = policy
        self.temperature = recipe.rollout.temperature
        self.optimizer = build_optimizer(head, learning_rate=section.learning_rate, weight_decay=0.0, betas=BETAS)
        weights = torch.tensor([DEPTH_DECAY**depth for depth in range(section.k)])
        self.weights: list[float] = (weights / weights.sum()).tolist()
        self._texts: list[Texts] = []
        self._figures: list[Tensor] = []
        """Loss and norm of the gradient, [2], of each step."""

    @torch.no_grad()
    def see(self, hidden: Tensor, packed: PackedBatch) -> None:
        """Keep what a micro-batch teaches, up to `MAX_TOKENS` tokens of a mini-batch.

        Args:
            hidden: The policy's final hidden states, which the response tokens were sampled from, [R, D].
            packed: The micro-batch.
        """
        num_kept = sum(len(texts.hidden) for texts in self._texts)
        rows = slice(0, min(len(hidden), MAX_TOKENS - num_kept) if packed.weight else 0)  # weight 0: another rank's
        if not rows.stop:
            return
        self.head.read(self.policy)
        hidden = hidden.detach()[rows]
        parts = torch.split(hidden, chunk_tokens(self.head.num_listed))
        size = min(NUM_TARGETS, self.head.num_listed)
        tops = [self._tempered(functional.linear(part, self.head.output)).topk(size) for part in parts]
        target_ids, targets = (torch.cat(column) for column in zip(*((t.indices, t.values) for t in tops), strict=True))
        places = packed.places[rows] + sum(texts.places[-1] + 2 for texts in self._texts[-1:])
        embedded = self.head.embed(packed.target_ids[rows])
        self._texts.append(Texts(hidden, places, embedded, targets.softmax(-1), target_ids))

    def after_mini_batch(self, place: str) -> None:
        """At most `NUM_STEPS` steps of the head's AdamW, on all ranks the same ones. `place` names them in errors."""
        texts = Texts(*map(torch.cat, zip(*self._texts, strict=True))) if self._texts else None
        self._texts = []
        starts = torch.arange(0, len(texts.hidden) if texts else 0, STRIDE, device=self.head.norm.device)
        holders = self.optimizer.holders(self.head)
        num_starts = max(ranks.gather(len(starts), f"the tokens of the draft head, {place}"))
        for part in range(min(NUM_STEPS, num_starts)):  # each has a token, of some rank
            sums = torch.zeros(2, dtype=torch.float64, device=starts.device)  # loss, and tokens
            rows = starts[part::NUM_STEPS]
            if texts is not None and len(rows):
                loss = self.loss(texts, rows)
                loss.backward()  # type: ignore[no-untyped-call]
                sums += torch.stack((loss.detach().double(), torch.full_like(sums[1], len(rows))))
            sum_gradients(holders)
            ranks.sum([sums], f"the loss of the draft head, {place}")
            gradients = [holder.grad for holder in holders if holder.grad is not None]
            torch._foreach_div_(gradients, sums[1].to(gradients[0].dtype))
            norm = torch.nn.utils.clip_grad_norm_(holders, MAX_GRAD_NORM)
            self.optimizer.step()
            self._figures.append(torch.stack((sums[0] / sums[1], norm.double())))
            self.optimizer.zero_grad(set_to_none=True)

    def loss(self, texts: Texts, rows: Tensor) -> Tensor:
        """Sum of the losses of the head when it is unrolled from these rows; differentiable by its weights alone."""
        length, last = length_of(texts.hidden[rows]), len(texts.hidden) - 1
        state, loss = texts.hidden[rows] / length, texts.targets.new_zeros(())
        for depth, weight in enumerate(self.weights, 1):
            state = self.head(state, texts.embedded[(rows + depth - 1).clamp(max=last)])
            after = (rows + depth).clamp(max=last)
            # Not across what an environment said, and not into the next sample.
            follows = texts.places[after] == texts.places[rows] + depth
            logprobs = self._tempered(self.head.logits(state, length)).log_softmax(-1)
            targets, logprobs = texts.targets[after], logprobs.gather(-1, texts.target_ids[after])
            entropies = -(targets * logprobs).sum(-1)
            variations = 1 - torch.minimum(targets, logprobs.exp()).sum(-1)  # of other tokens nothing is shared
            losses = CROSS_ENTROPY * entropies + TOTAL_VARIATION * variations
            loss = loss + weight * (losses * follows).sum()
        return loss

    def end_update(self, sequences: Sequence[TrainSequence], place: str) -> dict[str, float]:
        """Count the tokens of a training step, and return its metrics: means over its optimizer steps.

        Raises:
            NonFiniteError: the loss is not finite; the policy has learned.
        """
        self.head.count(np.concatenate([sequence.token_ids for sequence in sequences]))
        loss, norm = torch.stack(self._figures).mean(0).tolist() if self._figures else (0.0, 0.0)
        self._figures = []
        if not np.isfinite(loss):
            raise NonFiniteError(
                f"{place}: the loss of the draft head is {loss}: lower rollout.draft_head.learning_rate, or continue "
                "without a head (--resume rollout.draft_head=null)"
            )
        return {"draft_head/loss": loss, "draft_head/grad_norm": norm}

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds of it: its own memory, to be read and written."""
        weights = {f"{name}.weight": parameter.detach() for name, parameter in self.head.named_parameters()}
        return {"counts": self.head.counts, **weights, **self.optimizer.tensors(self.head.norm.dtype)}

    def load(self, checkpoint: Path) -> None:
        """Take back what a checkpoint holds; a head that the run did not have then stays fresh."""
        if (checkpoint / self.folder).is_dir():
            load_tensors(checkpoint, self.folder, self.tensors())
            self.optimizer.write_weights()

    def _tempered(self, logits: Tensor) -> Tensor:
        """Logits in float32 (float64 stays) over the temperature."""
        return (logits if logits.dtype == torch.float64 else logits.float()) / self.temperature
