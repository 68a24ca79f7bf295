"""The nouns of longstep: plain records that travel between environment, policy, rollout and credit.

Words: an *observation* is what the environment returned; a *prompt* is what the model reads at one step; a
*completion* is what it wrote; an *action* is what the parser read out of the completion. A *trajectory* belongs to one
task and one *episode group*; steps of a group that stand in the same state form a *step group*.

Records are frozen, slotted and keyword-only. They hold no behaviour beyond derived values, and no torch tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstep.errors import ConfigError

__all__ = [
    "Action",
    "Completion",
    "Dropped",
    "FinishReason",
    "GenerationRequest",
    "Message",
    "Prompt",
    "StepRecord",
    "StopReason",
    "Task",
    "Trajectory",
]


class StopReason(StrEnum):
    """Why a trajectory ended."""

    TERMINATED = "terminated"
    """The environment reached a terminal state: the task was solved or lost."""
    TRUNCATED = "truncated"
    """The environment itself cut the episode short; the last state is not terminal."""
    TIME_LIMIT = "time_limit"
    """`max_steps` of the rollout or of the wrapper was reached; the last state is not terminal."""
    BUDGET = "budget"
    """No prompt fits the token budget any more, or the episode's token allowance is used up."""
    INVALID_ACTION = "invalid_action"
    """More invalid actions in a row than the rollout allows."""
    ENV_FAILURE = "env_failure"
    """The environment raised, died or hung. Left out of every statistic."""
    POLICY_FAILURE = "policy_failure"
    """The policy could not answer. Left out of every statistic."""

    @property
    def is_failure(self) -> bool:
        """True when the trajectory says nothing about the policy and must not be trained on."""
        return self in (StopReason.ENV_FAILURE, StopReason.POLICY_FAILURE)

    @property
    def bootstraps(self) -> bool:
        """True when the value of the last state, not zero, follows the last reward."""
        return self in (StopReason.TRUNCATED, StopReason.TIME_LIMIT, StopReason.BUDGET)


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The model ended its turn, or a stop string or an allowed string was complete."""
    LENGTH = "length"
    """`max_tokens` was reached first."""
    CANCELLED = "cancelled"
    """The request was withdrawn."""
    ERROR = "error"
    """The engine failed; `Completion.error` says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to solve: an environment, a seed, options of its reset.

    >>> Task(env_id="longstep/KeyDoor-v0", seed=7).task_id
    'longstep/KeyDoor-v0#7'
    """

    env_id: str
    """Registered id of the environment."""
    seed: int
    """Seed of the environment's reset; every member of an episode group uses the same one."""
    options: Mapping[str, Any] | None = None
    """`options` of the environment's reset."""
    name: str = ""
    """A readable name; empty means `env_id#seed`."""

    @property
    def task_id(self) -> str:
        """The name, or one made of the environment and the seed."""
        return self.name or f"{self.env_id}#{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message. Reads as an attribute or, as OpenAI-style code expects, as an item.

    >>> message = Message(role="user", content="go north")
    >>> message["role"], dict(message)
    ('user', {'role': 'user', 'content': 'go north'})
    """

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str
    """The text. The position of an image is marked by the prompt's image placeholder."""

    def __getitem__(self, key: str) -> str:
        """`role` or `content`."""
        if key == "role":
            return self.role
        if key == "content":
            return self.content
        raise KeyError(key)

    def keys(self) -> Iterator[str]:
        """The two keys, so that `dict(message)` gives an OpenAI-style message."""
        return iter(("role", "content"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """What the token budget took out of one part of a prompt."""

    part: str
    """Name of the placeholder, such as `memory`."""
    how: str
    """`removed` or `shortened`."""
    num_characters: int
    """Characters taken out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the model reads at one step."""

    messages: tuple[Message, ...]
    """Chat messages, in order."""
    images: tuple[NDArray[np.uint8], ...] = ()
    """Images [H, W, 3], in the order of their placeholders."""
    num_tokens: int | None = None
    """Length under the template's `count_tokens`; None when the template has no budget."""
    dropped: tuple[Dropped, ...] = ()
    """What the budget removed or shortened; empty when everything fitted."""

    @property
    def text(self) -> str:
        """The contents of all messages, joined by blank lines."""
        return "\n\n".join(message.content for message in self.messages)

    def __eq__(self, other: object) -> bool:
        """True for a prompt with the same messages, images, length and cuts."""
        if not isinstance(other, Prompt):
            return NotImplemented
        same = (self.messages, self.num_tokens, self.dropped)
        return (
            same == (other.messages, other.num_tokens, other.dropped)
            and len(self.images) == len(other.images)
            and all(map(np.array_equal, self.images, other.images))
        )

    def __hash__(self) -> int:
        """Equal prompts hash alike; the images play no part."""
        return hash((self.messages, self.num_tokens, self.dropped))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt for a policy, with how to sample from it."""

    request_id: str
    """Unique within a policy; results are matched by it, never by order."""
    prompt: Prompt
    max_tokens: int = 256
    """Most tokens to sample."""
    temperature: float = 1.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """Strings that end the completion; they stay out of its text."""
    allowed: tuple[str, ...] | None = None
    """When given, the completion is exactly one of these strings, and log-probabilities are those of the
    distribution restricted to them."""
    seed: int = 0
    """Seed of this request's own random stream."""
    trajectory_id: str = ""
    """Requests of one trajectory go to the same actor where that helps."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for one text where several are meant; its letters would be taken for them."""
        for name, texts in (("stop", self.stop), ("allowed", self.allowed)):
            if isinstance(texts, str):
                raise ConfigError(
                    f"expected a tuple of texts as `{name}`, got the text {texts!r:.80}; write ({texts!r:.80},)"
                )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """What the model wrote for one request. Equal to itself alone, as all that holds arrays here."""

    request_id: str
    prompt_token_ids: NDArray[np.int32]
    """[P] ids the model read, without padding."""
    token_ids: NDArray[np.int32]
    """[C] ids that were sampled, including the end-of-turn token when it was sampled."""
    logprobs: NDArray[np.float32]
    """[C] natural log-probability of each sampled id under the distribution it was sampled from: temperature and
    constraint applied."""
    text: str
    finish_reason: FinishReason
    policy_version: int
    """Number of weight updates the sampling weights had seen."""
    allowed_token_ids: tuple[NDArray[np.int32], ...] | None = None
    """[C] arrays: the ids that were allowed at each sampled position; None without a constraint."""
    error: str | None = None
    """What went wrong; None unless `finish_reason` is `error`."""
    resubmitted: int = 0
    """Times that the request was handed over again because what was to answer it had died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the parser read out of a completion."""

    text: str
    """The action to execute. For an invalid completion, the beginning of what was read; it is not sent anywhere."""
    valid: bool
    """True when the completion had the required form and, if admissible actions were given, named one."""
    reason: str = ""
    """Why the action is invalid; empty when it is valid."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecord:
    """One step of a trajectory: what was read, written, done and received."""

    step: int
    """Position in the trajectory, from 0."""
    prompt: Prompt
    completion: Completion
    action: Action
    observation: Any
    """What the environment had returned before this step, untouched: the state the action was chosen in."""
    state_key: bytes
    """16 bytes: identity of `observation`, the anchor for step groups."""
    reward: float
    """Reward used for credit: scaled, and with the penalty for an invalid action."""
    raw_reward: float
    """Reward as the environment gave it."""
    terminated: bool
    truncated: bool
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Wall time of this step by part: `generate`, `env`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One episode of one member of an episode group."""

    trajectory_id: str
    task: Task
    group_id: int
    """Index of the episode group within the batch."""
    member: int
    """Index within the group, from 0."""
    steps: tuple[StepRecord, ...]
    stop_reason: StopReason
    success: bool
    """The environment said that the task was solved."""
    error: str | None = None
    """What failed; None unless `stop_reason.is_failure`."""

    @property
    def episode_return(self) -> float:
        """Undiscounted sum of raw rewards."""
        return float(sum(step.raw_reward for step in self.steps))

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that made one of its completions; None without a step."""
        return min((step.completion.policy_version for step in self.steps), default=None)

    @property
    def num_steps(self) -> int:
        """Number of steps taken."""
        return len(self.steps)


def require_unique_ids(requests: Sequence[GenerationRequest]) -> None:
    """Raise when two requests share an id: their results could not be told apart."""
    from longstep.errors import ConfigError

    ids = [request.request_id for request in requests]
    if len(set(ids)) != len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise ConfigError(
            f"expected unique request ids, got `{twice}` twice; give each request its own id"
        )
