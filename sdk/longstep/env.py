"""`LLMAgentEnv`: any Gymnasium environment as one that is read as text and answered in text.

At every step the prompt is built afresh from task, memory, current observation and admissible actions, so that its
length does not grow with the episode. What the model writes is read by a parser; a completion that is no action is
never sent to the wrapped environment.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from longstep.actions import ActionParser
from longstep.arguments import (
    check_callable,
    check_count,
    check_mapping,
    check_methods,
    check_number,
    check_text,
)
from longstep.defaults import default_parser, default_prompt, find_max_steps, own_default
from longstep.errors import ConfigError, DataError, EnvError, PromptBudgetError
from longstep.five_tuple import read_reset, read_step, read_success
from longstep.memory import Memory, WindowMemory
from longstep.observations import IMAGE_PLACEHOLDER, observation_images, observation_to_text
from longstep.passthrough import PassThroughEnv
from longstep.prompt import PromptTemplate
from longstep.reading import invalid
from longstep.spaces import TextSpace
from longstep.state_key import KEY_SIZE_BYTES, StateKey
from longstep.state_key import state_key as default_state_key
from longstep.text_actions import admissible_texts, decode_action
from longstep.types import Action, Prompt

__all__ = ["LLMAgentEnv"]


class LLMAgentEnv(PassThroughEnv):
    """An environment whose observation is the prompt's text and whose action is the model's completion.

    The info of `reset` and `step` holds, beside the wrapped environment's own keys (ours win where names collide):
    `prompt` (Prompt), `observation` (as the wrapped environment returned it; a copy where it could change), `admissible_actions` (list of str, None
    when anything may be said), `allowed_completions` (the completions that are read as these actions, in their order,
    for constrained decoding; None when there is no such list), `state_key` (16 bytes), `task_description`, `step`
    (steps taken). After a step also: `action`, `action_valid`, `action_reason`, `raw_reward`, `success` (whether the
    environment said so last, in `success`, `is_success` or `won`), `time_limit` (`max_steps` ended the episode), and
    where no next prompt fits the token budget, so that the episode is truncated, `over_budget` and `budget_error`.

    An invalid action leaves the observation as it was, counts as a step and earns `-invalid_action_penalty`; its info
    has none of the wrapped environment's own keys, since that was not asked.

    Public attributes that this class lacks are read from the wrapped environment, which is `env`.

    >>> env = LLMAgentEnv("longstep/KeyDoor-v0", memory=WindowMemory(2))
    >>> text, info = env.reset(seed=1)
    >>> text, reward, terminated, truncated, info = env.step("fly")
    >>> info["action_valid"], info["action_reason"]
    (False, "'fly' is not admissible now")
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any] | str,
        *,
        memory: Memory | None = None,
        prompt: PromptTemplate | None = None,
        parser: ActionParser | None = None,
        state_key: StateKey | None = None,
        max_steps: int | None = None,
        task_description: str | None = None,
        invalid_action_penalty: float | None = None,
        reward_scale: float | None = None,
        observation_text: Callable[[Any], str] | None = None,
    ) -> None:
        """Args:
        env: The environment, or the id of a registered one. Around another LLMAgentEnv, what is None here is as it is
            there (with a copy of its memory); the two then share the environment inside.
        memory: Belongs to this instance from now on. None: the environment's `default_memory`, else WindowMemory(2).
        prompt: None: the environment's `default_prompt`, else a plain one that says how the parser is answered.
        parser: None: the environment's `default_parser`, else, settled at the first reset, ChoiceParser where the
            environment names admissible actions and TagParser where it does not.
        state_key: Gives 16 bytes for an observation. None: `longstep.state_key.state_key`.
        max_steps: Steps after which the episode is truncated. None: the environment's own limit, when it tells one.
        task_description: What is to be done. None: `info["task_description"]` of the environment's reset.
        invalid_action_penalty: Taken from the reward at an invalid action, at least 0. None: 0.
        reward_scale: Factor of the reward; `raw_reward` stays. None: 1.
        observation_text: Text of an observation, with `<image>` where its images belong. None: `observation_to_text`.
        """
        if isinstance(env, str):
            from longstep.registration import make

            env = make(env)
        inner = env if isinstance(env, LLMAgentEnv) else None
        raw = inner.env if inner is not None else _check_raw(env)

        def setting(name: str, given: Any, default: Any) -> Any:
            if given is not None:
                return given
            return default if inner is None else inner._setting(name)

        self.env: gymnasium.Env[Any, Any] = raw
        if memory is None:
            memory = own_default(raw, "memory") if inner is None else copy.deepcopy(inner.memory)
        self.memory: Memory = _check_memory(WindowMemory() if memory is None else memory)
        self.prompt: PromptTemplate | None = setting("prompt", prompt, own_default(raw, "prompt"))
        self.parser: ActionParser | None = setting("parser", parser, own_default(raw, "parser"))
        self.state_key: StateKey = setting("state_key", state_key, default_state_key)
        self.max_steps: int | None = setting("max_steps", max_steps, find_max_steps(raw))
        self.task_description: str | None = setting("task_description", task_description, None)
        self.invalid_action_penalty: float = setting(
            "invalid_action_penalty", invalid_action_penalty, 0.0
        )
        self.reward_scale: float = setting("reward_scale", reward_scale, 1.0)
        self.observation_text: Callable[[Any], str] = setting(
            "observation_text", observation_text, observation_to_text
        )
        self._check_settings()
        if self.observation_text is not observation_to_text:
            self.memory.observation_text = self.observation_text
        self.observation_space = TextSpace()
        self.action_space = TextSpace()
        self._spec: EnvSpec | None = None
        self._settled: set[str] = set()
        self._in_episode = False
        self._num_steps = 0

    def _setting(self, name: str) -> Any:
        """A setting as it was made, without what the first reset settled."""
        return None if name in self._settled else getattr(self, name)

    def _check_settings(self) -> None:
        check_count("max_steps", self.max_steps, 1, optional=True)
        if self.prompt is not None:
            check_methods("prompt", self.prompt, "a PromptTemplate", ("build",))
        if self.parser is not None:
            check_methods("parser", self.parser, "a parser such as TagParser()", ("parse",))
        check_callable("state_key", self.state_key)
        check_callable("observation_text", self.observation_text)
        check_text("task_description", self.task_description, optional=True)
        check_number("invalid_action_penalty", self.invalid_action_penalty)
        check_number("reward_scale", self.reward_scale)
        if not 0.0 <= self.invalid_action_penalty < math.inf:
            raise ConfigError(
                f"expected a finite `invalid_action_penalty` of at least 0, got {self.invalid_action_penalty}; "
                "it is subtracted from the reward"
            )
        if not math.isfinite(self.reward_scale):
            raise ConfigError(f"expected a finite `reward_scale`, got {self.reward_scale}")

    # -- the episode --------------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode: the first prompt's text, and info.

        Args:
            seed: Seed of the wrapped environment, at least 0; None goes on with its random stream.
            options: Options of the wrapped environment's reset.
        """
        check_count("seed", seed, 0, optional=True)
        check_mapping("options", options, optional=True)
        seed = None if seed is None else int(seed)  # Gymnasium knows no numpy integers
        self._in_episode = False
        result = self.env.reset(seed=seed, options=options)
        observation, self._env_info = read_reset(self.env, result)
        self._observation = _own(observation)
        self._num_steps = 0
        self._success = bool(read_success(self._env_info))
        self._task = self.task_description
        if self._task is None:
            self._task = str(self._env_info.get("task_description", ""))
        self._admissible = admissible_texts(self.env, self._env_info)
        self._settle()
        self._ask_memory(self.memory.reset)
        info = {**self._env_info, **self._state_info()}
        info["prompt"] = self._build_prompt()
        self._in_episode = True
        return info["prompt"].text, info

    def _settle(self) -> None:
        """Choose parser and prompt where none was given, now that the environment has shown what it tells."""
        if self.parser is None:
            self.parser = default_parser(self._admissible)
            self._settled.add("parser")
        if self.prompt is None:
            self.prompt = default_prompt(self.env, self.parser, self._admissible)
            self._settled.add("prompt")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a completion as the model wrote it: the next prompt's text, reward, terminated, truncated, info.

        Raises:
            EnvError: No episode is going on, the wrapped environment broke the Gymnasium contract, or the memory
                raised. The episode is over then; `reset` begins a new one.
        """
        if not self._in_episode or self.parser is None:
            raise EnvError(
                "expected `reset` before `step`, got `step` without a running episode; call `reset` first"
            )
        if not isinstance(cast(Any, action), str):
            raise ConfigError(
                f"expected the completion's text as `action`, got {type(action).__name__}"
            )
        self._in_episode = False  # unless this step ends well
        before = self._observation
        read, raw_action = self._read(action)
        raw_reward, terminated, truncated, env_info = 0.0, False, False, {}
        if read.valid:
            result = read_step(self.env, self.env.step(raw_action))
            self._observation, self._env_info = _own(result.observation), result.info
            raw_reward, terminated, truncated = result.reward, result.terminated, result.truncated
            env_info = result.info
            self._admissible = admissible_texts(self.env, env_info)
            self._success = bool(read_success(env_info))
            reward = raw_reward * self.reward_scale
        else:
            self._observation = copy.deepcopy(before)  # what was returned is never returned again
            reward = -self.invalid_action_penalty
        self._num_steps += 1
        at_limit = self.max_steps is not None and self._num_steps >= self.max_steps
        truncated = truncated or (at_limit and not terminated)
        info: dict[str, Any] = {
            **env_info,
            **self._state_info(),
            "action": read.text,
            "action_valid": read.valid,
            "action_reason": read.reason,
            "raw_reward": raw_reward,
            "success": self._success,
            "time_limit": at_limit and truncated and not terminated,
        }
        done = terminated or truncated
        # The memory gets an info of its own: what it does to it must not reach the caller.
        self._ask_memory(self.memory.update, before, read.text, raw_reward, done, dict(info))
        try:
            info["prompt"] = self._build_prompt()
        except PromptBudgetError as error:
            # The step was taken and its reward is real; only the next prompt cannot be.
            info |= {"prompt": Prompt(messages=()), "over_budget": True, "budget_error": str(error)}
            truncated, done = not terminated, True
        self._in_episode = not done
        return info["prompt"].text, reward, terminated, truncated, info

    def _read(self, completion: str) -> tuple[Action, Any]:
        """The action, and what the wrapped environment takes for it."""
        assert self.parser is not None
        action = self.parser.parse(completion, self._admissible)
        if not action.valid:
            return action, None
        raw_action, problem = decode_action(self.env, self._env_info, action.text)
        return (invalid(action.text, problem) if problem else action), raw_action

    def _state_info(self) -> dict[str, Any]:
        """What both `reset` and `step` tell of the current state."""
        constraint = getattr(self.parser, "constraint", None)
        key: Any = self.state_key(self._observation)
        if not isinstance(key, bytes) or len(key) != KEY_SIZE_BYTES:
            raise DataError(
                f"expected {KEY_SIZE_BYTES} bytes from `state_key`, got {key!r:.100}; "
                "hash what you return with longstep.state_key.state_key"
            )
        return {
            "observation": self._observation,
            "admissible_actions": None if self._admissible is None else list(self._admissible),
            "allowed_completions": constraint(self._admissible) if constraint else None,
            "state_key": key,
            "task_description": self._task,
            "step": self._num_steps,
        }

    def _build_prompt(self) -> Prompt:
        assert self.prompt is not None
        text: Any = self._ask_memory(self.memory.get_memory_text)
        if not isinstance(text, str):
            raise DataError(
                f"expected a str from `get_memory_text` of {type(self.memory).__name__}, got "
                f"{type(text).__name__} after step {self._num_steps}; return the text for the prompt"
            )
        get_images = getattr(self.memory, "get_images", None)
        shown = self.observation_text(self._observation)
        return self.prompt.build(
            task_description=self._task or "",
            current_observation=shown,
            memory=text,
            admissible_actions=self._admissible,
            step=self._num_steps,
            max_steps=self.max_steps,
            images=observation_images(self._observation) if IMAGE_PLACEHOLDER in shown else (),
            memory_images=self._ask_memory(get_images) if get_images else (),
        )

    def _ask_memory(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as error:
            raise EnvError(
                f"expected `{method.__name__}` of the memory {type(self.memory).__name__} to succeed, got "
                f"{type(error).__name__}: {error} at step {self._num_steps}; correct the memory"
            ) from error

    # -- copies of itself ---------------------------------------------------------------------------------------------

    @property
    def spec(self) -> EnvSpec | None:
        """How to make one like this, with `spec.make()`.

        Of an environment that `longstep.make` or Gymnasium made, a new one; of one without a spec, a copy.
        """
        return self._spec or self._derive_spec()

    @property
    def has_own_spec(self) -> bool:
        """True when `make` made it, False when `spec` is derived from the wrapped environment."""
        return self._spec is not None

    @spec.setter
    def spec(self, value: EnvSpec | None) -> None:  # type: ignore[override]
        self._spec = value

    def _around(self, env: gymnasium.Env[Any, Any]) -> LLMAgentEnv:
        """Another environment with the settings of this one, and a copy of its memory."""
        return LLMAgentEnv(
            env,
            memory=copy.deepcopy(self.memory),
            prompt=self._setting("prompt"),
            parser=self._setting("parser"),
            state_key=self.state_key,
            max_steps=self.max_steps,
            task_description=self.task_description,
            invalid_action_penalty=self.invalid_action_penalty,
            reward_scale=self.reward_scale,
            observation_text=self.observation_text,
        )

    def _derive_spec(self) -> EnvSpec:
        inner, raw, around = self.env.spec, self.env, self._around

        def twin(**kwargs: Any) -> LLMAgentEnv:
            if inner is not None:
                return around(inner.make(**kwargs))
            env = copy.deepcopy(raw)
            if kwargs.get("render_mode") is not None:
                env.unwrapped.render_mode = kwargs["render_mode"]
            return around(env)

        return EnvSpec(
            id=inner.id if inner is not None else type(cast(Any, raw.unwrapped)).__name__,
            entry_point=twin,
            nondeterministic=inner.nondeterministic if inner is not None else False,
            order_enforce=False,
            disable_env_checker=True,
        )


def _own(observation: Any) -> Any:
    """The observation, copied where the environment could write over it: many return one buffer again and again."""
    if isinstance(observation, np.ndarray):
        array = cast("NDArray[Any]", observation)
        return copy.deepcopy(array) if array.dtype.hasobject else array.copy()
    if isinstance(observation, list | dict | set | tuple | bytearray):
        return copy.deepcopy(cast(Any, observation))
    return observation


def _check_raw(env: Any) -> gymnasium.Env[Any, Any]:
    if not isinstance(env, gymnasium.Env) or isinstance(cast(Any, env).unwrapped, LLMAgentEnv):
        raise ConfigError(
            f"expected a gymnasium.Env or the id of one as `env`, got {env!r:.200}; Gymnasium's wrappers belong "
            "around the environment inside, not around an LLMAgentEnv"
        )
    return cast("gymnasium.Env[Any, Any]", env)


def _check_memory(memory: Any) -> Memory:
    missing = [name for name in ("update", "get_memory_text", "reset") if not hasattr(memory, name)]
    if missing or isinstance(memory, type):
        raise ConfigError(
            f"expected an instance of a Memory as `memory`, got {memory!r:.200}; "
            "subclass longstep.Memory and pass one of its instances"
        )
    return memory
