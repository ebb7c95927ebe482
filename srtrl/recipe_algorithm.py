"""The recipe's `algorithm` and `critic`: how rewards become a gradient."""

from typing import Any, Literal

from pydantic import Field

from srtrl.recipe_base import Section


class KLSection(Section):
    """The KL divergence to the frozen reference policy."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL to the frozen reference policy; 0 keeps no reference. With a `target` only the first value."""
    estimator: str = "k3"
    """A function in `srtrl/algorithms/reductions.py`, or `package.module:function` of your own."""
    placement: Literal["loss", "reward"] = "loss"
    """`loss`: added to the loss (GRPO); `reward`: subtracted from the reward before advantages (PPO, REINFORCE++)."""
    target: float | None = Field(default=None, gt=0)
    """Adaptive coefficient: it rises and falls to hold the KL here, in nats a token; by default it is fixed."""
    horizon: int = Field(default=10_000, ge=1)
    """Samples over which the adaptive coefficient follows; a smaller one follows faster."""


class AlgorithmSection(Section):
    """How rewards become a gradient."""

    advantage: str = "group_relative"
    """A function in `srtrl/algorithms/advantages.py`, or `package.module:function` of your own."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a token's later rewards (token-level advantages only: `gae`, `reinforce_plus_plus`)."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of `gae`: 1 trusts the rewards, 0 the critic (token-level advantages only)."""
    whiten_advantages: bool = False
    """Bring the advantages of all response tokens of a step to mean 0 and standard deviation 1."""
    loss: str = "ppo_clip"
    """A function in `srtrl/algorithms/losses.py`, or `package.module:function` of your own."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of that loss, such as `ratio_cap` of `dual_clip`."""
    reduction: str = "sequence_mean_token_mean"
    """How token losses become one number: a function in `srtrl/algorithms/reductions.py`, or one of your own."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - `clip_low`; at 1 there is no such clip, for no ratio is below 0."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + `clip_high`."""
    kl: KLSection = KLSection()
    """KL to the frozen reference."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """`rollout` reuses the decoder's log-probs; `recompute` spends one forward pass of the trainer."""
    importance_cap: float | None = Field(default=None, gt=0)
    """Weigh the loss by min(trainer's probability / decoder's, this cap); needs `old_logprobs: recompute`."""
    importance_level: Literal["token", "sequence"] = "token"
    """Whether those two probabilities are a token's or the whole response's."""
    filters: list[str] = Field(default_factory=list)
    """Functions in `srtrl/algorithms/reductions.py` (or your own) that drop groups before the update, in this order."""
    overlong_filtering: bool = False
    """Learn nothing from samples cut at the length limit; their rewards stay in the baseline of their group."""


class CriticSection(Section):
    """PPO's value model: a transformer of its own with one number a token, its own optimizer and learning rate."""

    path: str | None = None
    """Weights that it starts from (a Hugging Face folder, hub name or `bundled:tiny`); by default `model.path`."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of its AdamW; schedule, decay rates and epsilon are those of `train`."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up of that rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Training steps, from the first, in which only the critic learns."""
    num_epochs: int | None = Field(default=None, ge=1)
    """Passes over each rollout batch; by default `train.num_epochs`."""
    mini_batch_prompts: int | None = Field(default=None, ge=1)
    """Prompts of one optimizer step; by default `train.mini_batch_prompts`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay (matrices only)."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient's norm is clipped to this."""
    value_loss: str = "clipped_value"
    """A function in `srtrl/algorithms/losses.py`, or `package.module:function` of your own."""
    value_clip: float = Field(default=0.2, gt=0)
    """`clipped_value`: how far a value may move from the one before the update."""
