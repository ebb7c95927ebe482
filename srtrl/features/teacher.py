"""On-policy distillation: a frozen teacher scores the tokens that the policy has sampled.

docs/algorithms/distillation.md describes it.

R response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from srtrl.recipe.schema import TeacherSection
from srtrl.trainer.credit import joined, policy_logprobs
from srtrl.types import TrainSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def teacher_advantages(teacher_logprobs: Tensor, logprobs: Tensor, *, coefficient: float, clip: float | None) -> Tensor:
    """The coefficient x (log p_teacher - log p_policy) of each token, both at the temperature of the rollout.

    The gradient of KL(policy || teacher), one sample of it: the advantage of a token is its own gap alone, without a
    (discounted) sum over those that follow, as in verl, SkyRL, NeMo-RL, prime-rl and Tinker. None of them clips it by
    default.

    Args:
        teacher_logprobs: [R].
        logprobs: by the policy that sampled, [R].
        coefficient: weight beside the task's advantage.
        clip: maximum distance of a gap from 0, in nats; None for no clip.

    Returns:
        What is added to the advantages, [R].
    """
    gaps = teacher_logprobs - logprobs
    return coefficient * (gaps if clip is None else gaps.clamp(-clip, clip))


def teach(section: TeacherSection, sequences: Sequence[TrainSequence]) -> tuple[Tensor, dict[str, float]]:
    """Numbers that a teacher adds to the advantages of all response tokens, [R] float64, and metrics.

    `teacher/gap` is the mean of log p_policy - log p_teacher over tokens, an estimate of KL(policy || teacher) in nats
    per token; `teacher/gap_per_sample` the mean over samples of its sum.
    """
    teacher_logprobs, logprobs = joined([one.teacher_logprobs for one in sequences]), policy_logprobs(sequences)
    total = float((logprobs - teacher_logprobs).sum())
    metrics = {"teacher/gap": total / len(logprobs), "teacher/gap_per_sample": total / len(sequences)}
    return teacher_advantages(teacher_logprobs, logprobs, coefficient=section.coefficient, clip=section.clip), metrics


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """Compare the tokens of policy and teacher, by ids and texts; rows of a model without a token only pad it.

    Raises:
        ValueError: a token of the policy is another one of the teacher's, or none.
    """
    texts = {index: text for text, index in teacher.get_vocab().items()}
    for text, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if texts.get(index) != text:
            raise ValueError(
                f"algorithm.teacher.path: expected a model with the policy's vocabulary; token {index} is {text!r} of "
                f"the policy and {texts.get(index)!r} of the teacher"
            )
