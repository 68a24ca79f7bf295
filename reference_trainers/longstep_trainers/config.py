"""The settings of a training run: one frozen dataclass per component, nested as the dotted keys are.

A YAML file fills them and dotted flags override it (`longstep_trainers.cli`); in Python they are built directly. Every
field is documented once, by the string under it, which is also its help text on the command line. Values that cannot
work raise `ConfigError` when the object is built, so a run never starts with them. Names that only the environment, the
model folder or the disk can confirm are checked where they are used. (Not slotted: jsonargparse reads defaults by `vars`.)

Words: a *row* is one step of one trajectory; an *iteration* is one rollout and the updates on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from longstep.errors import ConfigError
from longstep_trainers.actor_config import ActorConfig
from longstep_trainers.setting_checks import above, at_least, one_of, within

__all__ = [
    "ALGORITHMS",
    "EMBEDDED",
    "ActorConfig",
    "AlgorithmConfig",
    "EmbeddedModelConfig",
    "EnvConfig",
    "GRPOConfig",
    "GenerationConfig",
    "GiGPOConfig",
    "MemoryConfig",
    "ModelConfig",
    "PromptConfig",
    "RolloutConfig",
    "RunConfig",
    "TrainConfig",
]

ALGORITHMS = ("gigpo", "grpo")
"""Values of `algorithm.name`."""
MEMORIES = ("simple", "window", "retrieval")
"""Values of `env.memory.name`; memories that need a function are given in Python."""
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
"""Values of `log_level`."""
EMBEDDED = "embedded"
"""The value of `model.model_path` that means a small model built from scratch."""


@dataclass(frozen=True, kw_only=True)
class EmbeddedModelConfig:
    """Size of the model that is built from scratch when `model.model_path` is `embedded`."""

    hidden_size: int = 128
    """Width of the residual stream."""
    num_layers: int = 2
    """Number of transformer blocks."""
    num_heads: int = 4
    """Attention heads per block; divides `hidden_size`."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        at = "model.embedded"
        at_least(1, self.num_layers, f"{at}.num_layers")
        at_least(1, self.num_heads, f"{at}.num_heads")
        at_least(1, self.hidden_size, f"{at}.hidden_size")
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"expected `{at}.hidden_size` to be a multiple of `{at}.num_heads`, got "
                f"{self.hidden_size} and {self.num_heads}; change one of them"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The language model and how much of it is trained."""

    model_path: str = EMBEDDED
    """Folder of a Hugging Face causal language model, or `embedded` for a small one built from scratch."""
    embedded: EmbeddedModelConfig = field(default_factory=EmbeddedModelConfig)
    use_lora: bool = False
    """Train a low-rank adapter and leave the model's own weights as they are."""
    lora_r: int = 8
    """Rank of the adapter."""
    lora_alpha: int = 16
    """Scale of the adapter; its effect is multiplied by `lora_alpha / lora_r`."""
    lora_dropout: float = 0.0
    """Dropout before the adapter, in [0, 1). Anything above 0 makes the ratio of a fresh policy differ from 1."""
    lora_target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the modules that get an adapter; `all-linear` means every linear layer but the output."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights in use; `auto` is bfloat16 on CUDA and on CPUs that multiply it fast, else float32."""

    def __post_init__(self) -> None:
        """Check the adapter's numbers."""
        if not self.model_path:
            raise ConfigError(
                "expected a folder or `embedded`, got an empty string at `model.model_path`; "
                "name the model"
            )
        at_least(1, self.lora_r, "model.lora_r")
        above(0, self.lora_alpha, "model.lora_alpha")
        within(0.0, 1.0, self.lora_dropout, "model.lora_dropout", upper_open=True)

    @property
    def is_embedded(self) -> bool:
        """True when the model is built from scratch."""
        return self.model_path == EMBEDDED


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How many episodes one iteration plays, and how many at a time."""

    n: int = 8
    """Group size: trajectories that start from the same task and state."""
    batch_size: int = 128
    """Environments that run in parallel."""
    num_groups: int | None = None
    """Episode groups per iteration; None means as many as fill `batch_size` environments, rounded up."""

    def __post_init__(self) -> None:
        """Check the counts."""
        at_least(1, self.n, "env.rollout.n")
        at_least(1, self.batch_size, "env.rollout.batch_size")
        if self.num_groups is not None:
            at_least(1, self.num_groups, "env.rollout.num_groups")

    @property
    def groups_per_iteration(self) -> int:
        """Episode groups that one iteration plays."""
        return self.num_groups or math.ceil(self.batch_size / self.n)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What the agent is told of earlier steps."""

    name: str | None = None
    """`simple` (everything), `window` (the last steps) or `retrieval` (the steps most like the current one); None means
    the memory that the environment was registered with."""
    window_size: int = 4
    """Steps that `window` keeps; 0 keeps none."""
    top_k: int = 4
    """Steps that `retrieval` recalls."""

    def __post_init__(self) -> None:
        """Check the name and the counts."""
        if self.name is not None:
            one_of(MEMORIES, self.name, "env.memory.name")
        at_least(0, self.window_size, "env.memory.window_size")
        at_least(1, self.top_k, "env.memory.top_k")


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """The text of the prompt and its budget."""

    system: str | None = None
    """System message; None means the one the environment was registered with."""
    user: str | None = None
    """User message with placeholders such as `{current_observation}`; None means the environment's own."""
    max_tokens: int | None = None
    """Most tokens of a prompt; None means what `train.max_length` leaves beside `generation.max_tokens`."""

    def __post_init__(self) -> None:
        """Check the budget."""
        if self.max_tokens is not None:
            at_least(1, self.max_tokens, "env.prompt.max_tokens")


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """The environment, what wraps it, and how it is played."""

    name: str = "longstep/KeyDoor-v0"
    """Registered id of the environment."""
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the environment's constructor."""
    max_steps: int | None = None
    """Steps after which an episode is cut off; None means the limit the environment was registered with."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    reward_scale: float = 1.0
    """Factor on every reward before credit; the raw reward is recorded and reported."""

    def __post_init__(self) -> None:
        """Check the limits."""
        if not self.name:
            raise ConfigError(
                "expected a registered id, got an empty string at `env.name`; "
                "`longstep envs` lists them"
            )
        if self.max_steps is not None:
            at_least(1, self.max_steps, "env.max_steps")
        above(0, self.reward_scale, "env.reward_scale")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and how fast the model learns."""

    total_steps: int = 20_000
    """Environment steps to collect in all; the iteration that reaches it is the last one."""
    num_epochs: int = 1
    """Passes over the rows of one rollout."""
    batch_size: int = 256
    """Rows of one mini-batch."""
    gradient_accumulation_steps: int = 1
    """Mini-batches that make one optimizer step; its loss is the mean over all their tokens."""
    max_tokens_per_microbatch: int = 16_384
    """Tokens of one forward and backward pass; bounds memory and does not change the result beyond rounding."""
    row_length: int = 256
    """Tokens to a row of the packed layout; attention costs grow with it, shared prefixes end at its borders."""
    max_length: int = 2048
    """Most tokens of a row, prompt and completion together."""
    learning_rate: float = 5e-6
    """Peak learning rate of AdamW; about 1e-5 with LoRA, 1e-3 for the embedded model."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the rate does after the warm-up: stay, or fall to zero at `total_steps`."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises from zero."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's two running means."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    clip_range: float = 0.2
    """How far the ratio of new to old probability may fall below 1 before the loss stops rewarding it."""
    clip_range_high: float | None = None
    """The same above 1 (clip-higher); None means `clip_range`."""
    dual_clip: float | None = None
    """Bound, above 1, on the ratio that multiplies a negative advantage; None means no bound."""
    importance_cap: float = 2.0
    """Largest importance weight of a token that older weights or another runtime sampled, at least 1; the trainer's own
    process samples with the weights it trains, and has no such weight."""
    kl_coef: float = 0.0
    """Weight of the k3 divergence from the starting model; 0 keeps no copy of it."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    eval_every: int = 10
    """Iterations between evaluations on the held-out panel; 0 means only before and after training."""
    eval_tasks: int = 128
    """Tasks of the held-out panel; each is played once."""
    save_every: int = 10
    """Iterations between checkpoints; 0 means only at the end or when interrupted."""

    def __post_init__(self) -> None:
        """Check every number on its own."""
        for name in ("total_steps", "num_epochs", "batch_size", "gradient_accumulation_steps"):
            at_least(1, getattr(self, name), f"train.{name}")
        for name in ("max_tokens_per_microbatch", "row_length", "max_length", "eval_tasks"):
            at_least(1, getattr(self, name), f"train.{name}")
        for name in ("warmup_steps", "eval_every", "save_every"):
            at_least(0, getattr(self, name), f"train.{name}")
        for name in ("weight_decay", "kl_coef", "entropy_coef"):
            at_least(0, getattr(self, name), f"train.{name}")
        above(0, self.learning_rate, "train.learning_rate")
        above(0, self.max_grad_norm, "train.max_grad_norm")
        at_least(1, self.importance_cap, "train.importance_cap")
        within(0.0, 1.0, self.clip_range, "train.clip_range")
        if self.clip_range_high is not None:
            above(0, self.clip_range_high, "train.clip_range_high")
        if self.dual_clip is not None:
            above(1, self.dual_clip, "train.dual_clip")
        for beta in self.adam_betas:
            within(0.0, 1.0, beta, "train.adam_betas", upper_open=True)

    @property
    def clip_low(self) -> float:
        """How far below 1 the ratio may fall."""
        return self.clip_range

    @property
    def clip_high(self) -> float:
        """How far above 1 the ratio may rise."""
        return self.clip_range if self.clip_range_high is None else self.clip_range_high


@dataclass(frozen=True, kw_only=True)
class GiGPOConfig:
    """Credit by step groups (GiGPO)."""

    omega: float = 1.0
    """Weight of the step advantage beside the episode advantage; 0 leaves GRPO."""
    inner_group_size: int = 2
    """Fewest rows of a step group that gives a step advantage; divides `env.rollout.n`."""
    normalize: Literal["none", "std"] = "none"
    """Whether advantages are divided by the standard deviation of their group."""
    similarity_threshold: float | None = None
    """Texts at least this similar, in (0, 1], share a step group; None means equal states only."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        at = "algorithm.gigpo"
        at_least(0, self.omega, f"{at}.omega")
        at_least(1, self.inner_group_size, f"{at}.inner_group_size")
        if self.similarity_threshold is not None:
            above(0, self.similarity_threshold, f"{at}.similarity_threshold")
            within(0.0, 1.0, self.similarity_threshold, f"{at}.similarity_threshold")


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """Credit by episode groups alone (GRPO)."""

    normalize: Literal["none", "std"] = "none"
    """Whether advantages are divided by the standard deviation of their group, as the paper does."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become advantages."""

    name: str = "gigpo"
    """`gigpo` or `grpo`."""
    gamma: float = 0.95
    """Discount per step of the returns within step groups, in [0, 1]."""
    baseline: Literal["trajectory", "row"] = "trajectory"
    """What a group's mean runs over: its trajectories, or its rows, which weighs long trajectories more."""
    invalid_action_penalty: float = 0.1
    """Taken off the reward of a step whose completion held no valid action."""
    penalty_scope: Literal["reward", "row"] = "reward"
    """Whether the penalty is part of the reward and so of every return before it, or of that row alone."""
    gigpo: GiGPOConfig = field(default_factory=GiGPOConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)

    def __post_init__(self) -> None:
        """Check the name and the numbers."""
        one_of(ALGORITHMS, self.name, "algorithm.name")
        within(0.0, 1.0, self.gamma, "algorithm.gamma")
        at_least(0, self.invalid_action_penalty, "algorithm.invalid_action_penalty")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How completions are sampled."""

    temperature: float = 1.0
    """Temperature of rollouts; above 0, for a group needs differing members."""
    eval_temperature: float = 0.0
    """Temperature of evaluations; 0 takes the most probable token."""
    top_p: float = 1.0
    """Probability mass that rollouts sample from, in (0, 1]."""
    max_tokens: int = 128
    """Most tokens of a completion."""
    constrain: bool = False
    """Let the model write nothing but one of the admissible actions, where the environment names them."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        above(0, self.temperature, "generation.temperature")
        at_least(0, self.eval_temperature, "generation.eval_temperature")
        above(0, self.top_p, "generation.top_p")
        within(0.0, 1.0, self.top_p, "generation.top_p")
        at_least(1, self.max_tokens, "generation.max_tokens")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of one run.

    >>> config = RunConfig(env=EnvConfig(rollout=RolloutConfig(n=4, batch_size=32)))
    >>> config.env.rollout.groups_per_iteration, config.prompt_max_tokens
    (8, 1920)
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    seed: int = 0
    """Seed of the weights, the tasks, the sampling and the order of the rows."""
    log_level: str = "INFO"
    """`DEBUG` shows each step's full prompt and completion; also `INFO`, `WARNING`, `ERROR`."""
    output_dir: str = "out/run"
    """Folder for everything the run writes."""
    resume: str | None = None
    """Checkpoint to go on from; `auto` takes the newest one in `output_dir`, or starts afresh without one."""

    def __post_init__(self) -> None:
        """Check what depends on more than one component."""
        at_least(0, self.seed, "seed")
        one_of(LOG_LEVELS, self.log_level, "log_level")
        group_size, inner = self.env.rollout.n, self.algorithm.gigpo.inner_group_size
        if self.algorithm.name == "gigpo" and group_size % inner:
            raise ConfigError(
                "expected `env.rollout.n` to be a multiple of `algorithm.gigpo.inner_group_size`, "
                f"got {group_size} and {inner}; change one of them"
            )
        self._check_route()
        if self.prompt_max_tokens < 1 or self.row_max_tokens > self.train.max_length:
            raise ConfigError(
                f"expected prompt and completion to fit `train.max_length` = "
                f"{self.train.max_length}, got `env.prompt.max_tokens` = "
                f"{self.env.prompt.max_tokens} and `generation.max_tokens` = "
                f"{self.generation.max_tokens}; raise the first or lower the others"
            )

    def _check_route(self) -> None:
        if self.actor.weights_route != "cuda":
            return
        if self.model.use_lora:
            raise ConfigError(
                "expected another `actor.weights_route` than `cuda` with `model.use_lora`: an adapter is small; take `auto`"
            )
        if self.actor.engine != "vllm" and not self.actor.addresses:
            raise ConfigError(
                f"expected `actor.engine` vllm for `actor.weights_route` cuda, got {self.actor.engine}; take `auto`"
            )

    @property
    def prompt_max_tokens(self) -> int:
        """Most tokens of a prompt: the one given, or what a row has left beside the completion."""
        given = self.env.prompt.max_tokens
        return self.train.max_length - self.generation.max_tokens if given is None else given

    @property
    def row_max_tokens(self) -> int:
        """Most tokens a row can have."""
        return self.prompt_max_tokens + self.generation.max_tokens
