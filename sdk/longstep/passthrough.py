"""What a wrapper answers from the wrapped environment: Gymnasium's interface beyond `reset` and `step`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

__all__ = ["PassThroughEnv"]


class PassThroughEnv(gymnasium.Env[str, str]):
    """A text environment around `env`, whose public attributes are read as if they were its own, at the time of reading.

    It is an environment of its own, not a `gymnasium.Wrapper`: `unwrapped` is itself, so that Gymnasium's checker
    judges what the agent meets.
    """

    env: gymnasium.Env[Any, Any]
    """The wrapped environment."""

    def render(self) -> Any:
        """The wrapped environment's picture."""
        return self.env.render()

    def close(self) -> None:
        """Close the wrapped environment."""
        self.env.close()

    @property
    def metadata(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped environment's."""
        return self.env.metadata

    @property
    def render_mode(self) -> str | None:  # type: ignore[override]
        """The wrapped environment's."""
        return self.env.render_mode

    @property
    def np_random(self) -> np.random.Generator:
        """The wrapped environment's random stream."""
        return self.env.np_random

    @np_random.setter
    def np_random(self, value: np.random.Generator) -> None:
        self.env.np_random = value

    @property
    def np_random_seed(self) -> int:
        """The wrapped environment's seed."""
        return self.env.np_random_seed

    @property
    def _np_random(self) -> np.random.Generator | None:  # type: ignore[override]
        return self.env.unwrapped._np_random  # what Gymnasium's checker reads

    def __getattr__(self, name: str) -> Any:
        """A public attribute of the wrapped environment, read now."""
        if name.startswith("_") or name == "env":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.env.get_wrapper_attr(name)

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether the attribute exists here or in the wrapped environment."""
        return hasattr(self, name) or self.env.has_wrapper_attr(name)

    def get_wrapper_attr(self, name: str) -> Any:
        """The attribute, from here or from the wrapped environment."""
        return getattr(self, name) if hasattr(self, name) else self.env.get_wrapper_attr(name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set the attribute where it exists, here or inside; with `force`, here if it exists nowhere."""
        own = name in self.__dict__ or hasattr(type(self), name)
        if not own and self.env.set_wrapper_attr(name, value, force=False):
            return True
        if own or force:
            setattr(self, name, value)
        return own or force

    def __str__(self) -> str:
        """`<LLMAgentEnv<...>>` around the wrapped environment's name."""
        return f"<{type(self).__name__}{self.env}>"

    __repr__ = __str__
