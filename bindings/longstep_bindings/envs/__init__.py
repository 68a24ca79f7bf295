"""Environments served from other processes.

`RemoteVectorEnv` runs environments in worker processes of this machine, or uses those of an `EnvServer`, which serves
them to other machines. `EnvSpec` says how a worker makes an environment.
"""

from typing import TYPE_CHECKING, Any

__all__ = ["EnvServer", "EnvSpec", "RemoteVectorEnv"]

_HOMES = {"EnvServer": "server", "EnvSpec": "spec", "RemoteVectorEnv": "client"}

if TYPE_CHECKING:
    from longstep_bindings.envs.client import RemoteVectorEnv
    from longstep_bindings.envs.server import EnvServer
    from longstep_bindings.envs.spec import EnvSpec


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: a worker needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
