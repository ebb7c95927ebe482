"""The recipe: every option of a run, its type, its default and its meaning.

The docstring under a field is its documentation (`srtrl show-config --help-fields` prints them). The sections of the
rollout are in `rollout.py`; reading a YAML file, overrides and error messages in `file.py`; names such as
`algorithm.loss` are resolved by `resolve.py`.
"""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, SerializerFunctionWrapHandler, model_serializer, model_validator

from srtrl.recipe.rollout import (
    MAX_WIDTH,
    EnvironmentSection,
    GradingSection,
    RewardSection,
    RolloutSection,
    Section,
)

__all__ = ["MAX_WIDTH", "EnvironmentSection", "GradingSection", "Recipe", "RewardSection", "RolloutSection", "Section"]

Schedule = Literal["constant", "linear", "cosine"]
"""A learning rate after its warm-up."""
ImportanceMode = Literal[
    "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_mean_mask"
]
"""Treatment of tokens that the decoder sampled with another probability; see `losses.importance_weights`."""


class LoraSection(Section):
    """LoRA: the policy learns two narrow matrices A and B for each matrix of a layer, and no weights (docs/lora.md)."""

    rank: int = Field(default=32, ge=1)
    """Rows of A and columns of B."""
    alpha: float = Field(default=32, gt=0)
    """A matrix is W0 + (alpha / rank) B A."""
    base: Literal["device", "host"] = "device"
    """Place of the weights W0. `host` leaves the GPU the memory of another policy, and copies W0 there in each step."""


class ModelSection(Section):
    """The policy, and the type of its weights."""

    path: str
    """Policy to start from: a Hugging Face folder (or that of a PEFT adapter, which names its base model), a hub name,
    or one of those that ship with srtrl, `bundled:tiny` and `bundled:tools` (it knows a calculator)."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; by default the one of `path`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the policy's weights (and the critic's). The optimizer works in float32 either way.

    bfloat16 has float32 master weights, moments and gradient sums, without which small updates would vanish: 18
    bytes per parameter instead of 16, but matrix products and the decoder use the weights as they are.
    """
    gradient_checkpointing: bool | Literal["half"] = False
    """Recompute each layer in the backward pass: less memory, about a quarter more time. `half`: every second layer."""
    lora: LoraSection | None = None
    """LoRA of the policy; by default all its weights learn. (The critic's, and those of a warm start, always do.)"""


class TaskSection(Section):
    """Source of the prompts, and the check of answers."""

    name: str
    """A task in `srtrl/tasks/`, or `package.module:Class` of your own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of that task; its `Options` class documents and checks them."""


class MixedTaskSection(TaskSection):
    """One of several tasks of a run."""

    label: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Last part of the names of its metrics (`eval/accuracy/<label>`); by default its name, without the package."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its draws are in the proportion of this to the other tasks' weights."""
    rewards: list[RewardSection] | None = Field(default=None, min_length=1)
    """Rewards of its samples, in place of the recipe's `rewards`."""

    @property
    def shown_label(self) -> str:
        """The label, given or not."""
        return self.label or self.name.rpartition(":")[2]


class DataSection(Section):
    """Draws of the training prompts."""

    order: str = "shuffled"
    """`shuffled` anew in each epoch, `as_is` (a curriculum in the file's order), `skip_silent` (which passes over most
    prompts whose last groups gave no signal), or `package.module:function` of your own."""


STATIC_ORDERS = ("shuffled", "as_is")
"""Values of `data.order` that depend on no sample."""


class KLSection(Section):
    """The KL divergence to the frozen reference policy."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL to the frozen reference policy; at 0 none is loaded."""
    estimator: str = "k3"
    """A function in `srtrl/algorithms/reductions.py`, or `package.module:function` of your own."""
    placement: Literal["loss", "reward"] = "loss"
    """`loss`: added to the loss (GRPO); `reward`: subtracted from the reward before advantages (PPO, REINFORCE++)."""


class ImportanceSection(Section):
    """Weights of tokens by the ratio of their probabilities, the trainer's over the decoder's (docs/off_policy.md)."""

    mode: ImportanceMode = "auto"
    """Treatment of a ratio outside [`min`, `max`], of a token or a whole sequence: `truncate` bounds it, `mask` drops
    it. `auto`: `token_mask` with `rollout.mode` `partial` or `spec_rl`, unless the loss is `dppo`; else `none`."""
    max: float = Field(default=5.0, ge=1)
    """Greatest ratio."""
    min: float = Field(default=0.5, ge=0, le=1)
    """Smallest ratio."""


class TeacherSection(Section):
    """On-policy distillation: a frozen teacher scores what the policy samples (docs/algorithms/distillation.md)."""

    path: str
    """The teacher: as `model.path`, with the policy's vocabulary."""
    coefficient: float = Field(default=1.0, gt=0)
    """This times (log-prob by the teacher - log-prob by the policy) is added to a token's advantage. For the teacher
    alone give all rewards the weight 0."""
    clip: float | None = Field(default=None, gt=0)
    """Maximum size of that difference, in nats; by default none."""


class AlgorithmSection(Section):
    """From rewards to a gradient."""

    advantage: str = "group_relative"
    """A function in `srtrl/algorithms/advantages.py`, or `package.module:function` of your own."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of that advantage function."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a token's later rewards (token-level advantages only: `gae`, `reinforce_plus_plus`)."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of `gae`: 1 trusts the rewards, 0 the critic (token-level advantages only)."""
    whiten_advantages: bool = False
    """Normalise the advantages of all response tokens of a step to mean 0 and standard deviation 1."""
    loss: str = "ppo_clip"
    """A function in `srtrl/algorithms/losses.py`, or `package.module:function` of your own."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of that loss, such as `ratio_cap` of `dual_clip`."""
    reduction: str = "sequence_mean_token_mean"
    """How token losses become one number: a function in `srtrl/algorithms/reductions.py`, or one of your own
    (`package.module:function`)."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - `clip_low`. 1 means no lower clip, because a ratio is never below 0."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + `clip_high`."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Entropy bonus: this times the entropy of each response token's distribution is subtracted from its loss."""
    kl: KLSection = KLSection()
    """KL to the frozen reference."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """`rollout`: reuse the decoder's log-probs. `recompute`: compute them in one more forward pass of the trainer."""
    importance: ImportanceSection = ImportanceSection()
    """Weights of the loss by trainer's probability / decoder's; they need `old_logprobs: recompute`."""
    opsm: float | None = Field(default=None, gt=0)
    """Drop samples of negative advantage whose tokens have become less likely since they were sampled, by more nats per
    token than this (OPSM)."""
    drift: float = Field(default=0.0, ge=0)
    """Weight of a token's squared log-ratio to the decoder's probability, added to its loss (prime-rl: 1e-3)."""
    teacher: TeacherSection | None = None
    """A teacher whose scores are added to the advantages, after whitening; none by default."""
    filters: list[str] = Field(default_factory=list)
    """Functions in `srtrl/algorithms/reductions.py` (or your own) that drop groups before the update, in this order."""
    filter_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the filters; each gets those that it declares."""
    overlong_filtering: bool = False
    """Do not learn from samples truncated at the length limit; their rewards stay in the baseline of their group."""


class CriticSection(Section):
    """PPO's value model: a second transformer, which starts from `model.path`, with one number per token."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Learning rate of its AdamW, without a warm-up. Schedule, epochs, decay rates, weight decay and gradient norm are
    those of `train`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Training steps, from the first, in which only the critic learns."""
    mini_batch_prompts: int | None = Field(default=None, ge=1)
    """Prompts of one optimizer step; by default `train.mini_batch_prompts`."""
    value_loss: str = "clipped_value"
    """A function in `srtrl/algorithms/losses.py`, or `package.module:function` of your own."""
    value_clip: float = Field(default=0.2, gt=0)
    """For `clipped_value`: maximum distance of a value from its value before the update; a larger one is clipped."""


DecayRate = Annotated[float, Field(ge=0, lt=1)]


class TrainSection(Section):
    """The update and the length of the run."""

    num_steps: int = Field(ge=0)
    """Training steps (one rollout batch each); or give `num_passes`."""
    num_passes: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Passes over the training prompts in place of `num_steps`, which follows when they are loaded."""
    mini_batch_prompts: int | None = Field(default=None, ge=1)
    """Prompts of one optimizer step, with all their samples; must divide `rollout.num_prompts`.

    By default all: one optimizer step per training step (and epoch). verl's `ppo_mini_batch_size` counts prompts too;
    TRL and OpenRLHF count samples: this number times `rollout.num_samples`.
    """
    num_epochs: int = Field(default=1, ge=1)
    """Passes over each rollout batch."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Token budget of one forward and backward pass (shared tokens count once): memory and speed, not the gradient."""
    sharding: Literal["ddp", "fsdp2"] = "ddp"
    """Share of weights, gradients and optimizer state on each of several ranks: all of them, or (`fsdp2`) its part.

    Sharded weights are gathered layer by layer in the update, and all of them for the rollouts.
    """
    attention: Literal["auto", "fa2"] = "auto"
    """FlashAttention of the update on a GPU, in bfloat16: FA3 or FA4 where installed, or always PyTorch's own (`fa2`).

    They differ in speed and rounding; `show-config --check` and the run's `machine.txt` name the one that is used.
    """
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Schedule = "constant"
    """Learning rate after the warm-up. `linear` and `cosine` would reach zero in the step after the last one."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay (matrices only; not norms, biases or embeddings)."""
    betas: tuple[DecayRate, DecayRate] = Field(default=(0.9, 0.999), strict=False)
    """AdamW's decay rates."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient's norm is clipped to this."""
    max_logprob_difference: float = Field(default=0.1, gt=0)
    """The run stops, before any optimizer step, if the log-probs of decoder and trainer differ by more nats on average.

    The largest difference of a single token is only logged, because in bfloat16 two correct computations of one token's
    log-prob can differ by 0.6 nats.
    """
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between checkpoints; the last step always writes one."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of checkpoints kept; older ones are deleted after a newer one is complete."""
    keep_best: Literal["eval/accuracy", "eval/solved_any", "eval/reward"] | None = None
    """Also keep a checkpoint of the step where this is highest, in evaluations; `srtrl eval RUN --best` finds it."""

    @model_validator(mode="before")
    @classmethod
    def leave_steps_out(cls, data: Any) -> Any:
        """With `num_passes` there are 0 steps until the prompts are counted."""
        is_open = isinstance(data, dict) and data.get("num_passes") is not None and data.get("num_steps") is None
        return data | {"num_steps": 0} if is_open else data


class EvalSection(Section):
    """Held-out evaluation."""

    every_steps: int | None = Field(default=None, ge=1)
    """Steps between evaluations during training; by default only before and after."""
    before_and_after: bool | Literal["auto"] = "auto"
    """Evaluate the first and the last policy; `auto`: if there are held-out problems."""
    num_problems: int | None = Field(default=None, ge=1)
    """Held-out problems to use, from the first; by default all of the task's."""
    num_samples: int = Field(default=1, ge=1, le=MAX_WIDTH)
    """Samples of each problem."""
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of most likely tokens whose probabilities add up to this; 1 keeps all."""


class LogSection(Section):
    """Trackers and files."""

    trackers: list[str] = Field(default_factory=list)
    """Trackers of accelerate, by name; `metrics.jsonl` is always written."""
    project: str = Field(default="srtrl", min_length=1)
    """Project of the trackers."""


class ArchitectureSection(Section):
    """A policy made from scratch (warm start only); the names are those of a Hugging Face config."""

    model_type: Literal["llama", "qwen2", "qwen3"] = "llama"
    """Family of the architecture."""
    hidden_size: int = Field(ge=1)
    """Width of the model."""
    intermediate_size: int = Field(ge=1)
    """Width of the MLP."""
    num_hidden_layers: int = Field(ge=1, le=1024)
    """Number of layers."""
    num_attention_heads: int = Field(ge=1)
    """Query heads."""
    num_key_value_heads: int = Field(ge=1)
    """Key-value heads; must divide the query heads."""
    max_position_embeddings: int = Field(default=1024, ge=1)
    """Longest sequence."""


class WarmStartSection(Section):
    """Supervised fine-tuning on the task's solutions, before any reinforcement learning."""

    architecture: ArchitectureSection | None = None
    """Start from random weights of this shape; by default fine-tune `model.path`."""
    train_tokenizer_vocab_size: int | None = Field(default=None, ge=260)
    """Train a byte-level BPE tokenizer of this size on the task's texts; by default use the model's tokenizer."""
    num_steps: int = Field(default=500, ge=1)
    """Optimizer steps."""
    batch_tokens: int = Field(default=8192, ge=1)
    """Tokens of one optimizer step, packed."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=20, ge=0)
    """Optimizer steps of linear warm-up; the learning rate then falls to zero along a cosine."""
    noise: float = Field(default=0.0, ge=0, lt=1)
    """Share of the solutions' tokens that are replaced by random printable ones: the policy then makes mistakes."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the saved weights."""
    output: str = Field(min_length=1)
    """Folder of the resulting policy (Hugging Face layout)."""


@dataclass(kw_only=True, frozen=True, slots=True)
class UpdatePlan:
    """Number, batch and size of the optimizer steps of a model; every default is filled in."""

    mini_batch_prompts: int
    """Prompts of one optimizer step."""
    num_epochs: int
    """Passes over each rollout batch."""
    steps_per_batch: int
    """Optimizer steps of one training step whose batch is full."""
    num_skipped: int
    """Training steps, from the first, in which this model does not learn."""
    num_steps: int
    """Optimizer steps of the whole run."""
    learning_rate: float
    """The peak."""
    warmup_steps: int
    """Optimizer steps of linear warm-up."""
    schedule: Schedule
    max_grad_norm: float
    """The gradient's norm is clipped to this."""


class Recipe(Section):
    """Everything that decides a run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """Name of the run; its folder is `<output_dir>/<name>`."""
    output_dir: str = Field(default="runs", min_length=1)
    """Folder of the run folders."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of data order, sampling and initialisation."""
    repeatable: bool = False
    """Two runs on one GPU give the same bits: sums have a fixed order, and what depends on time is refused
    (docs/exactness.md). On a CPU all runs do."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` (CUDA where present), `cpu` or `cuda`."""
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of torch; by default its own choice, beside a GPU at most 8, within the container's quota."""
    model: ModelSection
    """The policy."""
    task: TaskSection
    """Prompts and their grading: one section, or a list of tasks, each with a weight (docs/data.md)."""
    data: DataSection = DataSection()
    """Draws of the training prompts."""
    rewards: list[RewardSection] = Field(default_factory=lambda: [RewardSection(name="correct")], min_length=1)
    """Weighted sum of named rewards."""
    grading: GradingSection = GradingSection()
    """Processes and time limits of rewards."""
    rollout: RolloutSection
    """The decoder and what it decodes."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """Advantage, loss, reduction, KL and filters."""
    critic: CriticSection | None = None
    """PPO's value model; none by default."""
    train: TrainSection
    """The update."""
    eval: EvalSection = EvalSection()
    """Held-out evaluation."""
    log: LogSection = LogSection()
    """Trackers and files."""
    warm_start: WarmStartSection | None = None
    """Supervised fine-tuning on the task's solutions (`srtrl warm-start`)."""
    _home: Path = PrivateAttr(default_factory=Path.cwd)
    """The folder of a relative `output_dir`: a reward may change the current folder."""

    @model_validator(mode="before")
    @classmethod
    def read_tasks(cls, data: Any) -> Any:
        """A list of tasks is the task `mixture`; of one task it is that task."""
        tasks = data.get("task") if isinstance(data, dict) else None
        if not isinstance(tasks, list) or not tasks:
            return data
        try:
            (only,) = [MixedTaskSection.model_validate(task) for task in tasks]
        except ValueError:  # there are several, or there is a mistake in it, which the mixture names
            return data | {"task": {"name": "mixture", "options": {"tasks": tasks}}}
        task = only.model_dump(exclude_unset=True, include={"name", "options"})
        return data | {"task": task} | ({"rewards": tasks[0]["rewards"]} if tasks[0].get("rewards") else {})

    @model_serializer(mode="wrap")
    def write_tasks(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The mixture as the list that it was."""
        data: dict[str, Any] = handler(self)
        return data | ({"task": self.task.options["tasks"]} if self.task.name == "mixture" and "task" in data else {})

    @property
    def folder(self) -> Path:
        """The folder of the run, absolute."""
        return self._home / self.output_dir / self.name

    @property
    def max_samples(self) -> float:
        """Maximum number of samples at one time: a step with its run-ahead, or an evaluation (infinite: unknown)."""
        num_draws = 2 * max(self.rollout.num_prompts, self.rollout.max_draws or 0)
        return max(num_draws * self.rollout.num_samples, (self.eval.num_problems or inf) * self.eval.num_samples)

    @property
    def model_paths(self) -> dict[str, str]:
        """Options that name a model or a tokenizer, and are set: a folder, or a name on the hub."""
        teacher = self.algorithm.teacher
        paths = {"model.path": self.model.path, "model.tokenizer": self.model.tokenizer}
        paths["algorithm.teacher.path"] = None if teacher is None else teacher.path
        head = self.rollout.draft_head
        paths["rollout.draft_head.path"] = None if head is None else head.path
        return {option: path for option, path in paths.items() if path is not None}

    @property
    def has_reference(self) -> bool:
        """Whether the policy is compared with the model that the run began with: the weight of the KL term is not 0."""
        return self.algorithm.kl.coefficient > 0

    @property
    def importance_mode(self) -> str:
        """The mode of the importance weights, `none` for no weights."""
        algorithm = self.algorithm
        is_weighed = self.rollout.mode != "on_policy" and algorithm.loss != "dppo"  # its own ratio is to the decoder
        default = "token_mask" if is_weighed else "none"
        return default if algorithm.importance.mode == "auto" else algorithm.importance.mode

    @property
    def teaches_alone(self) -> bool:
        """Whether only a teacher says what is good: all rewards have the weight 0 (those of a mixture may differ)."""
        has_rewards = self.task.name == "mixture" or any(reward.weight for reward in self.rewards)
        return self.algorithm.teacher is not None and not has_rewards

    @property
    def policy_updates(self) -> UpdatePlan:
        """The policy's optimizer steps; they begin after the steps in which only the critic learns."""
        num_skipped = self.critic.warmup_steps if self.critic else 0
        return self._update_plan(self.train, self.train.warmup_steps, num_skipped)

    @property
    def critic_updates(self) -> UpdatePlan:
        """The critic's optimizer steps; the values that its section lacks are the policy's."""
        assert self.critic is not None, "the recipe has no critic"
        return self._update_plan(self.critic, warmup_steps=0, num_skipped=0)

    def _update_plan(self, section: TrainSection | CriticSection, warmup_steps: int, num_skipped: int) -> UpdatePlan:
        train, num_prompts = self.train, self.rollout.num_prompts
        size = section.mini_batch_prompts or train.mini_batch_prompts or num_prompts
        per_batch = train.num_epochs * (num_prompts // size)
        return UpdatePlan(
            mini_batch_prompts=size,
            num_epochs=train.num_epochs,
            steps_per_batch=per_batch,
            num_skipped=num_skipped,
            num_steps=(train.num_steps - num_skipped) * per_batch,
            learning_rate=section.learning_rate,
            warmup_steps=warmup_steps,
            schedule=train.schedule,
            max_grad_norm=train.max_grad_norm,
        )
