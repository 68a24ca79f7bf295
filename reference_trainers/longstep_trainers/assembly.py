"""From settings to objects: the agent's environments, the model and its tokenizer."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

from longstep.env import LLMAgentEnv
from longstep.errors import ConfigError
from longstep.memory import Memory, RetrievalMemory, SimpleMemory, WindowMemory
from longstep.prompt import PromptTemplate
from longstep.registration import make
from longstep.vector import GroupVectorEnv
from longstep_trainers.config import MemoryConfig, RunConfig

__all__ = ["AgentEnvFactory", "agent_envs", "prepare_model"]


class AgentEnvFactory:
    """Makes the environments of a run; each call gives a new one."""

    def __init__(self, config: RunConfig, tokenizer: Any | None = None) -> None:
        """Args:
        config: Settings of the run.
        tokenizer: Counts the tokens of prompts; None makes prompts without a budget.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._prompt: PromptTemplate | None = None
        # Members of a group read the same prompts again and again.
        self._count_tokens = lru_cache(maxsize=1 << 16)(self._count)

    def __call__(self) -> LLMAgentEnv:
        """A new environment, wrapped as the settings say."""
        env_config = self._config.env
        in_reward = self._config.algorithm.penalty_scope == "reward"
        penalty = self._config.algorithm.invalid_action_penalty if in_reward else 0.0
        settings = {
            "max_steps": env_config.max_steps,
            "memory": _memory(env_config.memory),
            "invalid_action_penalty": penalty,
            "reward_scale": env_config.reward_scale,
        }
        given = {name: value for name, value in settings.items() if value is not None}
        env = make(env_config.name, **{**env_config.kwargs, **given})
        if self._prompt is None:
            self._prompt = self._template(env)
        env.prompt = self._prompt
        return env

    def _template(self, env: LLMAgentEnv) -> PromptTemplate:
        """The environment's own template with what the settings change, under the token budget."""
        if env.prompt is None:
            env.reset(seed=0)  # a plain template depends on what the first reset tells
        own, given = env.prompt, self._config.env.prompt
        assert own is not None
        system = own.system if given.system is None else given.system
        user = own.user if given.user is None else given.user
        first_user = own.first_user if given.user is None else None
        if self._tokenizer is None:
            return PromptTemplate(system, user, first_user=first_user, drop_order=own.drop_order)
        return PromptTemplate(
            system,
            user,
            first_user=first_user,
            max_tokens=self._config.prompt_max_tokens - self._num_template_tokens(bool(system)),
            count_tokens=self._count_tokens,
            drop_order=own.drop_order,
        )

    def _count(self, text: str) -> int:
        assert self._tokenizer is not None
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _num_template_tokens(self, has_system: bool) -> int:
        """Tokens that the chat template puts around the contents, with one to spare at each seam."""
        assert self._tokenizer is not None
        roles = ["system", "user"] if has_system else ["user"]
        text = self._tokenizer.apply_chat_template(
            [{"role": role, "content": ""} for role in roles],
            add_generation_prompt=True,
            tokenize=False,
        )
        return self._count_tokens(text) + len(roles)


def agent_envs(config: RunConfig, tokenizer: Any) -> GroupVectorEnv:
    """The environments of a run. Two of these can be used by two threads: each has a tokenizer of its own."""
    make_env = AgentEnvFactory(config, copy.deepcopy(tokenizer))
    return GroupVectorEnv(make_env, config.env.rollout.batch_size)


def _memory(config: MemoryConfig) -> Memory | None:
    if config.name is None:
        return None
    return {
        "simple": SimpleMemory,
        "window": lambda: WindowMemory(config.window_size),
        "retrieval": lambda: RetrievalMemory(config.top_k),
    }[config.name]()


def prepare_model(config: RunConfig) -> tuple[Any, Any]:
    """Model and tokenizer, on the device that is there, with an adapter where the settings ask for one."""
    if config.model.is_embedded:
        model, tokenizer = _embedded(config)
    else:
        from longstep_trainers.model import load_model

        model, tokenizer = load_model(config.model.model_path, dtype=config.model.dtype)
    if config.model.use_lora:
        from longstep_trainers.model import apply_lora

        model = apply_lora(
            model,
            r=config.model.lora_r,
            alpha=config.model.lora_alpha,
            dropout=config.model.lora_dropout,
            target_modules=config.model.lora_target_modules,
            seed=config.seed,
        )
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and config.train.max_length > limit:
        raise ConfigError(
            f"expected `train.max_length` of at most {limit}, which is what the model reads, got "
            f"{config.train.max_length}; lower it"
        )
    return model, tokenizer


def _embedded(config: RunConfig) -> tuple[Any, Any]:
    """A model of the settings' size whose vocabulary is what its environment says."""
    import torch

    from longstep_trainers.embedded import build_embedded, corpus_of

    env = AgentEnvFactory(config)()
    try:
        corpus = corpus_of(env, num_episodes=64)
    finally:
        env.close()
    size = config.model.embedded
    model: Any
    model, tokenizer = build_embedded(
        corpus.texts,
        actions=corpus.actions,
        hidden_size=size.hidden_size,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        max_length=config.train.max_length,
        seed=config.seed,
    )
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer
