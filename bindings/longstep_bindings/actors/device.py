"""Weights from a GPU's memory to actors, by vLLM's own weight-transfer API (NCCL or CUDA IPC).

vLLM moves the bytes; what it needs beside is somebody who calls four methods at the receiving side. `ActorWeightSyncClient`
does that over the actors' RPC, and is what vLLM calls a `VLLMWeightSyncClient`. Trainer side, with vLLM installed:

    client = ActorWeightSyncClient(pool)
    engine = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(master_address=..., master_port=..., world_size=1 + pool.num_actors, rank=0),
        client=client, source=ModuleSource(model))
    engine.send_weights()

`ActorPolicy.update_weights(model, version, route="cuda")` does this. CUDA IPC handles hold Python types; they travel as
names out of a fixed table, so nothing is pickled.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from longstep.errors import ConfigError, ProtocolError, UnsupportedTypeError, require

if TYPE_CHECKING:
    from longstep_bindings.actors.pool import ActorPool

__all__ = [
    "DEVICE_METHODS",
    "ActorWeightSyncClient",
    "DeviceSender",
    "device_info",
    "read_device_info",
]

DEVICE_METHODS = (
    "init_weight_transfer",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
_MARK = "longstep.type"
_DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int8",
    "uint8",
)


class ActorWeightSyncClient:
    """vLLM's four calls, made at every actor of a pool that is ready, side by side."""

    def __init__(self, pool: ActorPool, *, timeout_s: float = 600.0) -> None:
        """Args:
        pool: Whose actors receive.
        timeout_s: How long each call may take.
        """
        self._pool = pool
        self._timeout_s = timeout_s
        self.version = 0
        """What the weights that are sent next will be called."""

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Have the actors meet the sender; each gets its own ranks of an NCCL group."""
        infos: list[Any] = []
        for index in range(self._pool.num_actors):
            info = device_info(dict(init_info))
            if "rank_offset" in info:
                # The group is the sender and then the actors, one after the other, each with as many ranks.
                ranks = (info["world_size"] - info["rank_offset"]) // self._pool.num_actors
                info["rank_offset"] += index * ranks
            infos.append(info)
        self._pool.call_all("init_weight_transfer", infos, timeout_s=self._timeout_s)

    def start_weight_update(self) -> None:
        """Have the actors end what runs and hold back what is new."""
        self._call("start_weight_update", None)

    def update_weights(self, update_info: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Have the actors receive what is being sent."""
        self._call("update_weights", device_info(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have the actors serve the new weights."""
        version = self.version if weight_version is None else int(weight_version)
        self._call("finish_weight_update", {"version": version, "token": f"device-{version}"})

    def _call(self, method: str, value: Any) -> None:
        values = [value] * self._pool.num_actors
        self._pool.call_all(method, values, timeout_s=self._timeout_s)


class DeviceSender:
    """A model's weights, sent from its GPU to every actor of a pool. Needs vLLM in the trainer's interpreter too."""

    def __init__(self, pool: ActorPool, model: Any) -> None:
        """Meet the actors in an NCCL group, one rank for each of them beside this process.

        Raises:
            MissingExtraError: vLLM is not installed here.
            ConfigError: The model is not on a GPU, or an actor's engine takes no weights from one.
        """
        if not str(getattr(model, "device", "cpu")).startswith("cuda"):
            raise ConfigError(
                f'expected a model on a GPU for route="cuda", got one on {getattr(model, "device", "no device")}; '
                'use route="auto"'
            )
        engines = {description.engine for description in pool.descriptions}
        if engines - {"vllm"}:
            raise ConfigError(
                f'expected actors of the engine `vllm` for route="cuda", got {sorted(engines)}; use route="auto"'
            )
        base = require(
            "vllm.distributed.weight_transfer.base", extra="vllm", needed_by='route="cuda"'
        )
        factory = require(
            "vllm.distributed.weight_transfer.factory", extra="vllm", needed_by='route="cuda"'
        )
        nccl = require(
            "vllm.distributed.weight_transfer.nccl_engine", extra="vllm", needed_by='route="cuda"'
        )
        self.model = model
        self._pool = pool
        self._client = ActorWeightSyncClient(pool)
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        info = nccl.NCCLTrainerInitInfo(
            master_address=socket.gethostbyname(socket.gethostname()),
            master_port=port,
            world_size=1 + pool.num_actors,
            rank=0,
        )
        self._engine = factory.WeightTransferTrainerFactory.trainer_init(
            info, client=self._client, source=base.ModuleSource(model)
        )

    def send(self, version: int) -> None:
        """Send the weights as `version`; returns once they serve."""
        self._client.version = version
        self._engine.send_weights()
        self._pool.updated_on_device(version)


def device_info(value: Any) -> Any:
    """What vLLM's trainer side gives, as plain values.

    Raises:
        UnsupportedTypeError: It holds something that is not in the table.
    """
    if isinstance(value, Mapping):
        return {str(key): device_info(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return {_MARK: "tuple", "of": [device_info(each) for each in value]}
    if isinstance(value, list):
        return [device_info(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    for name, known in _table().items():
        if value is known:
            return {_MARK: name}
    raise UnsupportedTypeError(
        f"expected plain values, dtypes and tensor types in a weight transfer's info, got {value!r:.100}"
    )


def read_device_info(value: Any) -> Any:
    """What `device_info` was given.

    Raises:
        ProtocolError: A name is not in the table.
    """
    if isinstance(value, list):
        return [read_device_info(each) for each in value]
    if not isinstance(value, dict):
        return value
    name = value.get(_MARK)
    if name is None:
        return {key: read_device_info(each) for key, each in value.items()}
    if name == "tuple":
        return tuple(read_device_info(each) for each in value["of"])
    if name not in _table():
        raise ProtocolError(f"expected a type of the table, got {name!r:.80}")
    return _table()[name]


def _table() -> dict[str, Any]:
    import torch

    return {
        "Tensor": torch.Tensor,
        "Parameter": torch.nn.Parameter,
        "UntypedStorage": torch.UntypedStorage,
        **{name: getattr(torch, name) for name in _DTYPES if hasattr(torch, name)},
    }
