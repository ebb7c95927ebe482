"""The sections of a recipe about sampling and grading, and the base of all sections."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

MAX_WIDTH = 65536
"""Limit of slots, prompts per step, samples per prompt and tokens per page: more would only take memory."""
MIN_TEMPERATURE = 1e-6
"""Logits that are divided by less are not finite."""


class Section(BaseModel):
    """A strict part of a recipe: unknown keys are errors, values are not coerced between types."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,  # a number has one type, given or not: a resume compares recipes
    )

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse: a recipe is checked as a whole, when it is made."""
        raise ValueError(f'`{name}` cannot be set: load_recipe(recipe, {{"section.key": VALUE}}) makes another recipe')

    @field_validator("*")
    @classmethod
    def check_size(cls, value: object, info: ValidationInfo) -> object:
        """No number needs more than 31 bits: it would overflow in an array, long after the start."""
        if isinstance(value, int | float) and abs(value) >= 2**31 and info.field_name != "seed":
            raise ValueError(f"expected less than 2^31, found {value}")
        return value


class RewardSection(Section):
    """One term of the reward."""

    name: str
    """A function in `srtrl/tasks/rewards.py`, or `package.module:function` of your own."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of that function, such as `cache_tokens` of `overlong_penalty`."""


class GradingSection(Section):
    """Processes and time limits of rewards."""

    num_workers: int = Field(default=2, ge=1, le=1024)
    """Worker processes that grade while the decoder runs (only for isolated rewards and verifiers: math-verify)."""
    timeout_seconds: float = Field(default=10.0, gt=0, le=3600)
    """CPU seconds one sample may take; a sample that takes longer is retried once alone, then counted as `timeout`."""


class EnvironmentSection(Section):
    """The environment that answers the policy between the turns of a sample: a tool, a game, another program."""

    name: str
    """An environment in `srtrl/environments/`, or `package.module:Class` of your own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of that environment; its `Options` class documents and checks them."""
    format: str = "text"
    """The format of calls and observations: `text`, `chat`, `code_tags` or `hermes`, or a class of your own
    (`package.module:Class`)."""
    max_turns: int = Field(default=8, ge=1, le=10_000)
    """Maximum number of turns of the policy in a sample."""
    max_observation_tokens: int = Field(default=512, ge=16, le=1_000_000)
    """The middle of a longer observation is left out."""


class DraftHeadSection(Section):
    """A small net that drafts from the policy's hidden states, on any prompt (docs/speculation.md)."""

    kind: Literal["recurrent", "eagle3"] = "recurrent"
    """`recurrent`: reads the last hidden state, and learns in the update. `eagle3`: a pretrained EAGLE-3 or EAGLE-3.1
    head, which attends to the whole text, and stays as it is."""
    path: str | None = None
    """Kind `eagle3`: the head's folder, or its name on the Hugging Face hub."""
    k: int = Field(default=3, ge=1, le=8)
    """Tokens that it guesses in a row."""
    vocabulary: int = Field(default=16384, ge=2)
    """Kind `recurrent`: maximum number of tokens that it can guess, the most frequent ones of prompts and responses."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Kind `recurrent`: learning rate of its own AdamW."""


class RolloutSection(Section):
    """The decoder and what it decodes in a step."""

    num_prompts: int = Field(ge=1, le=MAX_WIDTH)
    """Prompts drawn per step. The rollout batch of a step is `num_prompts` x `num_samples` samples.

    verl's `train_batch_size` counts prompts too; TRL's `generation_batch_size` counts samples.
    """
    num_samples: int = Field(ge=1, le=MAX_WIDTH)
    """Samples (responses) of each prompt: the group of GRPO."""
    mode: Literal["on_policy", "partial", "spec_rl"] = "on_policy"
    """A step learns from samples of the policy that is updated, or also of earlier ones (docs/off_policy.md).

    `partial`: the step ends when a share of its groups is complete, and the samples of the others go on in the next.
    `spec_rl`: a response begins with the part of the prompt's previous response that the policy accepts.
    """
    min_complete: float = Field(default=0.8, gt=0, le=1)
    """Mode `partial`: share of the groups at whose completion the rollout of a step ends."""
    max_age: int = Field(default=2, ge=1)
    """Mode `partial`: a group whose first tokens are this number of policy updates old is waited for."""
    lenience: float = Field(default=1.0, ge=0)
    """Mode `spec_rl`: an earlier token is kept with probability min(1, lenience x its probability now / then)."""
    dynamic_sampling: bool = False
    """Replace the groups that `algorithm.filters` drop by further ones until `num_prompts` are kept (DAPO)."""
    max_draws: int | None = Field(default=None, ge=1)
    """With dynamic sampling: maximum number of prompts drawn in a step; by default 10 x `num_prompts`.

    Where these are not enough the step learns from the groups that it has, and logs it.
    """
    max_prompt_tokens: int = Field(ge=1)
    """Maximum length of a prompt; the tasks of rows leave out longer ones, and log their number."""
    max_new_tokens: int = Field(ge=1)
    """Longest response, the end token included."""
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE)
    """The logits are divided by it, both in the decoder and in the update."""
    stop_strings: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """A response ends once its text contains one of these."""
    environment: EnvironmentSection | None = None
    """A tool, a game or another program for the policy (docs/tools.md); by default a sample is a single turn."""
    drafter: str = "srt"
    """A drafter in `srtrl/drafters/` (`none` drafts nothing), or `package.module:Class` of your own."""
    drafter_options: dict[str, Any] = Field(default_factory=dict)
    """Options of that drafter; its `Options` class documents and checks them."""
    draft_head: DraftHeadSection | None = None
    """Guess tokens also where texts have no history; by default there is none."""
    draft_budget: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """`auto`: as many draft nodes as the measured cost of steps justifies. N: at most N per sequence, up to 128."""
    slots: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_WIDTH)] = "auto"
    """Sequences decoded at a time; a finished one is replaced at once.

    `auto`: 64 on a CPU. On CUDA as many as the KV cache holds at a quarter of their maximum length, but not more than
    the samples of a step, or 1,024.
    """
    run_ahead_max_slowdown: Annotated[float, Field(ge=0)] | None = 0.03
    """Idle slots decode samples of the next step, whose tokens later serve as drafts (run-aheads), while that slows a
    decode step by at most this share of its time, by the measured cost of steps. 0: only what is free; null: none.

    A run-ahead uses the RNG key of its sample, so the two have much of their text in common. Every sample of the
    current step comes before run-aheads, and the policy never learns from a run-ahead. There are none if the drafter
    does not use them (`srt` does) or `draft_budget` is 0. On most CPUs another row is not cheap, so there are few.
    """
    kv_memory_gib: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """Maximum memory of the KV cache, which has pages for all slots at full length if that is less.

    `auto`: 4 on a CPU; on CUDA half of the memory that is free after weights, optimizers and gradients. The rest is for
    the activations of the update.
    """
    cuda_graphs: bool = True
    """On CUDA: launch a decode step as one captured graph. `false` saves memory, but small steps take longer."""
